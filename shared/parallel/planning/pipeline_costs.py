"""Chapter 08. Pipeline memory and communication volume by formula: each stage's weights, activations in flight and messages in a step.

    weights, gradients, state    of the rank's own blocks; embedding on the first rank, norm and head on the last one, a tied weight on both
    activations                  of each micro-batch from its forward pass to the end of its backward pass, along the rank's actions
    messages                     [rows, seq, D] in float32 over each border of two stages, once forward and once back, for each micro-batch

Under 1F1B rank r of p saves p - r micro-batches (Narayanan et al. 2021, section 2.2.1), under GPipe all of a step. What a schedule saves is
read from its actions, so any schedule has its formula.

Left out on purpose: messages in flight, which the next message in the other direction frees.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shared.model.config import ModelConfig
from shared.optim.config import OptimizerConfig
from shared.parallel.config import ParallelConfig
from shared.parallel.pipeline.axis import stage_blocks
from shared.parallel.pipeline.schedules import Action, Shape, make_schedule
from shared.parallel.planning.activations import WIDTH, Activations, Part, activations, heads, is_sparse, model_of_rank
from shared.parallel.planning.costs import Exchange
from shared.parallel.planning.memory import MemoryEstimate, StepSizes, estimate_memory
from shared.parallel.planning.tensor_costs import shares, tensor_exchanges


def chunk_parts(model: ModelConfig, layout: ParallelConfig) -> list[list[Part]]:
    """By rank of the pipeline, the part of the model in each of its chunks."""
    ranks, last = layout.pipeline_parallel, layout.pipeline_parallel * layout.pipeline_chunks - 1
    parts = [Part(blocks, stage == 0, stage == last) for stage, blocks in enumerate(stage_blocks(model, layout))]
    return [parts[rank::ranks] for rank in range(ranks)]


def held_parts(model: ModelConfig, layout: ParallelConfig) -> list[Part]:
    """By rank of the pipeline, its part of the model in all its chunks."""
    chunks = chunk_parts(model, layout)
    return [Part([block for chunk in own for block in chunk.blocks], own[0].embedding, own[-1].head) for own in chunks]


def estimate_ranks(
    model: ModelConfig, layout: ParallelConfig, optimizer: OptimizerConfig, step: StepSizes, *, sliced: bool = True, packed: bool = False
) -> list[MemoryEstimate]:
    """`estimate_memory` for each rank of the pipeline; without one, a list of one."""
    if layout.pipeline_parallel == 1:
        return [estimate_memory(model, layout, optimizer, step, sliced=sliced, packed=packed)]
    found, ranks = [], layout.pipeline_parallel
    most = 4 * ranks * layout.pipeline_chunks  # from here on, each further round of micro-batches adds as much as the one before
    begun = step.microbatches if step.microbatches < most + 2 * ranks else most + step.microbatches % ranks
    rounds = (step.microbatches - begun) // ranks
    schedule, longer = (
        make_schedule(layout.pipeline_schedule, ranks, begun + more, layout.pipeline_chunks) for more in (0, ranks * (rounds > 0))
    )
    for held, chunks, actions, with_one_more in zip(held_parts(model, layout), chunk_parts(model, layout), schedule, longer, strict=True):
        estimate = estimate_memory(model, layout, optimizer, step, sliced=sliced, packed=packed, part=held)
        how, sizes = layout.activation_checkpointing, (step.rows, step.seq, step.precision)
        each = [activations(model, how, *sizes, sliced, packed, layout, part, step.imbalance) for part in chunks]
        sent = [0 if part.head else hidden_bytes(model, layout, step) for part in chunks]
        split = [sum(split_bytes(model, layout, step, layer) for layer in part.blocks) for part in chunks]
        kept, then = (most_in_flight(some, each, sent, split) for some in (actions, with_one_more))
        found.append(replace(estimate, activations=kept + rounds * (then - kept)))
    return found


def most_in_flight(actions: Sequence[Action], each: Sequence[Activations], sent: Sequence[float], split: Sequence[float]) -> float:
    """The largest number of bytes that a rank saves for backward passes during its actions.

    Args:
        each: by chunk, what autograd saves of a micro-batch. sent: by chunk, the result, from which its backward pass starts.
        split: by chunk, what part W needs after part I.
    """
    now = most = 0.0
    for kind, _, chunk in actions:
        kept = each[chunk].after_forward + sent[chunk]
        if kind == "F":
            now += kept
        most = max(most, now + (each[chunk].peak - each[chunk].after_forward if kind in "BI" else 0))
        if kind in "BI":
            now += split[chunk] * (kind == "I") - kept
        elif kind == "W":
            now -= split[chunk]
    return most


def split_bytes(model: ModelConfig, layout: ParallelConfig, step: StepSizes, layer: int) -> float:
    """Bytes that part W of a block needs of a micro-batch: the inputs of its matrices, and the gradients of their outputs."""
    own = model_of_rank(model, layout)
    inner, shared = heads(own)
    attention = own.hidden_size + inner + inner + 2 * shared + own.hidden_size
    if is_sparse(own, layer):
        feed_forward = own.experts.split_numbers(own, step.imbalance)
    else:
        feed_forward = 2 * own.hidden_size + (3 if own.gated else 2) * own.intermediate_size
    return step.rows * step.seq // layout.context_parallel * WIDTH[step.precision] * (attention + feed_forward)


def hidden_bytes(model: ModelConfig, layout: ParallelConfig, step: StepSizes) -> int:
    """A micro-batch's hidden states between two stages: float32, whatever the precision of products."""
    return 4 * step.rows * step.seq // layout.context_parallel * model.hidden_size


