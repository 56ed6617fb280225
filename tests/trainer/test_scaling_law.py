"""The scaling law's fit beside published constants, scipy's own robust least squares, and minima found by search."""

import dataclasses

import numpy as np
import pytest
from scaling_runs import EQUAL, around_optima
from scipy.optimize import least_squares, minimize_scalar

from shared.course.errors import CourseError
from shared.trainer.planner.scaling_law import CHINCHILLA, CHINCHILLA_REFIT, DELTA, Point, ScalingLaw, bootstrap, bootstrap_profiles
from shared.trainer.planner.scaling_law import fit_frontier, fit_law, frontier, interval, isoflop_profiles, read_fit, write_fit

NAMES = [field.name for field in dataclasses.fields(ScalingLaw)]


def runs_of(law, noise=0.0, seed=0):
    """Six sizes and five lengths of each, in the range of Hoffmann et al.'s runs. noise: of the logarithm of the loss."""
    random = np.random.default_rng(seed)
    places = [(size, size * ratio) for size in np.geomspace(5e7, 1.6e10, 6) for ratio in np.geomspace(3, 100, 5)]
    return [Point(*each, float(law.loss(*each) * np.exp(random.normal(0, noise)))) for each in places]


@pytest.mark.parametrize("law", [CHINCHILLA, CHINCHILLA_REFIT])
def test_published_constants_come_back_from_losses_without_noise(law):
    found = fit_law(runs_of(law))
    assert [getattr(found, name) for name in NAMES] == pytest.approx([getattr(law, name) for name in NAMES], rel=1e-6)


def test_the_unit_of_the_loss_scales_three_constants_and_leaves_the_exponents():
    runs = runs_of(CHINCHILLA_REFIT, noise=0.002)
    nats, bits = fit_law(runs), fit_law([run._replace(loss=run.loss / np.log(2)) for run in runs])
    assert (bits.alpha, bits.beta) == pytest.approx((nats.alpha, nats.beta), rel=1e-4)
    assert bits.E * np.log(2) == pytest.approx(nats.E, rel=1e-4)


def test_no_robust_least_squares_of_scipy_finds_a_lower_loss_even_with_two_runs_that_diverged():
    runs = runs_of(CHINCHILLA_REFIT, noise=0.002)
    runs[3], runs[17] = runs[3]._replace(loss=runs[3].loss * 1.4), runs[17]._replace(loss=runs[17].loss * 1.2)
    sizes, lengths, losses = np.array(runs).T

    def residuals(unknown):
        return np.log(ScalingLaw(*np.exp(unknown[:3]), *unknown[3:]).loss(sizes, lengths)) - np.log(losses)

    def cost(law):
        left = np.abs(residuals([*np.log([law.E, law.A, law.B]), law.alpha, law.beta])) / DELTA
        return np.where(left < 1, left**2 / 2, left - 0.5).sum()

    found = fit_law(runs)
    start = [*np.log([CHINCHILLA_REFIT.E, CHINCHILLA_REFIT.A, CHINCHILLA_REFIT.B]), CHINCHILLA_REFIT.alpha, CHINCHILLA_REFIT.beta]
    theirs = least_squares(residuals, start, loss="huber", f_scale=DELTA, xtol=1e-14, ftol=1e-14, gtol=1e-14, x_scale="jac", max_nfev=5000)
    assert cost(found) <= theirs.cost / DELTA**2 * (1 + 1e-6)
    assert [found.E, found.alpha, found.beta] == pytest.approx([theirs.x[0] and np.exp(theirs.x[0]), *theirs.x[3:]], rel=1e-2)
    assert found.loss(7e10, 1.4e12) == pytest.approx(CHINCHILLA_REFIT.loss(7e10, 1.4e12), rel=5e-3), "two runs moved the law"


@pytest.mark.parametrize("law", [CHINCHILLA, CHINCHILLA_REFIT, ScalingLaw(0.5, 3.0, 40.0, 0.2, 0.6)])
@pytest.mark.parametrize("flops", [1e12, 5.76e23])
def test_the_optimum_in_closed_form_is_the_one_that_a_search_finds(law, flops):
    searched = minimize_scalar(lambda size: law.loss(np.exp(size), flops / 6 / np.exp(size)), bounds=(0, 40), options={"xatol": 1e-10})
    parameters, tokens = law.optimum(flops)
    assert parameters == pytest.approx(np.exp(searched.x), rel=1e-4) and 6 * parameters * tokens == pytest.approx(flops)


def test_published_optima():
    """Besiroglu et al. 2024: N grows with C to the power 0.513, and Chinchilla's 20 tokens for a parameter are close to optimal at its
    budget. Hoffmann et al.'s own third approach gives 0.454, by exponents that they rounded to 0.34 and 0.28."""
    for law, exponent, close in ((CHINCHILLA_REFIT, 0.513, 5e-4), (CHINCHILLA, 0.454, 3e-3)):
        growth = np.log(law.optimum(1e24)[0] / law.optimum(1e21)[0]) / np.log(1e3)
        assert growth == pytest.approx(exponent, abs=close)
    parameters, tokens = CHINCHILLA_REFIT.optimum(5.76e23)
    assert 15 < tokens / parameters < 30


