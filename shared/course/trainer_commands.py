"""Floor 0. Commands of the trainer: what a user does with a configuration before it runs, and with a run afterwards."""

import sys
from pathlib import Path

import click

from shared.course import terminal
from shared.course.click_group import TRAINER, CourseCommand, examples
from shared.course.errors import CourseError


def add_to(group: click.Group) -> None:
    for command in (plan, twin, chat, evaluate, rendezvous):
        group.add_command(command)


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
    """Say what a run holds, sends and takes, before anything runs: memory by kind and rank, traffic, FLOPs, time, and what limits.

    Nothing is downloaded, built or trained. Exit code 0: it fits. 1: it does not.
    """
    if search or budget:
        if layout or (search and budget):
            raise click.UsageError("--search and --budget choose the layout: give one of the three, --layout, --search or --budget.")
        from shared.trainer.planner import choosing

        if budget:
            sys.exit(choosing.run_budget(terminal.open_console(), config, words, hardware, budget, as_json))
        sys.exit(choosing.run_search(terminal.open_console(), config, words, hardware, model, as_json))
    from shared.trainer.planner import command

    sys.exit(command.run(terminal.open_console(), config, words, layout, hardware, model, as_json))


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course chat runs/laptop_sft", "course chat runs/laptop --temperature 0", "course chat FOLDER"),
)
@click.argument("run", metavar="RUN")
@click.option("--system", help="A system prompt, before everything else.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.7, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=click.IntRange(min=1), default=40, show_default=True, help="Draw among so many of the likeliest tokens.")
@click.option("--new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="At most, in an answer.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn.")
def chat(run: str, system: str | None, temperature: float, top_k: int, new_tokens: int, seed: int) -> None:
    """Talk to the model of a run, or in any folder of Hugging Face's format. A model without a chat template continues your text.

    /reset forgets what was said. Ctrl-D or Ctrl-C ends the conversation.
    """
    from shared.trainer import chat as talking

    talking.talk(terminal.open_console(), run, system, talking.Drawing(temperature, top_k, new_tokens, seed))


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
@click.option("--samples", type=click.IntRange(min=0), help="Answers drawn to each prompt, for pass@k.")
@click.option("--compare", metavar="RUN", help="Another model, with the paired difference between the two.")
@click.option("--lm-eval", "harness", metavar="NAMES", help="Tasks of lm-eval, with commas; it needs the network, or local tasks.")
@click.option("--include-path", help="A folder with tasks of your own for lm-eval.")
@click.option("--shots", type=click.IntRange(min=0), help="With --lm-eval, few-shot examples; else the task's file says how many.")
@click.option("--chat", is_flag=True, help="With --lm-eval, prompts are turns of a chat.")
@click.option("--output", help="The JSON file of the results; RUN/eval.json where it is not given.")
@click.option("--batch-tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Positions that are computed at a time.")
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
    """Evaluate a run, or a model in any folder of Hugging Face's format: bits per byte, multiple choice, exact match and pass@k.

    Without --task or --data it takes the built-in tasks, which need no download: held-out Python, its next line, and made instructions.
    """
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
    """Dry-run a configuration: train a scaled-down twin of the very same file for a few steps, on processes of this machine's CPU.

    Mode, layout, adapter, quantization, optimizer, precision and recomputation are the file's. Sizes shrink, text is made on the spot, and
    a model to start from gets random weights, so nothing is downloaded.
    """
    from shared.trainer.twin import run_twin

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
    """Hold the place where the machines of an elastic run meet, until Ctrl-C. Run it on a machine that stays.

    Every machine that reaches the address can join the run: give one of a network that is yours alone.
    """
    from shared.trainer.elastic import hold_rendezvous

    terminal.open_console().print(f"Machines meet at {address}:{port}: torchrun --rdzv-endpoint {address}:{port} --rdzv-conf is_host=0")
    hold_rendezvous(address, port)
