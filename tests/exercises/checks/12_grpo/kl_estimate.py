"""Check of 12.kl_estimate. Oracles: Python's decimal, with 60 digits; and policies over 7 tokens that are enumerated: torch's KL divergence
and its gradients, which estimates of drawn tokens have on average, or do not.

Tolerances. float64: 1e-12 of estimates around 1. float32: 1e-5, of k3 where d is a thousandth 1e-3, as the contract says. bfloat16
and float16: exactly, for numbers that one rounding at the end gives.
"""

from decimal import Decimal, localcontext

import torch
from torch.distributions import Categorical, kl_divergence

from shared.course.checking import Check
from shared.course.counting import cost, within

from .common import CONTRACT, cases_of, randn, refused, strided, with_gradients
from .pieces import left_behind, nothing
from .row_loss import RowLoss

DIGITS = "Python's decimal, with 60 digits"
AVERAGE = "torch's kl_divergence of the two distributions"
NAMES = "log_probs", "reference"


def of(log_ratios, estimator, dtype=torch.float64, log_probs=-1.0):
    """Tokens whose log-ratio is this, log reference - log pi."""

    def given():
        ratios = torch.tensor(log_ratios, dtype=torch.float64)
        made = torch.full_like(ratios, log_probs), ratios + log_probs
        return {name: tensor.to(dtype) for name, tensor in zip(NAMES, made, strict=True)} | {"estimator": estimator}

    return given


def drawn(*shape, spread=0.7, dtype=torch.float64, seed=1, **more):
    def given():
        log_probs = -randn(*shape, seed=seed).abs()
        return {"log_probs": log_probs.to(dtype), "reference": (log_probs + spread * randn(*shape, seed=seed + 1)).to(dtype)} | more

    return given


def by_decimal(log_probs, reference, estimator="k3"):
    """The estimates, and the gradient of each, which is -1, -d, or 1 - e^d."""
    found, back = [], []
    with localcontext() as context:
        context.prec = 60
        for policy, other in zip(log_probs.flatten().tolist(), reference.flatten().tolist(), strict=True):
            d = Decimal(other) - Decimal(policy)
            each = {"k1": lambda d=d: (-d, 1), "k2": lambda d=d: (d * d / 2, -d), "k3": lambda d=d: (d.exp() - 1 - d, 1 - d.exp())}
            value, slope = each[estimator]()
            found.append(float(value))
            back.append(float(slope))
    numbers, slopes = (torch.tensor(each, dtype=torch.float64).view(log_probs.shape) for each in (found, back))
    flow = randn(*log_probs.shape, seed=17, dtype=log_probs.dtype).double()
    results = {"estimates": numbers, "gradient of log_probs": slopes * flow, "gradient of reference": torch.zeros_like(flow)}
    return {name: value.to(log_probs.dtype) for name, value in results.items()}


def mixed(dtype, reference_dtype, estimator):
    """A reference that was stored in another dtype."""

    def given():
        made = drawn(40, dtype=dtype, estimator=estimator)()
        return made | {"reference": drawn(40)()["reference"].to(reference_dtype)}

    return given


def mean_and_gradient(function, estimator, policy, reference):
    """Every token, weighted by its probability, as if each had been drawn that often."""
    leaf = policy.clone().requires_grad_()
    logs = leaf.log_softmax(0)
    weights = logs.detach().exp()
    found = function(logs, reference.log_softmax(0), estimator)
    [gradient] = torch.autograd.grad((weights * found).sum(), [leaf])
    return {"mean": (weights * found.detach()).sum(), "gradient of the policy's logits": gradient}


def k1_on_average(policy, reference, **_):
    """The KL divergence; and a gradient of 0, because each token's -log pi teaches nothing on average."""
    divergence = kl_divergence(Categorical(logits=policy), Categorical(logits=reference))
    return {"mean": divergence, "gradient of the policy's logits": torch.zeros_like(policy)}


def k2_on_average(function, estimator, policy, reference):
    found = mean_and_gradient(function, estimator, policy, reference)
    del found["mean"]
    return found


def gradient_of_kl(policy, reference, **_):
    leaf = policy.clone().requires_grad_()
    [gradient] = torch.autograd.grad(kl_divergence(Categorical(logits=leaf), Categorical(logits=reference)), [leaf])
    return {"gradient of the policy's logits": gradient}


def k3_on_average(policy, reference, **_):
    """The KL divergence; and the gradient of the other one, from the reference to the policy."""
    leaf = policy.clone().requires_grad_()
    ours, theirs = Categorical(logits=leaf), Categorical(logits=reference)
    [gradient] = torch.autograd.grad(kl_divergence(theirs, ours), [leaf])
    return {"mean": kl_divergence(ours, theirs).detach(), "gradient of the policy's logits": gradient}


