"""Chapter 12. Tasks whose answers a program verifies, for reinforcement learning: made by code, or from files and the hub.

    sum          What is 31 plus 58?                                            89
    count        How many words are there in: door, lamp, key?                  3
    function     Write a Python function area that returns the product of x and y.         judged by running it
    list         Write as a list with dashes: lamp, door.                       - lamp, - door
    upper_case, json, signature                                                 chapter 10's instructions, as `list`

Sums and functions are asked as chapter 10's instruction set asks them, so a model that was fine-tuned on it solves some. Which tasks there
are depends on the seed alone, and a prompt decides by its hash whether it is held out (`shared.finetune.instructions.Task`).
"""

import json
import math
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from shared.course.bounds import Bounds, MadeCount, checked
from shared.course.errors import CourseError
from shared.finetune.chat.datasets import ChatSource, arguments_of, is_messages, records, require_order
from shared.finetune.chat.messages import (
    HARMLESS, Message, message_of, name_of_tools, parsed, refuse_record, require_json, structure, text_of, tools_of, with_system,
    without_marks,
)  # fmt: skip
from shared.finetune.instructions import NOUNS, Task, dashes, function, header, json_object, upper_case
from shared.rl.code_reward import CodeTask
from shared.rl.verifiers import CHECKS, CODE, VERIFIERS

CASES = 5  # that a function is called with
TRIES = 10_000  # in a row without a new held-out prompt
MARK = "####"  # GSM8K writes the number behind it
RUNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
Kind = Literal["sum", "count", "function", "list", "upper_case", "json", "signature"]


@dataclass(frozen=True)
@checked
class MadeTasks:
    """Tasks that code makes.

    Args:
        kinds: sum, count, function, list, upper_case, json and signature, or some of them; in turn.
        digits: the largest number of digits in a sum's numbers.
        training: number of training tasks.
        seed: seed of the generated set.
    """

    kinds: tuple[Kind, ...] = ("sum", "count", "function")
    digits: Annotated[int, Bounds(ge=1, le=100)] = 2
    training: MadeCount = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ValueError("made.kinds is empty: give at least one kind.")


@dataclass(frozen=True)
@checked
class TasksConfig:
    """Prompts to answer, with what verifies the answers.

    Args:
        sources: files or hub datasets with a prompt and an answer in each record, perhaps with `system`, `tools` and `chat_template_kwargs`
            as conversations have them; the set is made where there are none.
        prompt_field: the record's field with the prompt, a text or a list of messages.
        answer_field: what the answer is named, else verl's `reward_model.ground_truth`; of one with ####, as in GSM8K, the part after it.
        check: number, exact, math, json, python or code, for records without a field `check`.
        held_out: held-out tasks, answered before and after training; 0 for none.
        made: the set that is made.
    """

    sources: tuple[ChatSource, ...] = ()
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    check: str = "number"
    held_out: Annotated[int, Bounds(ge=0, le=100_000)] = 120
    made: MadeTasks = field(default_factory=MadeTasks)

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ValueError(f"check is {self.check}: choose {', '.join(CHECKS)}.")


class TaskSet(NamedTuple):
    training: list[Task]
    held_out: list[Task]


@dataclass(frozen=True)
class ChatTask(Task):
    """A task whose prompt is more than a question: several messages, fields of a message, tools, arguments of the template. `prompt` is the
    text of the messages."""

    tools: list[dict[str, Any]] | None = field(default=None, hash=False)
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    messages: tuple[Message, ...] = field(default=(), hash=False)

    def asked(self, system: str | None = None) -> list[Message]:
        return with_system(self.messages, system)


def open_tasks(config: TasksConfig, unread: Counter[str] | None = None) -> TaskSet:
    """The tasks of a configuration. No prompt is on both sides. unread: counts the fields of records that nothing here reads."""
    if not config.sources:
        return TaskSet(list(islice(draw_tasks(config.made, False), config.made.training)),
                       list(islice(draw_tasks(config.made, True), config.held_out)))  # fmt: skip
    found = [task for source in config.sources for task in read_source(source, config, Counter() if unread is None else unread)]
    held_out = list({task.prompt: task for task in found if task.held_out}.values())[: config.held_out]
    training = [task for task in found if not (task.held_out and config.held_out)]
    names = ", ".join(str(Path(source.path)) for source in config.sources)
    if not training:
        raise CourseError(f"{names} holds no tasks to train on: give records with {config.prompt_field} and {config.answer_field}.")
    if config.held_out and not held_out:
        raise CourseError(f"None of the {len(found)} tasks of {names} is held out, about one in twelve is: give more tasks, or held_out 0.")
    return TaskSet(training, held_out)


def read_source(source: ChatSource, config: TasksConfig, unread: Counter[str]) -> Iterator[Task]:
    for number, (place, record) in enumerate(records(source)):
        if number == source.limit:
            return
        yield task_of(record, place, config)
        unread.update(unread_of(record, config))


