"""Pipeline parallelism against one process, in float64: schedules, layouts, families, evaluation, frozen parts, the meta device."""

import random

import pytest
import torch
from pipeline_runs import MICROBATCHES, autocast_objective, config_of, expected, half_packed, observed, on_ranks, require_same, runner_of
from sharded_runs import build, share

from shared.loop import evaluate
from shared.loss import next_token_objective
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import AXES, apply_parallel
from shared.parallel.pipeline.axis import PipelineParallel
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.pipeline.simulate import ScheduleError, validate

RUNS = [  # layout, family, optimizer, schedule
    ("pp2", "llama", "sgd", "1f1b"),
    ("pp2", "gpt2", "adamw", "gpipe"),
    ("pp2", "gpt2", "adamw", "interleaved"),
    ("pp2", "qwen3", "muon", "zero_bubble"),
    ("pp2", "bloom", "sgd", "1f1b"),
    ("pp2", "mistral", "sgd", "interleaved"),
    ("pp2", "bert", "sgd", "1f1b"),
    ("pp4", "gpt2", "sgd", "1f1b"),
    ("pp4", "gpt2", "adamw", "zero_bubble"),
    ("pp2_dp2", "qwen3", "muon", "1f1b"),
    ("pp2_dp2", "gpt2", "adamw", "zero_bubble"),
    ("pp2_dp2_zero1", "llama", "muon", "interleaved"),
    ("pp2_dp2_zero1", "llama", "muon", "zero_bubble"),
    ("pp2_fsdp2", "gpt2", "muon", "1f1b"),
    ("pp2_fsdp2", "qwen3", "adamw", "interleaved"),
    ("pp4_fsdp2", "llama", "adamw", "gpipe"),
    ("pp2_tp2", "qwen3", "sgd", "1f1b"),
    ("pp2_tp2", "gpt2", "muon", "gpipe"),
    ("pp2_tp2_sp", "gpt2", "sgd", "1f1b"),
    ("pp2_dp2_tp2", "gpt2", "sgd", "1f1b"),
    ("pp2_fsdp2_tp2", "gpt2", "sgd", "1f1b"),
]


@pytest.mark.parametrize("layout, family, optimizer, schedule", RUNS, ids=lambda value: value)
def test_a_pipeline_does_what_one_process_does(layout, family, optimizer, schedule):
    found = on_ranks(observed, layout, family, optimizer, schedule)
    require_same(found, expected(family, optimizer))


@pytest.mark.parametrize("layers, microbatches, layout", [(5, 1, "pp2"), (5, 3, "pp4"), (7, 7, "pp3")])
def test_layers_and_micro_batches_need_not_divide(layers, microbatches, layout):
    sizes = {"layers": layers, "microbatches": microbatches}
    require_same(on_ranks(observed, layout, "gpt2", "sgd", **sizes), expected("gpt2", "sgd", microbatches, layers))


