"""Experts spread over ranks: every layout trains like one process, in float64: losses, gradients, norms, weights, loads."""

import sys
from dataclasses import replace
from functools import cache

import cloudpickle
import pytest
import torch
from mixture_runs import MODEL, MixtureRun, alone, observed, on_ranks, require_same

from shared.course.errors import SettingError
from shared.moe.layer import mixture_layers
from shared.parallel.comm.communicator import CommunicationError, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.health.replicas import ReplicasDiffer, require_equal
from shared.parallel.processes.launch import run_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LAYOUTS = [  # the layout, what is computed again, the optimizer
    ("dp2_ep2", "none", "adamw"),
    ("dp2_ep2", "full", "muon"),
    ("dp4_ep4", "none", "muon"),
    ("dp6_ep2", "full", "adamw"),  # rank 0 has no target
    ("dp2_ep2_zero1", "none", "muon"),
    ("dp4_ep2_zero2", "selective", "muon"),
    ("fsdp2_ep2", "none", "muon"),
    ("fsdp2_ep2", "full", "adamw"),
    ("dp2_fsdp2_ep2", "selective", "muon"),
    ("pp2_fsdp2_ep2", "full", "adamw"),
    ("pp2_dp2_ep2_zero1", "none", "adamw"),
]
MORE = [
    ("dp2_ep2", "selective", "adamw"),
    ("dp4_ep2_zero1", "none", "adamw"),
    ("dp2_ep2_zero2", "none", "adamw"),
    ("dp2_fsdp2_ep4", "none", "adamw"),
    ("pp2_dp2_ep2", "none", "muon"),
]
EXPERTS = [f"stack.blocks.{block}.feed_forward.experts.{name}_proj.weight" for block in (1, 2, 3) for name in ("gate", "up", "down")]


def layout_of(word: str, **more) -> ParallelConfig:
    return parse_layout(word, ParallelConfig(**more))


@pytest.mark.parametrize(
    "word, recomputed, optimizer", LAYOUTS + [pytest.param(*each, marks=pytest.mark.slow) for each in MORE], ids=lambda value: value
)
def test_every_layout_trains_like_one_process(word, recomputed, optimizer):
    require_same(on_ranks(layout_of(word, activation_checkpointing=recomputed), optimizer), alone(optimizer))


@pytest.mark.parametrize("schedule, chunks", [("zero_bubble", 1), ("interleaved", 2), pytest.param("gpipe", 1, marks=pytest.mark.slow)])
def test_every_schedule_of_a_pipeline_exchanges_rows(schedule, chunks):
    layout = layout_of("pp2_dp2_ep2", pipeline_schedule=schedule, pipeline_chunks=chunks)
    require_same(on_ranks(layout, "muon"), alone("muon"))


def on_processes(world) -> list[dict]:
    layouts = layout_of("dp2_ep2", activation_checkpointing="full"), layout_of("fsdp2_ep2"), layout_of("dp2_ep2_zero1")
    return [observed(MixtureRun(world, layout, "muon")) for layout in layouts]


def test_processes_train_like_one_process():
    for found in zip(*run_processes(on_processes, 2), strict=True):
        require_same(list(found), alone("muon"))


@pytest.mark.parametrize("word", ["fsdp2_ep2", "pp2_dp2_ep2"])
def test_a_loss_scale_reaches_routers_and_experts_of_all_ranks(word):
    require_same(on_ranks(layout_of(word), scale=1024.0), alone())


# Ranks without rows.


def directed(model):
    """All tokens choose experts 0 and 1."""
    with torch.no_grad():
        for layer in mixture_layers(model):
            layer.router.bias[:2] = 10.0
    return model


@cache
def alone_directed() -> dict:
    return observed(MixtureRun(SingleRankCommunicator(), ParallelConfig(), prepare=directed))


@pytest.mark.parametrize(
    "word, recomputed",
    [("dp2_ep2", "none"), ("dp4_ep4", "selective"), ("fsdp2_ep2", "full"), ("dp2_ep2_zero2", "none"), ("pp2_dp2_ep2", "none")],
)
def test_a_rank_whose_experts_get_no_row_joins_and_has_gradients_of_0(word, recomputed):
    found = on_ranks(layout_of(word, activation_checkpointing=recomputed), prepare=directed)
    require_same(found, alone_directed())
    gradients = {name: gradient for each in found for name, gradient in each["gradients"][-1].items()}
    for name in EXPERTS:
        assert gradients[name][:2].any() and not gradients[name][2:].any(), "0, and not None: weight decay is the same everywhere"


