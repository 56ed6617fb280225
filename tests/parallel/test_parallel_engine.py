"""The engine over two ranks that are processes: what is watched, saved and stopped is the run's, not a rank's."""

import json
import math
import os
import signal
from dataclasses import replace

import pytest
import torch
from layout_runs import largest_difference
from rich.console import Console
from runs import Loader
from sharded_runs import ADAMW, SMALL, batch_of, build, share

from shared.course.errors import CourseError
from shared.engine.debug.anomalies import BrokenStep, read_anomaly, replay
from shared.engine.callbacks import Callback
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.engine.defaults import default_callbacks
from shared.engine.debug.dump import read_dump
from shared.engine.engine import RuntimeEngine
from shared.engine.metrics.gradient_norm import Norms
from shared.engine.metrics.throughput import Throughput
from shared.engine.trackers.jsonl import read_jsonl
from shared.folder_lock import FolderLock
from shared.loop import evaluate
from shared.loss import next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.updater import Update
from shared.parallel.parallelize import apply_parallel
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.processes.launch import run_processes
from shared.parallel.mesh import Mesh

LAYOUTS = ("course dp2", "course dp2_zero1", "course fsdp2", "torch dp2", "torch dp2_zero1", "torch fsdp2")
DROPOUT, TIED = replace(SMALL, hidden_dropout=0.2), replace(SMALL, tie_word_embeddings=True)
BROKEN = 3  # the step in which a factor of a micro-batch of the last rank is NaN


class ShareLoader(Loader):
    """Each step: a rank's share of two micro-batches. `factor` is of the last rank's second one."""

    def __init__(self, mesh, factors=()):
        super().__init__()
        self.data, self.factors = mesh.data, dict(factors)

    def microbatches(self):
        batches = [share(batch_of(self.step, number), self.data.rank, self.data.size) for number in range(2)]
        factor = self.factors.get(self.step, 1.0) if self.data.rank == self.data.size - 1 else 1.0
        return [batch | {"factor": torch.tensor(factor if number == 1 else 1.0)} for number, batch in enumerate(batches)]


def objective(model, batch):
    totals = next_token_objective(model, batch)
    return totals._replace(loss_sum=totals.loss_sum * batch["factor"])


def engine_of(world, words, folder, callbacks=(), model=SMALL, every=0, **layout):
    """A run whose engine has chapter 04's callbacks, as the trainer makes it."""
    backend, name = words.split()
    mesh = Mesh(replace(parse_layout(name, ParallelConfig(backend=backend)), **layout), world)
    torch.manual_seed(mesh.data.rank)
    parallel = apply_parallel(build(model), mesh, ADAMW)
    config = EngineConfig(
        output=folder, device="cpu", log_every=1, trackers=["jsonl"] * (world.rank == 0), checkpoint=CheckpointConfig(every=every)
    )
    cpu = torch.device("cpu")
    engine = RuntimeEngine(
        parallel, build_optimizer(parallel.optim_params, ADAMW, parallel.routes), config, objective=objective,
        updater=Update(1.0, norm=parallel.grad_norm), callbacks=[*callbacks, *default_callbacks(config, cpu)], console=Console(quiet=True),
    )  # fmt: skip
    return engine, mesh, parallel


class SendSignal(Callback):
    """As a scheduler might: one rank is asked to leave and the other is not."""

    every_rank = True

    def on_step(self, engine):
        if engine.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class EvaluateBeforeTheUpdate(Callback):
    """What saving a loss spike does."""

    every_rank = True

    def before_optimizer(self, engine):
        evaluate(engine.model, engine.microbatches, engine.objective)


def weights_of(parallel):
    return {name: tensor.clone() for name, tensor in parallel.whole_weights()}


def fitted(world, words, folder, steps=3, **settings):
    engine, mesh, parallel = engine_of(world, words, folder, **settings)
    engine.fit(ShareLoader(mesh), steps=steps)
    return engine, weights_of(parallel)


def broken(world, words, folder):
    engine, mesh, _ = engine_of(world, words, folder)
    try:
        engine.fit(ShareLoader(mesh, [(BROKEN, float("nan"))]), steps=5)
    except BrokenStep as error:
        return str(error)


def from_nothing(world, words):
    """The weights of a model that was built on the meta device, and so had none."""
    backend, name = words.split()
    mesh = Mesh(parse_layout(name, ParallelConfig(backend=backend)), world)
    with torch.device("meta"):
        model = TransformerModel(TIED)
    return weights_of(apply_parallel(model, mesh, ADAMW, seed=5))


def watched(world):
    """The callbacks of a rank."""
    mesh = Mesh(parse_layout("dp2", ParallelConfig()), world)
    parallel = apply_parallel(build(SMALL), mesh, ADAMW)
    engine = RuntimeEngine(parallel, build_optimizer(parallel.optim_params, ADAMW), callbacks=[Throughput(peak_flops=3e12), Norms()])
    return [type(each).__name__ for each in engine.callbacks]


def refused(world, folder):
    """What each rank is told of a folder that another process has."""
    try:
        fitted(world, "course dp2", folder)
    except CourseError as error:
        return str(error)


def held(world, folder):
    """Which rank's process holds a run's folder, as this rank sees it."""
    parallel = apply_parallel(build(SMALL), Mesh(parse_layout("dp2", ParallelConfig()), world), ADAMW)
    pids = world.gather_objects(os.getpid())
    with parallel.locked(folder, Console(quiet=True)):
        holder = pids.index(json.loads((folder / "run.lock").read_text())["pid"])
        world.gather_objects(None)  # until all have read it: the rank that holds the folder removes the file as it leaves
        return holder


