"""Chapter 08. Communication volume of data parallelism by formula: calls and bytes of DDP's buckets, ZeRO's and FSDP's in a training step.

    DDP       an all-reduce of each bucket of gradients
    ZeRO-1    a reduce-scatter of each bucket, and an all-gather of its weights; ZeRO-2 scatters after each micro-batch
    FSDP      for each micro-batch two all-gathers and a reduce-scatter of each block; the root, which stays gathered, is gathered once

Buckets and flat parameters are laid out as the engines lay them out, so calls and bytes are the trace's to the byte. Experts that are
spread over ranks are in `shared.parallel.planning.expert_costs`.

Left out on purpose: evaluation, norms that are logged, and the comparison of replicas every so many steps.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from shared.model.config import ModelConfig
from shared.model.counting import feed_forward_counts, norm_size
from shared.parallel.comm.collectives import are_equal
from shared.parallel.config import ParallelConfig
from shared.parallel.data import zero
from shared.parallel.data.ddp import plan_buckets
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.planning.activations import WIDTH, Part, heads, is_sparse, model_of_rank
from shared.parallel.planning.costs import Exchange
from shared.parallel.planning.memory import StepSizes


class Weight(NamedTuple):
    """A parameter of a rank. numbers: its elements. block: None outside of all. matrix: whether Muon would step it. expert, router: parts
    of a mixture. partial: the axis over which its gradient is partial. uneven: sharded unevenly. bits: per element, if quantized."""

    numbers: int
    block: int | None = None
    matrix: bool = False
    expert: bool = False
    router: bool = False
    partial: str = ""
    uneven: bool = False
    trained: bool = True
    bits: float = 0


def weights_of(model: ModelConfig, layout: ParallelConfig, part: Part) -> list[Weight]:
    """The parameters of a rank with this part of a decoder, in the model's order."""
    whole, own = model.resolved(), model_of_rank(model, layout)
    positions = "tp" * layout.sequence_parallel
    tied = "pp_ends" if layout.pipeline_parallel > 1 and own.tie_word_embeddings else ""
    table = Weight(own.vocab_size * own.hidden_size, partial=tied, uneven=whole.vocab_size % layout.tensor_parallel > 0)
    found = [table] * part.embedding
    if part.embedding and own.position == "learned":
        found.append(Weight(own.max_position_embeddings * own.hidden_size))
    for layer in part.blocks:
        found += [each._replace(block=layer) for each in weights_of_block(own, layer, layout, positions)]
    if part.head:
        found += norm_weights(own, own.hidden_size, positions)
        found += [table] * (not own.tie_word_embeddings or not part.embedding)
    return found


