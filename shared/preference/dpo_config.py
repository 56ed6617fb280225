"""Chapter 11. Settings of DPO and its relatives: which loss, how strong, and where the reference's log-probabilities come from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shared.course.bounds import Bounds, NonNegativeFloat, PositiveFloat, checked


OF_LOSSES = {  # a setting that would do nothing is refused
    "label_smoothing": ("dpo", "robust"),
    "per_token": ("dpo", "robust", "hinge", "ipo"),
    "target_margin": ("simpo",),
    "sft_weight": ("dpo", "robust", "hinge", "ipo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "reference": ("dpo", "robust", "hinge", "ipo", "kto"),
}


@dataclass(frozen=True)
@checked
class DPOConfig:
    """The loss on preferences.

    Args:
        loss: dpo, its relatives on pairs, or kto on single answers; see `shared.preference.relatives`.
        beta: dpo, robust, hinge, ipo, kto: what moving away from the reference costs. simpo: what multiplies mean log-probabilities (2 to
            10 in the paper). orpo: the weight of the odds ratio.
        label_smoothing: dpo (then cDPO) and robust: the share of labels that are taken to be wrong.
        per_token: dpo, robust, hinge, ipo: divide each log-probability by its answer's number of tokens. simpo and orpo always do.
        target_margin: simpo's gamma.
        sft_weight: of the chosen answer's mean loss for a token, which is added; orpo has it anyhow, with weight 1.
        desirable_weight: of kto's good answers.
        undesirable_weight: of kto's bad answers.
        reference: where the reference's log-probabilities come from. cached: computed once before the training, and kept in a file beside
            the prepared data. beside: from a frozen copy of the first weights, with each batch; kto needs that. With an adapter that copy
            is the policy with its adapter switched off, and costs no memory.

    Raises:
        ValueError: a number out of range, or a setting that the loss does not have.
    """

    loss: Literal["dpo", "robust", "hinge", "ipo", "simpo", "orpo", "kto"] = "dpo"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Bounds(ge=0, lt=0.5)] = 0.0
    per_token: bool = False
    target_margin: float = 0.0
    sft_weight: NonNegativeFloat = 0.0
    desirable_weight: PositiveFloat = 1.0
    undesirable_weight: PositiveFloat = 1.0
    reference: Literal["cached", "beside"] = "cached"

    def __post_init__(self) -> None:
        for name, losses in OF_LOSSES.items():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default and self.loss not in losses:
                raise ValueError(f"{name} has no effect with loss {self.loss}: leave it out, or choose {' or '.join(losses)}.")

        if self.loss == "kto" and self.reference == "cached":
            raise ValueError("loss kto needs reference beside: its baseline reads answers after other prompts, which no cache has.")

    @property
    def needs_reference(self) -> bool:
        """Whether batches must hold `reference`."""
        return self.loss in OF_LOSSES["reference"]
