"""Floor 0. Terminal output: colours and wrapping on a terminal, plain text everywhere else.

rich decides what is a terminal (it knows NO_COLOR and dumb ones); a pipe gets the text that a notebook prints.
"""

import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from shared.course.report import WIDTH, Line

if TYPE_CHECKING:
    from rich.syntax import Syntax

REPLACEMENT = "\ufffd"  # the replacement character


def open_console() -> Console:
    """Standard output as it is now. A pipe has no width of its own: it gets that of plain text."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def print_lines(console: Console, lines: Iterable[Line]) -> None:
    for line in lines:
        for part in line.wrapped(console.width):
            console.print(Text(part, line.style), soft_wrap=True)


def say(console: Console, text: str = "", style: str = "") -> None:
    """Text of any number of lines, each wrapped below its own beginning."""
    print_lines(console, [Line(part, style) for part in text.splitlines() or [""]])


def printable(text: str) -> str:
    """The text with a replacement character for each control or format character but tab and newline: a terminal would obey those."""
    return "".join(REPLACEMENT if unicodedata.category(each)[0] == "C" and each not in "\t\n" else each for each in text)


def print_python(console: Console, source: str) -> None:
    """Python as it is: highlighted on a terminal with colours, unchanged elsewhere."""
    if console.color_system is None:
        console.print(Text(source), soft_wrap=True)
    else:
        console.print(highlighted(source))


def highlighted(source: str) -> "Syntax":
    from rich.syntax import Syntax  # with pygments, where something is coloured

    return Syntax(source, "python", theme="ansi_dark", background_color="default", word_wrap=True)
