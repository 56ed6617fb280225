"""Chapter 04. The numbers that JSON has no words for: a diverging run is the one whose metrics somebody will want to read.

Python would write NaN and Infinity bare, which other readers of JSON refuse. Here they are the strings "nan", "inf" and "-inf".
"""

import math
from collections.abc import Iterable


def to_json(metrics: dict[str, float]) -> dict[str, float | str]:
    """Named numbers as JSON can hold them.

    >>> to_json({"train/loss": 2.5, "norm/gradient": float("nan")})
    {'train/loss': 2.5, 'norm/gradient': 'nan'}
    """
    return dict(zip(metrics, list_to_json(metrics.values()), strict=True))


def from_json(metrics: dict[str, float | str]) -> dict[str, float]:
    """What `to_json` was given."""
    return dict(zip(metrics, list_from_json(metrics.values()), strict=True))


def list_to_json(numbers: Iterable[float]) -> list[float | str]:
    return [number if math.isfinite(number) else str(float(number)) for number in numbers]


def list_from_json(numbers: Iterable[float | str]) -> list[float]:
    return [float(number) if isinstance(number, str) else number for number in numbers]
