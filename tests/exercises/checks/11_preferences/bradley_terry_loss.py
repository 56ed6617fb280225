"""Check of 11.bradley_terry_loss. Oracles: torch's cross entropy between the two rewards, where the chosen answer is the right class;
torch's mean squared error for centering; and Zermelo's iteration (1929), which finds the strengths that make given games likeliest without
any loss.

Tolerances. float64: 1e-12 of losses around 1, 1e-9 behind 1,000 iterations. float32: 1e-6 of losses around 1, compared with float64 on the
same numbers.
"""

import numpy
import torch
import torch.nn.functional as F

from shared.course.checking import Check

from .common import ARITHMETIC, CONTRACT, as_leaves, broken, cases_of, randn, strided, with_gradients
from .row_loss import RowLoss

TORCH = "torch: cross_entropy of [chosen - margin, rejected], class 0, and mse_loss of chosen and -rejected"
ZERMELO = "Zermelo's iteration: at the likeliest strengths of these games, the gradient of their losses' sum is 0"


def of(chosen, rejected, dtype=torch.float64, **more):
    def given():
        made = {"chosen": torch.tensor(chosen, dtype=dtype), "rejected": torch.tensor(rejected, dtype=dtype)}
        return made | {name: torch.tensor(value, dtype=dtype) if name == "margin" else value for name, value in more.items()}

    return given


def drawn(pairs, margin=True, centering=0.3, scale=1.0, dtype=torch.float64, margins=None, seed=1):
    def given():
        made = {"chosen": scale * randn(pairs, seed=seed), "rejected": scale * randn(pairs, seed=seed + 1)}
        made = {name: tensor.to(dtype) for name, tensor in made.items()}
        if margin:
            made["margin"] = scale * randn(pairs, seed=seed + 2, dtype=margins or dtype)
        return made | ({} if centering is None else {"centering": centering})

    return given


def by_torch(chosen, rejected, margin=None, centering=0.0):
    leaves = as_leaves({"chosen": chosen, "rejected": rejected}, "chosen", "rejected")
    wide = [leaf.to(torch.promote_types(chosen.dtype, torch.float32)) for leaf in leaves.values()]
    ahead = wide[0] if margin is None else wide[0] - margin.to(wide[0].dtype)
    found = F.cross_entropy(torch.stack([ahead, wide[1]], dim=1), torch.zeros(len(chosen), dtype=torch.int64), reduction="none")
    return with_gradients(found + centering * F.mse_loss(wide[0], -wide[1], reduction="none"), leaves)


def in_float64(chosen, rejected, margin=None, centering=0.0):
    """What rewards of 16 or 32 bits are worth, computed in float64 from the same numbers."""
    margin = None if margin is None else margin.double()
    found = by_torch(chosen.double(), rejected.double(), margin, centering)
    return {name: value.detach().float().to(torch.float32 if name == "loss" else chosen.dtype) for name, value in found.items()}


def both(function, rewards, **more):
    """One tensor as chosen and as rejected."""
    leaf = rewards.clone().requires_grad_()
    return with_gradients(function(leaf, leaf, **more), {"rewards": leaf})


def both_by_torch(rewards, centering):
    """Whatever both rewards are, the first term is log 2; centering is on twice the reward."""
    leaf = rewards.clone().requires_grad_()
    target = torch.zeros_like(leaf)
    return with_gradients(torch.full_like(leaf, 2.0).log() + centering * F.mse_loss(2 * leaf, target, reduction="none"), {"rewards": leaf})


def drifted(function, chosen, rejected, margin, drift):
    return {"loss": function(chosen + drift, rejected + drift, margin)}


def not_drifted(chosen, rejected, margin, drift):
    return LOSS.only(by_torch)(chosen=chosen, rejected=rejected, margin=margin)


def games(function, wins):
    """The gradient of the losses of all games between answers, at the strengths that make their results likeliest."""
    answers, won, strengths = len(wins), numpy.array(wins), numpy.ones(len(wins))
    for _ in range(1000):
        pulls = (won + won.T) / (strengths[:, None] + strengths)
        strengths = won.sum(1) / pulls.sum(1)
        strengths = strengths / strengths.sum()
    rewards = torch.from_numpy(strengths).log().requires_grad_()
    played = [(i, j) for i in range(answers) for j in range(answers) for _ in range(wins[i][j])]
    winners, losers = torch.tensor(played).unbind(1)
    found = function(rewards[winners], rewards[losers])
    [gradient] = torch.autograd.grad(found.sum(), [rewards])
    return {"gradient of the rewards": gradient}


def at_rest(wins):
    return {"gradient of the rewards": torch.zeros(len(wins)).double()}


LOSS = RowLoss(("chosen", "rejected"), by_torch)
case, example, only = cases_of(by_torch, TORCH, LOSS.observed), LOSS.example, LOSS.only
HALF = torch.bfloat16

