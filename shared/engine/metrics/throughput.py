"""Chapter 04. Throughput (tokens per second, MFU) and resource use (memory, CPU and GPU utilisation), as callbacks.

`Throughput` adds up tokens and seconds in every step, which takes microseconds, and divides when a log is due. A step's time runs from the
request for its data to the end of its update, callbacks in between included; evaluation, logs and checkpoints are not part of it.
`Resources` queries the operating system and the GPU, only when a log is due.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback, Metrics, RunState
from shared.engine.metrics.flops import mfu, model_flops_per_token
from shared.model.config import ModelConfig
from shared.totals import Batch

GIB = 2**30


class Throughput(Callback):
    """Measures tokens and samples per second, seconds per step, each phase's share of a step, and MFU; counts all tokens and samples.

    Every token that the model reads counts, padding included: its arithmetic is done whether or not it counts in the loss.

    Args:
        peak_flops: FLOP/s of one device (`shared.engine.metrics.flops`); None to leave MFU out. A CPU's is measured, and a moment in which
            other programs used it makes that too low. A step that beats it is a better measurement, so the peak grows, and says so once.
        config: the model's configuration, for `model_flops_per_token`; None for the model's own `config`. Needed for MFU only.

    Metrics: `speed/tokens_per_second`, `speed/samples_per_second`, `speed/step_seconds`, `speed/mfu`, means over the steps since
    the last log; `speed/peak_flops` once the peak has grown; `speed/share.<phase>` of the logged step, with `other` for what is no phase
    (callbacks, copies to the device); `progress/tokens`, `progress/samples`, from the run's first step.
    """

    def __init__(self, peak_flops: float | None = None, config: ModelConfig | None = None):
        self.peak_flops, self.config = peak_flops, config
        self.tokens = self.samples = 0
        self.grown = False
        self.by_length: dict[int, int] = {}  # seq -> FLOPs per token
        self.begin_window()

    def begin_window(self) -> None:
        """Reset the sums since the last log."""
        self.steps = self.window_tokens = self.window_samples = self.flops = 0
        self.seconds = self.step_seconds = 0.0

    def on_start(self, engine: RunState) -> None:
        if self.peak_flops is None:
            return
        self.config = self.config or getattr(engine.strategy.module, "config", None)
        if not isinstance(self.config, ModelConfig):
            raise CourseError("MFU needs the FLOPs per token: give Throughput the model's `config`, or leave peak_flops out.")
        model_flops_per_token(self.config, 1)  # refuses an encoder-decoder now rather than after the first steps

    def on_batch(self, engine: RunState, microbatches: Sequence[Batch]) -> None:
        self.began = time.perf_counter()

    def on_step(self, engine: RunState) -> None:
        self.steps += 1
        flops = 0
        self.step_seconds = engine.timings.get("data", 0.0) + time.perf_counter() - self.began
        self.seconds += self.step_seconds
        for batch in engine.microbatches:
            shares = engine.strategy.data_size  # each rank reads as much as this one
            tokens, (samples, seq) = shares * tokens_of(batch), batch["input_ids"].shape
            self.window_tokens += tokens
            self.window_samples += shares * samples
            self.tokens += tokens
            self.samples += shares * samples
            if self.peak_flops is not None:
                flops += tokens * self.flops_per_token(seq)
        self.flops += flops
        if self.peak_flops is not None:
            self.grow_peak(engine, flops / self.step_seconds / engine.strategy.size)

    def grow_peak(self, engine: RunState, reached: float) -> None:
        """Take the FLOP/s that a step reached on each device for the peak, where they are more."""
        if reached <= self.peak_flops:
            return
        if not self.grown:
            engine.console.print(
                f"Step {engine.step} reached {reached / self.peak_flops:.0%} of the peak of {self.peak_flops:.3g} FLOP/s, so the peak is "
                "too low and grows to what is reached: MFU of earlier steps was shown too high.", highlight=False, soft_wrap=True,
            )  # fmt: skip
        self.peak_flops, self.grown = reached, True

    def flops_per_token(self, seq: int) -> int:
        if seq not in self.by_length:
            self.by_length[seq] = model_flops_per_token(self.config, seq)
        return self.by_length[seq]

    def measure(self, engine: RunState) -> Metrics:
        metrics: Metrics = {"progress/tokens": self.tokens, "progress/samples": self.samples}
        if self.steps:
            rate = self.window_tokens / self.seconds
            metrics["speed/tokens_per_second"] = rate
            metrics["speed/samples_per_second"] = self.window_samples / self.seconds
            metrics["speed/step_seconds"] = self.seconds / self.steps
            phases = engine.timings | {"other": self.step_seconds - sum(engine.timings.values())}
            metrics |= {f"speed/share.{phase}": spent / self.step_seconds for phase, spent in phases.items()}
            if self.peak_flops is not None:
                utilisation = mfu(self.flops / self.window_tokens, rate, self.peak_flops * engine.strategy.size)
                metrics["speed/mfu"] = min(1.0, utilisation)  # the peak is at least the fastest step's: more is rounding
                metrics |= {"speed/peak_flops": self.peak_flops} if self.grown else {}
        self.begin_window()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens, self.samples = state["tokens"], state["samples"]


def tokens_of(batch: Batch) -> int:
    """The number of tokens in a batch, on both sides of an encoder-decoder."""
    return sum(batch[name].numel() for name in ("input_ids", "decoder_input_ids") if name in batch)


class Resources(Callback):
    """Measures memory and utilisation of this process, and of its GPU where it has one.

    Metrics: `memory/resident_gib`; `cpu/utilisation`, the share of the machine's cores that this process kept busy since the last
    log; with a GPU `memory/gpu_allocated_gib` (tensors), `memory/gpu_reserved_gib` (reserved by torch's allocator),
    `memory/gpu_peak_gib` (the peak of allocated tensors since the last log) and, where NVIDIA's library is installed, `gpu/utilisation`.
    """

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.has_utilisation = False
        self.cpu_seconds = self.clock_seconds = 0.0  # at the last measurement

    def on_start(self, engine: RunState) -> None:
        self.cpu_seconds, self.clock_seconds = time.process_time(), time.perf_counter()
        if engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(engine.device)
            self.has_utilisation = has_gpu_utilisation(engine.device)

    def measure(self, engine: RunState) -> Metrics:
        cpu_before, clock_before = self.cpu_seconds, self.clock_seconds
        self.cpu_seconds, self.clock_seconds = time.process_time(), time.perf_counter()  # not psutil's share: it ticks 100 times a second
        metrics = {
            "memory/resident_gib": self.process.memory_info().rss / GIB,
            "cpu/utilisation": (self.cpu_seconds - cpu_before) / (self.clock_seconds - clock_before) / (os.cpu_count() or 1),
        }
        return metrics | self.gpu_memory(engine.device) if engine.device.type == "cuda" else metrics

    def gpu_memory(self, device: torch.device) -> Metrics:
        metrics = {
            "memory/gpu_allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "memory/gpu_reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "memory/gpu_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
        }
        torch.cuda.reset_peak_memory_stats(device)
        if self.has_utilisation:
            metrics["gpu/utilisation"] = torch.cuda.utilization(device) / 100
        return metrics


def has_gpu_utilisation(device: torch.device) -> bool:
    """Whether torch can read the GPU's utilisation: it needs the package nvidia-ml-py and a driver that answers."""
    try:
        torch.cuda.utilization(device)
    except Exception:  # the library's own errors (in a container, on a part of a GPU) have no class that can be named without it
        return False
    return True
