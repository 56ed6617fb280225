"""Chapter 04. The lengths that say whether training is healthy: of gradients, of weights, and of the step between two weights.

    ratio = |w_new - w_old| / |w_old|

A gradient norm that rises warns before the loss does. The ratio compares the step with what it changes, whatever the optimizer made
of the gradient: far above 1e-3 a layer is being overwritten, far below 1e-4 it is hardly learning (a rule of thumb, not a law).

Left out on purpose: gradients spread over several processes. Chapter 06 hands in a `norm` that adds over them.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shared.engine.callbacks import Callback, Metrics
from shared.engine.metrics.gradient_norm import global_gradient_norm
from shared.model.roles import Role, parameters_by_role

if TYPE_CHECKING:
    from shared.engine.engine import RuntimeEngine

Norm = Callable[[Iterable[Tensor | None]], Tensor]


class Norms(Callback):
    """Norms of the whole model and of each role of parameters, in the steps that are logged and in no others.

    Args:
        updates: also measure the update-to-weight ratio, which holds a copy of the trained weights during the optimizer's step.
        norm: norm(tensors) -> [] tensor, their common length.
        loss_scale: loss_scale() -> what multiplies the gradients before the optimizer's step (chapter 05); None for 1.

    Metrics: `norm/gradient`, of the mean loss, before any clipping; `norm/weight`, before the step; `norm/update_ratio`; each also
    as `.<role>` for the roles that the model has. A ratio to weights that are all 0 is left out.
    """

    def __init__(self, updates: bool = True, norm: Norm = global_gradient_norm, loss_scale: Callable[[], float] | None = None):
        self.updates, self.norm, self.loss_scale = updates, norm, loss_scale
        self.measured: dict[str, Tensor] = {}
        self.old: dict[str, list[Tensor]] = {}  # role -> copies of the trained weights

    def before_optimizer(self, engine: "RuntimeEngine") -> None:
        if not engine.log_due:
            return
        roles = self.roles(engine.model)
        divisor = engine.totals.token_count * (self.loss_scale() if self.loss_scale else 1)
        gradients = {role: [p.grad for p in named.values() if p.grad is not None] for role, named in roles.items()}
        self.keep("gradient", gradients, divisor)
        self.keep("weight", {role: [p.detach() for p in named.values()] for role, named in roles.items()})
        if self.updates:
            self.old = {role: [p.detach().clone() for p in named.values() if p.requires_grad] for role, named in roles.items()}

    def on_step(self, engine: "RuntimeEngine") -> None:
        if not self.old:
            return
        for role, named in self.roles(engine.model).items():
            if self.old[role]:
                torch._foreach_sub_(self.old[role], [p.detach() for p in named.values() if p.requires_grad])
        self.keep("update", self.old)
        self.old = {}

    def keep(self, what: str, tensors: dict[str, list[Tensor]], divisor: Tensor | float = 1.0) -> None:
        """Each role's norm, and the norm of those norms: the whole model's."""
        norms = {f"norm/{what}.{role}": self.norm(of_role) / divisor for role, of_role in self.present(tensors).items()}
        if norms:
            self.measured |= {f"norm/{what}": global_gradient_norm(norms.values())} | norms

    def roles(self, model: nn.Module) -> dict[Role, dict[str, nn.Parameter]]:
        """Whose norms are measured. Chapter 06 measures a rank's pieces."""
        return parameters_by_role(model)

    def present(self, tensors: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """The roles that there is something of."""
        return {role: of_role for role, of_role in tensors.items() if of_role}

    def measure(self, engine: "RuntimeEngine") -> Metrics:
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

    def on_end(self, engine: "RuntimeEngine") -> None:
        self.old = {}
