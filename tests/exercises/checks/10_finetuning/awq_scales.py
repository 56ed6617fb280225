"""Check of 10.awq_scales. Oracle: numpy in float64, all ratios at once; and the quantization of a layer, tried by brute force.

Tolerances. float64: 1e-12; float32: 1e-6.
"""

import math

import numpy
import torch

from shared.course.checking import Case, Check

from .common import CONTRACT, randn, refused

NUMPY = "numpy in float64, all ratios at once"
BRUTE = "brute force: the smallest error of a layer whose weights are rounded to 7 levels"


class Losses:
    """The losses of the calls, in their order."""

    def __init__(self, *losses):
        self.losses, self.given = losses, []

    def __call__(self, scales):
        self.given.append(scales)
        if not isinstance(scales, torch.Tensor):
            raise TypeError(f"loss_of wants a tensor of scales, and was called with a {type(scales).__name__}.")
        if len(self.given) > len(self.losses):
            raise RuntimeError(f"loss_of was called {len(self.given)} times, for {len(self.losses)} ratios.")
        return self.losses[len(self.given) - 1]


def of(means, losses, ratios, dtype=torch.float64):
    def given():
        made = torch.tensor(means, dtype=dtype) if isinstance(means, list) else means.to(dtype).clone()
        return {"means": made, "losses": list(losses), "ratios": list(ratios)}

    return given


def searched(function, means, losses, ratios):
    """The scales, and all that were tried."""
    loss_of = Losses(*losses)
    found = function(means, loss_of, ratios)
    return {"scales": found} | {f"try number {number}": given for number, given in enumerate(loss_of.given, 1)}


def normal(means, ratio):
    scales = numpy.maximum(means.double().numpy() ** ratio, 1e-4)
    return torch.from_numpy(scales / math.sqrt(scales.max() * scales.min())).to(means.dtype)


def by_numpy(means, losses, ratios):
    tried = [normal(means, ratio) for ratio in ratios]
    finite = [place for place, loss in enumerate(losses) if math.isfinite(loss)]
    if not finite:
        return {"raised": "ValueError"}
    best = min(finite, key=lambda place: losses[place])
    return {"scales": tried[best]} | {f"try number {number}": scales for number, scales in enumerate(tried, 1)}


def only_scales(function, means, losses, ratios):
    return {"scales": function(means, Losses(*losses), ratios)}


def answer(scales):
    return lambda means, **_: {"scales": torch.tensor(scales, dtype=means.dtype)}


def layer(seed, loud):
    """Inputs, a few channels of which are loud, and weights."""
    x = randn(60, 12, seed=seed)
    x[:, 2], x[:, 7], x[:, 9] = loud * x[:, 2], loud / 3 * x[:, 7], 0
    return x, randn(8, 12, seed=seed + 1)


def rounded(weights):
    step = weights.abs().amax(dim=1, keepdim=True) / 3
    return (weights / step).round() * step


def outputs_error(x, weights, scales):
    return (x @ (rounded(weights * scales) / scales - weights).T).square().mean().item()


def of_layer(function, seed, loud, grid):
    x, weights = layer(seed, loud)
    ratios = [number / grid for number in range(grid)]
    found = function(x.abs().mean(dim=0), lambda scales: outputs_error(x, weights, scales), ratios)
    return {"scales": found, "error of the outputs": outputs_error(x, weights, found)}


def by_brute_force(seed, loud, grid):
    x, weights = layer(seed, loud)
    tried = [normal(x.abs().mean(dim=0), number / grid) for number in range(grid)]
    best = min(tried, key=lambda scales: outputs_error(x, weights, scales))
    return {"scales": best, "error of the outputs": outputs_error(x, weights, best)}


def kept(function, means, losses, ratios):
    """Whoever is given scales may keep them: the next try does not write to them."""
    loss_of, copies = Losses(*losses), []

    def keep(scales):
        copies.append(scales.clone())
        return loss_of(scales)

    found = function(means, keep, ratios)
    unchanged = all(torch.equal(copy, given) for copy, given in zip(copies, loss_of.given, strict=True))
    return {"scales": found, "scales of an earlier try stay as they were": unchanged}


def stay(**given):
    return {"scales": by_numpy(**given)["scales"], "scales of an earlier try stay as they were": True}


def case(rung, title, given, expected=by_numpy, source=NUMPY, observe=searched, tolerance=1e-12):
    return Case(rung, title, given, expected, source, observe, rtol=tolerance, atol=0.0)


def example(title, given, scales, source="arithmetic"):
    return Case("worked example", title, given, answer(scales), source, only_scales, rtol=1e-12)


NAN, INF = math.nan, math.inf
MEANS = [0.5, 2.0, 1.0, 8.0, 0.125]
RATIOS = [0.0, 0.25, 0.5, 0.75]

