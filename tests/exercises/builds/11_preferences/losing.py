"""Stages 6 and 7 of build 11: DPO's loss and its relatives, against functions of PyTorch that are none of log sigmoid."""

from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.course.comparing import Said

from .pieces import NEAR, TEXT, Results, pair_losses, randn, settings_of

TORCH = "cross-entropies, mean squares, margins and logits of PyTorch, in float64"
TOKENS = torch.tensor([[3, 5], [7, 2], [1, 1], [4, 9], [6, 4]])


def numbers(seed: int, scale: float = 4.0) -> Tensor:
    """Log-probabilities [5, 2], below 0."""
    return -scale * randn(5, 2, seed=seed).abs() - 0.1


def graded(loss: Tensor, policy: Tensor, reference: Tensor | None) -> Results:
    upstream = randn(*loss.shape, seed=9).to(loss.dtype)
    leaves = [policy] if reference is None else [policy, reference]
    found = torch.autograd.grad(loss, leaves, upstream, allow_unused=True)
    nothing = len(found) < 2 or found[1] is None or not found[1].any()
    has = {"gradient of the reference": Said("nothing" if nothing else "some")} if reference is not None else {}
    return {"loss": loss.detach().clone(), "gradient of the policy": found[0]} | has


# Stage 6: loss


def dpo_case(title: str, policy: Tensor, reference: Tensor, beta: float, smoothing: float, **tolerance: float) -> Case:
    def leaves() -> tuple[Tensor, Tensor]:
        return policy.clone().requires_grad_(), reference.clone().requires_grad_()

    def expected(**_: Any) -> Results:
        own, other = leaves()
        return graded(pair_losses(settings_of("sigmoid", beta, smoothing), own, other, TOKENS), own, other)

    def observe(adapters: Any, **_: Any) -> Results:
        own, other = leaves()
        return graded(adapters.dpo(own, other, beta, smoothing), own, other)

    given = {"policy": policy, "reference": reference, "beta": beta, "label_smoothing": smoothing}
    return Case("oracle", title, lambda: given, expected, TORCH, observe, **tolerance or NEAR)


def worked_case(title: str, policy: list[list[float]], reference: list[list[float]], beta: float, wanted: list[float]) -> Case:
    own, other = (torch.tensor(values, dtype=torch.float64) for values in (policy, reference))
    observe = lambda adapters, **_: {"loss": adapters.dpo(own.clone(), other.clone(), beta, 0.0).detach()}  # noqa: E731
    given = {"policy": own, "reference": other, "beta": beta, "label_smoothing": 0.0}
    expected = lambda **_: {"loss": torch.tensor(wanted, dtype=torch.float64)}  # noqa: E731
    return Case("worked example", title, lambda: given, expected, TEXT.format(6), observe, rtol=1e-9)


FAR = torch.tensor([[-10.0, -6000.0], [-6000.0, -10.0], [-5000.0, -5000.0]], dtype=torch.float64)
ZEROS = torch.zeros(3, 2, dtype=torch.float64)

LOSS = (
    worked_case("the model is the reference: log 2", [[-10, -30]], [[-10, -30]], 0.1, [0.6931471805599453]),
    worked_case("d is 2, and -2", [[-10, -30], [-30, -10]], [[-20, -20], [-20, -20]], 0.1, [0.1269280110429725, 2.1269280110429727]),
    dpo_case("five pairs", numbers(1), numbers(2), 0.3, 0.0),
    dpo_case("another beta", numbers(1), numbers(2), 2.0, 0.0),
    dpo_case("label smoothing", numbers(1), numbers(2), 0.3, 0.2),
    dpo_case("differences of thousands", FAR, ZEROS, 1.0, 0.0),
    dpo_case("differences of thousands, smoothed", FAR, ZEROS, 1.0, 0.1),
    dpo_case("in float32", numbers(1).float(), numbers(2).float(), 0.3, 0.1, rtol=1e-5, atol=1e-5),
)

# Stage 7: relatives


def relative_case(
    title: str, settings: Results, policy: Tensor, reference: Tensor | None, tokens: Tensor = TOKENS, **tolerance: float
) -> Case:
    def leaves() -> tuple[Tensor, Tensor | None]:
        return policy.clone().requires_grad_(), None if reference is None else reference.clone().requires_grad_()

    def expected(**_: Any) -> Results:
        own, other = leaves()
        return graded(pair_losses(settings, own, other, tokens), own, other)

    def observe(adapters: Any, **_: Any) -> Results:
        own, other = leaves()
        return graded(adapters.losses(dict(settings), own, other, tokens.clone()), own, other)

    given = {**settings, "policy": policy, "reference": reference, "tokens": tokens}
    return Case("oracle", title, lambda: given, expected, TORCH, observe, **tolerance or NEAR)


def likely_case() -> Case:
    """Answers of one token with P = exp(-x). 1 - P is x, but for a part in 1e12, so the odds need no subtraction."""
    policy = torch.tensor([[-1.3e-12, -2.9e-12]], dtype=torch.float64)
    one = torch.ones(1, 2, dtype=torch.int64)
    loss = 0.5 * torch.log1p(torch.tensor(1.3 / 2.9, dtype=torch.float64))  # -log sigmoid(log k) = log(1 + 1 / k)

    def observe(adapters: Any, **_: Any) -> Results:
        return {"loss": adapters.losses(settings_of("orpo", 0.5), policy.clone(), None, one).detach()}

    given = {**settings_of("orpo", 0.5), "policy": policy, "tokens": one}
    expected = lambda **_: {"loss": loss[None]}  # noqa: E731
    source = "the first term of 1 - exp(-x) = x - x^2 / 2 + ..."
    return Case("property", "ORPO: answers that are nearly certain", lambda: given, expected, source, observe, rtol=1e-9)


RELATIVES = (
    relative_case("sigmoid, smoothed", settings_of("sigmoid", 0.3, 0.2), numbers(1), numbers(2)),
    relative_case("hinge", settings_of("hinge", 0.3), numbers(1), numbers(2)),
    relative_case("hinge, another beta", settings_of("hinge", 0.7), numbers(3), numbers(4)),
    relative_case("IPO", settings_of("ipo", 0.3), numbers(1), numbers(2)),
    relative_case("IPO, another beta", settings_of("ipo", 1.5), numbers(3), numbers(4)),
    relative_case("SimPO", settings_of("simpo", 2.0), numbers(1), None),
    relative_case("SimPO with a margin", settings_of("simpo", 2.0, gamma=0.7), numbers(3), None),
    relative_case("SimPO, differences of thousands", settings_of("simpo", 2.0), FAR, None, torch.ones(3, 2, dtype=torch.int64)),
    relative_case("ORPO", settings_of("orpo", 0.3), numbers(1), None),
    relative_case("ORPO, another beta", settings_of("orpo", 1.5), numbers(3, 20.0), None),
    likely_case(),
    relative_case("in float32", settings_of("simpo", 2.0, gamma=0.3), numbers(1).float(), None, rtol=1e-5, atol=1e-5),
)
