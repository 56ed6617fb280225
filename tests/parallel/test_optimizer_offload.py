"""Floor 6: with the optimizer elsewhere, the same steps are taken to the same weights.

There is no GPU here. Copies are made between two names of the one CPU ("cpu" and "cpu:0"), which shows that everything that is stepped goes
through the twins; and on made-up tensors of a GPU without numbers, which shows that no operation mixes devices. That a GPU's memory is
really free of the state, and how long the bus takes, is not shown.
"""

import pytest
import torch
from sharded_runs import ADAMW, MICROBATCHES, MUON, SMALL, batch_of, build, share
from step_records import STEPS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shared.engine.checkpoint.optimizer_state import name_optimizer_state
from shared.loop import accumulate_gradients, train_step
from shared.loss import next_token_objective
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.loss_scale import LossScaler
from shared.optim.updater import Update
from shared.parallel.parallelize import apply_parallel
from shared.parallel.data.offload import copy_of
from shared.model.sharding import make_shard, split_spans
from shared.parallel.strategy import ParallelStrategy
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import ParallelConfig, layout_name, parse_layout
from shared.parallel.processes.launch import run_processes
from shared.parallel.mesh import Mesh
from shared.parallel.comm.threads import run_threads

ELSEWHERE = torch.device("cpu", 0)


def test_where_the_parameters_are_there_already_nothing_changes():
    assert not in_one(build(SMALL), offload="cpu").around
    layout = ParallelConfig(offload_optimizer=True)
    assert not apply_parallel(build(SMALL), Mesh(layout, SingleRankCommunicator())).around


ONE = Mesh(ParallelConfig(), SingleRankCommunicator())


def in_one(model, offload=None) -> ParallelStrategy:
    return ParallelStrategy(model, ONE, [], offload=offload)


def elsewhere_in_one(model, home=ELSEWHERE) -> ParallelStrategy:
    return in_one(model, home)


def trained(world, layout: ParallelConfig, optimizer, elsewhere: bool):
    """Weights after three steps, and each step's norm."""
    mesh = Mesh(layout, world)
    parallel = apply_parallel(build(SMALL), mesh, optimizer)
    if elsewhere:
        parallel = ParallelStrategy(parallel.module, mesh, parallel.engines, parallel.routes, offload=ELSEWHERE)
        assert parallel.around
    stepper, norms = build_optimizer(parallel.optim_params, optimizer), []
    update = Update(1.0, norm=parallel.grad_norm)
    for step in range(STEPS):
        batches = [share(batch_of(step, number), mesh.data.rank, mesh.data.size) for number in range(MICROBATCHES)]
        parts = parallel.runner(accumulate_gradients), parallel.reducer, parallel.updater(update)
        train_step(parallel.model, stepper, batches, next_token_objective, *parts)
        norms.append(update.gradient_norm)
    return dict(parallel.whole_weights()), norms


@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize(
    "layout",
    [parse_layout(word) for word in ("one", "dp2", "dp2_zero2", "fsdp2", "dp2_fsdp2")]
    + [parse_layout("fsdp2", ParallelConfig(activation_checkpointing=how)) for how in ("full", "selective")],
    ids=lambda layout: f"{layout_name(layout)}, {layout.activation_checkpointing}",
)
def test_optimizer_offload_takes_the_same_steps(layout, optimizer):
    require_equal(*(run_threads(trained, layout.ranks, layout, optimizer, elsewhere) for elsewhere in (False, True)))


def on_torchs_engine(world):
    """With each optimizer, each layout here, then each elsewhere."""
    layouts = [parse_layout(word, ParallelConfig(backend="torch")) for word in ("dp2", "dp2_zero1", "fsdp2")]
    return {
        optimizer.name: [[trained(world, layout, optimizer, elsewhere) for layout in layouts] for elsewhere in (False, True)]
        for optimizer in (ADAMW, MUON)
    }


@pytest.fixture(scope="module")
def by_torch():
    return run_processes(on_torchs_engine, 2, timeout=300)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_offload_on_torchs_engine_takes_the_same_steps(by_torch, optimizer):
    for here, there in (found[optimizer] for found in by_torch):
        require_equal(here, there)


def require_equal(here, there):
    """Weights and norms of several runs, bit for bit."""
    for (weights, norms), (others, other_norms) in zip(here, there, strict=True):
        assert all(torch.equal(weights[name], others[name]) for name in weights) and weights.keys() == others.keys()
        assert norms == other_norms