def everything(world, folder):
    """All that two ranks are asked for, in one world."""
    told = {"broken": {words: broken(world, words, folder / f"broken {words}") for words in LAYOUTS}}
    told["refused"] = refused(world, folder / "taken")
    told["held"] = held(world, folder / "shared"), held(world, folder / f"own disk of {world.rank}")
    told["weights"] = {words: fitted(world, words, folder / words)[1] for words in LAYOUTS}
    callbacks, kept = [EvaluateBeforeTheUpdate()], {"reshard_after_forward": False}
    names = ("course fsdp2", "torch fsdp2")
    told["from nothing"] = {words: from_nothing(world, words) for words in LAYOUTS}
    told["kept"] = {name: fitted(world, name, folder / f"kept {name}", callbacks=callbacks, **kept)[1] for name in names}
    one_asked = fitted(world, "course fsdp2", folder / "asked", steps=9, callbacks=[SendSignal()] * world.rank)[0]
    told["asked"] = one_asked.step, one_asked.stopped, one_asked.checkpoints.steps()
    whole = fitted(world, "course dp2", folder / "whole", steps=6, model=DROPOUT)[1]
    fitted(world, "course dp2", folder / "parts", steps=3, model=DROPOUT)
    torch.manual_seed(99)
    told["watched"] = watched(world)
    told["dropout"] = whole, fitted(world, "course dp2", folder / "parts", steps=6, model=DROPOUT)[1]
    return told


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    _, alone = fitted(SingleRankCommunicator(), "course one", folder / "one")
    with FolderLock(folder / "taken"):
        return folder, alone, run_processes(everything, 2, folder, timeout=300)


def test_one_rank_holds_a_shared_folder_and_each_machine_without_one_its_own(runs):
    assert [each["held"] for each in runs[2]] == [(0, 0), (0, 1)]


def test_all_ranks_refuse_a_folder_that_another_run_is_in(runs):
    folder, _, told = runs
    sentences = [each["refused"] for each in told]
    assert f"{folder / 'taken'} is in use by process {os.getpid()} on" in sentences[0] and sentences[1] == sentences[0]
    assert not list((folder / "taken").iterdir())


@pytest.mark.parametrize("words", LAYOUTS)
def test_metrics_equal_one_process(runs, words):
    folder, alone, told = runs
    assert all(largest_difference(each["weights"][words], alone) < 1e-9 for each in told)
    here, there = (read_jsonl(folder / name / "metrics.jsonl") for name in (words, "one"))
    compared = [name for name in there[1] if name.startswith(("train/", "norm/", "progress/"))]
    assert len(compared) > 10
    for step, metrics in there.items():
        assert here[step] | {name: pytest.approx(metrics[name], rel=1e-6) for name in compared} == here[step]


@pytest.mark.parametrize("words", LAYOUTS)
def test_a_broken_step_stops_all_ranks_and_each_keeps_its_batch(runs, words):
    folder, _, told = runs
    output = folder / f"broken {words}"
    assert all("Step 3 was stopped before it reached the weights: train/loss is nan" in each["broken"][words] for each in told)
    of_ranks = [output / "anomalies" / name for name in ("step-00000003", "step-00000003-rank-1")]
    losses = [read_anomaly(each)["losses"] for each in of_ranks]
    assert all(loss > 0 for loss in losses[0] + losses[1][:1]) and losses[1][1] != losses[1][1]
    assert replay(of_ranks[0], build(SMALL), objective) == pytest.approx(losses[0])
    assert not (of_ranks[1] / "weights.safetensors").exists()
    dumps = [read_dump(output / "dumps" / name) for name in ("step-00000003-broken", "step-00000003-broken-rank-1")]
    assert all("stack.blocks.0.attention" in each.entries["activations"] and len(each.entries["weights"]) > 5 for each in dumps)
    sizes = [math.prod(entry.shape) for each in dumps for entry in each.entries["weights"].values()]
    in_parts = sum(sizes) < 2 * sum(parameter.numel() for parameter in build(SMALL).parameters())
    assert [each.part_of for each in dumps] == (["rank 0 of 2", "rank 1 of 2"] if in_parts else ["", ""])
    assert in_parts == any(word in words for word in ("fsdp", "zero"))


@pytest.mark.parametrize("words", ["course fsdp2", "torch fsdp2"])
def test_weights_that_are_kept_after_an_evaluation_are_not_taken_for_new_ones(runs, words):
    _, alone, told = runs
    assert all(largest_difference(each["kept"][words], alone) < 1e-9 for each in told)


@pytest.mark.parametrize("words", LAYOUTS)
def test_a_model_without_memory_gets_the_weights_that_its_names_say(runs, words):
    plain = dict(TransformerModel(TIED, seed=5).named_parameters())
    assert all(largest_difference(each["from nothing"][words], plain) == 0 for each in runs[2])


def test_where_one_rank_is_asked_to_leave_all_leave_after_the_same_step(runs):
    assert [each["asked"] for each in runs[2]] == [(2, "SIGTERM", [2])] * 2


def test_one_rank_tells_the_speed_of_all_and_every_rank_compares_replicas(runs):
    first, everywhere = ["StepCounter", "ReplicaCheck"], ["Norms"]
    assert [each["watched"] for each in runs[2]] == [[*first, "Throughput", *everywhere], [*first, *everywhere]]


def test_each_rank_resumes_its_own_rng_state(runs):
    """Ranks draw different masks for dropout, and a resumed run the ones that it would have drawn."""
    folder, _, told = runs
    for whole, parts in (each["dropout"] for each in told):
        assert largest_difference(parts, whole) == 0
    state = json.loads((folder / "parts" / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert len(state["random_of_ranks"]) == 1
