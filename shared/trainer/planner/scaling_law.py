"""Chapter 12. Scaling laws: the loss of a model from its parameters and training tokens, fitted to runs, and the optimum for a budget.

Hoffmann et al. 2022 ("Training Compute-Optimal Large Language Models"), approaches 2 and 3, with what Besiroglu et al. 2024 ("Chinchilla
Scaling: A replication attempt") found to be wrong with the third: an optimizer that stopped early because its loss was a mean of tiny
numbers, exponents that were rounded, and intervals too narrow for the number of runs. So the objective here is a sum, in units of its own
threshold, the minimum is refined until its gradient vanishes, and intervals are bootstrapped.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from shared.course.errors import CourseError
from shared.course.importing import require

DELTA = 1e-3  # of log loss: residuals beyond it count linearly (Hoffmann et al. 2022, section 3.3)
EXPONENTS = (0.1, 0.4, 1.0)  # the fit starts from every pair of them,
SHARES = (0.2, 0.6)  # ... with every two of these as the shares of the loss that parameters and tokens explain


class Point(NamedTuple):
    """A finished run: parameters, training tokens, and the loss in any unit."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class ScalingLaw:
    """loss(N, D) = E + A / N^alpha + B / D^beta. E, A and B are in the unit of the loss."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: Any, tokens: Any) -> Any:
        """Of one run, or of arrays of them."""
        return self.E + self.A * np.power(parameters, -self.alpha) + self.B * np.power(tokens, -self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens of the lowest loss for a budget of `flops` = 6 N D.

        With D = flops / (6 N) the loss has its minimum where alpha A / N^alpha = beta B / D^beta.
        """
        both = self.alpha + self.beta
        parameters = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both) * (flops / 6) ** (self.beta / both)
        return parameters, flops / 6 / parameters


CHINCHILLA = ScalingLaw(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)  # nats per token; Hoffmann et al. 2022, equation 10
CHINCHILLA_REFIT = ScalingLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)  # Besiroglu et al. 2024, table 1


def fit_law(points: Sequence[Point], starts: Iterable[np.ndarray] | None = None) -> ScalingLaw:
    """Approach 3: the law with the least Huber loss between its logarithm and that of the losses, by L-BFGS from a grid of starts.

    Args:
        starts: where to begin, as `unknowns` gives them; None for the grid.

    Raises:
        ValueError: too few runs, or all of one size or one length.
        CourseError: scipy is not installed.
    """
    require_points(points)
    minimize = require_scipy().minimize
    sizes, lengths, losses = (np.log(np.array(column, dtype=float)) for column in zip(*points, strict=True))
    middle = np.array([sizes.mean(), lengths.mean()])  # a, b are the logarithms of the terms in the middle of the runs: far less correlated
    columns = np.stack([np.zeros_like(sizes), middle[0] - sizes, middle[1] - lengths])

    def objective(unknown: np.ndarray) -> tuple[float, np.ndarray]:
        """Sum of Huber losses in units of DELTA^2, and its gradient. unknown: log E, log A', log B', alpha, beta."""
        terms = unknown[:3, None] + columns * np.array([0.0, unknown[3], unknown[4]])[:, None]
        peak = terms.max(axis=0)
        parts = np.exp(terms - peak)
        whole = parts.sum(axis=0)
        left = (peak + np.log(whole) - losses) / DELTA
        slope = np.clip(left, -1, 1)
        pull = parts / whole * slope / DELTA
        return (slope * (left - slope / 2)).sum(), np.concatenate([pull.sum(axis=1), (pull * columns).sum(axis=1)[1:]])

    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-14, "gtol": 1e-8}
    within = [(None, None)] * 3 + [(0.0, 4.0)] * 2
    best = min(
        (minimize(objective, start, jac=True, method="L-BFGS-B", bounds=within, options=options)
         for start in (grid_of_starts(losses) if starts is None else starts)),
        key=lambda found: found.fun,
    )  # fmt: skip
    for _ in range(5):  # L-BFGS forgets its curvature and continues: a valley this flat needs it
        again = minimize(objective, best.x, jac=True, method="L-BFGS-B", bounds=within, options=options)
        best, gained = (again, best.fun - again.fun) if again.fun < best.fun else (best, 0.0)
        if gained < 1e-9 * (1 + best.fun):
            break
    e, a, b, alpha, beta = best.x
    return ScalingLaw(*(float(value) for value in (np.exp(e), np.exp(a + alpha * middle[0]), np.exp(b + beta * middle[1]), alpha, beta)))


