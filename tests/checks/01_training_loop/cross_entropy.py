"""Check of 01.cross_entropy. Oracle: torch.nn.functional.cross_entropy(reduction="sum").

Tolerance: both sides compute in the same precision with one reduction; float32 sums of a few hundred terms agree to 1e-6,
float64 ones to 1e-12.
"""

import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check


def problem(*shape: int, vocab: int, dtype=torch.float64, ignored: int = 0, scale: float = 1.0):
    """Random logits and targets, the same at each call; the first `ignored` targets are -100."""

    def given():
        generator = torch.Generator().manual_seed(vocab)
        logits = torch.randn(*shape, vocab, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
        targets = torch.randint(vocab, shape, generator=generator)
        targets.view(-1)[:ignored] = -100
        return {"logits": logits, "targets": targets}

    return given


def by_torch(logits, targets):
    exact = logits if logits.dtype == torch.float64 else logits.float()
    loss_sum = F.cross_entropy(exact.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-100)
    return {"loss_sum": loss_sum, "token_count": (targets != -100).sum()}


def gradient(function, logits, targets):
    """The gradient that flows back to the logits when the loss is worth a random amount more."""
    leaf = logits.clone().requires_grad_()
    loss_sum, _ = function(leaf, targets)
    (loss_sum * 1.7).backward()
    return {"gradient of 1.7 * loss_sum": leaf.grad}


def gradient_by_torch(logits, targets):
    return gradient(lambda z, t: tuple(by_torch(z, t).values()), logits, targets)


ORACLE = 'torch.nn.functional.cross_entropy(..., reduction="sum")'

CHECK = Check(
    exercise="01.cross_entropy",
    outputs=("loss_sum", "token_count"),
    spoilt=("loss_sum", "token_count"),
    forbidden=("cross_entropy", "nll_loss"),
    cases=[
        Case(
            "worked example", "two targets among four equally likely tokens cost 2 * log(4)",
            given=lambda: {"logits": torch.zeros(2, 4), "targets": torch.tensor([0, 3])},
            expected=lambda logits, targets: {"loss_sum": torch.tensor(2.7725887), "token_count": torch.tensor(2)},
            source="arithmetic: 2 * log(4) = 2.7725887",
        ),
        Case("oracle", "float64", problem(3, vocab=5), by_torch, ORACLE, rtol=1e-12),
        Case("oracle", "gradient", problem(3, vocab=5, ignored=1), gradient_by_torch, ORACLE, observe=gradient, rtol=1e-12),
    ],
)
