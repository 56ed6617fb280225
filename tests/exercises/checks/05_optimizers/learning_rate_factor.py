"""Check of 05.learning_rate_factor. Oracle: PyTorch's LinearLR and CosineAnnealingLR, stepped one by one; for wsd, arithmetic in LambdaLR.

The oracle's step 0 comes before our step 1, and its run is one step longer than ours, since our decay ends in the step after the last.
Tolerances. A handful of float64 operations: 1e-12. PyTorch multiplies its rates step by step, which gathers rounding: 1e-10.
"""

import torch

from shared.course.checking import Case, Check

CONTRACT = "the contract"
ORACLE = "torch.optim.lr_scheduler"
SETTINGS = {"warmup_steps": 0, "steps": 10, "decay_steps": 0, "minimum": 0.0}


def every_step(function, last: int, **settings):
    factors = [function(step=step, **settings) for step in range(1, last + 1)]
    return {"factors of the steps": torch.tensor(factors, dtype=torch.float64)}


def of(name: str, last: int, **changes):
    return lambda: SETTINGS | {"name": name, "last": last} | changes


def one(name: str, step: int, **changes):
    return lambda: SETTINGS | {"name": name, "step": step} | changes


def factor(value: float):
    return lambda **_: {"factor": value}


def factors(*values: float):
    return lambda **_: {"factors of the steps": torch.tensor(values, dtype=torch.float64)}


def by_torch(last, name, warmup_steps, steps, decay_steps, minimum):
    """PyTorch's own schedulers in sequence: a ramp up, a constant, a ramp down that starts at its index 0 with factor 1."""
    from torch.optim import lr_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    falling = {"constant": 0, "wsd": decay_steps}.get(name, steps - warmup_steps)
    rates, rate = {}, lambda: optimizer.param_groups[0]["lr"]
    if warmup_steps:
        ramp = lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup_steps, total_iters=warmup_steps - 1)
        for step in range(1, warmup_steps + 1):
            rates[step] = rate()
            optimizer.step(), ramp.step()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    start = steps - falling
    for step in range(warmup_steps + 1, last + 1 if name == "constant" else start + 1):
        rates[step] = 1.0
    if name != "constant":
        kinds = {
            "linear": lambda: lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=max(minimum, 1e-300), total_iters=falling + 1),
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, T_max=falling + 1, eta_min=minimum),
            "wsd": lambda: lr_scheduler.LambdaLR(optimizer, lambda i: 1 - (1 - minimum) * (min(i, falling + 1) / (falling + 1)) ** 0.5),
        }
        decay = kinds[name]()
        for step in range(start, steps + 2):
            rates.setdefault(step, rate())
            optimizer.step(), decay.step()
    return factors(*(rates.get(step, minimum) for step in range(1, last + 1)))()


def example(rung: str, title: str, given, value: float, source: str) -> Case:
    return Case(rung, title, given, factor(value), source, rtol=1e-12, atol=1e-15)


def curve(rung: str, title: str, given, expected, source: str, rtol: float = 1e-12) -> Case:
    return Case(rung, title, given, expected, source, every_step, rtol=rtol, atol=1e-12)


CHECK = Check(
    exercise="05.learning_rate_factor",
    outputs=("factor",),
    spoilt=("factor",),
    cases=[
        example("worked example", "the first of four steps of warm-up", one("constant", 1, warmup_steps=4), 0.25, "arithmetic: 1 / 4"),
        example("worked example", "the last of them is the peak", one("constant", 4, warmup_steps=4), 1.0, "arithmetic: 4 / 4"),
        example("worked example", "linear, a run of 4 steps: its second", one("linear", 2, steps=4), 0.6, "arithmetic: 1 - 2 / 5"),
        example(
            "worked example", "linear after a warm-up of 2, a run of 5 steps: step 4", one("linear", 4, warmup_steps=2, steps=5), 0.5,
            "arithmetic: 1 - 2 / 4",
        ),
        example(
            "worked example", "cosine, a run of 5 steps: half way", one("cosine", 3, steps=5), 0.5, "arithmetic: (1 + cos(pi / 2)) / 2",
        ),
        example(
            "worked example", "cosine with a minimum of 0.2, half way", one("cosine", 3, steps=5, minimum=0.2), 0.6,
            "arithmetic: 0.2 + 0.8 * 0.5",
        ),
        example(
            "worked example", "wsd before its decay of 3 steps", one("wsd", 7, decay_steps=3), 1.0,
            "the contract: 1 until the last 3 of 10 steps",
        ),
        example("worked example", "wsd, the first of them", one("wsd", 8, decay_steps=3), 0.5, "arithmetic: 1 - sqrt(1 / 4)"),
        curve(
            "property", "constant stays at 1 behind the run's end", of("constant", 13, warmup_steps=2), factors(0.5, *[1.0] * 12), CONTRACT,
        ),
        curve(
            "property", "linear stays at the minimum behind the end", of("linear", 6, steps=3, minimum=0.1),
            factors(0.775, 0.55, 0.325, 0.1, 0.1, 0.1), CONTRACT,
        ),
        curve(
            "property", "cosine does not rise again behind the end", of("cosine", 6, steps=1), factors(0.5, 0.0, 0.0, 0.0, 0.0, 0.0),
            CONTRACT,
        ),
        curve(
            "property", "wsd stays at the minimum behind the end", of("wsd", 6, steps=3, decay_steps=0, minimum=0.25),
            factors(1.0, 1.0, 1.0, 0.25, 0.25, 0.25), CONTRACT,
        ),
        curve(
            "property", "constant with a minimum of 0.5: neither its warm-up nor its end reads it",
            of("constant", 6, warmup_steps=4, steps=5, minimum=0.5), factors(0.25, 0.5, 0.75, 1.0, 1.0, 1.0), CONTRACT,
        ),
        curve(
            "property", "linear with a minimum of 0.5, which the warm-up does not read: it covers the whole run",
            of("linear", 6, warmup_steps=4, steps=4, minimum=0.5), factors(0.25, 0.5, 0.75, 1.0, 0.5, 0.5), CONTRACT,
        ),
        curve(
            "property", "linear with `decay_steps`, which it does not read", of("linear", 5, steps=4, decay_steps=2),
            factors(0.8, 0.6, 0.4, 0.2, 0.0), CONTRACT,
        ),
        curve(
            "property", "cosine with `decay_steps`, which it does not read", of("cosine", 6, steps=5, decay_steps=2),
            lambda **_: by_torch(6, "cosine", 0, 5, 0, 0.0), ORACLE, rtol=1e-10,
        ),
        curve(
            "property", "wsd whose decay follows the warm-up at once", of("wsd", 6, warmup_steps=2, steps=5, decay_steps=3),
            factors(0.5, 1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0.0), CONTRACT,
        ),
        curve("oracle", "constant", of("constant", 9, warmup_steps=3), by_torch, ORACLE, rtol=1e-10),
        curve("oracle", "linear", of("linear", 13, warmup_steps=3, minimum=0.1), by_torch, ORACLE, rtol=1e-10),
        curve("oracle", "cosine", of("cosine", 23, steps=20, warmup_steps=5, minimum=0.1), by_torch, ORACLE, rtol=1e-10),
        curve("oracle", "cosine without warm-up, down to 0", of("cosine", 13), by_torch, ORACLE, rtol=1e-10),
        curve("oracle", "wsd", of("wsd", 23, steps=20, warmup_steps=3, decay_steps=7, minimum=0.1), by_torch, ORACLE, rtol=1e-10),
    ],
)  # fmt: skip
