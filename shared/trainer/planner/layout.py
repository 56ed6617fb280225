"""Chapter 12. Predictions for a layout, without a run: its pipeline stages, its bubble, and the messages of a step."""

from collections import Counter
from typing import Any

from shared.parallel.pipeline.axis import stage_blocks
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.pipeline.simulate import make_timeline
from shared.parallel.planning.expert_costs import expert_exchanges
from shared.parallel.planning.pipeline_costs import held_parts, step_exchanges
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.memory import step_sizes


def stages_summary(config: TrainerConfig) -> dict[str, str]:
    """Blocks of each pipeline stage, counted from 0."""
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
    """A line about the pipeline for the start of a run, with a remedy for a long bubble."""
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
