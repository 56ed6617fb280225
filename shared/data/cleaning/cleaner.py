"""Chapter 03. The cleaning pipeline: every stage in order over a stream of documents, in one process or several, with the same result.

Measuring is most of the work and needs the one text only, so workers do it. Judging may need what came before, so it happens here, in
the order of the documents. A stage's memory can be saved and restored, so an interrupted cleaning can resume.
"""

import difflib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from multiprocessing import get_context
from typing import Any, Literal, NamedTuple

import numpy as np

from shared.course.errors import SettingError
from shared.course.extensions import Extension, ImportPath, is_import_path
from shared.corpus import Document
from shared.course.bounds import NonNegativeInt, Share, checked
from shared.data.cleaning.duplicates import ExactDuplicates, NearDuplicates
from shared.data.cleaning.stages import STOP_WORDS, CodeQuality, FixEncoding, Language, Length, ProseQuality, Stage, Verdict
from shared.data.cleaning.report import LENGTH_BINS, CleaningReport, StageReport

NAMES = ("repair", "length", "exact duplicates", "language", "quality", "near duplicates")
ENGLISH = ("en",)
CHUNK = 32  # documents sent to a worker at a time


@dataclass(frozen=True)
@checked
class CleaningConfig:
    """How to clean.

    Args:
        stages: which stages, in which order: repair, length, exact duplicates, language, quality, near duplicates. Or one of your own by
            import path, such as my_module.MyStage or {name: my_module.MyStage, options: {limit: 3}} (`shared.data.cleaning.stages.Stage`).
        text: what the rules of quality are for.
        stop_words: languages of prose, by their codes, such as [de, en]: a document needs two frequent words of one of them. [] for any
            language.
        min_bytes: bytes of the shortest document to keep.
        max_bytes: bytes of the longest.
        languages: to keep, by their codes, such as [en, de]; for the stage language.
        min_probability: the least probability of the language.
        similarity: share of common runs of words from which two documents are near duplicates.
    """

    stages: tuple[ImportPath | Extension, ...] = ("repair", "length", "exact duplicates", "quality", "near duplicates")
    text: Literal["code", "prose"] = "code"
    stop_words: tuple[str, ...] = ENGLISH
    min_bytes: NonNegativeInt = 64
    max_bytes: int = 2_000_000
    languages: tuple[str, ...] = ()
    min_probability: Share = 0.5
    similarity: Share = 0.8

    def __post_init__(self) -> None:
        for stage in self.stages:
            if isinstance(stage, str) and stage not in NAMES and not is_import_path(stage):
                nearest = difflib.get_close_matches(stage, NAMES, n=1, cutoff=0)[0]
                raise ValueError(f"There is no cleaning stage {stage!r}. Did you mean {nearest!r}? There are: {', '.join(NAMES)}.")
        if any(self.stages.count(stage) > 1 for stage in self.stages):
            raise ValueError(f"The cleaning stages are {list(self.stages)}: give each at most once.")
        if bool(self.languages) != ("language" in self.stages):
            raise ValueError("Languages and the cleaning stage 'language' need each other: give both or neither.")
        if unknown := [code for code in self.stop_words if code not in STOP_WORDS]:
            raise ValueError(f"There are no stop words of {unknown[0]!r}: give some of {', '.join(STOP_WORDS)}, or [] for any language.")
        if self.text == "code" and self.stop_words != ENGLISH:
            raise ValueError("stop_words are for prose, and text is code: give text prose, or leave them out.")
        if self.min_bytes > self.max_bytes:
            raise ValueError(f"min_bytes is {self.min_bytes} and max_bytes {self.max_bytes}: give max_bytes no less.")

    def build(self) -> list[Stage]:
        """The stages, new ones that remember nothing."""
        stages = {
            "repair": FixEncoding,
            "length": lambda: Length(self.min_bytes, self.max_bytes),
            "exact duplicates": ExactDuplicates,
            "language": lambda: Language(self.languages, self.min_probability),
            "quality": lambda: CodeQuality() if self.text == "code" else ProseQuality(self.stop_words),
            "near duplicates": lambda: NearDuplicates(self.similarity),
        }
        return [stages[stage]() if stage in NAMES else own_stage(stage) for stage in self.stages]


def own_stage(stage: str | Extension) -> Stage:
    """A stage by import path."""
    extension = Extension(stage) if isinstance(stage, str) else stage
    made = extension.bound("data.prepare.cleaning.stages")()
    needed = ["name", "remembers", "measure", "decide", *(["remember"] if getattr(made, "remembers", False) else [])]
    if lacking := [name for name in needed if not hasattr(made, name)]:
        raise SettingError(f"data.prepare.cleaning.stages: {extension.name} has no {lacking[0]}: a stage needs {', '.join(needed)}.")
    return made


