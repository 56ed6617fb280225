"""Chapter 12. Final evaluation of a run: its loss on all that is held out, what its mode shows of the model, what it cost."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from shared.engine.debug.anomalies import put_weights
from shared.devices import on_device
from shared.engine.trackers.jsonl import read_damaged
from shared.finetune.base import merged_weights
from shared.finetune.peft_format import save_adapter
from shared.loop import evaluate
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.output_files import write_atomically, writing
from shared.parallel.config import layout_name
from shared.parallel.pipeline.balance import stage_blocks
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.pipeline.simulate import make_timeline
from shared.parallel.planning.expert_costs import expert_exchanges
from shared.parallel.planning.pipeline_costs import held_parts, step_exchanges
from shared.trainer.callbacks import peak_memory
from shared.trainer.comparison import compare_with_single_process, known_causes
from shared.trainer.config import TrainerConfig
from shared.trainer import provenance
from shared.trainer.elastic import eras
from shared.trainer.extending import parameter_count
from shared.trainer.planner.memory import step_sizes
from shared.trainer.initial_weights import with_adapter
from shared.trainer.records.listing import format_value
from shared.trainer.report import Results, write_report
from shared.trainer.retuning import changes_of
from shared.trainer.stopwatch import IN_ALL

if TYPE_CHECKING:
    from shared.trainer.run import Run

GIB = 2**30


def evaluate_and_report(run: "Run", console: Console) -> Results | None:
    """Evaluate the trained model, write the report and show the summary. Every rank calls it; rank 0 writes and returns the results."""
    config, engine = run.config, run.engine
    began = time.perf_counter()
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
    """The batches, with their numbers shown in a terminal."""
    for number, batch in enumerate(batches, 1):
        status.update(f"Report: held-out batch {number} of {len(batches)}")
        yield batch


def export(run: "Run") -> None:
    """Write the trained model, with its tokenizer, into the folder `model`: where it has an adapter, merged, and the adapter alone into
    `adapter`. Virtual tokens are part of no weight, so there the adapter is all. Every rank sends what it holds; rank 0 writes."""
    output, strategy, config = run.config.engine.output, run.strategy, run.config
    weights, longest = strategy.weights(), config.model.max_position_embeddings
    weights = replace(weights, like={name: like for name, like in weights.like.items() if name not in run.mode.left_out})
    if config.adapter:
        folder, fingerprint = output / "adapter", provenance.saved_start(output) if strategy.rank == 0 else None
        with writing(folder):
            save_adapter(strategy.module, folder, weights=weights, base=str(run.start.folder), fingerprint=fingerprint)
            if strategy.rank == 0:
                run.mode.save_beside(folder, longest)
        if config.adapter.kind != "lora":
            return
        weights = merged_weights(strategy.module, weights)
    with writing(output / "model"):
        save_pretrained(strategy.module, output / "model", token_ids=token_ids(run), weights=weights)
        if strategy.rank == 0:
            run.mode.save_beside(output / "model", longest)


def token_ids(run: "Run") -> dict[str, Any]:
    """The special tokens of an exported model: those of the model that it began as, and what ends a text now."""
    rows, ends = run.config.model.vocab_size, run.mode.end_ids
    known = {name: number for name, number in run.strategy.module.token_ids.items() if isinstance(number, int) and 0 <= number < rows}
    padding = {} if run.mode.pad_id is None else {"pad_token_id": run.mode.pad_id}
    return known | {"eos_token_id": ends[0] if len(ends) == 1 else ends} | padding


def whole_model(run: "Run") -> TransformerModel | None:
    """The trained model on rank 0, whole; None on the others, which all take part in putting it together."""
    strategy = run.strategy
    if strategy.size == 1:
        return run.engine.model
    weights = strategy.full_weights()
    if strategy.rank:
        return None
    model = run.mode.shaped(with_adapter(TransformerModel(run.config.model, MIXTURE), run.config.adapter, run.config.seed))
    model = model.to(run.engine.device)
    put_weights(model, weights)
    return model


def layout_summary(run: "Run", memory: list[int]) -> dict[str, Any]:
    """The layout, the communication of a step, and the peak memory of each rank."""
    if len(memory) == 1:
        return {}
    peaks = ", ".join(f"{peak / GIB:.3f}" for peak in memory)
    layout = f"{layout_name(run.config.parallel)} ({run.config.parallel.backend})"
    found = stages_summary(run.config) | bubble_summary(run.config) | run.traffic.per_step() | predicted_traffic(run.config)
    return {"layout": layout} | found | {"peak memory by rank, GiB": peaks}


def stages_summary(config: TrainerConfig) -> dict[str, str]:
    """Which blocks each stage of a pipeline has, counted from 0."""
    if config.parallel.pipeline_parallel == 1:
        return {}
    ends = [(blocks[0], blocks[-1]) for blocks in stage_blocks(config.model, config.parallel)]
    return {"blocks by stage": ", ".join(f"{first} to {last}" if first < last else f"{first}" for first, last in ends)}


def bubble_summary(config: TrainerConfig) -> dict[str, Any]:
    """The bubble of a pipeline's schedule, of stages that all take equally long and messages that take no time."""
    parallel = config.parallel
    if parallel.pipeline_parallel == 1:
        return {}
    microbatches = step_sizes(config).microbatches
    schedule = make_schedule(parallel.pipeline_schedule, parallel.pipeline_parallel, microbatches, parallel.pipeline_chunks)
    bubble = make_timeline(schedule, microbatches, parallel.pipeline_chunks).bubble()
    return {f"bubble of {parallel.pipeline_schedule}, of the time computed": bubble}


def pipeline_line(config: TrainerConfig) -> str:
    """What a run says of its pipeline when it begins, and what would shorten a long bubble."""
    parallel, rows, microbatches = config.parallel, config.data.micro_batch_size, step_sizes(config).microbatches
    [bubble] = bubble_summary(config).values()
    step = f"{microbatches} micro-batch{'es' * (microbatches > 1)} in a step"
    said = f"Schedule {parallel.pipeline_schedule}, {step}: ranks wait {bubble:.0%} of the time that they compute, by simulation."
    shorter = f" data.micro_batch_size is {rows}: a smaller one makes more micro-batches, and ranks wait less."
    return said + shorter * (microbatches < 4 * parallel.pipeline_parallel and rows > 1)


def predicted_traffic(config: TrainerConfig) -> dict[str, str]:
    """What tensor, pipeline and expert parallelism should send in a step by formula, on the first stage, all experts equally loaded;
    in the words of `Traffic.per_step`."""
    model, parallel, step = config.model, config.parallel, step_sizes(config)
    if parallel.backend == "torch":
        return {}  # it is not traced
    calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    exchanges = step_exchanges(model, parallel, config.optimizer, step)
    for each in [*exchanges, *expert_exchanges(model, parallel, step, held_parts(model, parallel)[0])]:
        calls[each.operation, each.axis] += each.calls
        sizes[each.operation, each.axis] += each.calls * each.bytes
    return {
        f"{operation} over {axis}, by formula": f"{count:.0f} calls, {sizes[operation, axis] / 1e6:.2f} MB"
        for (operation, axis), count in sorted(calls.items())
    }


def costs(run: "Run", metrics: dict[int, dict[str, float]], report_seconds: float) -> dict[str, Any]:
    """What the run took. Medians over the logs, which a moment's pause does not move."""

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
