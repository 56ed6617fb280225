"""Check of 11.generalized_advantages. Oracles: the definition that the contract's sum follows from, a mean of the advantages that one step,
two steps, ... say (Schulman et al. 2016, equations 11 to 16), answer by answer; numpy.linalg.solve; rewards to go.

Tolerances. float64: 1e-12 of sums of a few dozen numbers around 1. float32: 1e-5, compared with float64 on the same numbers.
"""

import numpy
import torch
from torch import Tensor

from shared.course.checking import Case, Check
from shared.course.counting import Used, cost, within

from .common import ARITHMETIC, CONTRACT, cases_of, randn

STEPS = "Schulman et al. 2016, equations 11 to 16: the mean of the advantages of 1, 2, ... steps, the k-th with weight lam^(k-1)"
SOLVED = "numpy.linalg.solve: each advantage less gamma * lam times the one after it is its delta"
TENSORS = "rewards", "values", "lengths", "last_values"


def of(rewards, values, lengths, last_values, dtype=torch.float64, **more):
    return lambda: {"rewards": torch.tensor(rewards, dtype=dtype), "values": torch.tensor(values, dtype=dtype),
                    "lengths": torch.tensor(lengths), "last_values": torch.tensor(last_values, dtype=dtype)} | more  # fmt: skip


def drawn(lengths, time=None, behind=(7.0, -5.0), ended=2, dtype=torch.float64, seed=1, **more):
    """Random rewards and values; every second answer ended, every other one was cut off; behind the ends stand numbers that are large."""

    def given():
        size = max([*lengths, 0]) if time is None else time
        made = {"rewards": randn(len(lengths), size, seed=seed), "values": randn(len(lengths), size, seed=seed + 1)}
        for number, length in enumerate(lengths):
            made["rewards"][number, length:], made["values"][number, length:] = behind
        last = randn(len(lengths), seed=seed + 2).where(torch.arange(len(lengths)) % ended != 0, 0)
        made = {name: tensor.to(dtype) for name, tensor in (made | {"last_values": last}).items()}
        return made | {"lengths": torch.tensor(lengths, dtype=torch.int64)} | more

    return given


def by_steps(rewards, values, lengths, last_values, gamma=1.0, lam=0.95):
    found = torch.zeros_like(values, dtype=torch.float64)
    for number, length in enumerate(lengths.tolist()):
        r = rewards[number, :length].tolist()
        v = [*values[number, :length].tolist(), last_values[number].item()]
        for t in range(length):
            steps, total = [], 0.0
            for k in range(1, length - t + 1):
                total += gamma ** (k - 1) * r[t + k - 1]
                steps.append(total + gamma**k * v[t + k] - v[t])
            weights = [(1 - lam) * lam**k for k in range(len(steps) - 1)] + [lam ** (len(steps) - 1)]
            found[number, t] = sum(weight * step for weight, step in zip(weights, steps, strict=True))
    return {"advantages": found.to(values.dtype)}


def by_solving(rewards, values, lengths, last_values, gamma=1.0, lam=0.95):
    found = torch.zeros_like(values)
    for number, length in enumerate(lengths.tolist()):
        r, v = rewards[number, :length].numpy(), values[number, :length].numpy()
        delta = r - v + gamma * numpy.append(v, last_values[number].item())[1 : length + 1]
        found[number, :length] = torch.from_numpy(numpy.linalg.solve(numpy.eye(length) - gamma * lam * numpy.eye(length, k=1), delta))
    return {"advantages": found}


def to_go(rewards, values, lengths, last_values, gamma, lam):
    """lam 1: all rewards from a token on, discounted, and the last value, less the token's own value."""
    found = torch.zeros_like(values)
    for number, length in enumerate(lengths.tolist()):
        rest = [*rewards[number, :length].tolist(), last_values[number].item()]
        for t in range(length):
            found[number, t] = numpy.polynomial.Polynomial(rest[t:])(gamma) - values[number, t].item()
    return {"advantages": found}


