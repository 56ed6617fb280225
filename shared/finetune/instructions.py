"""Chapter 10. Instruction-tuning data set made by code: arithmetic, formats and small Python functions, with answers that can be checked.

Each task is a prompt, its answer, and the name of the check that an answer must pass (`CHECKS`). Which tasks there are depends on a seed
alone; those that are held out never occur among the training conversations, because a task's prompt decides on which side it is.

What is written are files like any user's: conversations in the shape `messages`, and held-out tasks, one JSON object a line.

Left out on purpose: running the code that a model writes.
"""

import hashlib
import json
import random
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from shared.course.errors import CourseError
from shared.finetune.answer_checks import CHECKS
from shared.finetune.chat.messages import with_system
from shared.output_files import write_atomically

HELD_OUT = 12  # one in so many tasks
MOST_TASKS = 300  # that are held out: of the kind with the fewest, one in six must be there
FORMAT = 1  # of the set; another one means other tasks for the same seed
NOUNS = tuple("apple arrow basket bell boat bottle box bridge brush button candle card chair clock cloud coat coin cup desk door drum "
              "engine fan feather fence flag flute fork garden gate glass glove hammer hat key kite ladder lamp leaf letter map mirror "
              "needle page paper pencil pipe plate pocket ribbon ring road rope scale screw shelf shoe spoon stone string table tent "
              "thread ticket tower tree wagon wall wheel window wire".split())  # fmt: skip
KEYS = ("name", "size", "color", "price", "count", "weight", "owner", "shape")
VERBS = ("area", "total", "shift", "mix", "join", "scale", "measure", "compare", "update", "select", "merge", "convert")
ARGUMENTS = ("x", "y", "width", "height", "first", "second", "left", "right", "items", "value", "count", "size")
OPERATORS = {"the sum of": "+", "the product of": "*", "the difference of": "-"}


@dataclass(frozen=True)
class Task:
    """One instruction. kind: of the report's table. check: a key of `CHECKS`. tools, arguments: what a template is called with beside."""

    kind: str
    prompt: str
    answer: str
    check: str
    tools: ClassVar[list[dict[str, Any]] | None] = None
    arguments: ClassVar[dict[str, Any]] = {}

    def asked(self, system: str | None = None) -> list[dict[str, Any]]:
        """The messages that a model answers, with a system prompt if they have none."""
        return with_system([{"role": "user", "content": self.prompt}], system)

    @property
    def held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.prompt.encode()).digest()[:4]) % HELD_OUT == 0

    def solved_by(self, answer: str) -> bool:
        """Whether an answer passes the task's check."""
        return CHECKS[self.check](answer.strip(), self.answer)


def arithmetic(draw: random.Random) -> Task:
    one, other = draw.randrange(1, 21), draw.randrange(1, 21)
    word, result = draw.choice([("plus", one + other), ("minus", one - other)])
    return Task("arithmetic", f"What is {one} {word} {other}?", str(result), "number")


def json_object(draw: random.Random) -> Task:
    keys = draw.sample(KEYS, 2)
    values = {key: draw.choice(NOUNS) if draw.random() < 0.5 else draw.randrange(1, 100) for key in keys}
    said = " and ".join(f"{key} {value}" for key, value in values.items())
    return Task("format: JSON", f"Give a JSON object with {said}.", json.dumps(values), "json")


def dashes(draw: random.Random) -> Task:
    words = draw.sample(NOUNS, draw.randrange(2, 4))
    answer = "\n".join(f"- {word}" for word in words)
    return Task("format: list", f"Write as a list with dashes: {', '.join(words)}.", answer, "exact")


def upper_case(draw: random.Random) -> Task:
    words = draw.sample(NOUNS, 2)
    return Task("format: upper case", f"Write in upper case: {' '.join(words)}", " ".join(words).upper(), "exact")


def header(draw: random.Random) -> Task:
    name, some = draw.choice(VERBS), draw.sample(ARGUMENTS, draw.randrange(1, 4))
    said = some[0] if len(some) == 1 else f"{', '.join(some[:-1])} and {some[-1]}"
    prompt = f"Write the first line of a Python function {name} that takes {said}."
    return Task("code: signature", prompt, f"def {name}({', '.join(some)}):", "python")


def function(draw: random.Random) -> Task:
    name, (one, other), (said, sign) = draw.choice(VERBS), draw.sample(ARGUMENTS, 2), draw.choice([*OPERATORS.items()])
    prompt = f"Write a Python function {name} that returns {said} {one} and {other}."
    return Task("code: function", prompt, f"def {name}({one}, {other}):\n    return {one} {sign} {other}", "python")


MAKERS = (arithmetic, json_object, dashes, upper_case, header, function)


def draw_tasks(seed: int, held_out: bool) -> Iterator[Task]:
    """Tasks of one side without end, each kind in its turn. Training draws with repetition; what is held out is drawn once."""
    draw, seen, tried = random.Random(f"{FORMAT}/{seed}/{held_out}"), set(), 0
    while True:
        for make in MAKERS:
            task = make(draw)
            while task.held_out != held_out or (held_out and task.prompt in seen):
                task, tried = make(draw), tried + 1
            seen.add(task.prompt)
            yield task


def conversation(task: Task) -> dict[str, Any]:
    """A task as a record of chats."""
    return {"messages": [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": task.answer}]}


def write_instructions(folder: Path, examples: int, tasks: int, seed: int = 0) -> tuple[Path, Path]:
    """Generate the set, unless it is there already.

    Args:
        folder: of all sets; this one gets a folder in it.
        examples: conversations to train on.
        tasks: held-out tasks; at most MOST_TASKS.

    Returns:
        The files of the conversations and of the held-out tasks.
    """
    place = folder / f"instructions-{FORMAT}-{seed}-{examples}-{tasks}"
    sides = {"conversations": (map(conversation, draw_tasks(seed, False)), examples), "tasks": (map(asdict, draw_tasks(seed, True)), tasks)}
    for name, (records, count) in sides.items():
        path = place / f"{name}.jsonl"
        if not path.exists():
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in islice(records, count)).encode())
    return place / "conversations.jsonl", place / "tasks.jsonl"


def read_tasks(path: Path, checks: Collection[str] = tuple(CHECKS)) -> list[Task]:
    """Held-out tasks from a file: one JSON object a line, with `kind`, `prompt`, `answer` and `check`.

    Args:
        checks: that there are.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(f"The tasks of {path} cannot be read ({error}): give a file of JSON lines.") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            task = Task(**json.loads(line))
            usable = task.check in checks and all(isinstance(value, str) and value for value in vars(task).values())
        except (ValueError, TypeError, RecursionError):
            usable = False
        if not usable:
            raise CourseError(
                f"{path}, line {number}, is no task: give an object with the texts kind, prompt, answer, and check, one of "
                f"{', '.join(checks)}."
            )
        found.append(task)
    if not found:
        raise CourseError(f"{path} holds no tasks: give one JSON object a line.")
    return found
