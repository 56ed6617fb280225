"""Floor 0. Bounds and choices of configuration fields, such as `steps: PositiveInt = 1000`: checked at construction, shown by `--help`."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from shared.course.errors import SettingError

RENAMED_VALUES = {  # (field, value of older files) -> what it is called now
    ("activation_checkpointing", "blocks"): "full",
    ("attention", "naive"): "eager",
    ("attention", "fused"): "sdpa",
}


@dataclass(frozen=True, repr=False)
class Bounds:
    """Bounds of a number: `ge` and `le` are within them, `gt` and `lt` are not, nor are infinity and NaN."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __repr__(self) -> str:
        limits = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        return " and ".join(f"{word} {limit:,}" for word, limit in limits.items() if limit is not None)

    def __contains__(self, value: float) -> bool:
        return (
            abs(value) < math.inf
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


@dataclass(frozen=True, repr=False)
class Length:
    """Bound of the length of a list or a text: of a list's entries, none is read where there are more."""

    le: int

    def __contains__(self, value: Any) -> bool:
        return len(value) <= self.le

    def refusal(self, name: str, value: Any) -> str:
        return f"{name} has {len(value):,} {'characters' if isinstance(value, str) else 'entries'}: give at most {self.le:,}."


PositiveInt = Annotated[int, Bounds(ge=1)]
NonNegativeInt = Annotated[int, Bounds(ge=0)]
Seed = Annotated[int, Bounds(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Bounds(gt=0)]
NonNegativeFloat = Annotated[float, Bounds(ge=0)]
MadeCount = Annotated[int, Bounds(ge=1, le=1_000_000)]  # records that code makes, which are in memory together
UnitFloat = Annotated[float, Bounds(ge=0, le=1)]
BelowOne = Annotated[float, Bounds(ge=0, lt=1)]  # a dropout rate, a momentum
Share = Annotated[float, Bounds(gt=0, le=1)]
Fraction = Annotated[float, Bounds(gt=0, lt=1)]  # of what is divided in two


class OutOfBounds(ValueError):
    """A field's value is outside of its bounds or choices; the message begins with the field's name."""


def checked(config_class: type) -> type:
    """Decorate a configuration class, below `@dataclass`, so that numbers outside of their `Bounds` are refused, and values that a
    `Literal` does not list. Its own `__post_init__` then runs on values that are within them; a subclass is checked too."""
    own = getattr(config_class, "__post_init__", None)

    def check(self: Any) -> None:
        require_within(self)
        if own:
            own(self)

    config_class.__post_init__ = check
    return config_class


def require_within(record: Any) -> None:
    """Refuse the first field that is outside of its bounds or choices.

    Raises:
        OutOfBounds: names the field, the value and what is allowed.
    """
    for name, allowed, is_optional in rules_of(type(record)):
        value = getattr(record, name)
        if (value is None and is_optional) or value in allowed:
            continue
        if isinstance(allowed, Length):
            raise OutOfBounds(allowed.refusal(name, value))
        if isinstance(allowed, Bounds):
            near, wanted = [], f"{'' if allowed.gt is None else 'a number '}{allowed}"
        else:
            near, wanted = close_choices(name, value, allowed), f"one of {', '.join(map(str, allowed))}"
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OutOfBounds(f"{name} is {value!r}: give {wanted}{', or null' if is_optional else ''}.{hint}")


def require_lengths(owner: type, settings: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse a list that is too long, as YAML or JSON gave it, before a value is made of each entry.

    Raises:
        SettingError: names the field.
    """
    for name, allowed, _ in rules_of(owner):
        if isinstance(allowed, Length) and isinstance(value := settings.get(name), list) and value not in allowed:
            raise SettingError(allowed.refusal(prefix + name, value))


@cache  # hints take a millisecond, and are asked for with each configuration that is made
def rules_of(owner: type) -> list[tuple[str, Bounds | Length | tuple, bool]]:
    """(name, bounds or choices, whether None is allowed) of each field that has bounds or choices."""
    found = []
    for name, hint in get_type_hints(owner, include_extras=True).items():
        whole = get_args(hint) if get_origin(hint) is not Annotated and NoneType in get_args(hint) else (hint,)
        kinds = [kind for kind in whole if kind is not NoneType]
        noted = [entry for kind in kinds if get_origin(kind) is Annotated for entry in get_args(kind)]
        bounds = [entry for entry in noted if isinstance(entry, Bounds | Length)]
        if bounds or [get_origin(kind) for kind in kinds] == [Literal]:
            found.append((name, bounds[0] if bounds else get_args(kinds[0]), len(whole) > len(kinds)))
    return found


def close_choices(name: str, value: Any, choices: tuple) -> list[str]:
    """The choice that was probably meant, if there is one."""
    if (now := RENAMED_VALUES.get((name, str(value)))) in choices:
        return [now]
    return difflib.get_close_matches(str(value), [choice for choice in choices if isinstance(choice, str)], n=1)
