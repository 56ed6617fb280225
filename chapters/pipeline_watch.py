"""What the ranks of a pipeline did in a run: the actions of a step with their times, the activations that they kept, and the bubble.

The core is imported within the functions, after a script's `launch` has chosen whose exercises it runs with.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.table import Table

    from shared.parallel.config import ParallelConfig
    from shared.parallel.pipeline.schedules import Action
    from shared.parallel.pipeline.simulate import Span
    from shared.parallel.strategy import ParallelStrategy


class PipelineWatch:
    """Watches one rank of a pipeline.

    Args:
        strategy: of the run.
        microbatches: of a step.
    """

    def __init__(self, strategy: "ParallelStrategy", microbatches: int):
        from shared.parallel.pipeline.runner import PipelineRunner

        self.kept = KeptBytes(strategy.module)
        self.runner = next((engine for engine in strategy.engines if type(engine) is PipelineRunner), None)
        if self.runner is not None:  # PyTorch's pipeline, another class, says nothing of its actions
            self.actions = Stamped(self.runner.schedule_for(microbatches)[self.runner.pp.rank])
            self.runner.schedules[microbatches][self.runner.pp.rank] = self.actions
            self.runner.links.receive = self.actions.after(self.runner.links.receive)

    def measured_bytes(self) -> AbstractContextManager:
        """Within it, what autograd keeps for backward passes is counted, which takes time."""
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: Kept(self.kept, tensor), lambda kept: kept.tensor)

    def told(self) -> dict[str, Any]:
        """Of this rank, for JSON: bytes of activations at the most while they were measured; the most graphs at a time, and the actions
        with their seconds, of the last step."""
        found: dict[str, Any] = {"activations": self.kept.most}
        if self.runner is not None:
            times = self.actions.times  # of the step: going through the actions begins another list
            spans = [[*action, *seconds] for action, seconds in zip(self.actions, times, strict=True)]
            found |= {"pipeline rank": self.runner.pp.rank, "graphs": self.runner.most, "actions": spans}
        return found


class Stamped(list):
    """A rank's actions, which notes when each of them began and ended. One begins when what it waited for has arrived.

    times: (begin, end) of each action when the list was last gone through, in seconds of the clock that all processes of a machine share.
    """

    def __iter__(self) -> Iterator["Action"]:
        self.times: list[tuple[float, float]] = []
        for action in super().__iter__():
            self.begin = time.perf_counter()
            yield action
            self.times.append((self.begin, time.perf_counter()))

    def after(self, receive: Any) -> Any:
        def run(*arguments: Any) -> None:
            receive(*arguments)
            self.begin = time.perf_counter()

        return run


class KeptBytes:
    """Counts the memory of tensors that autograd keeps: each once, however often it is kept, and weights not at all."""

    def __init__(self, model: torch.nn.Module):
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.users: dict[int, int] = {}
        self.now = self.most = 0

    def add(self, tensor: Tensor, users: int) -> None:
        memory = tensor.untyped_storage()
        before = self.users.get(memory.data_ptr(), 0)
        self.users[memory.data_ptr()] = before + users
        if memory.data_ptr() not in self.weights and 0 in (before, before + users):
            self.now += users * memory.nbytes()
            self.most = max(self.most, self.now)


class Kept:
    """A tensor that autograd keeps, counted until autograd drops it."""

    def __init__(self, count: KeptBytes, tensor: Tensor):
        self.count, self.tensor = count, tensor
        count.add(tensor, 1)

    def __del__(self):
        self.count.add(self.tensor, -1)


def report(ranks: Sequence[dict[str, Any]], layout: "ParallelConfig", microbatches: int, path: Path) -> tuple[list[Any], dict[str, Any]]:
    """What to print of a pipeline, and its bubbles; the timeline is drawn into a file.

    Args:
        ranks: what `PipelineWatch.told` said on each rank of the world.
        microbatches: of a step.
        path: of the figure.
    """
    from shared.parallel.pipeline.schedules import make_schedule
    from shared.parallel.pipeline.simulate import Span, make_timeline, simulate

    stage_ranks, chunks, name = layout.pipeline_parallel, layout.pipeline_chunks, layout.pipeline_schedule
    schedule = make_schedule(name, stage_ranks, microbatches, chunks)
    even = make_timeline(schedule, microbatches, chunks)
    bubbles = formula(name, stage_ranks, microbatches, chunks)
    bubbles["simulated, stages that all take equally long"] = bubble(even.rows)
    pipeline = [ranks[first] for first in range(0, len(ranks), len(ranks) // stage_ranks)]  # of the ranks of each stage, the first
    if measured := rows_of(pipeline):
        seconds = seconds_of(measured)
        again = simulate(schedule, chunks, lambda action, stage: seconds[action.kind, stage])
        spans = [[Span(action, *times) for action, times in zip(*both, strict=True)] for both in zip(schedule, again, strict=True)]
        bubbles["simulated, with the median times of the last step"] = bubble(spans)
        bubbles["measured in the last step"] = bubble(measured)
    draw(even.rows, measured, f"{name}, {microbatches} micro-batches", path)
    stages = f"{stage_ranks} ranks" + (f" of {chunks} stages each" if chunks > 1 else "")
    said = [f"Pipeline: {stages}, schedule {name}, {microbatches} micro-batches in a step.", "Bubble, of the time in which ranks compute:"]
    said += [f"  {share:6.1%}  {which}" for which, share in bubbles.items()]
    if measured and len(ranks) > (cores := os.cpu_count() or 1):
        said.append(f"  {len(ranks)} ranks share the {cores} cores of this machine: what was measured says little about as many devices.")
    return [*said, kept_table(pipeline, measured, even.most)], bubbles


def formula(name: str, ranks: int, microbatches: int, chunks: int) -> dict[str, float]:
    """The bubble by formula, where there is one (see `bubble_fraction`; Qi et al. 2023, table 1, for zero bubble)."""
    from shared.parallel.pipeline.schedules import bubble_fraction

    if name != "zero_bubble":
        return {"by formula: (p - 1) / (v m)": bubble_fraction(ranks, microbatches, chunks)}
    return {"by formula: (p - 1) / (3 m)": (ranks - 1) / (3 * microbatches)} if microbatches >= ranks else {}


def rows_of(pipeline: Sequence[dict[str, Any]]) -> list[list["Span"]]:
    """The measured spans of each rank, from the beginning of the step; empty where nobody measured."""
    from shared.parallel.pipeline.schedules import Action
    from shared.parallel.pipeline.simulate import Span

    if any("actions" not in each for each in pipeline):
        return []
    first = min(each["actions"][0][3] for each in pipeline)
    return [[Span(Action(*action), begin - first, end - first) for *action, begin, end in each["actions"]] for each in pipeline]


def seconds_of(rows: Sequence[Sequence["Span"]]) -> dict[tuple[str, int], float]:
    """(kind, stage) -> the median of what such actions took."""
    found: dict[tuple[str, int], list[float]] = {}
    for rank, row in enumerate(rows):
        for action, begin, end in row:
            found.setdefault((action.kind, action.chunk * len(rows) + rank), []).append(end - begin)
    return {key: median(seconds) for key, seconds in found.items()}


def bubble(rows: Sequence[Sequence["Span"]]) -> float:
    """The time in which ranks wait, as a fraction of that in which they compute, over all of them."""
    busy = sum(end - begin for row in rows for _, begin, end in row)
    return len(rows) * max(row[-1].end for row in rows) / busy - 1


def kept_table(pipeline: Sequence[dict[str, Any]], rows: Sequence[Sequence["Span"]], most: Sequence[int]) -> "Table":
    from rich.table import Table

    table = Table("pipeline rank", "forward passes kept", "by the schedule", "MB of activations", "ms computed", "ms waited")
    for number, each in enumerate(pipeline):
        times = ["", ""]
        if rows:
            busy = sum(end - begin for _, begin, end in rows[number])
            times = [f"{1e3 * value:.0f}" for value in (busy, max(row[-1].end for row in rows) - busy)]
        table.add_row(str(number), str(each.get("graphs", "")), str(most[number]), f"{each['activations'] / 1e6:.2f}", *times)
    return table


def draw(even: Sequence[Sequence["Span"]], measured: Sequence[Sequence["Span"]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    drawings = 1 + bool(measured)
    drawing = Figure(figsize=(10.0, drawings * (0.9 + 0.4 * len(even))))
    axes = drawing.subplots(drawings, 1, squeeze=False)[:, 0]
    figures.draw_pipeline(axes[0], even, width=8.5)
    axes[0].set_title(f"{title}: simulated, stages that all take equally long")
    if measured:
        in_ms = [[span._replace(begin=1e3 * span.begin, end=1e3 * span.end) for span in row] for row in measured]
        figures.draw_pipeline(axes[1], in_ms, "milliseconds", 8.5)
        axes[1].set_title("measured in the last step")
    drawing.savefig(path)
