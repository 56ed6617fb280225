"""Chapter 12. Configuration from a YAML file and `key=value` overrides on the command line.

A file may stand on another one: `extends: laptop.yaml` takes that file's keys first. Over the files go the words of the command
line, as in `optimizer.lr=0.003`. A key that does not exist is refused, with the nearest that does.
"""

import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from shared.course.errors import CourseError
from shared.course.launch import OptionParser

Config = TypeVar("Config")

RENAMED = {  # keys of older files -> their names now
    "max_gradient_norm": "max_grad_norm",
    "parallel.recompute": "parallel.activation_checkpointing (none, full, selective; blocks is full now)",
    "parallel.timeout": "parallel.heartbeat_timeout",
    "parallel.longest_wait": "parallel.collective_timeout",
    "data.prepare.cleaning.shortest": "data.prepare.cleaning.min_bytes",
    "data.prepare.cleaning.longest": "data.prepare.cleaning.max_bytes",
    "data.prepare.cleaning.certainty": "data.prepare.cleaning.min_probability",
}
RENAMED_VALUES = {  # values of older files -> what they are called now
    "parallel.activation_checkpointing": {"blocks": "full"},
    "model.attention": {"naive": "eager", "fused": "sdpa"},
}
USAGE = "%(prog)s CONFIG.yaml [key=value ...]"


def read_settings(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The keys of a YAML file, over those of the file that it extends, as deep as they go.

    Raises:
        CourseError: a file that is not there, is not YAML, holds no keys, or extends itself or something else than one file.
    """
    path = path.resolve()
    if path in seen:
        raise CourseError(f"{path} extends itself, by way of {', '.join(file.name for file in seen)}.")
    if not path.is_file():
        raise CourseError(f"There is no configuration {path}" + (f", which {seen[-1].name} extends." if seen else "."))
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CourseError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise CourseError(f"{path} holds no keys: write `key: value` lines.")
    below = settings.pop("extends", None)
    if below is not None and not isinstance(below, str):
        raise CourseError(f"{path} extends {below!r}: give the name of one file, beside this one or with its path.")
    schedule = settings.get("schedule")
    if isinstance(schedule, dict) and schedule.get("steps", settings.get("steps")) != settings.get("steps"):
        raise CourseError(f"{path} gives schedule.steps, and the schedule's steps are the run's: give steps.")
    return merged(read_settings(path.parent / below, (*seen, path)), settings) if below else settings


def implementation_asked(words: list[str]) -> str:
    """The value of `impl` in the words, or in the file that they name, or the default; known before the core is imported.

    Raises:
        CourseError: the file cannot be read.
    """
    said = [word.split("=", 1)[1] for word in words if word.removeprefix("--").startswith("impl=")]
    if said:
        return said[-1]
    if words and "=" not in words[0] and not words[0].startswith("-"):
        return read_settings(Path(words[0])).get("impl", "reference")
    return "reference"


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`, key by key; anything but a dictionary is replaced whole. A section that is left empty changes nothing."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, dict):
            value = merged(old, {} if value is None else value) if isinstance(value, dict | None) else value
        result[key] = value
    return result


def parser_of(config_class: type[Config]) -> OptionParser:
    parser = OptionParser(description=config_class.__doc__.splitlines()[0], usage=USAGE, allow_abbrev=False)
    parser.add_argument("--settings", action="config", help="for the file's keys; give the file itself as the first word")
    parser.add_class_arguments(config_class, fail_untyped=True)
    if "schedule" in config_class.__dataclass_fields__:
        parser.link_arguments("steps", "schedule.steps")  # one number, said once
    return parser


def parse_words(config_class: type[Config], words: list[str]) -> Config:
    """The configuration that a command line asks for: CONFIG.yaml, then key=value words.

    Ends the process with one sentence and exit code 2 where something is unknown or of the wrong type.

    Raises:
        CourseError: the file cannot be read.
    """
    parser = parser_of(config_class)
    if {"-h", "--help"} & set(words):
        parser.print_help()
        sys.exit(0)
    if not words or "=" in words[0]:
        parser.error("give a configuration first, such as chapters/12_grpo/laptop.yaml")
    path, *changes = words
    if strangers := [word for word in changes if "=" not in word]:
        parser.error(f"{strangers[0]!r} is no key=value")
    options = [f"--{change.removeprefix('--')}" for change in changes]
    return configuration(parser, config_class, yaml.safe_dump(read_settings(Path(path))), options)


def parse_text(config_class: type[Config], text: str) -> Config:
    """The configuration that `dump` wrote."""
    return configuration(parser_of(config_class), config_class, text, [])


def configuration(parser: OptionParser, config_class: type[Config], text: str, options: list[str]) -> Config:
    settings = without_empty_sections(config_class, yaml.safe_load(text))
    changes = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
    for key in [*keys_of(settings), *changes]:
        if key in RENAMED:
            parser.error(f"{key} is an older name: say {RENAMED[key]}.")
    for key, renamed in RENAMED_VALUES.items():
        section, name = key.split(".")
        value = changes.get(key, (settings.get(section) or {}).get(name))
        if value in renamed:
            parser.error(f"{key} {value} is an older name: say {renamed[value]}.")
    values = parser.parse_args([f"--settings={yaml.safe_dump(settings)}", *options])
    try:
        require_values(config_class, vars(values))
        fields = vars(parser.instantiate(values))
        return config_class(**{name: value for name, value in fields.items() if name != "settings"})
    except ValueError as error:  # a configuration that refuses its own values
        parser.error(str(error))


def keys_of(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys."""
    for name, value in settings.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")


def without_empty_sections(config_class: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The same keys without sections of which nothing is said, such as one whose lines are all comments."""
    kept = dict(settings)
    for name, hint in get_type_hints(config_class).items():
        if is_dataclass(hint) and name in settings:
            if settings[name] is None:
                del kept[name]
            elif isinstance(settings[name], dict):
                kept[name] = without_empty_sections(hint, settings[name])
    return kept


def require_values(config_class: type, values: dict[str, Any], prefix: str = "") -> None:
    """Refuse a null where a field must have a value; the parser lets it through.

    Raises:
        ValueError: names the key.
    """
    for name, hint in get_type_hints(config_class).items():
        value = values.get(name)
        if value is None and type(None) not in get_args(hint):
            raise ValueError(f"{prefix}{name} is null: give a value, or leave it out.")
        if is_dataclass(hint):
            require_values(hint, vars(value), f"{prefix}{name}.")