class Step(NamedTuple):
    """What one stage did to one document: sizes in bytes, and its value if the judgement has to wait, else the verdict."""

    size_in: int
    size_out: int
    changed: bool
    value: Any
    verdict: Verdict | None


class Cleaner:
    """Cleans documents and reports.

    Args:
        config: which stages.
        report: to continue counting in; None for a new one.

    Attributes:
        remembered: for each stage that remembers, by name, what it took in since the last `forget_remembered`.
    """

    def __init__(self, config: CleaningConfig, report: CleaningReport | None = None):
        self.config = config
        self.stages = config.build()
        self.report = report or CleaningReport([StageReport(stage.name, getattr(stage, "threshold", None)) for stage in self.stages])
        self.remembered: dict[str, list[np.ndarray]] = {stage.name: [] for stage in self.stages if stage.remembers}

    def clean(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        """The documents that pass every stage, as the stages left them, in their order.

        Args:
            documents: UTF-8, as `open_source` yields them.
            workers: processes that measure; 0 to do it here.
        """
        for document, text, steps in self.examined(documents, workers):
            if self.passes(document, steps):
                cleaned = replace(document, content=text.encode())
                self.report.lengths_out[length_bin(len(cleaned.content))] += 1
                yield cleaned

    def examined(self, documents: Iterable[Document], workers: int) -> Iterator[tuple[Document, str, list[Step]]]:
        """Each document with its text after all stages and their steps, in order; a few chunks are under way at a time."""
        if not workers:
            for document in documents:
                yield document, *examine(self.stages, document.content)
            return
        context = get_context("forkserver")  # a fork of this process would take its threads' locks along
        with ProcessPoolExecutor(workers, context) as pool:
            waiting: deque = deque()
            try:
                source = iter(documents)
                while chunk := list(islice(source, CHUNK)):
                    waiting.append((chunk, pool.submit(examine_all, self.config, [document.content for document in chunk])))
                    if len(waiting) > 2 * workers:
                        yield from finished(*waiting.popleft())
                while waiting:
                    yield from finished(*waiting.popleft())
            finally:
                pool.shutdown(cancel_futures=True)

    def passes(self, document: Document, steps: list[Step]) -> bool:
        """Let every stage decide, count, and say whether the document is kept."""
        self.report.lengths_in[length_bin(len(document.content))] += 1
        for stage, counted, step in zip(self.stages, self.report.stages, steps, strict=False):
            verdict = step.verdict or stage.decide(step.value)
            counted.count(document.name, step.size_in, step.size_out, step.changed, verdict)
            if verdict.reason is not None:
                return False
            if stage.remembers:
                self.remembered[stage.name].append(step.value)
        return True

    def remember(self, values: dict[str, Iterable[np.ndarray]]) -> None:
        """Put back what an interrupted cleaning remembered."""
        for stage in self.stages:
            for value in values.get(stage.name, ()):
                stage.remember(value)

    def forget_remembered(self) -> None:
        """Clear `remembered`; the stages keep their state."""
        for values in self.remembered.values():
            values.clear()


def examine(stages: list[Stage], content: bytes) -> tuple[str, list[Step]]:
    """Measure a document stage by stage, up to the first that drops it whatever came before."""
    text, steps = content.decode(), []
    for stage in stages:
        measured = stage.measure(text)
        verdict = None if stage.remembers else stage.decide(measured.value)
        size_in = steps[-1].size_out if steps else len(content)
        changed = measured.text != text
        size_out = len(measured.text.encode()) if changed else size_in
        steps.append(Step(size_in, size_out, changed, measured.value if stage.remembers else None, verdict))
        text = measured.text
        if verdict is not None and verdict.reason is not None:
            break
    return text, steps


def examine_all(config: CleaningConfig, contents: list[bytes]) -> list[tuple[str, list[Step]]]:
    return [examine(stages_of(config), content) for content in contents]


@cache
def stages_of(config: CleaningConfig) -> list[Stage]:
    """A worker's own stages, which only measure."""
    return config.build()


def finished(chunk: list[Document], future: Any) -> Iterator[tuple[Document, str, list[Step]]]:
    for document, (text, steps) in zip(chunk, future.result(), strict=True):
        yield document, text, steps


def length_bin(size: int) -> int:
    """The bin of a length in bytes: its power of two."""
    return min(max(size, 1).bit_length() - 1, LENGTH_BINS - 1)
