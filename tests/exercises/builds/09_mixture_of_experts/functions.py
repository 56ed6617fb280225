"""Stages 1 to 3 and 5 of build 09: routing, dispatch, the experts' products and the losses, as functions of tensors in one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case

from .pieces import (
    EXPERTS,
    NEAR,
    ONE_PROCESS,
    TEXT,
    WIDTH,
    Results,
    best,
    by_one_expert,
    gradients_by,
    losses_by_hand,
    plain,
    probabilities_of,
    randn,
    steps_case,
    weights_of,
)
from .watching import WITHIN, Watch, budget

HALF = {"rtol": 1e-5, "atol": 1e-6}  # float32 rounds by 6e-8; numbers of 16 bits would differ by 4e-3
Call = Callable[[Any, dict[str, Any]], Results]


def function_case(
    rung: str, title: str, given: dict[str, Any], call: Call, expected: Call, source: str = ONE_PROCESS, **near: float
) -> Case:
    """call(adapters, given) beside expected(None, given)."""
    return Case(
        rung, title, lambda: given, lambda **_: expected(None, given), source, lambda adapters, **_: call(adapters, given), **near or NEAR
    )


# Stage 1: route.


def route_case(title: str, x: Tensor, weight: Tensor, k: int, renormalize: bool, bias: list[float] | None = None, **how: Any) -> Case:
    """how: gradients (those of x and weight, through the weights), autocast, near (tolerances), rung."""
    given = {"x": x, "router.weight": weight, "k": k, "renormalize": renormalize}
    given["router.bias"] = torch.zeros(len(weight)).double() if bias is None else torch.tensor(bias).double()
    given |= {"autocast": "bfloat16"} if how.get("autocast") else {}
    wanted = torch.promote_types(x.dtype, torch.float32)

    def results(weights: Tensor, experts: Tensor, inputs: dict[str, Tensor]) -> Results:
        found = {"weights": plain(weights), "experts": plain(experts)}
        if how.get("gradients"):
            found |= gradients_by([weights], [randn(*weights.shape, seed=9)], inputs)
        return found

    def leaves(dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {name: given[name].detach().clone().to(dtype or given[name].dtype).requires_grad_() for name in ("x", "router.weight")}

    def call(adapters: Any, _: dict) -> Results:
        inputs = leaves()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(how.get("autocast"))):
            weights, experts = adapters.route(*inputs.values(), given["router.bias"].to(wanted), k, renormalize)
        return results(weights, experts, inputs)

    def expected(*_: Any) -> Results:
        inputs = leaves(torch.float64)
        probabilities = probabilities_of(*inputs.values())[1]
        experts = best(probabilities, given["router.bias"], k)
        weights = probabilities.gather(-1, experts)
        weights = weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights
        return results(weights.to(wanted), experts, inputs)

    return function_case(how.get("rung", "oracle"), title, given, call, expected, **how.get("near", {}))


EXAMPLE = torch.tensor([[0.2, 0.1], [0.5, 0.3], [0.3, 0.6]]).double().log()  # probabilities of tokens [1, 0] and [0, 1]
EQUAL = torch.tensor([[1.0, 0.0], [2.0, -1.0], [1.0, 0.0], [2.0, -1.0], [2.0, -1.0], [0.0, 0.0]]).double()
CLOSE = randn(6, 16, seed=3)
ROUTE = (
    route_case("two tokens, three experts", torch.eye(2).double(), EXAMPLE, 2, False, rung="worked example"),
    route_case("weights that add up to 1", torch.eye(2).double(), EXAMPLE, 2, True, rung="worked example"),
    route_case("of equals, the lower number first", torch.tensor([[3.0, 1.0], [0.0, 2.0], [0.0, 0.0]]).double(), EQUAL, 2, False),
    route_case("all experts equal", torch.zeros(3, WIDTH).double(), torch.zeros(70, WIDTH).double(), 4, True),
    route_case("all experts equal, in float32", torch.zeros(2, WIDTH), torch.zeros(70, WIDTH), 4, False, near=HALF),
    *(route_case(f"{k} of 6 experts", randn(9, WIDTH), randn(6, WIDTH, seed=1), k, renormalize)
      for k, renormalize in ((1, False), (3, True), (6, False))),  # fmt: skip
    route_case("the bias moves the choice and not the weights", torch.eye(2).double(), EXAMPLE, 2, False, [0.35, 0.0, 0.0]),
    route_case("the bias, and weights that add up to 1", randn(9, WIDTH), randn(4, WIDTH, seed=1), 2, True, [0.3, -0.3, 0.2, 0.0]),
    *(route_case(f"gradients, renormalize: {way}", randn(7, WIDTH), randn(4, WIDTH, seed=1), 2, way, [0.2, 0.0, 0.0, -0.2], gradients=True)
      for way in (False, True)),  # fmt: skip
    route_case("tokens and weights in bfloat16", randn(40, 16).bfloat16(), CLOSE.bfloat16(), 2, True, near=HALF),
    route_case("under autocast", randn(40, 16).float(), CLOSE.float(), 2, False, near=HALF, autocast=True),
    route_case("no tokens", randn(0, WIDTH), randn(4, WIDTH), 2, True),
)

# Stage 2: dispatch.


def dispatch_case(rung: str, title: str, x: Tensor, experts: Tensor, num_experts: int) -> Case:
    given = {"x": x, "experts": experts, "num_experts": num_experts}

    def results(x: Tensor, rows: Tensor, counts: Tensor) -> Results:
        found = {"rows": plain(rows), "counts": plain(counts)}
        if x.dtype == torch.float64:
            found |= gradients_by([rows], [randn(*rows.shape, seed=9)], {"x": x})
        return found

    def call(adapters: Any, _: dict) -> Results:
        leaf = x.detach().clone().requires_grad_()
        return results(leaf, *adapters.dispatch(leaf, experts.clone(), num_experts))

    def expected(*_: Any) -> Results:
        leaf, places = x.detach().clone().requires_grad_(), [[] for _ in range(num_experts)]
        for token, chosen in enumerate(experts.tolist()):
            for expert in chosen:
                places[expert].append(token)
        return results(leaf, leaf[[token for own in places for token in own]], torch.tensor([len(own) for own in places]))

    return function_case(rung, title, given, call, expected, "a list for each expert, filled token by token")


def choices(tokens: int, experts: int, k: int, seed: int = 0) -> Tensor:
    """Any k experts for each token, in any order."""
    return torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(seed + token))[:k] for token in range(tokens)])


MANY = choices(24, 5, 2)
DISPATCH = (
    dispatch_case("worked example", "three tokens, two choices each", torch.tensor([[10.0], [20.0], [30.0]]).double(),
                  torch.tensor([[2, 0], [0, 1], [2, 1]]), 3),
    dispatch_case("oracle", "one choice", randn(9, WIDTH), choices(9, 4, 1), 4),
    dispatch_case("oracle", "experts that nobody chooses", randn(6, WIDTH), choices(6, 3, 2) + 2, 7),
    dispatch_case("oracle", "every expert is chosen by every token", randn(5, WIDTH), choices(5, 3, 3), 3),
    dispatch_case("oracle", "many tokens", randn(300, 2), choices(300, 5, 2), 5),
    dispatch_case("oracle", "tokens in bfloat16", randn(6, WIDTH).bfloat16(), choices(6, 4, 2), 4),
    dispatch_case("oracle", "no tokens", randn(0, WIDTH), torch.zeros(0, 2).long(), 4),
    steps_case("budget", 2, lambda adapters, tokens: lambda: adapters.dispatch(randn(tokens, 2), MANY.repeat(tokens // 24, 1), 5)),
)  # fmt: skip

# Stage 3: experts.


def experts_case(title: str, way: str, counts: list[int], width: int = WIDTH, inner: int = 7) -> Case:
    dtype = torch.float32 if way == "grouped" else torch.float64
    weights = {name: weight.to(dtype) for name, weight in weights_of(len(counts), width, inner).items() if name in EXPERTS}
    given = {"rows": randn(sum(counts), width, seed=5).to(dtype), "counts": torch.tensor(counts)} | weights | {"way": way}

    def results(rows: Tensor, made: Tensor, inputs: dict[str, Tensor]) -> Results:
        return {"what experts make": plain(made)} | gradients_by([made], [randn(*made.shape, seed=9).to(made)], {"rows": rows} | inputs)

    def leaves() -> tuple[Tensor, dict[str, Tensor]]:
        return given["rows"].clone().requires_grad_(), {name: weight.clone().requires_grad_() for name, weight in weights.items()}

    def call(adapters: Any, _: dict) -> Results:
        rows, inputs = leaves()
        return results(rows, adapters.run_experts(rows, given["counts"].clone(), *inputs.values(), way), inputs)

    def expected(*_: Any) -> Results:
        rows, inputs = leaves()
        expert = [number for number, count in enumerate(counts) for _ in range(count)]
        every = [by_one_expert(row, inputs, number) for row, number in zip(rows, expert, strict=True)]
        made = torch.stack(every) if every else sum(weight.sum() * 0 for weight in inputs.values()) + rows * 0
        return results(rows, made, inputs)

    near = {"rtol": 1e-4, "atol": 1e-5} if way == "grouped" else NEAR  # sums of a few float32 numbers
    return function_case("oracle", title, given, call, expected, "each row by itself, through its expert", **near)


def products_case(way: str, most: dict[str, int]) -> Case:
    """A forward pass: how many products of which kind, and that they are of no more rows than there are."""
    counts, width, inner = [5, 0, 4, 3], 8, 12
    dtype = torch.float32 if way == "grouped" else torch.float64
    weights = [weight.to(dtype) for name, weight in weights_of(4, width, inner).items() if name in EXPERTS]
    kind, limit = next(iter(most.items()))
    rows = 4 * max(counts) if way == "batched" else sum(counts)
    names = of, *_ = f"products by {kind}", "products in all", "multiplications of numbers", "numbers in the largest tensor"

    def observe(adapters: Any, **_: Any) -> Results:
        with Watch() as watch, torch.no_grad():
            adapters.run_experts(randn(sum(counts), width).to(dtype), torch.tensor(counts), *weights, way)
        used = watch.products[kind]
        said = (
            WITHIN if way == "loop" or used == limit else f"{used}, and there should be {limit}",
            budget(watch.products.total(), limit, "products"),
            budget(watch.multiplications, 3 * rows * width * inner, "multiplications"),
            budget(watch.largest, rows * inner, "numbers"),
        )
        return dict(zip(names, said, strict=True))

    given = {"counts": counts, "D": width, "I": inner, "way": way}
    return Case("budget", f"products, {way}", lambda: given, lambda **_: dict.fromkeys(names, WITHIN), TEXT.format(3), observe)


COUNTS = ([2, 3, 1], [3, 0, 4, 0], [0, 0, 5])
RUN_EXPERTS = (
    *(experts_case(f"{way}, rows of the experts: {counts}", way, counts) for way in ("loop", "batched") for counts in COUNTS),
    *(experts_case(f"grouped, rows of the experts: {counts}", "grouped", counts, 8, 12) for counts in COUNTS),
    *(experts_case(f"{way}, no rows at all", way, [0, 0]) for way in ("loop", "batched")),
    products_case("loop", {"mm": 4 * 3}),
    products_case("batched", {"bmm": 3}),
    products_case("grouped", {"_grouped_mm": 3}),
)

# Stage 5: losses.


def losses_case(rung: str, title: str, logits: Tensor, experts: Tensor, valid: Tensor) -> Case:
    given = {"logits": logits, "experts": experts, "valid": valid}

    def results(leaf: Tensor, losses: tuple[Tensor, Tensor]) -> Results:
        found: Results = {"balance": plain(losses[0]), "z": plain(losses[1])}
        for name in ("balance", "z"):
            loss = losses[name == "z"]
            gradients = gradients_by([loss], [torch.ones_like(loss)], {"logits": leaf}, again=name == "balance")  # they may share a part
            found |= {f"{key}, of {name}": value for key, value in gradients.items()}
        return found

    def call(adapters: Any, _: dict) -> Results:
        leaf = logits.clone().requires_grad_()
        return results(leaf, adapters.auxiliary_losses(leaf, experts.clone(), valid.clone()))

    def expected(*_: Any) -> Results:
        leaf = logits.clone().requires_grad_()
        probabilities = probabilities_of(leaf, torch.eye(leaf.shape[-1]).double())[1]
        return results(leaf, losses_by_hand(leaf, probabilities, experts, valid))

    return function_case(rung, title, given, call, expected, "a loop over rows, tokens and experts, in float64")


def some_valid(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


EVEN = torch.tensor([[[0, 1], [2, 3], [1, 0], [3, 2]]])
NONE = some_valid(3, 5).index_fill(0, torch.tensor([1]), False)
LOSSES = (
    losses_case("worked example", "an even choice of four tokens", torch.zeros(1, 4, 4).double(), EVEN, torch.ones(1, 4).bool()),
    losses_case("worked example", "two rows of which each chooses one expert", torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]).double(),
                torch.tensor([[[0]], [[1]]]), torch.ones(2, 1).bool()),
    losses_case("oracle", "one row", randn(1, 6, 4), choices(6, 4, 2).view(1, 6, 2), torch.ones(1, 6).bool()),
    losses_case("oracle", "rows of which some tokens count", randn(3, 5, 4), choices(15, 4, 2).view(3, 5, 2), some_valid(3, 5)),
    losses_case("oracle", "a row of which no token counts", randn(3, 5, 4), choices(15, 4, 3).view(3, 5, 3), NONE),
    losses_case("oracle", "logits whose exponentials are no numbers", 800 * randn(2, 3, 4), choices(6, 4, 1).view(2, 3, 1),
                some_valid(2, 3)),
    losses_case("oracle", "no rows", randn(0, 5, 4), torch.zeros(0, 5, 2).long(), torch.zeros(0, 5).bool()),
)  # fmt: skip
