"""Floor 6 with axes that it does not know: replicas that differ, starts without memory, exports, ranks that use different parameters."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from layout_runs import LayoutRun, largest_difference
from sharded_runs import ADAMW, batch_of
from step_records import STEPS
from stand_in_axes import PipelineStandIn, stand_ins, with_experts
from test_composition import CASES, CONFIG, SGD, TIED, name_of, run

from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import save_pretrained
from shared.model.init import initialize
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import CommunicationError, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.data.engine import DataEngine, Parameters, add_partial
from shared.parallel.data.zero import Zero
from shared.parallel.health.replicas import ReplicaCheck, ReplicasDiffer, require_equal
from shared.parallel.mesh import Axis, Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.processes.launch import run_processes
from shared.parallel.strategy import ParallelStrategy
from shared.totals import Totals


# Replicas, starts, exports.


@pytest.mark.parametrize("case", [("dp2_tp2", CONFIG, False), ("pp2_dp2", CONFIG, False), ("dp4_ep2", CONFIG, True)], ids=name_of)
def test_a_planted_difference_is_found_where_ranks_hold_the_same(case):
    """The last rank's last norm or expert gets another bit; on right runs the same check said nothing above."""

    def work(run):
        named = dict(run.parallel.module.named_parameters())
        weight = next(p for name, p in reversed(named.items()) if "norm" in name or "experts" in name)
        if run.world.rank == run.world.size - 1:
            weight.data.view(-1)[3] += 1e-6
        require_equal(run.parallel.state.state_dict(keep_vars=True), run.parallel.holders, run.world)

    with pytest.raises(ReplicasDiffer, match="weights of rank"):
        run(case, work)


def started(world, layout: str, config: ModelConfig, experts: bool) -> dict:
    with torch.device("meta"):
        model = TransformerModel(config)
    if experts:
        with_experts(model)
        for block in model.stack.blocks.values():
            block.feed_forward.experts = torch.nn.Parameter(block.feed_forward.experts.to("meta"))
            block.feed_forward.experts.role = "expert"
    parallel = apply_parallel(model, Mesh(parse_layout(layout), world), ADAMW, seed=5, axes=stand_ins())
    return {name: tensor.clone() for name, tensor in parallel.whole_weights() if tensor is not None}


@pytest.mark.parametrize("case", [*CASES[:2], CASES[4], CASES[5], CASES[8], ("pp2", TIED, False), ("fsdp4_ep2", CONFIG, True)], ids=name_of)
def test_a_model_that_starts_without_memory_has_the_plain_models_weights(case):
    layout, config, experts = case
    plain = TransformerModel(config)
    plain = with_experts(plain) if experts else plain
    initialize(plain, seed=5)
    found = run_threads(started, parse_layout(layout).ranks, *case)
    merged = {name: tensor for each in found for name, tensor in each.items()}
    assert largest_difference(merged, dict(plain.named_parameters())) == 0


@pytest.mark.parametrize("case", [("tp2", CONFIG, False), ("pp2", CONFIG, False), ("fsdp2", CONFIG, False)], ids=name_of)
def test_rank_0_gets_the_whole_model_and_what_is_sharded_is_not_exported(case, tmp_path):
    def work(run):
        full = run.parallel.full_weights()
        with pytest.raises(ValueError, match="sharded|lacks"):
            save_pretrained(run.parallel.module, tmp_path / "model")
        return full

    first, *others = run(case, work)
    plain = dict(LayoutRun(SingleRankCommunicator(), parse_layout("one"), config=CONFIG).plain.named_parameters())
    assert largest_difference(first, plain) == 0 and not any(others)


def test_an_axis_that_is_not_handed_in_is_refused_with_its_chapter():
    with pytest.raises(ValueError, match="tensor_parallel is 2: it comes with chapter 07"):
        run_threads(lambda world: LayoutRun(world, parse_layout("tp2"), axes=(PipelineStandIn(),)), 2)


