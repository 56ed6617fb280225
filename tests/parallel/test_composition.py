"""Floor 6 carries axes that it does not know: stand-ins for tensor, pipeline and expert parallelism around every data engine, against one
process: loss, gradient norm, norms by role, gradients and weights; saved and restored into other layouts; checked and refused."""

from functools import cache

import pytest
import torch
from layout_runs import LayoutRun, largest_difference
from sharded_runs import ADAMW, MUON
from step_records import STEPS
from stand_in_axes import ExpertStandIn, PipelineStandIn, TensorStandIn, stand_ins, with_experts

from shared.engine.checkpoint.folder import CheckpointError
from shared.model.config import ModelConfig
from shared.model.roles import parameters_by_role
from shared.optim.config import OptimizerConfig
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.health.replicas import ReplicasDiffer, require_equal

CONFIG = ModelConfig(vocab_size=31, hidden_size=20, num_hidden_layers=3, num_attention_heads=2, intermediate_size=18, initializer_range=0.1)
TIED = ModelConfig(**vars(CONFIG) | {"tie_word_embeddings": True})
SGD = OptimizerConfig("sgd", lr=0.3, momentum=0.0, weight_decay=0.0)
DENSE = {
    "tensor": ("tp2", "dp2_tp2", "dp2_tp2_zero1", "dp2_tp2_zero2", "fsdp2_tp2"),
    "pipeline": ("pp2", "pp2_dp2", "pp2_dp2_zero1", "pp2_fsdp2"),
}
TIED_ENDS = ("pp2", "pp2_dp2", "pp2_fsdp2")
EXPERTS = ("dp2_ep2", "dp4_ep2", "dp4_zero1_ep2", "fsdp4_ep2", "dp2_fsdp2_ep2")
PRODUCTS = ("pp2_fsdp2_tp2", "pp2_dp2_ep2", "pp2_dp2_tp2_zero1")
CASES = [(layout, CONFIG, False) for layouts in DENSE.values() for layout in layouts]
CASES += [(layout, TIED, False) for layout in TIED_ENDS] + [(layout, CONFIG, True) for layout in EXPERTS]


def make(world, layout: str, config: ModelConfig, experts: bool, optimizer=ADAMW, **settings) -> LayoutRun:
    prepare = with_experts if experts else (lambda model: model)
    layout = parse_layout(layout)
    return LayoutRun(world, layout, config=config, optimizer=optimizer, axes=stand_ins(), prepare=prepare, **settings)


def name_of(case) -> str:
    return case[0] + (", tied" if case[1] is TIED else "") + (", experts" if case[2] else "")


def run(case, work, **settings) -> list:
    """work(run) on each rank of a case."""
    ranks = parse_layout(case[0]).ranks
    on_rank = lambda world: work(make(world, *case, **settings))  # noqa: E731
    return [on_rank(SingleRankCommunicator())] if ranks == 1 else run_threads(on_rank, ranks)


def observed(run: LayoutRun) -> dict:
    """Three steps: loss sums, norms, the last gradients, norms by role before the last update, and weights."""
    losses, norms, roles = [], [], {}
    for _ in range(STEPS):
        before = run.update

        def update(model, optimizer, count, before=before):
            named = parameters_by_role(run.parallel.grad_params)
            groups = {role: {name: p.grad for name, p in of_role.items() if p.grad is not None} for role, of_role in named.items()}
            roles.update(run.parallel.norms(groups))
            before(model, optimizer, count)

        update.max_norm = before.max_norm
        run.update = update
        run.train(1)
        run.update = before
        losses.append(run.totals.loss_sum)
        norms.append(before.gradient_norm)
    gradients = run.gradients()
    require_equal(run.parallel.state.state_dict(keep_vars=True), run.parallel.holders, run.world)
    return {"loss": losses, "norm": norms, "roles": roles, "gradients": gradients, "weights": run.weights()}


@cache
def expected(config: ModelConfig, experts: bool, optimizer: str) -> dict:
    return run(("one", config, experts), observed, optimizer=OPTIMIZERS[optimizer])[0]


OPTIMIZERS = {"adamw": ADAMW, "muon": MUON, "sgd": SGD}


def require_same(found: list[dict], one: dict) -> None:
    seen = set()
    for each in found:
        for what in ("loss", "norm"):
            torch.testing.assert_close(torch.stack(each[what]), torch.stack(one[what]), rtol=1e-9, atol=0)
        assert each["roles"].keys() == one["roles"].keys()
        assert all(abs(norm / one["roles"][role] - 1) < 1e-9 for role, norm in each["roles"].items())
        for what in ("gradients", "weights"):
            assert largest_difference(each[what], {name: one[what][name] for name in each[what]}) < 1e-9, what
        seen |= each["weights"].keys()
    assert seen == one["weights"].keys()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_each_axis_and_each_data_engine_do_what_one_process_does(case):
    optimizer = "muon" if "2_tp2" in case[0] or case[2] else "adamw"
    require_same(run(case, observed, optimizer=OPTIMIZERS[optimizer]), expected(*case[1:], optimizer))


