"""Bounds and choices on fields: refused in Python and from YAML alike, with one sentence for each kind, and printed by `--help`."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import pytest

from shared.course.bounds import Bounds, Fraction, PositiveInt, Seed, checked
from shared.course.errors import SettingError
from shared.course.launch import print_help
from shared.course.typed import configured


@dataclass(frozen=True)
@checked
class Part:
    """A part.

    Args:
        share: of the whole.
        depth: of it.
    """

    share: Fraction = 0.5
    depth: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.depth == 7:
            raise ValueError("depth is 7: give another.")


@dataclass(frozen=True)
@checked
class Deeper(Part):
    width: Annotated[int, Bounds(ge=2, le=10_000)] = 2


@dataclass
@checked
class Whole:
    """A whole.

    Args:
        part: of it.
        kind: of it.
        seed: of it.
        parts: more.
    """

    part: Part = field(default_factory=Part)
    kind: Literal["plain", "fancy"] = "plain"
    seed: Seed = 0
    parts: tuple[Part, ...] = ()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Part(depth=0), "depth is 0: give at least 1, or null."),
        (lambda: Part(1.0), "share is 1.0: give a number above 0 and below 1."),
        (lambda: Part(math.nan), "share is nan: give a number above 0 and below 1."),
        (lambda: replace(Part(), share=math.inf), "share is inf: give a number above 0 and below 1."),
        (lambda: Part(depth=7), "depth is 7: give another."),
        (lambda: Deeper(share=0.0), "share is 0.0: give a number above 0 and below 1."),
        (lambda: Deeper(width=10_001), "width is 10001: give at least 2 and at most 10,000."),
        (lambda: Deeper(depth=7), "depth is 7: give another."),
        (lambda: Whole(kind="fancyy"), "kind is 'fancyy': give one of plain, fancy. Did you mean 'fancy'?"),
        (lambda: Whole(seed=-1), "seed is -1: give at least 0 and below 9,223,372,036,854,775,808."),
        (lambda: configured(Whole, {"part": {"depth": 0}}), "part.depth is 0: give at least 1, or null."),
        (lambda: configured(Whole, {"parts": [{}, {"share": 2}]}, "run"), "run.parts[1].share is 2.0: give a number above 0 and below 1."),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_name(made, said):
    with pytest.raises((ValueError, SettingError)) as error:
        made()
    assert str(error.value) == said


def test_values_at_their_bounds_are_taken():
    assert Part(depth=1).depth == 1 and Part().depth is None and Deeper(width=10_000).width == 10_000 and Whole(seed=2**63 - 1).seed > 0


@pytest.mark.parametrize("asked, name", [("--help", "--part.depth"), ("--parts.help", "--parts.depth")])
def test_help_shows_bounds_in_words(asked, name, capsys):
    with pytest.raises(SystemExit):
        print_help(Whole, "", asked)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{name} DEPTH of it. (type: int (at least 1) | null, default: null)" in said and "(type: float (above 0 and below 1)" in said
