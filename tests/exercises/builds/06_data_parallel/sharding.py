"""Build 06: FSDP's forward pass (stage 6), recomputation (stage 8), and state that other ranks load (stage 10)."""

from typing import Any

import torch

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import NEAR, ONE_PROCESS, TOKENS, Alone, Model, Results
from .pieces import adamw, described, make, momentum, on_groups, said, several, summed_loss
from .stepping import step_case

# Stage 6.


def forward_case(
    title: str, ranks: int, groups: int = 1, gradients: bool = True, training: bool = True, start: bool = True, **options: Any
) -> Case:
    """Logits of each rank's own ids, twice. start: the ranks' models differ at first."""
    given = {"ranks": ranks, "gradients are enabled": gradients, "model.training": training, **options}
    given |= {"groups in the world": groups} if groups > 1 else {}

    def ids_of(rank: int, number: int, again: int) -> torch.Tensor:
        return torch.arange(10).add(5 * rank + 3 * number + again).remainder(TOKENS).view(2, 5)

    def named(rank: int, number: int, results: list[torch.Tensor]) -> Results:
        of = f" of group {number}" if groups > 1 else ""
        return {f"logits on rank {rank}{of}, call {again}": logits.detach() for again, logits in enumerate(results)}

    def expected(**_: Any) -> Results:
        found: Results = {}
        for number in range(groups):
            model = Model(seed=10 * number * start, **options).train(training)
            for rank in range(ranks):
                found |= named(rank, number, [model(ids_of(rank, number, again)) for again in range(2)])
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, number: int) -> Results:
            model = Model(seed=(group.rank + 10 * number) * start, **options).train(training)
            parallel = make(adapters, "sharded", model, group)
            with torch.set_grad_enabled(gradients):
                return named(group.rank, number, [adapters.forward(parallel, ids_of(group.rank, number, again)) for again in range(2)])

        return {name: value for by_rank in on_groups(on_rank, ranks, groups) for found in by_rank for name, value in found.items()}

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


# Stage 8.


def dropout_case(title: str, microbatches: int) -> Case:
    """One rank, so that the order of the random numbers is one process's."""
    batches = several(1, (microbatches,))
    given = {"ranks": 1, "recompute": True, "dropout": 0.4, "micro-batches": described(batches)}

    def seen(loss: torch.Tensor, gradients: dict) -> Results:
        found: Results = {"loss": loss.detach(), "the random number that is drawn next": torch.rand(1).item()}
        return found | {f"gradient of {name}": said(gradient) for name, gradient in gradients.items()}

    def expected(**_: Any) -> Results:
        alone = Alone(Model(dropout=0.4))
        torch.default_generator.manual_seed(11)
        loss = alone.backward(batches)
        return seen(loss, alone.gradients)

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> Results:
            parallel = make(adapters, "recompute", Model(dropout=0.4), group)
            torch.default_generator.manual_seed(11)
            loss = adapters.backward(parallel, batches[0], summed_loss)
            state = torch.get_rng_state()
            gradients = dict(adapters.gradients(parallel))
            torch.set_rng_state(state)
            return seen(loss, gradients)

        [[found]] = on_groups(on_rank, 1)
        return found

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


# Stage 10.


def flat_state(state: dict, rank: int) -> Results:
    found: Results = {f"{name}, rank {rank}": tensor.detach().clone() for name, tensor in state["model"].items()}
    for name, entry in state["optimizer"].items():
        for key, value in entry.items():
            kept = value.detach().clone() if torch.is_tensor(value) and value.dim() else float(value)
            found[f"{key} of {name}, rank {rank}"] = kept
    return found


def state_of(alone: Alone) -> dict:
    kept = {name: alone.optimizer.state[weight] for name, weight in alone.named.items() if alone.optimizer.state.get(weight)}
    return {"model": alone.weights(), "optimizer": kept}


def state_case(title: str, kind: str, ranks: int, optimizer: Any = adamw, later: bool = False, **options: Any) -> Case:
    """The state after two steps. later: looked at after a third one."""
    steps = [several(ranks, (2,) * ranks, seed=number) for number in range(3)]
    given = {"kind": kind, "ranks": ranks, "steps": 2, "looked at": "after a third step" if later else "at once", **options}

    def expected(**_: Any) -> Results:
        alone = Alone(Model(**options), optimizer)
        for batches in steps[:2]:
            alone.backward(batches), alone.update()
        return {name: value for rank in range(ranks) for name, value in flat_state(state_of(alone), rank).items()}

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> Results:
            parallel = make(adapters, kind, Model(**options), group, optimizer)
            for batches in steps[:2]:
                adapters.backward(parallel, batches[group.rank], summed_loss)
                adapters.update(parallel)
            state = adapters.state(parallel)
            state = {part: dict(state[part]) for part in ("model", "optimizer")}
            state["optimizer"] = {name: dict(entry) for name, entry in state["optimizer"].items() if entry}
            if later:
                adapters.backward(parallel, steps[2][group.rank], summed_loss)
                adapters.update(parallel)
            return flat_state(state, group.rank)

        [results] = on_groups(on_rank, ranks)
        return {name: value for found in results for name, value in found.items()}

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


