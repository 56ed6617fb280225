"""Chapter 04. Gradient norm, weight norm and update-to-weight ratio: whether training is healthy.

    norm = sqrt(sum over all tensors of sum(g ** 2))         ratio = |w_new - w_old| / |w_old|

The norm is the length of all gradients laid end to end, so it does not depend on how the parameters are cut into tensors. Clipping
(chapter 05) divides by it, and a spike in it comes before a spike in the loss. The ratio compares the step with what it changes, whatever
the optimizer made of the gradient: far above 1e-3 a layer is being overwritten, far below 1e-4 it is hardly learning (a rule of thumb).
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shared.course.binding import exercise
from shared.engine.callbacks import Callback, Metrics, RunState
from shared.model.roles import parameters_by_role


@exercise("04.global_gradient_norm")
def global_gradient_norm(gradients: Iterable[Tensor | None]) -> Tensor:
    """The Euclidean length of all gradients taken together.

    Args:
        gradients: tensors of any shapes and floating dtypes, possibly a generator; None for a parameter that has none. Half
            precision is summed in float32, where 300 squared is not yet beyond the largest number. They are left as they are; a
            tensor that is given twice counts twice.

    Returns:
        [] float32 (float64 where a gradient is float64), on the gradients' device, without a graph. 0.0 where there are none. A
        gradient that holds inf or NaN makes the norm inf or NaN: it is how a broken step is noticed.

    >>> global_gradient_norm([torch.tensor([3.0, 0.0]), None, torch.tensor([[4.0]])])     # sqrt(9 + 16)
    tensor(5.)
    """


class Norms(Callback):
    """Norms of the whole model and of each role of parameters, in the steps that are logged and in no others.

    Args:
        updates: also measure the update-to-weight ratio, which holds a copy of the trained weights during the optimizer's step.
        loss_scale: loss_scale() -> what multiplies the gradients before the optimizer's step (chapter 05); None for 1.

    Metrics: `norm/gradient`, of the mean loss, before any clipping; `norm/weight`, before the step; `norm/update_ratio`; each also
    as `.<role>` for the roles that the model has. A ratio to weights that are all 0 is left out.
    """

    every_rank = True

    def __init__(self, updates: bool = True, loss_scale: Callable[[], float] | None = None):
        self.updates, self.loss_scale = updates, loss_scale
        self.measured: dict[str, Tensor] = {}
        self.old: dict[str, dict[str, Tensor]] = {}  # role -> name -> copy of the trained weight

    def before_optimizer(self, engine: RunState) -> None:
        if not engine.log_due:
            return
        roles = parameters_by_role(engine.strategy.grad_params)
        divisor = engine.token_count * (self.loss_scale() if self.loss_scale else 1)
        gradients = {role: {n: p.grad for n, p in named.items() if p.grad is not None} for role, named in roles.items()}
        self.keep(engine, "gradient", gradients, divisor)
        floats = {role: {n: p.detach() for n, p in named.items() if p.is_floating_point()} for role, named in roles.items()}
        self.keep(engine, "weight", floats)  # codes of a frozen base have no length
        if self.updates:
            self.old = {role: {n: p.detach().clone() for n, p in named.items() if p.requires_grad} for role, named in roles.items()}

    def on_step(self, engine: RunState) -> None:
        if not self.old:
            return
        for role, named in parameters_by_role(engine.strategy.grad_params).items():
            if self.old[role]:
                torch._foreach_sub_(list(self.old[role].values()), [p.detach() for p in named.values() if p.requires_grad])
        self.keep(engine, "update", self.old)
        self.old = {}

    def keep(self, engine: RunState, what: str, groups: dict[str, dict[str, Tensor]], divisor: float = 1.0) -> None:
        """Each role's norm, and the norm of those norms: the whole model's."""
        norms = {f"norm/{what}.{role}": norm / divisor for role, norm in engine.strategy.norms(groups).items()}
        if norms:
            self.measured |= {f"norm/{what}": global_gradient_norm(norms.values())} | norms

    def measure(self, engine: RunState) -> Metrics:
        """Everything is fetched from the device at once, after the step."""
        if not self.measured:
            return {}
        values = torch.stack([value.float() for value in self.measured.values()]).tolist()
        metrics = dict(zip(self.measured, values, strict=True))
        self.measured = {}
        for name in [name for name in metrics if name.startswith("norm/update")]:
            update, weight = metrics.pop(name), metrics[name.replace("update", "weight")]
            if weight > 0:
                metrics[name.replace("update", "update_ratio")] = update / weight
        return metrics

    def on_end(self, engine: RunState) -> None:
        self.old = {}
