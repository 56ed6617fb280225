"""Pipeline parallelism against one process, in float64: schedules, layouts, families; what is kept, saved, frozen and refused."""

import random

import pytest
import torch
from layout_runs import largest_difference
from pipeline_runs import MICROBATCHES, config_of, expected, half_packed, observed, on_ranks, require_same, runner_of
from sharded_runs import build, share
from tensor_runs import batches
from torch.autograd.graph import saved_tensors_hooks

from shared.course.errors import CourseError, SettingError
from shared.loop import evaluate
from shared.loss import next_token_objective
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.parallel.comm.communicator import CommunicationError
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import AXES, apply_parallel
from shared.parallel.pipeline.axis import PipelineParallel, stage_blocks
from shared.parallel.pipeline.links import Links
from shared.parallel.pipeline.runner import PipelineRunner
from shared.parallel.pipeline.schedules import Action, make_schedule
from shared.parallel.pipeline.validate import ScheduleError, validate
from shared.totals import Totals

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
    assert [list(blocks) for blocks in stage_blocks(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]


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


def test_a_schedule_that_cannot_be_run_is_refused_before_anything_runs():
    def work(run):
        runner_of(run).use([[Action("F", 0)], [Action("F", 0)]], 1)

    with pytest.raises(ScheduleError, match="Rank 0 never does B0"):
        on_ranks(work, "pp2")


# What a rank keeps.


class Meter:
    """The bytes that autograd keeps for backward passes on this thread, weights apart."""

    def __init__(self, model):
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.now = self.most = 0

    def count(self, change: int) -> None:
        self.now += change
        self.most = max(self.most, self.now)

    def pack(self, tensor):
        return Kept(self, tensor)

    def watched(self):
        return saved_tensors_hooks(self.pack, lambda kept: kept.tensor)


class Kept:
    def __init__(self, meter: Meter, tensor):
        self.meter, self.tensor = meter, tensor
        self.bytes = 0 if tensor.untyped_storage().data_ptr() in meter.weights else tensor.nbytes
        meter.count(self.bytes)

    def __del__(self):
        self.meter.count(-self.bytes)


@pytest.mark.parametrize("name, ranks", [("gpipe", 4), ("1f1b", 4), ("interleaved", 2), ("zero_bubble", 4)])
def test_what_ranks_keep_is_what_the_schedule_says(name, ranks):
    """In graphs on every rank; in bytes on those between the ends, where every micro-batch keeps as much."""
    microbatches = 8

    def work(run):
        run.batches = batches  # of which none has a mask
        meter = Meter(run.plain)
        with meter.watched():
            run.train(1)
        most, alone = runner_of(run).most, Meter(run.plain)
        if name != "interleaved":
            run.microbatches = 1
            with alone.watched():
                run.train(1)
        return most, meter.most, alone.most

    found, chunks = on_ranks(work, f"pp{ranks}", "llama", "sgd", name, microbatches=microbatches), 2 if name == "interleaved" else 1
    marks = validate(make_schedule(name, ranks, microbatches, chunks), microbatches, chunks)
    assert [most for most, *_ in found] == marks
    if name in ("gpipe", "1f1b"):
        for (_, most, of_one), mark in list(zip(found, marks, strict=True))[1:-1]:
            assert most == mark * of_one


def test_what_was_sent_is_freed_when_it_has_arrived(monkeypatch):
    """A rank keeps what it sends until a later message shows that it was received: not all of a step's."""
    most, send = [0] * 3, Links.send

    def counting(links, tensor, message):
        send(links, tensor, message)
        most[message.source] = max(most[message.source], len(links.under_way))

    monkeypatch.setattr(Links, "send", counting)
    on_ranks(lambda run: run.train(1), "pp3", "llama", "sgd", "1f1b", microbatches=12)
    assert max(most) <= 6  # of 12 or 24 that a rank sends


def test_messages_are_counted_and_of_the_formula():
    """Each micro-batch crosses each border between stages twice: [rows, seq, D] forward, and its gradient back."""

    def work(run):
        run.train(1)
        before = len(run.world.trace.entries)
        run.train(1)
        entries = list(run.world.trace.entries)[before:]
        return [(entry.operation, entry.bytes) for entry in entries if entry.operation in ("send", "receive")]

    size = 12 * 12 * 16 * 8  # rows, positions, hidden size, bytes
    first, middle, last = on_ranks(work, "pp3", "llama", "sgd")
    for found, sends in ((first, 1), (middle, 2), (last, 1)):
        assert sorted(found) == [("receive", size)] * sends * MICROBATCHES + [("send", size)] * sends * MICROBATCHES


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
        with run.parallel.kept_whole(), torch.no_grad():
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


def test_a_runner_that_scales_losses_by_itself_is_refused():
    def work(run):
        def doubling(model, microbatches, objective):
            doubled = lambda model, batch: objective(model, batch)._replace(loss_sum=2 * objective(model, batch).loss_sum)  # noqa: E731
            return accumulate(model, microbatches, doubled)

        accumulate, run.accumulate = run.accumulate, doubling
        run.train(1)

    with pytest.raises(ValueError, match="multiplies losses by"):
        on_ranks(work, "pp2")


def autocast_objective(model, batch) -> Totals:
    with torch.autocast("cpu", torch.bfloat16):
        return packed_next_token_objective(model, batch)


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


# Checkpoints.

FOLDERS = [("one", "1f1b"), ("pp2", "1f1b"), ("pp4", "zero_bubble"), ("pp2", "interleaved"), ("fsdp2", "1f1b"), ("pp2_fsdp2", "1f1b"),
           ("pp2_tp2", "1f1b")]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FOLDERS)))
