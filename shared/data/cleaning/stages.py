"""Chapter 03. Cleaning stages: encoding repair, length filter, language identification, quality filter (Gopher's and StarCoder's rules).

A stage measures a text, which depends on that text alone and so can be done in any process, and then judges what it measured, which
may depend on the documents before it and so is done in one place, in order. Every judgement that drops a document gives its reason.

Rules of quality are cheap, say why, and remove the worst: lists, tables of numbers, files that a program wrote. Those for prose are
Gopher's (Rae et al. 2021, appendix A.1.1), those for code CodeParrot's and StarCoder's (Li et al. 2023, section 3). A document is dropped
at the first rule that it breaks.

Gopher's eight stop words are English; the other languages have ten of their most frequent words each.

Left out on purpose: a model as judge of quality (FineWeb-Edu), which is a stage like any other: a text in, a score and a reason out.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol


class Measured(NamedTuple):
    """A text after a stage, perhaps changed, and what the stage found out about it."""

    text: str
    value: Any = None


class Verdict(NamedTuple):
    """Why a document is dropped, or None to keep it; and a score from 0 to 1 for the report, if the stage has one."""

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


STOP_WORDS = {
    "en": {"the", "be", "to", "of", "and", "that", "have", "with"},
    "de": {"der", "die", "das", "und", "in", "zu", "den", "ist", "mit", "nicht"},
    "es": {"el", "la", "de", "que", "y", "en", "los", "se", "por", "con"},
    "fr": {"le", "la", "de", "et", "les", "des", "en", "un", "que", "pour"},
    "it": {"il", "la", "di", "che", "e", "per", "un", "con", "non", "del"},
    "nl": {"de", "het", "een", "van", "en", "dat", "te", "met", "niet", "op"},
    "pl": {"w", "i", "na", "z", "się", "nie", "do", "że", "jest", "to"},
    "pt": {"o", "a", "de", "que", "e", "do", "da", "em", "um", "para"},
}
BULLETS = ("-", "*", "•", "●")
GENERATED = re.compile(r"auto[- ]?generated|automatically generated|generated by|do not edit|@generated", re.IGNORECASE)
FIRST_LINES = 10  # where a generated file says so


@dataclass(frozen=True)
class ProseQuality:
    """Gopher's rules. The score is the share of words that have a letter in them.

    Args:
        stop_words: codes of languages (`STOP_WORDS`); a document needs two stop words of one of them. Empty for no such rule.
        fewest_words, most_words: words that a document may have.
    """

    stop_words: tuple[str, ...] = ("en",)
    fewest_words: int = 50
    most_words: int = 100_000
    name: str = "quality"
    remembers: ClassVar[bool] = False
    threshold: ClassVar[float] = 0.8

    def measure(self, text: str) -> Measured:
        words = text.split()
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        count = max(len(words), 1)
        bare = {word.strip(".,;:!?\"'()").lower() for word in words}
        with_letter = sum(any(map(str.isalpha, word)) for word in words) / count
        rules = {
            f"fewer than {self.fewest_words} words": len(words) < self.fewest_words,
            f"more than {self.most_words} words": len(words) > self.most_words,
            "mean word length outside 3 to 10": not 3 <= sum(map(len, words)) / count <= 10,
            "more than one # in ten words": text.count("#") / count > 0.1,
            "more than one ellipsis in ten words": (text.count("...") + text.count("…")) / count > 0.1,
            "nine lines in ten begin with a bullet": share(lines, lambda line: line.startswith(BULLETS)) > 0.9,
            "three lines in ten end with an ellipsis": share(lines, lambda line: line.endswith(("...", "…"))) > 0.3,
            "fewer than eight words in ten have a letter": with_letter < self.threshold,
            "fewer than two stop words": max((len(bare & STOP_WORDS[code]) for code in self.stop_words), default=2) < 2,
            "three lines in ten repeat another": 1 - len(set(lines)) / max(len(lines), 1) > 0.3,
        }
        return Measured(text, (broken(rules), with_letter))

    def decide(self, value: tuple[str | None, float]) -> Verdict:
        return Verdict(*value)


@dataclass(frozen=True)
class CodeQuality:
    """Rules for source code. The score is the share of characters that are letters or digits.

    Args:
        longest_line, longest_mean_line: characters.
        least_alphanumeric: share of the characters.
    """

    longest_line: int = 1000
    longest_mean_line: int = 100
    least_alphanumeric: float = 0.25
    name: str = "quality"
    remembers: ClassVar[bool] = False

    @property
    def threshold(self) -> float:
        return self.least_alphanumeric

    def measure(self, text: str) -> Measured:
        lines = text.splitlines() or [""]
        alphanumeric = len(re.findall(r"[^\W_]", text)) / max(len(text), 1)
        rules = {
            "says that a program wrote it": bool(GENERATED.search("\n".join(lines[:FIRST_LINES]))),
            f"a line over {self.longest_line} characters": max(map(len, lines)) > self.longest_line,
            f"mean line over {self.longest_mean_line} characters": len(text) / len(lines) > self.longest_mean_line,
            "too few letters and digits": alphanumeric < self.least_alphanumeric,
        }
        return Measured(text, (broken(rules), alphanumeric))

    def decide(self, value: tuple[str | None, float]) -> Verdict:
        return Verdict(*value)


def share(lines: list[str], holds) -> float:
    return sum(map(holds, lines)) / max(len(lines), 1)


def broken(rules: dict[str, bool]) -> str | None:
    """The first rule that is broken."""
    return next((rule for rule, is_broken in rules.items() if is_broken), None)
