"""Chapter 03. The cleaning report: documents and bytes in and out of each stage, reasons, examples, histograms of lengths and scores.

Counts and a few examples are all that is kept, so a report of a million documents is as small as one of ten.
"""

import io
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from shared.course import figures
from shared.data.cleaning.stages import Verdict
from shared.output_files import write_atomically

EXAMPLES = 3  # kept for each reason
LENGTH_BINS = 32  # bin b holds lengths of 2**b to 2**(b + 1) - 1 bytes
SCORE_BINS = 20  # over 0 to 1
RULES_OF_OTHER_TEXT = {
    "line over": "The rules of quality are those for code: for prose, set prepare.cleaning.text to prose. ",
    "stop words": "For prose in other languages, give theirs in prepare.cleaning.stop_words, or [] for any. ",
}


@dataclass
class Dropped:
    """One document that was dropped, and its score if the stage gives one."""

    name: str
    reason: str
    score: float | None = None


@dataclass
class StageReport:
    """What one stage let through. `kept` and `dropped` count the documents by score, in SCORE_BINS bins; at `threshold` it decides."""

    name: str
    threshold: float | None = None
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    changed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    examples: list[Dropped] = field(default_factory=list)
    kept: list[int] = field(default_factory=lambda: [0] * SCORE_BINS)
    dropped: list[int] = field(default_factory=lambda: [0] * SCORE_BINS)

    def count(self, name: str, size_in: int, size_out: int, changed: bool, verdict: Verdict) -> None:
        """Take in what the stage did to one document."""
        self.documents_in += 1
        self.bytes_in += size_in
        self.changed += changed
        if verdict.score is not None:
            (self.dropped if verdict.reason else self.kept)[min(int(verdict.score * SCORE_BINS), SCORE_BINS - 1)] += 1
        if verdict.reason is None:
            self.documents_out += 1
            self.bytes_out += size_out
        else:
            keep_example(self.reasons, self.examples, Dropped(name, verdict.reason, verdict.score))


