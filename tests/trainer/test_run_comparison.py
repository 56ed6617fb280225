"""A spread run beside one process: what differs is said, whatever lies in the other folder, and each rank's memory is its own."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file
from trainer_runs import TINY

from shared.trainer import costs as stopwatch, provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.costs import Costs, Stopwatch
from shared.trainer.reports.listing import format_value
from shared.trainer.results import compare_with_single_process, known_causes
from shared.trainer.settings import merged, parse_text


@pytest.fixture
def beside(tmp_path):
    """Write two finished runs, `run` and `run-dp2`, and compare: beside(weights here, weights there, loss here, loss there)."""

    def compare(here, there, loss_here=1.0, loss_there=1.0, record=None):
        output = {"engine": {"output": str(tmp_path / "run-dp2")}, "parallel": {"data_parallel": 2}}
        config = parse_text(TrainerConfig, yaml.safe_dump(merged(TINY, output)))
        for name, weights, loss in (("run-dp2", here, loss_here), ("run", there, loss_there)):
            (tmp_path / name / "model").mkdir(parents=True)
            save_file({f"w{i}": torch.tensor(w) for i, w in enumerate(weights)}, tmp_path / name / "model" / "model.safetensors")
            (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": loss}) + "\n")
            (tmp_path / name / "results.json").write_text("{}")
            (tmp_path / name / "config.yaml").write_text(record or yaml.safe_dump(provenance.plain(config)))
        return list(compare_with_single_process(config).values())

    return compare


def test_differences_are_the_largest_of_all_tensors(beside):
    assert beside([[3.0], [2.0]], [[2.0], [2.0]], 1.5, 1.25) == [0.25, 0.5]


def finished_run(folder, losses, weight: float, **changes) -> TrainerConfig:
    """What a run leaves that is compared."""
    config = parse_text(TrainerConfig, json.dumps(merged(TINY, {"engine": {"output": str(folder)}} | changes)))
    (folder / "model").mkdir(parents=True)
    provenance.keep_record(config, folder)
    (folder / "results.json").write_text("{}")
    rows = [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"a": torch.full((4,), weight), "b": torch.ones(3)}, folder / "model" / "model.safetensors")
    return config


def test_the_largest_differences_are_reported_for_the_same_run_only(tmp_path):
    alone, two = tmp_path / "run", {"parallel": {"data_parallel": 2, "backend": "torch"}}
    finished_run(alone, [4.0, 3.0, 2.0], 2.0)
    found = compare_with_single_process(finished_run(tmp_path / "run-dp2-torch", [4.0, 3.5, 2.25], 2.5, **two))
    assert found == {
        f"largest difference in train/loss to {alone}": 0.5,
        f"largest difference in weights to {alone}, relative": pytest.approx(0.25),
    }
    shutil.rmtree(tmp_path / "run-dp2-torch")
    assert not compare_with_single_process(finished_run(tmp_path / "run-dp2-torch", [4.0], 2.5, seed=1, **two)), "another seed"
    (alone / "results.json").unlink()
    shutil.rmtree(tmp_path / "run-dp2-torch")
    assert not compare_with_single_process(finished_run(tmp_path / "run-dp2-torch", [4.0], 2.5, **two)), "one that has not ended"


@pytest.mark.parametrize("broken", [[[float("nan")], [2.0]], [[2.0], [float("nan")]]])
def test_weights_that_are_no_numbers_are_no_small_difference(beside, broken):
    loss, weights = beside(broken, [[2.0], [2.0]])
    assert loss == 0 and weights != weights


def test_weights_of_zeros_on_both_sides_do_not_differ(beside):
    assert beside([[0.0]], [[0.0]]) == [0, 0]


def test_a_damaged_run_beside_it_is_passed_over(beside):
    assert beside([[2.0]], [[2.0]], record="[") == []


def test_a_folder_whose_name_holds_a_figures_name_changes_nothing():
    assert format_value("largest difference in train/loss to runs/bright", 1e-7) == "1.0e-07"
    assert format_value("held-out next tokens guessed right", 0.25) == "25.0%"


def test_what_rank_0_saved_is_no_measure_of_this_process(monkeypatch):
    """Every rank is handed rank 0's state, possibly that of one process which held everything."""
    monkeypatch.setattr("shared.trainer.costs.peak_memory", lambda device: 500)
    costs = Costs(Stopwatch())
    costs.load_state_dict({"training": 1.0, "overhead": 1.0, "peak_memory": 9000})
    costs.on_start(None)
    costs.on_step(SimpleNamespace(device=torch.device("cpu")))
    assert (costs.peak_memory, costs.peak_here) == (9000, 500)


def test_seconds_of_earlier_starts_are_added_to_those_of_the_last_one(monkeypatch):
    clock = SimpleNamespace(now=7.0)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    watch = Stopwatch()
    clock.now += 0.5
    watch.lap("seconds to prepare the text")
    costs = Costs(watch)
    start = {"starts": 2, "start": {"seconds to prepare the text": 80.0}}
    costs.load_state_dict({"training": 300.0, "overhead": 20.0, "peak_memory": 1} | start)
    clock.now += 0.25
    assert costs.starts == 3 and watch.seconds["seconds to prepare the text"] == 80.5 and watch.total() == 400.75
    saved = costs.state_dict()
    assert (saved["starts"], saved["start"]) == (3, watch.seconds) and saved["training"] == 300


def test_a_pipeline_of_more_micro_batches_is_compared_with_one_process_and_its_dropout_is_named(tmp_path):
    still = {"model": {"hidden_dropout": 0.0}}
    finished_run(tmp_path / "run", [4.0], 2.0, data={"micro_batch_size": 4, "batch_size": 4}, **still)
    stages = {"parallel": {"pipeline_parallel": 2}, "data": {"micro_batch_size": 1, "batch_size": 4}, **still}
    config = finished_run(tmp_path / "run-pp2", [4.5], 2.0, **stages)
    assert list(compare_with_single_process(config).values()) == [0.5, 0.0] and known_causes(config) == {}
    other = finished_run(tmp_path / "again" / "run-pp2", [4.5], 2.0, **stages | {"seed": 5})
    finished_run(tmp_path / "again" / "run", [4.0], 2.0, data={"batch_size": 4}, **still)
    assert compare_with_single_process(other) == {}
    noisy = finished_run(tmp_path / "noisy-pp2", [4.5], 2.0, **stages | {"model": {"hidden_dropout": 0.1}})
    assert list(known_causes(noisy)) == ["dropout"]
