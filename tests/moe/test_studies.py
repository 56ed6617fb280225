"""The studies of chapter 09 as a reader starts them, made so small that they show nothing but that they run, and what they compute."""

import json
from importlib import import_module

import pytest
import torch

from shared.course.errors import CourseError
from shared.moe.config import MixtureConfig

studies = import_module("chapters.09_mixture_of_experts.studies")


SLOW = [pytest.param(study, marks=pytest.mark.slow) for study in ("quality", "dropping")]


@pytest.mark.parametrize("study", ["balance", "tokens", *SLOW])
def test_a_study_prints_and_draws_its_results(tmp_path, text_file, capsys, study):
    seeds = 2 if study == "dropping" else 1
    small = {"steps": 4, "seq": 16, "batch_size": 2, "windows": 4}
    config = studies.StudyConfig(study, seeds=seeds, **small, data=text_file, device="cpu", output=tmp_path)
    studies.run(config)
    kept = json.loads((tmp_path / f"{study}.json").read_text())
    assert len(kept) == seeds * len(studies.STUDIES[study]) and all(1 < entry["figures"][studies.LOSS] < 20 for entry in kept)
    plots = ["balance.png", "loads.png"] if study == "balance" else [f"{study}.png"]
    assert all((tmp_path / plot).read_bytes().startswith(b"\x89PNG") for plot in plots)
    said = capsys.readouterr().out
    assert ("takes above all" if study == "tokens" else "Lowest") in said
    if study == "dropping":
        dropped = [entry["figures"].get("dropped", 0.0) for entry in kept if entry["seed"] == 0]
        assert dropped[0] == 0 < dropped[3] < dropped[4] < 1, "less capacity, more is dropped"
    studies.run(config)
    assert json.loads((tmp_path / f"{study}.json").read_text()) == kept, "a finished study only shows again what it has"


def test_dense_and_sparse_models_of_the_quality_study_have_equal_active_weights():
    from shared.model.counting import active_feed_forward_size
    from shared.moe.config import MixtureModelConfig

    active = {}
    for name, variant in studies.QUALITY.items():
        experts = variant["experts"] and MixtureConfig(**variant["experts"])
        sizes = studies.MODEL | {"intermediate_size": variant.get("intermediate_size", 192)}
        config = MixtureModelConfig(**sizes, experts=experts).resolved()
        router = 64 * experts.num_experts if experts else 0
        active[name] = active_feed_forward_size(config, 0) - router
    dense = active.pop("dense, 192")
    assert active.pop("dense, 768: as many weights as 8 experts") == 4 * dense and set(active.values()) == {dense}


def test_typical_bytes_are_those_that_an_expert_takes_above_their_share():
    counts = torch.zeros(2, 256)
    counts[0, 65], counts[1, 65], counts[0, 66], counts[1, 66], counts[0, 67] = 900, 100, 100, 900, 1  # the last is too rare
    assert studies.typical_bytes(counts) == [[65], [66]]


def test_more_than_the_models_hold_is_refused(tmp_path):
    with pytest.raises(CourseError, match="seq is 65"):
        studies.run(studies.StudyConfig("balance", seq=65, output=tmp_path))