def pipeline_exchanges(model: ModelConfig, layout: ParallelConfig, step: StepSizes, rank: int = 0, metrics: int = 1) -> list[Exchange]:
    """The communication of a pipeline's rank with the other stages in a training step: hidden states and their gradients, by group
    (`shared.parallel.pipeline.stages`), the gradients of a tied embedding, and the totals. Nothing without a pipeline.

    Args:
        rank: along the pipeline.
        metrics: how many an objective returns beside its loss and its number of tokens.
    """
    ranks, shape, counts = layout.pipeline_parallel, Shape(layout.pipeline_parallel, layout.pipeline_chunks), Counter[tuple[str, str]]()
    if ranks == 1:
        return []
    for action in make_schedule(layout.pipeline_schedule, ranks, step.microbatches, layout.pipeline_chunks)[rank]:
        for operation, message in (("send", shape.given(rank, action)), ("receive", shape.needed(rank, action))):
            if message is not None:
                around = layout.pipeline_chunks > 1 and shape.goes_around(message)
                axis = "pp" if message.what == "activations" and not around else f"pp_{message.what}{'_around' * around}"
                counts[operation, axis] += 1
    hidden = hidden_bytes(model, layout, step)
    found = [Exchange("hidden states", operation, axis, ranks, calls, hidden) for (operation, axis), calls in sorted(counts.items())]
    if model.tie_word_embeddings and rank in (0, ranks - 1):
        numbers = model_of_rank(model, layout).vocab_size * model.hidden_size / shares(layout) + 1  # 1: whether the weight was used
        found.append(Exchange("tied ends", "all_reduce", "pp_ends", 2, 1, 4 * numbers))
    return [*found, Exchange("totals", "broadcast", "pp", ranks, 1, 8 * (2 + metrics))]


def step_exchanges(
    model: ModelConfig, layout: ParallelConfig, optimizer: OptimizerConfig, step: StepSizes, rank: int = 0
) -> list[Exchange]:
    """`tensor_exchanges` of all chunks of a pipeline's rank, and `pipeline_exchanges`."""
    held = tensor_exchanges(model, layout, optimizer, step, held_parts(model, layout)[rank])
    found = [each for each in held if each.part == "gradients"]  # which are summed once, of all chunks together
    for part in chunk_parts(model, layout)[rank]:
        found += [each for each in tensor_exchanges(model, layout, optimizer, step, part) if each.part != "gradients"]
    return [*found, *pipeline_exchanges(model, layout, step, rank)]
