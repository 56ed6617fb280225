"""Stage 4 of build 10: steps with any optimizer, dropout, and what is not trained."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.checking import Case
from shared.course.comparing import Said

from .pieces import DENSE, NEAR, TEXT, Config, Dense, Net, Results, config_of, dropping, made, put, randn, sequence, state_of, values_of

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "SGD with momentum and weight decay": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.3),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.05),
}
LAYERS = ["layers.0.q_proj", "layers.1.q_proj", "head"]


def squared_error(y: Tensor, targets: Tensor) -> Tensor:
    return (y - targets).square().sum()


def batches_of(sizes: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [(randn(size, 5, seed=seed + 2 * number), randn(size, 4, seed=seed + 2 * number + 1)) for number, size in enumerate(sizes)]


def steps_case(title: str, sizes: list[list[int]], optimizer: str = "SGD", config: Config | None = None) -> Case:
    """sizes: of each step's micro-batches. Loss, gradients and factors after each step, and the base after all."""
    config = config or config_of(["q_proj", "head"], r=3)

    def results(held: dict[str, Tensor], step: Callable, base: Callable[[], Results]) -> Results:
        made_optimizer, found = OPTIMIZERS[optimizer](list(held.values())), {}
        for number, own in enumerate(sizes):
            found[f"loss {number}"] = step(made_optimizer, batches_of(own, seed=11 * number))
            for name, factor in held.items():
                gradient = Said("nothing") if factor.grad is None else factor.grad.detach().clone()
                found |= {f"gradient of {name}, step {number}": gradient, f"{name} after step {number}": factor.detach().clone()}
        return found | {f"base: {name}": value for name, value in base().items()}

    def expected(**_: Any) -> Results:
        oracle = Dense(made(Net), config, values_of(made(Net), LAYERS, config))

        def step(optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
            optimizer.zero_grad()
            y, targets = oracle.run(torch.cat([x for x, _ in batches])), torch.cat([targets for _, targets in batches])
            loss = squared_error(y, targets) / len(targets)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return results(oracle.factors, step, lambda: state_of(made(Net)))

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(Net), "default", dict(config), 0)
        held = put(adapters, adapted, "default", values_of(made(Net), LAYERS, config))
        step = lambda optimizer, batches: torch.as_tensor(adapters.step(adapted, optimizer, batches, squared_error))  # noqa: E731
        base = lambda: {name: weight.detach().clone() for name, weight in dict(adapters.weights(adapted)).items()}  # noqa: E731
        return results(held, step, base)

    given = {"model": "Net", "sizes of each step's micro-batches": sizes, "optimizer": optimizer, **config}
    return Case("oracle", title, lambda: given, expected, DENSE, observe, **NEAR)


def graph_case() -> Case:
    """The loss that comes back keeps no graph alive."""

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(sequence), "default", config_of(["0"]), 0)
        optimizer = torch.optim.SGD(list(dict(adapters.factors(adapted, "default")).values()), lr=0.1)
        loss = adapters.step(adapted, optimizer, batches_of([2]), squared_error)
        return {"the loss": "has a graph" if getattr(loss, "requires_grad", False) else "has no graph"}

    expected = lambda **_: {"the loss": "has no graph"}  # noqa: E731
    return Case("property", "the loss without its graph", lambda: {"model": "sequence"}, expected, TEXT.format(4), observe)