def one_step(rewards, values, lengths, last_values, gamma, lam):
    """lam 0: the reward and the next value, less the value."""
    found = torch.zeros_like(values)
    for number, length in enumerate(lengths.tolist()):
        following = torch.cat([values[number, 1:length], last_values[number : number + 1]])[:length]
        found[number, :length] = rewards[number, :length] + gamma * following - values[number, :length]
    return {"advantages": found}


def answer(*rows):
    return lambda values, **_: {"advantages": torch.tensor(rows, dtype=values.dtype)}


def of_leaves(function, **given):
    """With rewards, values or last values that ask for gradients, as a value head's output does."""
    found = {}
    for name in ("rewards", "values", "last_values"):
        leaf = given[name].clone().requires_grad_()
        made = function(**given | {name: leaf})
        found |= {f"of {name}": made.detach(), f"a gradient flows to {name}": made.requires_grad}
        found |= {f"{name} still ask for gradients": leaf.requires_grad}
    return found


def without_gradient(**given):
    expected, names = by_steps(**given)["advantages"], ("rewards", "values", "last_values")
    none = {f"a gradient flows to {name}": False for name in names}
    return {f"of {name}": expected for name in names} | none | {f"{name} still ask for gradients": True for name in names}


def broken(function, rewards, **given):
    """A reward that is NaN: the token's own advantage and all before it in its answer are NaN; other answers are as they were."""
    found = function(rewards=rewards.clone(), **given)
    rewards = rewards.clone()
    rewards[1, 2] = torch.nan
    with_nan = function(rewards=rewards, **given)
    others = torch.arange(len(found)) != 1
    return {"NaN up to the reward": with_nan[1, :3].isnan().all().item(), "other answers": with_nan[others] - found[others]}


def seen(lengths, **_):
    return {"NaN up to the reward": True, "other answers": torch.zeros(len(lengths) - 1, 6).double()}


def right_values(**settings):
    """Values that are exactly what comes, discounted: nothing is better or worse than expected."""

    def given():
        made = drawn([5, 3, 6, 1], **settings)()
        for number, length in enumerate(made["lengths"].tolist()):
            following = made["last_values"][number]
            for t in reversed(range(length)):
                following = made["values"][number, t] = made["rewards"][number, t] + settings["gamma"] * following
        return made

    return given


def nothing(values, **_):
    return {"advantages": torch.zeros_like(values)}


def turned(function, order, **given):
    """The answers in another order: the same advantages in that order."""
    moved = {name: value[order] if isinstance(value, Tensor) else value for name, value in given.items()}
    return {"advantages": function(**moved)[torch.tensor(order).argsort()]}


def widened(function, more, **given):
    """More room behind every answer."""
    made = {name: torch.cat([given[name], torch.full((len(given[name]), more), 9.0).double()], 1) for name in ("rewards", "values")}
    return {"advantages": function(**given | made)}


def unmoved(order=None, more=0, **given):
    found = by_steps(**given)["advantages"]
    return {"advantages": torch.cat([found, torch.zeros(len(found), more).double()], dim=1)}


def in_halves(function, cut, **given):
    parts = [{name: value[own] if isinstance(value, Tensor) else value for name, value in given.items()}
             for own in (slice(cut), slice(cut, None))]  # fmt: skip
    return {"advantages": torch.cat([function(**part) for part in parts])}


def whole(cut, **given):
    return by_steps(**given)


def strided():
    made = drawn([5, 3, 6, 0])()
    return {name: value.T.contiguous().T for name, value in made.items() if value.dim() == 2} | {
        name: torch.stack([value, value], dim=1)[:, 0] for name, value in made.items() if value.dim() == 1
    }


def in_float64(**given):
    wide = {name: value.double() if isinstance(value, Tensor) and name != "lengths" else value for name, value in given.items()}
    return {"advantages": by_steps(**wide)["advantages"].to(given["values"].dtype)}


