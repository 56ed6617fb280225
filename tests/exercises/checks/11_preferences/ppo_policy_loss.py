"""Check of 11.ppo_policy_loss. Oracles: the same objective in another form, token by token: a ratio that has an edge on one side only; and
a policy over 3 tokens whose answers are enumerated: its expected advantage, differentiated without any ratio.

Tolerances. float64: 1e-12 of losses around 1. float32: 1e-5, compared with float64 on the same numbers. bfloat16: exactly, for ratios of 1.
"""

import itertools
import math

import torch

from shared.course.checking import Check

from .common import CONTRACT, broken, cases_of, gradients, randn, strided, with_gradients
from .row_loss import RowLoss

ONE_SIDE = "token by token: the ratio has an upper edge where A is positive, a lower one where it is negative, none on the other side"
EXPECTED = "the gradient of minus the expected advantage, over all answers of the policy"
NAMES = "log_probs", "old_log_probs", "advantages"


def of(ratios, advantages, dtype=torch.float64, old=-1.0, **more):
    """Tokens whose probability was e^-1, and is now this many times as large."""

    def given():
        now = torch.tensor(ratios, dtype=torch.float64).log() + old
        made = now, torch.full_like(now, old), torch.tensor(advantages, dtype=torch.float64)
        return {name: tensor.to(dtype) for name, tensor in zip(NAMES, made, strict=True)} | more

    return given


def drawn(*shape, spread=0.4, scale=1.0, dtype=torch.float64, seed=1, **more):
    """Ratios of which about a third lies within 0.8 to 1.2."""

    def given():
        old = -randn(*shape, seed=seed).abs()
        made = old + spread * randn(*shape, seed=seed + 1), old, scale * randn(*shape, seed=seed + 2)
        return {name: tensor.to(dtype) for name, tensor in zip(NAMES, made, strict=True)} | more

    return given


def one_sided(log_probs, old_log_probs, advantages, clip=0.2):
    found, back = [], []
    flat = [tensor.flatten().tolist() for tensor in (log_probs, old_log_probs, advantages)]
    for now, old, advantage in zip(*flat, strict=True):
        ratio = math.exp(now - old)
        past = ratio > 1 + clip if advantage > 0 else ratio < 1 - clip
        edge = 1 + clip if advantage > 0 else 1 - clip
        found.append(-advantage * (edge if past else ratio))
        back.append(0.0 if past else -advantage * ratio)
    shaped = [torch.tensor(numbers, dtype=torch.float64).view(log_probs.shape) for numbers in (found, back)]
    gradient = shaped[1] * randn(*log_probs.shape, seed=17)
    none = torch.zeros_like(gradient)
    results = {"loss": shaped[0], "gradient of log_probs": gradient, "gradient of old_log_probs": none, "gradient of advantages": none}
    return {name: value.to(log_probs.dtype) for name, value in results.items()}


def moved(losses, gradients):
    """The losses, and the gradient of each token's own loss."""

    def expected(log_probs, **_):
        flow = torch.tensor(gradients, dtype=torch.float64) * randn(*log_probs.shape, seed=17)
        none = torch.zeros_like(flow)
        return {"loss": torch.tensor(losses, dtype=torch.float64), "gradient of log_probs": flow, "gradient of old_log_probs": none,
                "gradient of advantages": none}  # fmt: skip

    return expected


def first_update(function, log_probs, advantages, **more):
    """The policy is the one that drew the tokens: one tensor is given as both."""
    leaf = log_probs.clone().requires_grad_()
    found = with_gradients(function(leaf, leaf, advantages, **more), {"log_probs": leaf})
    return found | {"log_probs still asks for gradients": leaf.requires_grad}


def policy_gradient(log_probs, advantages, **_):
    """The ratio is 1, and what flows back is minus the advantage: REINFORCE."""
    flow = randn(*log_probs.shape, seed=17, dtype=log_probs.dtype)
    return {"loss": -advantages, "gradient of log_probs": -advantages * flow, "log_probs still asks for gradients": True}


def enumerated(function, table, length, clip):
    """Each answer of the policy, weighted by its probability; one advantage for all of an answer's tokens, as for its reward."""
    table = table.clone().requires_grad_()
    answers = torch.tensor(list(itertools.product(range(3), repeat=length)))
    before = torch.cat([torch.full((len(answers), 1), 3), answers[:, :-1]], dim=1)
    logs = table.log_softmax(-1)[before, answers]
    weights = logs.detach().sum(1).exp()
    advantages = randn(len(answers), 1, seed=4).expand_as(logs)
    losses = function(logs, logs.detach(), advantages, clip)
    [gradient] = torch.autograd.grad((losses.sum(1) * weights).sum(), [table])
    return {"gradient of the policy's logits": gradient}


def expected_advantage(table, length, clip):
    table = table.clone().requires_grad_()
    p, advantages = table.softmax(-1), randn(3**length, seed=4).view(3, 3, 3)
    expected = torch.einsum("a,ab,bc,abc->", p[3], p[:3], p[:3], advantages)
    [gradient] = torch.autograd.grad(-expected, [table])
    return {"gradient of the policy's logits": gradient}


