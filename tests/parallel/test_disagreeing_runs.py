"""Runs whose ranks were given different things, in scripts and on two machines, and runs on machines that share no folder."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from agreement_table import OWN_FOLDERS, ROWS, finished, prepare_machines, run_row, said, start
from rich.console import Console
from runs import Loader
from safetensors.torch import load_file
from sharded_runs import ADAMW, SMALL, batch_of, build, share
from two_machines import Machines

from shared.engine.callbacks import Callback
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.engine.engine import RuntimeEngine
from shared.optim.build import build_optimizer
from shared.optim.updater import Update
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.processes.launch import run_processes

# A script with an engine of its own.


class ShareLoader(Loader):
    """Each step: this rank's share of one micro-batch."""

    def __init__(self, mesh):
        super().__init__()
        self.data = mesh.data

    def microbatches(self):
        return [share(batch_of(self.step, 0), self.data.rank, self.data.size)]


class Nudge(Callback):
    """At the end of step 2, which is saved, something of the last rank changes by itself."""

    every_rank = True

    def __init__(self, what):
        self.what = what

    def on_step(self, engine):
        if engine.step == 2 and engine.strategy.rank == engine.strategy.size - 1:
            self.what(engine)


def fit(world, folder, layout="dp2", steps=4, rate=0.01, callbacks=(), model=SMALL, scale=1.0, per_disk=0, **settings):
    """A run, and its weights. per_disk: how many ranks see one disk, each of which is a folder in `folder`; 0 for all."""
    mesh = Mesh(replace(parse_layout(layout), check_every=0), world)
    plain = build(model)
    with torch.no_grad():
        dict(plain.named_parameters())["stack.blocks.0.attention.q_proj.weight"][0, 0] *= scale
    optimizer = replace(ADAMW, lr=rate)
    strategy = apply_parallel(plain, mesh, optimizer)
    output = folder / (f"disk-{world.rank // per_disk}" if per_disk else "")
    config = EngineConfig(output, device="cpu", checkpoint=CheckpointConfig(every=2, keep_last=3))
    engine = RuntimeEngine(
        strategy, build_optimizer(strategy.optim_params, optimizer, strategy.routes), replace(config, **settings),
        updater=Update(1.0, norm=strategy.grad_norm), callbacks=callbacks, console=Console(quiet=True),
    )  # fmt: skip
    engine.fit(ShareLoader(mesh), steps=steps)
    return {name: tensor.clone() for name, tensor in strategy.whole_weights()}


RUNS = {  # given to rank 1 alone -> what the sentence must hold
    "rate": ({"rate": 0.02}, "optimizer.lr is 0.01 on rank 0"),
    "steps": ({"steps": 6}, "steps is 4 on rank 0"),
    "log": ({"log_every": 3}, "engine.log_every is 10 on rank 0"),
    "evaluation": ({"evaluate_every": 3}, "engine.evaluate_every is 100 on rank 0"),
    "save": ({"checkpoint": CheckpointConfig(every=3, keep_last=3)}, "engine.checkpoint.every is 2 on rank 0"),
    "resume": ({"checkpoint": CheckpointConfig(every=2, keep_last=3, resume=False)}, "engine.checkpoint.resume is True on rank 0"),
    "width": ({"model": replace(SMALL, intermediate_size=24)}, "weights.stack.blocks.0.feed_forward"),
    "weights": ({"scale": 1.5}, "weights.stack.blocks.0.attention.q_proj.weight is torch.float64"),
    "layout": ({"layout": "fsdp2"}, "parallel.data_parallel is 2 on rank 0"),
    "trackers": ({"trackers": []}, ""),
}
NUDGES = {
    "weight": (lambda engine: nudge(first_weight(engine)), "after step 2, the weights of rank 1 differ from the weights of rank 0"),
    "moment": (lambda engine: nudge(state_of(engine)["exp_avg"]), "after step 2, the optimizer states of rank 1 differ from"),
    "step count": (lambda engine: state_of(engine)["step"].add_(1), "after step 2, the optimizer states of rank 1 differ from"),
    "rate": (lambda engine: engine.optimizer.param_groups[0].update(lr=0.03), "optimizer.0.lr is 0.01 on rank 0"),
    "norm": (lambda engine: engine.strategy.measured.mul_(1 + 1e-9), "gradient norm is"),
    "position": (lambda engine: setattr(engine.stateful["loader"], "step", 9), "saved.loader.step is 2 on rank 0"),
}


def first_weight(engine):
    return next(iter(engine.model.parameters()))


def state_of(engine):
    return engine.optimizer.state[next(iter(engine.optimizer.param_groups[0]["params"]))]


def nudge(tensor):
    with torch.no_grad():
        tensor.view(-1)[3] += tensor.view(-1)[3].abs() * 1e-12 + 1e-30


def refusals(world, folder):
    started = {what: said(partial(fit, world, folder / what, **(given if world.rank else {}))) for what, (given, _) in RUNS.items()}
    saved = {what: said(partial(fit, world, folder / what, callbacks=[Nudge(change)])) for what, (change, _) in NUDGES.items()}
    return started, saved


def on_two(world, folder):
    return refusals(world, folder / "refused"), apart(world, folder / "two_machines")


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """The folder of all runs of two ranks, and what each rank says of them."""
    folder = tmp_path_factory.mktemp("by_two")
    return folder, run_processes(on_two, 2, folder, timeout=600)