@dataclass
class CleaningReport:
    """All stages in their order, what could not be read at all, and the lengths before and after. held_out_in_training: how many held-out
    documents are also in the training text, the same except for white space at their ends."""

    stages: list[StageReport] = field(default_factory=list)
    unreadable: dict[str, int] = field(default_factory=dict)
    unreadable_examples: list[Dropped] = field(default_factory=list)
    lengths_in: list[int] = field(default_factory=lambda: [0] * LENGTH_BINS)
    lengths_out: list[int] = field(default_factory=lambda: [0] * LENGTH_BINS)
    held_out_in_training: int = 0

    @property
    def documents_in(self) -> int:
        """How many documents have been judged."""
        return sum(self.lengths_in)

    @property
    def documents_out(self) -> int:
        """How many of them were kept."""
        return sum(self.lengths_out)

    def reasons(self) -> dict[str, int]:
        """How many documents each rule dropped, by its reason and stage, commonest first."""
        found = {f"{reason} ({stage.name})": count for stage in self.stages for reason, count in stage.reasons.items()}
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def in_words(self) -> str:
        """Which share of the documents each rule dropped, in a sentence; empty where all were kept."""
        if not (dropped := self.documents_in - self.documents_out):
            return ""
        among = self.documents_in
        rules = "; ".join(f"{count / among:.1%} {reason}" for reason, count in self.reasons().items())
        return f"Cleaning dropped {dropped:,} of {among:,} documents ({dropped / among:.1%}): {rules}. {self.advice()}"

    def advice(self) -> str:
        """What to set where the rules of quality are for other text: long lines are no fault of prose, nor stop words of a language."""
        by_rule = Counter()
        for reason, count in self.reasons().items():
            by_rule.update({rule: count for rule in RULES_OF_OTHER_TEXT if rule in reason})
        (rule, count), *_ = by_rule.most_common(1) or [("", 0)]
        return RULES_OF_OTHER_TEXT[rule] if count >= 0.1 * self.documents_in > 0 else ""

    def skip(self, name: str, reason: str) -> None:
        """Note something that is no text: what `open_source` calls."""
        general = reason.split(" (")[0]
        keep_example(self.unreadable, self.unreadable_examples, Dropped(name, general))

    def examples(self) -> list[Dropped]:
        """Examples of everything that was left out, what could not be read first."""
        return [*self.unreadable_examples, *(example for stage in self.stages for example in stage.examples)]

    def table(self) -> Table:
        """Documents and megabytes, one line a stage, and below it one for each reason to drop, commonest first."""
        table = Table(title="Cleaning")
        table.add_column("stage")
        for column in ("in", "out", "MB in", "MB out", "changed"):
            table.add_column(column, justify="right")
        if self.unreadable:
            table.add_row("reading")
            add_reasons(table, self.unreadable)
        for stage in self.stages:
            sizes = (f"{stage.bytes_in / 1e6:.2f}", f"{stage.bytes_out / 1e6:.2f}")
            table.add_row(stage.name, f"{stage.documents_in:,}", f"{stage.documents_out:,}", *sizes, f"{stage.changed:,}")
            add_reasons(table, stage.reasons)
        return table

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> "CleaningReport":
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, record: dict) -> "CleaningReport":
        """From what `dataclasses.asdict` made of one, and JSON kept."""
        stages = [StageReport(**stage | {"examples": [Dropped(**e) for e in stage["examples"]]}) for stage in record["stages"]]
        return cls(**record | {"stages": stages, "unreadable_examples": [Dropped(**e) for e in record["unreadable_examples"]]})

    def draw(self, figure) -> None:
        """Lengths before and after, and the scores of each stage that decides by them, on a matplotlib figure."""
        figures.use_style()
        scored = [stage for stage in self.stages if stage.threshold is not None and (any(stage.kept) or any(stage.dropped))]
        lengths, *others = figure.subplots(1, 1 + len(scored), squeeze=False)[0]
        used = [number for number, count in enumerate(self.lengths_in) if count] or [0]
        bins = range(min(used), max(used) + 1)
        lengths.bar(bins, [self.lengths_in[b] for b in bins], color=figures.WRONG, label="dropped")
        lengths.bar(bins, [self.lengths_out[b] for b in bins], color=figures.TRAINING, label="kept")
        lengths.set(xlabel="length (bytes, as a power of 2)", ylabel="documents", ylim=(0, 1.45 * max(*self.lengths_in, 1)))
        lengths.legend(loc="upper right", ncols=2)
        for axes, stage in zip(others, scored, strict=True):
            places = [(number + 0.5) / SCORE_BINS for number in range(SCORE_BINS)]
            axes.bar(places, stage.kept, 1 / SCORE_BINS, color=figures.TRAINING)
            axes.bar(places, stage.dropped, 1 / SCORE_BINS, bottom=stage.kept, color=figures.WRONG)
            axes.axvline(stage.threshold, color=figures.REFERENCE, linestyle="--", linewidth=1, label="threshold")
            room = 20 * max(*stage.kept, *stage.dropped)  # above the bars, for the legend
            axes.set(xlabel=f"score of {stage.name}", ylabel="documents (log)", yscale="symlog", xlim=(0, 1), ylim=(0, room))
            axes.legend(loc="upper left")

    def plot(self, path: Path) -> None:
        """`draw` as a PNG."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.4), layout="constrained")
        self.draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        write_atomically(path, buffer.getvalue())


def keep_example(reasons: dict[str, int], examples: list[Dropped], dropped: Dropped) -> None:
    reasons[dropped.reason] = reasons.get(dropped.reason, 0) + 1
    if reasons[dropped.reason] <= EXAMPLES:
        examples.append(dropped)


def add_reasons(table: Table, reasons: dict[str, int]) -> None:
    for reason, count in sorted(reasons.items(), key=lambda entry: -entry[1]):
        table.add_row(f"  {reason}", "", f"-{count:,}")
