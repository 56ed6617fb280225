"""Chapter 12. Command line of the trainer: what a user does with a configuration before it runs, and with a run afterwards.

`course` finds the commands by this file's name (`shared.course.cli`). Torch is imported when one of them runs.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shared.course import terminal
from shared.course.click_group import TRAINER, CourseCommand, examples
from shared.course.errors import CourseError, SettingError
from shared.course.importing import all_stays
from shared.trainer.export_command import export


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples(
        "course plan chapters/12_grpo/laptop.yaml",
        "course plan chapters/12_grpo/two_3090s.yaml --hardware 2x3090-nvlink",
        "course plan chapters/12_grpo/two_3090s.yaml data.seq=2048 --layout fsdp2 --hardware 2x3090 --json",
        "course plan chapters/12_grpo/two_3090s.yaml --hardware 8x3090 --search",
        "course plan chapters/12_grpo/two_3090s.yaml --hardware 2x3090 --budget 8h",
    ),
)
@click.argument("config", metavar="CONFIG", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, metavar="[key=value]...")
@click.option("--layout", help="In place of the file's degrees, such as dp2_tp2.")
@click.option("--hardware", help="Machines x cards x device, such as 2x3090, 2x8xH100 or cpu.  [default: what is here]")
@click.option("--model", help="A folder with a model, or a published one's name, where start_from is not there.")
@click.option("--search", is_flag=True, help="Plan every layout of the hardware's cards, and list the fastest that fit.")
@click.option("--budget", metavar="TIME", help="Propose a model's size and tokens for so much time, such as 8h, 90m or 3d.")
@click.option("--json", "as_json", is_flag=True, help="All numbers, in bytes and seconds, for programs.")
def plan(
    config: Path, words: tuple[str, ...], layout: str | None, hardware: str | None, model: str | None, search: bool, budget: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Predict a run's memory by kind and rank, communication, FLOPs and time, and what limits it.

    Nothing is downloaded, built or trained. Exit code 0: it fits. 1: it does not.
    """
    if (search or budget) and (layout or (search and budget)):
        raise click.UsageError("--search and --budget choose the layout: give one of the three, --layout, --search or --budget.")
    with all_stays():
        from shared.trainer.planner import command

    console = terminal.open_console()
    if budget:
        sys.exit(command.run_budget(console, config, words, hardware, budget, as_json))
    if search:
        sys.exit(command.run_search(console, config, words, hardware, model, as_json))
    sys.exit(command.run_plan(console, config, words, layout, hardware, model, as_json))