@pytest.mark.parametrize("recomputed", ["full", "selective"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_blocks_are_recomputed_in_their_stage(recomputed, schedule):
    require_same(on_ranks(observed, "pp2", "gpt2", "sgd", schedule, activation_checkpointing=recomputed), expected("gpt2", "sgd"))


@pytest.mark.parametrize("layout, schedule, recomputed", [
    ("pp2_fsdp2", "interleaved", "full"), ("pp2_fsdp2", "gpipe", "selective"), ("pp2_tp2_sp", "1f1b", "full"),
])  # fmt: skip
def test_blocks_are_recomputed_where_weights_are_cut(layout, schedule, recomputed):
    settings = {"activation_checkpointing": recomputed} | ({"reshard_after_forward": False} if schedule == "gpipe" else {})
    require_same(on_ranks(observed, layout, "gpt2", "sgd", schedule, **settings), expected("gpt2", "sgd"))


def test_any_valid_list_can_be_run():
    """1F1B with neighbours swapped at random wherever the result is still valid."""
    generator, schedule, changed = random.Random(3), make_schedule("1f1b", 2, MICROBATCHES), 0
    for _ in range(40):
        own = generator.choice(schedule)
        place = generator.randrange(len(own) - 1)
        own[place], own[place + 1] = own[place + 1], own[place]
        try:
            validate(schedule, MICROBATCHES)
            changed += 1
        except ScheduleError:
            own[place], own[place + 1] = own[place + 1], own[place]
    assert changed >= 2 and schedule != make_schedule("1f1b", 2, MICROBATCHES)

    def work(run):
        runner_of(run).use(schedule, MICROBATCHES)
        return observed(run)

    require_same(on_ranks(work, "pp2", "gpt2", "sgd"), expected("gpt2", "sgd"))


# Evaluation and generation: the whole pipeline, on every rank.


@pytest.mark.parametrize("layout, schedule", [("pp2", "1f1b"), ("pp2", "interleaved"), ("pp2_fsdp2", "1f1b"), ("pp2_tp2", "1f1b")])
def test_evaluation_and_logits_are_those_of_one_process(layout, schedule):
    config = config_of("gpt2")
    held_out = [half_packed(9, number, config) for number in range(2)]

    def work(run):
        model, data = run.parallel.model, run.mesh.data
        own = [share(batch, data.rank, data.size) for batch in held_out]
        totals = [run.parallel.sum(evaluate(model, own, objective)) for objective in (packed_next_token_objective, next_token_objective)]
        run.train(1)  # evaluation leaves nothing behind
        model.eval()
        with run.parallel.gathering(), torch.no_grad():
            logits = model(held_out[0]["input_ids"])
        return totals, run.totals, logits

    totals, trained, logits = on_ranks(work, "one", "gpt2")[0]
    for each_totals, each_trained, each_logits in on_ranks(work, layout, "gpt2", "sgd", schedule):
        for mine, theirs in zip((*each_totals, each_trained), (*totals, trained), strict=True):
            assert relative(mine.loss_sum, theirs.loss_sum) < 1e-9 and mine.token_count == theirs.token_count
            assert mine.metrics == theirs.metrics and mine.token_count.dtype == theirs.token_count.dtype
        assert relative(each_logits, logits) < 1e-9


def relative(value, other) -> float:
    return float((value - other).norm() / other.norm())


# Loss scale, autocast, frozen parts, meta device.


@pytest.mark.parametrize("layout, schedule", [("pp2", "1f1b"), ("pp2_dp2", "interleaved")])
def test_the_loss_scale_reaches_the_last_stage(layout, schedule):
    work = lambda run: (run.train(1).gradients(), run.totals)  # noqa: E731
    ((one, totals),) = on_ranks(work, "one", "gpt2", "sgd", scaler=LossScaler(LossScaleConfig()))
    for gradients, own_totals in on_ranks(work, layout, "gpt2", "sgd", schedule, scaler=LossScaler(LossScaleConfig())):
        assert relative(own_totals.loss_sum, totals.loss_sum) < 1e-9
        assert all(relative(gradients[name], one[name]) < 1e-9 for name in gradients if one[name].norm() > 1e-9)


@pytest.mark.parametrize("layout, schedule", [("pp2", "1f1b"), ("pp2", "zero_bubble"), ("pp2_fsdp2", "1f1b")])
def test_hidden_states_travel_in_the_dtype_of_the_weights(layout, schedule):
    settings = {"objective": autocast_objective, "dtype": torch.float32, "computed_in": torch.bfloat16}
    work = lambda run: (run.train(2).totals.loss_sum, run.gradients())  # noqa: E731
    loss, gradients = on_ranks(work, "one", "llama", **settings)[0]
    for own_loss, own in on_ranks(work, layout, "llama", "sgd", schedule, **settings):
        assert relative(own_loss, loss) < 1e-3
        assert all(relative(own[name], gradients[name]) < 0.03 for name in own)


FROZEN = {
    "the first stage": lambda name: not name.startswith(("stack.blocks.2", "stack.blocks.3", "stack.final", "head")),
    "the last stage": lambda name: name.startswith(("stack.blocks.2", "stack.blocks.3", "stack.final", "head")),
    "matrices": lambda name: "proj" in name and "blocks.1" in name,
}


@pytest.mark.parametrize("layout, schedule", [("pp2", "1f1b"), ("pp2_dp2", "zero_bubble"), ("pp2_fsdp2", "1f1b")])
@pytest.mark.parametrize("what", FROZEN)
def test_frozen_parts_stay_and_the_rest_is_trained(what, layout, schedule):
    one = on_ranks(observed, "one", "llama", "adamw", frozen=FROZEN[what])[0]
    found = on_ranks(observed, layout, "llama", "adamw", schedule, frozen=FROZEN[what])
    for each in (one, *found):
        each["gradients"] = {name: gradient for name, gradient in each["gradients"].items() if gradient is not None}
    require_same(found, one)


@pytest.mark.parametrize("layout, schedule", [("pp2", "interleaved"), ("pp2_fsdp2", "1f1b"), ("pp2_tp2", "1f1b")])
def test_a_model_on_the_meta_device_gets_the_weights_of_its_stages(layout, schedule):
    config, parallel = config_of("gpt2"), parse_layout(layout)
    parallel.pipeline_schedule, parallel.pipeline_chunks = schedule, 2 if schedule == "interleaved" else 1

    def work(world):
        from shared.parallel.tensor.axis import TensorParallel

        with torch.device("meta"):
            model = TransformerModel(config)
        made = apply_parallel(model, Mesh(parallel, world), axes=(*AXES, PipelineParallel(), TensorParallel()))
        return {name: weight.clone() for name, weight in made.whole_weights() if weight is not None}

    whole, found = dict(build(config, dtype=torch.float32).named_parameters()), run_threads(work, parallel.ranks)
    assert set().union(*found) == set(whole)
    assert all(torch.equal(weight, whole[name]) for each in found for name, weight in each.items())


def test_one_process_has_no_pipeline_around_its_model():
    (run,) = on_ranks(lambda run: run, "one")
    assert run.parallel.model is run.plain


@pytest.mark.parametrize("layout, together", [("pp2", False), ("pp2_dp2", True)])
def test_gradients_lie_in_buckets_only_where_they_are_exchanged(layout, together):
    work = lambda run: [parameter.grad.untyped_storage().data_ptr() for parameter in run.train(1).plain.parameters()]  # noqa: E731
    for places in on_ranks(work, layout):
        assert (len(set(places)) < len(places)) == together
