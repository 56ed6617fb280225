"""What shows that a setting takes effect: two values whose observations differ, a test by name, or a reason why there is neither.

The negative control is `ignored`: with the field pinned to its first value, the second must change nothing (`make test-all`, because it
observes each row once more). So a difference comes from this field alone, and a row whose field nobody reads fails.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

Observe = Callable[[Any], Any]  # a configuration -> anything that `digest` takes


@dataclass(frozen=True)
class Differs:
    """Two values of a field, `one` usually the default, that are observed to differ.

    by: how; None for the table's own. beside: other fields, without which this one has no effect.
    """

    one: Any
    other: Any
    by: Observe | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)


class Shown(NamedTuple):
    """A test elsewhere that fails where the field is ignored. name: file::function, below tests/."""

    name: str


class Exempt(NamedTuple):
    reason: str


@dataclass(frozen=True)
class Effects:
    """The rows of a configuration class. base: fields of every row."""

    owner: type
    rows: Mapping[str, Differs | Shown | Exempt]
    observe: Observe | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    seen: dict[Any, str] = field(default_factory=dict)  # what was observed without an ignored field: most rows begin with the defaults

    def observed(self, name: str, row: Differs, value: Any, again: bool = False) -> str:
        """The digest of what is observed with a field at a value. again: do not remember it."""
        observe, settings = row.by or self.observe, {**self.base, **row.beside, name: value}
        kept = self.seen if not again else {}
        key = (observe, repr(sorted(settings.items())))
        if key not in kept:
            kept[key] = digest(observe(self.owner(**settings)))
        return kept[key]


@contextmanager
def ignored(owner: type, name: str, value: Any) -> Iterator[None]:
    """Every object of a configuration class has `value` in a field, whatever it is given: as if nobody read the field."""
    there, old = name in vars(owner), vars(owner).get(name)
    pinned = property(lambda self: value, lambda self, given: self.__dict__.__setitem__(name, value))
    setattr(owner, name, pinned)
    try:
        yield
    finally:
        if there:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


def digest(seen: Any) -> str:
    """A hash of nested results, by the bits of their tensors."""
    found = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, nn.Module):
            value = dict(value.state_dict())
        if isinstance(value, Tensor):
            value = value.detach().cpu().contiguous()
            found.update(f"{value.dtype}{list(value.shape)}".encode())
            found.update(value.flatten().untyped_storage().nbytes().to_bytes(8) + bytes(value.view(-1).numpy().tobytes()))
        elif isinstance(value, Mapping):
            for key in value:
                take(key)
                take(value[key])
        elif isinstance(value, list | tuple):
            found.update(f"{len(value)} of".encode())
            for each in value:
                take(each)
        else:
            found.update(f"{value!r};".encode())

    take(seen)
    return found.hexdigest()


def called_functions(work: Callable[[], Any], modules: str = "shared.") -> list[str]:
    """The functions of the core that some work calls, for choices between ways to the same numbers."""
    found: set[str] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith(modules):
            found.add(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")
        elif event == "c_call":
            found.add(getattr(argument, "__name__", ""))

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(found)
