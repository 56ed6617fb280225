"""The cases of build 07: the adapters of a tensor-parallel model against the same model in one process.

Ranks are threads. Every stage climbs from the smallest case on which a mistake shows to the others.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.course.comparing import Said, numbers
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads

from .limits import BAD_INPUT, BUDGETS, BYTES, MadeFrom, cut_stream_case, sent_case
from .pieces import NEAR, ONE_PROCESS, Results, Whole, config_of, in_letters, stream, tokens, weights_of


# Stage 1: weights.


def observe_weights(adapters: Any, ranks: int, sizes: dict[str, int]) -> Results:
    """What of the parts on each rank is not as it must be; every list is empty where all is well."""
    config = config_of(sizes)
    whole = weights_of(config)

    def on_rank(world: Communicator) -> tuple[dict[str, Tensor], dict[str, tuple], list[str]]:
        given = weights_of(config)
        alive = {name: weakref.ref(weight) for name, weight in given.items() if weight.dim() == 2}
        with MadeFrom(given) as made:
            model = adapters.make_model(config, given, world, False)
        del given
        parts, layout = dict(adapters.state(model)), dict(adapters.layout(model))
        # A build may fill the tokens up, so that every rank has as many.
        needed = sum(part.numel() for part in parts.values()) * BYTES + 2 * ranks * config.hidden_size * BYTES
        if any(weight() is not None for weight in alive.values()) or made.bytes_alive() > needed:
            gc.collect()  # what is only part of a circle of references goes
        kept = [name for name, weight in alive.items() if weight() is not None]
        if made.bytes_alive() > needed:
            kept.append("copies of more than the parts")
        return parts, layout, kept

    found = run_threads(on_rank, ranks)
    problems: dict[str, list[str]] = {about: [] for about in NO_PROBLEMS}
    covered = {name: torch.zeros_like(weight) for name, weight in whole.items()}
    for rank, (parts, layout, alive) in enumerate(found):
        problems["whole and still in memory"] += [f"{name} on rank {rank}" for name in alive]
        problems["missing"] += [f"{name} on rank {rank}" for name in whole if name not in parts or name not in layout]
        problems["unknown"] += [f"{name} on rank {rank}" for name in parts if name not in whole]
        for name in (name for name in whole if name in parts and name in layout):
            part, indices = parts[name].detach(), layout[name]
            if not are_indices(indices, whole[name]):
                problems["laid out by something else than a tuple of index tensors"].append(f"{name} on rank {rank}")
                continue
            at = torch.meshgrid(*indices, indexing="ij")
            if part.shape != whole[name][at].shape or not torch.equal(part, whole[name][at]):
                problems["not the numbers that layout says"].append(f"{name} on rank {rank}")
                continue
            covered[name][at] = 1
            share = -(-whole[name].shape[0] // ranks) * whole[name].shape[1] if whole[name].dim() == 2 else whole[name].numel()
            share = max(share, config.head_dim * config.hidden_size) if "k_proj" in name or "v_proj" in name else share
            if part.numel() > share:
                problems["more than a rank's share"].append(f"{name} on rank {rank}")
            if part.untyped_storage().nbytes() > part.numel() * part.element_size():
                problems["held in a larger tensor's memory"].append(f"{name} on rank {rank}")
    problems["on no rank"] = [f"some of {name}" for name, seen in covered.items() if not seen.all()]
    return {about: names[:3] for about, names in problems.items()}


def are_indices(indices: Any, whole: Tensor) -> bool:
    """Whether a layout's entry is one int64 tensor for each dimension, within the whole."""
    if not isinstance(indices, tuple) or len(indices) != whole.dim():
        return False
    fits = [isinstance(each, Tensor) and each.dtype == torch.int64 and each.dim() == 1 for each in indices]
    return all(fits) and all(((each >= 0) & (each < size)).all() for each, size in zip(indices, whole.shape, strict=True))


NO_PROBLEMS: dict[str, list[str]] = {
    "missing": [], "unknown": [], "laid out by something else than a tuple of index tensors": [], "not the numbers that layout says": [],
    "more than a rank's share": [], "held in a larger tensor's memory": [], "whole and still in memory": [], "on no rank": [],
}  # fmt: skip


def weights_case(title: str, ranks: int, **sizes: int) -> Case:
    given = {"ranks": ranks, "sizes": in_letters(sizes)}
    observe = lambda adapters, **_: observe_weights(adapters, ranks, sizes)  # noqa: E731
    return Case("property", title, lambda: given, lambda **_: NO_PROBLEMS, "the whole weights, compared bit for bit", observe)


# Stages 2 to 4: parts of the model, each with the result on every rank and the gradient of its input.


def by_rank(about: str, results: list[Any]) -> Results:
    return {f"{about} on rank {rank}": result for rank, result in enumerate(results)}