def require_scipy() -> ModuleType:
    """scipy.optimize, which nothing else in the trainer needs.

    Raises:
        CourseError: it is not installed.
    """
    return require("scipy.optimize", "scaling", "Fitting a scaling law")


def grid_of_starts(losses: np.ndarray) -> list[np.ndarray]:
    typical = losses.mean()
    shares = [(1 - of_size - of_length, of_size, of_length) for of_size, of_length in product(SHARES, SHARES) if of_size + of_length < 1]
    return [np.array([*(typical + np.log(each)), alpha, beta]) for each, alpha, beta in product(shares, EXPONENTS, EXPONENTS)]


def unknowns(law: ScalingLaw, points: Sequence[Point]) -> np.ndarray:
    """A law as a start of `fit_law`."""
    sizes, lengths = (np.log(np.array([point[which] for point in points], dtype=float)).mean() for which in (0, 1))
    logs = np.log(np.maximum([law.E, law.A, law.B], 1e-300)) - [0.0, law.alpha * sizes, law.beta * lengths]
    return np.array([*np.maximum(logs, -20.0), law.alpha, law.beta])


def bootstrap(points: Sequence[Point], draws: int = 200, seed: int = 0) -> list[ScalingLaw]:
    """Laws fitted to as many runs, drawn with replacement: their spread is the uncertainty of the law. Each fit starts from the law of all
    runs and from one other place."""
    law, random = fit_law(points), np.random.default_rng(seed)
    laws = []
    while len(laws) < draws:
        drawn = [points[number] for number in random.integers(len(points), size=len(points))]
        if len({point.parameters for point in drawn}) < 2 or len({point.tokens for point in drawn}) < 2:
            continue
        laws.append(fit_law(drawn, [unknowns(law, drawn), grid_of_starts(np.log([point.loss for point in drawn]))[4]]))
    return laws


