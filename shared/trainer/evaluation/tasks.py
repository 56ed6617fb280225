"""Chapter 12. Evaluation tasks in YAML: a data set's fields, a prompt template, choices, the answer, few-shot examples.

    kind: choice                                    text: bits per byte   choice: likelihood of choices   generate: the answer is checked
    data: {path: questions.jsonl}                   JSONL, CSV, Parquet, or a data set of the hub by name
    prompt: "Question: {{ question }}\\nAnswer:"     a template in jinja2's sandbox over a record's fields
    choices: choices.text                           an expression over them; so is `answer`: a choice, its number from 0, or its letter
    answer: answerKey
    shots: 3                                        few-shot: so many other records, with their answers, before each question

`Loaded` is what the measures take; the built-in tasks (`shared.trainer.evaluation.built_in`) make theirs without a file.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.course.bounds import Bounds, PositiveFloat, PositiveInt, checked
from shared.course.errors import CourseError, SettingError
from shared.course.strict_yaml import read_yaml
from shared.course.typed import configured
from shared.data.source import Source
from shared.data.sources import open_source
from shared.finetune.chat.datasets import records
from shared.finetune.chat.messages import refuse_record
from shared.rl.tasks import MARK
from shared.rl.verifiers import CHECKS

SANDBOX = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
@checked
class EvalTask:
    """One task of an evaluation.

    Args:
        kind: text, choice or generate.
        data: the records; of kind text, the documents.
        prompt: template of what the model reads.
        choices: with choice, an expression that gives a list of texts.
        answer: an expression: with choice, the right one; with generate, what the answer is checked against. Of a text with ####, as GSM8K
            has them, what stands behind it counts.
        delimiter: between the prompt and the answer. A chat model's answer has none.
        shots: examples before each prompt.
        shots_from: where they are drawn; null for the other records of `data`.
        shots_delimiter: after each of them.
        seed: of the choice of examples, and of drawn answers.
        chat: the prompt is a turn of a chat, where the model has a template.
        check: with generate, how an answer is judged: number, exact, math, json, python, code and others.
        new_tokens: of an answer at most.
        stop: texts that end an answer.
        samples: with generate, answers drawn to each prompt for pass@k, beside the likeliest one; 0 for none.
        temperature: that they are drawn at.
        overlap: with text, tokens of context that a rolling window begins with at least.
        limit: at most this many documents or records; null for all.
    """

    kind: Literal["text", "choice", "generate"]
    data: Source = field(default_factory=Source)
    prompt: str = ""
    choices: str = ""
    answer: str = ""
    delimiter: str = " "
    shots: Annotated[int, Bounds(ge=0, le=1_000)] = 0
    shots_from: Source | None = None
    shots_delimiter: str = "\n\n"
    seed: int = 0
    chat: bool = False
    check: str = "exact"
    new_tokens: PositiveInt = 64
    stop: tuple[str, ...] = ()
    samples: Annotated[int, Bounds(ge=0, le=10_000)] = 0
    temperature: PositiveFloat = 0.8
    overlap: PositiveInt = 1
    limit: PositiveInt | None = None

    def __post_init__(self) -> None:
        needed = {"text": (), "choice": ("choices", "answer"), "generate": ("prompt", "answer")}[self.kind]
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"{missing[0]} is empty, and a task of kind {self.kind} needs it.")
        if self.check not in CHECKS:
            raise ValueError(f"check is {self.check}: choose {', '.join(CHECKS)}.")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which ends every answer at once: leave it out.")
        for name, compile_ in (("prompt", SANDBOX.from_string), ("choices", expression), ("answer", expression)):
            try:
                compile_(getattr(self, name) or "''")
            except TemplateError as error:
                raise ValueError(f"{name} cannot be read as jinja2 ({error}): mend it.") from None


@dataclass(frozen=True)
class Item:
    """One question. answer: the number of the right choice, or the text that an answer is checked against. check: how. shots: prompts and
    answers before it."""

    prompt: str
    answer: int | str = ""
    choices: tuple[str, ...] = ()
    check: str = "exact"
    shots: tuple[tuple[str, str], ...] = ()

    @property
    def right(self) -> str:
        return self.choices[self.answer] if self.choices else self.answer


@dataclass(frozen=True)
class Loaded:
    """A task with its questions; those of kind text are documents, which stand as prompts."""

    name: str
    task: EvalTask
    items: Sequence[Item]


def expression(source: str) -> Callable[..., Any]:
    """A jinja2 expression as a function of a record's fields."""
    return SANDBOX.compile_expression(source, undefined_to_none=False)


