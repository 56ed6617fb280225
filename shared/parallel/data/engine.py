"""Chapter 06. A data-parallel engine: what DDP, ZeRO and FSDP do in the four moments of a training step.

    runner      before the first micro-batch: get ready to exchange gradients during the last backward pass of each parameter
    finish      after the last backward pass: complete the exchange
    used        which parameters this rank has used; what no rank has used keeps no gradient
    updater     around the optimizer's step

Each engine serves the parameters of one group of ranks. `shared.parallel.strategy` puts several together; one alone completes a step by
`reducer` itself. Totals are sums, so the totals of ranks add: one all-reduce of a small vector of float64, in which counts are exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from shared.devices import sent
from shared.parallel.comm.communicator import Communicator
from shared.totals import Objective, Runner, Totals, Updater


class DataEngine:
    """The base class of data-parallel engines, which exchanges nothing itself.

    Attributes:
        model: what objectives call.
        optim_params: a module whose `named_parameters` the optimizer is built over: the model, or this rank's shards of it.
        group: the ranks over which gradients are added.
        stored: name -> shard, for weights that checkpoints read here and not in the model's modules.
    """

    def __init__(self, model: nn.Module, group: Communicator):
        self.model, self.group = model, group
        self.optim_params: nn.Module = model
        self.stored: Mapping[str, nn.Parameter] = {}

    def objective(self, objective: Objective) -> Objective:
        """Wrap the objective, so that it works on what this rank computes of a batch; in evaluations as well."""
        return objective

    def runner(self, runner: Runner) -> Runner:
        """Wrap the runner, so that it starts the exchange of gradients."""
        return runner

    def finish(self) -> None:
        """Complete the exchange: gradients of `optim_params` are then those of the loss sum over all ranks."""

    def used(self) -> Tensor:
        """Flags [parameters], 1 for each parameter that this rank has used since the last step; of one length on all ranks of the group."""
        return torch.empty(0)

    def drop_unused(self, users: Sequence[float]) -> None:
        """Drop the gradients of parameters that no rank has used: weight decay would change them. users: how many ranks used each."""

    def updater(self, updater: Updater) -> Updater:
        """Wrap the updater, so that it steps `optim_params`; afterwards `model` has the new weights."""
        return lambda model, optimizer, token_count: updater(self.optim_params, optimizer, token_count)

    def gathering(self, once: bool) -> AbstractContextManager:
        """A context in which sharded weights stay gathered (`once`) or are freed after each use; nothing may be trained in it."""
        return nullcontext()

    @property
    def whole_bytes(self) -> int:
        """Bytes of unsharded weights on this rank while all of them are gathered."""
        return 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of unsharded weights on this rank now, without its shards."""
        return 0

    def reducer(self, model: nn.Module, totals: Totals) -> Totals:
        """Reduce gradients and totals over the group, where this engine is the only one."""
        return complete([self], totals, self.group)


def complete(engines: Sequence[DataEngine], totals: Totals, group: Communicator) -> Totals:
    """Complete the engines' exchanges, and all-reduce totals together with how many ranks have used each parameter."""
    for engine in engines:
        engine.finish()
    flags = [engine.used() for engine in engines]
    own = torch.cat([*flags, torch.empty(0)])
    totals, users = add_with(totals, own, group)
    for engine, counts in zip(engines, known_users(own, users).split([len(each) for each in flags]), strict=True):
        engine.drop_unused(counts.tolist())
    return totals


def add_over(totals: Totals, group: Communicator) -> Totals:
    """All-reduce totals over a group, as one tensor. Here a metric may have any shape."""
    return add_with(totals, torch.empty(0), group)[0]


def add_with(totals: Totals, counts: Tensor, group: Communicator) -> tuple[Totals, Tensor]:
    """All-reduce totals and other counts [n] over a group, as one tensor. The counts are on the CPU; they are returned on the device of the
    totals, as float64."""
    if group.size == 1:  # its device may not support float64
        return totals, counts.double()
    values = [totals.loss_sum, totals.token_count, *totals.metrics.values()]
    device = totals.loss_sum.device
    packed = torch.cat([sent(value.detach().to(torch.float64).flatten(), device) for value in (*values, counts)])
    group.all_reduce(packed)
    *parts, counts = packed.split([value.numel() for value in (*values, counts)])
    loss_sum, token_count, *metrics = (part.view_as(value).to(value.dtype) for part, value in zip(parts, values, strict=True))
    return Totals(loss_sum, token_count, dict(zip(totals.metrics, metrics, strict=True))), counts


def known_users(own: Tensor, users: Tensor) -> Tensor:
    """How many ranks have used each parameter, on the CPU: at least one, where this rank has, so that there is nothing to wait for where it
    has used them all. own: this rank's flags, on the CPU. users: their sums over the ranks."""
    return own if own.all() else users.cpu()


class Parameters(nn.Module):
    """Parameters under the names of the whole model, which hold dots: what an optimizer is built over, or what one engine serves.

    Args:
        named: name -> this rank's shard (`make_shard`), or a parameter that it holds whole.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]):
        super().__init__()
        self.named = dict(named)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Names of the whole model, which cannot be registered in this module."""
        return ((f"{prefix}.{name}" if prefix else name, parameter) for name, parameter in self.named.items())


def add_partial(parameters: Sequence[nn.Parameter], group: Communicator) -> None:
    """All-reduce gradients that are partial over a group. One that a rank has not used counts as 0 there; one that no rank has used stays
    None."""
    flags = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), sent(flags.to(gradients[0].dtype), gradients[0].device)])
    group.all_reduce(flat)
    *parts, users = flat.split([*(gradient.numel() for gradient in gradients), len(parameters)])
    for parameter, gradient, part, count in zip(parameters, gradients, parts, known_users(flags, users).tolist(), strict=True):
        parameter.grad = gradient.copy_(part.view_as(gradient)) if count else None  # in place: a bucket would keep the part's old numbers
