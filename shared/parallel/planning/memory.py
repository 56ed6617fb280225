"""Chapter 06. Memory estimate of a training step on each rank, by formula: weights, gradients, optimizer state and activations.

    between two steps    weights + optimizer state
    within a step        + gradients + what the forward pass keeps for the backward pass (+ weights that fsdp has gathered)

Each data-parallel rank holds either all or 1/n of the weights, gradients and optimizer state (Rajbhandari et al. 2020;
`shared.parallel.data.zero.bytes_held`). What a tensor-parallel rank computes is a smaller model with the same residual stream
(`model_of_rank`), so the same formulas count it; sequence parallelism cuts that stream as well. Activations follow
Korthikanti et al. 2022, section 4.1, which counts what each operation keeps, for this model's own operations: norms and linear layers
keep their inputs, attention keeps queries, keys, values and its result. Chapter 06's `memory_measured.py` measures the same.

Left out on purpose: short-lived buffers (buckets under way, the gradients of activations, what an operation needs for itself), what the
allocator keeps in reserve, and blocks other than those of a decoder without dropout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from shared.model.config import ModelConfig
from shared.model.counting import norm_size, parameter_counts
from shared.model.roles import Role
from shared.optim.config import OptimizerConfig
from shared.parallel.config import ParallelConfig
from shared.parallel.data.zero import bytes_held

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StepSizes:
    """A training step of one rank.

    rows, seq: of a micro-batch; seq of the whole sequence, also under context parallelism. microbatches: in a step. precision: of matrix
    products, and of blocks that fsdp gathers. Weights, gradients and optimizer state are float32.
    """

    rows: int
    seq: int
    microbatches: int = 1
    precision: str = "float32"


class Part(NamedTuple):
    """What a rank has of a model: some of its blocks, and embedding and head or not. Stages of a pipeline have less than the whole."""

    layers: int
    embedding: bool = True
    head: bool = True


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on a rank in a training step, by kind.

    weights: that it keeps. gathered: whole weights that fsdp has made of them, at most. gradients: after the backward pass; with several
    micro-batches, while they add up. optimizer: its state. activations: at most, of one micro-batch.
    """

    weights: float
    gathered: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All at once: a little more than a step's peak, since gradients are complete only when activations are gone."""
        return self.weights + self.gathered + self.gradients + self.optimizer + self.activations


