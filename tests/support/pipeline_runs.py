"""Small runs under pipeline parallelism for the tests: three steps on a layout and in one process, in float64."""

from dataclasses import replace
from functools import cache

import torch
from layout_runs import LayoutRun, largest_difference
from sharded_runs import ADAMW, MUON
from step_records import STEPS
from tensor_runs import FAMILIES, SGD, SMALL, batches, without_noise

from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.optim import precision
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.context.axis import ContextParallel
from shared.parallel.health.replicas import require_equal
from shared.parallel.parallelize import AXES
from shared.parallel.pipeline.axis import PipelineParallel
from shared.parallel.pipeline.runner import PipelineRunner
from shared.parallel.tensor.axis import TensorParallel

OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW, "muon": MUON}
MICROBATCHES = 4
SCHEDULES = {"gpipe": {}, "1f1b": {}, "interleaved": {"pipeline_chunks": 2}, "zero_bubble": {}}


def half_packed(step: int, number: int, config: ModelConfig) -> dict:
    """Every other micro-batch has packed rows, of three documents each."""
    batch = batches(step, number, config)
    if number % 2:
        rows, seq = batch["input_ids"].shape
        borders = [[1 + row % 4, 6 + row % 5] for row in range(rows)]
        batch["documents"] = torch.stack([torch.bucketize(torch.arange(seq), torch.tensor(two), right=True) for two in borders])
        firsts = [torch.tensor([0, *two])[documents] for two, documents in zip(borders, batch["documents"], strict=True)]
        batch["positions"] = torch.arange(seq) - torch.stack(firsts)
    return batch


def config_of(family: str, layers: int = 4) -> ModelConfig:
    return ModelConfig(**SMALL | FAMILIES[family] | {"num_hidden_layers": layers})


def make(
    world, layout: str, family: str = "llama", optimizer: str = "sgd", schedule: str = "1f1b", axis=None, **settings
) -> LayoutRun:
    """Settings of the parallel configuration and of `LayoutRun`."""
    of_run = ("seed", "scaler", "frozen", "computed_in", "objective", "dtype", "prepare")
    of_run = {name: settings.pop(name) for name in of_run if name in settings}
    parallel = {"pipeline_schedule": schedule} | SCHEDULES[schedule] | settings
    microbatches, layers = parallel.pop("microbatches", MICROBATCHES), parallel.pop("layers", 4)
    return LayoutRun(
        world, replace(parse_layout(layout), **parallel), config=config_of(family, layers),
        batches=half_packed, optimizer=OPTIMIZERS[optimizer], microbatches=microbatches,
        axes=(*AXES, axis or PipelineParallel(), ContextParallel(), TensorParallel()),
        **{"objective": packed_next_token_objective} | of_run,
    )  # fmt: skip


autocast_objective = precision.autocast_objective(packed_next_token_objective, "bfloat16")  # refuses weights of 16 bits


def runner_of(run: LayoutRun) -> PipelineRunner:
    return next(engine for engine in run.parallel.engines if isinstance(engine, PipelineRunner))


def on_ranks(work, layout: str, *arguments, **settings) -> list:
    """work(run) on each rank."""
    ranks = parse_layout(layout).ranks
    on_rank = lambda world: work(make(world, layout, *arguments, **settings))  # noqa: E731
    return [on_rank(SingleRankCommunicator())] if ranks == 1 else run_threads(on_rank, ranks)


def observed(run: LayoutRun) -> dict:
    """Of three steps."""
    losses, norms, metrics = [], [], []
    for _ in range(STEPS):
        run.train(1)
        losses.append(run.totals.loss_sum)
        norms.append(run.update.gradient_norm)
        metrics.append({"tokens": int(run.totals.token_count)} | {name: int(value) for name, value in run.totals.metrics.items()})
    require_equal(run.parallel.state.state_dict(keep_vars=True), run.parallel.holders, run.world)
    return {"loss": losses, "norm": norms, "metrics": metrics, "gradients": run.gradients(), "weights": run.weights()}


@cache
def expected(family: str = "llama", optimizer: str = "sgd", microbatches: int = MICROBATCHES, layers: int = 4) -> dict:
    return on_ranks(observed, "one", family, optimizer, microbatches=microbatches, layers=layers)[0]


def require_same(found: list[dict], one: dict) -> None:
    """Each rank has what one process has: all losses, norms and metrics, gradients and weights of its stages; together all of them."""
    seen = set()
    for each in found:
        for what in ("loss", "norm"):
            torch.testing.assert_close(torch.stack(each[what]), torch.stack(one[what]), rtol=1e-9, atol=0)
        assert each["metrics"] == one["metrics"]
        for what in ("gradients", "weights"):
            part = {name: one[what][name] for name in each[what]}
            assert largest_difference(without_noise(each[what]), without_noise(part)) < 1e-9, what
        seen |= each["weights"].keys()
    assert seen == one["weights"].keys()
