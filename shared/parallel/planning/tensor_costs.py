"""Chapter 07. Communication volume of tensor, sequence and context parallelism by formula: calls and bytes of each part of a training step.

    part          tensor parallelism                     with sequence parallelism                            numbers in each
    embedding     all-reduce >                           all-reduce >  all-gather <                           b s D
    layers        2 all-reduce >  2 all-reduce <         2 (all-gather, reduce-scatter) >  and the same <     b s D, for each layer
    head          all-reduce <                           all-gather >  reduce-scatter <                       b s D
    loss          2 all-reduce > for each chunk          the same                                             3 b s in all chunks
    gradients     an all-reduce in a step                the same                                             partial gradients
    muon          an all-gather of each matrix           the same                                             the matrix

b s is a micro-batch's tokens, D the width of the residual stream, > forward and < backward. On a ring an all-reduce of n numbers over t
ranks sends 2 (t - 1) / t n and each half of it (t - 1) / t n, so a layer sends 8 (t - 1) / t b s D on each rank in both columns (Narayanan
et al. 2021, section 3.2; Korthikanti et al. 2022, section 4.2.2).

Context parallelism sends keys and values around a ring, and their gradients behind them (`shared.parallel.context.ring`).

Left out on purpose: the few bytes of totals and gradient norm, which travel over all ranks, and evaluation.
"""

import math
from collections import Counter
from collections.abc import Iterator

from shared.model.chunked_loss import chunk_rows
from shared.model.config import ModelConfig
from shared.model.counting import feed_forward_counts, norm_size
from shared.optim.config import OptimizerConfig
from shared.parallel.config import ParallelConfig
from shared.parallel.planning.activations import WIDTH, Part, is_sparse, model_of_rank, whole_of
from shared.parallel.planning.costs import Exchange
from shared.parallel.planning.memory import StepSizes


def tensor_exchanges(
    model: ModelConfig,
    layout: ParallelConfig,
    optimizer: OptimizerConfig,
    step: StepSizes,
    part: Part | None = None,
) -> list[Exchange]:
    """The communication of a rank within its tensor-parallel group in a training step.

    Args:
        model: a decoder.
        layout: the degrees, sequence_parallel and activation_checkpointing count.
        optimizer: Muon gathers the sharded matrices; under ZeRO only the rank that updates a matrix does.
        step: its precision is that of the stream at the edges of matrices; all else is float32.
        part: the rank's part of the model; None for all of it.

    Returns:
        The average over ranks: ZeRO and FSDP divide matrices and partial gradients unevenly. Nothing without tensor parallelism.
    """
    if layout.tensor_parallel == 1:
        return []
    model, ranks, part = model.resolved(), layout.tensor_parallel, part or whole_of(model)
    found = []
    for where, operation, calls, numbers, width in microbatch_exchanges(model, layout, step, part):
        if calls:
            found.append(Exchange(where, operation, "tp", ranks, calls * step.microbatches, numbers * width))
    for axis, size, numbers in partial_gradients(model, layout, part):
        found.append(Exchange("gradients", "all_reduce", axis, size, 1, 4 * numbers))
    if optimizer.name == "muon":
        gathered = Counter(numbers for layer in part.blocks for numbers in matrices(model, ranks, layer))
        found += [Exchange("muon", "all_gather", "tp", ranks, calls / shares(layout), 4 * numbers) for numbers, calls in gathered.items()]
    return found


def context_exchanges(
    model: ModelConfig, layout: ParallelConfig, step: StepSizes, part: Part | None = None
) -> list[Exchange]:
    """The communication of a rank within its context-parallel group in a training step, on average, under a causal mask.

    Of the 2 n chunks of a sequence, the n early ones make n - 1 hops each, the late ones as many as there are ranks below, so a rank sends
    3/2 (n - 1) times the keys and values of a chunk: forward, backward, with their gradients in float32, and again for recomputed blocks.
    Packed documents and windows send less.
    """
    ranks = layout.context_parallel
    if ranks == 1:
        return []
    own, passes = model_of_rank(model, layout), 2 if layout.activation_checkpointing == "none" else 3
    calls = step.microbatches * (part or whole_of(model)).layers * 1.5 * (ranks - 1)
    numbers = 2 * step.rows * own.num_key_value_heads * own.head_dim * step.seq // (2 * ranks)
    return [
        Exchange("keys and values", "send", "cp", ranks, calls * passes, WIDTH[step.precision] * numbers),
        Exchange("their gradients", "send", "cp", ranks, calls, 4 * numbers),
        Exchange("masks", "all_gather", "cp", ranks, step.microbatches, 4 * ranks**2),
    ]