@pytest.mark.parametrize("layout", PRODUCTS)
def test_products_of_axes_do_what_one_process_does(layout):
    """With SGD, whose weights differ by no more than its gradients."""
    case = layout, CONFIG, "ep" in layout
    require_same(run(case, observed, optimizer=SGD), expected(CONFIG, "ep" in layout, "sgd"))


# Wrong on purpose: the comparison must see each.


class WholeGradientOfTheNorm(TensorStandIn):
    def shape(self, model, mesh):
        super().shape(model, mesh)
        for block in model.stack.blocks.values():
            if hasattr(block.feed_forward_norm.weight, "partial_over"):
                del block.feed_forward_norm.weight.partial_over


class ExpertsOfAllRanks(ExpertStandIn):
    def shape(self, model, mesh):
        super().shape(model, mesh)
        for block in model.stack.blocks.values():
            if hasattr(block.feed_forward.experts, "shared_over"):
                del block.feed_forward.experts.shared_over


class OneEnd(PipelineStandIn):
    def shape(self, model, mesh):
        super().shape(model, mesh)
        for parameter in model.parameters():
            if hasattr(parameter, "partial_over"):
                del parameter.partial_over


@pytest.mark.parametrize(
    "axis, case",
    [
        (WholeGradientOfTheNorm(), ("tp2", CONFIG, False)),
        (ExpertsOfAllRanks(), ("dp2_ep2", CONFIG, True)),
        (OneEnd(), ("pp2", TIED, False)),
    ],
)
def test_a_fact_that_is_not_stated_is_seen(axis, case):
    def work(world):
        prepare = with_experts if case[2] else (lambda model: model)
        return observed(LayoutRun(world, parse_layout(case[0]), config=case[1], optimizer=SGD, axes=(axis,), prepare=prepare))

    with pytest.raises((AssertionError, ReplicasDiffer)):
        require_same(run_threads(work, 2), expected(*case[1:], "sgd"))


# Checkpoints.


FAMILIES = {
    "dense": (CONFIG, False, ("one", "tp2", "dp2_tp2_zero1", "fsdp2_tp2", "pp2", "pp2_fsdp2", "fsdp2", "dp2_zero1")),
    "tied": (TIED, False, ("one", "pp2", "pp2_fsdp2", "fsdp2")),
    "experts": (CONFIG, True, ("one", "dp2_ep2", "dp4_zero1_ep2", "fsdp4_ep2", "fsdp2")),
}


@cache
def uninterrupted(family: str, optimizer: str) -> dict:
    config, experts, _ = FAMILIES[family]
    return run(("one", config, experts), lambda run: run.train(3).weights(), optimizer=OPTIMIZERS[optimizer])[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family, writer", [(family, writer) for family, (*_, layouts) in FAMILIES.items() for writer in layouts])
def test_every_layout_resumes_every_other_layouts_checkpoint(family, writer, optimizer, tmp_path):
    config, experts, layouts = FAMILIES[family]
    settings = {"optimizer": OPTIMIZERS[optimizer]}
    run((writer, config, experts), lambda run: run.train(2).save(tmp_path, asynchronous=False), **settings)
    readers = layouts if optimizer == "adamw" else [layouts[(layouts.index(writer) + 1) % len(layouts)]]
    for reader in readers:
        found = run((reader, config, experts), lambda run: run.restore(tmp_path).train(1).weights(), seed=9, **settings)
        merged = {name: tensor for each in found for name, tensor in each.items()}
        assert largest_difference(merged, uninterrupted(family, optimizer)) < 1e-9, f"{writer} to {reader}"


@pytest.mark.parametrize("table", ["holders", "optim_holders"])
def test_a_part_that_no_rank_would_write_is_refused_before_anything_is_saved(table, tmp_path):
    """As where a rank takes its shard for a copy of another one's."""

    def work(run):
        name = "stack.blocks.1.feed_forward.down_proj.weight"
        getattr(run.parallel, table).ranks.pop((name, run.parallel.weight_regions[name]), None)
        run.save(tmp_path)

    with pytest.raises(ValueError, match=r"hold 180 of the 360 numbers of stack.blocks.1.feed_forward.down_proj.weight \[20, 18\]"):
        run(("tp2", CONFIG, False), work)
    assert not list(tmp_path.iterdir())


def test_a_missing_part_of_a_box_is_damage(tmp_path):
    run(("tp2", CONFIG, False), lambda run: run.train(1).save(tmp_path, asynchronous=False))
    folder = tmp_path / "step-00000001"
    (folder / "weights-rank-00001.safetensors").unlink()
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("weights-rank-00001", "weights-rank-00000"))
    with pytest.raises(CheckpointError):
        run(("one", CONFIG, False), lambda run: run.restore(tmp_path))
