"""Chapter 11. Preparation of preference data: pairs as shards of tokens, cut to a row by a rule that treats both answers equally.

The folder is that of chapter 10's conversations (`shared.finetune.chat.prepare`). A document is a prompt with one answer: of pair p, the
documents 2p (chosen) and 2p + 1 (rejected); of single answers, one each. The number that is kept with it is the margin, or the label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console

from shared.course.errors import CourseError
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.encoding import ChatExamples, Example
from shared.finetune.chat.messages import ChatError
from shared.finetune.chat.prepare import BATCH, SHOWN, ChatReport, PreparedChats, names_of, opened, prepared_folder
from shared.finetune.chat.sides import SideWriter
from shared.finetune.chat.template import ChatTemplate
from shared.preference.config import PreferenceConfig
from shared.preference.datasets import open_preferences_of

SECTION = "preferences"
UNCUT = 2**40  # tokens
LEAST_PROMPT = 8  # a prompt that is cut keeps at least this part of a row: one in so many tokens


@dataclass
class PreferenceReport(ChatReport):
    """What was prepared. examples and held_out count pairs, or single answers; read and trained, tokens of all their answers.

    paired: pairs, not single answers. cut_answers: of those that were truncated, how many lost an answer's end, not the prompt's beginning
    alone. chosen, rejected: tokens of the better and of the worse answers. longer: pairs whose chosen answer is the longer one. good:
    single answers that are good.
    """

    paired: bool = True
    cut_answers: int = 0
    chosen: int = 0
    rejected: int = 0
    longer: int = 0
    good: int = 0

    def lines(self) -> list[str]:
        """The report as lines of text."""
        count, what = max(1, self.examples + self.held_out), "pairs" if self.paired else "answers"
        bad = count - self.good
        lengths = [
            f"A chosen answer has {self.chosen / count:.1f} tokens on average, a rejected one {self.rejected / count:.1f}; the chosen one "
            f"is the longer in {self.longer / count:.0%} of the pairs.",
        ]
        labels = [
            f"{self.good:,} answers are good, with {self.chosen / max(1, self.good):.1f} tokens on average, and {bad:,} bad, with "
            f"{self.rejected / max(1, bad):.1f}."
        ]
        return [
            f"{self.examples:,} {what} to train on and {self.held_out:,} held out.",
            *(lengths if self.paired else labels),
            f"{self.truncated:,} were cut to the row, of which {self.cut_answers:,} lost ends of answers; {self.dropped:,} were dropped, "
            "since the cut left nothing that differs.",
            *super().lines()[3:],
        ]


@dataclass(frozen=True)
class PreparedPairs(PreparedChats):
    """Prepared preference data. The report says whether they are pairs or single answers."""

    report: PreferenceReport


def prepare_preferences(config: PreferenceConfig, output: Path, seq: int, console: Console | None = None) -> PreparedPairs:
    """Prepare pairs or single answers, unless that is done already.

    Args:
        output: the folder of all preparations; this one gets a folder in it.
        seq: tokens of a row, into which a pair, the prompt twice, must fit (`cut_to_row`). Virtual tokens need theirs beside it.
        console: where a progress bar goes, if it is a terminal.
    """
    return open_preferences(prepared_folder(config, output, seq, console, SECTION, write_preferences))


def open_preferences(folder: Path) -> PreparedPairs:
    """Open prepared preferences. folder: of this one preparation."""
    return opened(folder, PreparedPairs, PreferenceReport)


def write_preferences(
    config: PreferenceConfig, folder: Path, seq: int, tokenizer: TextTokenizer, template: ChatTemplate, advance: Callable[[int], None]
) -> PreferenceReport:
    """Write the shards of both sides."""
    report, kind, names = PreferenceReport(), None, names_of(config.sources)
    writer = SideWriter(folder, tokenizer, config.held_out_share, names, SECTION)
    make = ChatExamples(tokenizer, template, UNCUT)
    preferences = (each.with_system(config.system) for source in config.sources for each in open_preferences_of(source))
    stops: dict[str, None] = {}
    while some := list(islice(preferences, BATCH)):
        examples = iter(make([answer for preference in some for answer in preference.answers]))
        for preference in some:
            found = [next(examples) for _ in preference.answers]
            kind = kind or len(found)
            require_comparable(found, kind, preference.place, template)
            report.turns += sum(example.turns for example in found)
            report.longest = max(report.longest, *(example.length for example in found))
            kept = cut_to_row(found, seq)
            report.truncated += sum(len(example.ids) for example in kept) < sum(example.length for example in found)
            if not all(example.trained.any() for example in kept) or same_ids(kept):
                report.dropped += 1
                continue
            count(report, found, kept, preference.value)
            stops |= dict.fromkeys(stop for example in found for stop in example.stops)
            if len(report.shown) < SHOWN:
                report.shown += [make.pieces(example) for example in kept]
            for example in kept:
                writer.add(preference.answers[0].prompt_digest(), replace(example, value=preference.value))
        advance(len(some))
    if not writer.added:
        late = f"{report.dropped:,} were dropped, since a row of {seq:,} tokens leaves nothing of the answers that differs"
        what = f"{late}. Give others, or a larger seq" if report.dropped else "there is no record. Give some"
        raise CourseError(f"{names} leaves no preference to learn from: {what}.")
    report.paired, report.stops, report.unread = kind == 2, list(stops), dict(make.unread.counts.most_common())
    report.rewritten = make.rewritten
    if not report.paired and report.good in (0, writer.added):
        raise CourseError(f"All {writer.added:,} answers have the same label: give good ones (label true) and bad ones (label false).")
    counts = writer.finish()
    report.examples, report.held_out = counts["training"] // kind, counts["held_out"] // kind
    return report


def require_comparable(found: Sequence[Example], kind: int, place: str, template: ChatTemplate) -> None:
    """Reject a mixture of pairs and single answers, and answers that the template makes equal."""
    if len(found) != kind:
        here, before = ("a pair", "single answers") if len(found) == 2 else ("a single answer", "pairs")
        raise ChatError(f"{place} is {here}, and the records before it are {before}: give one kind.")
    if same_ids(found):
        raise ChatError(f"{place} has two answers that the chat template {template.name} makes equal: mend or remove it.")


def same_ids(examples: Sequence[Example]) -> bool:
    return len(examples) == 2 and np.array_equal(examples[0].ids, examples[1].ids)


def count(report: PreferenceReport, found: Sequence[Example], kept: Sequence[Example], value: float) -> None:
    """Add answers to the report."""
    lengths = [int(example.trained.sum()) for example in found]
    report.read += sum(len(example.ids) for example in kept)
    report.trained += sum(int(example.trained.sum()) for example in kept)
    report.cut_answers += any(int(after.trained.sum()) < before for after, before in zip(kept, lengths, strict=True))
    good = len(found) == 2 or value > 0
    report.chosen += lengths[0] if good else 0
    report.rejected += lengths[-1] if len(found) == 2 or not good else 0
    report.longer += lengths[0] > lengths[-1]
    report.good += len(found) == 1 and good


def cut_to_row(examples: Sequence[Example], room: int) -> list[Example]:
    """Answers to one prompt, cut so that all together have at most `room` tokens.

    First all lose the same tokens of the prompt's beginning, which keeps at least an eighth of the room: the answer depends most on what is
    said last. Then each answer ends after the same number of tokens, so that none is judged by more of it than the other.
    """
    prompts = [int(example.trained.argmax()) for example in examples]
    over = sum(len(example.ids) for example in examples) - room
    if over <= 0:
        return list(examples)
    cut = min(max(0, min(prompts) - max(1, room // LEAST_PROMPT)), -(-over // len(examples)))
    answers = [len(example.ids) - prompt for example, prompt in zip(examples, prompts, strict=True)]
    space = room - sum(prompts) + cut * len(examples)
    most = next((most for most in range(max(answers), 0, -1) if sum(min(answer, most) for answer in answers) <= space), 0)
    ends = [prompt + min(answer, most) for prompt, answer in zip(prompts, answers, strict=True)]
    return [replace(each, ids=each.ids[cut:end], trained=each.trained[cut:end]) for each, end in zip(examples, ends, strict=True)]
