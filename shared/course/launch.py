"""Floor 0. Command-line options and YAML into a typed configuration: how a chapter's run script starts.

Every `run.py` starts through `launch`, which also chooses the implementation and shows errors as sentences. A configuration is a
dataclass; its fields are the keys of the YAML file and, dotted, the options of the command line.
"""

import difflib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import ArgumentParser

from shared.course import binding
from shared.course.errors import CourseError

Config = TypeVar("Config")


class OptionParser(ArgumentParser):
    """jsonargparse's parser, with the nearest name offered for one that it does not know."""

    def error(self, message: str, *args: Any, **kwargs: Any) -> None:
        unknown = re.search(r"(?i)(?:option|unrecognized arguments:|key) '?(?:--)?([\w.]+)", message)
        known = {action.dest for action in self._actions} | {action.dest.split(".")[-1] for action in self._actions}
        nearest = difflib.get_close_matches(unknown[1], known - {"help"}, n=1) if unknown and unknown[1] not in known else []
        offered = f" Did you mean {nearest[0]!r}?" if nearest else ""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}{offered}\nAll options: {self.prog} --help\n")


def parse(config_class: type[Config], defaults: Path, arguments: list[str] | None = None) -> Config:
    """The configuration: the class's defaults, over them the chapter's YAML, `--config` files and options, in that order.

    An unknown key, a value of the wrong type, or values that a configuration refuses end the process with one sentence and exit code 2.
    """
    parser = OptionParser(description=config_class.__doc__.splitlines()[0], default_config_files=[str(defaults)], allow_abbrev=False)
    parser.add_argument("--config", action="config", help="a YAML file of options, over those of the chapter")
    parser.add_class_arguments(config_class, fail_untyped=True)
    values = parser.parse_args(arguments)
    try:
        fields = parser.instantiate(values)
    except ValueError as error:  # a configuration that refuses its own values
        parser.error(str(error))
    del fields["config"]
    return config_class(**vars(fields))


def launch(run: Callable[[Config], None], config_class: type[Config], defaults: Path) -> None:
    """Parse, choose whose bodies the core runs with (the field `impl`), run. What the reader can mend is one sentence."""
    config = parse(config_class, defaults)
    try:
        binding.choose(config.impl)
        run(config)
    except CourseError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
