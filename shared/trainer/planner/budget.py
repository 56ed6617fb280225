"""Chapter 12. A compute budget in hours: the size and the tokens with the lowest loss that a scaling law expects of them.

Models on a ladder, each about a quarter wider and deeper than the one before, are planned in their best layouts. Their tokens are what the
hours hold at that speed, and the law says the loss. So the speed of each size on this hardware counts, where a budget in FLOPs would take
it as given. The loss has one minimum along the ladder.

Left out on purpose: heads other than 64 wide, and the learning rate of each size.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shared.course.paths import CHECKOUT
from shared.model.counting import parameter_counts
from shared.moe.config import MixtureModelConfig
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.hardware import Hardware
from shared.trainer.planner.scaling_law import CHINCHILLA, CHINCHILLA_REFIT, FrontierLaw, ScalingLaw, read_fit
from shared.trainer.planner.search import Candidate, search_layouts

FIT = CHECKOUT / "runs" / "12_grpo_scaling" / "scaling_fit.json"  # chapters/12_grpo/scaling.py writes it
HEAD = 64
HEADS = (2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 28, 35, 44, 55, 68, 85, 106, 128)
HOFFMANN = 3e21  # FLOPs of the largest profile behind Chinchilla's constants (Hoffmann et al. 2022, section 3.2)


@dataclass(frozen=True)
class Law:
    """A fitted law. unit: of its loss. largest: FLOPs of the largest run behind it."""

    name: str
    law: ScalingLaw | FrontierLaw
    unit: str
    largest: float


@dataclass(frozen=True)
class Proposal:
    """A model size for a budget. best: the model in its best layout. tokens: processed in the time."""

    law: Law
    best: Candidate
    parameters: int
    tokens: float

    @property
    def loss(self) -> float:
        return float(self.law.law.loss(self.parameters, self.tokens))

    @property
    def flops(self) -> float:
        return 6.0 * self.parameters * self.tokens

    @property
    def beyond(self) -> float:
        """How many times the FLOPs of the largest run behind the law."""
        return self.flops / self.law.largest

    @property
    def steps(self) -> int:
        return max(round(self.tokens / self.best.plan.tokens), 1)

    @property
    def words(self) -> list[str]:
        """Settings of the model and its steps."""
        model = self.best.config.model
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        return [f"model.{name}={getattr(model, name)}" for name in names] + [f"steps={self.steps}"]

    def as_dictionary(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("parameters", "tokens", "loss", "flops", "beyond", "steps")}
        return {"law": self.law.name, "unit": self.law.unit, "constants": asdict(self.law.law), "layout": self.best.plan.layout} | numbers


def laws() -> list[Law]:
    """Fits of your own runs, if there are any, and Chinchilla's two."""
    found = []
    if FIT.exists():
        law, about = read_fit(FIT)
        own = {"your runs, approach 2": about["frontier"], "your runs, approach 3": law}
        found = [Law(name, each, about["unit"], about["largest"]["flops"]) for name, each in own.items() if each]
    published = [("Hoffmann et al. 2022", CHINCHILLA), ("Besiroglu et al. 2024", CHINCHILLA_REFIT)]
    return found + [Law(name, law, "nats a token", HOFFMANN) for name, law in published]


def propose(config: TrainerConfig, hardware: Hardware, ranks: int, seconds: float, asked: Sequence[Law] | None = None) -> list[Proposal]:
    """For each law the best model of the ladder; nothing where none fits.

    Args:
        config: what is neither the model's size, the steps nor the layout.
        asked: None for `laws()`.
    """
    planned: dict[int, Candidate | None] = {}

    def candidate(heads: int) -> Candidate | None:
        if heads not in planned:
            made = replace(config, model=sized(config.model, heads))
            planned[heads] = next(iter(search_layouts(made, hardware, ranks).best), None)
        return planned[heads]

    def proposal(law: Law, heads: int) -> Proposal | None:
        best = candidate(heads)
        if best is None:
            return None
        return Proposal(law, best, sum(parameter_counts(best.config.model.resolved()).values()), best.plan.tokens_per_second * seconds)

    found = []
    for law in laws() if asked is None else asked:
        low, high = 0, len(HEADS) - 1
        while low < high:  # the loss falls, then rises; what does not fit is beyond the end
            middle = (low + high) // 2
            one, other = proposal(law, HEADS[middle]), proposal(law, HEADS[middle + 1])
            if one is not None and other is not None and other.loss < one.loss:
                low = middle + 1
            else:
                high = middle
        if (best := proposal(law, HEADS[low])) is not None:
            found.append(best)
    return found


def sized(model: MixtureModelConfig, heads: int) -> MixtureModelConfig:
    """The model with so many heads of 64: as deep as it has heads, and a gated feed-forward layer of 8/3 of its width."""
    size = HEAD * heads
    inner = 4 * size if not model.gated else -(-8 * size // 3 // 64) * 64
    sizes = {"hidden_size": size, "num_hidden_layers": max(heads, 2), "num_attention_heads": heads, "num_key_value_heads": heads}
    return replace(model, **sizes, intermediate_size=inner, head_dim=None, layer_types=None)
