"""Chapter 03. Clean shards: cleaned text on disk in Parquet files, each with all that is needed to resume the cleaning after it.

A part is complete when its JSON file exists, which is written last. It holds the report up to there and how many documents had been read; a
third file holds what the stages came to remember. So an interrupted preparation resumes after the last whole part, and ends with the
same parts as one that was not interrupted.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shared.corpus import Document, split
from shared.course.errors import CourseError
from shared.data.cleaning.cleaner import Cleaner, CleaningConfig
from shared.data.cleaning.duplicates import text_digest
from shared.data.cleaning.report import CleaningReport
from shared.data.shards import map_arrays, serialized
from shared.data.source import Source
from shared.data.sources import open_source
from shared.data.tables import first_line
from shared.output_files import write_atomically

LAST = "complete.json"  # there when all parts are


class CleanShards:
    """The parts of a folder.

    Args:
        folder: made if it is not there.
        held_out_share: which share of the documents is held out, by their names, as `shared.corpus.split` does.
    """

    def __init__(self, folder: Path, held_out_share: float):
        self.folder, self.held_out_share = folder, held_out_share

    def path(self, number: int, ending: str) -> Path:
        return self.folder / f"{number:05}{ending}"

    def count(self) -> int:
        """How many parts are whole."""
        number = 0
        while self.path(number, ".json").exists():
            number += 1
        return number

    def complete(self) -> bool:
        return (self.folder / LAST).exists()

    def record(self, number: int) -> dict:
        """Sizes of a part's two sides, and the report up to its end."""
        with self.undamaged(self.path(number, ".json")) as path:
            return checked(json.loads(path.read_text(encoding="utf-8")), "training_documents")

    def whole(self) -> dict:
        """The record of all parts together."""
        with self.undamaged(self.folder / LAST) as path:
            return checked(json.loads(path.read_text(encoding="utf-8")), "parts")

    @contextmanager
    def undamaged(self, path: Path, *more: type[Exception]) -> Iterator[Path]:
        """Says which file is damaged, and that the text can be prepared again, where a library says only what it did not expect.

        more: errors of that library's own.
        """
        try:
            yield path
        except (OSError, ValueError, KeyError, TypeError, RecursionError, *more) as error:
            cure = f"delete {self.folder.parent}, and the same command prepares the text again"
            raise CourseError(f"{path} is damaged ({first_line(error)}): {cure}.") from error

    def size(self, side: str) -> int:
        """Bytes of text of one side, "training" or "held_out", over all parts."""
        return self.whole()[f"{side}_bytes"]

    def documents_of_sources(self, sources: int) -> list[int]:
        """How many documents to train on each source has."""
        records = [self.record(number)["training_documents"] for number in range(self.count())]
        return [sum(counts.get(str(source), 0) for counts in records) for source in range(sources)]

    def report(self) -> CleaningReport:
        with self.undamaged(self.folder / LAST):
            return CleaningReport.from_dict(self.whole()["report"])

    def make(
        self, sources: Sequence[Source], config: CleaningConfig, part_bytes: int, workers: int, progress: Callable[[int], None]
    ) -> None:
        """Read, clean and write whatever parts are missing.

        Args:
            part_bytes: bytes of text after which a part ends.
            workers: processes that measure; 0 for none.
            progress: called with the bytes of each document that was kept.
        """
        number = self.count()
        cleaner, read = self.resume(config, number)
        reading = Reading(sources, read)
        documents: list[Document] = []
        size = 0
        for document in cleaner.clean(reading, workers):
            documents.append(document)
            size += len(document.content)
            progress(len(document.content))
            if size >= part_bytes:
                reading.release(cleaner.report)
                self.write(number, documents, cleaner)
                documents, size, number = [], 0, number + 1
        reading.release(cleaner.report, everything=True)
        if documents:
            self.write(number, documents, cleaner, only=number == 0)
            number += 1
        cleaner.report.held_out_in_training = self.held_out_in_training(number)
        self.finish(number, cleaner.report, sources)

    def held_out_in_training(self, parts: int) -> int:
        """How many held-out documents are also in the training text: none after the stage exact duplicates, or a loss that is too good."""

        def digests(held_out: bool) -> Iterator[bytes]:
            batches = (texts for number in range(parts) for _, texts in self.documents(number, held_out))
            return (text_digest(text) for texts in batches for text in texts)

        held_out = Counter(digests(held_out=True))
        return sum(held_out[digest] for digest in {digest for digest in digests(held_out=False) if digest in held_out})

    def resume(self, config: CleaningConfig, parts: int) -> tuple[Cleaner, int]:
        """The cleaner as it was at the end of the last whole part, and how many documents had been read."""
        if not parts:
            return Cleaner(config), 0
        record = self.record(parts - 1)
        cleaner = Cleaner(config, CleaningReport.from_dict(record["report"]))
        for number in range(parts):
            with self.undamaged(self.path(number, ".remembered.safetensors")) as path:
                _, arrays = map_arrays(path)
            ends = {name.removesuffix(" ends"): end for name, end in arrays.items() if name.endswith(" ends")}
            cleaner.remember({name: np.split(arrays[name], end[:-1]) if len(end) else [] for name, end in ends.items()})
        return cleaner, cleaner.report.documents_in

    def write(self, number: int, documents: list[Document], cleaner: Cleaner, only: bool = False) -> None:
        """Write one part: its text, what the stages remembered in it, and last its record.

        Args:
            only: it is all there is, so where no document is on one side, each document is cut in two.
        """
        names = [document.name for document in documents]
        texts = [document.content.decode() for document in documents]
        held_out = [is_held_out(name, self.held_out_share) for name in names]
        if only and len(set(held_out)) < 2:
            names, texts, held_out = cut_by_end(names, texts, self.held_out_share)
        import pyarrow.parquet  # only where text is prepared: a run that finds it prepared starts without

        self.folder.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table({"name": names, "text": pyarrow.array(texts, pyarrow.large_string()), "held_out": held_out})
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, sink, compression="zstd", row_group_size=512)
        write_atomically(self.path(number, ".parquet"), sink.getvalue())
        write_atomically(self.path(number, ".remembered.safetensors"), serialized(flattened(cleaner.remembered)))
        cleaner.forget_remembered()
        sizes = [sum(len(text.encode()) for text, side in zip(texts, held_out, strict=True) if side is out) for out in (False, True)]
        # Sources are read one after the other and documents keep their order, so counts say which document is whose.
        counts = Counter(document.source for document, out in zip(documents, held_out, strict=False) if not out)
        record = {"training_bytes": sizes[0], "held_out_bytes": sizes[1], "training_documents": counts, "report": asdict(cleaner.report)}
        write_atomically(self.path(number, ".json"), json.dumps(record).encode())

    def finish(self, parts: int, report: CleaningReport, sources: Sequence[Source]) -> None:
        """Note that all parts are there."""
        if not report.documents_out:
            raise CourseError(nothing_kept(report) if report.documents_in else nothing_read(report, sources))
        totals = {side: sum(self.record(number)[side] for number in range(parts)) for side in ("training_bytes", "held_out_bytes")}
        for side, purpose, other in (("training_bytes", "to train on", "smaller"), ("held_out_bytes", "to hold out", "larger")):
            if not totals[side]:
                raise CourseError(
                    f"Of {counted(report.documents_out)} that cleaning kept, nothing is left {purpose}: "
                    f"give more text, or a {other} held_out_share than {self.held_out_share}."
                )
        write_atomically(self.folder / LAST, json.dumps(totals | {"parts": parts, "report": asdict(report)}).encode())

    def documents(self, number: int, held_out: bool, rows: int = 64) -> Iterator[tuple[list[str], list[str]]]:
        """Names and texts of one part's documents of one side, some at a time."""
        import pyarrow.compute
        import pyarrow.parquet

        parquet = self.undamaged(self.path(number, ".parquet"), pyarrow.ArrowException)
        with parquet as path, pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=rows):
                chosen = batch.filter(batch.column("held_out") if held_out else pyarrow.compute.invert(batch.column("held_out")))
                yield chosen.column("name").to_pylist(), chosen.column("text").to_pylist()


