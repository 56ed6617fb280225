"""Chapter 04. What trackers for TensorBoard, W&B and MLflow share: their package imported on demand, a run's settings with dotted names."""

import importlib
from dataclasses import asdict, is_dataclass
from typing import Any

from shared.course.errors import CourseError
from shared.engine.run_state import RunState

Settings = dict[str, Any]


def require(module: str, package: str) -> Any:
    """Import `module`.

    Args:
        package: what to install where it is missing.

    Raises:
        CourseError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CourseError(
            f"This tracker needs the package {package}, which is not installed ({error}): "
            "`make install GROUP=trackers`, or leave the tracker out."
        ) from None


def say_how_to_see(engine: RunState, service: str, command: str) -> None:
    """Print, at a run's end, the command that shows or sends what a tracker kept."""
    engine.console.print(f"{service}: {command}", markup=False, highlight=False, soft_wrap=True)


def settings_of(engine: RunState, more: Settings | None) -> Settings:
    """The engine's configuration under `engine.`, and what else a run wants on record, such as the model's, in plain values."""
    found = flat({"engine": engine.config} | (more or {}))
    return {name: value if isinstance(value, bool | int | float | str | None) else str(value) for name, value in found.items()}


def flat(settings: Settings, prefix: str = "") -> Settings:
    """Nested dictionaries and dataclasses as one dictionary with dotted names.

    >>> flat({"model": {"hidden_size": 64}, "seed": 0})
    {'model.hidden_size': 64, 'seed': 0}
    """
    found: Settings = {}
    for name, value in settings.items():
        value = asdict(value) if is_dataclass(value) else value
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