@click.command(
    "eval",
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples(
        "course eval runs/laptop",
        "course eval runs/laptop --data notes.txt --data src",
        "course eval runs/laptop_sft --task sum --task my_task.yaml --samples 8",
        "course eval runs/laptop_sft --compare runs/laptop",
        "course eval FOLDER --lm-eval hellaswag,arc_easy --limit 200",
    ),
)
@click.argument("run", metavar="RUN")
@click.option("--task", "tasks", multiple=True, help="A built-in task, or a YAML file that describes one; may be given again.")
@click.option("--data", multiple=True, help="Bits per byte of this text: a file, a folder, or a data set of the hub; may be given again.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many items of each task.")
@click.option("--samples", type=click.IntRange(0, 10_000), help="Samples for each prompt, for pass@k.")
@click.option("--compare", metavar="RUN", help="Another model, with the paired difference between the two.")
@click.option("--lm-eval", "harness", metavar="NAMES", help="Tasks of lm-eval, with commas; it needs the network, or local tasks.")
@click.option("--include-path", help="A folder with tasks of your own for lm-eval.")
@click.option("--shots", type=click.IntRange(min=0), help="With --lm-eval, few-shot examples; else the task's file says how many.")
@click.option("--chat", is_flag=True, help="With --lm-eval, prompts are turns of a chat.")
@click.option("--output", help="The JSON file of the results; RUN/eval.json where it is not given.")
@click.option("--batch-tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens in a forward pass.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", show_default=True)
@click.option("--precision", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="Of the weights.")
def evaluate(
    run: str,
    tasks: tuple[str, ...],
    data: tuple[str, ...],
    limit: int | None,
    samples: int | None,
    compare: str | None,
    harness: str | None,
    include_path: str | None,
    shots: int | None,
    chat: bool,
    output: str | None,
    **opened: object,
) -> None:
    """Evaluate a run or any Hugging Face folder: bits per byte, multiple choice, exact match, pass@k.

    Without --task or --data it takes the built-in tasks, which need no download: held-out Python, its next line, and made instructions.
    """
    with all_stays():
        from shared.trainer.evaluation import command

    console, path = terminal.open_console(), Path(run).expanduser()
    place = Path(output).expanduser() if output else None
    if harness:
        if tasks or data or compare or samples is not None:
            raise click.UsageError("--lm-eval stands alone: give --task, --data, --samples and --compare in a command without it.")
        command.run_harness(console, path, harness.split(","), include_path, limit, shots, chat, place, **opened)
        return
    if include_path or shots is not None or chat:
        raise click.UsageError("--include-path, --shots and --chat are for --lm-eval: a task's own file says shots and chat.")
    found = command.tasks_of(tasks, data, limit, samples)
    command.evaluate_and_show(console, path, found, Path(compare).expanduser() if compare else None, place, **opened)


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples(
        "course twin chapters/12_grpo/two_3090s_qlora.yaml",
        "course twin chapters/12_grpo/two_3090s.yaml --layout tp2_sp --steps 10",
        "course twin my.yaml precision=float32",
    ),
)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Training steps.")
@click.option("--layout", default="", help="Such as fsdp2 or dp2_tp2, in place of the file's.")
@click.option("--output", type=click.Path(path_type=Path), help="Its folder.  [default: runs/twins/NAME]")
def twin(config: Path, words: tuple[str, ...], steps: int, layout: str, output: Path | None) -> int:
    """Dry-run a configuration: train a scaled-down twin of it for a few steps, on this machine's CPU.

    Mode, layout, adapter, quantization, optimizer, precision and recomputation are the file's. Sizes shrink, text is made on the spot, and
    a model to start from gets random weights, so nothing is downloaded.
    """
    from shared.trainer.launch.twin import run_twin

    if odd := [word for word in words if "=" not in word]:
        raise CourseError(f"{odd[0]!r} is not a setting: write key=value.")
    changes = dict(word.removeprefix("--").split("=", 1) for word in words)
    return run_twin(config, changes, output or Path("runs/twins") / config.stem, steps, layout, terminal.open_console())


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course rendezvous", "course rendezvous --address 192.168.1.10 --port 29400"),
)
@click.option("--address", default="127.0.0.1", show_default=True, help="Of this machine, by which the others reach it.")
@click.option("--port", type=click.IntRange(1, 65535), default=29400, show_default=True, help="What --rdzv-endpoint of torchrun ends in.")
def rendezvous(address: str, port: int) -> None:
    """Host the rendezvous of an elastic run, until Ctrl-C, on a machine that stays up.

    Every machine that reaches the address can join the run: give one of a network that is yours alone.
    """
    from shared.trainer.launch.elastic import hold_rendezvous

    terminal.open_console().print(f"Machines meet at {address}:{port}: torchrun --rdzv-endpoint {address}:{port} --rdzv-conf is_host=0")
    hold_rendezvous(address, port)


