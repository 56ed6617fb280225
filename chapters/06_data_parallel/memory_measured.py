"""Memory of a rank in a training step, measured: the storages behind its tensors, each counted once.

A view costs nothing and a storage of 0 bytes neither, so tensors are not counted but the memory behind them. Activations are what autograd
saves: hooks see each tensor as it is saved, and the object that holds it in its place reports when it is freed.

Left out on purpose: memory that no tensor shows (the allocator's reserve, what libraries hold). On a GPU, `torch.cuda.memory_allocated`.
And what selective recomputation keeps, which is in a cache of PyTorch's that no hook sees: its formula is tested against the allocator.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.parallel.planning.activations import Activations
from shared.parallel.planning.memory import MemoryEstimate
from shared.parallel.data.activation_checkpointing import run_block_selectively
from shared.parallel.strategy import ParallelStrategy


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind these tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}.values())


def weight_bytes(*modules: nn.Module) -> int:
    """Of modules that may share parameters, such as a model and the pieces of it that an optimizer steps."""
    return storage_bytes(parameter for module in modules for parameter in module.parameters())


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Of parameters that were listed between two steps: while fsdp computes with whole weights, modules do not show the shards."""
    return storage_bytes(parameter.grad for parameter in parameters)


def optimizer_bytes(optimizer: Optimizer) -> int:
    state = (value for of_parameter in optimizer.state.values() for value in of_parameter.values())
    return storage_bytes(value for value in state if isinstance(value, Tensor))


class ActivationMeter:
    """Counts what autograd keeps of the forward passes within `with meter:`, as long as it is kept, without the model's weights.

    now, peak: bytes. The backward pass belongs inside too: recomputed blocks keep their activations there.

    Raises:
        ValueError: on entering, the model recomputes selectively, and most of what it keeps would not be seen.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.now = self.peak = 0
        self.holders: Counter[int] = Counter()  # of each storage, by its address
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)

    def __enter__(self) -> "ActivationMeter":
        if recomputes_selectively(self.model):
            raise ValueError(
                "What selective recomputation keeps is in a cache of PyTorch's, which this meter cannot see: take the formula, "
                "shared.parallel.planning.memory.activations, or what the allocator says."
            )
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def pack(self, tensor: Tensor) -> "Tensor | SavedTensor":
        address = tensor.untyped_storage().data_ptr()
        if address in {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}:
            return tensor
        return SavedTensor(tensor, self)

    def count(self, tensor: Tensor, step: int) -> None:
        """One holder more or less of a tensor's storage."""
        storage = tensor.untyped_storage()
        before = self.holders[storage.data_ptr()]
        self.holders[storage.data_ptr()] = before + step
        if before == 0 or before + step == 0:
            self.now += step * storage.nbytes()
            self.peak = max(self.peak, self.now)


def recomputes_selectively(model: nn.Module) -> bool:
    """Whether blocks run with selective activation checkpointing, be it from within FSDP's own way of running them."""
    run_blocks = [getattr(getattr(model, name, None), "run_block", None) for name in ("encoder", "stack")]
    return any(around is run_block_selectively for run_block in run_blocks for around in wrappers(run_block))


def wrappers(function: Any) -> Iterator[Any]:
    """The functions that a chain of `functools.partial` calls, from the outermost inwards."""
    while isinstance(function, partial):
        yield function.func
        function = function.args[0]
    yield function


class SavedTensor:
    """What autograd holds in place of a tensor; detached, since the tensor's own graph would hold this in turn: a cycle, never freed."""

    def __init__(self, tensor: Tensor, meter: ActivationMeter):
        self.tensor, self.meter = tensor.detach(), meter
        meter.count(tensor, 1)

    def __del__(self) -> None:
        self.meter.count(self.tensor, -1)


def unpack(kept: Tensor | SavedTensor) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor


def measured_activations(model: nn.Module, loss_of: Any) -> Activations:
    """Of `loss_of()` -> [] loss, and its backward pass."""
    with ActivationMeter(model) as meter:
        loss = loss_of()
        after_forward = meter.now
        loss.backward()
    return Activations(after_forward, meter.peak)


class MemoryTracker:
    """Measures the memory of one training step of a rank, `with tracker:` around it. Afterwards `peak` has each kind where it was largest.

    Gradients are counted where they wait: as the last micro-batch begins, or, of a single one, when its backward pass is over.

    Args:
        parallel: a model with a stack of blocks, parallelized or not.
        optimizer: built over `parallel.optim_params`.
    """

    def __init__(self, parallel: ParallelStrategy, optimizer: Optimizer):
        self.parallel, self.optimizer = parallel, optimizer
        self.activations = ActivationMeter(parallel.module)
        self.parameters = [*parallel.model.parameters(), *parallel.optim_params.parameters()]
        self.forward_passes = self.gathered = self.gradients = 0

    def __enter__(self) -> "MemoryTracker":
        stack = self.parallel.module.stack
        self.handles = [
            stack.register_forward_pre_hook(self.begin),
            *(block.register_forward_pre_hook(self.note_gathered) for block in stack.blocks.values()),
            stack.register_forward_hook(self.note_gathered),
            self.optimizer.register_step_pre_hook(self.before_step),
        ]
        self.activations.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.activations.__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def begin(self, *_: Any) -> None:
        self.forward_passes += 1
        self.note_gradients()

    def before_step(self, *_: Any) -> None:
        if self.forward_passes == 1:
            self.note_gradients()

    def note_gradients(self) -> None:
        self.gradients = gradient_bytes(self.parameters)

    def note_gathered(self, *_: Any) -> None:
        self.gathered = max(self.gathered, self.parallel.gathered_bytes)

    @property
    def peak(self) -> MemoryEstimate:
        """Bytes, by kind."""
        weights = weight_bytes(self.parallel.model, self.parallel.optim_params)
        return MemoryEstimate(weights, self.gathered, self.gradients, optimizer_bytes(self.optimizer), self.activations.peak)
