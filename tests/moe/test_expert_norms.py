"""Norms and dumps of single experts on every kind of sharding, by their numbers in the whole model."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from mixture_runs import MODEL, MixtureRun

from shared.engine.debug.dump import by_expert, describe_all
from shared.moe.balancing import ExpertNorms
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig

LAYOUTS = {
    "one": ParallelConfig(),
    "dp2_zero1": ParallelConfig(data_parallel=2, zero=1),
    "dp2_zero2": ParallelConfig(data_parallel=2, zero=2),
    "fsdp4": ParallelConfig(fully_sharded=4),
    "dp2_ep2": ParallelConfig(data_parallel=2, expert_parallel=2),
    "fsdp4_ep2": ParallelConfig(fully_sharded=4, expert_parallel=2),
    "dp2_tp2_ep2": ParallelConfig(data_parallel=2, tensor_parallel=2, expert_parallel=2),
    "pp2": ParallelConfig(pipeline_parallel=2),
    "pp4, no experts in the first stage": ParallelConfig(pipeline_parallel=4, pipeline_layers=(1, 1, 1, 1)),
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
MATRICES = ("gate_proj", "up_proj", "down_proj")


def on_rank(world, layout: ParallelConfig, optimizer: str = "adamw") -> dict:
    run, callback = MixtureRun(world, layout, optimizer), ExpertNorms(MODEL)
    assert callback.every_rank, "adding up takes all ranks"
    run.train(1)
    engine = SimpleNamespace(strategy=run.parallel, log_due=False, token_count=1)
    callback.before_optimizer(engine)
    assert callback.measure(engine) == {}, "nothing is measured where nothing is logged"
    engine.log_due = True
    callback.before_optimizer(engine)
    named = list(run.parallel.grad_params.named_parameters())
    parts = dict(by_expert((name, p, p.detach().clone()) for name, p in named))
    parts |= {f"gradient of {name}": part for name, part in by_expert((n, p, p.grad.clone()) for n, p in named if p.grad is not None)}
    return {"norms": callback.measured, "parts": parts, "weights": run.weights(), "gradients": run.gradients()}


@pytest.fixture(scope="module")
def alone() -> dict:
    return on_rank(SingleRankCommunicator(), ParallelConfig())


@by_layout
def test_every_rank_has_the_norms_of_all_experts(layout, alone):
    found = [alone] if layout.ranks == 1 else run_threads(lambda world: on_rank(world, layout), layout.ranks)
    for each in found:
        assert len(each["norms"]) == 2 * 3 * MODEL.experts.num_experts
        for what, tensors in (("gradient", alone["gradients"]), ("weight", alone["weights"])):
            for block in (1, 2, 3):
                names = [f"stack.blocks.{block}.feed_forward.experts.{matrix}.weight" for matrix in MATRICES]
                for expert in range(MODEL.experts.num_experts):
                    expected = math.sqrt(sum(tensors[name][expert].square().sum().item() for name in names))
                    assert each["norms"][f"experts/{what}/{block}.{expert}"].item() == pytest.approx(expected, rel=1e-9)


@by_layout
def test_a_dump_names_experts_by_their_numbers_in_the_whole_model(layout, alone):
    found = [alone] if layout.ranks == 1 else run_threads(lambda world: on_rank(world, layout), layout.ranks)
    held: dict[str, int] = {}
    for each in found:
        for name, part in each["parts"].items():
            if not name.endswith("]"):
                assert ".experts." not in name, "the stack is not described as a whole"
                continue
            plain, expert = name.removeprefix("gradient of ").removesuffix("]").split("[")
            whole = (alone["gradients"] if name.startswith("gradient") else alone["weights"])[plain][int(expert)]
            held[name] = held.get(name, 0) + part.numel()
            numbers = part.reshape(-1, 1)[:5]  # each number of the part is one of that expert, and of no other
            assert (numbers - whole.reshape(1, -1)).abs().amin(dim=1).max() <= 1e-9 * whole.abs().max()
    names = [f"stack.blocks.{b}.feed_forward.experts.{m}.weight[{e}]" for b in (1, 2, 3) for m in MATRICES for e in range(4)]
    assert held.keys() == {*names, *(f"gradient of {name}" for name in names)}
    assert all(count % (24 * 16) == 0 for count in held.values()), "each expert's numbers are there as a whole, once or as copies"


def test_the_norms_are_of_the_mean_loss_without_the_loss_scale(alone):
    run = MixtureRun(SingleRankCommunicator(), ParallelConfig()).train(1)
    callback = ExpertNorms(MODEL, loss_scale=lambda: 8.0)
    callback.before_optimizer(SimpleNamespace(strategy=run.parallel, log_due=True, token_count=5))
    measured = callback.measure(None)
    for name, norm in alone["norms"].items():
        assert measured[name] == pytest.approx(norm.item() / (40 if "gradient" in name else 1), rel=1e-6)
    assert callback.measure(None) == {}


def test_a_dump_has_an_entry_for_each_expert():
    stack = torch.nn.Parameter(torch.arange(12.0).view(3, 2, 2))
    entries = describe_all(by_expert([("experts.up_proj.weight", stack, stack), ("router.weight", stack[0], stack[0])]))
    assert [*entries] == [*(f"experts.up_proj.weight[{expert}]" for expert in range(3)), "router.weight"]
    assert entries["experts.up_proj.weight[2]"].statistics["mean"] == 9.5 and entries["experts.up_proj.weight[2]"].shape == [2, 2]
    assert json.dumps([entry.shape for entry in entries.values()])
