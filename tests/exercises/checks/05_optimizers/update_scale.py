"""Check of 05.update_scale. Oracle: torch.amp.GradScaler on the CPU, led through steps whose gradients overflow or do not.

Scales are powers of two times a few digits, so results are exact: 1e-12.
"""

import torch

from shared.course.checking import Case, Check
from shared.optim.loss_scale import LossScale

CONTRACT = "the contract"
ORACLE = 'torch.amp.GradScaler("cpu")'


def given(scale: float, good_steps: int, finite: bool, **more):
    return lambda: {"state": LossScale(scale, good_steps), "finite": finite} | more


def answer(scale: float, good_steps: int):
    return lambda **_: {"state": LossScale(scale, good_steps)}


def run(steps: str, scale: float = 2.0**10, **settings):
    """A run of good (.) and overflowing (x) steps."""
    return lambda: {"steps": steps, "scale": scale} | settings


def following(function, steps, scale, **settings):
    state, scales, counts = LossScale(scale, 0), [], []
    for step in steps:
        state = function(state, step == ".", **settings)
        scales.append(float(state.scale))
        counts.append(state.good_steps)
    return {"scales": torch.tensor(scales, dtype=torch.float64), "good steps": torch.tensor(counts)}


def by_torch(steps, scale, growth=2.0, backoff=0.5, interval=2000):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales, counts = [], []
    for step in steps:
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.full((1,), 1.0 if step == "." else float("inf"))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        counts.append(scaler._get_growth_tracker())
    return {"scales": torch.tensor(scales, dtype=torch.float64), "good steps": torch.tensor(counts)}


def example(rung: str, title: str, make, expected, source: str) -> Case:
    return Case(rung, title, make, expected, source, rtol=1e-12)


def oracle(title: str, make) -> Case:
    return Case("oracle", title, make, by_torch, ORACLE, following, rtol=1e-12)


CHECK = Check(
    exercise="05.update_scale",
    outputs=("state",),
    spoilt=("state.scale", "state.good_steps"),
    cases=[
        example("worked example", "a good step, far from the interval", given(8.0, 3, True), answer(8.0, 4), "arithmetic: 3 + 1"),
        example(
            "worked example", "an overflow: half the scale, and the count begins anew", given(8.0, 3, False), answer(4.0, 0),
            "arithmetic: 8 * 0.5",
        ),
        example(
            "worked example", "the second of two good steps doubles it", given(8.0, 1, True, interval=2), answer(16.0, 0),
            "arithmetic: 8 * 2",
        ),
        example("worked example", "the first of two does not", given(8.0, 0, True, interval=2), answer(8.0, 1), CONTRACT),
        example(
            "worked example", "other factors", given(8.0, 4, True, growth=1.5, interval=5), answer(12.0, 0), "arithmetic: 8 * 1.5",
        ),
        example("property", "step 2,000 by default", given(1024.0, 1999, True), answer(2048.0, 0), CONTRACT),
        example(
            "property", "an overflow in the step that would have doubled it", given(8.0, 1, False, interval=2, backoff=0.25),
            answer(2.0, 0), "arithmetic: 8 * 0.25",
        ),
        example("property", "an overflow at a scale of 1", given(1.0, 0, False), answer(0.5, 0), "arithmetic: 1 * 0.5"),
        example(
            "property", "growth far above the largest number of float16", given(2.0**60, 1, True, interval=2), answer(2.0**61, 0),
            "arithmetic: 2^60 * 2",
        ),
        example(
            "property", "a count far above the interval, of a run that is resumed with a shorter one", given(8.0, 7, True, interval=3),
            answer(16.0, 0), CONTRACT,
        ),
        example("property", "an overflow at a scale of 2^-20", given(2.0**-20, 0, False), answer(2.0**-21, 0), "arithmetic: 2^-20 * 0.5"),
        example(
            "property", "a scale that is no whole number", given(3.0, 1, True, growth=1.5, interval=2), answer(4.5, 0),
            "arithmetic: 3 * 1.5",
        ),
        oracle("good steps only", run(".......", interval=3)),
        oracle("overflows only", run("xxxxx")),
        oracle("an overflow in between", run("..x...x.x....", interval=3)),
        oracle("other factors, an interval of 1", run("..x.xx..", growth=4.0, backoff=0.125, interval=1)),
    ],
)  # fmt: skip
