"""Chapter 12. Configuration from a YAML file and `key=value` overrides on the command line.

A file may stand on another one: `extends: laptop.yaml` takes that file's keys first. Over the files go the words of the command
line, as in `optimizer.lr=0.003`. A key that does not exist is refused, with the nearest that does.
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from shared.course.errors import CourseError, SettingError
from shared.course.launch import help_asked, print_help, refuse
from shared.course.strict_yaml import parse_yaml, read_yaml
from shared.course.typed import configured, located_in, merged, usable_path, values_of, with_words
from shared.trainer import provenance

Config = TypeVar("Config")

USAGE = "%(prog)s CONFIG.yaml [key=value ...]"


def read_settings(path: Path, config_class: type | None = None, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Settings of a YAML file, merged over those of the file that it extends.

    Args:
        config_class: resolves the import paths in its fields beside the file that gives them; None to leave them as they are.
    """
    path = Path(os.path.realpath(path))
    if path in seen:
        raise CourseError(f"{path} extends itself, by way of {', '.join(file.name for file in seen)}: remove one `extends`.")
    if not os.path.isfile(path):
        kind = "file" if os.path.lexists(path) else "configuration"
        raise CourseError(f"There is no {kind} {path}{f', which {seen[-1].name} extends' if seen else ''}: give a YAML file.")
    settings = read_yaml(path)
    below = settings.pop("extends", None)
    settings = located_in(config_class, settings, (path.parent, Path.cwd())) if config_class else settings
    if below is not None and not isinstance(below, str):
        raise CourseError(f"{path} extends {below!r}: give the name of one file, beside this one or with its path.")
    schedule = settings.get("schedule")
    if isinstance(schedule, dict) and schedule.get("steps", settings.get("steps")) != settings.get("steps"):
        raise CourseError(f"{path} gives schedule.steps, and the schedule's steps are the run's: give steps.")
    if below is None:
        return settings
    return merged(read_settings(path.parent / usable_path(below, f"{path}: extends"), config_class, (*seen, path)), settings, emptied=False)


def implementation_asked(words: list[str]) -> str:
    """The value of `impl` in the overrides, in the file, or by default; known before the core is imported."""
    said = [word.split("=", 1)[1] for word in words if word.removeprefix("--").startswith("impl=")]
    if said:
        return said[-1]
    if words and "=" not in words[0] and not words[0].startswith("-"):
        return read_settings(Path(words[0])).get("impl", "reference")
    return "reference"


def parse_words(config_class: type[Config], words: list[str], tell: Callable[[str], None] = lambda line: None) -> Config:
    """The configuration of a command line: CONFIG.yaml, then key=value overrides. If a shorter `steps` leaves no room for warm-up and
    decay, both are scaled down in proportion, and `tell` gets a line about it.

    Ends the process with an error message and exit code 2 if the file cannot be read, or a setting is unknown or wrong.
    """
    if asked := help_asked(words):
        print_help(config_class, USAGE, asked)
    try:
        written, settings, changes = settings_of(config_class, words)
        config = from_settings(config_class, with_shorter_schedule(config_class, written, settings, changes, tell))
        if "steps" in getattr(config, "continue_with", ()):
            config.continue_with = [*config.continue_with, *scaled_lengths(config, written, settings, changes)]
        return config
    except CourseError as error:
        refuse(error)


def require_usable(config_class: type, words: list[str]) -> None:
    """Refuse, as `parse_words` does, what can be refused before the weights in start_from exist: all that does not depend on their
    model."""
    try:
        written, settings, changes = settings_of(config_class, words)
        settings = {name: value for name, value in settings.items() if name != "model"}
        values_of(config_class, with_length(config_class, with_shorter_schedule(config_class, written, settings, changes)))
    except CourseError as error:
        refuse(error)


