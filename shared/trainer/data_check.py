"""Chapter 12. A look at a data file before training: what is read of its records, what is not, what is trained on, and what is refused.

Conversations and pairs go through the code that prepares them; a record that training would refuse is counted with its reason, and the
others are read on.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from shared.course.errors import CourseError
from shared.course.terminal import say
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.datasets import ChatSource, conversation_of, records
from shared.finetune.chat.encoding import ChatExamples, Example
from shared.finetune.chat.prepare import ChatReport, chat_tokenizer
from shared.finetune.chat.template import ChatTemplate
from shared.preference.datasets import preference_of
from shared.rl.tasks import TasksConfig, task_of, unread_of

Kind = Literal["chats", "preferences", "tasks"]
REFUSALS = 5  # that are shown
UNCUT = 2**40  # tokens
BATCH = 64  # records that are tokenized together


@dataclass
class Found:
    """What a look at a file found. refused: sentences. lengths: tokens of each conversation. shown: the first ones as text."""

    records: int = 0
    refused: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    trained: int = 0
    shown: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    report: ChatReport = field(default_factory=ChatReport)


def kind_of(record: Any) -> Kind:
    """What a record looks like."""
    fields = record if isinstance(record, dict) else {}
    if "chosen" in fields or "rejected" in fields or ("completion" in fields and "label" in fields):
        return "preferences"
    return "tasks" if "prompt" in fields and ("answer" in fields or "reward_model" in fields) else "chats"


def check_data(path: str, kind: Kind | None, model: Path | None, template: str | None, count: int, limit: int) -> tuple[Kind, Found]:
    """Read the first records of a file, a folder or a dataset.

    Args:
        kind: what they are; None to go by the first.
        model: the folder whose tokenizer and, without `template`, chat template are taken; None for one that is trained on the records.
        count: texts to show. limit: records to read.
    """
    rows = list(taken(ChatSource(path, limit=limit)))
    if not rows:
        raise CourseError(f"{path} holds no record.")
    found = Found(len(rows))
    kind = kind or kind_of(rows[0][1])
    if kind == "tasks":
        config, unread = TasksConfig(check="number"), Counter[str]()
        for task, names in read_on(rows, lambda record, place: [(task_of(record, place, config), unread_of(record, config))], found):
            unread.update(names)
            found.kinds[task.check] += 1
            if len(found.shown) < count:
                found.shown.append(f"{task.prompt}\n=> {task.answer}  (check: {task.check})")
        found.report = ChatReport(unread=dict(unread.most_common()))
        return kind, found
    of_record = (lambda record, place: preference_of(record, place).answers) if kind == "preferences" else one_conversation
    conversations = list(read_on(rows, of_record, found))
    tokenizer, chosen = tools_for(model, template, [message.get("content") or "" for each in conversations for message in each.messages])
    make = ChatExamples(tokenizer, chosen, UNCUT)
    with closing(chosen):
        for first in range(0, len(conversations), BATCH):
            for example in refusable(make, conversations[first : first + BATCH], found):
                found.lengths.append(len(example.ids))
                found.trained += int(example.trained[1:].sum())
                if len(found.shown) < count:
                    found.shown.append("".join(f"[[{text}]]" if trained else text for text, trained in make.pieces(example)))
    found.report = ChatReport(unread=dict(make.unread.counts.most_common()), rewritten=make.rewritten)
    return kind, found


def taken(source: ChatSource) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(records(source)):
        if number == source.limit:
            return
        yield row


def one_conversation(record: Any, place: str) -> list[Any]:
    return [conversation_of(record, place)]


def read_on(rows: Sequence[tuple[str, Any]], read: Callable[[Any, str], Sequence[Any]], found: Found) -> Iterator[Any]:
    """What each record gives; a refused one is counted with its reason."""
    for place, record in rows:
        try:
            yield from read(record, place)
        except CourseError as error:
            found.refused.append(str(error))


def refusable(make: ChatExamples, conversations: Sequence[Any], found: Found) -> list[Example]:
    """Examples of conversations, one by one where some of them are refused."""
    try:
        return make(conversations)
    except CourseError:
        return [example for each in conversations for example in read_on([(each.place, each)], lambda one, place: make([one]), found)]


def tools_for(model: Path | None, template: str | None, texts: Sequence[str]) -> tuple[TextTokenizer, ChatTemplate]:
    if model is not None:
        folder = model / "model" if (model / "model" / "tokenizer.json").is_file() else model
        return chat_tokenizer(folder, template)
    chosen = ChatTemplate.load(template or "chatml")
    tokenizer = TextTokenizer.train(texts, vocab_size=4096, sentinels=0)
    chosen.variables.setdefault("eos_token", tokenizer.end)
    return tokenizer.with_special(chosen.special_names), chosen


def show(console: Console, path: str, kind: Kind, found: Found, seq: int | None, guessed: bool) -> None:
    """Print what was found."""
    say(console, f"{path}: {found.records:,} records, read as {kind}{', by the fields of the first' if guessed else ''}.")
    if found.lengths:
        low, middle, high = np.quantile(found.lengths, [0, 0.5, 1]).astype(int)
        share = found.trained / max(1, sum(found.lengths))
        lengths = f"{low:,} to {high:,} tokens, half of them up to {middle:,}"
        say(console, f"{len(found.lengths):,} texts of {lengths}; {share:.0%} are trained on.")
        if seq and (longer := sum(length > seq + 1 for length in found.lengths)):
            say(console, f"{longer:,} are longer than a row of {seq:,} tokens, and would be cut.")
    if found.kinds:
        say(console, f"Checks: {', '.join(f'{check} ({number:,})' for check, number in found.kinds.most_common())}.")
    for line in found.report.remarks():
        say(console, line)
    if found.refused:
        say(console, f"{len(found.refused):,} would be refused, and a run ends at the first:", "bold")
        for sentence in found.refused[:REFUSALS]:
            say(console, f"  {sentence}")
        if len(found.refused) > REFUSALS:
            say(console, f"  ... and {len(found.refused) - REFUSALS:,} more")
    for number, text in enumerate(found.shown, 1):
        say(console, f"\n--- {number}{', trained on between [[ and ]]' if kind != 'tasks' else ''}", "bold")
        say(console, "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text))
