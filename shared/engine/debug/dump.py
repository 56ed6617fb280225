"""Chapter 04. The model dump (tensor dump with statistics): every weight, gradient and activation by name, in numbers that fit on a page.

A loss curve says that a run is ill; a dump says where. It holds, for each tensor, the statistics of `activation_statistics` and a
histogram of magnitudes; of a stack of experts, for each of them, by its number in the whole model. Activations are seen by forward
hooks, which are there for one step, return nothing and draw no random numbers: the step's results are the same, bit for bit.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.errors import CourseError
from shared.engine.debug.anomalies import BrokenStep
from shared.engine.checkpoint.atomic import atomic_save
from shared.engine.callbacks import Callback, RunState
from shared.engine.debug.statistics import activation_statistics, magnitude_histogram
from shared.engine.trackers.jsonl import from_json, to_json
from shared.loop import evaluate
from shared.model.roles import experts_of, role_of
from shared.output_files import writing
from shared.tensor_files import save_tensors
from shared.totals import Batch

KINDS = ("weights", "gradients", "activations")
REQUEST = "dump-now"  # a file of this name in the run's folder asks for a dump


@dataclass(frozen=True)
class Entry:
    """One tensor. statistics: those of `activation_statistics`. histogram: that of `magnitude_histogram`."""

    shape: list[int]
    dtype: str
    statistics: dict[str, float]
    histogram: list[int]


@dataclass(frozen=True)
class Dump:
    """step: the one that was under way. entries: kind (`KINDS`) -> name -> entry, in the model's order. part_of: where tensors are cut over
    ranks, the rank whose parts these are, such as "rank 0 of 2"; "" where each is whole."""

    step: int
    entries: dict[str, dict[str, Entry]]
    part_of: str = ""


@torch.no_grad()
def describe(x: Tensor) -> Entry:
    with torch.autocast(x.device.type, enabled=False):
        return Entry(list(x.shape), str(x.dtype).removeprefix("torch."), activation_statistics(x), magnitude_histogram(x))


def describe_all(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Entry]:
    """Name -> entry, of the tensors that have elements."""
    return {name: describe(x) for name, x in tensors if x.numel()}


def by_expert(named: Iterable[tuple[str, nn.Parameter, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter, itself or its gradient) -> name and tensor; of a stack of experts each one, as `name[expert]`."""
    for name, parameter, tensor in named:
        if role_of(name, parameter) == "expert":
            yield from ((f"{name}[{expert}]", part) for expert, part in experts_of(parameter, tensor))
        else:
            yield name, tensor


@contextlib.contextmanager
def record_activations(model: nn.Module, kept: dict[str, Tensor] | None = None) -> Iterator[dict[str, Entry]]:
    """Within it, the first output of each module is described under the module's name.

    First: that of the first micro-batch, and the first of a module that is used twice. A module that returns several tensors is
    described by the first one.

    Args:
        kept: where given, copies of the tensors themselves are put here too.

    >>> model = torch.nn.Sequential(torch.nn.ReLU())
    >>> with record_activations(model) as entries:
    ...     _ = model(torch.tensor([-1.0, 2.0]))
    >>> entries["0"].statistics["zeros"]
    0.5
    """
    entries: dict[str, Entry] = {}
    hooks = [module.register_forward_hook(recorder(name, entries, kept)) for name, module in model.named_modules() if name]
    try:
        yield entries
    finally:
        for hook in hooks:
            hook.remove()


def recorder(name: str, entries: dict[str, Entry], kept: dict[str, Tensor] | None) -> Callable[..., None]:
    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = next((x for x in (output if isinstance(output, tuple | list) else [output]) if isinstance(x, Tensor)), None)
        if name in entries or tensor is None or not tensor.is_floating_point() or not tensor.numel():
            return
        entries[name] = describe(tensor.detach())
        if kept is not None:
            kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)

    return record


def write_dump(folder: Path, dump: Dump, tensors: dict[str, Tensor] | None = None) -> None:
    """`dump.json`, and `tensors.safetensors` (names `<kind>.<name>`) where there are tensors; complete or not at all.

    Raises:
        CourseError: the disk is full, or the folder cannot be written to.
    """
    entries = to_json({kind: {name: asdict(entry) for name, entry in named.items()} for kind, named in dump.entries.items()})

    def write(partial: Path) -> None:
        (partial / "dump.json").write_text(json.dumps({"step": dump.step, "part_of": dump.part_of, "entries": entries}), encoding="utf-8")
        if tensors:
            save_tensors(tensors, partial / "tensors.safetensors")

    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        atomic_save(folder, write)


