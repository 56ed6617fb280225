"""Chapter 11. Scores of answers by code: how near an answer is to the expected number, list or function, from 0 to 1.

Beside the checks of chapter 10, which say right or wrong. Nothing here needs torch.
"""

import ast
import re
from collections.abc import Callable

from shared.finetune.answer_checks import CHECKS


def near_number(answer: str, wanted: str) -> float:
    """1 for the first whole number of the answer if it is the wanted one, 1 / (1 + distance) for another."""
    found = re.search(r"-?\d{1,9}", answer)
    return 1 / (1 + abs(int(found[0]) - int(wanted))) if found else 0.0


def lines_right(answer: str, wanted: str) -> float:
    """The share of lines that are as wanted, each in its place, of the lines of the longer text."""
    found, lines = answer.split("\n"), wanted.split("\n")
    return sum(one == other for one, other in zip(found, lines, strict=False)) / max(len(found), len(lines))


def whole_function(answer: str, wanted: str) -> float:
    """Half for the header of `wanted`; and half, divided by its lines, for a body that uses each argument."""
    header, *body = answer.split("\n")
    if header != wanted.split("\n")[0]:
        return 0.0
    try:
        [function] = ast.parse(answer).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.5
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return 0.5 + 0.5 * ({each.arg for each in function.args.args} <= used) / len(body)


SCORES: dict[str, Callable[[str, str], float]] = CHECKS | {"near": near_number, "lines": lines_right, "function": whole_function}
