"""Build 06: what an optimizer is given, and the state that it then has: a rank's share of the weights (stages 5 and 7)."""

from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import TEXT, Model, Results, adamw, make, on_groups, one_each, summed_loss
from .watching import WITHIN, within


def share_case(title: str, kind: str, ranks: int, bucket_bytes: int = 700, **options: Any) -> Case:
    """How many numbers each rank's optimizer has, and how many of state after a step."""
    given = {"kind": kind, "ranks": ranks, "bucket_bytes": bucket_bytes, **options}
    names = "numbers that rank {}'s optimizer steps", "numbers of state for these, on rank {}"

    def limit() -> int:
        model = Model(**options)
        trained = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
        if kind == "zero":
            return sum(trained.values()) // ranks + ranks * len(trained)
        inside = sum(count for name, count in trained.items() if name.startswith("blocks."))
        return inside // ranks + ranks * len(model.blocks) + sum(trained.values()) - inside

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> Results:
            made: list[torch.optim.Optimizer] = []

            def optimizer(tensors: list[Tensor]) -> torch.optim.Optimizer:
                made.append(adamw(tensors))
                return made[-1]

            parallel = make(adapters, kind, Model(**options), group, optimizer, bucket_bytes)
            adapters.backward(parallel, one_each(ranks)[group.rank], summed_loss)
            adapters.update(parallel)
            stepped = sum(tensor.numel() for each in made for entry in each.param_groups for tensor in entry["params"])
            state = sum(v.numel() for each in made for entry in each.state.values() for v in entry.values() if v.dim())
            found = within(stepped, limit(), "numbers"), within(state, 2 * limit(), "numbers")
            return {name.format(group.rank): value for name, value in zip(names, found, strict=True)}

        [results] = on_groups(on_rank, ranks)
        return {name: value for found in results for name, value in found.items()}

    expected = lambda **_: {name.format(rank): WITHIN for rank in range(ranks) for name in names}  # noqa: E731
    return Case("budget", title, lambda: given, expected, TEXT.format(5 if kind == "zero" else 6), observe)


ZERO_SHARES = (
    share_case("each rank's share, one bucket for each weight", "zero", 3, bucket_bytes=1),
    share_case("each rank's share, several buckets", "zero", 2),
)
SHARDED_SHARES = (share_case("each rank's share", "sharded", 3),)
