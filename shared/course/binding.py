"""Floor 0. Binding: `@exercise` gives a contract in the core its body, once, when the core is imported.

`@exercise("01.train_step")` replaces the contract by a plain function: the body's code over the body file's globals,
under the contract's own module, name and docstring, which then says where the body is. No wrapper is left, so pickling, `torch.compile`,
`inspect.getsource` and tracebacks see an ordinary function.

Where the bodies come from is one choice for each process, made before the core is imported:
`reference` (the solutions), `mine` (the learner's file), `mixed` (the learner's where the check last passed on that very
source, the solution elsewhere). Child processes inherit it through the variable COURSE_IMPLEMENTATION, which only
`choose` writes: it transports a choice, it is not a place to make one.
"""

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType

from shared.course import catalogue
from shared.course.errors import BrokenFile, CourseError, NotWritten, SignatureDiffers
from shared.course.paths import find_workspace, shown
from shared.course.progress import Progress
from shared.course.stubs import BodyFile

IMPLEMENTATIONS = ("reference", "mine", "mixed")
TRANSPORT = "COURSE_IMPLEMENTATION"


@dataclass
class Bodies:
    """An executed body file. `waiting` holds contracts that were bound while the file was still being executed."""

    module: ModuleType
    complete: bool = False
    waiting: list[tuple[FunctionType, FunctionType]] = field(default_factory=list)


@dataclass
class Choice:
    implementation: str
    workspace: Path
    replaced: dict[str, BodyFile]  # exercise id -> the file that holds its body, for checks and bug hunts


@dataclass
class Process:
    """What this process has chosen and bound so far."""

    choice: Choice | None = None
    files: dict[Path, BodyFile] = field(default_factory=dict)
    bodies: dict[Path, Bodies] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # exercise id -> "mine", "reference" or "replaced"


_process = Process()


def choose(implementation: str, workspace: Path | None = None, replaced: dict[str, BodyFile] | None = None) -> None:
    """Choose where this process and its children take the bodies from, before anything of the core is imported.

    Args:
        implementation: `reference`, `mine` or `mixed`.
        workspace: the folder that holds the learner's `chapters/`; default: found from the current folder.
        replaced: files whose bodies take precedence for single exercises (an answer under check, a planted mutant).

    Raises:
        CourseError: an unknown implementation, or a choice after the core was bound another way.
    """
    if implementation not in IMPLEMENTATIONS:
        raise CourseError(f"There is no implementation {implementation!r}: choose {', '.join(IMPLEMENTATIONS)}.")
    choice = Choice(implementation, (workspace or find_workspace()).resolve(), replaced or {})
    if _process.origins and choice != _process.choice:
        raise CourseError(
            f"The core already runs with {_process.choice.implementation!r}; it is bound once per process. "
            f"Choose {implementation!r} in a new process (in a notebook: restart the kernel)."
        )
    _process.choice = choice
    os.environ[TRANSPORT] = os.pathsep.join((implementation, str(choice.workspace)))


def current_choice() -> Choice:
    if _process.choice is None:
        implementation, _, workspace = os.environ.get(TRANSPORT, "reference").partition(os.pathsep)
        _process.choice = Choice(implementation, Path(workspace) if workspace else find_workspace(), {})
    return _process.choice


def origins() -> dict[str, str]:
    """For each exercise that the imported core has bound: `mine`, `reference` or `replaced`."""
    return dict(_process.origins)


def summary() -> str:
    """One line for a run's header: how much of what is running the learner wrote."""
    mine = sum(origin == "mine" for origin in _process.origins.values())
    return f"{mine} of {len(_process.origins)} parts are yours (implementation: {current_choice().implementation})"


def exercise(exercise_id: str) -> Callable[[FunctionType], FunctionType]:
    """Mark a function of the core as a hole whose body is written elsewhere. See the module's docstring."""

    def bind(contract: FunctionType) -> FunctionType:
        body, origin = _body_for(exercise_id, contract)
        _process.origins[exercise_id] = origin
        return body

    return bind


def _body_for(exercise_id: str, contract: FunctionType) -> tuple[FunctionType, str]:
    file, origin = _source(exercise_id, current_choice())
    bodies = load(file)
    bound = _empty(contract, bodies.module.__dict__)
    where = f"The body is in {shown(file.path)}; `course read {contract.__module__}` shows it in place."
    bound.__doc__ = f"{contract.__doc__.rstrip()}\n\n    {where}\n    "
    if bodies.complete:
        _fill(bound, contract, _function_in(bodies.module, contract))
    else:  # the body file imports this very module: filled as soon as the file is through
        bodies.waiting.append((bound, contract))
    return bound, origin


