"""Chapter 08. Pipeline parallelism (pp) as an axis of the mesh, with load balancing of pipeline stages: each rank holds some of the layers.

    pp 2, chunks 1    rank 0: embedding, blocks 0 1 2 3              rank 1: blocks 4 5 6 7, norm, head
    pp 2, chunks 2    rank 0: embedding, blocks 0 1 and 4 5          rank 1: blocks 2 3 and 6 7, norm, head

Blocks keep their numbers, so weights, optimizer state and checkpoints have the names of the whole model. A tied embedding stands at both
ends, and its two gradients are summed (`partial_over`). Data engines work on what a rank holds, as on any model.

In steady state every slot lasts as long as the slowest stage, so a step costs as if all stages were that slow. The first stage also has the
embedding, and the last one the head, which can cost as much as several blocks: `balance_stages` splits the blocks.

Left out on purpose: blocks cut in two, stages whose ranks differ in speed, and what has not been shown to be equal to one process, which is
refused by name.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from shared.course.binding import exercise
from shared.course.errors import SettingError
from shared.engine.metrics.flops import model_flops_per_token
from shared.model.config import ModelConfig
from shared.model.counting import parameter_counts
from shared.model.transformer import TransformerModel, keep_part
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import ParallelConfig
from shared.parallel.data.engine import DataEngine
from shared.parallel.mesh import Axis, Mesh
from shared.parallel.pipeline.runner import PipelineRunner
from shared.parallel.pipeline.schedules import Shape
from shared.parallel.pipeline.stages import Links, PipelineModel
from shared.parallel.pipeline.weight_gradients import split_backward


class PipelineParallel(Axis):
    """Pipeline parallelism."""

    brings = ("pipeline_parallel",)

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        if mesh.pp.size == 1:
            return
        if type(model) is not TransformerModel:
            raise SettingError(f"Pipeline parallelism is for a TransformerModel, not a {type(model).__name__}: set pipeline_parallel to 1.")
        require_stages(model.config, mesh.config)
        last = mesh.pp.size - 1
        kept = [number for numbers in blocks_of(model.config, mesh) for number in numbers]
        keep_part(model, kept, embedding=mesh.pp.rank == 0, head=mesh.pp.rank == last)
        if model.config.tie_word_embeddings:
            ends = group_of_ends(mesh)
            if mesh.pp.rank in (0, last):
                (model.head.linear if mesh.pp.rank else model.embedding.tokens).weight.partial_over = ends

    def engine(self, model: nn.Module, mesh: Mesh) -> DataEngine | None:
        if mesh.pp.size == 1:
            return None
        chunks, splits = mesh.config.pipeline_chunks, mesh.config.pipeline_schedule == "zero_bubble"
        links = Links(mesh, Shape(mesh.pp.size, chunks))
        parts = model, mesh.pp, links, blocks_of(model.config, mesh), not splits
        if mesh.config.backend == "torch":  # which takes seconds to import
            from shared.parallel.pipeline.on_torch import TorchPipelineModel, TorchPipelineRunner

            return TorchPipelineRunner(TorchPipelineModel(*parts), mesh)
        waiting = split_backward(model.stack.blocks.values()) if splits else None
        return PipelineRunner(PipelineModel(*parts), mesh, waiting)


def blocks_of(config: ModelConfig, mesh: Mesh) -> list[range]:
    """For each chunk of this rank, the numbers of its blocks."""
    return stage_blocks(config, mesh.config)[mesh.pp.rank :: mesh.pp.size]


def group_of_ends(mesh: Mesh) -> Communicator:
    """The first and the last rank of this rank's pipeline, as a group. Every rank of the world calls it."""
    first, *middle, last = torch.arange(mesh.world.size).view(mesh.pp.size, -1).tolist()
    pairs = [list(pair) for pair in zip(first, last, strict=True)]
    return mesh.world.split("pp_ends", pairs + [[rank] for ranks in middle for rank in ranks])


def require_stages(model: ModelConfig, config: ParallelConfig) -> None:
    """Refuse what a pipeline cannot run, and combinations without a parity test."""
    stages = config.pipeline_parallel * config.pipeline_chunks
    counts = () if isinstance(config.pipeline_layers, str) else config.pipeline_layers
    chunked, splits, sharded = config.pipeline_chunks > 1, config.pipeline_schedule == "zero_bubble", config.fully_sharded > 1
    torch_tp, torch_fsdp = (config.backend == "torch" and degree > 1 for degree in (config.tensor_parallel, config.fully_sharded))
    wrong = [
        (model.architecture == "encoder-decoder", "model.architecture encoder-decoder: its blocks share more than hidden states"),
        (model.position == "relative", "model.position relative: its blocks share a learned bias"),
        (stages > model.num_hidden_layers, f"{model.num_hidden_layers} layers: {stages} stages need at least one each"),
        (
            counts and sum(counts) != model.num_hidden_layers,
            f"pipeline_layers {list(counts)}, which are {sum(counts)} layers, and model.num_hidden_layers {model.num_hidden_layers}",
        ),
        (
            splits and sharded and (torch_fsdp or config.reshard_after_forward),
            "fully_sharded and pipeline_schedule zero_bubble: gradients are reduced before part W. With backend course, "
            "reshard_after_forward false keeps them until the step ends",
        ),
        (torch_fsdp and chunked, "parallel.backend torch, fully_sharded and pipeline_chunks: fully_shard follows one chunk"),
        (torch_fsdp and config.data_parallel > 1, "parallel.backend torch, fully_sharded and data_parallel: replicas exchange too early"),
        (torch_tp and (chunked or splits), "parallel.backend torch, tensor_parallel and more than one chunk or part W: it is not compared"),
        (
            config.backend == "torch" and model.tie_word_embeddings and config.zero > 0,
            "parallel.backend torch, zero and a tied embedding: its ends are cut differently over the replicas",
        ),
    ]
    for is_wrong, reason in wrong:
        if is_wrong:
            raise SettingError(f"parallel.pipeline_parallel {config.pipeline_parallel} with {reason}. Change one of them.")


@exercise("08.balance_stages")
def balance_stages(blocks: Sequence[float], stages: int, first: float = 0, last: float = 0) -> list[range]:
    """Balance pipeline stages: divide blocks so that the most expensive stage is as cheap as possible.

    Each stage has consecutive blocks, at least one. It costs their sum; the first stage costs `first` more, for the embedding, and the
    last one `last` more, for the head. A single stage has both.

    Of several splits whose most expensive stage costs the same, take the one whose second most expensive stage is cheapest, then the third
    most expensive, and so on. Where all of these are equal, take the one whose first stage has the most blocks, then the second stage, and
    so on. So all ranks find the same split. For example, equal blocks that cost something are divided evenly where the ends add nothing,
    and the first stages have one more.

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
    """The blocks of each pipeline stage, as `layout.pipeline_layers` says."""
    asked, stages = layout.pipeline_layers, layout.pipeline_parallel * layout.pipeline_chunks
    if stages == 1:
        return [range(model.num_hidden_layers)]
    if isinstance(asked, str):
        blocks, first, last = stage_costs(model, asked)
        return balance_stages(blocks, stages, first, last)
    return [range(sum(asked[:stage]), sum(asked[: stage + 1])) for stage in range(stages)]


@cache
def stage_costs(model: ModelConfig, by: Literal["flops", "memory"]) -> tuple[tuple[int, ...], int, int]:
    """The cost of each block, the extra cost of the first stage, and that of the last one.

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