@pytest.mark.parametrize("implementation", ["loop", "batched", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_rows_have_gradients_of_0_however_they_are_computed(implementation, dtype):
    config = replace(MODEL, experts=replace(MODEL.experts, implementation=implementation))

    def work(world):
        run = MixtureRun(world, layout_of("dp2_ep2"), config=config, dtype=torch.float32, prepare=directed)
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            run.train(1)
        return {name: parameter.grad for name, parameter in run.plain.named_parameters()}

    found = run_threads(work, 2)
    for name in EXPERTS:
        assert found[0][name].any() and not found[1][name].any() and found[1][name].shape == found[0][name].shape


@pytest.mark.parametrize("trained", ["experts", "router", "attention"])
def test_parts_of_a_model_can_be_frozen(trained):
    def work(world):
        def freeze(model):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(trained in name and not name.endswith("bias"))
            return model

        return observed(MixtureRun(world, layout_of("dp2_ep2" if world.size > 1 else "one"), prepare=freeze))

    require_same(run_threads(work, 2), work(SingleRankCommunicator()))


def test_without_recomputation_and_with_it_all_ranks_exchange_as_often():
    """Three layers, two micro-batches: numbers, rows there and back, and two gradients; what is recomputed is exchanged again."""
    found = {}
    for recomputed in ("none", "full", "selective"):

        def calls(world, recomputed=recomputed):
            run = MixtureRun(world, layout_of("dp2_ep2", activation_checkpointing=recomputed), prepare=directed)
            world.trace.clear()
            run.train(1)
            return world.trace.calls()["all_to_all", "ep"]

        found[recomputed] = set(run_threads(calls, 2))
    assert found == {"none": {3 * 2 * 5}, "full": {3 * 2 * 8}, "selective": {3 * 2 * 8}}


# Wrong on purpose.


def test_expert_gradients_that_are_added_over_all_data_ranks_are_seen(monkeypatch):
    from shared.moe.parallel import axis

    def over_all(layer, ep, edp, ranges, by_torch, right=axis.spread):
        right(layer, ep, edp, ranges)
        for linear in layer.experts.children():
            del linear.weight.shared_over

    monkeypatch.setattr(axis, "spread", over_all)
    with pytest.raises((AssertionError, ReplicasDiffer)):
        require_same(on_ranks(layout_of("dp2_ep2")), alone())


@pytest.mark.parametrize("word", ["dp2_ep2", "fsdp2_ep2"])
def test_expert_gradients_that_are_averaged_over_the_exchange_are_seen(word, monkeypatch):
    from shared.moe.parallel import all_to_all

    right = all_to_all.FinishExchange.backward
    monkeypatch.setattr(all_to_all.FinishExchange, "backward", staticmethod(lambda ctx, upstream: right(ctx, upstream / 2)))
    with pytest.raises(AssertionError):
        require_same(on_ranks(layout_of(word)), alone())


def test_copies_of_experts_that_differ_are_named():
    def work(world):
        run = MixtureRun(world, layout_of("dp4_ep2"))
        if world.rank == 3:
            with torch.no_grad():
                run.plain.stack.blocks["2"].feed_forward.experts.up_proj.weight[1, 3, 5] += 1e-9
        require_equal(run.parallel.state.state_dict(keep_vars=True), run.parallel.holders, world)

    with pytest.raises(ReplicasDiffer, match=r"stack\.blocks\.2\.feed_forward\.experts\.up_proj\.weight"):
        run_threads(work, 4)


def test_a_rank_that_skips_its_experts_is_named():
    def work(world):
        run = MixtureRun(world, layout_of("dp2_ep2"))
        if world.rank == 1:
            experts = run.plain.stack.blocks["3"].feed_forward.experts
            experts.forward, experts.arrived = (lambda rows, counts: rows), (lambda rows: rows)
        run.train(1)

    with pytest.raises(CommunicationError, match="#7 of ep, rank 0 calls all_to_all of int64; rank 1 calls all_to_all of float64"):
        run_threads(work, 2)


# Without gradients.


@pytest.mark.parametrize("word", ["dp2_ep2", "fsdp4_ep2"])
def test_ranks_with_other_rows_and_other_lengths_evaluate_like_one_process(word):
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(31, shape, generator=generator) for shape in ((3, 11), (1, 5), (2, 8), (1, 2))]

    def logits(world):
        run = MixtureRun(world, layout_of(word))
        with torch.no_grad(), run.parallel.gathering():
            return run.parallel.model.eval()(texts[world.rank])

    plain = MixtureRun(SingleRankCommunicator(), ParallelConfig()).plain.eval()
    for ids, found in zip(texts, run_threads(logits, parse_layout(word).ranks), strict=False):
        torch.testing.assert_close(found, plain(ids).detach(), rtol=1e-12, atol=1e-12)


def test_a_rank_with_one_batch_more_is_named():
    """`EvaluationLoader` gives all ranks equally many."""

    def work(world):
        run = MixtureRun(world, layout_of("dp2_ep2"))
        with torch.no_grad():
            for _ in range(1 + world.rank):
                run.parallel.model(torch.zeros(1, 4, dtype=torch.int64))

    with pytest.raises(CommunicationError, match="deadlock: rank 0 has finished; rank 1 waits in all_to_all #10 of ep"):
        run_threads(work, 2)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_step_in_16_bits_has_the_gradients_of_float32_up_to_rounding(precision):
    """Rows travel in 16 bits too, and their gradients."""
    config = replace(MODEL, experts=replace(MODEL.experts, num_experts_per_tok=4, capacity_factor=None))

    def gradients(world, layout, enabled):
        run = MixtureRun(world, layout, config=config, dtype=torch.float32, computed_in=precision if enabled else None)
        world.trace.clear()
        with torch.autocast("cpu", precision, enabled=enabled):
            run.train(1)
        numbers = 3 * 2 * 4 * 8  # three layers, two micro-batches, four experts, int64
        return run.gradients(), world.trace.bytes()["all_to_all", "ep"] - numbers

    expected, _ = gradients(SingleRankCommunicator(), ParallelConfig(), False)
    (_, wide), _ = run_threads(gradients, 2, layout_of("dp2_ep2"), False)
    for found, sent in run_threads(gradients, 2, layout_of("dp2_ep2"), True):
        assert sent * 2 == wide
        for name, value in expected.items():
            assert value is None or (found[name] - value).norm() < 0.06 * value.norm(), name


@pytest.mark.parametrize(
    "word, config, sentence",
    [
        ("dp3_ep3", MODEL, "expert_parallel 3 does not divide model.experts.num_experts 4"),
        ("dp2_ep2", replace(MODEL, experts=None), "expert_parallel is 2, and the model has no experts"),
    ],
)
def test_what_cannot_be_spread_is_refused(word, config, sentence):
    with pytest.raises(SettingError, match=sentence):
        run_threads(lambda world: MixtureRun(world, layout_of(word), config=config), parse_layout(word).ranks)
