"""Chapter 12. Final evaluation of a run: its loss on all that is held out, what its mode shows of the model, what it cost.

A distributed run is compared with the same run in a single process, where that is there: what differs should be rounding. Loss curves that
look alike prove nothing, so the weights are compared as well, tensor by tensor.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.status import Status
from rich.table import Table
from safetensors import SafetensorError, safe_open

from shared.course.errors import CourseError
from shared.devices import on_device
from shared.engine.trackers.jsonl import read_damaged
from shared.loop import evaluate
from shared.model.block import Stack
from shared.output_files import remove_left_over, write_atomically
from shared.parallel.config import layout_name
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.costs import IN_ALL, peak_memory
from shared.trainer.export import export, whole_model
from shared.trainer.mode import Run
from shared.trainer.models import parameter_count
from shared.trainer.planner.layout import bubble_summary, predicted_traffic, stages_summary
from shared.trainer.records.history import changes_of, eras
from shared.trainer.reports.figures import Results, write_report
from shared.trainer.reports.listing import format_value

GIB = 2**30


def evaluate_and_report(run: Run, console: Console) -> Results | None:
    """Evaluate the trained model, write the report and show the summary. Every rank calls it; rank 0 writes and returns the results."""
    config, engine = run.config, run.engine
    began = time.perf_counter()
    if run.strategy.rank == 0:
        remove_left_over(config.engine.output)  # before room is needed for what is whole
    held_out = run.mode.all_held_out(config, run.strategy)
    text = "" if held_out is None else f"the held-out rows ({len(held_out)} batches), "
    console.print(f"Trained. Now the report: {text}answers, figures.", highlight=False)
    with console.status("") as status:
        batches = (on_device(batch, engine.device) for batch in counted(held_out, status)) if held_out is not None else ()
        totals = None if held_out is None else run.strategy.sum(evaluate(engine.model, batches, engine.objective))
        memory = run.strategy.mesh.world.gather_objects(run.costs.peak_here or peak_memory(engine.device))
        status.update("Report: saving the model, and asking it for answers")
        if config.report.export:
            export(run)
        model = whole_model(run)
        if model is None:
            return None
        judged = run.mode.judge(run, model, totals)
    metrics, damage = read_damaged(config.engine.output / "metrics.jsonl")
    if damage:
        console.print(f"{config.engine.output / 'metrics.jsonl'} is damaged ({damage}): the report shows the rest.", markup=False)
    summary = {
        **judged.summary,
        **costs(run, metrics, time.perf_counter() - began),
        **attention_summary(run),
        **layout_summary(run, memory),
        **(compared := compare_with_single_process(config)),
        **(known_causes(config) if compared else {}),
    }
    results = Results(metrics, replace(judged, summary=summary), config.engine.output / "report.html", eras(config.engine.output))
    results.changes = changes_of(config.engine.output)
    write_report(config, results)
    keep(results, config.engine.output / "results.json")
    show(results, console)
    return results


def counted(batches: Any, status: Status) -> Iterator[Any]:
    """Yield the batches, with progress in a terminal."""
    for number, batch in enumerate(batches, 1):
        status.update(f"Report: held-out batch {number} of {len(batches)}")
        yield batch


def layout_summary(run: Run, memory: list[int]) -> dict[str, Any]:
    """The layout, the communication of a step, and the peak memory of each rank."""
    if len(memory) == 1:
        return {}
    peaks = ", ".join(f"{peak / GIB:.3f}" for peak in memory)
    layout = f"{layout_name(run.config.parallel)} ({run.config.parallel.backend})"
    found = stages_summary(run.config) | bubble_summary(run.config) | run.traffic.per_step() | predicted_traffic(run.config)
    return {"layout": layout} | found | {"peak memory by rank, GiB": peaks}


def costs(run: Run, metrics: dict[int, dict[str, float]], report_seconds: float) -> dict[str, Any]:
    """Costs of the run. Speeds are medians over the logs, which a short pause does not change."""

    def median(name: str) -> float | None:
        values = sorted(row[name] for row in metrics.values() if name in row)
        return values[len(values) // 2] if values else None

    peaks = [row["speed/peak_flops"] for row in metrics.values() if "speed/peak_flops" in row]
    return {
        "parameters": parameter_count(run.config),
        "training tokens": max((int(row.get("progress/tokens", 0)) for row in metrics.values()), default=0),
        "tokens per second": median("speed/tokens_per_second"),
        "model FLOPs utilisation": median("speed/mfu"),
        **({"peak FLOP/s, which steps raised": max(peaks)} if peaks else {}),
        "peak memory, GiB": run.costs.peak_memory / GIB,
        **run.watch.seconds,
        "seconds in training steps": run.costs.training,
        "seconds for data, evaluation and saving": run.costs.overhead,
        "seconds for this report": report_seconds,
        IN_ALL: run.watch.total(),
        **({"starts of the run, whose seconds are added up": run.costs.starts} if run.costs.starts > 1 else {}),
    }


def attention_summary(run: Run) -> dict[str, str]:
    """Which kernels attention took on this rank, most often first, and in how many forward passes of training."""
    stacks = [module for module in run.strategy.module.modules() if isinstance(module, Stack)]
    found = sum((stack.attended for stack in stacks), Counter())
    return {"attention": ", ".join(f"{name} ({count})" for name, count in found.most_common())} if found else {}


def keep(results: Results, path: Path) -> None:
    judged = results.judged
    record = {"summary": judged.summary, "samples": judged.samples, "completions": [gap._asdict() for gap in judged.completions]}
    if judged.answered:
        record |= {"accuracy": judged.accuracy(), "answered": [each._asdict() for each in judged.answered], "example": judged.example}
    if judged.preferred:
        record |= {"wins": judged.wins(), "preferred": [each._asdict() for each in judged.preferred]}
    write_atomically(path, json.dumps(record, indent=1).encode())


def show(results: Results, console: Console) -> None:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in results.judged.summary.items():
        table.add_row(name, format_value(name, value))
    console.print(table)
    console.print(f"The report: {results.report}", markup=False, highlight=False, soft_wrap=True)


def compare_with_single_process(config: TrainerConfig) -> dict[str, Any]:
    """Differences in losses and weights from the single-process run, if a finished one lies beside this run's folder.

    `make run LAYOUT=dp2` writes to `runs/laptop-dp2`, and looks for `runs/laptop`.
    """
    output, name = config.engine.output, layout_name(config.parallel)
    other = output.with_name(output.name.removesuffix(f"-{config.parallel.backend}").removesuffix(f"-{name}"))
    if config.parallel.ranks == 1 or other == output or not same_run(other, config):
        return {}
    (here, _), (there, _) = (read_damaged(folder / "metrics.jsonl") for folder in (output, other))  # what can be compared is
    found = {}
    for metric in ("train/loss", "validation/loss"):
        pairs = [(here[step][metric], there[step][metric]) for step in here if metric in here[step] and metric in there.get(step, {})]
        if pairs:
            found[f"largest difference in {metric} to {other}"] = largest(abs(mine - theirs) for mine, theirs in pairs)
    if config.report.export and (other / "model").is_dir():
        try:
            found[f"largest difference in weights to {other}, relative"] = largest_difference(output / "model", other / "model")
        except (OSError, SafetensorError):  # another run's damage is no reason to end this one without its report
            found["weights"] = f"not compared: the model in {other / 'model'} cannot be read"
    return found


def known_causes(config: TrainerConfig) -> dict[str, str]:
    """Reasons other than rounding why this run may differ from the single-process run. With tensor parallelism alone, all
    ranks sample the same random numbers, except for their own heads and positions."""
    parallel, model = config.parallel, config.model
    cut = parallel.ranks > parallel.tensor_parallel or parallel.sequence_parallel or model.attention_dropout
    if (model.hidden_dropout or model.attention_dropout) and parallel.ranks > 1 and cut:
        return {"dropout": "its draws differ by layout, so losses and weights do as well"}
    return {}


def same_run(folder: Path, config: TrainerConfig) -> bool:
    """Whether a folder holds a finished run of the same configuration, what changes nothing but rounding aside, and with the same history:
    one that was retuned on its way is another run."""
    if not ((folder / provenance.CONFIG).is_file() and (folder / "results.json").is_file()):
        return False
    try:
        before = provenance.read_record(folder / provenance.CONFIG) | {"start": provenance.saved_start(folder)}
        now = provenance.plain(config) | {"start": provenance.saved_start(config.engine.output)}
    except CourseError:
        return False
    mine, theirs = ([[change.step, change.settings] for change in changes_of(each)] for each in (config.engine.output, folder))
    return not provenance.differences(before, now) and mine == theirs


def largest_difference(mine: Path, theirs: Path) -> float:
    """The largest relative difference |a - b| / |b| (L2 norms) over the tensors of two exported models."""
    differences = []
    for path in sorted(mine.glob("*.safetensors")):
        with safe_open(path, "pt") as here, safe_open(theirs / path.name, "pt") as there:
            for name in here.keys():
                other = there.get_tensor(name).double()
                difference = (here.get_tensor(name).double() - other).norm()
                differences.append((difference / other.norm().clamp(min=torch.finfo(other.dtype).tiny)).item())
    return largest(differences)


def largest(values: Iterable[float]) -> float:
    """The largest number, or NaN if there is one: Python's `max` would skip it."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()
