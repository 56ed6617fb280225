"""Four data parallelisms, each with one bug that public code has had. The notebook runs them; find the bugs from what they show first.

A model of one weight, four ranks, two micro-batches each. Micro-batch m of rank r has the gradient 10^(2 r + m), so the sum over all of
them is 11111111, and a digit that is not 1 says which micro-batch was lost or counted twice.
"""

from collections import Counter

import torch
from torch import nn

from shared.loop import accumulate_gradients
from shared.parallel.comm.communicator import Communicator
from shared.parallel.data.ddp import NaiveDataParallel
from shared.parallel.data.engine import add_over
from shared.parallel.comm.threads import run_threads
from shared.totals import Totals

RANKS = 4
TOKENS = (2, 2, 4, 8)  # of each rank

ANSWERS = {
    "A": "last micro-batch only: what was exchanged is the gradient of one micro-batch, and each rank's earlier one stayed its own.",
    "B": "nothing was exchanged, not even the counts. The public bug behind it is the disarmed wrapper: the objective called the module "
    "inside, so the wrapper's forward never armed the exchange.",
    "C": "mean of means: each rank divided by its own token count, and ranks with few tokens weigh as much as ranks with many.",
    "D": "wrong source rank: the sum of all four lies on member 0 of each pair, and the pair was told the numbers of member 1.",
}


class OneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, digit: torch.Tensor) -> torch.Tensor:
        return self.weight * digit


def objective(model: nn.Module, batch: dict[str, torch.Tensor]) -> Totals:
    return Totals(model(batch["digit"]), batch["tokens"], {})


class A(NaiveDataParallel):
    def runner(self, runner):
        def run(model, microbatches, objective):
            early = runner(model, microbatches[:-1], objective)
            self.early = [parameter.grad for parameter in self.trained]
            for parameter in self.trained:
                parameter.grad = None
            last = runner(model, microbatches[-1:], objective)
            return Totals(early.loss_sum + last.loss_sum, early.token_count + last.token_count, {})

        return run

    def reducer(self, model, totals):
        totals = super().reducer(model, totals)
        for parameter, early in zip(self.trained, self.early, strict=True):
            parameter.grad += early
        return totals


class Wrapper(nn.Module):
    """Exchanges gradients after a backward pass that began with its own forward."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.armed = module, False

    def forward(self, digit: torch.Tensor) -> torch.Tensor:
        self.armed = True
        return self.module(digit)


class B(NaiveDataParallel):
    def __init__(self, model, group):
        super().__init__(model, group)
        self.wrapper = Wrapper(model)

    def runner(self, runner):
        return lambda model, microbatches, objective: runner(self.wrapper.module, microbatches, objective)

    def reducer(self, model, totals):
        return super().reducer(model, totals) if self.wrapper.armed else totals


class C(NaiveDataParallel):
    def reducer(self, model, totals):
        for parameter in self.trained:
            parameter.grad /= totals.token_count
        totals = super().reducer(model, totals)
        for parameter in self.trained:  # the updater divides by the count of all tokens, which must not change this mean
            parameter.grad *= totals.token_count / self.group.size
        return totals


class D(NaiveDataParallel):
    def __init__(self, model, group):
        super().__init__(model, group)
        self.pair = group.split("pair", [(0, 1), (2, 3)])
        self.across = group.split("across", [(0, 2), (1, 3)])

    def reducer(self, model, totals):
        for parameter in self.trained:
            self.pair.all_reduce(parameter.grad)
            if self.pair.rank == 0:
                self.across.all_reduce(parameter.grad)
            self.pair.broadcast(parameter.grad, root=1)
        return add_over(totals, self.group)


def evidence(case: str) -> tuple[list[int], Counter]:
    """The gradient that each rank would update with, and rank 0's calls. case: "right", or one of A to D."""
    results = run_threads(run_case, RANKS, {"right": NaiveDataParallel, "A": A, "B": B, "C": C, "D": D}[case])
    return [gradient for gradient, _ in results], results[0][1]


def run_case(world: Communicator, kind: type[NaiveDataParallel]) -> tuple[int, Counter]:
    parallel = kind(OneWeight(), world)
    digits = [10.0 ** (2 * world.rank + number) for number in range(2)]
    tokens = torch.tensor(TOKENS[world.rank] // 2)
    microbatches = [{"digit": torch.tensor(digit, dtype=torch.float64), "tokens": tokens} for digit in digits]
    totals = parallel.runner(accumulate_gradients)(parallel.model, microbatches, objective)
    parallel.reducer(parallel.model, totals)
    return round(parallel.model.weight.grad.item()), world.trace.calls()