CHECK = Check(
    exercise="11.bradley_terry_loss",
    outputs=("loss",),
    spoilt=("loss", "gradients through loss"),
    cases=[
        case("shape and dtype", "float32 [3]", drawn(3, dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "bfloat16 rewards, without a margin", drawn(3, margin=False, dtype=HALF), source=CONTRACT),
        case("shape and dtype", "float32 rewards, a margin in float64", drawn(3, dtype=torch.float32, margins=torch.float64),
             source=CONTRACT),
        example("the contract's: log 2; log(1 + exp(-3))", of([0.0, 2.0], [0.0, -1.0]), 0.69314718, 0.04858735, source=CONTRACT),
        example("the contract's with margin and centering: log 2 + 0.5 * 1", of([2.0], [-1.0], margin=[3.0], centering=0.5), 1.19314718,
                source=CONTRACT),
        example("the model prefers the rejected answer: log(1 + exp(3))", of([-1.0], [2.0]), 3.04858735),
        example("a margin of 2 on a difference of 5, and of -1: log(1 + exp(-3)), log(1 + exp(-6))",
                of([4.0, 4.0], [-1.0, -1.0], margin=[2.0, -1.0]), 0.04858735, 0.00247569),
        example("centering 0.25 on a sum of -6: log 2 + 9", of([-3.0], [-3.0], centering=0.25), 9.69314718),
        case("property", "7 pairs", drawn(7)),
        case("property", "one pair", drawn(1)),
        case("property", "no pairs", drawn(0)),
        case("property", "no margin and no centering are given", drawn(7, margin=False, centering=None)),
        case("property", "a margin, and no centering", drawn(7, centering=None)),
        case("property", "centering, and no margin", drawn(7, margin=False)),
        case("property", "margins of 0", lambda: drawn(7)() | {"margin": torch.zeros(7).double()}),
        case("property", "negative margins", lambda: drawn(7)() | {"margin": -randn(7, seed=5).abs()}),
        case("property", "a difference of 0, as it is and less its margin: the gradient is a half", of([1.0, 4.0], [1.0, 1.0],
             margin=[0.0, 3.0])),
        case("property", "a difference of thousands, either way", of([4000.0, -5000.0, 3.0], [-4000.0, 6000.0, -9000.0]), tolerance=1e-11),
        case("property", "... in float32, and with a margin", of([4000.0, -5000.0], [-4000.0, 6000.0], torch.float32,
             margin=[-50.0, 300.0])),
        case("property", "a difference of 100, either way, in float32", of([50.0, -50.0], [-50.0, 50.0], torch.float32), tolerance=1e-6),
        case("property", "a difference of 20, either way, in float32", of([10.0, -10.0], [-10.0, 10.0], torch.float32), in_float64,
             tolerance=1e-7),
        case("property", "both rewards grow by 1000: only differences matter", lambda: drawn(7, centering=None)() | {"drift": 1000.0},
             not_drifted, CONTRACT, drifted, 1e-11),
        case("property", "one tensor as both rewards", lambda: {"rewards": randn(5, seed=3), "centering": 0.5}, both_by_torch, ARITHMETIC,
             both),
        case("property", "a reward that is NaN is seen, in its pair alone", lambda: broken(drawn(4)(), "chosen"), only(by_torch),
             CONTRACT, LOSS.value),
        case("property", "tensors that are not contiguous", lambda: strided(drawn(5)())),
        case("property", "bfloat16 rewards, computed in float32", drawn(7, dtype=HALF, scale=3.0), only(in_float64), observe=LOSS.value,
             tolerance=1e-6),
        case("property", "float16, whose largest number is 65,504: a sum of 500, centered", of([250.0, 3.0], [250.0, 1.0], torch.float16,
             centering=1.0), only(in_float64), observe=LOSS.value, tolerance=1e-6),
        case("property", "bfloat16 rewards and a margin in float32, which keeps its digits", drawn(7, dtype=HALF, margins=torch.float32),
             only(in_float64), observe=LOSS.value, tolerance=1e-6),
        case("property", "float64 rewards and a margin in float32", drawn(7, margins=torch.float32)),
        case("oracle", "61 pairs", drawn(61, scale=3.0), tolerance=1e-11),
        case("oracle", "61 pairs in float32", drawn(61, scale=3.0, dtype=torch.float32), in_float64, tolerance=2e-5),
        case("oracle", "answers that have played each other", lambda: {"wins": [[0, 3, 1, 0], [1, 0, 2, 2], [1, 1, 0, 3], [2, 0, 1, 0]]},
             at_rest, ZERMELO, games, 1e-9),
        LOSS.halves("3 and 4 of 7 pairs", lambda: drawn(7)() | {"cut": 3}),
        LOSS.budget("pairs", drawn),
    ],
)  # fmt: skip
