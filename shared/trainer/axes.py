"""Chapter 12. The parallel axes of a run, in the order in which they shape the model: activation checkpointing, tensor and sequence."""

from shared.parallel.parallelize import AXES, Axis
from shared.parallel.tensor.axis import TensorParallel

RUN_AXES: tuple[Axis, ...] = (*AXES, TensorParallel())
BROUGHT = tuple(name for axis in RUN_AXES for name in axis.brings)  # the fields of `ParallelConfig` that take effect
