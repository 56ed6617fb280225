"""Floor 0. Commands of the trainer: what a user does with a configuration before it runs, and with a run afterwards."""

import click

from shared.course import terminal
from shared.course.click_group import TRAINER, CourseCommand, examples


def add_to(group: click.Group) -> None:
    for command in (chat, evaluate):
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
    from pathlib import Path

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
