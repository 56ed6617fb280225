"""What the checks of every build share: stages that wait until they are begun."""

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from shared.course.checking import Case, Check

Entry = tuple[tuple[str, ...], Iterable[Case]]  # functions of the learner's file, and cases


def stages(build: str, **entries: Entry) -> dict[str, Check]:
    """A build's stages, by name: each with the functions for which it waits, and its cases."""
    return {name: stage(f"{build}.{name}", functions, tuple(cases)) for name, (functions, cases) in entries.items()}


def stage(name: str, functions: tuple[str, ...], cases: tuple[Case, ...]) -> Check:
    """A stage with functions of its own. While one of them is unwritten it is NOT ATTEMPTED, whatever the earlier functions do."""

    def observe(adapters: Any, **given: Any) -> Any:
        for function in functions:
            written = getattr(adapters.module, function)
            if written.__code__.co_names == ("NotImplementedError",):  # nothing but raising it
                getattr(adapters, function)(*[None] * len(inspect.signature(written).parameters))
        return cases[0].observe(adapters, **given)

    return Check(name, (), (replace(cases[0], observe=observe), *cases[1:]), ())