def interval(values: Iterable[float], level: float = 0.9) -> tuple[float, float]:
    """The percentiles that leave out (1 - level) / 2 on each side."""
    low, high = np.quantile(list(values), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


# Approach 2.


class Profile(NamedTuple):
    """An IsoFLOP profile: the lowest point of a parabola through the losses of one budget, over the logarithm of the parameters.

    inside: whether that point lies between the smallest and the largest model, so that the runs show a minimum.
    coefficients: of the parabola, the highest power first.
    """

    flops: float
    parameters: float
    tokens: float
    loss: float
    inside: bool
    coefficients: tuple[float, float, float]


def isoflop_profiles(runs: Sequence[tuple[float, Point]]) -> list[Profile]:
    """A profile for every budget with at least three sizes and a parabola that opens upwards. runs: (budget in FLOPs, run)."""
    budgets = defaultdict(list)
    for flops, point in runs:
        budgets[flops].append(point)
    profiles = []
    for flops, points in sorted(budgets.items()):
        sizes = np.log([point.parameters for point in points])
        if len(set(sizes)) < 3:
            continue
        square, slope, constant = np.polyfit(sizes, [point.loss for point in points], 2)
        if square > 0:
            lowest = -slope / (2 * square)
            inside = bool(sizes.min() < lowest < sizes.max())
            parameters, loss = float(np.exp(lowest)), float(constant - slope**2 / (4 * square))
            profiles.append(Profile(flops, parameters, flops / 6 / parameters, loss, inside, (square, slope, constant)))
    return profiles


def with_minimum(profiles: Sequence[Profile], fewest: int) -> list[Profile]:
    """The profiles with a minimum inside.

    Raises:
        ValueError: fewer than `fewest`, two or three.
    """
    inside = [profile for profile in profiles if profile.inside]
    if len(inside) < fewest:
        raise ValueError(
            f"{len(inside)} budgets of {len(profiles)} have their minimum between the smallest and the largest model, not "
            f"{'two' if fewest == 2 else 'three'}."
        )
    return inside


def frontier(profiles: Sequence[Profile]) -> tuple[float, float]:
    """(exponent a, factor k) of optimal parameters = k flops^a, by least squares of logarithms over the profiles with a minimum inside.

    Raises:
        ValueError: fewer than two of them.
    """
    inside = with_minimum(profiles, 2)
    exponent, log_factor = np.polyfit(np.log([each.flops for each in inside]), np.log([each.parameters for each in inside]), 1)
    return float(exponent), float(np.exp(log_factor))


@dataclass(frozen=True)
class FrontierLaw:
    """Approach 2, carried on to the loss: the best model of a budget has k flops^a parameters and the loss E + B / flops^beta.

    Unlike `ScalingLaw` it does not claim that the loss is a sum of what parameters and what tokens explain, so runs far from the best size
    do not bend it. It knows models near the best size only. curvature: what another size loses, by the square of the logarithm of its
    share of the best one; the mean of the parabolas'. E and B are in the unit of the loss.
    """

    E: float
    B: float
    beta: float
    k: float
    a: float
    curvature: float

    def loss(self, parameters: float, tokens: float) -> float:
        flops = 6 * parameters * tokens
        off = np.log(parameters / (self.k * flops**self.a))
        return float(self.E + self.B * flops**-self.beta + self.curvature * off**2)


def fit_frontier(profiles: Sequence[Profile]) -> FrontierLaw:
    """The frontier law of the profiles with a minimum inside. E is searched on a grid from 0 to the lowest loss: for each, a straight line
    through the logarithms of the losses above it gives B and beta, and the E with the least squares of log losses is taken.

    Raises:
        ValueError: fewer than three such profiles.
    """
    inside = with_minimum(profiles, 3)
    flops, losses = (np.log([getattr(each, name) for each in inside]) for name in ("flops", "loss"))

    def curve(E: float) -> tuple[float, float, np.ndarray]:
        slope, height = np.polyfit(flops, np.log(np.exp(losses) - E), 1)
        return np.square(np.log(E + np.exp(height + slope * flops)) - losses).sum(), E, np.array([slope, height])

    _, E, (slope, height) = min((curve(E) for E in np.linspace(0, np.exp(losses.min()), 200, endpoint=False)), key=lambda each: each[0])
    a, k = frontier(inside)
    return FrontierLaw(float(E), float(np.exp(height)), float(-slope), k, a, float(np.mean([each.coefficients[0] for each in inside])))


def bootstrap_profiles(fit: Callable[[list[Profile]], Any], runs: Sequence[tuple[float, Point]], draws: int = 200) -> list[Any]:
    """What `frontier` or `fit_frontier` finds in the profiles of runs drawn with replacement; draws with too few minima are left out."""
    random, found = np.random.default_rng(0), []
    for _ in range(draws):
        with suppress(ValueError):
            found.append(fit(isoflop_profiles([runs[number] for number in random.integers(len(runs), size=len(runs))])))
    return found


# Files.


def write_fit(path: Path, law: ScalingLaw, **more: Any) -> None:
    """A fit as JSON. more: what a reader must know of it: intervals, unit, bytes of a token, the largest run."""
    from shared.output_files import write_atomically

    write_atomically(path, (json.dumps({"law": asdict(law)} | more, indent=1) + "\n").encode())


def read_fit(path: Path) -> tuple[ScalingLaw, dict[str, Any]]:
    """The law of a file that `write_fit` wrote, and everything in it; `frontier` as a `FrontierLaw`, or None where there is none.

    Raises:
        CourseError: it is not such a file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        law = ScalingLaw(**{name: float(value) for name, value in found["law"].items()})
        best = found.get("frontier")
        found["frontier"] = best and FrontierLaw(**{name: float(value) for name, value in best.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise CourseError(f"{path} holds no fit of a scaling law: python chapters/12_grpo/scaling.py writes one.") from None
    return law, found


def require_points(points: Sequence[Point]) -> None:
    if len(points) < 5 or len({point[0] for point in points}) < 2 or len({point[1] for point in points}) < 2:
        raise ValueError(f"{len(points)} runs cannot fit five constants: give more sizes and lengths.")
    if any(not (np.isfinite(point).all() and min(point) > 0) for point in points):
        raise ValueError("A run has a loss, parameters or tokens that are not positive numbers: leave it out.")
