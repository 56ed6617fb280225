"""Chapter 04. A run's settings as the trackers of other makers want them: one level of names, plain values."""

from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.engine.engine import RuntimeEngine

Settings = dict[str, Any]


def settings_of(engine: "RuntimeEngine", more: Settings | None) -> Settings:
    """The engine's configuration under `engine.`, and what else a run wants on record, such as the model's."""
    return flat({"engine": engine.config} | (more or {}))


def flat(settings: Settings, prefix: str = "") -> Settings:
    """Nested dictionaries and dataclasses as one dictionary with dotted names; what is no plain value as its text.

    >>> flat({"model": {"hidden_size": 64}, "seed": 0})
    {'model.hidden_size': 64, 'seed': 0}
    """
    found: Settings = {}
    for name, value in settings.items():
        value = asdict(value) if is_dataclass(value) else value
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value if isinstance(value, bool | int | float | str | None) else str(value)
    return found