def load_task(path: Path, limit: int | None = None) -> Loaded:
    """The task of a YAML file, whose name it has; paths of data in it are relative to the file, where there is such a file.

    Args:
        limit: takes the place of the file's; None to keep that.
    """
    task = configured(EvalTask, read_yaml(path), path.stem)
    task = replace(task, limit=limit or task.limit)
    sources = {name: source for name in ("data", "shots_from") if (source := getattr(task, name)) is not None}
    beside = {name: replace(source, path=str(near)) for name, source in sources.items() if (near := path.parent / source.path).exists()}
    return open_task(path.stem, replace(task, **beside))


def open_task(name: str, task: EvalTask) -> Loaded:
    """A task with its questions."""
    limit = replace(task.data, limit=task.limit) if task.limit else task.data
    if task.kind == "text":
        items = [Item(document.content.decode()) for document in open_source(limit, lambda name, reason: None)]
        return Loaded(name, task, require_items(items, f"{task.data.path} holds no text: every file of it is empty or binary"))
    reader = RecordReader(task)
    items = require_items(reader.read(limit), f"{task.data.path} holds no records")
    if not task.shots:
        return Loaded(name, task, items)
    pool = items if task.shots_from is None else reader.read(task.shots_from)
    if len(pool) - (pool is items) < task.shots:
        raise SettingError(f"{name}.shots is {task.shots}, and there are {len(pool)} records to draw from: give fewer, or more records.")
    shown = []
    for number, item in enumerate(items):
        others = [each for place, each in enumerate(pool) if pool is not items or place != number]
        drawn = random.Random(f"{task.seed}/{number}").sample(others, task.shots)
        shown.append(replace(item, shots=tuple((each.prompt, each.right) for each in drawn)))
    return Loaded(name, task, shown)


def require_items(items: list[Item], otherwise: str) -> list[Item]:
    if not items:
        raise CourseError(f"{otherwise}: give other data.")
    return items


@dataclass(frozen=True)
class RecordReader:
    """Makes questions of records."""

    task: EvalTask

    @cached_property
    def compiled(self) -> dict[str, Callable[..., Any]]:
        return {"prompt": SANDBOX.from_string(self.task.prompt).render} | {
            name: expression(source) for name in ("choices", "answer") if (source := getattr(self.task, name))
        }

    def read(self, source: Source) -> list[Item]:
        found = []
        for place, record in records(source):
            if len(found) == source.limit:
                break
            found.append(self.item(place, record))
        return found

    def item(self, place: str, record: Any) -> Item:
        """A record as a question."""
        if not isinstance(record, dict):
            refuse_record(place, "is not a record with fields")
        made = {name: self.value(place, name, make, record) for name, make in self.compiled.items()}
        choices, answer = made.get("choices"), made["answer"]
        if self.task.kind == "choice":
            if not isinstance(choices, list | tuple) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
                refuse_record(place, f"has the choices {str(choices)[:60]!r}, where at least two texts that are not empty are wanted")
            return Item(made["prompt"], self.number_of(place, answer, choices), tuple(choices))
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            refuse_record(place, f"has the answer {str(answer)[:60]!r}, where a text or a number is wanted")
        return Item(made["prompt"], str(answer).rpartition(MARK)[2].strip(), check=self.task.check)

    def value(self, place: str, name: str, make: Callable[..., Any], record: dict[str, Any]) -> Any:
        try:
            value = make(**record)
            str(value).encode()  # an undefined value raises here, and so does half a surrogate
        except UnicodeEncodeError:
            refuse_record(place, f"gives {name} a character that is none (half a surrogate)")
        except Exception as error:  # of whatever the expression does with the record
            reason = str(error).rstrip(".") or type(error).__name__
            refuse_record(place, f"gives no {name} ({reason}; its fields are {', '.join(map(repr, record)) or 'none'})")
        return value

    def number_of(self, place: str, answer: Any, choices: Sequence[str]) -> int:
        """Which choice is right: by its text, its number from 0, or its letter."""
        if isinstance(answer, str) and answer in choices:
            return choices.index(answer)
        text = str(answer).strip()
        number = LETTERS.find(text) if len(text) == 1 and text in LETTERS else int(text) if text.isdecimal() else -1
        if isinstance(answer, bool) or not 0 <= number < len(choices):
            refuse_record(place, f"has the answer {text[:60]!r}, which is none of its {len(choices)} choices, numbered from 0")
        return number
