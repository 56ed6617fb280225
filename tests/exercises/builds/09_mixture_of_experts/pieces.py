"""What the stages of build 09 share: weights, tokens, grids of ranks, and the oracle, one process in which every expert sees every token.

The oracle multiplies each expert's result for each token by a gate that is 0 where the token did not choose it; choices are sorted in
Python. tests/parity/test_09_build.py holds it against transformers' Mixtral and OLMoE. Tolerance: ranks add the same numbers in another
order, which moves float64 by some 1e-15 of the largest summand; 1e-9 is far from that and far from any mistake.
"""

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.course.comparing import Said
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads

WIDTH, INNER = 5, 7
TEXT = "the text of build.py: stage {}"
ONE_PROCESS = "one process in which every expert sees every token, in float64"
NEAR = {"rtol": 1e-9, "atol": 1e-9}
EXPERTS = ("experts.gate_proj.weight", "experts.up_proj.weight", "experts.down_proj.weight")
TRAINED = ("router.weight", *EXPERTS)

Results = dict[str, Any]
Batch = tuple[Tensor, Tensor, Tensor]
Sizes = list[list[tuple[int, int]]]  # for each rank the shapes of its micro-batches


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of(experts: int, width: int = WIDTH, inner: int = INNER, bias: list[float] | None = None, seed: int = 1) -> dict[str, Tensor]:
    shapes = [(experts, width), (experts, inner, width), (experts, inner, width), (experts, width, inner)]
    found = {name: randn(*shape, seed=seed + number) / shape[-1] ** 0.5 for number, (name, shape) in enumerate(zip(TRAINED, shapes))}
    found["router.weight"] *= 2  # so that probabilities differ
    return found | {"router.bias": torch.zeros(experts).double() if bias is None else torch.tensor(bias).double()}


def batches_of(shapes: list[tuple[int, int]], ignored: float = 0.25, seed: int = 0, width: int = WIDTH) -> list[Batch]:
    """Micro-batches of tokens, targets and which tokens count. ignored: the share of those that do not."""
    generator, found = torch.Generator().manual_seed(seed), []
    for rows, length in shapes:
        x, targets = (torch.randn(rows, length, width, generator=generator).double() for _ in range(2))
        found.append((x, targets, torch.rand(rows, length, generator=generator) >= ignored))
    return found


def batches_by_rank(sizes: Sizes, width: int = WIDTH) -> list[list[Batch]]:
    return [batches_of(own, seed=rank, width=width) for rank, own in enumerate(sizes)]


