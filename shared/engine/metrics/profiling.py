"""Chapter 04. Profiler traces of a few chosen steps, with torch.profiler: every operation with its start and its duration.

A profiler slows a step down, so it runs for a few steps only. The trace opens in Perfetto (https://ui.perfetto.dev, a page that keeps
the file on your machine) or in chrome://tracing.

Left out on purpose: memory profiles, and GPU counters, for which there are NVIDIA's own tools.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback, RunState
from shared.output_files import writing
from shared.totals import Batch

ROWS = 10


class Profile(Callback):
    """Profiles the steps first_step .. first_step + steps - 1, each from its batch to the end of its update.

    Writes `profile/steps-AAAAAAAA-BBBBBBBB.json`, the trace, and a `.txt` with the ten operations of the largest self time.

    Args:
        first_step: the first profiled step, from 1. Skip a few: the first steps are slower than the others.
        steps: how many steps are profiled.
    """

    def __init__(self, first_step: int, steps: int = 3):
        if first_step < 1 or steps < 1:
            raise CourseError(f"first_step is {first_step} and steps {steps}: give at least 1 of each.")
        self.first_step, self.last_step = first_step, first_step + steps - 1
        self.profiler: profile | None = None

    def on_start(self, engine: RunState) -> None:
        if self.last_step > engine.steps:
            raise CourseError(f"Steps {self.first_step} to {self.last_step} are to be profiled, but the run ends with step {engine.steps}.")

    def on_batch(self, engine: RunState, microbatches: Sequence[Batch]) -> None:
        if self.profiler is None and self.first_step <= engine.step + 1 <= self.last_step:
            self.began = engine.step + 1
            gpu = [ProfilerActivity.CUDA] if engine.device.type == "cuda" else []
            self.profiler = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
            self.profiler.start()

    def on_step(self, engine: RunState) -> None:
        if self.profiler is None:
            return
        if engine.step < self.last_step:
            self.profiler.step()  # marks the end of a step in the trace
            return
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        self.profiler.stop()
        told = f"Profile of steps {self.began} to {engine.step}: "
        try:
            told += str(self.write(engine.output / "profile", engine.device.type == "cuda"))
        except CourseError as error:  # the run continues without its profile
            told += str(error)
        self.profiler = None
        engine.console.print(told, markup=False, highlight=False, soft_wrap=True)

    def write(self, folder: Path, gpu: bool) -> Path:
        """Write the trace and the table, and return the trace's path."""
        path = folder / f"steps-{self.began:08d}-{self.last_step:08d}.json"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(path))
            key = "self_cuda_time_total" if gpu else "self_cpu_time_total"
            table = self.profiler.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=48)
            path.with_suffix(".txt").write_text(table, encoding="utf-8")
        return path

    def on_end(self, engine: RunState) -> None:
        if self.profiler is not None:  # the run ends within the chosen steps
            self.profiler.stop()
            self.profiler = None
