"""Chapter 12. The parallel axes of a run, in the order in which they shape the model: activation checkpointing, pipeline, context,
tensor, experts, adapters."""

from shared.finetune.adapter_axis import AdapterParallel
from shared.moe.parallel.axis import ExpertParallel
from shared.parallel.context.axis import ContextParallel
from shared.parallel.parallelize import AXES, Axis
from shared.parallel.pipeline.axis import PipelineParallel
from shared.parallel.tensor.axis import TensorParallel

RUN_AXES: tuple[Axis, ...] = (*AXES, PipelineParallel(), ContextParallel(), TensorParallel(), ExpertParallel(), AdapterParallel())
BROUGHT = tuple(name for axis in RUN_AXES for name in axis.brings)  # the fields of `ParallelConfig` that take effect