def same_policy(function, log_probs, estimator):
    """The first step: one tensor is given as both."""
    leaf = log_probs.clone().requires_grad_()
    found = with_gradients(function(leaf, leaf, estimator), {"log_probs": leaf}, "estimates")
    return found | {"log_probs still ask for gradients": leaf.requires_grad}


def at_rest(log_probs, estimator):
    """All estimates are 0. k1 has a gradient, the others have none."""
    flow = randn(*log_probs.shape, seed=17, dtype=log_probs.dtype)
    return {"estimates": torch.zeros_like(log_probs), "gradient of log_probs": flow if estimator == "k1" else torch.zeros_like(flow),
            "log_probs still ask for gradients": True}  # fmt: skip


def given_sizes(function):
    found = {}
    for estimator in ("k1", "k2", "k3"):
        sizes = {f"{tokens} tokens": drawn(tokens, dtype=torch.float32, estimator=estimator)() for tokens in (60, 600)}
        found[estimator] = cost(function, 12.0, 60 * 4, sizes)
    return found


def small(**_):
    return {estimator: within(12.0) for estimator in ("k1", "k2", "k3")}


ESTIMATES = RowLoss(NAMES, by_decimal, "estimates")
case, example = cases_of(by_decimal, DIGITS, ESTIMATES.observed), ESTIMATES.example
answer, only, value = ESTIMATES.answer, ESTIMATES.only, ESTIMATES.value


def average(estimator, expected, observe=mean_and_gradient):
    def given():
        return {"estimator": estimator, "policy": randn(7, seed=3), "reference": randn(7, seed=4)}

    return case("oracle", f"{estimator}, on average over the policy's 7 tokens", given, expected, AVERAGE, observe)


INF, NAN = torch.inf, torch.nan
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = [0.5, 0.25], [0.25, 0.5]
SMALL = [1e-3, -1e-3, 2e-3, -5e-3]
K1, K2, K3 = ({"estimator": name.lower()} for name in ("K1", "K2", "K3"))  # made here, so that they are no constants of Python's


def halves(estimator):
    return lambda: {name: torch.tensor(numbers).log() for name, numbers in zip(NAMES, HALVES, strict=True)} | {"estimator": estimator}


def exactly_small(dtype, estimator="k3"):
    """Log-ratios that no rounding has touched: the policy is sure of its token."""
    return of(SMALL, estimator, dtype, log_probs=0.0)


