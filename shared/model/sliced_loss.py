"""Chapter 02. Next-token prediction without ever holding all logits: the head and the loss, a slice of rows at a time.

Logits are the largest tensor of a small model: [batch * seq, vocab] float32, and autograd keeps several of that size. The
loss is a sum over rows, so each slice of rows can be finished, its gradient included, before the next one begins. That of
cross-entropy is known: the probabilities, less 1 at the target. The numbers are those of
`shared.loss.next_token_objective`; the memory is that of one slice (Hsu et al. 2024, Liger Kernel).

Left out on purpose: derivatives of the gradient. It is computed once, with the loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shared.loss import IGNORED, cross_entropy
from shared.totals import Totals

SLICE = 2**21  # logits: 8 MB in float32
FEWEST_ROWS = 256  # fewer would leave the matrix multiplication of the head too thin


def sliced_next_token_objective(model: nn.Module, batch: dict[str, Tensor], rows: int | None = None) -> Totals:
    """`next_token_objective` with the memory of `rows` rows of logits. A tie for the likeliest token counts as `correct`.

    Args:
        model: a `TransformerModel`.
        batch: `input_ids` and `targets`, both [batch, seq] int64; a target of -100 does not count.
        rows: predictions in a slice; None for about two million logits.
    """
    return model(batch["input_ids"], read_out=partial(sliced_loss, targets=batch["targets"], rows=rows))


def sliced_loss(head: nn.Module, stream: Tensor, targets: Tensor, rows: int | None = None) -> Totals:
    """Loss sum, token count and `correct` of head(stream) against the targets.

    Args:
        head: [..., D] -> [..., vocab], with an attribute `vocab_size`. Called once for each slice.
        stream: [batch, seq, D].
        targets: [batch, seq] int64.
        rows: predictions in a slice; None for about two million logits.
    """
    rows = rows or max(FEWEST_ROWS, SLICE // head.vocab_size)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    wanted = torch.is_grad_enabled() and (stream.requires_grad or bool(parameters))
    loss_sum, token_count, correct = LossInSlices.apply(stream.flatten(0, -2), targets.flatten(), head, rows, wanted, *parameters)
    return Totals(loss_sum, token_count, {"correct": correct})


class LossInSlices(torch.autograd.Function):
    """The forward pass computes the gradient as well, slice by slice; the backward pass hands it on."""

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], rows: int, wanted: bool, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        totals, of_stream = [], []
        of_parameters: list[Tensor] = []
        for piece, its_targets in zip(stream.split(rows), targets.split(rows), strict=True):
            with torch.set_grad_enabled(wanted):
                piece = piece.detach().requires_grad_(wanted)
                logits = head(piece)
            if wanted:
                of_logits = cross_entropy_gradient(logits.detach(), its_targets)
                of_piece, *more = torch.autograd.grad(logits, [piece, *parameters], of_logits)
                of_stream.append(of_piece)
                of_parameters = [total.add_(part) for total, part in zip(of_parameters, more, strict=True)] if of_parameters else more
            loss_sum, token_count = cross_entropy(logits.detach(), its_targets)
            totals.append((loss_sum, token_count, guessed_right(logits.detach(), its_targets)))
        ctx.save_for_backward(*([torch.cat(of_stream)] if wanted else []), *of_parameters)
        loss_sum, token_count, correct = (torch.stack(column).sum() for column in zip(*totals, strict=True))
        ctx.mark_non_differentiable(token_count, correct)
        return loss_sum, token_count, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        of_stream, *of_parameters = (gradient * upstream for gradient in ctx.saved_tensors)
        return of_stream, None, None, None, None, *of_parameters


def cross_entropy_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the summed cross-entropy: softmax(logits) - one_hot(target), and 0 where a target does not count.

    Args:
        logits: [rows, vocab].
        targets: [rows] int64, or -100.

    Returns:
        [rows, vocab] in the dtype of `logits`, computed in float32 at least.
    """
    gradient = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    counted = (targets != IGNORED).unsqueeze(-1)
    gradient.scatter_add_(-1, targets.unsqueeze(-1).where(counted, 0), -counted.to(gradient.dtype))
    return gradient.mul_(counted).to(logits.dtype)


def guessed_right(logits: Tensor, targets: Tensor) -> Tensor:
    """How many targets had the largest logit. [rows, vocab] and [rows] -> []."""
    counted = targets != IGNORED
    of_targets = logits.gather(-1, targets.where(counted, 0).unsqueeze(-1)).squeeze(-1)
    return (counted & (of_targets == logits.amax(dim=-1))).sum()