class Reading:
    """The documents of several sources, sequentially, from number `read` on.

    What is no text goes into the report once the document after it has been judged: workers read ahead, and a part's report must
    stand where the part ends.
    """

    def __init__(self, sources: Sequence[Source], read: int):
        self.sources, self.read = sources, read
        self.skipped: deque[tuple[int, str, str]] = deque()  # documents before it, its name, the reason

    def __iter__(self) -> Iterator[Document]:
        opened = 0

        def note(name: str, reason: str) -> None:
            if opened >= self.read:
                self.skipped.append((opened, name, reason))

        for number, source in enumerate(self.sources):
            prefix = f"{Path(source.path).name}/" if len(self.sources) > 1 else ""
            for document in open_source(source, note):
                opened += 1
                if opened > self.read:
                    yield Document(prefix + document.name, document.content, number)

    def release(self, report: CleaningReport, everything: bool = False) -> None:
        """Report what was skipped among the documents that have been judged."""
        while self.skipped and (everything or self.skipped[0][0] < report.documents_in):
            report.skip(*self.skipped.popleft()[1:])


def nothing_read(report: CleaningReport, sources: Sequence[Source]) -> str:
    """Why there is no document at all, with examples of what was no text."""
    examples, others = report.unreadable_examples, sum(report.unreadable.values()) - len(report.unreadable_examples)
    listed = [f"{example.name} {example.reason}" for example in examples] + [f"and {others:,} more"] * (others > 0)
    where = ", ".join(source.path for source in sources)
    reasons = "; ".join(listed) or "it holds nothing"
    return f"Nothing in {where} could be read: {reasons}. Convert it to UTF-8 text, or give other data."


def nothing_kept(report: CleaningReport) -> str:
    """Why cleaning dropped every document, commonest reason first."""
    listed = "; ".join(f"{count:,} {reason}" for reason, count in report.reasons().items())
    return (
        f"Cleaning left no text to train on: of {counted(report.documents_in)}, 0 were kept. Dropped: {listed}. {report.advice()}"
        "Give other text, or less strict cleaning (prepare.cleaning)."
    )


def checked(record: Any, field: str) -> dict:
    """A record that holds what it must: the report, and this field."""
    if not isinstance(record, dict) or not {field, "report", "training_bytes", "held_out_bytes"} <= set(record):
        raise ValueError("it is not a record of cleaned text")
    return record


def counted(documents: int) -> str:
    return f"{documents:,} document{'s' * (documents != 1)}"


def flattened(remembered: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """For each stage the values end to end, and where each ends."""
    arrays = {}
    for name, values in remembered.items():
        arrays[name] = np.concatenate(values) if values else np.empty(0, np.uint8)
        arrays[f"{name} ends"] = np.cumsum([len(value) for value in values], dtype=np.int64)
    return arrays


def is_held_out(name: str, share: float) -> bool:
    return bool(split([Document(name, b"")], share).held_out)


def cut_by_end(names: list[str], texts: list[str], share: float) -> tuple[list[str], list[str], list[bool]]:
    """For too few documents to hold one out: the last part of each is held out."""
    cuts = [round(len(text) * (1 - share)) for text in texts]
    begins = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    ends = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    return names + [f"{name} (end)" for name in names], begins + ends, [False] * len(names) + [True] * len(names)