def dropout_case() -> Case:
    """A and B are identities, and W has 0.5 everywhere: y shows which inputs of the addition are left, and by what they were multiplied."""
    size, tokens, dropout = 16, 64, 0.25
    config = config_of(["0"], r=size, alpha=2 * size, dropout=dropout)  # s = 2

    def said(y: Tensor) -> Results:
        additions = (y - 0.5 * size) / 2
        zeroed, left = additions.abs() < 1e-9, (additions - 1 / (1 - dropout)).abs() < 1e-9
        kinds = "0 or x / (1 - p)" if (zeroed | left).all() else f"also {additions[~(zeroed | left)][0].item():.4g} x"
        rows = "for each token" if len({tuple(row) for row in zeroed.tolist()}) > tokens // 2 else "for all tokens"
        share = zeroed.double().mean().item()
        return {
            "input of the addition": kinds,
            "share of zeros": "about p" if abs(share - dropout) < 0.06 else f"{share:.2f}",
            "drawn": rows if zeroed.any() else "never",
        }

    def expected(**_: Any) -> Results:
        found = {"input of the addition": "0 or x / (1 - p)", "share of zeros": "about p", "drawn": "for each token"}
        return found | {"two micro-batches": "two draws", "outside of a step": torch.full((2, size), 0.5 * size + 2).double()}

    def observe(adapters: Any, **_: Any) -> Results:
        model = nn.Sequential(nn.Linear(size, size, bias=False)).double()
        nn.init.constant_(model[0].weight, 0.5)
        adapted = adapters.attach(model, "default", dict(config), 0)
        eye = torch.eye(size).double()
        held, seen = put(adapters, adapted, "default", {"0.lora_A": eye, "0.lora_B": eye}), []

        def loss(y: Tensor, targets: Tensor) -> Tensor:
            seen.append(y.detach().clone())
            return (y * 0).sum()

        optimizer = torch.optim.SGD(list(held.values()), lr=0.0)
        adapters.run(adapted, torch.ones(2, size).double())
        adapters.step(adapted, optimizer, [(torch.ones(tokens, size).double(), torch.ones(tokens))] * 2, loss)
        calm = adapters.run(adapted, torch.ones(2, size).double()).detach()
        draws = "two draws" if not torch.equal(seen[0], seen[1]) else "one draw"
        return said(seen[0]) | {"two micro-batches": draws, "outside of a step": calm}

    given = {"W": "0.5 everywhere, [16, 16]", "A and B": "identities", "s": 2.0, "x": "1 everywhere", "lora_dropout p": dropout}
    return Case("property", "dropout", lambda: given, expected, TEXT.format(4), observe, **NEAR)


def mode_case() -> Case:
    """The model's own dropout of everything is on in a step, and off in a call."""

    def observe(adapters: Any, **_: Any) -> Results:
        model, seen, x = made(dropping), [], randn(2, 5)
        bias = model[2].bias.detach().clone()
        adapted = adapters.attach(model, "default", config_of(["0"]), 0)
        held = put(adapters, adapted, "default", values_of(made(dropping), ["0"], config_of(["0"])))

        def loss(y: Tensor, targets: Tensor) -> Tensor:
            seen.append(y.detach().clone())
            return squared_error(y, targets)

        found = {}
        for number in range(2):
            dropped = torch.equal(adapters.run(adapted, x).detach(), bias.expand(2, 4))
            found[f"call {number}"] = f"its dropout is {'on' if dropped else 'off'}"
            adapters.step(adapted, torch.optim.SGD(list(held.values()), lr=0.1), [(x, randn(2, 4))], loss)
            found[f"step {number}"] = f"its dropout is {'on' if torch.equal(seen[-1], bias.expand(2, 4)) else 'off'}"
        return found

    modes = {"call": "its dropout is off", "step": "its dropout is on"}
    expected = lambda **_: {f"{what} {number}": mode for number in range(2) for what, mode in modes.items()}  # noqa: E731
    return Case("property", "the model's own dropout", lambda: {"model": "Linear, Dropout(1.0), Linear"}, expected, TEXT.format(4), observe)


TRAIN = (
    steps_case("one step, one micro-batch", [[3]]),
    steps_case("micro-batches of several sizes", [[1, 4, 2]]),
    steps_case("each step has gradients of its own", [[2, 3], [4]]),
    steps_case("momentum and weight decay", [[2, 3], [4], [1, 1]], "SGD with momentum and weight decay"),
    steps_case("AdamW, rank-stabilized", [[3], [2, 2]], "AdamW", config_of(["q_proj", "head"], r=3, alpha=2, rslora=True)),
    steps_case("Adagrad", [[3], [2, 2]], "Adagrad"),
    graph_case(),
    dropout_case(),
    mode_case(),
)