def test_every_layout_resumes_the_checkpoints_of_another(number, tmp_path):
    writer, *readers = FOLDERS[number:] + FOLDERS[:number]
    on_ranks(lambda run: run.train(2).save(tmp_path, asynchronous=False), writer[0], "gpt2", "adamw", writer[1])
    for layout, schedule in (readers[0], readers[2]):
        found = on_ranks(lambda run: run.restore(tmp_path).train(1).weights(), layout, "gpt2", "adamw", schedule, seed=9)
        merged = {name: tensor for each in found for name, tensor in each.items()}
        weights = expected("gpt2", "adamw")["weights"]
        assert largest_difference(without_key_biases(merged), without_key_biases(weights)) < 1e-9, f"{writer} to {layout}, {schedule}"


def without_key_biases(tensors: dict) -> dict:
    """They move all scores of a query equally, so their gradients are rounding."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("k_proj.bias")}


# Wrong on purpose: each must be seen.


class DividedTwice(PipelineRunner):
    def forward(self, action, batch, objective):
        super().forward(action, batch, lambda model, batch: scaled(objective(model, batch), 1 / MICROBATCHES))


def scaled(totals: Totals, factor: float) -> Totals:
    return totals._replace(loss_sum=totals.loss_sum * factor)


class OneEnd(PipelineParallel):
    def shape(self, model, mesh):
        super().shape(model, mesh)
        for parameter in model.parameters():
            vars(parameter).pop("partial_over", None)


def test_a_loss_divided_twice_is_seen(monkeypatch):
    monkeypatch.setattr("shared.parallel.pipeline.axis.PipelineRunner", DividedTwice)
    with pytest.raises(AssertionError):
        require_same(on_ranks(observed, "pp2", "llama"), expected("llama"))


def test_a_tied_gradient_that_is_not_summed_is_seen():
    with pytest.raises((AssertionError, CourseError, ValueError)):
        require_same(on_ranks(observed, "pp2", "gpt2", axis=OneEnd()), expected("gpt2"))


def test_activations_of_gpipe_under_1f1b_are_seen():
    def work(run):
        runner_of(run).use(make_schedule("gpipe", 4, MICROBATCHES), MICROBATCHES)
        return observed(run), runner_of(run).most

    found = on_ranks(work, "pp4", "llama")
    require_same([each for each, _ in found], expected("llama"))  # the numbers are right, only the memory is not
    assert [most for _, most in found] != validate(make_schedule("1f1b", 4, MICROBATCHES), MICROBATCHES)


def test_two_ranks_that_both_send_first_and_wait_deadlock(monkeypatch):
    """The runner's sends return at once. With sends that wait, its neighbours in 1F1B wait for each other, as validation says."""
    send = Links.send

    def waiting(links, tensor, message):
        send(links, tensor, message)
        links.wait()

    monkeypatch.setattr(Links, "send", waiting)
    with pytest.raises(CommunicationError, match="deadlock: rank 0 waits in send"):
        on_ranks(observed, "pp2", "llama")


