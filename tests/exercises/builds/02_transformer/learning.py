"""Stage 8 of build 02: the loss, and the gradient of every weight."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.course.checking import Case

from .pieces import BIASED, GROUPED, NAMED, ONE_LAYER, PLAIN, THEIRS, TIED, Config, Results, folder_of, ids_of, said, theirs

# Gradients are compared with the largest one of their tensor as the unit: sums of many products differ by some 1e-6 of it.


def scaled(gradients: dict[str, Any]) -> Results:
    """Gradients by their tensor's largest: 1 at most, beside the size."""
    found: Results = {}
    for name, each in gradients.items():
        if each is None:
            found[name] = "none"
            continue
        size = each.detach().abs().max().clamp(min=1e-2)  # a token that sees itself alone has a gradient of 0, or of its rounding: 2e-7
        found |= {f"gradient of {name}": (each.detach() / size).clone(), f"largest gradient of {name}": size.clone()}
    return found


def their_loss(config: Config, ids: Tensor, documents: Tensor | None) -> Tensor:
    """Each document alone through LlamaForCausalLM; all its tokens' losses together, over the number of all."""
    parts = [(row, torch.ones_like(row, dtype=torch.bool)) for row in ids] if documents is None else [
        (row, numbers == number) for row, numbers in zip(ids, documents, strict=True) for number in numbers.unique()
    ]  # fmt: skip
    total, count = torch.zeros(()), 0
    for row, own in parts:
        if (length := int(own.sum()) - 1) < 1:
            continue
        found = theirs(config)(row[own][None]).logits[0, :-1]
        total, count = total + F.cross_entropy(found, row[own][1:], reduction="sum"), count + length
    return total / count


def their_gradients(config: Config, batches: list[tuple[Tensor, Tensor | None]]) -> Results:
    model = theirs(config)
    model.zero_grad()
    losses = []
    for ids, documents in batches:
        value = their_loss(config, ids, documents)
        value.backward()
        losses.append(value.detach().clone())
    found = {"losses": torch.stack(losses)} | scaled({name: weight.grad.clone() for name, weight in model.named_parameters()})
    model.zero_grad()
    return found


def gradients_case(title: str, config: Config, *batches: tuple[Tensor, list[list[int]] | None]) -> Case:
    """Several batches: gradients add up."""
    given = [(ids, None if documents is None else torch.tensor(documents)) for ids, documents in batches]
    expected = lambda **_: their_gradients(config, given)  # noqa: E731

    def observe(adapters: Any, **_: Any) -> Results:
        model, losses = adapters.load(folder_of(config)), []
        for ids, documents in given:
            value = adapters.loss(model, ids.clone()) if documents is None else adapters.loss(model, ids.clone(), documents.clone())
            value.backward()
            losses.append(value.detach().clone())
        return {"losses": torch.stack(losses)} | scaled(adapters.gradients(model))

    shown = {"ids": [list(ids.shape) for ids, _ in batches], "documents": batches[0][1]} | said(config)
    return Case("oracle", title, lambda: shown, expected, THEIRS, observe, rtol=1e-3, atol=2e-4)


def steps_case(config: Config) -> Case:
    """Three steps of SGD, with zero_grad between them. The model is trained through its parameters, tied ones once."""
    batches = [ids_of(2, 9, seed=seed) for seed in (1, 2, 3)]

    def train(model: Any, loss: Any) -> list[Tensor]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
        for ids in batches:
            optimizer.zero_grad()
            value = loss(model, ids)
            value.backward()
            optimizer.step()
            losses.append(value.detach().clone())
        return losses

    def expected(**_: Any) -> Results:
        model = copy.deepcopy(theirs(config))
        losses = train(model, lambda model, ids: model(ids, labels=ids).loss)
        return {"losses": torch.stack(losses)} | {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def observe(adapters: Any, **_: Any) -> Results:
        model = adapters.load(folder_of(config))
        losses = train(model, adapters.loss)
        return {"losses": torch.stack(losses)} | {name: weight.detach().clone() for name, weight in adapters.state(model).items()}

    given = {"steps": 3, "optimizer": "SGD, 0.05"} | said(config)
    return Case("oracle", "three steps", lambda: given, expected, THEIRS, observe, rtol=1e-3, atol=2e-4)


UNEVEN = [[1, 1, 1, 1, 1, 2, 2, 3], [7, 8, 8, 8, 9, 9, 10, 11]]  # 5 and 3 tokens that predict
GRADIENTS = (
    gradients_case("two tokens", ONE_LAYER, (ids_of(1, 2), None)),
    *(gradients_case(title, config, (ids_of(3, 11, seed=2), None)) for title, config in NAMED.items()),
    gradients_case("documents of uneven lengths", PLAIN, (ids_of(2, 8, seed=3), UNEVEN)),
    gradients_case("documents of uneven lengths, tied", TIED, (ids_of(2, 8, seed=3), UNEVEN)),
    gradients_case("documents of one token but one", GROUPED, (ids_of(1, 5, seed=3), [[1, 2, 3, 3, 4]])),
    gradients_case("more tokens than a block has", BIASED, (ids_of(2, 101, seed=5), None)),
    gradients_case("two passes add up", GROUPED, (ids_of(2, 7, seed=6), None), (ids_of(1, 4, seed=7), None)),
    gradients_case("two passes of a tied model", TIED, (ids_of(2, 7, seed=6), None), (ids_of(1, 4, seed=7), None)),
    steps_case(TIED),
    steps_case(GROUPED),
)
