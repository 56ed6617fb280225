"""Chapter 10. Checks of answers by code: whether an answer is the expected text, number, JSON value or Python program.

Left out on purpose: running the code that a model writes. Two functions count as the same if their syntax trees are. Nothing here needs
torch, so that a process which only judges texts starts quickly.
"""

import ast
import json
import re
from collections.abc import Callable


def same_number(answer: str, wanted: str) -> bool:
    """The first whole number of the answer."""
    found = re.search(r"-?\d+", answer)
    return found is not None and found[0] == wanted


def same_json(answer: str, wanted: str) -> bool:
    try:
        return json.loads(answer) == json.loads(wanted)
    except (ValueError, RecursionError):
        return False


def same_python(answer: str, wanted: str) -> bool:
    """The same syntax tree, so other spaces and comments. A header may stand without its body."""
    try:
        trees = [ast.dump(ast.parse(text + " pass" if text.endswith(":") else text)) for text in (answer, wanted)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return trees[0] == trees[1]


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda answer, wanted: answer == wanted,
    "number": same_number,
    "json": same_json,
    "python": same_python,
}
