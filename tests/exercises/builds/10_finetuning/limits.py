"""Stages 10 and 11 of build 10: a weight that exists as codes, and budgets of numbers, bytes and multiplications."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shared.course.checking import Case

from .pieces import (
    EXACT,
    NEAR,
    TEXT,
    WITHIN,
    Config,
    Net,
    Results,
    Twice,
    Watch,
    answer,
    as_it_was,
    budget,
    config_of,
    made,
    randn,
    state_of,
)
from .training import squared_error

PLAIN = "a plain linear layer with the dequantised weight, in float64"

# Stage 10: four_bits


class Codes:
    """A weight as codes. made: how often it was dequantised; most: the most of these tensors that were there at a time."""

    def __init__(self, weight: Tensor, others: list["Codes"] | None = None):
        self.codes, self.scale = torch.round(weight.double() * 16).to(torch.int16), 1 / 16
        self.dtype, self.made, self.most = weight.dtype, 0, 0
        self.storages: list[StorageWeakRef] = []
        self.others = others if others is not None else []
        self.others.append(self)

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)

    def dequantize(self) -> Tensor:
        weight = (self.codes * self.scale).to(self.dtype)
        self.made += 1
        self.storages.append(StorageWeakRef(weight.untyped_storage()))
        self.others[0].most = max(self.others[0].most, sum(codes.alive() for codes in self.others))
        return weight


def factors_of(in_features: int, out_features: int, r: int, seed: int) -> dict[str, Tensor]:
    return {"A": randn(r, in_features, seed=seed).requires_grad_(), "B": randn(out_features, r, seed=seed + 1).requires_grad_()}


def frozen_case(title: str, shape: tuple[int, ...], leaf: bool = True) -> Case:
    inputs = lambda: {"x": randn(*shape, 5, seed=2).requires_grad_(leaf)}  # noqa: E731

    def expected(**_: Any) -> Results:
        x, held, weight = inputs(), factors_of(5, 7, 2, 3), Codes(randn(7, 5, seed=1)).dequantize()
        dense = weight + 0.75 * torch.einsum("or,ri->oi", held["B"], held["A"])
        return answer(torch.einsum("...i,oi->...o", x["x"], dense), x, held)

    def observe(adapters: Any, **_: Any) -> Results:
        x, held, codes = inputs(), factors_of(5, 7, 2, 3), Codes(randn(7, 5, seed=1))
        return answer(adapters.frozen_linear(x["x"], codes.dequantize, held["A"], held["B"], 0.75), x, held)

    given = {"x": [*shape, 5], "W": [7, 5], "r": 2, "scaling": 0.75, "x requires a gradient": leaf}
    return Case("oracle", title, lambda: given, expected, PLAIN, observe, **NEAR)


def half_case() -> Case:
    """By numbers that are exact: the difference of A's two columns is lost in bfloat16."""
    A, B = torch.tensor([[1 + 2.0**-12, -1.0]]), torch.tensor([[1.0], [3.0]])
    x, weight = torch.tensor([[4096.0, 4096.0]]).bfloat16(), torch.tensor([[1.0, -1.0], [-2.0, 2.0]]).bfloat16()

    def observe(adapters: Any, **_: Any) -> Results:
        leaf, held = x.clone().requires_grad_(), {"A": A.clone().requires_grad_(), "B": B.clone().requires_grad_()}
        y = adapters.frozen_linear(leaf, Codes(weight).dequantize, held["A"], held["B"], 2.0)
        found = torch.autograd.grad(y, [held["B"], leaf], torch.tensor([[1.0, -2.0]]).bfloat16())
        return {"y": y.detach(), "gradient of B": found[0], "dtype of x's gradient": str(found[1].dtype)}

    def expected(**_: Any) -> Results:
        found: Results = {"y": torch.tensor([[2.0, 6.0]]).bfloat16(), "gradient of B": torch.tensor([[2.0], [-4.0]])}
        return found | {"dtype of x's gradient": "torch.bfloat16"}

    given = {"dtype of x and W": "bfloat16", "W": weight, "x": x, "A": A, "B": B, "scaling": 2.0}
    return Case("property", "x in bfloat16, factors in float32", lambda: given, expected, TEXT.format(10), observe, **EXACT)


def kept_case() -> Case:
    """Three layers, one after the other."""
    names = ["made in the forward pass", "made in the backward pass", "kept between", "there at a time", "kept afterwards"]

    def observe(adapters: Any, **_: Any) -> Results:
        every: list[Codes] = []
        layers = [(Codes(randn(6, 6, seed=number), every), factors_of(6, 6, 2, 10 * number)) for number in range(3)]
        x = y = randn(4, 6).requires_grad_()
        for codes, held in layers:
            y = torch.tanh(adapters.frozen_linear(y, codes.dequantize, held["A"], held["B"], 0.5))
        forward, between = sum(codes.made for codes in every), sum(codes.alive() for codes in every)
        torch.autograd.grad(y, [x, *(each for _, held in layers for each in held.values())], torch.ones_like(y))
        counts = forward, sum(codes.made for codes in every) - forward, between, every[0].most, sum(codes.alive() for codes in every)
        return {f"weights {name}": budget(count, most, "") for name, count, most in zip(names, counts, (3, 3, 0, 1, 0), strict=True)}

    expected = lambda **_: {f"weights {name}": WITHIN for name in names}  # noqa: E731
    return Case("budget", "when a weight exists", lambda: {"layers": 3}, expected, TEXT.format(10), observe)