def given_sizes(function):
    """A tensor [answers, time, time] would be 24 times as large as `values`."""
    sizes = {f"{answers} answers": drawn([24, 9, 0, 13, 24] * (answers // 5), dtype=torch.float32)() for answers in (25, 75)}
    found = cost(function, 14.0, 25 * 24 * 4, sizes)
    with Used() as short:
        function(**drawn([8, 5])())
    with Used() as long:
        function(**drawn([24, 5])())
    return found | {"three times as many tokens take": "three times the operations" if long.operations < 5 * short.operations else "more"}


def small():
    return within(14.0) | {"three times as many tokens take": "three times the operations"}


case = cases_of(by_steps, STEPS)


def example(title, given, *rows, source=ARITHMETIC):
    return Case("worked example", title, given, answer(*rows), source, rtol=1e-12, atol=1e-12)


LENGTHS = [5, 3, 6, 0, 1, 6]
NAN, INF = torch.nan, torch.inf
ZEROS = [0.0, 0.0, 0.0]

CHECK = Check(
    exercise="11.generalized_advantages",
    outputs=("advantages",),
    spoilt=("advantages",),
    cases=[
        case("shape and dtype", "float32, 6 answers of up to 6 tokens", drawn(LENGTHS, dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "float64, 2 answers in 7 places", drawn([5, 3], time=7), source=CONTRACT),
        case("shape and dtype", "bfloat16", drawn([5, 3], dtype=torch.bfloat16), source=CONTRACT),
        example("the contract's: deltas 0, 0, 0.5", of([[0.0, 0.0, 1.0, 99.0]], [[0.5, 0.5, 0.5, 99.0]], [3], [0.0], gamma=1.0, lam=0.5),
                [0.125, 0.25, 0.5, 0.0], source=CONTRACT),
        example("gamma 1, lam 1, no values: all rewards to come", of([[1.0, 10.0, 100.0]], [ZEROS], [3], [0.0], gamma=1.0, lam=1.0),
                [111.0, 110.0, 100.0]),
        example("... cut off, before a state that is worth 1000", of([[1.0, 10.0, 100.0]], [ZEROS], [3], [1000.0], gamma=1.0, lam=1.0),
                [1111.0, 1110.0, 1100.0]),
        example("gamma 1, lam 0: r + the next value - the value", of([[1.0, 10.0, 100.0]], [[2.0, 5.0, 7.0]], [3], [1000.0],
                gamma=1.0, lam=0.0), [4.0, 12.0, 1093.0]),
        example("gamma 0.5, lam 1: 1 + 0.5 * 10 + 0.25 * 100, ...", of([[1.0, 10.0, 100.0]], [ZEROS], [3], [0.0], gamma=0.5, lam=1.0),
                [31.0, 60.0, 100.0]),
        example("gamma 0.5, lam 0.5, one reward, at the end: 16 / 16, 16 / 4, 16", of(
            [[0.0, 0.0, 16.0]], [ZEROS], [3], [0.0], gamma=0.5, lam=0.5), [1.0, 4.0, 16.0]),
        example("two answers, of 1 and 2 tokens: what follows an answer is not its own", of(
            [[1.0, 7.0, 7.0], [1.0, 10.0, 7.0]], [[0.0, 7.0, 7.0], [0.0, 0.0, 7.0]], [1, 2], [0.0, 100.0], gamma=1.0, lam=1.0),
            [1.0, 0.0, 0.0], [111.0, 110.0, 0.0]),
        case("property", "answers of 5, 3, 6, 0, 1 and 6 tokens", drawn(LENGTHS, gamma=0.9, lam=0.8)),
        case("property", "gamma and lam are left out: 1 and 0.95", drawn(LENGTHS)),
        case("property", "all answers are as long as there is room", drawn([5, 5, 5, 5], gamma=0.9, lam=0.8)),
        case("property", "room for 4 more tokens than the longest answer has", drawn(LENGTHS, time=10, gamma=0.9, lam=0.8)),
        case("property", "as many answers as places in time", drawn([3, 1, 0, 4], gamma=0.9, lam=0.8)),
        case("property", "one answer of one token", drawn([1], gamma=0.9, lam=0.8)),
        case("property", "answers without tokens", drawn([0, 0], time=3)),
        case("property", "no places in time", drawn([0, 0])),
        case("property", "no answers", lambda: {name: value[:0] for name, value in drawn(LENGTHS)().items()}),
        case("property", "every answer ended: last values of 0", drawn(LENGTHS, ended=1, gamma=0.9, lam=0.8)),
        case("property", "NaN behind the ends, in rewards and in values", drawn(LENGTHS, time=8, behind=(NAN, NAN), gamma=0.9, lam=0.8)),
        case("property", "infinities behind the ends", drawn(LENGTHS, time=8, behind=(INF, -INF), gamma=0.9, lam=0.8)),
        case("property", "numbers behind the ends of which nothing says that they are none", drawn(
            LENGTHS, time=8, behind=(0.0, 0.5), gamma=0.9, lam=0.8)),
        case("property", "lam 1, gamma 0.9: rewards to go", drawn(LENGTHS, gamma=0.9, lam=1.0), to_go,
             "numpy.polynomial: the rewards are its coefficients, gamma its argument"),
        case("property", "lam 0, gamma 0.9: one step", drawn(LENGTHS, gamma=0.9, lam=0.0), one_step, CONTRACT),
        case("property", "gamma 0: only the reward and the value", drawn(LENGTHS, gamma=0.0, lam=0.8)),
        case("property", "gamma and lam are 1", drawn(LENGTHS, gamma=1.0, lam=1.0)),
        case("property", "values that are right: nothing is better than expected", right_values(gamma=0.9, lam=0.8), nothing, CONTRACT),
        case("property", "rewards and values that ask for gradients", drawn(LENGTHS, gamma=0.9, lam=0.8), without_gradient,
             observe=of_leaves),
        case("property", "a reward that is NaN is seen, in its answer alone", drawn([5, 4, 6], gamma=0.9, lam=0.8), seen, CONTRACT, broken),
        case("property", "answers in another order", lambda: drawn(LENGTHS, gamma=0.9, lam=0.8)() | {"order": [4, 2, 0, 5, 3, 1]}, unmoved,
             CONTRACT, turned),
        case("property", "more room behind every answer", lambda: drawn(LENGTHS, gamma=0.9, lam=0.8)() | {"more": 3}, unmoved, CONTRACT,
             widened),
        case("property", "tensors that are not contiguous", strided),
        case("property", "rewards of thousands", lambda: drawn(LENGTHS, gamma=0.9, lam=0.8)() | {"rewards": 3000 * randn(6, 6, seed=8)},
             tolerance=1e-9),
        case("oracle", "200 tokens, gamma 0.1 and lam 0.1: powers that are 0 to the computer", drawn([200, 190], gamma=0.1, lam=0.1),
             by_solving, SOLVED),
        case("oracle", "answers of up to 97 tokens", drawn([97, 50, 3, 96], gamma=0.99, lam=0.95), by_solving, SOLVED, tolerance=1e-11),
        case("oracle", "answers of up to 31 tokens in float32", drawn([31, 17, 30], dtype=torch.float32, gamma=0.99), in_float64,
             tolerance=1e-5),
        case("two ranks", "answers 0 to 3, and the others", lambda: drawn(LENGTHS, gamma=0.9, lam=0.8)() | {"cut": 4}, whole, CONTRACT,
             in_halves),
        case("budget", "more answers, longer ones, and memory, in tensors like `values`", dict, small, CONTRACT, given_sizes),
    ],
)  # fmt: skip