def estimate_memory(
    model: ModelConfig,
    layout: ParallelConfig,
    optimizer: OptimizerConfig,
    step: StepSizes,
    *,
    sliced: bool = True,
    packed: bool = False,
    part: Part | None = None,
) -> MemoryEstimate:
    """Estimate the memory of each rank of a run, or of each that has this part of the model.

    Args:
        model: a decoder.
        layout: dp, fsdp or both, ZeRO, cp, tp with or without sequence parallelism, recomputation, what fsdp gathers ahead.
        sliced: the loss is computed from slices of the logits (`shared.model.chunked_loss`), as the trainer does.
        packed: rows hold several documents, as the trainer's do, so attention takes a mask.
        part: None for the whole model. A pipeline's ranks: `shared.parallel.planning.pipeline_costs`.

    Raises:
        ValueError: a model for which there is no formula.
    """
    part = part or Part(model.num_hidden_layers)
    counts, block = part_counts(model_of_rank(model, layout), part), block_size(model_of_rank(model, layout))
    parameters = sum(counts.values())
    fsdp, replicas = layout.fully_sharded, layout.data_parallel
    stage = 3 if fsdp > 1 else layout.zero
    if stage == 1 and step.microbatches == 1:
        stage = 2  # a gradient is freed as soon as its bucket is under way
    held = bytes_held(parameters, fsdp if fsdp > 1 else replicas * layout.context_parallel, stage, state=state_width(counts, optimizer))
    gathered = 0
    if fsdp > 1:
        ahead = min(1 + layout.prefetch, -(-part.layers // layout.pipeline_chunks))  # never a block of another chunk
        blocks = ahead if layout.reshard_after_forward else part.layers
        gathered = 4 * (parameters - part.layers * block) + WIDTH[step.precision] * blocks * block
        if layout.pipeline_parallel > 1 and not layout.reshard_after_forward:
            held["gradients"] = 4 * parameters  # whole ones add up until the step ends
    how = layout.activation_checkpointing
    peak = activations(model, how, step.rows, step.seq, step.precision, sliced, packed, layout, part).peak
    return MemoryEstimate(held["weights"], gathered, held["gradients"], held["optimizer state"], peak)


def model_of_rank(model: ModelConfig, layout: ParallelConfig) -> ModelConfig:
    """The model that the tensor-parallel rank with the most of it computes: its heads, inner features and tokens, at the whole's width.

    With fewer key-value heads than ranks, each rank has a copy of one. A vocabulary that does not divide is cut unevenly.
    """
    model, ranks = model.resolved(), layout.tensor_parallel
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    return replace(model, **{name: -(-getattr(model, name) // ranks) for name in sizes})


def part_counts(model: ModelConfig, part: Part) -> dict[Role, int]:
    """Parameters of a part by role. Where embedding and head are tied and in different parts, both have the weight."""
    tied = model.tie_word_embeddings and part.embedding and part.head
    counts = parameter_counts(replace(model, num_hidden_layers=part.layers, layer_types=None, tie_word_embeddings=tied))
    head = model.vocab_size * model.hidden_size
    embedding = counts["embedding"] - (0 if tied else head)
    counts["embedding"] = embedding * part.embedding + head * (part.head and not tied)
    counts["norm"] -= 0 if part.head else norm_size(model, model.hidden_size)
    return counts


def block_size(model: ModelConfig) -> int:
    """Parameters of a block."""
    one, two = (sum(parameter_counts(replace(model, num_hidden_layers=n, layer_types=None)).values()) for n in (1, 2))
    return two - one


def state_width(counts: Mapping[Role, int], optimizer: OptimizerConfig) -> float:
    """Bytes of state for a parameter, on average: AdamW keeps two means, the others one, and Muon leaves to AdamW what is no matrix.
    counts: of parameters, by role."""
    if optimizer.name != "muon":
        return 8 if optimizer.name == "adamw" else 4
    return 8 - 4 * counts["matrix"] / sum(counts.values())


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
) -> Activations:
    """What a micro-batch's activations take on a rank of `layout`. With fsdp, autocast has no weights to round: they are gathered rounded.
    part: what the rank has of the model; None for the whole.

    Blocks that are recomputed whole keep their input only. In the backward pass one block at a time has all of its activations again, and
    last norm, head and loss have freed theirs. The input of matrices that are cut by columns is whole on every
    tensor-parallel rank; with sequence parallelism, too, since these matrices keep the gathered one.

    Raises:
        ValueError: a model for which there is no formula.
    """
    require_formula(model)
    part, vocabulary, model = part or Part(model.num_hidden_layers), model.vocab_size, model_of_rank(model, layout)
    seq //= layout.context_parallel
    tokens, layers, width = rows * seq, part.layers, WIDTH[precision]
    slices = layout.tensor_parallel if layout.sequence_parallel else 1
    entering, mask = 4 * tokens * model.hidden_size / slices, seq if packed and layout.context_parallel == 1 else 0
    block = tokens * token_bytes(saved_per_token(model, mask, slices), width)
    splits = layout.pipeline_parallel > 1 and layout.pipeline_schedule == "zero_bubble"
    if width < 4 and layout.fully_sharded == 1 and not splits:  # part I rounds them again
        block += width * (parameter_counts(model)["matrix"] // model.num_hidden_layers)  # rounded copies of its matrices
    ends = end_bytes(model, tokens, width, None if sliced else vocabulary, slices) if part.head else 0
    positions = tokens if packed else seq
    if model.position == "rope":
        block += 16 * positions * model.head_dim  # cos and sin at the heads' full width, for queries and for keys
    throughout = 8 * tokens + (0 if model.position == "rope" else 8 * positions)  # ids, and positions
    if layout.tensor_parallel > 1:
        throughout += tokens  # a mask of the tokens that other ranks have
    throughout *= part.embedding
    if how == "none":
        return Activations(layers * block + ends + throughout, layers * block + ends + throughout)
    if how == "full":
        kept, again = entering, block - entering
    else:
        products = tokens * token_bytes(saved_products_per_token(model), width)
        kept, again = entering + products, block - entering - tokens * token_bytes(saved_either_way(model, mask), width)
    return Activations(layers * kept + ends + throughout, layers * kept + max(ends, again) + throughout)


def saved_per_token(model: ModelConfig, mask: int = 0, slices: int = 1) -> dict[str, float]:
    """How many numbers a block keeps of each token, by what width they have: the residual stream's, that of products, or float32.

    With four times D inside, 16 bits everywhere, no rotation and no statistics, these are 32 D bytes: Korthikanti et al.'s 34 D, less
    the two masks of dropout, and without their [Q, K] matrices, which the fused kernel never holds.

    Args:
        mask: keys in a mask, where there is one: PyTorch's kernel makes it a float one in every block, and repeats keys for each head. Ring
            attention keeps none.
        slices: in how many slices sequence parallelism cuts the residual stream.
    """
    size, inner, shared = model.hidden_size, *heads(model)
    keys = inner if mask else shared
    attention = size + inner + 2 * keys + mask + inner  # the normed input; queries, keys, values; mask; the result
    feed_forward = size + (4 if model.gated else 2) * model.intermediate_size  # gated: gate, its activation, up, their product
    statistics = 4 if model.norm == "layer_norm" else 0  # mean and deviation of two norms
    return {
        "stream": 2 * size / slices,
        "products": attention + feed_forward,
        "float32": model.num_attention_heads + statistics / slices,
    }


def saved_products_per_token(model: ModelConfig) -> dict[str, int]:
    """What selective recomputation keeps beside a block's input: the results of its matrix products and of attention."""
    inner, shared = heads(model)
    feed_forward = (2 if model.gated else 1) * model.intermediate_size + model.hidden_size
    return {"products": 2 * inner + 2 * shared + model.hidden_size + feed_forward, "float32": model.num_attention_heads}


def saved_either_way(model: ModelConfig, mask: int = 0) -> dict[str, int]:
    """What is kept with and without selective recomputation, and so is not there a second time."""
    inner, shared = heads(model)
    repeated = mask and inner != shared
    unchanged = (0 if repeated else shared) + (0 if model.position == "rope" else inner + (0 if repeated else shared))
    return {
        "products": unchanged + inner + (2 if model.gated else 1) * model.intermediate_size,
        "float32": model.num_attention_heads,
    }


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
        "experts": model.experts is not None,
    }
    for name, is_uncovered in uncovered.items():
        if is_uncovered:
            raise ValueError(f"There is no formula for the activations of a model with this {name}: measure them (memory_measured.py).")
