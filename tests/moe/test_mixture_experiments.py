"""The experiments of chapter 09 as a reader starts them, made so small that they show nothing but that they run, and what they compute."""

import json
from importlib import import_module

import pytest
import torch

from shared.course.errors import CourseError
from shared.moe.config import MixtureConfig

experiments = import_module("chapters.09_mixture_of_experts.experiments")


SLOW = [pytest.param(experiment, marks=pytest.mark.slow) for experiment in ("quality", "dropping")]


@pytest.mark.parametrize("experiment", ["balance", "tokens", *SLOW])
def test_an_experiment_prints_and_draws_its_results(tmp_path, text_file, capsys, experiment):
    seeds = 2 if experiment == "dropping" else 1
    small = {"steps": 4, "seq": 16, "batch_size": 2, "windows": 4}
    config = experiments.MixtureExperimentConfig(experiment, seeds=seeds, **small, data=text_file, device="cpu", output=tmp_path)
    experiments.run(config)
    kept = json.loads((tmp_path / f"{experiment}.json").read_text())
    assert len(kept) == seeds * len(experiments.EXPERIMENTS[experiment])
    assert all(1 < entry["figures"][experiments.LOSS] < 20 for entry in kept)
    plots = ["balance.png", "loads.png"] if experiment == "balance" else [f"{experiment}.png"]
    assert all((tmp_path / plot).read_bytes().startswith(b"\x89PNG") for plot in plots)
    said = capsys.readouterr().out
    assert ("takes above all" if experiment == "tokens" else "Lowest") in said
    if experiment == "dropping":
        dropped = [entry["figures"].get("dropped", 0.0) for entry in kept if entry["seed"] == 0]
        assert dropped[0] == 0 < dropped[3] < dropped[4] < 1, "less capacity, more is dropped"
    experiments.run(config)
    assert json.loads((tmp_path / f"{experiment}.json").read_text()) == kept, "a finished experiment only shows again what it has"


def test_dense_and_sparse_models_of_the_quality_experiment_have_equal_active_weights():
    from shared.model.counting import active_feed_forward_size
    from shared.moe.config import MixtureModelConfig

    active = {}
    for name, variant in experiments.QUALITY.items():
        experts = variant["experts"] and MixtureConfig(**variant["experts"])
        sizes = experiments.MODEL | {"intermediate_size": variant.get("intermediate_size", 192)}
        config = MixtureModelConfig(**sizes, experts=experts).resolved()
        router = 64 * experts.num_experts if experts else 0
        active[name] = active_feed_forward_size(config, 0) - router
    dense = active.pop("dense, 192")
    assert active.pop("dense, 768: as many weights as 8 experts") == 4 * dense and set(active.values()) == {dense}


def test_typical_bytes_are_those_that_an_expert_takes_above_their_share():
    counts = torch.zeros(2, 256)
    counts[0, 65], counts[1, 65], counts[0, 66], counts[1, 66], counts[0, 67] = 900, 100, 100, 900, 1  # the last is too rare
    assert experiments.typical_bytes(counts) == [[65], [66]]


def test_more_than_the_models_hold_is_refused(tmp_path):
    with pytest.raises(CourseError, match="seq is 65"):
        experiments.run(experiments.MixtureExperimentConfig("balance", seq=65, output=tmp_path))