def load_case(title: str, before: str, ranks: int, after: str, others: int, optimizer: Any = adamw, **options: Any) -> Case:
    """Two steps of one kind, then two of another kind on other ranks, whose model and optimizer had other contents."""
    steps = [several(6, (2,) * 6, seed=number) for number in range(4)]
    given = {"saved by": f"{before}, {ranks} ranks", "loaded by": f"{after}, {others} ranks", "steps": [2, 2], **options}

    def shared(batches: list, size: int) -> list[list]:
        """All micro-batches of a step, equally many for each rank."""
        every = [batch for own in batches for batch in own]
        return [every[rank :: size] for rank in range(size)]

    def expected(**_: Any) -> Results:
        alone = Alone(Model(**options), optimizer)
        for batches in steps:
            alone.backward(batches), alone.update()
        return {name: value for rank in range(others) for name, value in flat_state(state_of(alone), rank).items()}

    def observe(adapters: Any, **_: Any) -> Results:
        def train(parallel: Any, group: Communicator, chosen: list) -> None:
            for batches in chosen:
                adapters.backward(parallel, shared(batches, group.size)[group.rank], summed_loss)
                adapters.update(parallel)

        def save(group: Communicator, _: int) -> dict:
            parallel = make(adapters, before, Model(**options), group, optimizer)
            train(parallel, group, steps[:2])
            return adapters.state(parallel)

        def load(group: Communicator, _: int) -> Results:
            parallel = make(adapters, after, Model(seed=5, **options), group, optimizer)
            train(parallel, group, steps[:1])
            adapters.load(parallel, saved)
            train(parallel, group, steps[2:])
            state = adapters.state(parallel)
            return flat_state({"model": state["model"], "optimizer": {n: e for n, e in state["optimizer"].items() if e}}, group.rank)

        [[saved, *_]] = on_groups(save, ranks)
        [results] = on_groups(load, others)
        return {name: value for found in results for name, value in found.items()}

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


TIED = {"tied": True, "frozen": ("blocks.0.up.weight", "blocks.1.norm.bias")}
GATHER = (
    forward_case("two ranks, which begin with the same model", 2, start=False),
    forward_case("two ranks, each with ids of its own", 2),
    forward_case("three ranks, three blocks", 3, blocks=3),
    forward_case("without gradients, in evaluation mode", 2, gradients=False, training=False, dropout=0.5),
    forward_case("frozen weights, and a weight outside of units that is used twice", 2, **TIED),
    forward_case("two groups in the world", 2, groups=2),
    forward_case("a group of one rank", 1),
)
RECOMPUTE = (
    step_case("every gradient", "recompute", [several(2, (1, 1))]),
    step_case("several micro-batches, three ranks", "recompute", [several(3, (2, 2, 2))], blocks=3),
    step_case("frozen weights: also the embedding", "recompute", [several(2, (1, 1))], frozen=("embedding.weight", "blocks.0.up.weight")),
    dropout_case("the same random numbers are dropped", 1),
    dropout_case("in two micro-batches", 2),
    step_case("logits after three steps", "recompute", [several(2, (2, 2), seed=number) for number in range(3)], "weights"),
)
STATE = (
    state_case("what DDP holds after two steps", "replica", 2),
    state_case("what ZeRO-1 holds", "zero", 3, **TIED),
    state_case("what FSDP holds", "sharded", 3, **TIED),
    state_case("SGD with momentum", "zero", 2, momentum),
    state_case("a state stays as it is", "sharded", 2, later=True),
    state_case("a state of DDP stays as it is", "replica", 2, later=True),
    load_case("from two ranks to three", "zero", 2, "zero", 3),
    load_case("from FSDP on three ranks to two", "sharded", 3, "sharded", 2, **TIED),
    load_case("from DDP to FSDP", "replica", 2, "sharded", 3),
    load_case("from FSDP to ZeRO-1", "sharded", 2, "zero", 3, momentum),
    load_case("from ZeRO-1 to DDP on one rank", "zero", 3, "replica", 1, **TIED),
)
