"""Chapter 03. Cleaning stages: what one is, and the small ones, which fix encodings, filter by length and identify the language.

A stage measures a text, which depends on that text alone and so can be done in any process, and then judges what it measured, which
may depend on the documents before it and so is done in one place, in order. Every judgement that drops a document gives its reason.

Left out on purpose: a model as judge of quality (FineWeb-Edu). It is a stage like any other: a text in, a score and a reason out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol


class Measured(NamedTuple):
    """A text after a stage, perhaps changed, and what the stage found out about it."""

    text: str
    value: Any = None


class Verdict(NamedTuple):
    """Why a document is dropped, or None to keep it; and a score to look at, from 0 to 1, if the stage has one."""

    reason: str | None = None
    score: float | None = None


class Stage(Protocol):
    """A stage of cleaning.

    name: as in the report. remembers: whether `decide` depends on the documents before. A stage that drops documents by their score has
    a `threshold` too, the score at which it does.
    """

    name: str
    remembers: ClassVar[bool]

    def measure(self, text: str) -> Measured:
        """What can be found out from this text alone."""

    def decide(self, value: Any) -> Verdict:
        """Whether to keep the document, from what was measured, and from the documents before if the stage remembers."""


@dataclass(frozen=True)
class FixEncoding:
    """Undo encodings that were mixed up ("cafÃ©"), line ends, and control characters, with ftfy (Speer 2019).

    What is a matter of taste, or of code, stays as it is: quotation marks, ligatures, widths, HTML entities, composed characters.
    """

    name: str = "repair"
    remembers: ClassVar[bool] = False

    def measure(self, text: str) -> Measured:
        return Measured("".join(map(self.repaired, text.splitlines(keepends=True))))

    def repaired(self, line: str) -> str:
        plain = line.removesuffix("\n").replace("\t", " ")
        if plain.isascii() and plain.isprintable():  # nothing to undo; ftfy would take its time to say so
            return line
        return self.fix(line)

    @cached_property
    def fix(self) -> Callable[[str], str]:
        import ftfy

        settings = ftfy.TextFixerConfig(
            unescape_html=False, fix_latin_ligatures=False, fix_character_width=False, uncurl_quotes=False, normalization=None
        )
        return partial(ftfy.fix_text, config=settings)

    def decide(self, value: None) -> Verdict:
        return Verdict()


@dataclass(frozen=True)
class Length:
    """Drop what is too short to learn from or too long to be text.

    min_bytes, max_bytes: bytes, both still kept.
    """

    min_bytes: int
    max_bytes: int
    name: str = "length"
    remembers: ClassVar[bool] = False

    def measure(self, text: str) -> Measured:
        return Measured(text, len(text.encode()))

    def decide(self, value: int) -> Verdict:
        if value < self.min_bytes:
            return Verdict(f"shorter than {self.min_bytes} bytes")
        return Verdict(f"longer than {self.max_bytes} bytes" if value > self.max_bytes else None)


@dataclass(frozen=True)
class Language:
    """Keep text in some languages, by py3langid (Lui and Baldwin 2012), judged from the first READ characters.

    languages: ISO 639-1 codes, such as "en". min_probability: the least probability.
    """

    languages: tuple[str, ...]
    min_probability: float
    name: str = "language"
    remembers: ClassVar[bool] = False
    READ: ClassVar[int] = 4000

    @property
    def threshold(self) -> float:
        return self.min_probability

    @cached_property
    def identifier(self) -> Any:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def measure(self, text: str) -> Measured:
        language, probability = self.identifier.classify(text[: self.READ])
        return Measured(text, (language, float(probability)))

    def decide(self, value: tuple[str, float]) -> Verdict:
        language, probability = value
        if language not in self.languages:
            return Verdict(f"its language is {language}", probability)
        return Verdict("its language is not certain" if probability < self.min_probability else None, probability)
