"""Floor 0. Extensions (plugins) by import path: a class or function of your own, named in a configuration, without editing the core.

    my_module.MyOptimizer       in my_module.py beside the YAML file, or else in a module that Python can import
    folder/my_file.py:MyName    in that file, looked for from the YAML file's folder, then from the current one

A name is located once, where its file is read: what lies beside it becomes `/folder/my_module.py:MyOptimizer`. So every process, the
record of the run and a later command find the same file. No folder is put before Python's own modules: a file named `random.py` hides
nothing.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NewType

from shared.course.errors import SettingError

ImportPath = NewType("ImportPath", str)  # the type of a field that names a class or function
IN_MODULE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.([A-Za-z_]\w*)")
IN_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Extension:
    """A class or function by import path. In a configuration, the name alone may stand for it.

    Args:
        name: its import path, such as my_module.MyName or folder/my_file.py:MyName.
        options: its keyword arguments.
    """

    name: ImportPath
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not is_import_path(self.name):
            raise ValueError(f"name is {self.name!r}: give an import path, such as my_module.MyName or folder/my_file.py:MyName.")

    def bound(self, key: str, *given: str, offered: Mapping[str, Any] | None = None) -> Callable:
        return bound(self.name, self.options, key, *given, offered=offered)


def is_import_path(name: str) -> bool:
    return bool(IN_FILE.fullmatch(name) or IN_MODULE.fullmatch(name))


def called(name: str) -> str:
    """The class or function that an import path names, without its module."""
    return re.split(r"[.:]", name)[-1]


def located(name: str, key: str, folders: Sequence[Path]) -> str:
    """An import path with the absolute path of its file, where that is in one of the folders; anything else as it is.

    Raises:
        SettingError: it is nowhere. Offers the nearest file beside the configuration.
    """
    in_file, in_module = IN_FILE.fullmatch(name), IN_MODULE.fullmatch(name)
    if not (in_file or in_module):
        return name
    file, last = in_file.groups() if in_file else (f"{in_module[1].replace('.', '/')}.py", in_module[2])
    for folder in folders:
        if (path := folder / Path(file).expanduser()).is_file():
            return f"{path.resolve()}:{last}"
    if in_module and importlib.util.find_spec(in_module[1].split(".")[0]):
        return name
    near = difflib.get_close_matches(Path(file).stem, [path.stem for path in folders[0].glob("*.py")], n=1)
    offered = f" Did you mean '{near[0]}.{last}'?" if near else ""
    what = f"file {file}" if in_file else f"module {in_module[1]}"
    where = "" if in_file else ", and Python can import none of that name"
    raise SettingError(f"{key} is {name!r}: there is no {what} in {folders[0]}{where}.{offered}")


def bound(name: str, options: Mapping[str, Any], key: str, *given: str, offered: Mapping[str, Any] | None = None) -> Callable:
    """The class or function of an import path, with its keyword arguments checked against its signature and bound.

    Args:
        options: its keyword arguments, as the configuration gave them.
        key: the setting that names it, for sentences.
        given: names, for sentences, of the positional arguments that it will be called with.
        offered: keyword arguments that it gets where its signature names them.

    Raises:
        SettingError: it cannot be loaded, or takes other arguments.
    """
    function, last = load(name, key), called(name)
    parameters = inspect.signature(function).parameters
    keywords = [each.name for each in parameters.values() if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    taken = {word: value for word, value in (offered or {}).items() if word in keywords}
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        for option in options:
            if option not in keywords:
                near = difflib.get_close_matches(option, keywords, n=1)
                raise SettingError(f"{key}: {last} takes no {option!r}.{f' Did you mean {near[0]!r}?' if near else ''}")
    if twice := options.keys() & (offered or {}).keys():
        raise SettingError(f"{key}: the options of {last} hold {min(twice)}, which is a setting of its own: give it there.")
    try:
        inspect.signature(function).bind(*given, **taken, **options)
    except TypeError as error:
        with_words = f" It is called with {', '.join(given)}." if given else ""
        raise SettingError(f"{key}: {last} cannot be called so ({error}): see its signature and the options.{with_words}") from None
    return partial(function, **taken, **options)


def load(name: str, key: str = "") -> Any:
    """What an import path names. A file is run once in a process.

    Raises:
        SettingError: there is none, its module raises an error, or it cannot be called. Offers the nearest name.
    """
    in_file, in_module = IN_FILE.fullmatch(name), IN_MODULE.fullmatch(name)
    where, last = (in_file or in_module).groups()
    module = module_of_file(where, key) if in_file else imported(where, key)
    found = getattr(module, last, None)
    if not callable(found):
        near = difflib.get_close_matches(last, [word for word, value in vars(module).items() if callable(value)], n=1)
        cure = f"Did you mean {near[0]!r}?" if near else "Write it there, or name another."
        raise SettingError(f"{key}: {where} has no class or function {last!r}. {cure}")
    return found


def module_of_file(file: str, key: str) -> ModuleType:
    if file in sys.modules:
        return sys.modules[file]
    spec = importlib.util.spec_from_file_location(file, file)  # named by its path, which hides no other module
    module = importlib.util.module_from_spec(spec)
    if (folder := str(Path(file).resolve().parent)) not in sys.path:
        sys.path.append(folder)  # for what it imports from its folder; last, for the same reason
    sys.modules[file] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[file]
        raise SettingError(f"{key}: {said_of(error, file)}") from error
    return module


def imported(module: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise SettingError(f"{key}: {said_of(error, module)}") from error


def said_of(error: Exception, where: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == where]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{where} cannot be loaded{f', line {line}' if line else ''} ({type(error).__name__}: {error}): mend it, or name another."


def content_hash(name: str) -> str:
    """What must be equal for an import path to do the same: its name, and the hash of its file, where it has one of its own."""
    found = IN_FILE.fullmatch(name)
    return f"{called(name)} {hashlib.sha256(Path(found[1]).read_bytes()).hexdigest()}" if found else name
