"""Three training steps and what each gave: the one loop of the small runs that tests of floor 6 compare."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from shared.loop import accumulate_gradients, keep_totals, train_step
from shared.loss import next_token_objective
from shared.optim.updater import Update
from shared.parallel.strategy import ParallelStrategy
from shared.totals import Batch, Totals

STEPS = 3
Gradients = dict[str, Tensor | None]


@dataclass
class RunRecord:
    """Of each step the loss sum, the tokens, the gradient's norm and each gradient; the weights at the end."""

    losses: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def note(self, totals: Totals, norm: Tensor, gradients: Gradients) -> None:
        self.losses.append(totals.loss_sum)
        self.tokens.append(int(totals.token_count))
        self.norms.append(norm)
        self.gradients.append(gradients)


def record_steps(
    model: nn.Module, optimizer: Optimizer, batches: Callable[[int], list[Batch]], update: Update, gradients: Callable[[], Gradients],
    objective=next_token_objective, strategy: ParallelStrategy | None = None,
) -> RunRecord:  # fmt: skip
    """Train for three steps, in one process or, with a strategy, on one of several ranks. The record's weights are left to the caller."""
    record = RunRecord()
    parts = accumulate_gradients, keep_totals, update
    if strategy:
        parts = strategy.runner(accumulate_gradients), strategy.reducer, strategy.updater(update)
    for step in range(STEPS):
        totals = train_step(strategy.model if strategy else model, optimizer, batches(step), objective, *parts)
        record.note(totals, update.gradient_norm, gradients())
    return record


def own_gradients(model: nn.Module) -> Gradients:
    """A copy of each parameter's gradient, None where there is none."""
    return {name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()}