def test_bootstrapped_intervals_hold_the_truth_and_widen_with_the_noise():
    quiet, loud = (bootstrap(runs_of(CHINCHILLA_REFIT, noise, seed=1), draws=30) for noise in (0.0005, 0.004))
    for name in ("E", "alpha", "beta"):
        low, high = interval([getattr(law, name) for law in loud], 0.98)
        assert low < getattr(CHINCHILLA_REFIT, name) < high
        narrow = np.subtract(*interval([getattr(law, name) for law in quiet])[::-1])
        assert narrow < (high - low) / 2


def test_parabolas_find_the_optima_of_a_law_with_equal_exponents():
    law, runs = EQUAL, around_optima(EQUAL, (1e19, 1e20, 1e21), (0.25, 0.5, 1.0, 2.0, 4.0))
    profiles = isoflop_profiles(runs)
    assert [each.parameters for each in profiles] == pytest.approx([law.optimum(each.flops)[0] for each in profiles], rel=1e-6)
    assert all(each.inside for each in profiles) and frontier(profiles) == pytest.approx((0.5, 6**-0.5), rel=1e-5)
    low, high = interval([exponent for exponent, _ in bootstrap_profiles(frontier, runs, 50)])
    assert low == pytest.approx(0.5, abs=0.01) and high == pytest.approx(0.5, abs=0.01)


def test_the_frontier_carries_a_laws_best_losses_on_to_a_hundredfold_budget():
    """Of a law with equal exponents, whose best loss is E + c / C^(0.35 / 2)."""
    law, runs = EQUAL, around_optima(EQUAL, (1e18, 1e19, 1e20, 1e21))
    found, (best, tokens) = fit_frontier(isoflop_profiles(runs)), law.optimum(1e23)
    assert found.E == pytest.approx(1.8, abs=0.02) and found.beta == pytest.approx(0.175, abs=0.003)
    assert found.a == pytest.approx(0.5, abs=1e-4)
    assert found.loss(best, tokens) == pytest.approx(law.loss(best, tokens), rel=1e-3)
    [nearby] = isoflop_profiles([(1e21, Point(size, 0, 2 + 0.3 * np.log(size / 7e8) ** 2)) for size in (5e8, 6e8, 9e8)])
    [flat, *others] = isoflop_profiles(runs)
    steep = fit_frontier([flat, *others, nearby._replace(flops=1e22, loss=law.loss(*law.optimum(1e22)), parameters=law.optimum(1e22)[0])])
    curvatures = [each.coefficients[0] for each in (flat, *others)]
    assert steep.curvature == pytest.approx((sum(curvatures) + 0.3) / 5)
    sizes = [share * steep.k * 1e22**steep.a for share in (1, 2)]
    at_best, twice = (steep.loss(size, 1e22 / 6 / size) for size in sizes)
    assert twice - at_best == pytest.approx(steep.curvature * np.log(2) ** 2)


def test_two_minima_carry_no_frontier_on():
    law, runs = EQUAL, around_optima(EQUAL, (1e19, 1e20), (0.5, 1.0, 2.0))
    with pytest.raises(ValueError, match="2 budgets of 2 have their minimum between the smallest and the largest model, not three"):
        fit_frontier(isoflop_profiles(runs))
    assert bootstrap_profiles(fit_frontier, runs, 5) == []


def test_a_minimum_that_the_runs_do_not_show_is_not_taken_for_one():
    runs = around_optima(CHINCHILLA, (1e20,), (3, 6, 12))
    [profile] = isoflop_profiles(runs)
    assert not profile.inside
    with pytest.raises(ValueError, match="0 budgets of 1 have their minimum"):
        frontier([profile])


def test_a_fit_is_kept_as_json_and_another_file_is_refused(tmp_path):
    write_fit(tmp_path / "fit.json", CHINCHILLA, unit="nats per token")
    law, found = read_fit(tmp_path / "fit.json")
    assert law == CHINCHILLA and found["unit"] == "nats per token"
    for text in ("[]", '{"law": {"E": 1}}', "{"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(CourseError, match="other.json holds no fit"):
            read_fit(tmp_path / "other.json")


def test_runs_that_cannot_be_fitted_are_refused():
    runs = runs_of(CHINCHILLA)
    with pytest.raises(ValueError, match="4 runs cannot fit five constants"):
        fit_law(runs[:4])
    with pytest.raises(ValueError, match="more sizes and lengths"):
        fit_law(runs[:5])  # of one size
    with pytest.raises(ValueError, match="not positive numbers"):
        fit_law([*runs, Point(1e8, 1e9, float("nan"))])