def microbatch_exchanges(
    model: ModelConfig, layout: ParallelConfig, step: StepSizes, part: Part
) -> Iterator[tuple[str, str, int, float, int]]:
    """(where, operation, calls, numbers in each, bytes of each number) of a micro-batch's forward and backward pass.

    Recomputed blocks gather and sum again; selective recomputation stops before the last sum of a block without experts.
    """
    tokens, width, layers = step.rows * step.seq // layout.context_parallel, WIDTH[step.precision], part.layers
    stream = tokens * model.hidden_size
    selective = layout.activation_checkpointing == "selective"
    again = {"none": (0, 0), "full": (2, 2), "selective": (2, 1)}[layout.activation_checkpointing]  # sublayers entered, and left
    entered, left = (2 + more for more in again)
    sums = layers * (left + 2) + (selective and sum(is_sparse(model, layer) for layer in part.blocks))  # experts' rows are weighed after it
    chunks = math.ceil(tokens / chunk_rows(model.vocab_size, on_gpu=False))  # on a GPU fewer: its messages are too few to matter
    if part.embedding:
        yield "embedding", "all_reduce", 1, stream, 4
    if layout.sequence_parallel:
        yield "embedding", "all_gather", 1, stream, 4
        yield "layers", "all_gather", layers * (entered + 2), stream, width
        yield "layers", "reduce_scatter", sums, stream, width
        yield "head", "all_gather", 1, stream, 4
        yield "head", "reduce_scatter", int(part.head), stream, 4
    else:
        yield "layers", "all_reduce", sums, stream, width
        yield "head", "all_reduce", int(part.head), stream, 4
    if part.head:
        yield "loss", "all_reduce", chunks, tokens / chunks, 4  # the largest logits
        yield "loss", "all_reduce", chunks, 2 * tokens / chunks, 4  # sums of exponentials, and the targets' logits


def partial_gradients(model: ModelConfig, layout: ParallelConfig, part: Part) -> Iterator[tuple[str, int, float]]:
    """(axis, ranks, numbers) of partial gradients, with a flag for each parameter that says whether it was used."""
    layers, size, ranks = part.layers, model.hidden_size, layout.tensor_parallel
    of_heads, of_positions = 2 * layers * model.qk_norm, (2 * layers + part.head) * layout.sequence_parallel
    biases = layers * (model.attention_output_bias + model.mlp_bias) * layout.sequence_parallel
    numbers = of_heads * norm_size(model, model.head_dim) + of_positions * norm_size(model, size) + biases * size
    routers = sum(is_sparse(model, layer) for layer in part.blocks)  # whose weights each rank multiplies with its summands of rows
    numbers += routers * model.experts.num_experts * size if routers else 0
    if numbers:
        flags = (of_heads + of_positions) * (2 if model.norm == "layer_norm" else 1) + biases + routers
        yield "tp", ranks, numbers / shares(layout) + flags
    copies = ranks // model.num_key_value_heads
    if copies > 1:
        head = model.head_dim * (model.hidden_size + model.attention_bias)
        yield "tp_copies", copies, 2 * layers * (head / shares(layout) + 1 + model.attention_bias)


def matrices(model: ModelConfig, ranks: int, layer: int) -> list[int]:
    """The elements gathered of each matrix of a block, or stack of experts. Copies of a key or value head are each gathered, a single head
    not at all."""
    own, size, entries = model_of_rank(model, ParallelConfig(tensor_parallel=ranks)), model.hidden_size, 3 if model.gated else 2
    counts = feed_forward_counts(own, layer)
    kinds = [counts["expert"], counts["matrix"] - model.experts.num_experts * size] if is_sparse(own, layer) else [counts["matrix"]]
    widths = 2 * [own.num_attention_heads * own.head_dim] + entries * [kind // (entries * size) for kind in kinds if kind]
    widths += 2 * [own.num_key_value_heads * own.head_dim] if model.num_key_value_heads > 1 else []
    return [ranks * width * size for width in widths]


def shares(layout: ParallelConfig) -> int:
    """The number of data-parallel ranks that divide per-parameter work. A matrix on two ranks is gathered by both."""
    return layout.fully_sharded * (layout.data_parallel * layout.context_parallel if layout.zero else 1)
