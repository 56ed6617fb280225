"""Chapter 12. What must be known before the core is imported: whose exercises it runs with."""

from pathlib import Path

from shared.trainer.settings import read_settings


def implementation_asked(words: list[str]) -> str:
    """The value of `impl` in the words, or in the file that they name, or the default.

    Raises:
        CourseError: the file cannot be read.
    """
    said = [word.split("=", 1)[1] for word in words if word.removeprefix("--").startswith("impl=")]
    if said:
        return said[-1]
    if words and "=" not in words[0] and not words[0].startswith("-"):
        return read_settings(Path(words[0])).get("impl", "reference")
    return "reference"
