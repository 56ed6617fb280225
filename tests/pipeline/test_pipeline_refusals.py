"""What a pipeline refuses by name: layouts and schedules that nobody has compared, and objectives and runners that it cannot serve."""

import pytest
import torch
from pipeline_runs import on_ranks, runner_of

from shared.course.errors import SettingError
from shared.loop import accumulate_gradients
from shared.model.chunked_loss import packed_next_token_objective
from shared.parallel.config import ParallelConfig
from shared.parallel.pipeline.schedules import Action
from shared.parallel.pipeline.simulate import ScheduleError

REFUSED = [
    (("pp2", "t5"), {}, "model.architecture encoder-decoder"),
    (("pp4", "llama"), {"layers": 3}, "3 layers: 4 stages need at least one each"),
    (("pp2_fsdp2", "llama", "sgd", "zero_bubble"), {}, "fully_sharded and pipeline_schedule zero_bubble"),
    (("pp2_fsdp2", "llama", "sgd", "zero_bubble"), {"backend": "torch", "reshard_after_forward": False}, "pipeline_schedule zero_bubble"),
    (("pp2_fsdp2", "llama", "sgd", "interleaved"), {"backend": "torch"}, "backend torch, fully_sharded and pipeline_chunks"),
    (("pp2_dp2_fsdp2", "llama"), {"backend": "torch"}, "backend torch, fully_sharded and data_parallel"),
    (("pp2_tp2", "llama", "sgd", "interleaved"), {"backend": "torch"}, "backend torch, tensor_parallel and more than one chunk"),
    (("pp2_tp2", "llama", "sgd", "zero_bubble"), {"backend": "torch"}, "backend torch, tensor_parallel and more than one chunk"),
    (("pp2_dp2_zero1", "gpt2"), {"backend": "torch"}, "backend torch, zero and a tied embedding"),
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


def test_a_schedule_that_cannot_be_run_is_refused_before_anything_runs():
    def work(run):
        runner_of(run).use([[Action("F", 0)], [Action("F", 0)]], 1)

    with pytest.raises(ScheduleError, match="Rank 0 never does B0"):
        on_ranks(work, "pp2")


def test_a_runner_that_scales_losses_by_itself_is_refused():
    def work(run):
        def doubling(model, microbatches, objective):
            doubled = lambda model, batch: objective(model, batch)._replace(loss_sum=2 * objective(model, batch).loss_sum)  # noqa: E731
            return accumulate_gradients(model, microbatches, doubled)

        run.parallel.runner(doubling)

    with pytest.raises(ValueError, match="in place of accumulate_gradients"):
        on_ranks(work, "pp2")
