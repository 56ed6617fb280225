"""Chapter 12. What a run costs: callbacks for training time, overhead, peak memory and communication, and a stopwatch for its start."""

import resource
import sys
import time
from collections import Counter
from typing import Any

import torch

from shared.engine.callbacks import Callback, Metrics, RunState
from shared.parallel.comm.trace import CommTrace
from shared.totals import bits_per_byte

IN_ALL = "seconds in all"  # the sum of all parts: leave it out where parts are added up


class Stopwatch:
    """Seconds of consecutive parts without a gap.

    Args:
        began: when the first part began, on the clock of `time.perf_counter`; None for now.

    Attributes:
        seconds: part -> seconds, in order.
    """

    def __init__(self, began: float | None = None):
        self.began = self.mark = time.perf_counter() if began is None else began
        self.seconds: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """End a part here; the next one begins."""
        before, self.mark = self.mark, time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + self.mark - before

    def add(self, parts: dict[str, float], others: float) -> None:
        """Take in the parts of an earlier process, and `others`: its seconds that are counted elsewhere."""
        for part, seconds in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.began -= sum(parts.values()) + others

    def total(self) -> float:
        """Seconds since the first part began, and of earlier processes."""
        return time.perf_counter() - self.began


def process_began() -> float:
    """The start of this process, on the clock of `time.perf_counter`."""
    import psutil

    return time.perf_counter() - (time.time() - psutil.Process().create_time())


class BitsPerByte(Callback):
    """Adds `validation/bits_per_byte`: unlike the loss per token, it compares models with different tokenizers.

    Args:
        byte_count: bytes of text that the evaluation's predictions cover.
    """

    every_rank = True

    def __init__(self, byte_count: int):
        self.byte_count = byte_count

    def on_evaluate(self, engine: RunState, metrics: Metrics) -> None:
        metrics["validation/bits_per_byte"] = bits_per_byte(engine.validation.loss_sum, self.byte_count)


class Costs(Callback):
    """Seconds of a run's starts, of its training steps and of overhead (data, evaluation, saving), and the peak memory, over all
    parts of the run, as rank 0 saved them. What a part did after its last checkpoint is lost with it, and is not counted.

    Args:
        watch: this start's seconds, to which earlier starts' are added.

    starts: how often the run was started. peak_memory: bytes. peak_here: of this process alone, which may be another rank than the one
    that saved, in another layout.
    """

    every_rank = True

    def __init__(self, watch: Stopwatch):
        self.watch, self.starts = watch, 1
        self.training = self.overhead = 0.0
        self.peak_memory = self.peak_here = 0
        self.mark: float | None = None  # where the time that is not counted yet began

    def on_start(self, engine: RunState) -> None:
        if self.mark is None:
            self.mark = time.perf_counter()
        self.overhead += self.since_mark()  # of opening the data and the checkpoint

    def on_batch(self, engine: RunState, microbatches: Any) -> None:
        self.overhead += self.since_mark()

    def on_step(self, engine: RunState) -> None:
        self.training += self.since_mark()
        self.peak_here = max(self.peak_here, peak_memory(engine.device))
        self.peak_memory = max(self.peak_memory, self.peak_here)

    def on_end(self, engine: RunState) -> None:
        self.overhead += self.since_mark()
        self.mark = None

    def since_mark(self) -> float:
        before, self.mark = self.mark, time.perf_counter()
        return self.mark - before

    def state_dict(self) -> dict[str, Any]:
        start = {"starts": self.starts, "start": dict(self.watch.seconds)}
        return {"training": self.training, "overhead": self.overhead, "peak_memory": self.peak_memory} | start

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.training, self.overhead, self.peak_memory = state["training"], state["overhead"], state["peak_memory"]
        before = state.get("start", {})  # a checkpoint of an older trainer has none
        self.starts += state.get("starts", 1)
        self.watch.add(before, self.training + self.overhead)


class Traffic(Callback):
    """Communication of this rank's training steps: calls and bytes by operation and axis, since the process began."""

    every_rank = True

    def __init__(self, trace: CommTrace):
        self.trace = trace
        self.steps, self.calls, self.bytes = 0, Counter(), Counter()
        self.before: tuple[Counter, Counter] = (Counter(), Counter())

    def on_batch(self, engine: RunState, microbatches: Any) -> None:
        self.before = self.trace.calls(), self.trace.bytes()

    def on_step(self, engine: RunState) -> None:
        calls, sizes = self.before
        self.steps += 1
        self.calls += self.trace.calls() - calls
        self.bytes += self.trace.bytes() - sizes

    def per_step(self) -> dict[str, str]:
        """Operation and axis -> calls and megabytes of one step, as text, of what runs in at least every other step."""
        return {
            f"{operation} over {axis}, a step": f"{count / self.steps:.0f} calls, {self.bytes[operation, axis] / self.steps / 1e6:.2f} MB"
            for (operation, axis), count in sorted(self.calls.items())
            if round(count / self.steps)
        }


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of the GPU's memory where it trains on one, else of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