def pulled(y: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, for a random gradient of y that is the same on all ranks."""
    random = torch.Generator().manual_seed(11)
    return torch.autograd.grad(y, x, torch.randn(y.shape, generator=random, dtype=y.dtype))[0]


def layer_case(
    title: str, part: str, ranks: int, layer: int = 0, gradient: bool = False, biases: bool = True, length: int = 3, **sizes: int
) -> Case:
    """feed_forward or attention of one layer: its output, or the gradient of its input."""
    given = {"ranks": ranks, "layer": layer, "positions": length, "biases": biases, "sizes": in_letters(sizes)}
    about = "gradient of x" if gradient else "output"

    def result(compute: Callable[[int, Tensor], Tensor], config: Any) -> Tensor:
        x = stream(config, length).requires_grad_()
        y = compute(layer, x)
        return pulled(y, x) if gradient else y.detach()

    def expected(**_: Any) -> Results:
        config = config_of(sizes)
        return by_rank(about, [result(getattr(Whole(config, weights_of(config, biases)), part), config)] * ranks)

    def observe(adapters: Any, **_: Any) -> Results:
        config = config_of(sizes)

        def on_rank(world: Communicator) -> Tensor:
            model = adapters.make_model(config, weights_of(config, biases), world, False)
            return result(lambda layer, x: getattr(adapters, part)(model, layer, x), config)

        return by_rank(about, run_threads(on_rank, ranks))

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


def embed_case(title: str, ranks: int) -> Case:
    given = {"ids": torch.tensor([[0, 26, 27, 52]]), "ranks": ranks, "sizes": in_letters({})}

    config = config_of({})

    def expected(ids: Tensor, **_: Any) -> Results:
        return by_rank("embedding", [Whole(config, weights_of(config)).embed(ids).detach()] * ranks)

    def observe(adapters: Any, ids: Tensor, **_: Any) -> Results:
        on_rank = lambda world: adapters.embed(adapters.make_model(config, weights_of(config), world, False), ids).detach()  # noqa: E731
        return by_rank("embedding", run_threads(on_rank, ranks))

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


def loss_case(title: str, targets: list[list[int]], ranks: int, scale: float = 1.0, gradient: bool = False, **sizes: int) -> Case:
    """scale: multiplies the head, so that logits are large."""
    given = {"targets": torch.tensor(targets), "ranks": ranks, "the head is multiplied by": scale, "sizes": in_letters(sizes)}
    config = config_of(sizes)

    def weights() -> dict[str, Tensor]:
        found = weights_of(config)
        return found | {"head.weight": found["head.weight"] * scale}

    def result(compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x = stream(config, len(targets[0]), len(targets)).requires_grad_()
        loss = compute(x, torch.tensor(targets))
        return torch.autograd.grad(loss, x)[0] if gradient else loss.detach()

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(world: Communicator) -> Tensor:
            model = adapters.make_model(config, weights(), world, False)
            return result(lambda x, targets: adapters.head_loss(model, x, targets))

        return by_rank(about, run_threads(on_rank, ranks))

    about = "gradient of x" if gradient else "loss"
    expected = lambda **_: by_rank(about, [result(Whole(config, weights()).head_loss)] * ranks)  # noqa: E731
    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


# Stages 5 to 7: the whole model.


def joined(parts: list[dict[str, Tensor]], layouts: list[dict[str, tuple]], whole: dict[str, Tensor], about: str) -> Results:
    """What the ranks hold, put together by their layouts; words where a part is missing, has another shape, or copies disagree."""
    found: Results = {}
    for name, weight in whole.items():
        total, said = torch.full_like(weight, torch.nan), ""
        for rank, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
            at, here = torch.meshgrid(*layout[name], indexing="ij"), part.get(name)
            before = total[at]
            if not isinstance(here, Tensor) or here.shape != before.shape:
                there = "nothing" if here is None else f"shape {list(getattr(here, 'shape', ()))}"
                said = said or f"{there} on rank {rank}, whose part has shape {list(before.shape)}"
                continue
            known = ~before.isnan()
            if not torch.allclose(before[known], here[known], rtol=1e-9, atol=1e-9):
                two = numbers(here[known][:3]), numbers(before[known][:3])
                said = said or f"{two[0]} on rank {rank} and {two[1]} on a rank before it, for one part"
            total[at] = here
        found[f"{about}{name}"] = Said(said) if said else total
    return found


def model_case(title: str, ranks: int, by_sequence: bool = False, length: int = 6, what: str = "gradients", **sizes: int) -> Case:
    """what: logits, loss, gradients (each with its place in the whole), or gradients of a second call."""
    given = {"ranks": ranks, "sequence_parallel": by_sequence, "ids": [2, length], "sizes": in_letters(sizes)}
    config = config_of(sizes)
    ids, targets = tokens(config, length)

    def expected(**_: Any) -> Results:
        whole = Whole(config, weights_of(config))
        if what == "logits":
            return {"logits": whole.model(ids).detach().movedim(-1, 0)}
        loss = whole.loss(ids, targets)
        if what == "loss":
            return by_rank("loss", [loss.detach()] * ranks)
        loss.backward()
        return {f"gradient of {name}": gradient for name, gradient in whole.gradients().items()}

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(world: Communicator) -> tuple:
            model = adapters.make_model(config, weights_of(config), world, by_sequence)
            if what == "logits":
                return {"logits": adapters.logits(model, ids).detach().movedim(-1, 0)}, adapters.layout(model)
            if what == "gradients of a second call":
                adapters.loss_and_gradients(model, ids.flip(0), targets)
            loss, gradients = adapters.loss_and_gradients(model, ids, targets)
            return loss.detach() if what == "loss" else gradients, adapters.layout(model)

        results, layouts = zip(*run_threads(on_rank, ranks), strict=True)
        if what == "loss":
            return by_rank("loss", results)
        if what == "logits":
            rows = [{"logits": (layout["head.weight"][0], torch.arange(2), torch.arange(length))} for layout in layouts]
            return joined(results, rows, {"logits": torch.zeros(config.vocab_size, 2, length, dtype=torch.float64)}, "")
        return joined(results, layouts, weights_of(config), "gradient of ")

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


def model_cases(ranks: int, by_sequence: bool = False, length: int = 6, **sizes: int) -> list[Case]:
    titles = {"logits": "the logits of each rank's tokens", "loss": "the loss, the same on all ranks", "gradients": "every gradient"}
    return [
        model_case(f"{title}, {ranks} ranks, layers: {layers}", ranks, by_sequence, length, what, num_hidden_layers=layers, **sizes)
        for layers in (1, 2)
        for what, title in titles.items()
    ]


CASES = {
    "weights": (
        weights_case("two ranks hold the model's weights, cut as layout says", 2, num_hidden_layers=1),
        weights_case("four ranks, two layers", 4),
        weights_case("four ranks and two key-value heads: each head on two ranks", 4, num_key_value_heads=2),
    ),
    "feed_forward": (
        layer_case("the output, without biases", "feed_forward", 2, biases=False, length=1),
        layer_case("the output, with biases", "feed_forward", 2, length=1),
        layer_case("the gradient of x: every rank's part of the layer has used x", "feed_forward", 2, gradient=True, length=1),
        layer_case("four ranks, the second layer", "feed_forward", 4, layer=1),
        layer_case("four ranks, the gradient of x", "feed_forward", 4, layer=1, gradient=True),
        sent_case("feed_forward"),
    ),
    "attention": (
        layer_case("the output at one position, without biases", "attention", 2, biases=False, length=1),
        layer_case("the output at one position, with biases", "attention", 2, length=1),
        layer_case("the output at five positions: causal, with RoPE", "attention", 2, length=5),
        layer_case("the gradient of x", "attention", 2, gradient=True),
        layer_case("grouped-query attention: four heads share two key-value heads", "attention", 2, length=5, num_key_value_heads=2),
        layer_case("two key-value heads and four query heads on each rank", "attention", 2, num_attention_heads=8, num_key_value_heads=4),
        layer_case("grouped-query attention, the gradient of x", "attention", 2, gradient=True, num_key_value_heads=2),
        layer_case("four ranks, the second layer", "attention", 4, layer=1, length=5),
        sent_case("attention"),
    ),
    "vocabulary": (
        embed_case("embeddings of tokens on both ranks", 2),
        embed_case("embeddings of 53 tokens on four ranks", 4),
        loss_case("the loss at one position, of 52 tokens", [[3]], 2, vocab_size=52),
        loss_case("the loss, targets on both ranks, one of them -100", [[3, 52, -100]], 2),
        loss_case("the loss with logits beyond what exp can take", [[3, 52, -100]], 2, scale=3000.0),
        loss_case("the loss where no target counts", [[-100, -100]], 2),
        loss_case("the gradient of x", [[3, 52, -100], [0, 30, 7]], 2, gradient=True),
        loss_case("the gradient of x, four ranks", [[3, 52, -100], [0, 30, 7]], 4, gradient=True),
    ),
    "model": (
        *model_cases(2),
        *model_cases(2, num_key_value_heads=2)[-1:],
        model_case("every gradient again, after a call with other tokens", 2, what="gradients of a second call"),
    ),
    "four_ranks": (
        *model_cases(4)[-1:],
        *model_cases(4, num_key_value_heads=2),
        *model_cases(4, num_key_value_heads=1)[-1:],
    ),
    "sequence_parallel": (
        *model_cases(2, by_sequence=True),
        *model_cases(4, by_sequence=True, length=8, num_key_value_heads=2)[-2:],
        cut_stream_case(),
    ),
    "budgets": BUDGETS,
    "bad_input": BAD_INPUT,
}
