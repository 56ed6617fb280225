"""Chapter 06. Activation memory by formula: what autograd keeps of a forward pass for the backward pass, on each rank of a layout.

Korthikanti et al. 2022, section 4.1, count what each operation keeps; here it is counted for this model's own operations: norms and linear
layers keep their inputs, attention keeps queries, keys, values and its result. What a tensor-parallel rank computes is a smaller model
with the same residual stream (`model_of_rank`), so the same formulas count it; sequence parallelism cuts that stream as well. Experts count
themselves (chapter 09).

Left out on purpose: short-lived buffers (the gradients of activations, what an operation needs for itself), and blocks other than those of
a decoder without dropout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from shared.model.config import ModelConfig
from shared.model.counting import block_counts, feed_forward_counts
from shared.parallel.config import ParallelConfig

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Part(NamedTuple):
    """What a rank has of a model: blocks, by their numbers; embedding and head or not. Stages of a pipeline have less than the whole."""

    blocks: Sequence[int]
    embedding: bool = True
    head: bool = True

    @property
    def layers(self) -> int:
        return len(self.blocks)


def whole_of(model: ModelConfig) -> Part:
    return Part(range(model.num_hidden_layers))


def model_of_rank(model: ModelConfig, layout: ParallelConfig) -> ModelConfig:
    """The model that the tensor-parallel rank with the most of it computes: its heads, inner features and tokens, at the whole's width.

    With fewer key-value heads than ranks, each rank has a copy of one. A vocabulary that does not divide is cut unevenly.
    """
    model, ranks = model.resolved(), layout.tensor_parallel
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    experts = None if model.experts is None else model.experts.cut(ranks)
    return replace(model, experts=experts, **{name: -(-getattr(model, name) // ranks) for name in sizes})


def is_sparse(model: ModelConfig, layer: int) -> bool:
    """Whether a block of a resolved configuration has experts."""
    return "expert" in feed_forward_counts(model, layer)


def rounded_size(model: ModelConfig, layer: int, layout: ParallelConfig) -> int:
    """Numbers in the matrices of a block that products in 16 bits round: all but a router's."""
    counts = block_counts(model, layer)
    router = model.experts.num_experts * model.hidden_size if is_sparse(model, layer) else 0
    return counts["matrix"] - router + counts["expert"] // layout.expert_parallel


class Activations(NamedTuple):
    """Bytes that are kept for the backward pass: when the forward pass is over, and at most."""

    after_forward: float
    peak: float


def activations(
    model: ModelConfig,
    how: Literal["none", "full", "selective"],
    rows: int,
    seq: int,
    precision: str,
    sliced: bool,
    packed: bool = False,
    layout: ParallelConfig = ParallelConfig(),  # noqa: B008 (read only)
    part: Part | None = None,
    imbalance: float = 1.0,
) -> Activations:
    """What a micro-batch's activations take on a rank of `layout`. With fsdp, autocast has no weights to round: they are gathered rounded.
    part: what the rank has of the model; None for the whole. imbalance: how many rows its experts compute, in shares of an equal number;
    without expert parallelism always 1.

    Blocks that are recomputed whole keep their input only. In the backward pass one block at a time has all of its activations again, and
    last norm, head and loss have freed theirs. The input of matrices that are cut by columns is whole on every
    tensor-parallel rank; with sequence parallelism, too, since these matrices keep the gathered one.

    Raises:
        ValueError: a model for which there is no formula.
    """
    require_formula(model)
    part, vocabulary, model = part or whole_of(model), model.vocab_size, model_of_rank(model, layout)
    seq //= layout.context_parallel
    tokens, width = rows * seq, WIDTH[precision]
    slices = layout.tensor_parallel if layout.sequence_parallel else 1
    entering, mask = 4 * tokens * model.hidden_size / slices, seq if packed and layout.context_parallel == 1 else 0
    splits = layout.pipeline_parallel > 1 and layout.pipeline_schedule == "zero_bubble"
    rounds = width < 4 and layout.fully_sharded == 1 and not splits  # part I rounds weights again
    ends = end_bytes(model, tokens, width, None if sliced else vocabulary, slices) if part.head else 0
    positions = tokens if packed else seq
    blocks: list[Saved] = []
    for layer in part.blocks:
        saved = saved_in_block(model, layer, rows, seq, width, mask, slices, layout, imbalance)
        copies = width * rounded_size(model, layer, layout) if rounds else 0
        rotation = 16 * positions * model.head_dim if model.position == "rope" else 0  # cos and sin, for all queries and for all keys
        blocks.append(saved._replace(everything=saved.everything + copies + rotation))
    throughout = 8 * tokens + (0 if model.position == "rope" else 8 * positions)  # ids, and positions
    if layout.tensor_parallel > 1:
        throughout += tokens  # a mask of the tokens that other ranks have
    throughout *= part.embedding
    valid = tokens * any(is_sparse(model, layer) and model.experts.has_losses for layer in part.blocks)  # a mask of the tokens that count
    if how == "none":
        kept = valid + sum(block.everything for block in blocks) + ends + throughout
        return Activations(kept, kept)
    full = how == "full"
    kept = sum(entering + (0 if full else block.products) for block in blocks) + throughout
    again = valid + max(block.everything - entering - (0 if full else block.products - block.left) for block in blocks)
    return Activations(kept + ends, kept + max(ends, again))