def test_a_frozen_model_is_parallelized_where_no_optimizer_is_asked_for():
    """As a reference model is, whose weights are sharded too."""

    def logits(world, optimizer=None):
        model = TransformerModel(CONFIG, seed=2).requires_grad_(False)
        parallel = apply_parallel(model, Mesh(parse_layout("fsdp2"), world), optimizer)
        with torch.no_grad():
            return parallel.model(batch_of(0, 0)["input_ids"])

    with torch.no_grad():
        plain = TransformerModel(CONFIG, seed=2)(batch_of(0, 0)["input_ids"])
    assert all(torch.equal(each, plain) for each in run_threads(logits, 2))
    with pytest.raises(ValueError, match="no trainable parameter"):
        run_threads(partial(logits, optimizer=ADAMW), 2)


def test_weights_are_gathered_once_for_many_forward_passes_while_they_are_kept():
    def passes(world, keep: bool):
        parallel = apply_parallel(TransformerModel(CONFIG), Mesh(parse_layout("fsdp2"), world), ADAMW)
        world.trace.clear()
        with torch.no_grad(), parallel.gathering() if keep else torch.no_grad():
            results = [parallel.model(batch_of(0, 0)["input_ids"]) for _ in range(5)]
        after = parallel.model(batch_of(0, 0)["input_ids"])
        return world.trace.calls()["all_gather", "fsdp"], parallel.gathered_bytes, torch.stack([*results, after.detach()])

    (often, *_), _ = run_threads(passes, 2, False)
    (once, held, results), _ = run_threads(passes, 2, True)
    assert often == 6 * 4 and once == 2 * 4  # root and three blocks, in five passes kept and in one after
    assert all(torch.equal(result, results[0]) for result in results)


def test_replicas_that_use_different_blocks_exchange_all_the_same():
    """Under HSDP, one replica skips a block in this step: its shards of that gradient count as 0."""

    def work(world):
        model = TransformerModel(CONFIG).double()
        parallel = apply_parallel(model, Mesh(parse_layout("dp2_fsdp2"), world), SGD)
        if parallel.mesh.dp.rank == 1:
            inner = model.stack.run_block
            model.stack.run_block = lambda block, x, context: x if block is model.stack.blocks["1"] else inner(block, x, context)
        batch = batch_of(0, 0)
        totals = parallel.runner(accumulate_gradients)(parallel.model, [batch], next_token_objective)
        parallel.reducer(parallel.model, totals)
        return float(parallel.grad_norm()), sum(p.grad is not None for p in parallel.optim_params.parameters())

    found = run_threads(work, 4)
    assert len({norm for norm, _ in found}) == 1 and found[0][0] > 0 and all(count for _, count in found)


def test_a_partial_gradient_that_one_rank_lacks_counts_as_zero_there():
    def work(world):
        first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        if world.rank == 0:
            first.grad = torch.tensor([1.0, 2.0])
        add_partial([first, second], world)
        return first.grad.tolist(), second.grad

    assert run_threads(work, 2) == [([1.0, 2.0], None)] * 2


def test_what_is_gathered_keeps_its_dtype_and_is_a_copy():
    def work(world):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).bfloat16()
        strategy = ParallelStrategy(model, Mesh(parse_layout("dp2"), world), [])
        full = strategy.full_weights()
        with torch.no_grad():
            model[0].weight.zero_()
        return {name: (tensor.dtype, tensor.abs().sum().item() > 0) for name, tensor in full.items()}

    first, other = run_threads(work, 2)
    assert not other and first["0.weight"] == (torch.bfloat16, True) and first["1.num_batches_tracked"][0] == torch.int64


class Chain(torch.nn.Module):
    """x times six weights of every rank, and after each plus one of six that every second rank shares, where these are used."""

    def __init__(self):
        super().__init__()
        self.dense, self.shared = (torch.nn.ParameterList(torch.nn.Parameter(torch.full((300,), 1.1)) for _ in range(6)) for _ in "ab")

    def forward(self, use: bool) -> torch.Tensor:
        x = torch.ones(300)
        for dense, shared in zip(self.dense, self.shared, strict=True):
            x = x * dense + (shared if use else 0)
        return x.sum()


