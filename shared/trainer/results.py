"""Chapter 12. Final evaluation of a run: its loss on all held-out files, texts it writes, gaps it fills, what it cost."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from shared.data.completion import continue_ids, fill_gap, find_gaps
from shared.engine.debug.anomalies import put_weights
from shared.devices import on_device
from shared.engine.trackers.jsonl import read_damaged
from shared.loop import evaluate
from shared.model.counting import parameter_counts
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
from shared.totals import bits_per_byte
from shared.trainer.callbacks import peak_memory
from shared.trainer.comparison import compare_with_single_process, known_causes
from shared.trainer.config import TrainerConfig
from shared.trainer.fitting import step_sizes
from shared.trainer.loaders import evaluation_loader
from shared.trainer.report import Results, format_value, write_report

if TYPE_CHECKING:
    from shared.trainer.pretrain import Run

GIB = 2**30


def evaluate_and_report(run: "Run", console: Console) -> Results | None:
    """Evaluate the trained model, write the report and show the summary. Every rank calls it; rank 0 writes and returns the results."""
    config, engine, text = run.config, run.engine, run.text
    began = time.perf_counter()
    with console.status("Evaluating what was learned ..."):
        batches = (on_device(batch, engine.device) for batch in evaluation_loader(config, text, None, run.strategy.mesh))
        totals = run.strategy.sum(evaluate(engine.model, batches, engine.objective))
        memory = run.strategy.mesh.world.gather_objects(run.costs.peak_here or peak_memory(engine.device))
        if config.report.export:
            export(run)
        model = whole_model(run)
        if model is None:
            return None
        samples = [(prompt, sample(run, model, prompt, number)) for number, prompt in enumerate(config.report.prompts)]
        seq, count = config.data.seq, config.report.completions if config.data.fim.rate > 0 else 0
        gaps = find_gaps(text.held_out, text.tokenizer, count, config.seed, before=seq, after=seq // 2)
        completions = [fill_gap(model, text.tokenizer, gap, seq // 8, context=seq) for gap in gaps]
    metrics, damage = read_damaged(config.engine.output / "metrics.jsonl")
    if damage:
        console.print(f"{config.engine.output / 'metrics.jsonl'} is damaged ({damage}): the report shows the rest.", markup=False)
    held_out_bytes = evaluation_loader(config, text, None).byte_count(text.tokenizer.byte_lengths)
    summary = {
        "held-out bits per byte": bits_per_byte(totals.loss_sum, held_out_bytes),
        "held-out next tokens guessed right": totals.mean_metrics()["correct"],
        "gaps filled exactly": f"{sum(completion.right for completion in completions)} of {len(completions)}",
        **costs(run, metrics, time.perf_counter() - began),
        **layout_summary(run, memory),
        **(compared := compare_with_single_process(config)),
        **(known_causes(config) if compared else {}),
    }
    results = Results(metrics, summary, samples, completions, config.engine.output / "report.html")
    write_report(config, results)
    keep(results, config.engine.output / "results.json")
    show(results, console)
    return results


def export(run: "Run") -> None:
    """Write the trained model, with its tokenizer, into the folder `model`. Every rank calls it and sends what it holds; rank 0 writes."""
    folder, tokenizer, strategy = run.config.engine.output / "model", run.text.tokenizer, run.strategy
    with writing(folder):
        save_pretrained(strategy.module, folder, token_ids={"eos_token_id": tokenizer.end_id}, weights=strategy.weights())
        if strategy.rank == 0:
            tokenizer.save_pretrained(folder, run.config.model.max_position_embeddings)


def whole_model(run: "Run") -> nn.Module | None:
    """The trained model on rank 0, whole; None on the others, which all take part in putting it together."""
    strategy = run.strategy
    if strategy.size == 1:
        return run.engine.model
    weights = strategy.full_weights()
    if strategy.rank:
        return None
    model = TransformerModel(run.config.model, MIXTURE).to(run.engine.device)
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


def sample(run: "Run", model: nn.Module, prompt: str, number: int) -> str:
    config, tokenizer = run.config, run.text.tokenizer
    generator = torch.Generator(run.engine.device).manual_seed(config.seed + number)
    ids = continue_ids(
        model, tokenizer, tokenizer.encode(prompt), config.report.new_tokens, context=config.data.seq,
        temperature=config.report.temperature, top_k=config.report.top_k, generator=generator,
    )  # fmt: skip
    return tokenizer.decode(ids)


def costs(run: "Run", metrics: dict[int, dict[str, float]], report_seconds: float) -> dict[str, Any]:
    """What the run took. Medians over the logs, which a moment's pause does not move."""

    def median(name: str) -> float | None:
        values = sorted(row[name] for row in metrics.values() if name in row)
        return values[len(values) // 2] if values else None

    peaks = [row["speed/peak_flops"] for row in metrics.values() if "speed/peak_flops" in row]
    return {
        "parameters": sum(parameter_counts(run.config.model).values()),
        "training tokens": max((int(row.get("progress/tokens", 0)) for row in metrics.values()), default=0),
        "tokens per second": median("speed/tokens_per_second"),
        "model FLOPs utilisation": median("speed/mfu"),
        **({"peak FLOP/s, which steps raised": max(peaks)} if peaks else {}),
        "peak memory, GiB": run.costs.peak_memory / GIB,
        "seconds to prepare the text": run.preparation_seconds,
        "seconds in training steps": run.costs.training,
        "seconds for data, evaluation and saving": run.costs.overhead,
        "seconds for this report": report_seconds,
    }


def keep(results: Results, path: Path) -> None:
    record = {"summary": results.summary, "samples": results.samples, "completions": [gap._asdict() for gap in results.completions]}
    write_atomically(path, json.dumps(record, indent=1).encode())


def show(results: Results, console: Console) -> None:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in results.summary.items():
        table.add_row(name, format_value(name, value))
    console.print(table)
    console.print(f"The report: {results.report}", markup=False, highlight=False, soft_wrap=True)