def weights_of_block(own: ModelConfig, layer: int, layout: ParallelConfig, positions: str) -> Iterator[Weight]:
    """In the block's order: norm and attention, norm and feed-forward layer."""
    size, (inner, shared), split = own.hidden_size, heads(own), "tp" * (layout.tensor_parallel > 1)
    yield from norm_weights(own, size, positions)
    for width in (inner, shared, shared):
        yield Weight(width * size, matrix=True)
        yield from [Weight(width)] * own.attention_bias
    yield Weight(size * inner, matrix=True)
    yield from [Weight(size, partial=positions)] * own.attention_output_bias
    for _ in range(2 * own.qk_norm):
        yield from norm_weights(own, own.head_dim, split)
    yield from norm_weights(own, size, positions)
    if not is_sparse(own, layer):
        yield from linear_weights(own, own.intermediate_size, positions)
        return
    counts, experts = feed_forward_counts(own, layer), own.experts
    yield Weight(experts.num_experts * size, matrix=True, router=True, partial=split)
    if counts["bias"]:
        yield Weight(counts["bias"], router=True, trained=False)
    entries = 3 if own.gated else 2
    yield from entries * [Weight(counts["expert"] // entries // layout.expert_parallel, matrix=True, expert=True)]
    if beside := counts["matrix"] - experts.num_experts * size:
        yield from entries * [Weight(beside // entries, matrix=True)]


def linear_weights(own: ModelConfig, width: int, positions: str) -> Iterator[Weight]:
    size = own.hidden_size
    for out, partial in ((width, ""), (size, positions), *([(width, "")] * own.gated)):
        yield Weight(width * size, matrix=True)
        yield from [Weight(out, partial=partial)] * own.mlp_bias


def norm_weights(own: ModelConfig, size: int, partial: str) -> list[Weight]:
    return [Weight(size, partial=partial)] * (norm_size(own, size) // size)


def data_exchanges(
    weights: Sequence[Weight], layout: ParallelConfig, step: StepSizes, whole_matrices: bool = False, metrics: int = 1, stage: int = 0
) -> list[Exchange]:
    """The communication of a rank with the data-parallel ranks in a training step.

    Args:
        weights: `weights_of` the rank.
        step: its precision is that in which fsdp gathers blocks.
        whole_matrices: whether the optimizer needs unsharded matrices, as Muon: ZeRO does not split them, and FSDP gathers them.
        metrics: how many an objective returns beside its loss and its number of tokens.
        stage: the rank's stage in a pipeline.
    """
    context, data = layout.context_parallel, layout.data_ranks
    axis, ranks = ("loss" if context > 1 else "data"), data * context
    if ranks == 1:
        return []
    spread = layout.expert_parallel > 1
    trained = [each for each in weights if each.trained and not (spread and each.expert)]
    if layout.fully_sharded > 1:
        kept = [each for each in weights if not (spread and each.expert)]
        found = [*sharded_exchanges(kept, layout, step, stage), *(cut_matrices(kept, layout.fully_sharded) if whole_matrices else ())]
    else:
        found = list(replica_exchanges(trained, layout, step, axis, ranks, whole_matrices))
    flags = sum(each.trained for each in weights) - (0 if shared_experts(layout) else len([w for w in weights if w.expert and spread]))
    return [*found, Exchange("totals", "all_reduce", axis, ranks, 1, 8 * (2 + metrics + flags))]


def shared_experts(layout: ParallelConfig) -> bool:
    """Whether several ranks hold the same experts, whose engine then counts their users."""
    return layout.zero > 0 or layout.fully_sharded > 1 or layout.data_ranks * layout.context_parallel > layout.expert_parallel


def replica_exchanges(
    trained: Sequence[Weight], layout: ParallelConfig, step: StepSizes, axis: str, ranks: int, whole_matrices: bool
) -> Iterator[Exchange]:
    following = iter(reversed(trained))
    sizes = bucket_sizes(tuple(each.numbers for each in reversed(trained)), layout.bucket_megabytes)
    buckets = [[next(following) for _ in range(size)] for size in sizes]
    if layout.zero == 0:
        for bucket in buckets:
            yield Exchange("gradients", "all_reduce", axis, ranks, 1, 4 * sum(each.numbers for each in bucket))
        return
    held = [0] * ranks
    for bucket in buckets:
        together = [each for each in bucket if not each.partial or (whole_matrices and each.matrix)]
        rows = zero.partition([each.numbers for each in together], [whole_matrices and each.matrix for each in together], held)
        held = [before + sum(row[rank][1] - row[rank][0] for row in rows) for rank, before in enumerate(held)]
        for each in bucket:
            if each not in together:
                rows += zero.partition([each.numbers], [False], [0] * ranks)
        sizes = [sum(row[rank][1] - row[rank][0] for row in rows) for rank in range(ranks)]
        even = are_equal(sizes)
        whole = 4 * (ranks * max(sizes) if even else sum(sizes))  # of an uneven all-gather, what a rank sends on average
        times = step.microbatches if layout.zero == 2 else 1
        yield Exchange("gradients", "reduce_scatter" if even else "all_to_all", axis, ranks, times, whole)
        yield Exchange("weights", "all_gather" if even else "all_to_all", axis, ranks, 1, whole)


@cache
def bucket_sizes(numbers: tuple[int, ...], megabytes: float) -> list[int]:
    """The number of parameters in each bucket, of parameters with these sizes in order."""
    return [len(bucket) for bucket in plan_buckets([nn.Parameter(torch.empty(each, device="meta")) for each in numbers], megabytes)]


def sharded_exchanges(weights: Sequence[Weight], layout: ParallelConfig, step: StepSizes, stage: int) -> Iterator[Exchange]:
    """The communication of FSDP's flat parameters, and HSDP's sums of shards over replicas. On a pipeline's rank the root is gathered for
    each forward pass of a chunk, and reduced where a forward pass follows a backward one."""
    ranks, keep = layout.fully_sharded, not layout.reshard_after_forward
    once = layout.pipeline_parallel > 1 and keep  # a step, and not with each micro-batch
    copies = layout.data_parallel * layout.context_parallel
    flats: dict[tuple, int] = {}
    for each in weights:
        root = each.block is None
        width = each.bits / 8 or (4 if root or each.router else WIDTH[step.precision])
        kind = (each.block, width, each.trained, each.partial if root else "", each.uneven)
        flats[kind] = flats.get(kind, 0) + each.numbers
    calls, of_root = (1, (1, 1)) if once else (step.microbatches, root_calls(layout, step, stage))
    for (block, width, trained, *_), numbers in flats.items():
        padded = ranks * -(-numbers // ranks)
        gathers, reductions = of_root if block is None else (calls * (1 if keep else 2), calls)
        yield Exchange("weights", "all_gather", "fsdp", ranks, gathers, width * padded)
        if trained:
            yield Exchange("gradients", "reduce_scatter", "fsdp", ranks, reductions, 4 * padded)
            if copies > 1:
                axis = "replicas" if layout.context_parallel > 1 else "dp"
                yield Exchange("gradients", "all_reduce", axis, copies, 1, 4 * padded / ranks)


def root_calls(layout: ParallelConfig, step: StepSizes, stage: int) -> tuple[int, int]:
    """How often the root unit is gathered and reduced in a step."""
    if layout.pipeline_parallel == 1:
        return step.microbatches, step.microbatches
    schedule = make_schedule(layout.pipeline_schedule, layout.pipeline_parallel, step.microbatches, layout.pipeline_chunks)[stage]
    kinds = [action.kind for action in schedule]
    return kinds.count("F"), 1 + sum(before != "F" and then == "F" for before, then in pairwise(kinds))


def cut_matrices(weights: Sequence[Weight], ranks: int) -> Iterator[Exchange]:
    """All-gathers of the matrices that a flat parameter splits over ranks, each once a step."""
    for block in dict.fromkeys(each.block for each in weights if each.block is not None):
        flat = [each for each in weights if each.block == block and not each.router and each.trained]
        length, start = -(-sum(each.numbers for each in flat) // ranks), 0
        for each in flat:
            parts = [max(min(start + each.numbers, length * (rank + 1)) - max(start, length * rank), 0) for rank in range(ranks)]
            if each.matrix and max(parts) < each.numbers:
                yield Exchange("matrices", "all_gather", "fsdp", ranks, 1, 4 * ranks * max(parts))
            start += each.numbers


def norm_exchange(layout: ParallelConfig) -> list[Exchange]:
    """The all-reduce of the gradient norm, where no rank has all of the gradient."""
    cut = layout.tensor_parallel * layout.pipeline_parallel * layout.fully_sharded * layout.expert_parallel > 1 or layout.zero
    return [Exchange("gradient norm", "all_reduce", "world", layout.ranks, 1, 16)] * bool(cut)


def adapted(weights: Sequence[Weight], sizes: Sequence[tuple[int, int]], rank: int, bits: float = 0) -> list[Weight]:
    """The parameters under LoRA: all frozen, and in each block two factors for each of these (out, in) sizes. bits: per element of the
    blocks' matrices, if quantized; their tables then count as part of the same flat parameter."""
    found = [each._replace(trained=False, bits=bits * (each.matrix and not each.expert and not each.router)) for each in weights]
    for block in dict.fromkeys(each.block for each in weights if each.block is not None):
        found += [Weight(rank * side, block) for size in sizes for side in reversed(size)]
    return found