def first_layer_case() -> Case:
    about = "weights made in the backward pass"

    def observe(adapters: Any, **_: Any) -> Results:
        codes, held = Codes(randn(6, 6)), factors_of(6, 6, 2, 10)
        y = adapters.frozen_linear(randn(4, 6), codes.dequantize, held["A"], held["B"], 0.5)
        forward = codes.made
        y.backward(torch.ones_like(y))
        return {about: budget(codes.made - forward, 0, "")}

    given = {"x requires a gradient": False}
    return Case("budget", "a first layer", lambda: given, lambda **_: {about: WITHIN}, TEXT.format(10), observe)


FOUR_BITS = (
    frozen_case("one call", (3,)),
    frozen_case("rows of tokens", (2, 3)),
    frozen_case("x without a gradient", (3,), leaf=False),
    half_case(),
    kept_case(),
    first_layer_case(),
)

# Stage 11: budgets


def big() -> nn.Module:
    """69 billion numbers, none of which exists."""
    with torch.device("meta"):
        blocks = [nn.ModuleDict({"up": nn.Linear(65536, 262144), "down": nn.Linear(262144, 65536)}) for _ in range(2)]
        return nn.ModuleList(blocks)


def count_case(title: str, kind: Callable[[], nn.Module], config: Config, count: int) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        model = made(kind) if kind is not big else big()
        before = {} if kind is big else state_of(model)
        found = {"numbers that would be trained": int(adapters.count_trained(model, dict(config)))}
        return found if kind is big else found | {"the model": as_it_was(model, before)}

    expected = lambda **_: {"numbers that would be trained": count} | ({} if kind is big else {"the model": "as it was"})  # noqa: E731
    return Case("worked example", title, lambda: {"model": kind.__name__, **config}, expected, TEXT.format(11), observe)


WIDTH, DEPTH, TOKENS, RANK = 64, 3, 8, 2


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def step_case() -> Case:
    """In each layer two products with W (forward, and x's gradient, which the first layer lacks), and three with each factor."""
    products = TOKENS * WIDTH * WIDTH * (2 * DEPTH - 1) + 6 * TOKENS * WIDTH * RANK * DEPTH
    numbers = 2 * WIDTH * RANK * DEPTH
    names = "multiplications of a step", "bytes left after a step", "numbers of the largest tensor that was made"

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(deep), "default", config_of(r".*", r=RANK), 0)
        optimizer = torch.optim.AdamW(list(dict(adapters.factors(adapted, "default")).values()), lr=0.01)
        x, targets = randn(TOKENS, WIDTH), randn(TOKENS, WIDTH, seed=1)
        with Watch() as watch:
            adapters.step(adapted, optimizer, [(x, targets)], squared_error)
        counts = watch.multiplications, watch.alive(), watch.largest
        limits = (products, 3 * numbers * 8 + 512, WIDTH * WIDTH - 1)  # a gradient and AdamW's two averages, and its counters
        units = "multiplications", "bytes", "numbers"
        return {name: budget(*given) for name, given in zip(names, zip(counts, limits, units, strict=True), strict=True)}

    given = {"layers": DEPTH, "in and out": WIDTH, "tokens": TOKENS, "r": RANK, "numbers that are trained": numbers, "optimizer": "AdamW"}
    return Case("budget", "a step", lambda: given, lambda **_: dict.fromkeys(names, WITHIN), TEXT.format(11), observe)


def saved_case() -> Case:
    """Of a layer that sees x: y, the narrow x A^T, and at most the addition before it is multiplied by s."""
    about, tokens = "bytes kept for the backward pass, y included", 40

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(deep)[:1], "default", config_of(["0"], r=RANK), 0)
        x = randn(tokens, WIDTH).requires_grad_()
        with Watch() as watch:
            y = adapters.run(adapted, x)
        return {about: budget(watch.alive(), y.nbytes + 2 * tokens * RANK * 8, "bytes")}

    given = {"tokens": tokens, "in and out": WIDTH, "r": RANK}
    return Case("budget", "what a call keeps", lambda: given, lambda **_: {about: WITHIN}, TEXT.format(11), observe)


def waiting_case() -> Case:
    """The multiplications of a call do not grow with the adapters that wait."""
    about = "multiplications of a call with two adapters that wait"

    def observe(adapters: Any, **_: Any) -> Results:
        x = randn(TOKENS, WIDTH)
        adapted, counts = adapters.attach(made(deep), "default", config_of(r".*", r=RANK), 0), []
        for _ in range(2):
            with torch.no_grad(), Watch() as watch:
                adapters.run(adapted, x)
            counts.append(watch.multiplications)
            if len(counts) == 1:
                adapters.add(adapted, "other", config_of(["0"], r=5), 1)
                adapters.add(adapted, "third", config_of(["1"], r=5), 1)
        return {about: budget(counts[1], counts[0], "multiplications")}

    return Case("budget", "adapters that wait", lambda: {"tokens": TOKENS}, lambda **_: {about: WITHIN}, TEXT.format(11), observe)


BUDGETS = (
    count_case("one layer", Net, config_of(["head"], r=3), 3 * (6 + 4)),
    count_case("several", Net, config_of(["q_proj", "out.proj"], r=2), 2 * (6 + 7 + 7 + 6 + 6 + 8 + 8 + 6)),
    count_case("a block at two places", Twice, config_of(r".*q_proj", r=2), 2 * (5 + 7 + 5 + 7)),
    count_case("69 billion numbers on the device meta", big, config_of(r".*", r=16), 4 * 16 * (65536 + 262144)),
    step_case(),
    saved_case(),
    waiting_case(),
)