def squared_error(y: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    return (y - targets).square().sum(dim=-1)[valid].sum()


def best(probabilities: Tensor, bias: Tensor, k: int) -> Tensor:
    """The k experts [T, k] of each token; of equals, the lower number first."""
    scores = (probabilities.detach() + bias).tolist()
    chosen = [sorted(range(len(token)), key=lambda expert: (-token[expert], expert))[:k] for token in scores]
    return torch.tensor(chosen, dtype=torch.int64).view(len(scores), k)


def probabilities_of(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and probabilities [..., E]."""
    logits = torch.einsum("...d,ed->...e", x, weight)
    powers = (logits - logits.detach().amax(dim=-1, keepdim=True)).exp()
    return logits, powers / powers.sum(dim=-1, keepdim=True)


def by_one_expert(x: Tensor, weights: dict[str, Tensor], expert: int) -> Tensor:
    gate, up, down = (weights[name][expert] for name in EXPERTS)
    inner = x @ gate.T
    return (inner * inner.sigmoid() * (x @ up.T)) @ down.T


def losses_by_hand(logits: Tensor, probabilities: Tensor, experts: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The balance loss and the z-loss, row by row and expert by expert."""
    balance, z = logits.sum() * 0, logits.sum() * 0
    for row in range(len(valid)):
        places = [place for place, counts in enumerate(valid[row].tolist()) if counts]
        for place in places:
            largest = logits[row, place].detach().max()
            z = z + (largest + (logits[row, place] - largest).exp().sum().log()) ** 2
        for expert in range(logits.shape[-1]):
            chosen = sum(expert in experts[row, place].tolist() for place in places)
            mass = sum((probabilities[row, place, expert] for place in places), start=torch.zeros(()).double())
            balance = balance + chosen * mass * logits.shape[-1] / experts.shape[-1] / max(1, len(places))
    return balance, z


class Whole:
    """The layer in one process."""

    def __init__(self, weights: dict[str, Tensor], k: int, renormalize: bool):
        self.weights = {name: weight.detach().clone().requires_grad_(name in TRAINED) for name, weight in weights.items()}
        self.k, self.renormalize = k, renormalize

    def choices(self, x: Tensor) -> Tensor:
        probabilities = probabilities_of(x.flatten(0, 1), self.weights["router.weight"])[1]
        return best(probabilities, self.weights["router.bias"], self.k).view(*x.shape[:2], self.k)

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, probabilities = probabilities_of(x, self.weights["router.weight"])
        experts = self.choices(x)
        chosen = torch.zeros_like(probabilities).scatter(-1, experts, 1.0)
        gates = probabilities * chosen
        if self.renormalize:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        every = torch.stack([by_one_expert(x, self.weights, expert) for expert in range(logits.shape[-1])], dim=-1)
        return torch.einsum("bsde,bse->bsd", every, gates), *losses_by_hand(logits, probabilities, experts, valid)

    def step(self, batches: list[Batch], balance: float = 0.0, z: float = 0.0, loss: Callable = squared_error) -> tuple[Tensor, Results]:
        """The loss of all ranks' micro-batches, and its gradients."""
        total = torch.zeros(()).double()
        for x, targets, valid in batches:
            y, balance_loss, z_loss = self.forward(x, valid)
            total = total + loss(y, targets, valid) + balance * balance_loss + z * z_loss
        mean = total / sum(int(valid.sum()) for _, _, valid in batches)
        return mean.detach(), dict(zip(TRAINED, torch.autograd.grad(mean, [self.weights[name] for name in TRAINED]), strict=True))

    def load(self, batches: list[Batch]) -> Tensor:
        chosen = torch.cat([self.choices(x)[valid].flatten() for x, _, valid in batches])
        return torch.tensor([chosen.tolist().count(expert) for expert in range(len(self.weights["router.weight"]))])


def part(name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """What rank `rank` of a group of `ranks` holds of a weight or of its gradient."""
    return tensor.chunk(ranks)[rank] if name in EXPERTS else tensor


def plain(value: Any) -> Any:
    """A result as a check compares it."""
    return value.detach().clone() if isinstance(value, Tensor) else Said("nothing") if value is None else value


def gradients_by(outputs: list[Tensor], cotangents: list[Tensor], inputs: dict[str, Tensor], again: bool = False) -> Results:
    """Gradients by name, of what requires one. again: other outputs of the same graph have theirs taken later."""
    asked = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    found = torch.autograd.grad(outputs, list(asked.values()), cotangents, retain_graph=again, allow_unused=True)
    return {f"gradient of {name}": plain(gradient) for name, gradient in zip(asked, found, strict=True)}


def on_grid(function: Callable[[Communicator, Communicator, int], Any], size: int, replicas: int = 1) -> list[Any]:
    """function(group, replicas, number of the rank in the world) on all ranks, in their order: group g has ranks g * size and following."""

    def on_rank(world: Communicator) -> Any:
        if replicas == 1:
            return function(world, SingleRankCommunicator(trace=world.trace), world.rank)
        groups = [range(first, first + size) for first in range(0, size * replicas, size)]
        group = world.split("ep", groups)
        same = world.split("edp", [range(first, size * replicas, size) for first in range(size)])
        return function(group, same, world.rank)

    return run_threads(on_rank, size * replicas)


def alone() -> tuple[Communicator, Communicator]:
    return SingleRankCommunicator(), SingleRankCommunicator()


class TakenOut(torch.overrides.TorchFunctionMode):
    """Counts the numbers that leave tensors for Python."""

    numbers = 0

    def __torch_function__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        if getattr(function, "__name__", "") in ("tolist", "item", "__iter__"):
            self.numbers += arguments[0].numel()
        return function(*arguments, **named or {})


def python_steps(function: Callable[[], Any]) -> int:
    """How many lines of Python run in a call, each pass of a loop counted, and how many numbers it takes out of tensors."""
    steps = 0

    def trace(frame: Any, event: str, argument: Any) -> Callable:
        nonlocal steps
        steps += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection may run lines of others, which count whenever it happens to come
    sys.settrace(trace)
    try:
        with TakenOut() as taken:
            function()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return steps + taken.numbers


def steps_case(rung: str, stage: int, call: Callable[[Any, int], Callable[[], Any]]) -> Case:
    """No loop over tokens: `call`(adapters, tokens) makes the call that is counted."""
    few, many, about = 24, 240, "lines of Python that run, and numbers taken out of tensors"

    def observe(adapters: Any, **_: Any) -> Results:
        call(adapters, few)()  # what is done once, at the first call, is done
        steps = [python_steps(call(adapters, tokens)) for tokens in (few, many)]
        more = f"{steps[0]:,} for {few} tokens and {steps[1]:,} for {many}"
        return {about: "no more for more tokens" if steps[1] <= steps[0] + 60 else more}

    given = {"tokens": [few, many]}
    expected = lambda **_: {about: "no more for more tokens"}  # noqa: E731
    return Case(rung, "no loop over tokens", lambda: given, expected, TEXT.format(stage), observe)


def in_words(sizes: list[list[tuple[int, int]]]) -> list[str]:
    """The shapes of each rank's micro-batches."""
    return [f"rank {rank}: {', '.join(f'{rows} x {length}' for rows, length in own)}" for rank, own in enumerate(sizes)]
