"""Check of 12.group_advantages. Oracles: Python's statistics, which computes with fractions; and a policy over 3 answers whose groups are
enumerated: what the advantages teach is the gradient of the expected reward, times 1 - 1 / group.

Tolerances. float64: 1e-12 of advantages around 1. float32: 1e-5, compared with float64 on the same rewards. Where all answers of a group
have the same reward, and where one answer's advantage is rounded to a narrow dtype: exactly.
"""

import itertools
import statistics

import torch

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import ARITHMETIC, CONTRACT, cases_of, randn, refused
from .pieces import left_behind, nothing

EXACT = "Python's statistics: mean and stdev of the rewards as fractions"
EXPECTED = "the gradient of the expected reward, times 1 - 1 / group: each answer is part of the mean that it is compared with"


def of(rewards, dtype=torch.float64, **more):
    return lambda: {"rewards": torch.tensor(rewards, dtype=torch.float64).to(dtype)} | more


def drawn(groups, group, size=1.0, around=0.0, dtype=torch.float64, seed=1, **more):
    """Random rewards; the groups differ in mean and in deviation, and the second one's rewards are all equal."""

    def given():
        spread = 1 + 3 * randn(groups, 1, seed=seed + 1).abs()
        made = randn(groups, group, seed=seed) * spread + 5 * randn(groups, 1, seed=seed + 2)
        made[1:2] = made[1:2, :1]
        return {"rewards": (around + size * made).flatten().to(dtype), "group": group} | more

    return given


def by_statistics(rewards, group, scale="group"):
    numbers, found = rewards.tolist(), []
    for start in range(0, len(numbers), group):
        own = numbers[start : start + group]
        mean = statistics.mean(own)
        compared = {"group": own, "batch": numbers, "none": []}[scale]
        unit = statistics.stdev(compared) + 1e-4 if len(compared) > 1 else 1.0
        found += [(reward - mean) / unit for reward in own]
    return {"advantages": torch.tensor(found, dtype=torch.float64).to(rewards.dtype)}


def answer(*advantages):
    return lambda rewards, **_: {"advantages": torch.tensor(advantages, dtype=torch.float64).to(rewards.dtype)}


def zeros(rewards, **_):
    return {"advantages": torch.zeros_like(rewards)}


def turned(function, rewards, group, order, **more):
    """The answers of each group in another order: the same advantages in that order."""
    found = function(rewards.view(-1, group)[:, order].flatten(), group, **more)
    return {"advantages": found.view(-1, group)[:, torch.tensor(order).argsort()].flatten()}


def shifted(function, rewards, group, prompts, **more):
    """Another prompt's rewards may be higher as a whole: only differences within a group matter."""
    return {"advantages": function(rewards + torch.tensor(prompts).double().repeat_interleave(group), group, **more)}


def unmoved(rewards, group, scale="group", **_):
    return by_statistics(rewards, group, scale)


def in_halves(function, rewards, group, cut, **more):
    return {"advantages": torch.cat([function(part, group, **more) for part in (rewards[:cut], rewards[cut:])])}


def strided():
    made = drawn(4, 3)()
    return made | {"rewards": torch.stack([made["rewards"], made["rewards"] + 7], dim=1)[:, 0]}


def of_leaf(function, rewards, **more):
    leaf = rewards.clone().requires_grad_()
    found = function(leaf, **more)
    return {"advantages": found.detach(), "rewards still ask for gradients": leaf.requires_grad}


def with_leaf(**given):
    return by_statistics(**given) | {"rewards still ask for gradients": True}


def enumerated(function, logits, values, group):
    """Each group of answers that the policy draws, weighted by its probability."""
    leaf = logits.clone().requires_grad_()
    groups = torch.tensor(list(itertools.product(range(len(logits)), repeat=group)))
    logs = leaf.log_softmax(0)[groups]
    advantages = function(values[groups].flatten(), group, "none").view(groups.shape)
    objective = (logs.detach().sum(1).exp() * (advantages * logs).mean(1)).sum()
    [gradient] = torch.autograd.grad(objective, [leaf])
    return {"gradient of the policy's logits": gradient}


def expected_reward(logits, values, group):
    leaf = logits.clone().requires_grad_()
    [gradient] = torch.autograd.grad(torch.dot(leaf.softmax(0), values), [leaf])
    return {"gradient of the policy's logits": gradient * (1 - 1 / group)}


def given_sizes(function):
    """A tensor [answers, answers] would be 120 times as large as the rewards."""
    sizes = {f"{groups} groups": drawn(groups, 5, dtype=torch.float32)() for groups in (24, 72)}
    sizes["groups of 60"] = drawn(2, 60, dtype=torch.float32)()
    return cost(function, 12.0, 24 * 5 * 4, sizes)


