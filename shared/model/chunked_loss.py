"""Chapter 02. Chunked linear cross-entropy: head and loss over a chunk of rows at a time, so all logits are never in memory.

Logits are the largest tensor of a small model: [batch * seq, vocab] float32, and autograd keeps several of that size. The loss is a sum
over rows, so each chunk of rows can be finished, its gradient included, before the next one begins (Hsu et al. 2024, Liger Kernel).
The numbers are those of `shared.loss.next_token_objective`; the memory is that of one chunk.

What is computed from logits are the head's scores (`shared.model.embedding.TargetScores`): a head that holds a part of the vocabulary has
its own.

Left out on purpose: second derivatives. The gradient is computed once, with the loss.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from shared.devices import on_host, sent
from shared.loss import IGNORED
from shared.model.document_attention import pack_on_gpu
from shared.model.masks import Documents
from shared.totals import Batch, Totals

CHUNK = 2**21  # logits: 8 MB in float32
CHUNK_ON_GPU = 2**25  # 128 MiB: each chunk reads the head's weight and adds to its gradient, so few chunks move less memory
FEWEST_ROWS = 256  # fewer would leave the matrix multiplication of the head too thin


def packed_next_token_objective(model: nn.Module, batch: Batch) -> Totals:
    """Next-token prediction in which each document of a packed row is as if it were alone.

    Args:
        model: a decoder.
        batch: `input_ids` and `targets` [batch, seq] int64. With `documents` and `positions`, both [batch, seq] int64, the
            rows are packed; without, each row is one text.
    """
    targets = batch["targets"]
    return model(batch["input_ids"], head_fn=partial(chunked_loss, targets=targets), valid=targets != IGNORED, **apart(batch))


def apart(batch: Batch) -> dict:
    """What keeps the documents of packed rows apart, as arguments for a model; nothing where rows were not packed."""
    if "documents" not in batch:
        return {}
    return {"positions": batch["positions"], "mask": Documents(batch["documents"], pack_on_gpu(batch))}


def trained_rows(batch: Batch) -> Tensor:
    """[n] int64: the positions that have a target, in the flattened batch and on its device."""
    return sent((on_host(batch, "targets").flatten() != IGNORED).nonzero().squeeze(1), batch["targets"].device)


def chunked_loss(head: nn.Module, hidden_states: Tensor, targets: Tensor, rows: int | None = None) -> Totals:
    """Cross-entropy summed over the targets, their count, and `correct`. A tie for the likeliest token counts as correct.

    Args:
        head: a `Head`: [..., D] -> [..., vocab], with its `scores`. Called once for each chunk.
        hidden_states: [..., D].
        targets: [...] int64; a target of -100 does not count.
        rows: predictions in a chunk; None for `chunk_rows`.
    """
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    with_gradient = torch.is_grad_enabled() and (hidden_states.requires_grad or bool(parameters))
    rows = rows or chunk_rows(head.vocab_size, hidden_states.is_cuda)
    loss_sum, token_count, correct = ChunkedCrossEntropy.apply(
        hidden_states.flatten(0, -2), targets.flatten(), head, rows, with_gradient, *parameters
    )
    return Totals(loss_sum, token_count, {"correct": correct})


def token_log_probs(head: nn.Module, hidden_states: Tensor, targets: Tensor, rows: int | None = None) -> Tensor:
    """The log-probability of each target token, differentiable; the logits of a chunk are computed again in the backward pass.

    Args:
        As for `chunked_loss`.

    Returns:
        The shape of `targets`, in float32 (float64 for float64 logits); 0 where a target is -100.
    """
    rows = rows or chunk_rows(head.vocab_size, hidden_states.is_cuda)
    chunks = zip(hidden_states.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True)
    losses = [checkpoint(chunk_losses, head, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return -torch.cat(losses).view(targets.shape)


def chunk_rows(vocab_size: int, on_gpu: bool) -> int:
    """Predictions in a chunk where nobody says: as many as have 8 MB of logits in float32, on a GPU 128 MiB. It depends on nothing in which
    the cards of a run may differ, since ranks that share a vocabulary need equal chunks."""
    return max(FEWEST_ROWS, (CHUNK_ON_GPU if on_gpu else CHUNK) // vocab_size)


def chunk_losses(head: nn.Module, hidden_states: Tensor, targets: Tensor) -> Tensor:
    """[rows, D] and [rows] -> the loss of each target [rows], with the head's own gradient."""
    return TokenLosses.apply(head(hidden_states), targets, head)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The forward pass computes the gradient as well, chunk by chunk; the backward pass scales it."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, targets: Tensor, head: nn.Module, rows: int, with_gradient: bool, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums: list[Tensor] = []
        chunks = zip(hidden_states.split(rows), targets.split(rows), strict=True)
        finished = [finish_chunk(head, *chunk, with_gradient, parameters, sums) for chunk in chunks]
        *totals, hidden_gradients = zip(*finished, strict=True)
        ctx.save_for_backward(*([torch.cat(hidden_gradients)] if with_gradient else []), *sums)
        loss_sum, token_count, correct = (torch.stack(column).sum() for column in totals)
        ctx.mark_non_differentiable(token_count, correct)
        return loss_sum, token_count, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, *parameter_gradients = (gradient * upstream for gradient in ctx.saved_tensors)
        return hidden_gradient, None, None, None, None, *parameter_gradients


def finish_chunk(
    head: nn.Module, chunk: Tensor, targets: Tensor, with_gradient: bool, parameters: Sequence[Tensor], sums: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss, number of targets, how many were the likeliest, all [], and the gradient of a chunk [rows, D]. That of the head is added to
    `sums`. A function of its own: what the chunk before has computed, its gradient of the head too, is freed by now."""
    with torch.set_grad_enabled(with_gradient):
        chunk = chunk.detach().requires_grad_(with_gradient)
        logits = head(chunk)
    scores, hidden_gradient = head.scores(logits.detach(), targets), None
    if with_gradient:
        hidden_gradient, *more = torch.autograd.grad(logits, [chunk, *parameters], scores.gradient())
        sums[:] = [a.add_(b) for a, b in zip(sums, more, strict=True)] if sums else more
    return *scores.cross_entropy(), scores.count_correct(), hidden_gradient


class TokenLosses(torch.autograd.Function):
    """The `token_losses` of a head's scores, differentiated by their `gradient`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, head: nn.Module) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.head = head
        return head.scores(logits, targets).token_losses()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        return ctx.head.scores(logits, targets).gradient().mul_(upstream.unsqueeze(-1)), None, None