CHECK = Check(
    exercise="12.kl_estimate",
    outputs=("estimates",),
    spoilt=("estimates", "gradients through estimates"),
    cases=[
        case("shape and dtype", "float32 [2, 3], k1", drawn(2, 3, dtype=FP32, **K1), source=CONTRACT),
        case("shape and dtype", "float64, a scalar, k2", drawn(**K2), source=CONTRACT),
        case("shape and dtype", "bfloat16 [4], k3", drawn(4, dtype=BF16, **K3), source=CONTRACT),
        case("shape and dtype", "float16 [2, 2], the estimator left out", drawn(2, 2, dtype=FP16), source=CONTRACT),
        example("the contract's, k1", halves("k1"), 0.693147, -0.693147, source=CONTRACT),
        example("the contract's, k2", halves("k2"), 0.2402265, 0.2402265, source=CONTRACT),
        example("the contract's, k3", halves("k3"), 0.1931472, 0.3068528, source=CONTRACT),
        example("k1, log-ratios of 3 and -2", of([3.0, -2.0], "k1"), -3.0, 2.0),
        example("k2, log-ratios of 3 and -2", of([3.0, -2.0], "k2"), 4.5, 2.0),
        example("k3, log-ratios of 3 and -2: 20.0855 - 4, and 0.135335 + 1", of([3.0, -2.0], "k3"), 16.0855369, 1.1353353),
        case("property", "k1, 7 tokens", drawn(7, **K1)),
        case("property", "k2, 7 tokens", drawn(7, **K2)),
        case("property", "k3, 7 tokens", drawn(7, **K3)),
        case("property", "the estimator is left out: k3", drawn(7)),
        case("property", "[2, 1, 4], k3", drawn(2, 1, 4, **K3)),
        case("property", "a scalar, k1", drawn(**K1)),
        case("property", "no tokens, k2", drawn(0, 3, **K2)),
        case("property", "k1, the policy is its own reference: 0, with a gradient", lambda: {"log_probs": -randn(5, seed=1).abs()} | K1,
             at_rest, CONTRACT, same_policy),
        case("property", "k2, the policy is its own reference: 0, and no gradient", lambda: {"log_probs": -randn(5, seed=1).abs()} | K2,
             at_rest, CONTRACT, same_policy),
        case("property", "k3, the policy is its own reference: 0, and no gradient", lambda: {"log_probs": -randn(5, seed=1).abs()} | K3,
             at_rest, CONTRACT, same_policy),
        case("property", "k3 of log-ratios of a few thousandths, in float32", exactly_small(FP32), tolerance=1e-3, least=1e-12),
        case("property", "k2 of log-ratios of a few thousandths, in float32", exactly_small(FP32, "k2"), tolerance=1e-5, least=1e-12),
        case("property", "k3 of log-ratios of a few thousandths, in float64", exactly_small(torch.float64), tolerance=1e-9, least=1e-15),
        case("property", "k3 of log-ratios of a few thousandths, in bfloat16, computed in float32", exactly_small(BF16), only(by_decimal),
             DIGITS, value, 5e-3, 1e-12),
        case("property", "k3 of log-ratios of 100, -40 and -800", of([100.0, -40.0, -800.0], "k3")),
        case("property", "k2 of log-ratios of 100, -40 and -800", of([100.0, -40.0, -800.0], "k2")),
        case("property", "k1 of log-ratios of 100, -40 and -800", of([100.0, -40.0, -800.0], "k1")),
        case("property", "log-probabilities far below 0, whose exponentials are 0", lambda: {
            name: value - 1000 if name in NAMES else value for name, value in drawn(7, **K3)().items()}, tolerance=1e-9),
        case("property", "k1 of tokens that the reference calls impossible, or that are NaN", of([-INF, NAN, 1.0], "k1"),
             answer(INF, NAN, -1.0), CONTRACT, value),
        case("property", "k2 of tokens that the reference calls impossible, or that are NaN", of([-INF, NAN, 1.0], "k2"),
             answer(INF, NAN, 0.5), CONTRACT, value),
        case("property", "k3 of tokens that the reference calls impossible, or that are NaN", of([-INF, NAN, 0.0], "k3"),
             answer(INF, NAN, 0.0), CONTRACT, value),
        case("property", "tensors that are not contiguous", lambda: strided(drawn(4, 5, estimator="k3")())),
        case("property", "float32, k3", drawn(40, dtype=FP32, **K3), tolerance=1e-5),
        case("property", "float32, k2", drawn(40, dtype=FP32, **K2), tolerance=1e-5),
        case("property", "bfloat16, k1, computed in float32", drawn(40, dtype=BF16, **K1), only(by_decimal), DIGITS, value, 0.0),
        case("property", "bfloat16, k2, computed in float32", drawn(40, dtype=BF16, **K2), only(by_decimal), DIGITS, value, 0.0),
        case("property", "bfloat16, k3, computed in float32", drawn(40, dtype=BF16, **K3), only(by_decimal), DIGITS, value, 0.0),
        case("property", "float16, k3, computed in float32", drawn(40, dtype=FP16, **K3), only(by_decimal), DIGITS, value, 0.0),
        case("property", "bfloat16, with a reference in float32", mixed(BF16, FP32, "k3"), only(by_decimal), DIGITS, value, 0.0),
        case("property", "float32, with a reference in bfloat16", mixed(FP32, BF16, "k2"), only(by_decimal), DIGITS, value, 1e-5),
        case("property", "nothing else is changed", drawn(7), nothing, CONTRACT, left_behind),
        case("property", "an estimator that is none of the three", drawn(7, estimator="k4"), refused, CONTRACT, value),
        case("property", "no estimator", drawn(7, estimator=None), refused, CONTRACT, value),
        case("property", "an estimator with a capital", drawn(7, estimator="K3"), refused, CONTRACT, value),
        case("property", "an estimator with a space", drawn(7, estimator="k1 "), refused, CONTRACT, value),
        case("property", "a part of an estimator's name", drawn(7, estimator="k"), refused, CONTRACT, value),
        case("property", "the number of an estimator alone", drawn(7, estimator="3"), refused, CONTRACT, value),
        case("property", "an empty word for the estimator", drawn(7, estimator=""), refused, CONTRACT, value),
        average("k1", k1_on_average),
        average("k2", gradient_of_kl, k2_on_average),
        average("k3", k3_on_average),
        case("oracle", "211 tokens, k3", drawn(211, spread=3.0, **K3), tolerance=1e-11),
        ESTIMATES.halves("3 and 4 of 7 tokens", drawn(7, cut=3, **K3)),
        case("budget", "ten times as many tokens, and memory, in tensors like `log_probs`", dict, small, CONTRACT, given_sizes),
    ],
)  # fmt: skip
