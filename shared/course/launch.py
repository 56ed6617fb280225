"""Floor 0. Command-line options and YAML into a typed configuration: how a chapter's run script starts.

Every `run.py` starts through `launch`, which also chooses the implementation and shows errors as sentences. A configuration is a
dataclass; its fields are the keys of the YAML file and, dotted, the options of the command line.
"""

import json
import os
import re
import signal
import sys
import time
from argparse import Action
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from shared.course import binding
from shared.course.errors import CourseError, SettingError
from shared.course.strict_yaml import read_yaml
from shared.course.typed import configured, hint_of, merged, with_words

Config = TypeVar("Config")
INTERRUPTED = 128 + signal.SIGINT  # the exit code that shells give to Ctrl-C


def parse(config_class: type[Config], defaults: Path, arguments: list[str] | None = None) -> Config:
    """The configuration: the class's defaults, over them the chapter's YAML, `--config` files and options, in that order.

    An unknown key, a value of the wrong type, or values that a configuration refuses end the process with one sentence and exit code 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if asked := help_asked(arguments):
        print_help(config_class, "%(prog)s [--config FILE.yaml] [--KEY VALUE ...]", asked)
    try:
        words, files = {}, [defaults]
        for key, value in options_of(arguments):
            if key == "config":
                files.append(Path(value))
            else:
                words[key] = value
        settings = {}
        for file in files:
            settings = merged(settings, read_yaml(file))
        return configured(config_class, with_words(config_class, settings, words))
    except CourseError as error:
        refuse(error)


def options_of(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(key, value) of each `--key value` or `--key=value`.

    Raises:
        SettingError: a word that is neither.
    """
    options, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise SettingError(f"{word!r} is not an option: write --key value.")
        key, given, value = word[2:].partition("=")
        if not given:
            if not rest or rest[0].startswith("--"):
                raise SettingError(f"{word} has no value: write {word} VALUE.")
            value = rest.pop(0)
        options.append((key, value))
    return options


def help_asked(words: Sequence[str]) -> str | None:
    """The word that asks for help: of everything, or, such as --data.prepare.sources.help, of an entry of a list."""
    return next((word for word in words if word in ("-h", "--help") or word.startswith("--") and word.endswith(".help")), None)


def print_help(config_class: type, usage: str, asked: str = "--help") -> NoReturn:
    """Every key with its meaning and default, from the class and its docstring; ends the process.

    asked: `--help`, or `--KEY.help` for the fields of what may stand at a key.
    """
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter):
        def _expand_help(self, action: Action) -> str:  # `Optional[Annotated[int, at least 1]]` becomes `int (at least 1) | null`
            text = re.sub(r"Annotated\[(\w+), ([^\]]+)\]", r"\1 (\2)", super()._expand_help(action))
            return re.sub(r"Optional\[([^\[\]]+)\]", r"\1 | null", text)

    class Parser(ArgumentParser):
        def __init__(self, **options: Any) -> None:  # also of the parser that jsonargparse makes for --KEY.help
            super().__init__(**{"formatter_class": Formatter} | options)

    parser = Parser(description=config_class.__doc__.splitlines()[0], usage=usage)
    parser.add_class_arguments(config_class, fail_untyped=True)
    if asked in ("-h", "--help"):
        parser.print_help()
        sys.exit(0)
    try:
        hint_of(config_class, asked.removeprefix("--").removesuffix(".help"))
    except CourseError as error:
        refuse(error)
    parser.parse_args([asked])
    sys.exit(2)


def refuse(error: CourseError) -> NoReturn:
    """End the process with what cannot be in its command line or its file."""
    tell_torchrun(str(error))
    sys.exit(print(f"{Path(sys.argv[0]).name}: {error}\n--help lists every setting.", file=sys.stderr) or 2)


def tell_torchrun(sentence: str) -> None:
    """Leave the sentence where torchrun, if it started this process, takes what it prints last, below a page about itself."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}), encoding="utf-8")


def end_quietly_on_interrupt() -> None:
    """Let Ctrl-C end this process at once and without a traceback: while it imports, a library may catch KeyboardInterrupt, or pass it on
    as an error of its own. `signal.default_int_handler` is what to set when imports are done."""

    def end(number: int, frame: object) -> None:
        os.write(2, b"\nStopped.\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)


def launch(run: Callable[[Config], None], config_class: type[Config], defaults: Path) -> None:
    """Parse, choose whose bodies the core runs with (the field `impl`), run. What the reader can mend is one sentence."""
    config = parse(config_class, defaults)
    try:
        binding.choose(config.impl)
        run(config)
    except CourseError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(INTERRUPTED)


def let_segments_grow() -> None:
    """Have PyTorch's allocator grow its segments of a GPU's memory (`expandable_segments`), unless the user has set one of its variables.
    Numbers of trained rows and lengths of prompts vary, and blocks of many sizes leave gaps. To be called before PyTorch is imported.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
