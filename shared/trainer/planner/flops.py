"""Chapter 12. FLOPs of a step by part of the model: of each block and the head, forward and backward, with what is frozen left out.

A matrix that is trained costs 2 operations for each of its numbers forward, 2 for the gradient of its input and 2 for its own; a frozen one
has no gradient of its own. Attention costs 4 for each score and feature of a head forward, and 8 backward. This is `model_flops_per_token`,
cut into what the ranks of a pipeline compute.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from shared.finetune.memory_costs import sizes_of
from shared.model.config import ModelConfig
from shared.model.counting import active_feed_forward_size, block_counts, feed_forward_counts
from shared.parallel.planning.activations import Part, heads


class Flops(NamedTuple):
    """FLOPs of one token. again: recomputation. attention: the part of forward and backward in scores and values."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    attention: float = 0.0

    @property
    def needed(self) -> float:
        """FLOPs without recomputation, as model FLOPs utilisation (MFU) counts."""
        return self.forward + self.backward

    def times(self, factor: float) -> "Flops":
        return Flops(*(factor * each for each in self))

    @classmethod
    def total(cls, parts: Iterable["Flops"]) -> "Flops":
        return cls(*map(sum, zip(cls(), *parts, strict=True)))


class Trained(NamedTuple):
    """Trained parameters: all, or LoRA updates of these linear layers. targets: q_proj, up_proj ..."""

    rank: int = 0
    targets: Collection[str] = ()

    @property
    def is_adapter(self) -> bool:
        return self.rank > 0


def part_flops(model: ModelConfig, part: Part, seq: int, trained: Trained, recompute: bool) -> Flops:
    """FLOPs of a token in a part of a decoder. model: resolved; cut over tensor-parallel ranks, what one of them computes."""
    blocks = [block_flops(model, layer, seq, trained, first=layer == 0, recompute=recompute) for layer in part.blocks]
    head = 2 * model.vocab_size * model.hidden_size * part.head
    return Flops.total([*blocks, Flops(head, head * (1 if trained.is_adapter else 2))])


def block_flops(model: ModelConfig, layer: int, seq: int, trained: Trained, first: bool, recompute: bool) -> Flops:
    """Of a token. first: whether it is the first block of the model."""
    matrices = block_counts(model, layer)["matrix"] - feed_forward_counts(model, layer)["matrix"] + active_feed_forward_size(model, layer)
    scores = 4 * model.num_attention_heads * model.head_dim * seq
    if not trained.is_adapter:
        forward, backward = 2 * matrices + scores, 4 * matrices + 2 * scores
    else:
        sizes = {name: size for name, size in sizes_of(model).items() if name in trained.targets}
        updates = sum(2 * trained.rank * (out + into) for out, into in sizes.values())
        forward, backward = 2 * matrices + scores + updates, 2 * matrices + 2 * scores + 2 * updates
        backward -= spared(model, seq, trained) if first else 0
    return Flops(forward, backward, forward if recompute else 0.0, 3 * scores)


def spared(model: ModelConfig, seq: int, trained: Trained) -> float:
    """What the backward pass of the first block leaves out over a frozen embedding: gradients of what no trained number stands before."""
    moved = {name: name in trained.targets for name in sizes_of(model)}
    inside = moved["q_proj"] or moved["k_proj"] or moved["v_proj"]
    after = inside or moved["o_proj"]  # the stream between attention and the feed-forward layer has a gradient
    fed = {"o_proj": inside, "up_proj": after, "gate_proj": after}
    fed["down_proj"] = after or moved["up_proj"] or moved.get("gate_proj", False)
    left = 0.0
    for name, (out, into) in sizes_of(model).items():
        if not fed.get(name, False):
            left += 2 * out * into + 2 * trained.rank * into * moved[name]
    products = (moved["v_proj"], moved["q_proj"] or moved["k_proj"], moved["q_proj"], moved["k_proj"])  # dV, dA, dQ, dK
    return left + 2 * heads(model)[0] * seq * products.count(False)


def muon_flops(model: ModelConfig, part: Part, steps: int) -> float:
    """What Newton and Schulz's iteration computes in a step, for each matrix of a part, [m, n] with m the shorter side: 4 m^2 n + 2 m^3 in
    each of its steps."""
    inner, shared = heads(model)
    size, total = model.hidden_size, 0.0
    for layer in part.blocks:
        counts = feed_forward_counts(model, layer)
        matrices = [(size, inner, 2), (size, shared, 2)]
        if model.experts is None or "expert" not in counts:
            matrices.append((size, model.intermediate_size, 3 if model.gated else 2))
        else:
            width = model.experts.moe_intermediate_size
            matrices.append((size, width, counts["expert"] / (size * width)))
        for one, other, number in matrices:
            short, long = sorted((one, other))
            total += number * steps * (4 * short**2 * long + 2 * short**3)
    return total