def far_away(function, now, old):
    """Without an edge, one token: weighted by how the old policy draws, the loss is minus the new policy's expected advantage."""
    advantages = randn(len(now), seed=4)
    losses = function(now.log_softmax(0), old.log_softmax(0), advantages, 1e9)
    return {"the expected loss": (old.softmax(0) * losses).sum()}


def new_advantage(now, old):
    return {"the expected loss": -torch.dot(now.softmax(0), randn(len(now), seed=4))}


LOSS = RowLoss(NAMES, one_sided, near=1e-6)
case, example = cases_of(one_sided, ONE_SIDE, LOSS.observed), LOSS.example

CHECK = Check(
    exercise="11.ppo_policy_loss",
    outputs=("loss",),
    spoilt=("loss", "gradients through loss"),
    cases=[
        case("shape and dtype", "float32 [2, 3]", drawn(2, 3, dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "float64, a scalar", drawn(), source=CONTRACT),
        case("shape and dtype", "bfloat16 [4]", drawn(4, dtype=torch.bfloat16), source=CONTRACT),
        example("the contract's", of([1.5, 1.5, 0.5], [1.0, -1.0, 1.0], old=0.0, clip=0.2), -1.2, 1.5, -0.5, source=CONTRACT),
        example("ratio 0.5, A -1: the objective is -0.8", of([0.5], [-1.0], clip=0.2), 0.8, source=CONTRACT),
        example("within the range: minus ratio * A", of([1.1, 0.9, 1.0], [3.0, -5.0, 7.0], clip=0.2), -3.3, 4.5, -7.0),
        example("ratio 4, and a quarter, clip 0.5", of([4.0, 4.0, 0.25, 0.25], [2.0, -2.0, 2.0, -2.0], clip=0.5), -3.0, 8.0, -0.5, 1.0),
        example("an advantage of 0", of([4.0, 1.0, 0.25], [0.0, 0.0, 0.0], clip=0.5), 0.0, 0.0, 0.0),
        case("property", "7 tokens", drawn(7, clip=0.2)),
        case("property", "[2, 3, 4]", drawn(2, 3, 4, clip=0.2)),
        case("property", "one token, a scalar", drawn(clip=0.2)),
        case("property", "no tokens", drawn(0, clip=0.2)),
        case("property", "clip is left out: 0.2", drawn(17)),
        case("property", "clip 0.05", drawn(17, clip=0.05)),
        case("property", "clip 0: nothing can be gained", drawn(17, clip=0.0)),
        case("property", "clip 1.5: an upper edge, and a lower one that no ratio reaches", drawn(17, spread=1.5, clip=1.5)),
        case("property", "advantages of thousands", drawn(7, scale=3000.0), tolerance=1e-9),
        case("property", "advantages that are all positive and equal", lambda: drawn(7)() | {
            "advantages": torch.full((7,), 2.0).double()}),
        case("property", "beyond the edge, where A is gained: no gradient", of([1.5, 0.5], [1.0, -1.0], clip=0.2),
             moved([-1.2, 0.8], [0.0, 0.0]), CONTRACT),
        case("property", "beyond the edge, where A is lost: the gradient leads back", of([1.5, 0.5], [-1.0, 1.0], clip=0.2),
             moved([1.5, -0.5], [1.5, -0.5]), CONTRACT),
        case("property", "the first update: the same tensor as old and as new", lambda: {
            "log_probs": -randn(7, seed=1).abs(), "advantages": randn(7, seed=2)}, policy_gradient, "REINFORCE: minus A times the gradient",
            first_update),
        case("property", "... in bfloat16", lambda: {
            "log_probs": -randn(7, seed=1).abs().bfloat16(), "advantages": randn(7, seed=2).bfloat16()}, policy_gradient,
            "REINFORCE: minus A times the gradient", first_update, 0.0),
        case("property", "a token that became e^30 times as likely, and one that became impossible",
             lambda: {"log_probs": torch.tensor([-1.0, -1.0, -800.0, -800.0]).double(),
                      "advantages": torch.tensor([1.0, -1.0] * 2).double(),
                      "old_log_probs": torch.tensor([-31.0, -31.0, -1.0, -1.0]).double()}),
        case("property", "log-probabilities far below 0, whose exponentials are 0", lambda: {
            name: value - 1000 if "log" in name else value for name, value in drawn(7)().items()}, tolerance=1e-9),
        case("property", "an advantage that is NaN is seen, at its token alone", lambda: broken(drawn(5)(), "advantages"),
             LOSS.only(one_sided), CONTRACT, LOSS.value),
        case("property", "tensors that are not contiguous", lambda: strided(drawn(4, 5)())),
        case("property", "float32", drawn(17, dtype=torch.float32), tolerance=1e-5),
        case("oracle", "211 tokens", drawn(211, spread=0.6, clip=0.3)),
        case("oracle", "on-policy: all 27 answers of 3 tokens", lambda: {"table": randn(4, 3, seed=9), "length": 3, "clip": 0.2},
             expected_advantage, EXPECTED, enumerated),
        case("oracle", "another policy than the one that drew, and no edge", lambda: {"now": randn(5, seed=6), "old": randn(5, seed=7)},
             new_advantage, "importance sampling: the mean of ratio * A under the old policy is the mean of A under the new one", far_away),
        LOSS.halves("3 and 4 of 7 tokens", lambda: drawn(7)() | {"cut": 3}),
        LOSS.budget("tokens", drawn),
    ],
)  # fmt: skip
