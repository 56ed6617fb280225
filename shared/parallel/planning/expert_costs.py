"""Chapter 09. Expert-parallel communication volume by formula: the all-to-alls of a step, load imbalance, and what both cost in time.

For each layer with experts and each micro-batch, with n = tokens * k rows of width D that a rank sends and m rows that arrive:

    numbers of rows      1 all-to-all of E whole numbers                 forward
    rows to experts      n D numbers forward, m D backward, where the gradients go back
    rows from experts    m D numbers forward, n D backward

Under an equal load m is n, so a rank sends 4 n D numbers, of which it keeps 1 / ep. Recomputed blocks run the forward pass twice. A
tensor-parallel layer sends 8 (t - 1) / t D numbers for each token (`shared.parallel.planning.tensor_costs`): as many as a mixture with k =
2 over as many ranks.

In every layer all ranks wait for the one with most rows. The gradients of experts are summed over edp, all others over all data ranks.

Left out on purpose: exchanges that overlap with products, and gradients of the rest of the model, which chapter 06 counts.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shared.engine.metrics.flops import model_flops_per_token
from shared.model.config import ModelConfig
from shared.model.counting import feed_forward_counts
from shared.parallel.config import ParallelConfig
from shared.parallel.planning.activations import WIDTH, Part, is_sparse, model_of_rank, whole_of
from shared.parallel.planning.costs import Exchange, Link, total_cost
from shared.parallel.planning.data_costs import bucket_sizes
from shared.parallel.planning.memory import StepSizes, expert_shards


def expert_exchanges(model: ModelConfig, layout: ParallelConfig, step: StepSizes, part: Part | None = None) -> list[Exchange]:
    """The communication of a rank for its experts in a training step.

    Args:
        model: a decoder.
        step: `imbalance` times an equal number of rows arrives, on average over layers and micro-batches; with the measured value the
            all-to-alls are exact.
        part: the rank's part of the model; None for all of it.

    Returns:
        All-to-alls over ep, with the bytes that the rank sends, its own rows included; and the gradients of experts over edp (with ZeRO and
        FSDP the weights as well). None of this without expert parallelism. Under context parallelism the sums of each row's choices.
    """
    if model.experts is None:
        return []
    own, ranks, context = model_of_rank(model, layout), layout.expert_parallel, layout.context_parallel
    sparse = [layer for layer in (part or whole_of(own)).blocks if is_sparse(own, layer)]
    passes, calls = 1 + (layout.activation_checkpointing != "none"), len(sparse) * step.microbatches
    sums = calls * (1 + (layout.activation_checkpointing == "selective"))  # blocks that are recomputed whole add up in one of their passes
    of_rows = Exchange("choices of rows", "all_reduce", "cp", context, sums, 4 * step.rows * own.experts.num_experts)
    found = [of_rows] if context > 1 and own.experts.balance_coefficient else []
    if ranks == 1:
        return found
    sent = choices(own, layout, step) * own.hidden_size * WIDTH[step.precision]
    return [
        *found,
        Exchange("numbers of rows", "all_to_all", "ep", ranks, calls * passes, 8 * own.experts.num_experts),
        Exchange("rows to experts", "all_to_all", "ep", ranks, calls * passes, sent),
        Exchange("their gradients", "all_to_all", "ep", ranks, calls, sent * step.imbalance),
        Exchange("rows from experts", "all_to_all", "ep", ranks, calls * passes, sent * step.imbalance),
        Exchange("their gradients", "all_to_all", "ep", ranks, calls, sent),
        *same_experts(own, layout, step, sparse),
    ]


def choices(model: ModelConfig, layout: ParallelConfig, step: StepSizes) -> int:
    """Rows that a rank's tokens of a micro-batch make: each token's k choices."""
    return step.rows * step.seq // layout.context_parallel * model.experts.num_experts_per_tok


def same_experts(model: ModelConfig, layout: ParallelConfig, step: StepSizes, sparse: Sequence[int]) -> Iterator[Exchange]:
    """The communication over edp: gradients of experts, and under ZeRO and FSDP weights."""
    ranks = expert_shards(layout)
    if ranks == 1 or not sparse:
        return
    matrix = feed_forward_counts(model, sparse[0])["expert"] // layout.expert_parallel // (3 if model.gated else 2)
    number = len(sparse) * (3 if model.gated else 2)
    if layout.fully_sharded > 1:
        once = layout.pipeline_parallel > 1 and not layout.reshard_after_forward  # gathered, and gradients reduced, once a step
        whole, calls = number * matrix / len(sparse), len(sparse) * (1 if once else step.microbatches)
        yield Exchange("experts", "all_gather", "edp", ranks, calls * (1 + layout.reshard_after_forward), WIDTH[step.precision] * whole)
        yield Exchange("experts", "reduce_scatter", "edp", ranks, calls, 4 * whole)
        return
    buckets = len(bucket_sizes((matrix,) * number, layout.bucket_megabytes))
    whole = 4 * matrix * number / buckets
    if layout.zero == 0:
        yield Exchange("experts", "all_reduce", "edp", ranks, buckets, whole)
        return
    yield Exchange("experts", "reduce_scatter", "edp", ranks, buckets * (step.microbatches if layout.zero == 2 else 1), whole)
    yield Exchange("experts", "all_gather", "edp", ranks, buckets, whole)


def imbalance(loads: Sequence[float], ranks: int) -> float:
    """Load imbalance: the rows of the rank with most of them, over the mean; 1 where no rank has any.

    Args:
        loads: how many rows each expert has, [E]; rank r holds the experts from r E / ranks on.

    >>> imbalance([4, 2, 1, 1], ranks=2)
    1.5
    """
    each = len(loads) // ranks
    by_rank = [sum(loads[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    return max(by_rank) * ranks / sum(by_rank) if any(by_rank) else 1.0


class StepTime(NamedTuple):
    """Seconds of a step, without overlap. products: of an equal share. waiting: for the rank with most rows. exchange: all-to-alls.
    experts: their gradients, and their weights where these are sharded."""

    products: float
    waiting: float
    exchange: float
    experts: float


def step_time(model: ModelConfig, layout: ParallelConfig, step: StepSizes, link: Link, flops: float) -> StepTime:
    """Time of a step of a mixture on the slowest rank, whose experts compute `step.imbalance` times their share of rows, without overlap.
    In a pipeline the work is divided evenly, without the bubble. link: between the ranks. flops: per second that a rank reaches."""
    own = model.resolved()
    tokens = step.rows * step.seq * step.microbatches / (layout.context_parallel * layout.tensor_parallel * layout.pipeline_parallel)
    again = 4 / 3 if layout.activation_checkpointing == "full" else 1
    size = sum(feed_forward_counts(own, layer).get("expert", 0) for layer in range(own.num_hidden_layers)) / own.experts.num_experts
    of_experts = 6 * size * own.experts.num_experts_per_tok
    per_token, sparse = again / flops * tokens, [layer for layer in range(own.num_hidden_layers) if is_sparse(own, layer)]
    exchange = total_cost(each for each in expert_exchanges(model, layout, step) if each.axis == "ep").seconds(link)
    of_weights = total_cost(same_experts(model_of_rank(model, layout), layout, step, sparse)).seconds(link)
    waiting = of_experts * (step.imbalance - 1) * per_token if layout.expert_parallel > 1 else 0.0
    return StepTime(model_flops_per_token(own, step.seq) * per_token, waiting, exchange, of_weights)
