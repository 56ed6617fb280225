"""Chapter 06. Activation memory by formula: what autograd saves of a forward pass for the backward pass, on each rank of a layout.

Korthikanti et al. 2022, section 4.1, count what each operation saves; here it is counted for this model's operations: norms and linear
layers save their inputs, attention saves queries, keys, values and its result. A tensor-parallel rank computes a smaller model with the
same residual stream (`model_of_rank`), so the same formulas apply; sequence parallelism shards that stream as well. Experts have formulas
of their own (chapter 09).

Left out on purpose: short-lived buffers (gradients of activations, workspaces), of which `loss_buffers` has a formula of its own, and
blocks other than those of a decoder without dropout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from shared.model.chunked_loss import chunk_rows
from shared.model.config import ModelConfig
from shared.model.counting import block_counts, feed_forward_counts
from shared.parallel.config import ParallelConfig

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Part(NamedTuple):
    """A rank's part of a model: blocks, by number; whether it has embedding and head."""

    blocks: Sequence[int]
    embedding: bool = True
    head: bool = True

    @property
    def layers(self) -> int:
        return len(self.blocks)


def whole_of(model: ModelConfig) -> Part:
    return Part(range(model.num_hidden_layers))


def model_of_rank(model: ModelConfig, layout: ParallelConfig) -> ModelConfig:
    """The model that the largest tensor-parallel rank computes: its heads, inner features and tokens, at the full width. With fewer
    key-value heads than ranks, each rank has a copy of one; a vocabulary that does not divide is sharded unevenly."""
    model, ranks = model.resolved(), layout.tensor_parallel
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    experts = None if model.experts is None else model.experts.cut(ranks)
    return replace(model, experts=experts, **{name: -(-getattr(model, name) // ranks) for name in sizes})


def is_sparse(model: ModelConfig, layer: int) -> bool:
    """Whether a block of a resolved configuration has experts."""
    return "expert" in feed_forward_counts(model, layer)


def rounded_size(model: ModelConfig, layer: int, layout: ParallelConfig) -> int:
    """Elements of a block's matrices that autocast rounds: all but a router's."""
    counts = block_counts(model, layer)
    router = model.experts.num_experts * model.hidden_size if is_sparse(model, layer) else 0
    return counts["matrix"] - router + counts["expert"] // layout.expert_parallel


class Activations(NamedTuple):
    """Bytes saved for the backward pass: after the forward pass, and at most."""

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
    """The activations of a micro-batch on a rank of `layout`, in bytes. part: the rank's part of the model; None for all of it. imbalance:
    the rows of its experts over an equal share; 1 without expert parallelism.

    Fully recomputed blocks save their input only; in the backward pass one block at a time has all of its activations, when last norm, head
    and loss have freed theirs. The input of column-parallel matrices is unsharded on every tensor-parallel rank, also under sequence
    parallelism, where they save the gathered one. With fsdp, weights are gathered in 16 bits, so autocast makes no copies.

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
    """Bytes that a block saves of a micro-batch. everything: without recomputation. products: with selective recomputation, beside the
    block's input; the second forward pass frees them one by one. left: those that it does not reach."""

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
    """The elements that a block saves of each token, by width: the residual stream's, that of products, or float32.

    With an inner size of 4 D, 16 bits everywhere, no rotation and no statistics, these are 32 D bytes: Korthikanti et al.'s 34 D, less the
    two dropout masks, and without their [Q, K] matrices, which the fused kernel never materializes.

    Args:
        mask: keys in a mask, where there is one: PyTorch's kernel makes it a float one in every block, and repeats keys for each head. Ring
            attention saves none.
        slices: the degree of sequence parallelism.
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
    """The elements that selective recomputation saves of each token beside a block's input: results of matrix products and of attention.
    ring: the context-parallel ranks; each saves 2 ring + 1 parts of attention, of half its tokens each."""
    inner, shared = heads(model)
    parts = ring + 0.5 if ring > 1 else 1
    feed_forward = 0 if sparse else (2 if model.gated else 1) * model.intermediate_size + model.hidden_size
    attention = inner + 2 * shared + parts * inner + model.hidden_size
    return {"products": attention + feed_forward, "float32": parts * model.num_attention_heads}


def heads(model: ModelConfig) -> tuple[int, int]:
    """Elements of a token's queries, and of its keys or values."""
    return model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim


def token_bytes(numbers: Mapping[str, float], width: int) -> float:
    return sum(count * (width if kind == "products" else 4) for kind, count in numbers.items())


def end_bytes(model: ModelConfig, tokens: int, width: int, logits: int | None, slices: int) -> float:
    """Bytes saved by last norm, head and loss. logits: of each token, where all are joined; None for the chunked loss, which saves its
    gradients instead."""
    size = model.hidden_size
    norm = 4 * tokens * (size + (2 if model.norm == "layer_norm" else 0)) / slices
    if logits is None:
        return norm + 4 * tokens * size + 4 * model.vocab_size * size
    rounded = width * model.vocab_size * size if width < 4 else 0
    return norm + width * tokens * size + tokens * (4 * logits + 13) + rounded  # 13: a sum, a target and a mask for each


def loss_buffers(model: ModelConfig, layout: ParallelConfig, tokens: int, width: int, trained: bool = True) -> float:
    """Bytes of a rank's short-lived buffers while the chunked loss is computed (`shared.model.chunked_loss`), at most.

    In 16 bits: logits, their softmax in float32 twice (the kernel copies its input), and the head's weight, rounded; or logits, their
    gradient and, of a head that is trained, weight and gradient in 16 bits and the gradient in float32, which is then added to the sum.

    Args:
        model: the whole one. tokens: of a micro-batch on the rank. trained: the head.
    """
    own = model_of_rank(model, layout)
    weight, head = own.vocab_size * own.hidden_size, int(trained)
    logits = own.vocab_size * min(tokens, chunk_rows(model.vocab_size, on_gpu=width < 4))  # GPUs are what multiplies 16 bits fast
    rounded = width * weight if width < 4 else 0
    softmax = (8 + (width if width < 4 else 0)) * logits + rounded
    gradient = 2 * width * logits + rounded + head * (4 * weight + rounded)
    return max(softmax, gradient, 4 * (head * weight + tokens * own.hidden_size))  # the last: when the backward pass scales them


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
