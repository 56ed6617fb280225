"""Chapter 12. Built-in evaluation tasks, made on the spot without a download: held-out text, its next line, and made instructions.

    text         bits per byte of the embedded corpus' held-out files, the beginning of each
    next_line    multiple choice: which of four lines of Python follows in a held-out file
    sum, count, list, upper_case, json, signature, function      chapter 12's made tasks, held-out prompts, judged by their verifiers

Held out are the files that `shared.corpus.split` leaves aside by name, as every preparation does with its usual share.
"""

import random
from collections.abc import Callable
from itertools import islice
from typing import get_args

from shared.corpus import embedded_corpus
from shared.course.errors import SettingError
from shared.rl.tasks import Kind, MadeTasks, draw_tasks
from shared.trainer.evaluation.tasks import EvalTask, Item, Loaded

DOCUMENTS, BYTES = 64, 1500  # of the held-out files, and of the beginning of each
QUESTIONS, SHOWN, CHOICES = 100, 8, 4  # of next_line: how many, lines of context, and choices
LENGTHS = range(12, 100)  # characters of a line that is asked for: a closing bracket follows anywhere
PROMPTS, NEW_TOKENS = 40, 64  # of a made task


def held_out_texts() -> list[str]:
    """The held-out files of the embedded corpus in a fixed order, mixed over its packages."""
    texts = [document.content.decode("utf-8", "ignore") for document in embedded_corpus().held_out]
    random.Random("evaluation").shuffle(texts)
    return [text for text in texts if len(text) >= BYTES]


def text_task() -> tuple[EvalTask, list[Item]]:
    beginnings = [text.encode()[:BYTES].decode("utf-8", "ignore") for text in held_out_texts()[:DOCUMENTS]]
    return EvalTask("text"), [Item(text[: text.rfind("\n") + 1] or text) for text in beginnings]


def next_line_task() -> tuple[EvalTask, list[Item]]:
    """The lines before a place in a file, and four lines that might follow; three of them are from other files."""
    files = [lines for text in held_out_texts() if len(lines := text.splitlines()) > 3 * SHOWN]
    draw, items = random.Random("next_line"), []
    for _ in range(QUESTIONS):
        picked = draw.sample(files, CHOICES)
        places = [[place for place in range(SHOWN, len(lines)) if len(lines[place].strip()) in LENGTHS] for lines in picked]
        if not all(places):
            continue
        right, *others = (draw.choice(each) for each in places)
        lines = {picked[0][right], *(other[place] for other, place in zip(picked[1:], others, strict=True))}
        choices = draw.sample(sorted(lines), len(lines))
        prompt = "\n".join(picked[0][right - SHOWN : right]) + "\n"
        items.append(Item(prompt, choices.index(picked[0][right]), tuple(f"{line}\n" for line in choices)))
    return EvalTask("choice", prompt="prompt", choices="choices", answer="answer", delimiter=""), items


def made_task(kind: Kind) -> tuple[EvalTask, list[Item]]:
    tasks = list(islice(draw_tasks(MadeTasks(kinds=(kind,)), True), PROMPTS))
    items = [Item(f"{task.prompt}\n", task.answer, check=task.check) for task in tasks]
    return EvalTask("generate", prompt="prompt", answer="answer", chat=True, new_tokens=NEW_TOKENS), items


BUILT_IN: dict[str, Callable[[], tuple[EvalTask, list[Item]]]] = {"text": text_task, "next_line": next_line_task}
BUILT_IN |= {kind: lambda kind=kind: made_task(kind) for kind in get_args(Kind)}


def built_in(name: str) -> Loaded:
    """A built-in task by name."""
    if name not in BUILT_IN:
        raise SettingError(f"There is no task {name!r}: give a YAML file that describes one, or {', '.join(BUILT_IN)}.")
    task, items = BUILT_IN[name]()
    return Loaded(name, task, items)