def test_gradients_of_weights_apart_are_waited_for(monkeypatch):
    """Without part W the matrices get nothing."""
    monkeypatch.setattr("shared.parallel.pipeline.runner.add_weight_gradients", lambda taken: None)
    with pytest.raises((AssertionError, AttributeError)):
        require_same(on_ranks(observed, "pp2", "llama", "sgd", "zero_bubble"), expected("llama"))


# Refused by name.

REFUSED = [
    (("pp2", "t5"), {}, "model.architecture encoder-decoder"),
    (("pp4", "llama"), {"layers": 3}, "3 layers: 4 stages need at least one each"),
    (("pp2_tp2", "llama", "sgd", "interleaved"), {}, "tensor_parallel and pipeline_chunks"),
    (("pp2_tp2", "llama", "sgd", "zero_bubble"), {}, "tensor_parallel and pipeline_schedule zero_bubble"),
    (("pp2_fsdp2", "llama", "sgd", "zero_bubble"), {}, "fully_sharded and pipeline_schedule zero_bubble"),
    (("pp2_dp2_zero1", "gpt2"), {}, "zero and a tied embedding"),
    (("pp2_dp2", "llama"), {"backend": "torch"}, "parallel.backend torch"),
    (("pp2_cp2", "llama"), {}, "context_parallel"),
    (("pp2", "llama", "sgd", "interleaved"), {"microbatches": 3}, "give 2 or 4 micro-batches"),
]


@pytest.mark.parametrize("arguments, settings, told", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_nobody_has_compared_is_refused(arguments, settings, told):
    with pytest.raises(SettingError, match=told):
        on_ranks(lambda run: run.train(1), *arguments, **settings)


def test_a_schedule_and_its_chunks_must_agree():
    for schedule, chunks in (("interleaved", 1), ("1f1b", 2)):
        with pytest.raises(ValueError, match="interleaved needs 2 chunks or more"):
            ParallelConfig(pipeline_parallel=2, pipeline_schedule=schedule, pipeline_chunks=chunks)


def test_a_training_pass_outside_of_the_runner_is_refused():
    with pytest.raises(SettingError, match="a training pass is the runner's"):
        on_ranks(lambda run: run.parallel.model.train()(torch.zeros(1, 4, dtype=torch.int64)), "pp2")


def test_an_objective_that_calls_the_model_twice_is_refused():
    def twice(model, batch):
        model(batch["input_ids"])
        return packed_next_token_objective(model, batch)

    with pytest.raises(SettingError, match="calls the model twice"):
        on_ranks(lambda run: run.train(1), "pp2", objective=twice)


def test_blocks_with_split_matrices_are_not_compiled():
    with pytest.raises(SettingError, match="engine.compile with parallel.pipeline_schedule zero_bubble"):
        on_ranks(lambda run: run.parallel.model.compile(), "pp2", "llama", "sgd", "zero_bubble")


def test_one_process_has_no_pipeline_around_its_model():
    (run,) = on_ranks(lambda run: run, "one")
    assert run.parallel.model is run.plain