def task_of(record: Any, place: str, config: TasksConfig) -> Task:
    """A record as a task. Its own answer must pass its own check: nothing that a model writes could pass otherwise."""
    if not isinstance(record, dict):
        refuse_record(place, "is not a record with fields")
    kind, check = (str(record.get(name) or other) for name, other in (("kind", "task"), ("check", config.check)))
    if check not in CHECKS:
        refuse_record(place, f"has the check {check!r}, which is none of {', '.join(CHECKS)}")
    messages = asked_of(record.get(config.prompt_field), place, config.prompt_field)
    prompt = text_of(messages) if messages else record.get(config.prompt_field)
    answer = answer_of(record, config.answer_field)
    for name, value in ((config.prompt_field, prompt), (config.answer_field, answer)):
        require_text(value, name, record, place)
    answer = written_out(answer).rpartition(MARK)[2].strip()
    if record.get("system"):
        system = without_marks(message_of({"role": "system", "content": record["system"]}, f"{place}, system"))
        messages = (system, *(messages or ({"role": "user", "content": str(prompt)},)))
        require_order(messages, place)
        prompt = text_of(messages)
    tools, arguments = tools_of(record, place), arguments_of(record, place)
    require_json([messages, tools, arguments], place)
    task = Task(kind, str(prompt), answer, check)
    if tools or arguments or [*messages] != task.asked()[: len(messages)]:
        task = ChatTask(kind, task.prompt, answer, check, tools, arguments, messages or (*task.asked(),))
    try:
        passed = CodeTask.parse(task.answer) if check == CODE else VERIFIERS[check](task.answer, task.answer) == 1
    except Exception:
        passed = False
    if not passed:
        refuse_record(place, f"has an answer that does not pass its own check, {check}: {task.answer[:60]!r}")
    return task


def unread_of(record: dict[str, Any], config: TasksConfig) -> list[str]:
    """The fields of a task's record that decide nothing of its prompt, its answer or its check."""
    read = {config.prompt_field, config.answer_field, "kind", "check", "system", "chat_template_kwargs", name_of_tools(record), *HARMLESS}
    read |= {"reward_model"} if record.get(config.answer_field) is None else set()
    return [name for name, value in record.items() if name not in read and value not in (None, "", [], {})]


def require_text(value: Any, name: str, record: dict[str, Any], place: str) -> None:
    """Reject what is no text and no number."""
    if not isinstance(value, str | int | float) or not str(value).strip():
        other = f"the {type(value).__name__} {str(value)[:40]!r} as"
        found = "no" if value is None else "an empty" if isinstance(value, str) else other
        refuse_record(place, f"has {found} {name}, where a text is wanted (its fields are {', '.join(map(repr, record)) or 'none'})")


def asked_of(value: Any, place: str, name: str) -> tuple[Message, ...]:
    """A prompt that is a list of messages, as JSON too; none where it is a text. It ends with a question, or with what a tool returned."""
    found = parsed(value)
    if not is_messages(found):
        return ()
    messages = tuple(without_marks(message_of(each, f"{place}, {name}, message {number}")) for number, each in enumerate(found, 1))
    require_order(messages, place)
    require_json(messages, place)
    if messages[-1]["role"] not in ("user", "tool"):
        refuse_record(place, f"has a {name} that ends with the role {messages[-1]['role']}, so nothing is left to answer")
    return messages


def answer_of(record: dict[str, Any], name: str) -> Any:
    """The expected answer: a field, or verl's `reward_model.ground_truth`."""
    judged = structure(record.get("reward_model"))
    return judged.get("ground_truth") if record.get(name) is None and isinstance(judged, dict) else record.get(name)


def written_out(value: Any) -> str:
    """A text as it is, and a number with all its digits: 1e22 has 23."""
    exact = Decimal(repr(value)) if isinstance(value, float) and math.isfinite(value) else None
    return f"{exact:f}" if exact is not None and "e" in repr(value) else str(value)


# Tasks made by code.


def sum_task(draw: random.Random, digits: int) -> Task:
    one, other = (draw.randrange(10 ** draw.randint(1, digits)) for _ in range(2))
    return Task("sum", f"What is {one} plus {other}?", str(one + other), "number")


def count_task(draw: random.Random, digits: int) -> Task:
    words = draw.choices(NOUNS, k=draw.randint(2, 9))
    return Task("count", f"How many words are there in: {', '.join(words)}?", str(len(words)), "number")


def function_task(draw: random.Random, digits: int) -> Task:
    """Chapter 10's task, whose answer any function passes that computes the same."""
    task = function(draw)
    name, sign = re.match(r"def (\w+)\(", task.answer)[1], task.answer.split()[-2]
    inputs = [[draw.randrange(-99, 100) for _ in range(2)] for _ in range(CASES)]
    return replace(task, kind="function", answer=json.dumps({"function": name, "cases": [[each, RUNS[sign](*each)] for each in inputs]}),
                   check=CODE)  # fmt: skip


INSTRUCTIONS = {"list": dashes, "upper_case": upper_case, "json": json_object, "signature": header}
MAKERS: dict[str, Callable[[random.Random, int], Task]] = {"sum": sum_task, "count": count_task, "function": function_task}
MAKERS |= {kind: lambda draw, digits, make=make: make(draw) for kind, make in INSTRUCTIONS.items()}


def draw_tasks(made: MadeTasks, held_out: bool) -> Iterator[Task]:
    """Tasks of one side without end, each kind in its turn. What is held out is drawn once."""
    draw, seen = random.Random(f"tasks/{made.seed}/{held_out}"), set()
    while True:
        for kind in made.kinds:
            found = (MAKERS[kind](draw, made.digits) for _ in range(TRIES))
            task = next((each for each in found if each.held_out == held_out and not (held_out and each.prompt in seen)), None)
            if task is None:
                raise CourseError(f"There are but {len(seen)} held-out tasks with digits {made.digits}: ask for fewer, or for more digits.")
            seen.add(task.prompt)
            yield task
