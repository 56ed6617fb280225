"""Stage 1 of build 05: the rule of each parameter, and whether it decays, as tables."""

from typing import Any

import torch
from torch import nn

from shared.course.checking import Case

from .pieces import EXACT, ROLES, SHAPES, TEXT, Results, parameters


def route_case(
    title: str,
    shapes: dict[str, tuple[int, ...]],
    roles: dict[str, str],
    expected: Results,
    frozen: tuple[str, ...] = (),
    tied: dict[str, str] | None = None,
    last: bool = False,
) -> Case:
    """tied: further names, each with the name of its parameter; before all others, or last."""

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(shapes)
        for name in frozen:
            named[name].requires_grad_(False)
        further = {name: named[other] for name, other in (tied or {}).items()}
        pairs = [*named.items(), *further.items()] if last else [*further.items(), *named.items()]
        found = adapters.route(iter(pairs), dict(roles))
        result = {f"{name}: rule, decays": [rule, bool(decays)] for name, (rule, decays) in found.items()}
        return {"names, in order": list(found)} | result

    result = {"names, in order": list(expected)} | {f"{name}: rule, decays": list(each) for name, each in expected.items()}
    given = {"shapes": shapes, "roles": roles} | ({"tied": tied} if tied else {}) | ({"frozen": frozen} if frozen else {})
    return Case("worked example", title, lambda: given, lambda **_: result, TEXT.format(1), observe, **EXACT)


MUON, ADAMW, PLAIN = ("muon", True), ("adamw", True), ("adamw", False)


def module_case() -> Case:
    """Names of a real module, tied, by the generator of named_parameters."""
    roles = {"0.weight": "embedding", "1.weight": "norm", "1.bias": "bias", "2.weight": "matrix", "2.bias": "bias", "3.weight": "head"}
    expected = {"0.weight": ADAMW, "1.weight": PLAIN, "1.bias": PLAIN, "2.weight": MUON, "2.bias": PLAIN}

    def observe(adapters: Any, **_: Any) -> Results:
        model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
        model[3].weight = model[0].weight
        found = adapters.route(model.named_parameters(remove_duplicate=False), roles)
        return {"names": list(found)} | {name: [rule, bool(decays)] for name, (rule, decays) in found.items()}

    result = {"names": list(expected)} | {name: list(each) for name, each in expected.items()}
    return Case("property", "a module whose head is tied", lambda: {"roles": roles}, lambda **_: result, TEXT.format(1), observe, **EXACT)


def quiet_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        named, roles = parameters(SHAPES, torch.float32), dict(ROLES)
        adapters.route(iter(named.items()), roles)
        return {"roles": roles == ROLES, "trainable": all(weight.requires_grad for weight in named.values())}

    expected = lambda **_: {"roles": True, "trainable": True}  # noqa: E731
    return Case("property", "nothing is changed", lambda: {"roles": ROLES}, expected, TEXT.format(1), observe, **EXACT)


ROUTE = (
    route_case(
        "a small model",
        SHAPES,
        ROLES,
        {"tokens": ADAMW, "gate": MUON, "scale": PLAIN, "down": MUON, "mlp": MUON, "shift": PLAIN, "out": ADAMW},
    ),
    route_case(
        "names that say something else",
        {"head.norm": (4, 4), "attention.weight": (4,), "embedding.bias": (3, 2, 2)},
        {"head.norm": "matrix", "attention.weight": "norm", "embedding.bias": "experts"},
        {"head.norm": MUON, "attention.weight": PLAIN, "embedding.bias": MUON},
    ),
    route_case(
        "matrices and experts of other dimensions",
        {"kernel": (4, 3, 2, 2), "row": (5,), "batch": (2, 3, 4), "flat": (6, 4), "deep": (2, 2, 3, 4)},
        {"kernel": "matrix", "row": "matrix", "batch": "matrix", "flat": "experts", "deep": "experts"},
        {"kernel": ADAMW, "row": PLAIN, "batch": ADAMW, "flat": ADAMW, "deep": ADAMW},
    ),
    route_case(
        "two dimensions and no matrix",
        {"norms": (2, 4), "biases": (3, 4), "table": (4, 4), "head": (4, 4), "vector": (4,), "one": ()},
        {"norms": "norm", "biases": "bias", "table": "embedding", "head": "head", "vector": "head", "one": "embedding"},
        {"norms": PLAIN, "biases": PLAIN, "table": ADAMW, "head": ADAMW, "vector": PLAIN, "one": PLAIN},
    ),
    route_case(
        "matrices with a side of 1",
        {"router": (1, 4), "column": (4, 1), "lone": (1, 3, 4)},
        {"router": "matrix", "column": "matrix", "lone": "experts"},
        {"router": MUON, "column": MUON, "lone": MUON},
    ),
    route_case(
        "frozen parameters", SHAPES, ROLES, {"tokens": ADAMW, "scale": PLAIN, "down": MUON, "shift": PLAIN}, frozen=("gate", "mlp", "out")
    ),
    route_case(
        "a matrix that two layers share",
        {"a": (4, 4), "b": (4, 4)},
        {"a": "matrix", "b": "matrix", "c": "matrix"},
        {"a": MUON, "b": MUON},
        tied={"c": "a"},
        last=True,
    ),
    route_case(
        "a matrix that is also the head, which is named last",
        {"a": (4, 4), "b": (4, 4)},
        {"a": "matrix", "b": "matrix", "c": "head"},
        {"a": ADAMW, "b": MUON},
        tied={"c": "a"},
        last=True,
    ),
    route_case(
        "a head that is also a matrix, and is named first",
        {"a": (4, 4), "b": (4, 4)},
        {"a": "matrix", "b": "matrix", "c": "head"},
        {"c": ADAMW, "a": MUON},
        tied={"c": "b"},
    ),
    route_case(
        "an embedding that also is a norm",
        {"a": (4, 4), "b": (4, 4)},
        {"a": "embedding", "b": "embedding", "c": "norm"},
        {"a": PLAIN, "b": ADAMW},
        tied={"c": "a"},
        last=True,
    ),
    module_case(),
    quiet_case(),
)