@pytest.mark.parametrize("alone", [False, True])
def test_zero_engines_of_two_groups_do_not_wait_within_the_backward_pass(alone):
    """Rank 1 does not use what it shares with rank 3. Engines that each keep few buckets under way wait for each other there."""

    def work(world):
        model, pairs = Chain(), world.split("edp", [(0, 2), (1, 3)])
        parts = ((name, group) for name, group in (("dense", world), ("shared", pairs)))
        named = [({each: p for each, p in model.named_parameters() if each.startswith(name)}, group) for name, group in parts]
        engines = [Zero(Parameters(of_group), group, 1, bucket_megabytes=1e-9, alone=alone) for of_group, group in named]
        strategy = ParallelStrategy(model, Mesh(parse_layout("dp4"), world), engines)
        objective = lambda model, use: Totals(model(use), torch.tensor(1), {})  # noqa: E731
        strategy.reducer(model, strategy.runner(accumulate_gradients)(model, [world.rank != 1], objective))
        return [name for name, shard in strategy.optim_params.named_parameters() if shard.grad is not None]

    if alone:
        with pytest.raises(CommunicationError, match="deadlock"):
            run_threads(work, 4)
    else:
        assert all(run_threads(work, 4))


class Beside(Axis):
    """An axis that puts an engine of its own in front of the data engines, as a pipeline does; this one does nothing."""

    def shape(self, model, mesh):
        pass

    def engine(self, model, mesh):
        engine = DataEngine(model, mesh.loss)
        engine.optim_params = torch.nn.Module()
        return engine


def trained_beside(world, layout: ParallelConfig):
    return LayoutRun(world, layout, config=CONFIG, optimizer=ADAMW, axes=(Beside(),)).train(STEPS).weights()


def test_an_axis_that_adds_an_engine_leaves_ddps_wrapper_around_the_model():
    """An objective that called the module inside would exchange no gradients, and each rank would train a model of its own."""
    alone = LayoutRun(SingleRankCommunicator(), parse_layout("one"), config=CONFIG, optimizer=ADAMW).train(STEPS).weights()
    found = run_processes(trained_beside, 2, parse_layout("dp2", ParallelConfig(backend="torch")), timeout=300)
    assert all(largest_difference(weights, alone) < 1e-9 for weights in found)


class FrozenEnd(PipelineStandIn):
    def shape(self, model, mesh):
        super().shape(model, mesh)
        model.requires_grad_(mesh.pp.rank == 0)


def test_ranks_without_a_trained_parameter_decide_on_the_optimizers_offload_as_the_others_do():
    """The last stage is frozen, so its ranks have no shard whose device they could ask. The model is on the CPU: nobody offloads."""
    layout = parse_layout("pp2_dp2_zero1", ParallelConfig(offload_optimizer=True))

    def work(world):
        parallel = LayoutRun(world, layout, config=CONFIG, axes=(FrozenEnd(),)).parallel
        return len(list(parallel.optim_params.parameters())) > 0, len(parallel.around)

    assert run_threads(work, 4) == [(True, 0), (True, 0), (False, 0), (False, 0)]


def test_replicas_are_compared_before_the_first_step_and_then_every_so_many(monkeypatch):
    compared = []
    monkeypatch.setattr(ReplicaCheck, "compare", lambda self, step: compared.append(step))
    check = ReplicaCheck(None, check_every=3)
    check.on_start(SimpleNamespace(step=7))
    for step in range(8, 13):
        check.on_step(SimpleNamespace(step=step))
    assert compared == [7, 9, 12]


@pytest.mark.parametrize("differs", ["running_mean", "weight"])
def test_replicas_may_have_buffers_of_their_own_but_no_parameters(differs, tmp_path):
    """Between saves, and before one."""

    def work(world, save: bool):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
            getattr(model[1], differs).fill_(1.0 + world.rank)
        strategy = ParallelStrategy(model, Mesh(parse_layout("dp2"), world), [])
        if not save:
            return ReplicaCheck(strategy).compare(3)
        saver = strategy.saver(tmp_path, asynchronous=False)
        saver.save(3, torch.optim.SGD(strategy.optim_params.parameters(), lr=0.1), {}, {})
        saver.close()

    for save in (False, True):
        if differs == "weight":
            with pytest.raises(ReplicasDiffer, match="after step 3, the weights of rank 1 .* is 1.weight"):
                run_threads(work, 2, save)
        else:
            run_threads(work, 2, save)
    assert len(list(tmp_path.glob("step-*"))) == (differs != "weight")
