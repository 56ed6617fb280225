"""Calibration against scipy's binned statistics, one pair at a time, and in every way of batching."""

import math

import numpy as np
import pytest
import torch
from reward_runs import DENSE, pairs
from scipy.stats import binned_statistic

from shared.loop import evaluate
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.preference.calibration import bin_sums, calibration_objective, draw_reliability, reliability
from shared.preference.reward_model import as_reward_model, score
from shared.trainer.models import RUN_AXES


def differences(number: int, scale: float, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(number, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("number", "scale"), [(500, 1.0), (30, 4.0), (40, 900.0)])
def test_the_curve_is_scipys(number, scale):
    found = differences(number, scale)
    curve = reliability(bin_sums(found, torch.ones_like(found, dtype=torch.bool), 7))
    confidence = np.exp(-np.logaddexp(0, -found.abs().numpy()))
    right, edges = (found > 0).double().numpy(), np.linspace(0.5, 1, 8)
    counts = binned_statistic(confidence, right, "count", edges).statistic
    assert list(curve.counts) == counts.tolist() and sum(curve.counts) == number
    np.testing.assert_allclose(curve.accuracies, binned_statistic(confidence, right, "mean", edges).statistic, rtol=1e-12)
    np.testing.assert_allclose(curve.confidences, binned_statistic(confidence, confidence, "mean", edges).statistic, rtol=1e-12)
    gaps = np.abs(np.array(curve.accuracies) - np.array(curve.confidences))
    assert curve.expected_calibration_error == pytest.approx(np.nansum(gaps * counts) / number, rel=1e-12)
    assert curve.accuracy == pytest.approx(right.mean())


def test_labels_drawn_with_the_models_own_probabilities_are_calibrated_and_twice_the_differences_are_not():
    sizes, generator = differences(40_000, 2.0).abs(), torch.Generator().manual_seed(1)
    flipped = torch.rand(sizes.shape, generator=generator, dtype=torch.float64) > sizes.sigmoid()
    found = sizes.where(~flipped, -sizes)
    everything = torch.ones_like(flipped)
    assert reliability(bin_sums(found, everything)).expected_calibration_error < 0.01
    doubled = reliability(bin_sums(2 * found, everything))
    assert doubled.expected_calibration_error > 0.05 and doubled.accuracy == reliability(bin_sums(found, everything)).accuracy
    assert all(low <= high for low, high in zip(doubled.accuracies, doubled.confidences, strict=True))


def test_a_tie_is_half_right_and_what_does_not_count_is_not_looked_at():
    found = torch.tensor([0.0, 3.0, math.nan])
    curve = reliability(bin_sums(found, torch.tensor([True, False, False]), 2))
    assert curve.counts == (1, 0) and curve.accuracies[0] == 0.5 == curve.confidences[0] and math.isnan(curve.accuracies[1])


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_any_layout_gives_the_curve_of_scores_one_by_one(layout):
    batches = [pairs(0, number, DENSE) for number in range(2)]

    def on_rank(world):
        model = as_reward_model(TransformerModel(DENSE, MIXTURE, seed=1), seed=2).to(torch.float64)
        strategy = apply_parallel(model, Mesh(parse_layout(layout), world), axes=RUN_AXES)
        data = strategy.mesh.data
        mine = [{name: rows.chunk(data.size)[data.rank] for name, rows in batch.items()} for batch in batches]
        return reliability(strategy.sum(evaluate(strategy.model, mine, calibration_objective)))

    model = as_reward_model(TransformerModel(DENSE, MIXTURE, seed=1), seed=2).to(torch.float64)
    found = []
    for batch in batches:
        for ids, documents in zip(batch["input_ids"], batch["documents"], strict=True):
            rewards = score(model, [ids[documents == number].tolist() for number in range(int(documents.max()) + 1)])
            found += [chosen - rejected for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)]
    expected = reliability(bin_sums(torch.tensor(found, dtype=torch.float64), torch.ones(len(found), dtype=torch.bool)))
    for curve in run_threads(on_rank, 2):
        assert curve.counts == expected.counts
        assert curve.expected_calibration_error == pytest.approx(expected.expected_calibration_error, abs=1e-12)
        np.testing.assert_allclose(curve.confidences, expected.confidences, rtol=1e-9)


def test_the_curve_is_drawn_with_its_figures():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    found = differences(300, 2.0)
    curve = reliability(bin_sums(found, torch.ones_like(found, dtype=torch.bool)))
    draw_reliability(axes, curve)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["calibrated", f"held-out pairs: error {curve.expected_calibration_error:.3f}, accuracy {curve.accuracy:.3f}"]
    pyplot.close(figure)