class Saved(NamedTuple):
    """Bytes that a block keeps of a micro-batch. everything: without recomputation. products: with the selective one, beside the block's
    input; the second forward pass takes them out again one by one. left: of them, what it does not come to."""

    everything: float
    products: float
    left: float


def saved_in_block(
    model: ModelConfig, layer: int, rows: int, seq: int, width: int, mask: int, slices: int, layout: ParallelConfig, imbalance: float
) -> Saved:
    """Without rotations and rounded weights. Arguments: see `activations` and `saved_per_token`."""
    sparse, tokens = is_sparse(model, layer), rows * seq
    products = saved_products_per_token(model, sparse, layout.context_parallel)
    left = {"products": 0 if sparse else model.hidden_size}  # of the last matrix, whose result no backward pass needs
    kinds = (saved_per_token(model, mask, slices, sparse), products, left)
    of_experts = model.experts.saved_bytes(model, rows, seq, width, layout.expert_parallel, imbalance) if sparse else (0, 0)
    each = [tokens * token_bytes(kind, width) for kind in kinds]
    return Saved(each[0] + of_experts[0], each[1] + of_experts[1], each[2])


def saved_per_token(model: ModelConfig, mask: int = 0, slices: int = 1, sparse: bool = False) -> dict[str, float]:
    """How many numbers a block keeps of each token, by what width they have: the residual stream's, that of products, or float32.

    With four times D inside, 16 bits everywhere, no rotation and no statistics, these are 32 D bytes: Korthikanti et al.'s 34 D, less
    the two masks of dropout, and without their [Q, K] matrices, which the fused kernel never holds.

    Args:
        mask: keys in a mask, where there is one: PyTorch's kernel makes it a float one in every block, and repeats keys for each head. Ring
            attention keeps none.
        slices: in how many slices sequence parallelism cuts the residual stream.
        sparse: without the feed-forward layer, which is a mixture of experts.
    """
    size, inner, shared = model.hidden_size, *heads(model)
    keys = inner if mask else shared
    attention = size + inner + 2 * keys + mask + inner  # the normed input; queries, keys, values; mask; the result
    feed_forward = 0 if sparse else size + (4 if model.gated else 2) * model.intermediate_size  # gate, its activation, up, product
    statistics = 4 if model.norm == "layer_norm" else 0  # mean and deviation of two norms
    return {
        "stream": 2 * size / slices,
        "products": attention + feed_forward,
        "float32": model.num_attention_heads + statistics / slices,
    }


def saved_products_per_token(model: ModelConfig, sparse: bool = False, ring: int = 1) -> dict[str, float]:
    """What selective recomputation keeps beside a block's input: the results of its matrix products and of attention. ring: of how many
    ranks; each computes 2 ring + 1 parts of attention, of half its tokens each, and all of them are kept."""
    inner, shared = heads(model)
    parts = ring + 0.5 if ring > 1 else 1
    feed_forward = 0 if sparse else (2 if model.gated else 1) * model.intermediate_size + model.hidden_size
    attention = inner + 2 * shared + parts * inner + model.hidden_size
    return {"products": attention + feed_forward, "float32": parts * model.num_attention_heads}


def heads(model: ModelConfig) -> tuple[int, int]:
    """Numbers of a token's queries, and of its keys or values."""
    return model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim


def token_bytes(numbers: Mapping[str, float], width: int) -> float:
    return sum(count * (width if kind == "products" else 4) for kind, count in numbers.items())


def end_bytes(model: ModelConfig, tokens: int, width: int, logits: int | None, slices: int) -> float:
    """What last norm, head and loss keep. logits: of each token, where all are joined; None for the sliced loss, which keeps the gradients
    that it has computed already."""
    size = model.hidden_size
    norm = 4 * tokens * (size + (2 if model.norm == "layer_norm" else 0)) / slices
    if logits is None:
        return norm + 4 * tokens * size + 4 * model.vocab_size * size
    rounded = width * model.vocab_size * size if width < 4 else 0
    return norm + width * tokens * size + tokens * (4 * logits + 13) + rounded  # 13: a sum, a target and a mask for each


def require_formula(model: ModelConfig) -> None:
    """Refuse what the formulas do not cover."""
    uncovered = {
        "architecture": model.architecture != "decoder",
        "position": model.position not in ("rope", "learned"),
        "norm_position": model.norm_position != "pre",
        "hidden_dropout or attention_dropout": model.hidden_dropout or model.attention_dropout,
        "attention": model.attention != "sdpa",
        "qk_norm": model.qk_norm,
        "embedding_norm": model.embedding_norm,
        "sliding_window": model.sliding_window is not None,
        "head": model.head != "linear",
        "experts": model.experts is not None and not model.experts.has_formula,
    }
    for name, is_uncovered in uncovered.items():
        if is_uncovered:
            raise ValueError(f"There is no formula for the activations of a model with this {name}: measure them (memory_measured.py).")
