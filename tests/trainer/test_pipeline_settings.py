"""Pipelines in the trainer's settings and report: what cannot run is refused before any rank starts, and the bubble has a row."""

import json

import pytest
from trainer_runs import TINY

from shared.course.errors import CourseError
from shared.trainer.config import TrainerConfig
from shared.trainer.launch import start
from shared.trainer.planner.layout import bubble_summary, pipeline_line, predicted_traffic
from shared.trainer.settings import parse_text


def config_of(data=None, model=None, **parallel) -> TrainerConfig:
    settings = TINY | {
        "parallel": parallel,
        "model": TINY["model"] | (model or {}),
        "data": TINY["data"] | (data or {}),
    }
    return parse_text(TrainerConfig, json.dumps(settings))


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"pipeline_parallel": 3}, "parallel.pipeline_parallel 3 with 2 layers: 3 stages need at least one each"),
        ({"pipeline_parallel": 2, "pipeline_schedule": "interleaved", "pipeline_chunks": 2}, "2 layers: 4 stages need at least one each"),
        ({"pipeline_parallel": 2, "model": {"position": "relative"}}, "model.position relative: its blocks share a learned bias"),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "interleaved", "pipeline_chunks": 2, "model": {"num_hidden_layers": 4},
             "data": {"batch_size": 6}}, "groups of 2, as many as there are ranks, and a step has 3: give 2 or 4 micro-batches",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "interleaved", "pipeline_chunks": 2, "model": {"num_hidden_layers": 4},
             "data": {"batch_size": 2}}, "and a step has 1: give 2 micro-batches, or schedule 1f1b",
        ),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_run_is_refused_with_the_settings(settings, sentence):
    with pytest.raises(CourseError, match=sentence):
        config_of(**settings)


def test_the_report_has_the_bubble_of_the_steps_micro_batches_and_the_traffic_by_formula():
    wide = {"batch_size": 8, "micro_batch_size": 2}
    assert bubble_summary(config_of()) == {}
    assert bubble_summary(config_of(wide, pipeline_parallel=2)) == {
        "bubble of 1f1b, of the time computed": pytest.approx(1 / 4)
    }
    halves = config_of(wide, pipeline_parallel=2, data_parallel=2)
    assert list(bubble_summary(halves).values()) == pytest.approx([1 / 2])
    chunks = config_of(
        wide,
        {"num_hidden_layers": 4},
        pipeline_parallel=2,
        pipeline_schedule="interleaved",
        pipeline_chunks=2,
    )
    assert list(bubble_summary(chunks).values()) == pytest.approx([1 / 8])
    found = predicted_traffic(config_of(wide, pipeline_parallel=2, tensor_parallel=2, model={"num_key_value_heads": 2}))
    assert {"send over pp, by formula", "receive over pp_gradients, by formula", "all_reduce over tp, by formula"} <= found.keys()


def test_a_run_says_how_long_its_ranks_wait_and_what_would_shorten_it():
    short = config_of({"batch_size": 8, "micro_batch_size": 8}, pipeline_parallel=2)
    assert pipeline_line(short) == (
        "Schedule 1f1b, 1 micro-batch in a step: ranks wait 100% of the time that they compute, by simulation. "
        "data.micro_batch_size is 8: a smaller one makes more micro-batches, and ranks wait less."
    )
    long = config_of({"batch_size": 16, "micro_batch_size": 2}, pipeline_parallel=2, pipeline_schedule="gpipe")
    assert pipeline_line(long) == "Schedule gpipe, 8 micro-batches in a step: ranks wait 12% of the time that they compute, by simulation."
    assert "a smaller one" not in pipeline_line(config_of({"batch_size": 4, "micro_batch_size": 1}, pipeline_parallel=2))


def test_a_layout_with_stages_hands_them_to_its_ranks(tmp_path):
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY), encoding="utf-8")
    command, ranks = start.command_of("pp2_dp2", [str(tmp_path / "tiny.yaml")])
    assert ranks == 4 and {
        "parallel.pipeline_parallel=2",
        "parallel.data_parallel=2",
    } <= set(command)
