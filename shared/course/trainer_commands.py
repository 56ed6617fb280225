"""Floor 0. Commands of the trainer: what a user does with a configuration before it runs, and with a run afterwards."""

import click

from shared.course import terminal
from shared.course.click_group import TRAINER, CourseCommand, examples


def add_to(group: click.Group) -> None:
    for command in (chat, rendezvous):
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
