"""Stages 5 and 6 of build 10: an adapter goes into the weights and out again, and several adapters on one model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.checking import Case

from .pieces import (
    DENSE,
    EXACT,
    NEAR,
    TEXT,
    WITHIN,
    Config,
    Dense,
    Net,
    Results,
    Strange,
    Tied,
    Twice,
    Watch,
    answer,
    budget,
    config_of,
    made,
    put,
    randn,
    scaling_of,
    sequence,
    state_of,
    trained_leaves,
    values_of,
)

Q = ["layers.0.q_proj", "layers.1.q_proj"]


def weights_now(adapters: Any, adapted: Any, about: str) -> Results:
    return {f"{about}: {name}": weight.detach().clone() for name, weight in dict(adapters.weights(adapted)).items()}


def merged_weights(model: nn.Module, config: Config, values: dict[str, Tensor]) -> Results:
    """Of a float64 model; who shares a weight keeps the old one, who shares a module has the new one."""
    for name in [key.removesuffix(".lora_A") for key in values if key.endswith(".lora_A")]:
        module, B, A = model.get_submodule(name), values[f"{name}.lora_B"], values[f"{name}.lora_A"]
        module.weight = nn.Parameter(module.weight.detach() + scaling_of(config) * torch.einsum("or,ri->oi", B, A))
    return state_of(model)


# Stage 5: merge


def merge_case(title: str, kind: Callable[[], nn.Module], config: Config, layers: list[str], x: Tensor, calls: str) -> Case:
    """calls: which of merge (m) and unmerge (u) are called, one after the other; outputs and weights after each."""

    def expected(**_: Any) -> Results:
        values, found = values_of(made(kind), layers, config), {}
        y = Dense(made(kind), config, values).run(x).detach()
        for number, call in enumerate(calls):
            plain = merged_weights(made(kind), config, values) if call == "m" else state_of(made(kind))
            found |= {f"y after call {number}": y} | {f"weights after call {number}: {name}": weight for name, weight in plain.items()}
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        adapted, found = adapters.attach(made(kind), "default", dict(config), 0), {}
        put(adapters, adapted, "default", values_of(made(kind), layers, config))
        for number, call in enumerate(calls):
            (adapters.merge if call == "m" else adapters.unmerge)(adapted)
            found |= {f"y after call {number}": adapters.run(adapted, x).detach()}
            found |= weights_now(adapters, adapted, f"weights after call {number}")
        return found

    given = {"model": kind.__name__, "calls": [{"m": "merge", "u": "unmerge"}[call] for call in calls], **config}
    return Case("oracle", title, lambda: given, expected, DENSE, observe, **NEAR)


def exact_case(title: str, dtype: torch.dtype) -> Case:
    """In bfloat16, 256 and an update of 1 + 2^-8 are 258; were the update rounded before, they would be 256. And back, bit for bit."""
    config, weight = config_of(["0"], r=2, alpha=2), torch.tensor([[256.0, 1.0], [0.1, -3.0]])
    values = {"0.lora_A": torch.tensor([[1.0, 2.0**-9], [2.0**-8, 0.0]]), "0.lora_B": torch.tensor([[1.0, 1.0], [1.0, 2.0]])}

    def model() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False))
        model.load_state_dict({"0.weight": weight})
        return model.to(dtype)

    def expected(**_: Any) -> Results:
        wide = values["0.lora_B"].double() @ values["0.lora_A"].double() + weight.to(dtype).double()
        return {"merged: 0.weight": wide.to(dtype), "unmerged: 0.weight": weight.to(dtype), "dtype of the factors": "torch.float32"}

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(model(), "default", dict(config), 0)
        held = put(adapters, adapted, "default", values)
        adapters.merge(adapted)
        found = weights_now(adapters, adapted, "merged")
        adapters.unmerge(adapted)
        found["dtype of the factors"] = str(held["0.lora_A"].dtype)
        return found | weights_now(adapters, adapted, "unmerged")

    given = {"W": weight.to(dtype), "A": values["0.lora_A"], "B": values["0.lora_B"], "s": 1.0}
    return Case("property", title, lambda: given, expected, TEXT.format(5), observe, **EXACT)


def tied_case() -> Case:
    """An embedding shares the weight of the head, which is adapted."""
    config, ids = config_of(["head"], r=3), torch.tensor([[3, 0, 8]])

    def expected(**_: Any) -> Results:
        values = values_of(made(Tied), ["head"], config)
        merged = merged_weights(made(Tied), config, values)
        y = Dense(made(Tied), config, values).run(ids).detach()
        found = {f"merged: {name}": weight for name, weight in merged.items()} | {"merged: y": y, "unmerged: y": y}
        return found | {"embedding and head afterwards": "one tensor"}

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(Tied), "default", dict(config), 0)
        put(adapters, adapted, "default", values_of(made(Tied), ["head"], config))
        adapters.merge(adapted)
        found = weights_now(adapters, adapted, "merged") | {"merged: y": adapters.run(adapted, ids).detach()}
        adapters.unmerge(adapted)
        plain = dict(adapters.weights(adapted))
        shared = plain["head.weight"].data_ptr() == plain["embedding.weight"].data_ptr()
        return found | {
            "unmerged: y": adapters.run(adapted, ids).detach(), "embedding and head afterwards": "one tensor" if shared else "two tensors"
        }  # fmt: skip

    given = {"model": "Tied: head.weight is embedding.weight", **config}
    return Case("property", "a tied weight", lambda: given, expected, DENSE, observe, **NEAR)


def again_case() -> Case:
    """The factors change between two merges, and are trained after the second."""
    config, x = config_of(["0"], r=2), randn(3, 5)

    def expected(**_: Any) -> Results:
        values = values_of(made(sequence), ["0"], config, seed=40)
        oracle = Dense(made(sequence), config, values)
        return {"merged y": oracle.run(x).detach()} | answer(oracle.run(x), {}, oracle.factors)

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(sequence), "default", dict(config), 0)
        for seed in (5, 40):
            held = put(adapters, adapted, "default", values_of(made(sequence), ["0"], config, seed=seed))
            adapters.merge(adapted)
            y = adapters.run(adapted, x).detach()
            adapters.unmerge(adapted)
        return {"merged y": y} | answer(adapters.run(adapted, x), {}, held)

    given = {"calls": ["merge", "unmerge", "change the factors", "merge", "unmerge", "run and its gradients"], **config}
    return Case("property", "a second merge has the factors as they are then", lambda: given, expected, DENSE, observe, **NEAR)


def cost_case() -> Case:
    x, config = randn(4, 5), config_of(["embed", "head"], r=3)
    about = "multiplications of a merged model"

    def observe(adapters: Any, **_: Any) -> Results:
        with torch.no_grad(), Watch() as plain:
            made(Net).eval()(x)
        adapted = adapters.attach(made(Net), "default", dict(config), 0)
        adapters.merge(adapted)
        with torch.no_grad(), Watch() as watch:
            adapters.run(adapted, x)
        return {about: budget(watch.multiplications, plain.multiplications, "multiplications")}

    return Case("budget", "what a merged call costs", lambda: config, lambda **_: {about: WITHIN}, TEXT.format(5), observe)


MERGE = (
    merge_case("merge", sequence, config_of(["2"]), ["2"], randn(3, 5), "m"),
    merge_case("and out again", Net, config_of(["q_proj"], r=3, rslora=True), Q, randn(2, 3, 5), "mu"),
    merge_case("twice is once", Strange, config_of(r"base|lora_A|weight"), ["base", "lora_A", "weight"], randn(3, 5), "mmuumu"),
    merge_case("unmerge first", sequence, config_of(["0", "2"]), ["0", "2"], randn(3, 5), "umu"),
    merge_case("a block at two places", Twice, config_of(["q_proj"]), ["first.q_proj"], randn(3, 5), "mu"),
    exact_case("bfloat16: rounded once, and bit for bit as it was", torch.bfloat16),
    exact_case("float32", torch.float32),
    tied_case(),
    again_case(),
    cost_case(),
)

# Stage 6: several

FIRST, SECOND = config_of(["q_proj"], r=3), config_of(["head", "layers.0.q_proj"], r=2, alpha=5, rslora=True)
LAYERS = {"first": Q, "second": ["layers.0.q_proj", "head"]}
CONFIGS = {"first": FIRST, "second": SECOND}


def both(adapters: Any) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    """A model with two adapters, and their factors."""
    adapted = adapters.attach(made(Net), "first", dict(FIRST), 0)
    adapters.add(adapted, "second", dict(SECOND), 1)
    values = {name: values_of(made(Net), LAYERS[name], CONFIGS[name], seed=30 * number) for number, name in enumerate(LAYERS)}
    return adapted, {name: put(adapters, adapted, name, values[name]) for name in LAYERS}


def by_oracle(name: str | None, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    if name is None:
        return made(Net).requires_grad_(False).eval()(x), {}
    seed = 30 * list(LAYERS).index(name)
    oracle = Dense(made(Net), CONFIGS[name], values_of(made(Net), LAYERS[name], CONFIGS[name], seed=seed))
    return oracle.run(x), oracle.factors


def switch_case(title: str, uses: list[str | None], merged: bool = False) -> Case:
    """After each `use`: outputs and gradients, what a backward pass reaches, whose factors are trained; and before it a merge."""
    x = randn(3, 5).requires_grad_()

    def expected(**_: Any) -> Results:
        found: Results = {}
        for number, name in enumerate(uses):
            y, held = by_oracle(name, x)
            own = answer(y, {"x": x}, held) | {"a backward pass reaches": sorted([*held, "x"])}
            own |= {"factors that require a gradient": sorted(f"{name}: {key}" for key in held)}
            found |= {f"use {number}: {key}": value for key, value in own.items()}
        return found | {f"weights: {key}": value for key, value in state_of(made(Net)).items()}

    def observe(adapters: Any, **_: Any) -> Results:
        adapted, held = both(adapters)
        found: Results = {}
        for number, name in enumerate(uses):
            if merged:
                adapters.merge(adapted)
            if number or name != "first":  # the first adapter is in use without a word
                adapters.use(adapted, name)
            y, own = adapters.run(adapted, x), held.get(name, {})
            known = {f"{other}: {key}" if other != name else key: each for other in held for key, each in held[other].items()}
            result = {"a backward pass reaches": trained_leaves(y, known | {"x": x})} | answer(y, {"x": x}, own)
            trained = [f"{other}: {key}" for other in held for key, each in held[other].items() if each.requires_grad]
            result["factors that require a gradient"] = sorted(trained)
            found |= {f"use {number}: {key}": value for key, value in result.items()}
        return found | weights_now(adapters, adapted, "weights")

    names = [name or "None" for name in uses]
    given = {"model": "Net", "uses": names, "merge before each": merged, "first": FIRST, "second": SECOND}
    return Case("oracle", title, lambda: given, expected, DENSE, observe, **NEAR)


def waiting_case() -> Case:
    """An optimizer that has the factors of both, and weight decay: only the adapter in use has gradients, so the other stays."""

    def observe(adapters: Any, **_: Any) -> Results:
        adapted, held = both(adapters)
        adapters.use(adapted, "second")
        before = {name: {key: each.detach().clone() for key, each in own.items()} for name, own in held.items()}
        optimizer = torch.optim.SGD([each for own in held.values() for each in own.values()], lr=0.1, weight_decay=0.1)
        adapters.run(adapted, randn(3, 5)).square().sum().backward()
        optimizer.step()
        moved = {name: sum(not torch.equal(before[name][key], each) for key, each in own.items()) for name, own in held.items()}
        return {f"factors of {name} that moved": number for name, number in moved.items()}

    expected = lambda **_: {"factors of first that moved": 0, "factors of second that moved": 4}  # noqa: E731
    return Case("property", "who waits is not trained", lambda: {"in use": "second"}, expected, TEXT.format(6), observe)


SEVERAL = (
    switch_case("a second adapter waits", ["first"]),
    switch_case("the second, the first, none", ["second", "first", None, "second"]),
    switch_case("the same one twice", ["second", "second"]),
    switch_case("switching while one is merged", ["second", "first", None, "first"], merged=True),
    waiting_case(),
)