def settings_of(config_class: type, words: list[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The settings of a command line's file, the same under its overrides, and the overrides."""
    if not words or "=" in words[0]:
        raise SettingError("Give a configuration first, such as chapters/12_grpo/laptop.yaml.")
    path, *changes = words
    for word in changes:
        if "=" not in word:
            second = " Two configurations cannot be given: one may extend the other." if word.endswith((".yaml", ".yml")) else ""
            raise SettingError(f"{word!r} is not a setting: write key=value.{second}")
    changes = dict(change.removeprefix("--").split("=", 1) for change in changes)
    if "schedule.steps" in changes:
        raise SettingError("schedule.steps is the length of the run: give steps.")
    written = read_settings(Path(path), config_class)
    settings = located_in(config_class, with_words(config_class, written, changes), (Path(path).resolve().parent, Path.cwd()))
    return written, settings, changes


def with_shorter_schedule(
    config_class: type,
    written: dict[str, Any],
    settings: dict[str, Any],
    words: Collection[str],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Scale warm-up and decay down in proportion if an override of `steps` leaves no room for them.

    Args:
        written: the file's settings, without overrides.
        words: the overridden keys. If one is of the schedule, nothing is scaled.
    """
    fields = config_class.__dataclass_fields__
    if "steps" not in words or any(key.split(".")[0] == "schedule" for key in words) or "schedule" not in fields:
        return settings
    given, steps, planned = settings.get("schedule") or {}, settings.get("steps"), written.get("steps", fields["steps"].default)
    if not isinstance(given, dict):
        return settings
    schedule = vars(fields["schedule"].default_factory()) | given
    is_wsd = schedule.get("name") == "wsd"
    names = ("warmup_steps", "decay_steps") if is_wsd else ("warmup_steps",) if schedule.get("name") != "constant" else ()
    lengths = {name: schedule[name] for name in names if name in schedule}
    if not all(type(length) is int for length in (planned, steps, *lengths.values())) or not 0 < steps < planned:
        return settings  # a wrong value is refused with the other settings
    if sum(lengths.values()) < steps + is_wsd:
        return settings
    shorter = {name: length * steps // planned for name, length in lengths.items()}
    tell(
        f"{steps} of {planned} steps: {', '.join(f'schedule.{name} {length} becomes {shorter[name]}' for name, length in lengths.items())}."
    )
    return settings | {"schedule": given | shorter}


def scaled_lengths(config: Config, written: dict[str, Any], settings: dict[str, Any], words: Collection[str]) -> list[str]:
    """Warm-up and decay that differ in the run to continue because `with_shorter_schedule` scaled them, there or here: nobody wrote them,
    so `continue_with=steps` asks for them as well."""
    source = config.continue_from or config.engine.output
    records = [folder / provenance.CONFIG for folder in (config.engine.output, source, source.parent.parent)]
    if (path := next((path for path in records if path.is_file()), None)) is None:
        return []
    record = provenance.read_record(path)
    before = record.get("schedule") or {}
    again = with_shorter_schedule(type(config), written, settings | {"steps": record.get("steps")}, [*words, "steps"])
    again = vars(config.schedule) | (settings.get("schedule") or {}) | (again.get("schedule") or {})
    names = ("warmup_steps", "decay_steps")
    return [f"schedule.{name}" for name in names if before.get(name) == again[name] != getattr(config.schedule, name)]


def parse_text(config_class: type[Config], text: str) -> Config:
    """The configuration in a YAML or JSON text, such as a run's config.yaml."""
    return from_settings(config_class, parse_yaml(text, "the configuration"))


def from_settings(config_class: type[Config], settings: Any, complete: bool = True) -> Config:
    """The configuration that settings describe.

    Args:
        complete: take the section `model` from the weights in start_from; False where settings have it, or the weights do not exist yet.
    """
    settings = with_length(config_class, settings)
    if complete and isinstance(settings, dict) and hasattr(config_class, "completed"):
        settings = config_class.completed(settings)
    return configured(config_class, settings)


def with_length(config_class: type, settings: Any) -> Any:
    """Settings whose schedule is as long as the run: a length is said once, as `steps`."""
    steps = config_class.__dataclass_fields__.get("steps")
    if not isinstance(settings, dict) or "schedule" not in config_class.__dataclass_fields__ or steps is None:
        return settings
    steps, schedule = settings.get("steps", steps.default), settings.get("schedule") or {}
    return settings | {"steps": steps, "schedule": schedule | {"steps": steps} if isinstance(schedule, dict) else schedule}