def answer_options(command: Callable) -> Callable:
    """The sampling options of a command that takes a run and `**drawn`."""
    share = click.FloatRange(min=0, min_open=True, max=1)
    options = (
        click.option("--system", help="A system prompt, before everything else."),
        click.option("--plain", is_flag=True, help="Leave out the model's chat template: it continues the text."),
        click.option("--temperature", type=click.FloatRange(min=0), default=0.7, show_default=True, help="0: greedy decoding."),
        click.option(
            "--top-k", type=click.IntRange(min=0), default=40, show_default=True, help="Sample among so many likeliest tokens; 0: all."
        ),
        click.option("--top-p", type=share, help="Nucleus sampling: the likeliest tokens that together have this probability."),
        click.option("--min-p", type=share, help="Exclude tokens below this share of the likeliest one's probability."),
        click.option("--repetition-penalty", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
                     help="Above 1, tokens that the text already has become less likely."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text; may be given several times."),
        click.option("--new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Maximum length of an answer."),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Random seed."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def answer_settings(drawn: dict[str, Any]) -> Any:
    """`shared.trainer.talk.chat.AnswerSettings` of the options' values. Raises SettingError, which names the option."""
    from shared.course.typed import configured
    from shared.trainer.talk.chat import AnswerSettings

    own = {name: drawn.pop(name) for name in ("new_tokens", "seed", "stop")}
    try:
        return configured(AnswerSettings, own | {"stop": list(own["stop"]), "drawing": drawn | {"top_k": drawn["top_k"] or None}})
    except SettingError as error:  # of what click lets through, such as nan
        raise SettingError(re.sub(r"^(?:drawing\.)?(\w+)", lambda name: f"--{name[1].replace('_', '-')}", str(error))) from None


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course chat runs/laptop_sft", "course chat runs/laptop --temperature 0", "course chat FOLDER --web"),
)
@click.argument("run", metavar="RUN")
@answer_options
@click.option("--web", is_flag=True, help="Chat in the browser, on a page that listens on localhost only.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Of that page; 0: any free one.")
def chat(run: str, system: str | None, plain: bool, web: bool, port: int, **drawn: Any) -> None:
    """Chat with the model of a run, or of any Hugging Face folder. A model without a chat template continues your text.

    /reset forgets what was said. Ctrl-D or Ctrl-C ends the conversation.
    """
    with all_stays():
        from shared.trainer.talk import chat as talking

    settings = answer_settings(drawn)
    if web:
        from shared.trainer.talk.server import serve

        serve(terminal.open_console(), talking.open_talk(Path(run).expanduser(), settings, system, plain), run, port)
    else:
        talking.talk(terminal.open_console(), run, system, settings, plain)


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course sample runs/laptop 'def mean('", "course sample runs/laptop_sft - --number 3 < question.txt"),
)
@click.argument("run", metavar="RUN")
@click.argument("prompt", metavar="PROMPT")
@click.option("--number", type=click.IntRange(min=1), default=1, show_default=True, help="Of answers, with an empty line between two.")
@answer_options
def sample(run: str, prompt: str, number: int, system: str | None, plain: bool, **drawn: Any) -> None:
    """Print what a run's model answers to one PROMPT, token by token, and nothing else. The prompt - is read from standard input.

    The prompt is a user's turn where the model has a chat template; --plain has it continued as text.
    """
    with all_stays():
        from shared.trainer.talk import chat as talking

    settings = answer_settings(drawn)
    talking.sample(run, sys.stdin.read() if prompt == "-" else prompt, number, system, settings, plain)


@click.command(cls=CourseCommand, section=TRAINER, epilog=examples("course runs", "course runs FOLDER"))
@click.argument("folder", metavar="[FOLDER]", default="runs", type=click.Path(path_type=Path))
def runs(folder: Path) -> None:
    """List the runs below a folder (default: `runs`): state, step, loss, speed, memory, layout."""
    from shared.trainer.reports.listing import list_runs

    list_runs(terminal.open_console(), folder.expanduser())


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course report runs/laptop runs/laptop-dp2", "course report runs/a runs/b runs/c --output page.html"),
)
@click.argument("folders", metavar="RUN RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="The page; comparison.html beside the first run unless given.")
def report(folders: tuple[Path, ...], output: Path | None) -> None:
    """Compare runs: results and settings that differ, and a page with their curves."""
    from shared.trainer.reports.side_by_side import report_runs

    folders = tuple(folder.expanduser() for folder in folders)
    report_runs(terminal.open_console(), folders, output or folders[0].resolve().parent / "comparison.html")


@click.command(
    "check-data",
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course check-data chats.jsonl", "course check-data pairs.parquet --model runs/laptop_sft --seq 1024"),
)
@click.argument("path", metavar="FILE")
@click.option("--as", "kind", type=click.Choice(["chats", "preferences", "tasks"]), help="What the records are; else by the first one.")
@click.option("--model", type=click.Path(path_type=Path), help="Tokenizer and chat template of this folder or run.")
@click.option("--template", help="chatml, or the file or folder of a chat template.")
@click.option("--seq", type=click.IntRange(min=1), help="Tokens of a row: how many records would be cut.")
@click.option("--show", "count", type=click.IntRange(min=0), default=3, show_default=True, help="Records to print as text.")
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Records to read.")
def check_data(path: str, kind: str | None, model: Path | None, template: str | None, seq: int | None, count: int, limit: int) -> None:
    """Look at a data file before training: what is trained on, which fields nothing reads, and what is refused.

    FILE is JSONL, CSV, Parquet, a folder of them, a saved dataset or one of the hub. Exit code 1: some records would be refused.
    """
    with all_stays():
        from shared.trainer import data_check

    found_kind, found = data_check.check_data(path, kind, model, template, count, limit)
    data_check.show(terminal.open_console(), path, found_kind, found, seq, guessed=kind is None)
    sys.exit(1 if found.refused else 0)


COMMANDS = (plan, twin, chat, sample, evaluate, export, check_data, runs, report, rendezvous)
