"""Floor 0. Commands of the trainer: what a user does with a configuration before it runs, and with a run afterwards."""

from pathlib import Path

import click

from shared.course import terminal
from shared.course.click_group import TRAINER, CourseCommand, examples
from shared.course.errors import CourseError


def add_to(group: click.Group) -> None:
    for command in (chat, twin):
        group.add_command(command)


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
