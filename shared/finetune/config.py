"""Chapter 10. Adapter configuration: rank, alpha, dropout and target layers of LoRA, rsLoRA, DoRA and QLoRA, and virtual tokens.

    adapter: {rank: 8, alpha: 16, targets: [q_proj, v_proj]}            LoRA
    adapter: {base: nf4, targets: [all-linear]}                         QLoRA
    adapter: {kind: prompt, virtual_tokens: 20}                         prompt tuning

Left out on purpose: ranks that differ between layers, and adapters other than these.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from shared.course.bounds import BelowOne, Bounds, PositiveFloat, PositiveInt, checked


ALL_LINEAR = "all-linear"  # in place of names: each linear layer but the head, as in peft


@dataclass(frozen=True)
@checked
class AdapterConfig:
    """What is trained in place of a model's own weights, which stay frozen.

    Args:
        kind: lora adds low-rank updates to weights (Hu et al. 2021); prompt puts trained vectors in front of the embedded tokens (Lester et
            al. 2021); prefix puts trained keys and values in front of every layer's (Li and Liang 2021).
        rank: r of the update B A, B [out, r] and A [r, in]. LoRA only, as all settings below but virtual_tokens.
        alpha: the update is multiplied by alpha / rank.
        dropout: the probability with which an input of the update is zeroed in training.
        targets: which layers get an update, by the last part of their names (q_proj), several parts (attention.q_proj) or a pattern with *
            and ? for these; all-linear for each linear layer but the head. Embeddings are embedding.tokens, the head is head.linear.
        rank_stabilized: multiply by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023).
        decomposed: train the length of each row of the updated weight on its own (DoRA, Liu et al. 2024).
        virtual_tokens: how many vectors stand in front of the tokens: prompt and prefix only.
        base: float keeps the frozen weights as they are; nf4 keeps them in four bits (QLoRA, Dettmers et al. 2023); packed keeps the codes
            that start_from holds in the layout of GPTQ's or AWQ's files.

    Raises:
        ValueError: a number out of range, no or misshapen targets, or settings that exclude each other.
    """

    kind: Literal["lora", "prompt", "prefix"] = "lora"
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: BelowOne = 0.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    rank_stabilized: bool = False
    decomposed: bool = False
    virtual_tokens: Annotated[int, Bounds(ge=1, le=100_000)] = 20
    base: Literal["float", "nf4", "packed"] = "float"

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) or not self.targets or not all(isinstance(each, str) and each.strip() for each in self.targets):
            raise ValueError(f"adapter.targets is {self.targets!r}: give a list of layers' names, like [q_proj, v_proj] or [{ALL_LINEAR}].")
        if self.kind != "lora" and self.base != "float":
            raise ValueError(f"adapter.base {self.base} needs adapter.kind lora: soft prompts are trained over weights kept as they are.")

    @property
    def scaling(self) -> float:
        """What multiplies an update: alpha / rank, or alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