def _source(exercise_id: str, choice: Choice) -> tuple[BodyFile, str]:
    """The file that holds an exercise's body under a choice, and whose it is."""
    chapter = catalogue.chapter_of(exercise_id)
    if exercise_id in choice.replaced:
        return choice.replaced[exercise_id], "replaced"
    solution = chapter.solution_file
    if choice.implementation == "reference":
        return _read(solution), "reference"
    mine = chapter.stub_file(choice.workspace)
    if choice.implementation == "mine":
        return require_written(_read(mine), chapter), "mine"
    try:
        file = _read(mine)
    except BrokenFile:  # holds nothing that passed on that very source
        return _read(solution), "reference"
    if Progress(choice.workspace).passed(exercise_id) == file.fingerprint(catalogue.find_exercise(exercise_id), chapter):
        return file, "mine"
    return _read(solution), "reference"


def _read(path: Path) -> BodyFile:
    """A body file, read once: were it saved while the core is imported, what is judged would not be what is executed."""
    if path not in _process.files:
        _process.files[path] = BodyFile.read(path)
    return _process.files[path]


def require_written(file: BodyFile, chapter: catalogue.Chapter) -> BodyFile:
    """Refuse a learner's file that still has stubs, naming all of them."""
    missing = [exercise.id for exercise in chapter.exercises if not file.attempted(exercise)]
    if missing:
        raise NotWritten(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not written yet in {shown(file.path)}. "
            "Write what is missing (`course next` says where to go on), or run with IMPL=mixed (`--impl mixed`): "
            "it takes your checked parts and the solution for the others."
        )
    return file


def load(file: BodyFile) -> Bodies:
    """Execute a body file once. From its source, never from cached bytecode, which can be a save behind."""
    if file.path in _process.bodies:
        return _process.bodies[file.path]
    bodies = _process.bodies[file.path] = Bodies(ModuleType(f"course_bodies.{file.path.parent.name}.{file.path.stem}"))
    try:
        execute(file, bodies.module)
    except BaseException:
        del _process.bodies[file.path]
        raise
    bodies.complete = True
    for bound, contract in bodies.waiting:
        _fill(bound, contract, _function_in(bodies.module, contract))
    return bodies


def execute(file: BodyFile, module: ModuleType) -> None:
    """Run a body file's top level in `module`.

    Raises:
        BrokenFile: the file's top level raised; the message names the line.
    """
    module.__file__ = str(file.path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(file.source, str(file.path), "exec", dont_inherit=True), module.__dict__)
    except CourseError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file.path)]
        raise BrokenFile(f"{shown(file.path)}, line {lines[-1] if lines else 1}: {type(error).__name__}: {error}") from error


def _function_in(module: ModuleType, contract: FunctionType) -> FunctionType:
    body = getattr(module, contract.__name__, None)
    if body is None:
        raise NotWritten(f"{shown(Path(module.__file__))} has no function {contract.__name__!r}.")
    require_own_code(body, contract.__name__, Path(module.__file__))
    return body


def _empty(contract: FunctionType, namespace: dict) -> FunctionType:
    """The bound function before it has its code: the contract's identity over the body file's globals."""
    bound = FunctionType(contract.__code__, namespace, contract.__name__, contract.__defaults__)
    for name in ("__module__", "__qualname__", "__doc__", "__kwdefaults__", "__annotations__"):
        setattr(bound, name, getattr(contract, name))
    return bound


def _fill(bound: FunctionType, contract: FunctionType, body: FunctionType) -> None:
    require_same_signature(contract, body)
    bound.__code__ = body.__code__


def require_same_signature(contract: FunctionType, body: FunctionType) -> None:
    """Refuse a body whose parameters (names, order, kinds, defaults) are not the contract's."""
    if parameters(contract) != parameters(body):
        raise SignatureDiffers(
            f"{shown(Path(body.__code__.co_filename))}, line {body.__code__.co_firstlineno}: "
            f"{contract.__name__} does not have its contract's signature.\n"
            f"  contract: {contract.__name__}({', '.join(parameters(contract))})\n"
            f"  here:     {body.__name__}({', '.join(parameters(body))})"
        )


def require_own_code(body: object, name: str, path: Path) -> None:
    """Refuse what is not a plain function written in `path`: a decorated one, an alias of another function."""
    if not isinstance(body, FunctionType) or Path(body.__code__.co_filename) != path or body.__closure__:
        raise BrokenFile(
            f"{shown(path)}: {name} must be a plain function written in this file, without a decorator. Here it is "
            f"{type(body).__name__} {getattr(body, '__qualname__', '')!r}. In place of `@torch.no_grad()`, "
            "write `with torch.no_grad():` inside."
        )


def parameters(function: FunctionType) -> list[str]:
    """A function's parameters as text, without annotations, which a learner may write differently."""
    signature = inspect.signature(function)
    listed = [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in signature.parameters.values()]
    keyword_only = [i for i, p in enumerate(signature.parameters.values()) if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return listed[: keyword_only[0]] + ["*"] + listed[keyword_only[0] :] if keyword_only else listed

