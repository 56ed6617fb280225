"""Stage 9 of build 12: the clipped loss of each token, and how much a token counts."""

from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case

from .pieces import Results, case, randn, settings_of

BY_HAND = "the loss of each token, case by case"


def losses_by_hand(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, settings: Results) -> Tensor:
    """Token by token: a ratio above its bound gains nothing more where the advantage is positive, and one below it where it is negative."""
    low, high, rows = 1 - settings["clip_low"], 1 + settings["clip_high"], []
    for now, then, advantage, there in zip(log_probs, old.tolist(), advantages.tolist(), mask.tolist(), strict=True):
        places, row = [place for place, each in enumerate(there) if each], [torch.zeros((), dtype=now.dtype)] * len(there)
        ratios = {place: (now[place] - then[place]).exp() for place in places}
        if settings["level"] == "sequence":
            product = torch.stack(list(ratios.values())).prod()
            ratios = {place: product ** (1 / len(places)) for place in places}
        for place, ratio in ratios.items():
            clipped = ratio > high if advantage > 0 else ratio < low
            row[place] = -advantage * ((high if advantage > 0 else low) * torch.ones((), dtype=now.dtype) if clipped else ratio)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def with_gradients(log_probs: Tensor, old: Tensor, advantages: Tensor, found: Any) -> Results:
    losses = found(log_probs, old, advantages)
    losses.backward(randn(*losses.shape, seed=5))
    leaked = [name for name, each in (("old", old), ("advantages", advantages)) if each.grad is not None and bool(each.grad.any())]
    return {"losses": losses.detach().clone(), "gradient of log_probs": log_probs.grad.clone(), "gradients flow to": leaked}


def losses_case(
    title: str, lengths: list[int], apart: float, seed: int = 0, empty: tuple[float, float] = (0.0, 0.0), **changes: Any
) -> Case:
    """apart: how far log_probs are from old. empty: what both hold where there is no token."""
    settings, mask = settings_of(**changes), torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    old = -randn(*mask.shape, seed=seed).abs()
    log_probs, advantages = (old + apart * randn(*mask.shape, seed=seed + 1)), randn(len(lengths), seed=seed + 2)

    def leaves() -> tuple[Tensor, Tensor, Tensor]:
        both = (each.where(mask, value) for each, value in zip((log_probs, old), empty, strict=True))
        return tuple(each.clone().requires_grad_() for each in (*both, advantages))

    def expected() -> Results:
        return with_gradients(*leaves(), lambda *three: losses_by_hand(*three, mask, settings))

    def observe(adapters: Any) -> Results:
        return with_gradients(*leaves(), lambda *three: adapters.token_losses(*three, mask.clone(), dict(settings)))

    given = {"tokens of the answers": lengths, "elsewhere": empty, **{key: settings[key] for key in ("level", "clip_low", "clip_high")}}
    return case(title, given, expected, observe, BY_HAND)


def worked_case(level: str, ratios: list[list[float]], advantages: list[float], losses: list[list[float]]) -> Case:
    """Ratios of tokens, clipped to 0.8 and 1.28."""

    def observe(adapters: Any) -> Results:
        log_probs = torch.tensor(ratios, dtype=torch.float64).log()
        mask = torch.ones_like(log_probs, dtype=torch.bool)
        given = log_probs, torch.zeros_like(log_probs), torch.tensor(advantages, dtype=torch.float64), mask, settings_of(level=level)
        return {"losses": adapters.token_losses(*given)}

    expected = lambda: {"losses": torch.tensor(losses, dtype=torch.float64)}  # noqa: E731
    given = {"ratios": ratios, "advantages": advantages, "level": level, "clip_low": 0.2, "clip_high": 0.28}
    return case(f"ratios of a {level}", given, expected, observe, 9, rung="worked example")


def weights_case(title: str, lengths: list[int], aggregation: str, limit: int = 9, **more: Any) -> Case:
    settings = settings_of(aggregation=aggregation, limit=limit)

    def expected() -> Results:
        """From the gradient of the loss that the text names, by a loss for each token."""
        losses = [torch.zeros(length, dtype=torch.float64, requires_grad=True) for length in lengths]
        if aggregation == "token":
            loss = torch.cat(losses).mean()
        elif aggregation == "sequence":
            loss = torch.stack([each.mean() for each in losses]).mean()
        else:
            loss = torch.cat(losses).sum() / (limit * len(lengths))
        return {"weights": torch.stack([each[0] for each in torch.autograd.grad(loss, losses)])}

    observe = lambda adapters: {"weights": adapters.token_weights(list(lengths), dict(settings))}  # noqa: E731
    given = {"lengths": lengths, "aggregation": aggregation, "limit": limit}
    return case(title, given, expected, observe, "the mean that the text names, differentiated", **more)


NAN, INF = float("nan"), float("inf")

LOSS = (
    worked_case("token", [[2.0, 0.5, 1.0], [2.0, 0.5, 1.1]], [1.0, -1.0], [[-1.28, -0.5, -1.0], [2.0, 0.8, 1.1]]),
    worked_case("sequence", [[2.0, 0.5], [4.0, 1.0]], [1.0, 1.0], [[-1.0, -1.0], [-1.28, -1.28]]),
    losses_case("before the first step", [3, 3], 0.0),
    losses_case("after some steps", [4, 4, 4, 4], 0.3),
    losses_case("answers of several lengths", [4, 1, 6, 2, 5], 0.3, seed=10),
    losses_case("other bounds", [4, 1, 6, 2, 5], 0.5, seed=20, clip_low=0.05, clip_high=0.5),
    losses_case("ratios of answers", [4, 1, 6, 2, 5], 0.3, seed=30, level="sequence"),
    losses_case("ratios of answers, narrow bounds", [4, 1, 6, 2, 5], 0.1, seed=40, level="sequence", clip_low=3e-3, clip_high=4e-3),
    losses_case("NaN where there is no token", [4, 1, 6], 0.3, seed=50, empty=(NAN, NAN)),
    losses_case("infinity where there is no token", [4, 1, 6], 0.3, seed=60, empty=(INF, 0.0)),
    losses_case("ratios of answers, -inf where there is no token", [4, 1, 6], 0.3, seed=70, empty=(-INF, -INF), level="sequence"),
    weights_case("tokens alike", [4, 1, 6], "token", rung="worked example"),
    weights_case("answers alike", [4, 1, 6], "sequence", rung="worked example"),
    weights_case("a constant", [4, 1, 6], "constant", rung="worked example"),
    weights_case("another constant", [2, 2, 5, 1], "constant", limit=100),
    weights_case("one answer", [7], "sequence"),
)
