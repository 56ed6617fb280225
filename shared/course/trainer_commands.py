"""Floor 0. Commands of the trainer: what a user does with a configuration before it runs, and with a run afterwards."""

import sys
from pathlib import Path

import click

from shared.course import terminal
from shared.course.click_group import TRAINER, CourseCommand, examples
from shared.course.errors import CourseError


def add_to(group: click.Group) -> None:
    for command in (plan, twin, chat, rendezvous):
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
