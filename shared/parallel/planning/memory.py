"""Chapter 06. Memory estimate of a training step on each rank, by formula: weights, gradients, optimizer state and activations.

    between two steps    weights + optimizer state
    within a step        + gradients + activations (+ weights that fsdp has gathered)

Each data-parallel rank holds either all or 1/n of the weights, gradients and optimizer state (Rajbhandari et al. 2020;
`shared.parallel.data.zero.bytes_held`); activations are counted in `shared.parallel.planning.activations`. Chapter 06's
`memory_measured.py` measures the same.

Left out on purpose: short-lived buffers (buckets in flight, workspaces), and the allocator's reserve.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shared.model.config import ModelConfig
from shared.model.counting import block_counts, feed_forward_counts, norm_size, parameter_counts
from shared.model.roles import Role
from shared.optim.config import OptimizerConfig
from shared.parallel.config import ParallelConfig
from shared.parallel.data.zero import bytes_held
from shared.parallel.planning.activations import WIDTH, Part, activations, is_sparse, model_of_rank, whole_of


@dataclass(frozen=True)
class StepSizes:
    """A training step of one rank.

    rows, seq: of a micro-batch; seq of the whole sequence, also under context parallelism. microbatches: in a step. precision: of matrix
    products, and of blocks that fsdp gathers; weights, gradients and optimizer state are float32. imbalance: under expert parallelism, the
    rows of this rank's experts over an equal share.
    """

    rows: int
    seq: int
    microbatches: int = 1
    precision: str = "float32"
    imbalance: float = 1.0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on a rank in a training step, by kind.

    weights: its own. gathered: unsharded weights of fsdp, at most. gradients: after the backward pass; with several micro-batches, while
    they accumulate. optimizer: its state. activations: at most, of one micro-batch.
    """

    weights: float
    gathered: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """The sum: slightly more than a step's peak, since gradients are complete only when activations are freed."""
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
        layout: dp, fsdp or both, ZeRO, cp, tp with or without sequence parallelism, recomputation, prefetching.
        sliced: the loss is chunked (`shared.model.chunked_loss`), as the trainer's.
        packed: rows hold several documents, as the trainer's do, so attention takes a mask. It takes none, and less memory, where it goes
            document by document, which depends on the documents.
        part: None for the whole model. A pipeline's ranks: `shared.parallel.planning.pipeline_costs`.

    Raises:
        ValueError: a model for which there is no formula.
    """
    part, own = part or whole_of(model), model_of_rank(model, layout)
    counts, fsdp = part_counts(own, part), layout.fully_sharded
    stage = 3 if fsdp > 1 else layout.zero
    if stage == 1 and step.microbatches == 1:
        stage = 2  # a gradient is freed as soon as its bucket has started
    frozen = sum(frozen_size(own, layer) for layer in part.blocks)
    experts = {"expert": counts["expert"] // layout.expert_parallel, "matrix": 0}
    everything_else = counts | {"expert": 0, "bias": counts["bias"] - frozen}
    held = Counter({"weights": 4 * frozen / fsdp})
    for numbers, ranks in ((everything_else, data_shards(layout)), (experts, expert_shards(layout))):
        held.update(bytes_held(sum(numbers.values()), ranks, stage, state=state_width(numbers, optimizer)))
    gathered = 0
    if fsdp > 1:
        ahead = min(1 + layout.prefetch, -(-part.layers // layout.pipeline_chunks))  # never a block of another chunk
        root, blocks = unit_bytes(own, part, layout, WIDTH[step.precision])
        gathered = root + sum(blocks[-ahead:] if layout.reshard_after_forward else blocks)
        if layout.pipeline_parallel > 1 and not layout.reshard_after_forward:
            held["gradients"] = 4 * (sum(everything_else.values()) + sum(experts.values()))  # unsharded ones accumulate until the step ends
    how = layout.activation_checkpointing
    peak = activations(model, how, step.rows, step.seq, step.precision, sliced, packed, layout, part, step.imbalance).peak
    return MemoryEstimate(held["weights"], gathered, held["gradients"], held["optimizer state"], peak)


def part_counts(model: ModelConfig, part: Part) -> dict[Role, int]:
    """Parameters of a part by role. Where embedding and head are tied and in different parts, both have the weight."""
    tied, model = model.tie_word_embeddings and part.embedding and part.head, model.resolved()
    counts = parameter_counts(replace(model, tie_word_embeddings=tied))
    for layer in set(range(model.num_hidden_layers)).difference(part.blocks):
        for role, count in block_counts(model, layer).items():
            counts[role] -= count
    head = model.vocab_size * model.hidden_size
    embedding = counts["embedding"] - (0 if tied else head)
    counts["embedding"] = embedding * part.embedding + head * (part.head and not tied)
    counts["norm"] -= 0 if part.head else norm_size(model, model.hidden_size)
    return counts


def frozen_size(model: ModelConfig, layer: int) -> int:
    """Untrained elements of a block: the bias of a router's choice."""
    return feed_forward_counts(model, layer).get("bias", 0) if is_sparse(model, layer) else 0


def unit_bytes(own: ModelConfig, part: Part, layout: ParallelConfig, width: int) -> tuple[float, list[float]]:
    """Bytes of the unsharded weights of a part's ends, which fsdp gathers in float32, and of its blocks, ascending."""
    root = sum(part_counts(own, part._replace(blocks=())).values())
    return 4 * root, sorted(gathered_bytes(own, layer, layout, width) for layer in part.blocks)


def gathered_bytes(model: ModelConfig, layer: int, layout: ParallelConfig, width: int) -> float:
    """A block's weights as fsdp gathers them: a router and its bias in float32, everything else in the precision of products."""
    counts = block_counts(model, layer)
    whole = sum(counts.values()) - counts["expert"] + counts["expert"] // layout.expert_parallel
    router = feed_forward_counts(model, layer)["bias"] + model.experts.num_experts * model.hidden_size if is_sparse(model, layer) else 0
    return width * (whole - router) + 4 * router


def data_shards(layout: ParallelConfig) -> int:
    """Over how many ranks weights, gradients or state are sharded, where they are."""
    return layout.fully_sharded if layout.fully_sharded > 1 else layout.data_parallel * layout.context_parallel


def expert_shards(layout: ParallelConfig) -> int:
    """`data_shards` of expert matrices: the ranks that hold the same experts."""
    spread = layout.expert_parallel
    return data_shards(layout) if spread == 1 else layout.data_ranks * layout.context_parallel // spread


def state_width(counts: Mapping[Role, int], optimizer: OptimizerConfig) -> float:
    """Bytes of optimizer state for a parameter, on average: AdamW has two moments, Lion, Muon and SGD one, and Muon updates matrices only.
    An optimizer by import path counts as AdamW. counts: of parameters, by role."""
    if optimizer.name != "muon":
        return 4 if optimizer.name in ("lion", "sgd") else 8
    return 8 - 4 * (counts["matrix"] + counts["expert"]) / max(sum(counts.values()), 1)
