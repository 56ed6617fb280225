"""Chapter 06. The parallel configuration: degrees of the mesh, backend, sharding, pipeline schedule and timeouts.

A layout also has a name, as in `make run LAYOUT=dp2_zero1`: axes with their degrees, `zero1` or `zero2`, and `sp` for sequence parallelism,
joined by `_`.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from shared.course.bounds import NonNegativeInt, PositiveFloat, PositiveInt, checked

AXES = {  # from outside in
    "pp": "pipeline_parallel",
    "dp": "data_parallel",
    "fsdp": "fully_sharded",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
}
VIEWS = {"ep": "expert_parallel"}  # degrees that need no ranks of their own
LATER = {  # the field, and the chapter whose axis makes it take effect
    "tensor_parallel": "07",
    "sequence_parallel": "07",
    "context_parallel": "07",
    "pipeline_parallel": "08",
    "expert_parallel": "09",
}


@dataclass
@checked
class ParallelConfig:
    """How a run is distributed over ranks. Settings of an axis whose degree is 1 have no effect, so one file runs in every layout.

    Args:
        backend: course runs this course's own parallelism, torch the same configuration on PyTorch's (DDP, fully_shard,
            parallelize_module, torch.distributed.pipelining).
        pipeline_parallel: over how many ranks the layers are divided.
        pipeline_schedule: gpipe, 1f1b, interleaved, which needs pipeline_chunks, or zero_bubble (ZB-H1).
        pipeline_chunks: how many stages each of these ranks has.
        pipeline_layers: how many blocks each stage has: as balances the stages' flops, the head's included, or their memory for weights and
            state, the embedding's and the head's included; or a list with the count of each stage.
        data_parallel: how many replicas of the model divide the batch.
        fully_sharded: over how many ranks each replica's weights, gradients and optimizer state are sharded (FSDP, ZeRO-3).
        context_parallel: over how many ranks each sequence is sharded (context parallelism, by ring attention).
        tensor_parallel: over how many ranks each matrix is sharded (tensor parallelism).
        sequence_parallel: whether tensor-parallel ranks also shard the activations between the matrices, along the sequence.
        expert_parallel: over how many of the data-parallel ranks experts are distributed.
        zero: what the data-parallel replicas shard: 0 nothing, 1 the optimizer's state, 2 gradients as well.
        activation_checkpointing: which activations are recomputed in the backward pass: none; full, those of whole blocks; or selective,
            all but the results of matrix products.
        reshard_after_forward: whether fully sharded weights are freed after the forward pass and gathered again for the backward. If not, a
            pipeline keeps them, and unsharded gradients, until the step ends, and communicates both once a step.
        prefetch: how many units of fully sharded weights are prefetched.
        bucket_megabytes: the size of a gradient bucket.
        offload_optimizer: keep the optimizer's state in the CPU's memory.
        heartbeat_timeout: seconds without a heartbeat after which a rank counts as dead.
        collective_timeout: seconds that a rank waits in one operation for a rank that is alive and busy elsewhere, with preparing text
            for instance. NCCL's operations on GPUs end after half an hour at most.
        init_timeout: seconds at the start until all ranks have connected.
        check_every: steps between two comparisons of the replicas' weights; 0 for never.
    """

    backend: Literal["course", "torch"] = "course"
    pipeline_parallel: PositiveInt = 1
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    pipeline_chunks: PositiveInt = 1
    pipeline_layers: Literal["flops", "memory"] | tuple[int, ...] = "flops"
    data_parallel: PositiveInt = 1
    fully_sharded: PositiveInt = 1
    context_parallel: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    sequence_parallel: bool = False
    expert_parallel: PositiveInt = 1
    zero: Literal[0, 1, 2] = 0
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    reshard_after_forward: bool = True
    prefetch: NonNegativeInt = 1
    bucket_megabytes: PositiveFloat = 25.0
    offload_optimizer: bool = False
    heartbeat_timeout: PositiveFloat = 30.0
    collective_timeout: PositiveFloat = 1800.0
    init_timeout: PositiveFloat = 300.0
    check_every: NonNegativeInt = 100

    def __post_init__(self):
        if self.data_ranks % self.expert_parallel:
            raise ValueError(
                f"parallel.expert_parallel is {self.expert_parallel}, which does not divide the {self.data_ranks} data-parallel ranks "
                "(data_parallel x fully_sharded): experts are spread over those."
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("parallel.sequence_parallel needs tensor parallelism: give tensor_parallel 2 or more, or leave it out.")
        if (self.pipeline_schedule == "interleaved") != (self.pipeline_chunks > 1):
            raise ValueError(
                f"parallel.pipeline_schedule is {self.pipeline_schedule} and pipeline_chunks {self.pipeline_chunks}: interleaved needs 2 "
                "chunks or more, and every other schedule has 1."
            )
        counts, stages = self.pipeline_layers, self.pipeline_parallel * self.pipeline_chunks
        if self.pipeline_parallel > 1 and not isinstance(counts, str) and (len(counts) != stages or min(counts) < 1):
            raise ValueError(
                f"parallel.pipeline_layers is {list(counts)}, and there are {stages} stages (pipeline_parallel x pipeline_chunks): give a "
                "count for each of them, at least 1, or flops or memory."
            )
        if self.zero == 2 and self.pipeline_parallel > 1:
            raise ValueError(
                "parallel.zero 2 with pipeline_parallel: gradients would be exchanged after every micro-batch, and a schedule does not "
                "wait for that. Use zero 1."
            )
        if self.zero and self.data_parallel == 1:
            raise ValueError(
                f"parallel.zero is {self.zero} and there is one replica: it shares out among replicas, so give data_parallel 2 or more."
            )
        if self.zero and self.fully_sharded > 1:
            raise ValueError("parallel.zero beside fully_sharded: full sharding already cuts gradients and state. Set zero to 0.")
        if self.heartbeat_timeout > min(self.collective_timeout, self.init_timeout):
            raise ValueError(
                f"parallel.heartbeat_timeout is {self.heartbeat_timeout}, collective_timeout {self.collective_timeout} and init_timeout "
                f"{self.init_timeout}: the other two must be no shorter than heartbeat_timeout."
            )
        if self.backend == "torch" and self.context_parallel > 1:
            raise ValueError("parallel.context_parallel with backend torch is not built: use backend course.")
        if self.backend == "torch" and self.zero == 2:
            raise ValueError(
                "parallel.zero 2 with backend torch: PyTorch has no such engine. Use zero 1, fully_sharded, or backend course."
            )

    @property
    def ranks(self) -> int:
        """How many processes the run needs."""
        return math.prod(getattr(self, name) for name in AXES.values())

    @property
    def data_ranks(self) -> int:
        """The number of ranks that divide a batch."""
        return self.data_parallel * self.fully_sharded


def require_built(config: ParallelConfig, brought: Collection[str] = ()) -> None:
    """Refuse the first field that no axis in use implements, with its chapter. brought: the fields that the axes implement."""
    for name, chapter in LATER.items():
        if name not in brought and getattr(config, name) > 1 - isinstance(getattr(config, name), bool):
            raise ValueError(f"parallel.{name} is {getattr(config, name)}: it comes with chapter {chapter}; until then leave it out.")


def parse_layout(word: str, base: ParallelConfig | None = None) -> ParallelConfig:
    """Parse a layout's name: `dp2`, `dp2_fsdp2`, `dp4_zero1`, `tp2_sp`, `one`. Axes that it does not name have degree 1; everything else is
    `base`'s.

    Raises:
        ValueError: a part that is no axis with a degree, or one that is said twice.
    """
    chosen: dict[str, int] = {}
    for part in word.split("_") if word != "one" else []:
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        name = "sequence_parallel" if part == "sp" else (AXES | VIEWS | {"zero": "zero"}).get(match[1]) if match else None
        if name is None or name in chosen:
            raise ValueError(f"The layout {word!r} is not understood at {part!r}: join parts such as dp2, fsdp2 and zero1 by _, each once.")
        chosen[name] = part == "sp" or int(match[2])
    return replace(base or ParallelConfig(), **dict.fromkeys((*AXES.values(), *VIEWS.values()), 1) | {"zero": 0} | chosen)


def layout_name(config: ParallelConfig) -> str:
    """A layout's name: the inverse of `parse_layout`."""
    parts = [f"{axis}{getattr(config, name)}" for axis, name in (AXES | VIEWS).items() if getattr(config, name) > 1]
    parts += [f"zero{config.zero}"] * (config.zero > 0) + ["sp"] * config.sequence_parallel
    return "_".join(parts) or "one"