def test_the_state_and_what_is_stepped_are_the_twins():
    parallel = elsewhere_in_one(build(SMALL))
    optimizer = build_optimizer(parallel.optim_params, ADAMW)
    own = {id(parameter) for parameter in parallel.model.parameters()}
    assert not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    step(parallel, optimizer)
    assert set(map(id, optimizer.state)) == set(map(id, parallel.optim_params.parameters()))
    assert name_optimizer_state(parallel.optim_params, optimizer).tensors.keys() == dict(parallel.model.named_parameters()).keys()


def step(parallel, optimizer, updater=None):
    parts = parallel.runner(accumulate_gradients), parallel.reducer, parallel.updater(updater or Update(1.0, norm=parallel.grad_norm))
    return train_step(parallel.model, optimizer, [batch_of(0, 0)], next_token_objective, *parts)


def test_gradients_of_one_step_do_not_run_into_the_next():
    parallel = elsewhere_in_one(build(SMALL))
    optimizer = build_optimizer(parallel.optim_params, OptimizerConfig("sgd", lr=1e-300, momentum=0.0, weight_decay=0.0))
    norms = []
    for _ in range(2):
        update = Update(norm=parallel.grad_norm)
        step(parallel, optimizer, update)
        norms.append(update.gradient_norm)
    assert norms[0] == norms[1]


def test_weights_that_somebody_else_writes_are_the_ones_that_are_stepped():
    """As restoring a checkpoint does."""
    parallel, plain = elsewhere_in_one(build(SMALL)), in_one(build(SMALL))
    optimizers = [build_optimizer(each.optim_params, ADAMW) for each in (parallel, plain)]
    for each, optimizer in zip((parallel, plain), optimizers, strict=True):
        step(each, optimizer)
        with torch.no_grad():
            for parameter in each.model.parameters():
                parameter.mul_(0.5)
        step(each, optimizer)
    assert all(map(torch.equal, parallel.model.parameters(), plain.model.parameters()))


def test_a_step_that_overflowed_changes_nothing():
    model = build(SMALL)
    parallel, scaler = elsewhere_in_one(model), LossScaler()
    optimizer, before = build_optimizer(parallel.optim_params, ADAMW), [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        model.head.linear.weight[0, 0] = torch.inf
        before[-1].copy_(model.head.linear.weight)
    update = Update(1.0, scaler, parallel.grad_norm)
    step(parallel, optimizer, update)
    assert update.skipped == 1 and all(map(torch.equal, model.parameters(), before))


def test_no_operation_mixes_devices():
    """On tensors that claim to be a GPU's and hold nothing: an operation that mixes them with the CPU's raises, as it would there. Only the
    way up is left out: this PyTorch has no copies to a GPU, not even made-up ones."""
    with FakeTensorMode():
        model = nn.Linear(5, 3)
        model.weight, model.bias = (nn.Parameter(torch.empty(shape, device="cuda")) for shape in ((3, 5), (3,)))
        parallel = elsewhere_in_one(model, torch.device("cpu"))
        assert {twin.device.type for twin in parallel.optim_params.parameters()} == {"cpu"}
        optimizer = build_optimizer(parallel.optim_params, OptimizerConfig("lion", lr=0.01))  # AdamW reads a count, which is not there
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        parallel.around[0].bring_up = lambda: None
        parallel.updater(plain_update)(model, optimizer, torch.empty((), device="cuda"))
        assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
        devices = {value.device.type for state in optimizer.state.values() for value in state.values()}
        assert devices == {"cpu"}
        with pytest.raises(RuntimeError, match="same device"):  # the control
            plain_update(parallel.optim_params, optimizer, torch.empty((), device="cuda"))


def plain_update(model, optimizer, token_count):
    for parameter in model.parameters():
        parameter.grad /= token_count
    optimizer.step()


def test_a_copy_is_gathered_where_its_shard_is():
    """There ranks can talk; the copy's own device may be the CPU of a run over NCCL."""
    parameter = nn.Parameter(torch.zeros(2, 5))
    shard = make_shard(parameter.data, split_spans(parameter, [(0, 10)], SingleRankCommunicator()), parameter)
    assert copy_of(shard, ELSEWHERE).sharding.device == shard.device
