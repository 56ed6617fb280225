"""Chapter 05. Parameter groups: which parameter is updated by which rule, and which have weight decay, read off each parameter's role.

Muon is for the matrices inside a model, experts included. Embeddings and the head are tables whose rows are looked up one at a time;
norms and biases are vectors. All of those go to AdamW. Decay pulls matrices and embeddings towards 0, where it acts against rows
that grow; a norm's weight belongs near 1 and a bias where the data wants it, so they do not decay.

Left out on purpose: a learning rate for each layer or width (muP).
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.model.roles import role_of

DECAYING = ("embedding", "matrix", "expert")
MATRIX_DIMENSIONS = {"matrix": (2,), "expert": (2, 3)}  # an expert may be a part of [experts, out, in]


@dataclass(frozen=True)
class Route:
    """A parameter group: its update rule, whether it has weight decay, and its parameters' names."""

    rule: str
    decays: bool
    names: tuple[str, ...]


def route(model: nn.Module, rule: str, *, no_decay: list[str], to_adamw: list[str]) -> list[Route]:
    """Assign every trainable parameter of a model to one parameter group, by update rule and weight decay.

    Args:
        rule: adamw, lion, sgd, or muon, which leaves parameters that are not matrices to AdamW.
        no_decay: patterns of names, like `*.q_proj.weight`, without weight decay, in addition to norms and biases.
        to_adamw: patterns of names that Muon leaves to AdamW too.

    Raises:
        ValueError: no parameter is trainable; a pattern that matches none; muon without a matrix.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ValueError("The model has no trainable parameter: all are frozen (requires_grad is False).")
    exempt, kept = matching(trainable, no_decay, "no_decay"), matching(trainable, to_adamw, "to_adamw")
    routes: dict[tuple[str, bool], list[str]] = {}
    for name, parameter in trainable.items():
        role = role_of(name, parameter)
        decays = role in DECAYING and dimensions(parameter) >= 2 and name not in exempt
        is_matrix = dimensions(parameter) in MATRIX_DIMENSIONS.get(role, ())
        own = "adamw" if rule == "muon" and (not is_matrix or name in kept) else rule
        routes.setdefault((own, decays), []).append(name)
    if rule == "muon" and not any(own == "muon" for own, _ in routes):
        raise SettingError(no_matrix(trainable, kept))
    return [Route(own, decays, tuple(names)) for (own, decays), names in routes.items()]


def no_matrix(trainable: dict[str, Tensor], kept: set[str]) -> str:
    """The error message for a model without a matrix for Muon, by what is trained."""
    shown = ", ".join(trainable) if len(trainable) <= 2 else f"{next(iter(trainable))} and others"
    why = "optimizer.to_adamw takes them out" if kept else "embeddings, the head, norms, biases and adapters of these are for AdamW"
    return (
        f"optimizer.name is muon, and not one parameter is a matrix for it. Trained are {shown}: {why}. Give optimizer.name adamw, or "
        "train matrices inside the layers too."
    )


def matching(parameters: dict[str, Tensor], patterns: list[str], option: str) -> set[str]:
    """The names that a pattern matches; each pattern must match one."""
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in parameters if fnmatchcase(name, pattern)}
        if not matched:
            like = next(iter(parameters))
            raise SettingError(f"optimizer.{option}: no trainable parameter has a name like {pattern!r}. Names look like {like!r}.")
        found |= matched
    return found


def dimensions(parameter: Tensor) -> int:
    """The number of dimensions of the full parameter, where this process holds a shard."""
    return len(getattr(parameter, "sharding", parameter).shape)
