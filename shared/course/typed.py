"""Floor 0. Typed configuration: settings from YAML and the command line become a tree of dataclasses; what does not fit is refused by key.

Fields may hold numbers, text, paths, import paths, choices (`Literal`), lists, tuples, dataclasses, a `dict`, or one of these or None.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from shared.course.bounds import RENAMED_VALUES, OutOfBounds, close_choices, require_lengths
from shared.course.errors import SettingError
from shared.course.extensions import Extension, ImportPath, is_import_path, located
from shared.course.strict_yaml import parse_yaml

Config = TypeVar("Config")
PathText = NewType("PathText", str)  # the type of a field that holds a path, or something else that must not be empty, as text

RENAMED = {  # keys of older files -> their names now; a section's keys have the same names wherever it stands
    "max_gradient_norm": "max_grad_norm",
    "parallel.recompute": "parallel.activation_checkpointing (none, full, selective; blocks is full now)",
    "parallel.timeout": "parallel.heartbeat_timeout",
    "parallel.longest_wait": "parallel.collective_timeout",
    "data.prepare.cleaning.shortest": "data.prepare.cleaning.min_bytes",
    "data.prepare.cleaning.longest": "data.prepare.cleaning.max_bytes",
    "data.prepare.cleaning.certainty": "data.prepare.cleaning.min_probability",
}
KINDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", PathText: "a path",
    ImportPath: "an import path such as my_module.MyName",
}  # fmt: skip
TEXT = (str, Path, PathText, ImportPath)
SURROGATES = re.compile("[\ud800-\udfff]")  # halves of characters, and what Python makes of bytes that are not UTF-8
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that Linux and macOS allow, at most


def configured(config_class: type[Config], settings: Any, key: str = "", base: Config | None = None) -> Config:
    """The configuration that settings describe.

    Args:
        settings: what YAML gave: a value for each key, or a section of them.
        key: the section's own name, with a dot between levels.
        base: has the values of fields that are not given; None for the class's defaults.

    Raises:
        SettingError: a key that does not exist, a value that is not of its field's type, or that the configuration refuses. Names the key.
    """
    values, prefix = values_of(config_class, settings, key, base), f"{key}." if key else ""
    try:
        return config_class(**values) if base is None else replace(base, **values)
    except OutOfBounds as error:
        raise SettingError(f"{prefix}{error}") from error
    except ValueError as error:
        named = not key or f"{key.rpartition('.')[2]}." in str(error) or prefix in str(error)
        raise SettingError(str(error) if named else f"{key}: {error}") from error


def values_of(config_class: type, settings: Any, key: str = "", base: Any = None) -> dict[str, Any]:
    """The typed value of each field that settings give; only what a whole configuration refuses is not refused."""
    require_section(settings, key)
    hints, prefix = get_type_hints(config_class), f"{key}." if key else ""
    defaults = {field.name: default_of(field) if base is None else getattr(base, field.name) for field in fields(config_class)}
    if unknown := [name for name in settings if name not in defaults]:
        raise SettingError(unknown_key(f"{prefix}{unknown[0]}", [prefix + name for name in keys_of(config_class)]))
    require_lengths(config_class, settings, prefix)
    values = {name: typed(hints[name], settings[name], prefix + name, defaults[name]) for name in defaults if name in settings}
    for name, default in defaults.items():
        if default is MISSING and name not in values:
            raise SettingError(f"{prefix}{name} is missing: give {wanted(hints[name])}.")
    return values


def typed(hint: Any, value: Any, key: str, default: Any = None) -> Any:
    """`value`, as YAML gave it, as a value of a type."""
    hints = [member for member in members(hint) if member is not NoneType]
    section = next((member for member in hints if is_dataclass(member)), None)
    if value is None and (section and len(members(hint)) == 1 or get_origin(hint) is dict):
        value = {}  # a section that sets nothing
    if value is None:
        if NoneType in members(hint):
            return None
        raise SettingError(f"{key} is null: give {wanted(hint)}, or leave it out.")
    if section is Extension and isinstance(value, str):
        value = value if ImportPath in hints else {"name": value}
    if section and not (ImportPath in hints and isinstance(value, str)):
        return configured(section, value, key, default if is_dataclass(default) else None)
    many = [member for member in hints if get_origin(member) in (list, tuple)]
    if many and (isinstance(value, list) or len(many) == len(hints)):
        return listed(many[0], value, key, hint)
    kinds = [member for member in hints if member not in (*many, section)]
    kind = kinds[-1] if isinstance(value, str) and kinds[-1] is ImportPath and (len(kinds) == 1 or is_import_path(value)) else kinds[0]
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return dict(value)
    if get_origin(kind) is Literal:
        return chosen(kind, value, key, hint)
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if type(value) is not (str if kind in TEXT else kind):
        raise SettingError(f"{key} is {shown(value)}: give {wanted(hint)}.")
    if kind in TEXT and SURROGATES.search(value):
        raise SettingError(f"{key} is {shown(value)}, which is not UTF-8: give it in UTF-8.")
    if kind is int and not -(2**63) < value < 2**63:
        raise SettingError(f"{key} is {shown(value)}: give less than 2**63.")
    if kind is float and not math.isfinite(value):
        raise SettingError(f"{key} is {value}: give a finite number{', or null' if NoneType in members(hint) else ''}.")
    path = usable_path(value, key) if kind in (Path, PathText) else None
    return path if kind is Path else value


def listed(hint: Any, value: Any, key: str, whole: Any) -> list | tuple:
    origin, elements = get_origin(hint), get_args(hint)
    fixed = origin is tuple and elements[-1] is not Ellipsis
    if not isinstance(value, list) or (fixed and len(value) != len(elements)):
        raise SettingError(f"{key} is {shown(value)}: give {wanted(whole)}.")
    each = elements if fixed else [elements[0]] * len(value)
    return origin(typed(element, entry, f"{key}[{number}]") for number, (element, entry) in enumerate(zip(each, value, strict=True)))


def chosen(hint: Any, value: Any, key: str, whole: Any) -> Any:
    choices = get_args(hint)
    for choice in choices:
        if choice == value and type(choice) is type(value):
            return choice
    name = key.rpartition(".")[2]
    near = close_choices(name, value, choices)
    if (name, str(value)) in RENAMED_VALUES and near:
        raise SettingError(f"{key} {value} is an older name: write {near[0]}.")
    raise SettingError(f"{key} is {shown(value)}: give {wanted(whole)}.{f' Did you mean {near[0]!r}?' if near else ''}")


def usable_path(text: str, key: str) -> Path:
    """A path from text, `~` replaced.

    Raises:
        SettingError: no file can have such a path. Names the key.
    """
    problem = None
    if not text:
        problem = "an empty path"
    elif "\0" in text:
        problem = "which has a zero byte in it"
    elif any(len(name.encode(errors="surrogateescape")) > LONGEST_NAME for name in text.split("/")) or len(text) > LONGEST_PATH:
        problem = "too long for a path"
    elif SURROGATES.search(text):
        problem = "no UTF-8"
    if problem:
        raise SettingError(f"{key} is {shown(text)}, {problem}: give the path of a file or folder.")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise SettingError(f"{key} is {text!r}, and there is no user of that name here: give the path without ~.") from None


def with_words(config_class: type, settings: dict[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """Settings of a file under command-line overrides.

    Args:
        words: dotted key -> value, as YAML or, where the field is text, as it is.
    """
    for key, text in words.items():
        hint = hint_of(config_class, key)
        value = value_of(hint, text, key)
        sets_nothing = get_origin(hint) is dict or any(map(is_dataclass, members(hint)))  # null is a section of which nothing is given
        if value is None and NoneType not in members(hint) and not sets_nothing:
            raise SettingError(f"{key} is null: give {wanted(hint)}, or leave it out.")
        *sections, last = key.split(".")
        above = {last: value}
        for depth, name in reversed(list(enumerate(sections, 1))):
            require_section(value_at(settings, sections[:depth]), ".".join(sections[:depth]))
            above = {name: above}
        settings = merged(settings, above)
    return settings


def located_in(hint: Any, value: Any, folders: Sequence[Path], key: str = "") -> Any:
    """Settings whose import paths say where their files are (`shared.course.extensions.located`); anything else as it is."""
    kinds = members(hint)
    if isinstance(value, str) and (ImportPath in kinds or Extension in kinds):
        return located(value, key, folders)
    for member in kinds:
        if is_dataclass(member) and isinstance(value, Mapping):
            hints, prefix = get_type_hints(member), f"{key}." if key else ""
            return {name: located_in(hints.get(name), entry, folders, f"{prefix}{name}") for name, entry in value.items()}
        if get_origin(member) in (list, tuple) and isinstance(value, list):
            return [located_in(get_args(member)[0], entry, folders, f"{key}[{number}]") for number, entry in enumerate(value)]
    return value


def value_at(settings: Any, names: Sequence[str]) -> Any:
    for name in names:
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return {} if settings is None else settings


def require_section(value: Any, key: str) -> None:
    if not isinstance(value, Mapping):
        raise SettingError(f"{key or 'The configuration'} is {shown(value)}: it is a section, so give `name: value` below it.")


def hint_of(config_class: type, key: str) -> Any:
    """The type of the field that a dotted key names."""
    hint: Any = config_class
    for name in key.split("."):
        section = next((member for member in members(hint) if is_dataclass(member)), None)
        hint = get_type_hints(section).get(name) if section else hint if get_origin(hint) is dict else None
        if hint is None:
            raise SettingError(unknown_key(key, list(keys_of(config_class))))
    return hint


def value_of(hint: Any, text: str, key: str) -> Any:
    """A word's value as YAML would give it. Where text or a path is wanted, it needs no quotes."""
    many = any(get_origin(member) in (list, tuple) for member in members(hint))
    plain = any(member in TEXT or (get_origin(member) is Literal and text in get_args(member)) for member in members(hint))
    if plain and text not in ("null", "Null", "NULL") and not (many and text.startswith("[")):
        return text
    return parse_yaml(text, key)


