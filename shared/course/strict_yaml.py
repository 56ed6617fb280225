"""Floor 0. YAML of a configuration, read strictly: no key twice, no alias bomb, no text read as a date or an octal number.

YAML 1.1, which PyYAML reads, takes `1e-3` for text, `010` for 8, `1:30` for 90 and `2026-01-01` for a date. Here numbers are what JSON
calls numbers, with `.inf` and `.nan`, and everything else is text.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from shared.course.errors import CourseError

LARGEST = 2**18  # bytes of a file
ENTRIES = 10_000  # of a file, with what its aliases repeat
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,99})$")
FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9]*)?([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$")


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader with other rules for what is a number."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in NUMBERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


StrictLoader.add_implicit_resolver(NUMBERS[0], INT, list("-+0123456789"))
StrictLoader.add_implicit_resolver(NUMBERS[1], re.compile(rf"(?!0[0-9]){FLOAT.pattern}"), list("-+.0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a YAML file.

    Raises:
        CourseError: it cannot be read, is too large, holds no keys, or is not YAML that `parse_yaml` takes.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise CourseError(f"{path} has {path.stat().st_size:,} bytes, and a configuration at most {LARGEST:,}: give another file.")
        settings = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        raise CourseError(f"{path} cannot be read ({error.strerror}): give another file, or make it readable.") from None
    except UnicodeDecodeError as error:
        raise CourseError(f"{path} is not YAML: it is not UTF-8 (byte {error.start}). Save it as UTF-8.") from None
    if not isinstance(settings, dict):
        raise CourseError(f"{path} holds no keys: write `key: value` lines.")
    return settings


def parse_yaml(text: str, where: str) -> Any:
    """The value of YAML text.

    Args:
        where: names the text in sentences: the file's path, or a key.

    Raises:
        CourseError: it is not YAML, gives a key twice, refers to itself, or repeats so much that it would not fit into memory.
    """
    try:
        loader = StrictLoader(text.encode(errors="surrogateescape").decode(errors="replace"))
        node = loader.get_single_node()
        if node is None:
            return None
        if (entries := count_entries(node, where, {})) > ENTRIES:
            raise CourseError(f"{where} has {entries:.3g} entries with what its aliases repeat, and may have {ENTRIES:,}: leave some out.")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise CourseError(f"{where} is not YAML{line}: {' '.join(filter(None, (error.context, error.problem)))}.") from None
    except yaml.YAMLError as error:  # a character that may not be in a file
        raise CourseError(f"{where} is not YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise CourseError(f"{where} is nested too deeply: a configuration has a handful of levels.") from None


def count_entries(node: yaml.Node, where: str, counted: dict[int, int]) -> int:
    """How many nodes this one expands to, counting each alias in full.

    Args:
        counted: filled with the number of each node by its id; 0 while it is being counted.

    Raises:
        CourseError: a key is given twice or is not text, or a node contains itself.
    """
    if counted.get(id(node)) == 0:
        raise CourseError(f"{where}, line {node.start_mark.line + 1}: what begins here refers to itself. Write it out, or leave it out.")
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)], total = 0, 1
    if isinstance(node, yaml.MappingNode):
        require_single_keys(node, where)
        total += sum(count_entries(value, where, counted) for _, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(count_entries(value, where, counted) for value in node.value)
    counted[id(node)] = total
    return total


def require_single_keys(node: yaml.MappingNode, where: str) -> None:
    """Reject duplicate keys, of which YAML would keep the last without a word, and keys that are not text."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            key_text = repr(key.value[:60]) if isinstance(key.value, str) else "a list or a section"
            raise CourseError(f"{where}, line {line}: {key_text} is not the name of a setting: write `name: value`.")
        if key.value in lines and key.tag.endswith("str"):
            raise CourseError(f"{where} gives {key.value} twice, in line {lines[key.value]} and in line {line}: leave one out.")
        lines[key.value] = line