case = cases_of(by_statistics, EXACT)


def example(title, given, *advantages, source=ARITHMETIC):
    return Case("worked example", title, given, answer(*advantages), source, rtol=1e-5, atol=1e-6)


def equal(title, given):
    return Case("property", title, given, zeros, CONTRACT, rtol=0.0)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TENTHS = [0.1, 0.1, 0.1, 0.7, 0.7, 0.7, -0.3, -0.3, -0.3]

CHECK = Check(
    exercise="12.group_advantages",
    outputs=("advantages",),
    spoilt=("advantages",),
    cases=[
        case("shape and dtype", "float32 [12], groups of 3", drawn(4, 3, dtype=FP32), source=CONTRACT),
        case("shape and dtype", "float64 [10], groups of 5", drawn(2, 5), source=CONTRACT),
        case("shape and dtype", "bfloat16 [8], groups of 2", drawn(4, 2, dtype=BF16), source=CONTRACT),
        case("shape and dtype", "float16 [3], groups of 1", drawn(3, 1, dtype=FP16), source=CONTRACT),
        example("the contract's", of([1.0, 0.0, 5.0, 5.0], FP32, group=2), 0.7070068, -0.7070068, 0.0, 0.0, source=CONTRACT),
        example("... without a division", of([1.0, 0.0, 5.0, 5.0], FP32, group=2, scale="none"), 0.5, -0.5, 0.0, 0.0, source=CONTRACT),
        example("every digit is another answer; the means are 37 and 4", of([1.0, 10.0, 100.0, 2.0, 4.0, 6.0], group=3, scale="none"),
                -36.0, -27.0, 63.0, -2.0, 0.0, 2.0),
        example("one answer of four is right: mean 1/4, deviation 1/2", of([0.0, 0.0, 1.0, 0.0], group=4),
                -0.49990, -0.49990, 1.49970, -0.49990),
        example("groups of deviation 1 and of 100", of([1.0, 2.0, 3.0, 100.0, 200.0, 300.0], group=3),
                -0.99990, 0.0, 0.99990, -0.999999, 0.0, 0.999999),
        example("... in units of the deviation of all six, 125.55", of([1.0, 2.0, 3.0, 100.0, 200.0, 300.0], group=3, scale="batch"),
                -0.00796525, 0.0, 0.00796525, -0.796525, 0.0, 0.796525),
        case("property", "5 groups of 4", drawn(5, 4)),
        case("property", "5 groups of 4, in units of the deviation of all", drawn(5, 4, scale="BATCH".lower())),
        case("property", "5 groups of 4, without a division", drawn(5, 4, scale="none")),
        case("property", "5 groups of 4, in units of their own deviations", drawn(5, 4, scale="GROUP".lower())),
        case("property", "as many groups as answers in a group", drawn(3, 3)),
        case("property", "one group", drawn(1, 7)),
        case("property", "one group, in units of the deviation of all", drawn(1, 7, scale="batch")),
        case("property", "no answers", drawn(0, 3)),
        case("property", "deviations around 1e-4: what is added to them counts", drawn(4, 3, size=1e-4)),
        case("property", "... in units of the deviation of all", drawn(4, 3, size=1e-4, scale="batch")),
        case("property", "rewards that differ by 1e-10 are different", of([0.5, 0.5000000001, 0.5, 3.0, 1.0, 2.0], group=3)),
        case("property", "... without a division", of([0.5, 0.5, 0.5000000001, 3.0, 1.0, 2.0], group=3, scale="none")),
        case("property", "... in units of the deviation of all", of([0.5000000001, 0.5, 0.5, 3.0, 3.0, 2.0], group=3, scale="batch")),
        case("property", "only the middle answer differs", of([1.0, 1.0, 4.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0], group=5, scale="none")),
        case("property", "rewards of 1 and -1, whose sum is 0", of([1.0, -1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0], group=4)),
        case("property", "... without a division", of([1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0], group=4, scale="none")),
        equal("equal rewards of 0.1, 0.7 and -0.3 in groups of 3: exactly 0", of(TENTHS, group=3)),
        equal("... in float32", of(TENTHS, FP32, group=3)),
        equal("... in float32, in units of the deviation of all", of(TENTHS, FP32, group=3, scale="batch")),
        equal("... in float64, without a division", of(TENTHS, group=3, scale="none")),
        equal("... in bfloat16, without a division", of(TENTHS, BF16, group=3, scale="none")),
        equal("seven equal rewards of 1,234,567.1, in float32", of([1234567.1] * 7, FP32, group=7)),
        equal("rewards of 0 and of -0", of([0.0, -0.0, 0.0, -0.0], FP32, group=2)),
        equal("groups of one answer", of([0.1, 0.0, -2.0], FP32, group=1)),
        equal("groups of one answer, in units of the deviation of all", of([0.1, 0.0, -2.0], group=1, scale="batch")),
        equal("groups of one answer, without a division", of([0.1, 0.0, -2.0], group=1, scale="none")),
        equal("a single answer, in units of the deviation of all", of([0.1], group=1, scale="batch")),
        case("property", "rewards of about a million", drawn(4, 3, around=1e6), tolerance=1e-9),
        case("property", "... in units of the deviation of all", drawn(4, 3, around=1e6, scale="batch"), tolerance=1e-9),
        case("property", "rewards of about a million, whole numbers in float32",
             of([1e6, 1e6 + 2, 1e6 + 4, 5e5, 5e5 + 8, 5e5 - 2], FP32, group=3), tolerance=1e-5),
        case("property", "rewards of the size of a million", drawn(4, 3, size=1e6)),
        case("property", "... without a division", drawn(4, 3, size=1e6, scale="none"), tolerance=1e-9),
        case("property", "rewards of 0 and 1, in units of the deviation of all", of([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0], group=3,
             scale="batch")),
        case("property", "one reward of a million among small ones", of([0.0, 1e6, 1.0, 0.0, 1.0, 0.0, 0.5, 0.25], group=8)),
        case("property", "float32", drawn(9, 8, dtype=FP32), tolerance=1e-5),
        case("property", "float32, in units of the deviation of all", drawn(9, 8, dtype=FP32, scale="batch"), tolerance=1e-5),
        case("property", "bfloat16, computed in float32", drawn(9, 5, dtype=BF16), tolerance=0.0),
        case("property", "float16, computed in float32: a sum of 240,000", of([60000.0, 60000.0, 60000.0, 60032.0], FP16, group=4,
             scale="none"), tolerance=0.0),
        case("property", "float16, in units of the deviation of all", drawn(9, 5, dtype=FP16, scale="batch"), tolerance=0.0),
        case("property", "the answers of a group in another order", drawn(4, 5, order=[3, 0, 4, 1, 2]), unmoved, CONTRACT, turned),
        case("property", "another prompt's rewards are higher as a whole", drawn(4, 3, prompts=[1.0, -20.0, 300.0, 0.0]), unmoved, CONTRACT,
             shifted, 1e-11),
        case("property", "... without a division", drawn(4, 3, prompts=[1.0, -20.0, 300.0, 0.0], scale="none"), unmoved, CONTRACT, shifted,
             1e-11),
        case("property", "rewards that are not contiguous", strided),
        case("property", "rewards that ask for gradients", drawn(4, 3), with_leaf, EXACT, of_leaf),
        case("property", "nothing else is changed", drawn(4, 3), nothing, CONTRACT, left_behind),
        case("property", "a group that does not divide the answers", of([1.0, 2.0, 3.0, 4.0, 5.0], group=2),
             refused, CONTRACT),
        case("property", "more answers in a group than there are", of([1.0, 2.0], group=3), refused, CONTRACT),
        case("property", "a group of 0", of([1.0, 2.0], group=0), refused, CONTRACT),
        case("property", "a group of -2", of([1.0, 2.0], group=-2), refused, CONTRACT),
        case("property", "a scale that is none of the three", of([1.0, 2.0], group=2, scale="groups"), refused, CONTRACT),
        case("property", "... for groups of one answer", of([1.0, 2.0], group=1, scale="std"), refused, CONTRACT),
        case("property", "an empty word for the scale", of([1.0, 2.0], group=2, scale=""), refused, CONTRACT),
        case("property", "no scale", of([1.0, 2.0], group=2, scale=None), refused, CONTRACT),
        case("property", "a scale with a capital", of([1.0, 2.0], group=2, scale="Group"), refused, CONTRACT),
        case("property", "a scale with a space", of([1.0, 2.0], group=2, scale="batch "), refused, CONTRACT),
        case("oracle", "40 groups of 16", drawn(40, 16)),
        case("oracle", "all 27 groups of a policy over 3 answers", lambda: {"logits": randn(3, seed=9), "values": randn(3, seed=8),
             "group": 3}, expected_reward, EXPECTED, enumerated),
        case("two ranks", "groups 0 and 1, and the others", drawn(5, 4, cut=8), lambda cut, **given: by_statistics(**given), CONTRACT,
             in_halves),
        case("budget", "more groups, larger ones, and memory, in tensors like `rewards`", dict, lambda: within(12.0), CONTRACT,
             given_sizes),
    ],
)  # fmt: skip