def test_a_script_whose_ranks_differ_is_refused_before_its_first_step_and_before_it_saves(by_two):
    folder, ((started, saved), others) = by_two[0] / "refused", (refused for refused, _ in by_two[1])
    assert others == (started, saved), "all ranks say the same"
    for what, (_, words) in RUNS.items():
        assert words in started[what] and bool(words) == bool(started[what]), (what, started[what])
    for what, (_, words) in NUDGES.items():
        assert words in saved[what] and not list(folder.glob(f"{what}/checkpoints/step-*")), (what, saved[what])


# Machines that share no folder.


def apart(world, folder):
    """Runs whose ranks see one disk each: weights and sentences."""
    told = {"whole": fit(world, folder / "whole", steps=6)}
    fit(world, folder / "apart", per_disk=1)
    if world.rank:  # its power was gone before it had the last one
        shutil.rmtree(folder / "apart" / "disk-1" / "checkpoints" / "step-00000004")
    told["resumed"] = fit(world, folder / "apart", steps=6, per_disk=1)
    if world.rank:
        shutil.rmtree(folder / "apart" / "disk-1")
    told["lost"] = said(lambda: fit(world, folder / "apart", steps=8, per_disk=1))
    fit(world, folder / "other", rate=0.02, per_disk=1)
    fit(world, folder / "this", per_disk=1)
    if world.rank:
        shutil.rmtree(folder / "this" / "disk-1" / "checkpoints")
        shutil.move(folder / "other" / "disk-1" / "checkpoints", folder / "this" / "disk-1")
    told["other"] = said(lambda: fit(world, folder / "this", per_disk=1))
    for layout in ("fsdp2", "dp2_zero1"):
        told[layout] = said(lambda layout=layout: fit(world, folder / layout, layout, per_disk=1))
    return told


def test_without_a_shared_folder_each_machine_keeps_all_and_a_run_resumes_from_the_newest_common_step(by_two):
    folder, (told, others) = by_two[0] / "two_machines", (runs for _, runs in by_two[1])
    for name, weight in told["whole"].items():
        assert torch.equal(weight, told["resumed"][name]) and torch.equal(weight, others["resumed"][name]), name
    alone = fit(SingleRankCommunicator(), folder / "apart" / "disk-0", "one", steps=6)
    assert all(torch.equal(weight, alone[name]) for name, weight in told["whole"].items()), "one machine's folder is a checkpoint by itself"
    assert "rank 0 has 2, 4, 6; rank 1 has none" in told["lost"] and "copy the checkpoints" in told["lost"]
    assert "no step is the same" in told["other"] and "rank 1 has 2, 4" in told["other"]
    for layout in ("fsdp2", "dp2_zero1"):
        assert "no machine holds the whole" in told[layout] and "parallel.data_parallel=2 parallel.fully_sharded=1" in told[layout]
        assert not list(folder.glob(f"{layout}/*/checkpoints"))
    for what in ("lost", "other", "fsdp2", "dp2_zero1"):
        assert others[what].replace("disk-1", "disk-0") == told[what]


def apart_in_shards(world, folder):
    """Replicas over two disks, each cut over the two ranks that see it."""
    whole = fit(world, folder / "whole", "dp2_fsdp2", steps=6)
    fit(world, folder / "apart", "dp2_fsdp2", per_disk=2)
    if world.rank == 3:
        shutil.rmtree(folder / "apart" / "disk-1" / "checkpoints" / "step-00000004")
    return whole, fit(world, folder / "apart", "dp2_fsdp2", steps=6, per_disk=2)


@pytest.mark.slow
def test_replicas_that_are_cut_within_each_machine_need_no_shared_folder(tmp_path):
    for whole, resumed in run_processes(apart_in_shards, 4, tmp_path):
        assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    alone = fit(SingleRankCommunicator(), tmp_path / "apart" / "disk-1", "one", steps=6)
    assert all(torch.equal(weight, alone[name]) for name, weight in whole.items())


# Two machines.


@pytest.mark.slow
def test_two_machines_without_a_shared_folder_resume_or_are_refused_before_the_first_step(tmp_path):
    with Machines(tmp_path / "machines", shared=False) as (a, b):
        file = prepare_machines([a, b], tmp_path)
        finished([a, b], file)
        model = a.kept / "run" / "model" / "model.safetensors"
        weights = load_file(model)
        model.unlink()
        shutil.rmtree(b.kept / "run" / "checkpoints" / "step-00000006")
        jobs = finished([a, b], file)
        assert "not one folder for all ranks: rank 0 (a) and rank 1 (b) each keep a whole checkpoint" in jobs[0].output
        assert "Step 6 of" in jobs[0].output and "Going on from step 4" in jobs[0].output
        again = load_file(model)
        assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
        words = ["parallel.data_parallel=1", "parallel.fully_sharded=2", f"engine.output={a.folder / 'cut'}"]
        jobs = start([a, b], file, words)
        assert [job.wait(300) for job in jobs] == [1, 1]
        assert all("no machine holds the whole model" in job.output for job in jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_two_machines_that_were_given_different_things_both_say_what(name, tmp_path):
    with Machines(tmp_path / "machines", shared=name not in OWN_FOLDERS) as machines:
        found = run_row(name, machines, prepare_machines(machines, tmp_path))
    assert ROWS[name].names in found.said["a"] and found.said["b"] == found.said["a"], found.said
    assert found.codes == [1, 1], found.outputs
