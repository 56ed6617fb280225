"""Chapter 08. Load balancing of pipeline stages: consecutive blocks shared out so that no stage costs much more than the others.

In steady state every slot lasts as long as the slowest stage, so a step costs as if all stages were that slow. The first stage also has the
embedding, and the last one the head, which can cost as much as several blocks.

Left out on purpose: blocks cut in two, and stages whose ranks differ in speed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Literal

import torch

from shared.course.binding import exercise
from shared.engine.metrics.flops import model_flops_per_token
from shared.model.config import ModelConfig
from shared.model.counting import parameter_counts
from shared.model.transformer import TransformerModel
from shared.parallel.config import ParallelConfig


@exercise("08.balance_stages")
def balance_stages(blocks: Sequence[float], stages: int, first: float = 0, last: float = 0) -> list[range]:
    """Balance pipeline stages: share out blocks so that the dearest stage is as cheap as possible.

    Each stage has consecutive blocks, at least one. It costs their sum; the first stage costs `first` more, for the embedding, and the
    last one `last` more, for the head. A single stage has both.

    Of several splits whose dearest stage costs the same, the one is taken whose second dearest stage is cheapest, then the third dearest,
    and so on. Where all of these are equal, the one is taken whose first stage has the most blocks, then the second stage, and so on. So
    all ranks find the same split. Equal blocks that cost something are shared out evenly where the ends add nothing: the first stages then
    have one more.

    Args:
        blocks: the cost of each block, in their order: seconds, FLOPs or bytes, at least 0. Whole numbers make ties exact.
        stages: at least 1. There are more ways to split 100 blocks over 16 stages than anyone can try: it must take seconds all the same.
        first, last: in the same unit.

    Returns:
        For each stage the range of its blocks' numbers, which count from 0.

    Raises:
        SettingError: there are fewer blocks than stages.

    >>> balance_stages([1, 1, 1, 1, 1, 1, 1], stages=3), balance_stages([1, 1, 1, 1, 1, 1], stages=2, last=2)
    ([range(0, 3), range(3, 5), range(5, 7)], [range(0, 4), range(4, 6)])
    """


def stage_blocks(model: ModelConfig, layout: ParallelConfig) -> list[range]:
    """For each stage of a pipeline the numbers of its blocks, as `layout.pipeline_layers` says."""
    asked, stages = layout.pipeline_layers, layout.pipeline_parallel * layout.pipeline_chunks
    if stages == 1:
        return [range(model.num_hidden_layers)]
    if isinstance(asked, str):
        blocks, first, last = stage_costs(model, asked)
        return balance_stages(blocks, stages, first, last)
    return [range(sum(asked[:stage]), sum(asked[: stage + 1])) for stage in range(stages)]


@cache
def stage_costs(model: ModelConfig, by: Literal["flops", "memory"]) -> tuple[tuple[int, ...], int, int]:
    """The cost of each block, what the first stage has more, and what the last one has more.

    flops: of a token's training step, in sequences as long as the model allows; looking up an embedding takes none. memory: parameters,
        since weights, gradients and optimizer state have a few bytes for each; a tied embedding stands at both ends.

    Raises:
        ValueError: FLOPs of an encoder-decoder.
    """
    model = model.resolved()
    parts = [replace(model, num_hidden_layers=n, layer_types=model.layer_types[:n]) for n in range(1, model.num_hidden_layers + 1)]
    if by == "memory":
        with torch.device("meta"):
            dense = TransformerModel(replace(parts[0], experts=None))
        size = lambda *modules: sum(p.numel() for module in modules if module is not None for p in module.parameters())  # noqa: E731
        first, last = size(dense.embedding), size(dense.head, dense.stack.final_norm)
        totals = [size(dense) - size(dense.stack.blocks), *(sum(parameter_counts(part).values()) for part in parts)]
    else:
        first, last = 0, 6 * model.hidden_size * (model.vocab_size + model.hidden_size * (model.head == "mlm"))
        totals = [last, *(model_flops_per_token(part, model.max_position_embeddings) for part in parts)]
    return tuple(more - fewer for fewer, more in pairwise(totals)), first, last
