"""Rows of the report: communication that takes place, why two runs differ, and what another run's damage leaves out."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from test_run_comparison import finished_run

from shared.parallel.comm.trace import CommTrace
from shared.parallel.config import ParallelConfig
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.costs import Traffic
from shared.trainer.planner.layout import predicted_traffic
from shared.trainer.reports.page import code_of
from shared.trainer.results import compare_with_single_process, known_causes
from shared.trainer.settings import parse_words

TWO = {"parallel": {"data_parallel": 2}}


def test_operations_that_steps_do_not_run_have_no_row():
    traffic = Traffic(CommTrace())
    traffic.steps = 100
    traffic.calls = Counter({("all_reduce", "dp"): 300, ("gather_objects", "world"): 1})
    traffic.bytes = Counter({("all_reduce", "dp"): 200_000_000})
    assert traffic.per_step() == {"all_reduce over dp, a step": "3 calls, 2.00 MB"}


def test_what_tensor_parallelism_should_send_is_said_of_the_courses_engine_alone(tmp_path):
    text = yaml.safe_dump({"steps": 100, "data": {"seq": 64, "batch_size": 4, "micro_batch_size": 2}, "parallel": {"tensor_parallel": 2}})
    (tmp_path / "tp2.yaml").write_text(text)
    config = parse_words(TrainerConfig, [str(tmp_path / "tp2.yaml")])
    layers = config.model.num_hidden_layers
    ((name, said),) = predicted_traffic(config).items()
    assert name == "all_reduce over tp, by formula" and said.startswith(f"{2 * (4 * layers + 4)} calls, ")  # two micro-batches
    assert predicted_traffic(replace(config, parallel=ParallelConfig())) == {}
    assert predicted_traffic(replace(config, parallel=ParallelConfig(tensor_parallel=2, backend="torch"))) == {}


def test_dropout_is_named_where_its_draws_differ(tmp_path):
    def causes(**changes):
        return known_causes(finished_run(tmp_path / str(len(list(tmp_path.iterdir()))), [1.0], 1.0, **changes))

    assert causes(**TWO) == {"dropout": "its draws differ by layout, so losses and weights do as well"}
    assert not causes() and not causes(**TWO, model={"hidden_dropout": 0.0})
    for layout in ({"pipeline_parallel": 2}, {"context_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}):
        assert causes(parallel=layout) and not causes(parallel=layout, model={"hidden_dropout": 0.0})
    of_heads = {"model": {"hidden_dropout": 0.0, "attention_dropout": 0.1}}
    assert causes(parallel={"tensor_parallel": 2}, **of_heads) and not causes(parallel={"tensor_parallel": 2}) and not causes(**of_heads)


@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_a_damaged_model_of_another_run_is_named_and_the_losses_are_compared(tmp_path, content):
    finished_run(tmp_path / "run", [4.0], 2.0)
    there = tmp_path / "run" / "model" / "model.safetensors"
    there.unlink() if content is None else there.write_bytes(content)
    found = compare_with_single_process(finished_run(tmp_path / "run-dp2", [4.5], 2.5, **TWO))
    assert found == {
        f"largest difference in train/loss to {tmp_path / 'run'}": 0.5,
        "weights": f"not compared: the model in {tmp_path / 'run' / 'model'} cannot be read",
    }


def test_a_damaged_log_of_another_run_leaves_what_can_be_compared(tmp_path):
    finished_run(tmp_path / "run", [4.0, 3.0], 2.0)
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0] + bytes(9) + b"\n")
    found = compare_with_single_process(finished_run(tmp_path / "run-dp2", [4.5, 9.0], 2.0, **TWO))
    assert list(found.values()) == [0.5, 0.0]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1", b"7"])
def test_a_damaged_record_of_the_code_is_named_in_the_report(tmp_path, content):
    (tmp_path / provenance.CODE).write_bytes(content)
    assert code_of(tmp_path) == {"version": f"unknown: {tmp_path / provenance.CODE} is damaged"}
    (tmp_path / provenance.CODE).write_text(json.dumps({"commit": "abc"}))
    assert code_of(tmp_path) == {"commit": "abc"}