def read_dump(folder: Path | str) -> Dump:
    path = Path(folder) / "dump.json"
    if not path.is_file():
        raise CourseError(f"{folder} holds no dump: give a folder dumps/step-XXXXXXXX of a run.")
    try:
        record = from_json(json.loads(path.read_text(encoding="utf-8")))
        entries = {kind: {name: Entry(**entry) for name, entry in named.items()} for kind, named in record["entries"].items()}
        return Dump(record["step"], entries, record.get("part_of", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CourseError(f"{path} is damaged ({error}): give another dump, or make a new one with engine.dump.every.") from None


class ModelDump(Callback):
    """Writes `dumps/step-XXXXXXXX` in the run's folder: the weights that the step began with, its gradients (of the mean loss, before
    clipping) and the activations of its first micro-batch.

    Args:
        every: steps between two dumps; 0 for none. `dump_now()`, or a file `dump-now` in the run's folder, asks for one at any time;
            the next step that begins makes it.
        on_anomaly: dump a step that was stopped as broken, with the activations of the first micro-batch that is at fault.
        tensors: also write the tensors themselves.
        loss_scale: what gradients are multiplied by under dynamic loss scaling.

    A step that is dumped runs uncompiled where the model is compiled, because compiled code passes hooks by.
    """

    every_rank = True  # a broken step is computed again, which takes all ranks; other dumps are rank 0's

    def __init__(
        self, every: int = 0, on_anomaly: bool = True, tensors: bool = False, loss_scale: Callable[[], float] | None = None
    ):
        self.every, self.on_anomaly, self.tensors, self.loss_scale = every, on_anomaly, tensors, loss_scale
        self.asked = False
        self.recording: contextlib.ExitStack | None = None
        self.activations: dict[str, Entry] = {}
        self.kept: dict[str, Tensor] = {}

    def dump_now(self) -> None:
        """Dump in the next step that begins."""
        self.asked = True

    def on_batch(self, engine: RunState, microbatches: Sequence[Batch]) -> None:
        if engine.strategy.rank:
            return
        request = engine.output / REQUEST
        if request.exists():
            request.unlink(missing_ok=True)  # another process of the run may have been faster
            self.asked = True
        if not (self.asked or (self.every and (engine.step + 1) % self.every == 0)):
            return
        self.asked = False
        self.recording = self.recording_of(engine.strategy.module)

    def before_optimizer(self, engine: RunState) -> None:
        if self.recording is not None:
            self.end_recording()
            self.write(engine, self.folder(engine))

    def on_error(self, engine: RunState, error: BaseException) -> None:
        if self.on_anomaly and isinstance(error, BrokenStep):
            self.end_recording()
            with self.recording_of(engine.strategy.module):
                evaluate(engine.model, [engine.microbatches[error.microbatch]], engine.objective)
            self.write(engine, self.folder(engine, "-broken"))

    def on_end(self, engine: RunState) -> None:
        self.end_recording()

    def recording_of(self, model: nn.Module) -> contextlib.ExitStack:
        """Begin to record activations; closing what is returned ends it."""
        stack, self.kept = contextlib.ExitStack(), {}
        if any(module._compiled_call_impl is not None for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        self.activations = stack.enter_context(record_activations(model, self.kept if self.tensors else None))
        return stack

    def end_recording(self) -> None:
        if self.recording is not None:
            self.recording.close()
            self.recording = None

    def write(self, engine: RunState, folder: Path) -> None:
        """Gradients are divided as the updater will divide them: each as a copy, one at a time."""
        count = engine.token_count * (self.loss_scale() if self.loss_scale else 1)
        named = list(engine.strategy.grad_params.named_parameters())
        gradients = ((name, p, p.grad / count) for name, p in named if p.grad is not None)
        weights = ((name, p, p) for name, p in named)
        entries = [describe_all(by_expert(weights)), describe_all(by_expert(gradients)), self.activations]
        tensors = self.all_tensors(named, count) if self.tensors else None
        strategy = engine.strategy
        part_of = "" if strategy.holds_everything else f"rank {strategy.rank} of {strategy.size}"
        told = f"Dump of step {engine.step + 1}: {folder}" + f" (the parts that {part_of} has)" * bool(part_of)
        try:
            write_dump(folder, Dump(engine.step + 1, dict(zip(KINDS, entries, strict=True)), part_of), tensors)
        except CourseError as error:  # the run continues without its dump
            told = str(error)
        self.activations, self.kept = {}, {}
        engine.console.print(told, markup=False, highlight=False, soft_wrap=True)

    def folder(self, engine: RunState, why: str = "") -> Path:
        rank = engine.strategy.rank  # each dumps its own shards
        return engine.output / "dumps" / f"step-{engine.step + 1:08d}{why}{f'-rank-{rank}' if rank else ''}"

    def all_tensors(self, named: list[tuple[str, nn.Parameter]], count: float) -> dict[str, Tensor]:
        tensors = {f"weights.{name}": p.detach().contiguous() for name, p in named}
        tensors |= {f"gradients.{name}": (p.grad / count).contiguous() for name, p in named if p.grad is not None}
        return tensors | {f"activations.{name}": x for name, x in self.kept.items()}
