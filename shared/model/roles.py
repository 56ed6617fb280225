"""Chapter 02. Parameter roles and attributes: what a parameter is for, read off its name, and what modules may state on it.

embedding: one side is counted in tokens, positions or groups of distances; the head is one too, tied or not.
matrix: the weight of a linear layer inside the model. expert: the same, one of several that take turns.
norm: weight and bias of a normalisation. bias: the bias of a linear layer or of the head.

Modules of later chapters state facts on their parameters as attributes, which move with them off the meta device:
`role` (one of these), `initializer` and `stored` (see `shared.model.init`), `sharding` (`Sharding`, where a rank holds a part),
`full_precision` (computed with in its own dtype where the run's is narrower: a router), `kept_elsewhere` (a frozen weight whose file is
known, so that checkpoints need not hold it) and `computed_apart` (its gradient comes after the
backward pass, and autograd does not see the weight).
"""

import math
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Role = Literal["embedding", "matrix", "norm", "bias", "expert"]
ROLES: tuple[Role, ...] = get_args(Role)


def role_of(name: str, parameter: Tensor | None = None) -> Role:
    """The role of a parameter.

    Args:
        name: its name in the model, like `stack.blocks.0.attention.q_proj.weight`.
        parameter: where it carries an attribute `role`, that decides: a module of a later chapter may say what its
            parameters are for.
    """
    role = getattr(parameter, "role", None)
    if role is not None:
        if role not in ROLES:
            raise ValueError(f"{name} carries the role {role!r}: choose {', '.join(ROLES)}.")
        return role
    parts = name.split(".")
    if any(part == "norm" or part.endswith("_norm") for part in parts[:-1]):
        return "norm"
    if parts[-1] == "bias":
        return "bias"
    if "experts" in parts:
        return "expert"
    if "embedding" in parts or "relative_bias" in parts or parts[:2] == ["head", "linear"]:
        return "embedding"
    return "matrix"


def parameters_by_role(model: nn.Module) -> dict[Role, dict[str, nn.Parameter]]:
    """Every parameter once, by role and name."""
    grouped: dict[Role, dict[str, nn.Parameter]] = {role: {} for role in ROLES}
    for name, parameter in model.named_parameters():
        grouped[role_of(name, parameter)][name] = parameter
    return grouped


def experts_of(parameter: Tensor, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The experts that this process has of a parameter [E, ...] of the role "expert", by their numbers in the whole model.

    Args:
        tensor: the parameter or one that is sharded as it is, such as its gradient.

    Yields:
        An expert's number, and its numbers in `tensor`: its matrix, or flat where this process holds a part of it.
    """
    sharding = getattr(parameter, "sharding", None)
    if sharding is None or sharding.region.is_box:
        yield from enumerate(tensor, start=0 if sharding is None else sharding.region.offsets[0])
        return
    parts: dict[int, list[Tensor]] = {}
    for box, first in sharding.region.boxes():
        rows = tensor[first : first + math.prod(box.sizes)].view(box.sizes[0], -1)
        for expert, row in enumerate(rows, start=box.offsets[0]):
            parts.setdefault(expert, []).append(row)
    for expert, rows in parts.items():
        yield expert, torch.cat(rows)
