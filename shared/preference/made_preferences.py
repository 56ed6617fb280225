"""Chapter 11. Synthetic preference data with a known preference: pairs made by code, and the judge that knows which answer is better.

The prompts are like chapter 10's tasks (`shared.finetune.instructions`), but do not say all that is wanted. That is hidden in the pairs:
words come as a list, nothing is repeated, code has a body, sums are right. A model that was fine-tuned on chapter 10's set seldom writes
what is preferred, though all of it is made of parts that it has written. Held-out prompts occur in no pair.

Left out on purpose: preferences of people. Nobody could say of those how far a reward model is from them.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from shared.finetune.instructions import ARGUMENTS, NOUNS, VERBS, Task, arithmetic
from shared.output_files import write_atomically
from shared.preference.answer_scores import SCORES
from shared.preference.config import MadeConfig

FORMAT = 1  # of the set; another one means other pairs for the same seed


class MadeSet(NamedTuple):
    """Files of JSON lines: pairs, the tasks that their prompts are, and held-out tasks, which occur in no pair."""

    pairs: Path
    training: Path
    held_out: Path


class Judge:
    """Knows the hidden preference for the prompts of some tasks.

    Args:
        tasks: with the prompts that are asked about.
    """

    def __init__(self, tasks: Iterable[Task]):
        self.tasks = {task.prompt: task for task in tasks}

    def __call__(self, prompt: str, answer: str) -> float:
        """The gold reward of an answer, from 0 to 1."""
        task = self.tasks[prompt]
        return float(SCORES[task.check](answer.strip(), task.answer))


Made = tuple[Task, list[str]]  # a task, and worse answers of the kinds that a small model gives


def small_sum(draw: random.Random) -> Made:
    """The rejected answer is that of another sum: right and wrong numbers are equally frequent, and only the sum tells them apart."""
    task, other = arithmetic(draw), arithmetic(draw)
    while other.prompt.split()[3] != task.prompt.split()[3]:
        other = arithmetic(draw)
    return replace(task, check="near"), [other.answer]


def listed_words(draw: random.Random, prompt: str, kind: str) -> tuple[list[str], Task, str]:
    """Words, the task to list them, and a list with a wrong word."""
    words = draw.sample(NOUNS, draw.randrange(2, 4))
    place = draw.randrange(len(words))
    wrong = [*words[:place], draw.choice([words[place - 1], draw.choice(NOUNS)]), *words[place + 1 :]]
    text = ", ".join(words[:-1]) + " and " + words[-1] if "and" in kind else ", ".join(words)
    return words, Task(kind, prompt.format(text), as_list(words), "lines"), as_list(wrong)


def as_list(words: Sequence[str]) -> str:
    return "\n".join(f"- {word}" for word in words)


def cut(answer: str, draw: random.Random) -> str:
    """The beginning of an answer: a model that is taught to be brief may stop too early."""
    return answer[: draw.randrange(1, len(answer))]


def words_as_list(draw: random.Random) -> Made:
    words, task, wrong = listed_words(draw, "Write: {}.", "format: words and list")
    return task, [" ".join(words).upper(), " ".join(words[:2]).upper(), wrong, cut(task.answer, draw)]


def brief_list(draw: random.Random) -> Made:
    words, task, wrong = listed_words(draw, "Write a list: {}.", "brevity: list")
    longer = as_list([*words, *draw.choices(words, k=draw.randrange(1, 3))])
    return task, [longer, longer, wrong, wrong, cut(task.answer, draw), as_list(words[:-1])]


def function_with_body(draw: random.Random) -> Made:
    name, (one, other), sign = draw.choice(VERBS), draw.sample(ARGUMENTS, 2), draw.choice("+-*")
    header, body = f"def {name}({one}, {other}):", f"\n    return {one} {sign} {other}"
    task = Task("code: function", f"Write a Python function {name} that takes {one} and {other}.", header + body, "function")
    return task, [header, header, f"def {name}({one}, {one}):{body}", cut(header + body, draw)]


MAKERS = (small_sum, words_as_list, brief_list, function_with_body)


def draw_made(seed: int, held_out: bool) -> Iterator[Made]:
    """Tasks of one side without end, each kind in its turn. Those that are held out are drawn once."""
    draw, seen = random.Random(f"preferences/{FORMAT}/{seed}/{held_out}"), set()
    while True:
        for make in MAKERS:
            task, worse = make(draw)
            while task.held_out != held_out or (held_out and task.prompt in seen) or task.answer in worse:
                task, worse = make(draw)
            seen.add(task.prompt)
            yield task, worse


def write_made(folder: Path, made: MadeConfig) -> MadeSet:
    """Generate the set, unless it is there already.

    Args:
        folder: of all sets; this one gets a folder in it.
    """
    place = folder / f"preferences-{FORMAT}-{made.seed}-{made.pairs}-{made.prompts}-{made.flipped}"
    files = MadeSet(place / "pairs.jsonl", place / "training.jsonl", place / "held_out.jsonl")
    if not all(path.exists() for path in files):
        draw, pairs, tasks = random.Random(f"answers/{FORMAT}/{made.seed}"), [], {}
        for task, worse in islice(draw_made(made.seed, False), made.pairs):
            answers = {"chosen": task.answer, "rejected": draw.choice(worse)}
            if draw.random() < made.flipped:
                answers = dict(zip(answers, reversed(answers.values()), strict=True))
            pairs.append({"prompt": task.prompt} | answers)
            tasks[task.prompt] = asdict(task)
        held_out = [asdict(task) for task, _ in islice(draw_made(made.seed, True), made.prompts)]
        for path, records in zip(files, (pairs, tasks.values(), held_out), strict=True):
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in records).encode())
    return files._replace(held_out=made.file or files.held_out)