CHECK = Check(
    exercise="10.awq_scales",
    outputs=("scales",),
    spoilt=("scales",),
    cases=[
        case("shape and dtype", "five channels, float32", of(MEANS, [3.0, 1.0, 2.0, 4.0], RATIOS, torch.float32), source=CONTRACT),
        example("1 and 4, with ratio 1: divided by sqrt(1 * 4)", of([1.0, 4.0], [3.0, 2.0, 1.0], [0.0, 0.5, 1.0]), [0.5, 2.0]),
        example("ratio 0.5: 3 and 4 divided by sqrt(12)", of([9.0, 16.0], [3.0, 1.0, 2.0], [0.0, 0.5, 1.0]), [3 / 12**0.5, 4 / 12**0.5]),
        example("ratio 0: no scaling", of([9.0, 16.0], [1.0, 2.0], [0.0, 0.5]), [1.0, 1.0]),
        example("three channels: 1, 4, 16 divided by sqrt(1 * 16)", of([1.0, 4.0, 16.0], [1.0], [1.0]), [0.25, 1.0, 4.0]),
        example("a mean of 0 becomes 1e-4: divided by sqrt(1e-4 * 100)", of([0.0, 100.0], [1.0], [1.0]), [1e-3, 1e3]),
        case("property", "the smallest loss is the first", of(MEANS, [1.0, 2.0, 3.0, 4.0], RATIOS)),
        case("property", "... the last", of(MEANS, [4.0, 3.0, 2.0, 1.0], RATIOS)),
        case("property", "a loss of 0", of(MEANS, [4.0, 0.0, 2.0, 1.0], RATIOS)),
        case("property", "of two equal losses, the first", of(MEANS, [4.0, 1.0, 1.0, 2.0], RATIOS)),
        case("property", "all losses are equal", of(MEANS, [2.0, 2.0, 2.0, 2.0], RATIOS)),
        case("property", "ratios in another order", of(MEANS, [4.0, 3.0, 1.0, 2.0], [0.75, 0.0, 0.25, 0.5])),
        case("property", "the same ratio twice", of(MEANS, [4.0, 3.0, 1.0], [0.5, 0.25, 0.5])),
        case("property", "... of which the first has the smaller loss", of(MEANS, [1.0, 3.0, 4.0], [0.5, 0.25, 0.5])),
        case("property", "equal losses, of which the first has the largest ratio", of(MEANS, [2.0, 1.0, 1.0, 1.0], [0.0, 0.75, 0.25, 0.5])),
        case("property", "losses that differ in the twelfth digit", of(MEANS, [1 + 2e-12, 1 + 1e-12, 1.0, 1 + 3e-12], RATIOS)),
        case("property", "huge losses, and tiny ones", of(MEANS, [1e300, 1e299, 1e301, 2e299], RATIOS)),
        case("property", "... of which all but one vanish in float32", of(MEANS, [2e-60, 1e-60, 3e-60, 4e-60], RATIOS)),
        case("property", "a loss that is NaN, first", of(MEANS, [NAN, 3.0, 2.0, 4.0], RATIOS)),
        case("property", "... last", of(MEANS, [3.0, 2.0, 4.0, NAN], RATIOS)),
        case("property", "a loss that is infinite, and one that is NaN", of(MEANS, [INF, NAN, 3.0, 4.0], RATIOS)),
        case("property", "all losses are NaN", of(MEANS, [NAN, NAN], [0.0, 0.5]), refused, CONTRACT),
        case("property", "all losses are infinite, or NaN", of(MEANS, [INF, NAN], [0.0, 0.5]), refused, CONTRACT),
        case("property", "no ratios", of(MEANS, [], []), refused, CONTRACT),
        case("property", "one channel", of([3.0], [2.0, 1.0], [0.0, 0.5])),
        case("property", "one channel, which is never on", of([0.0], [2.0, 1.0], [0.0, 0.5])),
        case("property", "all means are equal", of([3.0, 3.0, 3.0], [2.0, 1.0], [0.0, 0.5])),
        case("property", "all means are 0", of([0.0, 0.0, 0.0], [2.0, 1.0, 3.0], [0.0, 0.5, 1.0])),
        case("property", "a mean of 0 with ratio 0", of([0.0, 4.0, 1.0], [1.0, 2.0], [0.0, 0.5])),
        case("property", "means whose power is below 1e-4", of([1e-9, 2e-5, 1.0, 3.0], [2.0, 1.0], [0.25, 1.0])),
        case("property", "means around a million", of([1e6, 3e6, 2e6], [2.0, 1.0], [0.25, 1.0])),
        case("property", "ratios above 1", of(MEANS, [2.0, 1.0], [1.0, 1.5])),
        case("property", "ratios that are a tuple, and float32 means", lambda: of(MEANS, [2.0, 1.0], [0.25, 1.0], torch.float32)() | {
            "ratios": (0.25, 1.0)}, tolerance=1e-6),
        case("property", "scales that are kept by who is given them", of(MEANS, [4.0, 1.0, 2.0, 3.0], RATIOS), stay, CONTRACT, kept),
        case("oracle", "37 channels, 20 ratios", of(randn(37, seed=1).abs(), [abs(number - 12.3) for number in range(20)],
                                                    [number / 20 for number in range(20)])),
        case("oracle", "a layer with loud channels", lambda: {"seed": 1, "loud": 30.0, "grid": 20}, by_brute_force, BRUTE, of_layer),
        case("oracle", "... with channels a little louder than others", lambda: {"seed": 5, "loud": 3.0, "grid": 20}, by_brute_force, BRUTE,
             of_layer),
    ],
)  # fmt: skip
