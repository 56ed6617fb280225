"""Chapter 11. Configuration of learning from preferences: pairs, or single answers with a label, and the loss of DPO and its relatives.

    preferences: {sources: [{path: pairs.jsonl}]}                         your own
    preferences: {made: {pairs: 3000, prompts: 120}}                      made by code (`shared.preference.made_preferences`)
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from shared.course.bounds import Bounds, NonNegativeFloat, NonNegativeInt, PositiveFloat, checked
from shared.finetune.chat.prepare import PAIRS, ChatConfig

MOST_PROMPTS = 200  # that are held out for the judge: of sums there are few more than a fourth as many


@dataclass(frozen=True)
@checked
class MadeConfig:
    """Pairs that code makes by a hidden preference, and held-out prompts whose answers it judges.

    Args:
        pairs: number of pairs, from which held-out pairs are split off.
        prompts: held-out prompts, which occur in no pair.
        seed: seed of the generated set.
        flipped: label noise: share of the pairs whose labels are switched.
        file: your own held-out prompts, one JSON object a line with kind, prompt, answer and check; null for generated ones.
    """

    pairs: Annotated[int, Bounds(ge=40, le=1_000_000)] = 3000
    prompts: NonNegativeInt = 120
    seed: int = 0
    flipped: Annotated[float, Bounds(ge=0, lt=0.5)] = 0.0
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.prompts > MOST_PROMPTS and self.file is None:
            raise ValueError(f"made.prompts is {self.prompts}: give 0 to {MOST_PROMPTS}, or a file of your own.")


@dataclass(frozen=True)
class PreferenceConfig(ChatConfig):
    """Pairs, or single answers with labels, to learn a preference from. The first five settings are the same as for conversations.

    Args:
        sources: where they come from, one after the other.
        template: auto for the model's own, and chatml where it has none; chatml, the file or folder of a template, or null for the
            model's own alone.
        tokenizer: the folder of the model's tokenizer; null for that of the model that training starts from.
        system: the system prompt of pairs that have none.
        held_out_share: share of the pairs that is held out for evaluation; those with the same prompt are on one side.
        made: the set that is made where sources is empty.
    """

    made: MadeConfig = field(default_factory=MadeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template == PAIRS:
            raise ValueError(f"template is {PAIRS}, which is for an encoder-decoder: give auto, chatml, a file or folder, or null.")


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
        loss: dpo, its relatives on pairs, or kto on single answers; see `shared.preference.dpo`.
        beta: dpo, robust, hinge, ipo, kto: the strength of the KL penalty. simpo: the factor of mean log-probabilities (2 to
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
