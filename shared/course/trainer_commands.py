"""Floor 0. Commands of the trainer: what a user does with a configuration before it runs, and with a run afterwards."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shared.course import terminal
from shared.course.click_group import TRAINER, CourseCommand, examples


def add_to(group: click.Group) -> None:
    for command in (chat, sample, runs, report):
        group.add_command(command)


def answer_options(command: Callable) -> Callable:
    """The options that say how answers are drawn, for a command that takes a run and `**drawn`."""
    share = click.FloatRange(min=0, min_open=True, max=1)
    options = (
        click.option("--system", help="A system prompt, before everything else."),
        click.option("--temperature", type=click.FloatRange(min=0), default=0.7, show_default=True, help="0 takes the likeliest token."),
        click.option("--top-k", type=click.IntRange(min=0), default=40, show_default=True, help="Draw among so many tokens; 0: all."),
        click.option("--top-p", type=share, help="Draw among the likeliest tokens that together have this probability."),
        click.option("--min-p", type=share, help="Leave out tokens below this share of the likeliest one's probability."),
        click.option("--repetition-penalty", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
                     help="Above 1, what stands in the text already is less likely."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text; may be given several times."),
        click.option("--new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="At most, in an answer."),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def answer_settings(drawn: dict[str, Any]) -> Any:
    """`shared.trainer.chat.AnswerSettings` of the options' values. Raises SettingError, which names the option."""
    from shared.course.typed import configured
    from shared.trainer.chat import AnswerSettings

    own = {name: drawn.pop(name) for name in ("new_tokens", "seed", "stop")}
    return configured(AnswerSettings, own | {"stop": list(own["stop"]), "drawing": drawn | {"top_k": drawn["top_k"] or None}})


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course chat runs/laptop_sft", "course chat runs/laptop --temperature 0", "course chat FOLDER --web"),
)
@click.argument("run", metavar="RUN")
@answer_options
@click.option("--web", is_flag=True, help="Talk in the browser: a page on this machine, for this machine alone.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Of that page; 0: any free one.")
def chat(run: str, system: str | None, web: bool, port: int, **drawn: Any) -> None:
    """Talk to the model of a run, or in any folder of Hugging Face's format. A model without a chat template continues your text.

    /reset forgets what was said. Ctrl-D or Ctrl-C ends the conversation.
    """
    from shared.trainer import chat as talking

    settings = answer_settings(drawn)
    if web:
        from shared.trainer.web.server import serve

        serve(terminal.open_console(), talking.open_talk(Path(run).expanduser(), settings, system), run, port)
    else:
        talking.talk(terminal.open_console(), run, system, settings)


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course sample runs/laptop 'def mean('", "course sample runs/laptop_sft - --number 3 < question.txt"),
)
@click.argument("run", metavar="RUN")
@click.argument("prompt", metavar="PROMPT")
@click.option("--number", type=click.IntRange(min=1), default=1, show_default=True, help="Of answers, with an empty line between two.")
@answer_options
def sample(run: str, prompt: str, number: int, system: str | None, **drawn: Any) -> None:
    """Print what a run's model answers to one PROMPT, token by token, and nothing else. The prompt - is read from standard input."""
    from shared.trainer import chat as talking

    settings = answer_settings(drawn)
    talking.sample(run, sys.stdin.read() if prompt == "-" else prompt, number, system, settings)


@click.command(cls=CourseCommand, section=TRAINER, epilog=examples("course runs", "course runs FOLDER"))
@click.argument("folder", metavar="[FOLDER]", default="runs", type=click.Path(path_type=Path))
def runs(folder: Path) -> None:
    """List the runs in and below a folder, `runs` unless another one is given: state, step, loss, speed, memory, layout."""
    from shared.trainer.records.listing import list_runs

    list_runs(terminal.open_console(), folder.expanduser())


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course report runs/laptop runs/laptop-dp2", "course report runs/a runs/b runs/c --output page.html"),
)
@click.argument("folders", metavar="RUN RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="The page; comparison.html beside the first run unless given.")
def report(folders: tuple[Path, ...], output: Path | None) -> None:
    """Set several runs side by side: results and settings that differ here, and a page with their curves over each other."""
    from shared.trainer.records.side_by_side import report_runs

    folders = tuple(folder.expanduser() for folder in folders)
    report_runs(terminal.open_console(), folders, output or folders[0].resolve().parent / "comparison.html")