def merged(below: Mapping[str, Any], above: Mapping[str, Any], emptied: bool = True) -> dict[str, Any]:
    """`above` over `below`, key by key; anything but a section is replaced whole.

    Args:
        emptied: whether a null over a section replaces it; else, as in a file whose section has only comments, it changes nothing.
    """
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, Mapping):
            value = old if value is None and not emptied else value
            value = merged(old, value, emptied) if isinstance(value, Mapping) else value
        result[key] = value
    return result


def unknown_key(key: str, known: list[str]) -> str:
    """The sentence for a key that does not exist, with the one that was probably meant: the only one of that name, or one like it in the
    same section. Where the only one of that name is in another section, it says that and guesses nothing."""
    for old, new in RENAMED.items():
        if f".{old}".endswith(f".{key}"):
            return f"{key} is an older name: write {new.removeprefix(old[: len(old) - len(key)])}."
    if key in known:  # of a file, where it stands as one name
        return f"There is no setting named {key!r} with the dot in it: write it below its section, `{key.replace('.', ': {', 1)}: ...}}`."
    section, _, own = key.rpartition(".")
    beside = [name for name in known if name.startswith(f"{section}.")]
    same = [name for name in known if name.rpartition(".")[2] == own]
    near = [name for name in same if name in beside][:1] or (same if len(same) == 1 else [])
    if near and section in known and near[0].partition(".")[0] != section.partition(".")[0]:
        return f"There is no setting {key}. The only {own} is {near[0]!r}."
    if not near and (beside or section in known):
        last = {name.rpartition(".")[2]: name for name in reversed(beside)}
        near = [last[name] for name in difflib.get_close_matches(own, last, n=1)] if beside else [section]
    elif not near:
        last = {name.rpartition(".")[2]: name for name in reversed(known)}
        near = difflib.get_close_matches(key, known, n=1) or [last[name] for name in difflib.get_close_matches(own, last, n=1)]
    return f"There is no setting {key or repr(key)}." + (f" Did you mean {near[0]!r}?" if near else "")


def keys_of(config_class: type, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields, sections included."""
    for name, hint in get_type_hints(config_class).items():
        yield prefix + name
        for member in members(hint):
            if is_dataclass(member):
                yield from keys_of(member, f"{prefix}{name}.")


def members(hint: Any) -> tuple:
    """The types that a field may have."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def default_of(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def wanted(hint: Any) -> str:
    """What a type asks for, in words."""
    asked = []
    for member in members(hint):
        origin = get_origin(member)
        if origin is Literal:
            asked.append(f"one of {', '.join(map(str, get_args(member)))}")
        elif origin in (list, tuple):
            kind = KINDS.get(get_args(member)[0], "{name: value}").removeprefix("a ")
            count = 0 if origin is list or get_args(member)[-1] is Ellipsis else len(get_args(member))
            asked.append(f"a list of {count}, [{', '.join([kind] * count)}]" if count else f"a list such as [{kind}, {kind}]")
        else:
            asked.append("null" if member is NoneType else KINDS.get(member, "a section of `name: value`"))
    return " or ".join(asked)


def shown(value: Any) -> str:
    """A value, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
