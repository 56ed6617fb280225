"""Chapter 11. Sequence log-probabilities: the log-probability of each whole answer, which preference losses compare.

A model gives each token the logarithm of its probability after the tokens before it. The probability of an answer is the product of its
tokens' probabilities, so its logarithm is their sum. Rows are packed (chapter 03): one row holds several answers, told apart by
`documents`.
"""

from functools import partial

import torch
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.loss import IGNORED
from shared.model.chunked_loss import apart, token_log_probs, trained_rows
from shared.sampling import evaluating
from shared.totals import Batch


@exercise("11.sequence_log_probs")
def sequence_log_probs(token_log_probs: Tensor, counted: Tensor, documents: Tensor, count: int) -> Tensor:
    """Add up the log-probabilities of the tokens of each sequence in packed rows: sums, not means.

        sums[b, n] = sum of token_log_probs[b, s] over the counted positions s with documents[b, s] = n

    Args:
        token_log_probs: [batch, seq], any float dtype. A position that does not count may hold anything, also -inf or NaN, and gets a
            gradient of 0. Left unchanged.
        counted: [batch, seq] bool, the positions whose target belongs to an answer: prompts and padding do not count.
        documents: [batch, seq] int64, which sequence of its row a position belongs to; -1 for padding, where `counted` is False.
        count: how many sequences a row is given room for, more than any number in `documents`; it may be as large as seq.

    Returns:
        [batch, count] in float32 (float64 for float64 input), added up in that dtype; 0 for a sequence without counted positions, -inf for
        one in which a position that counts is -inf. Computed for all sequences at once, without a tensor [batch, seq, count].

    >>> token_log_probs = torch.tensor([[-9.0, -1.0, -2.0, -9.0, -4.0, float("-inf")]])
    >>> counted = torch.tensor([[False, True, True, False, True, False]])
    >>> sequence_log_probs(token_log_probs, counted, torch.tensor([[0, 0, 0, 1, 1, -1]]), count=3)
    tensor([[-3., -4.,  0.]])
    """


def answer_log_probs(head: nn.Module, hidden_states: Tensor, batch: Batch) -> Tensor:
    """The log-probability of each target of an answer, differentiable: what `head_fn` returns where a loss needs log-probabilities.

    Rows without a target are left out before the head, as in chapter 10: most tokens of a pair are the prompt's, read twice.

    Args:
        head: the model's, or a tensor-parallel rank's.
        hidden_states: [rows, seq, D].
        batch: with `targets` [rows, seq] int64; -100 where a token does not count.

    Returns:
        [rows, seq] in float32 (float64 for float64 logits); 0 where a target is -100.
    """
    targets, counted = batch["targets"], trained_rows(batch)
    flat = targets.flatten()
    found = token_log_probs(head, hidden_states.flatten(0, -2).index_select(0, counted), flat[counted])
    return found.new_zeros(flat.shape).index_copy(0, counted, found).view(targets.shape)


def token_shares(targets: Tensor, documents: Tensor, together: int) -> Tensor:
    """What each target weighs where the tokens of a pair weigh 1 together: `valid` for a model, whose router losses are sums over tokens,
    under an objective that counts pairs.

    Args:
        targets, documents: [rows, seq], of packed rows.
        together: documents that count as one: 2 for pairs, 1 for single answers.

    Returns:
        [rows, seq] float32; 0 where there is no target.
    """
    counted, which = targets != IGNORED, documents.clamp(min=0) // together
    counts = torch.zeros(targets.shape, device=targets.device).scatter_add_(1, which, counted.float())
    return counted / counts.gather(1, which).clamp(min=1)


@torch.no_grad()
def score_answers(model: nn.Module, batch: Batch) -> Tensor:
    """The log-probabilities of a batch's targets under a model, without gradient and with dropout off.

    Args:
        model: any decoder, in any layout: what objectives call. Every rank calls it equally often. Left in the mode in which it was.
        batch: packed rows; see `shared.preference.dpo.PreferenceObjective`. On the model's device.

    Returns:
        [rows, seq], as `answer_log_probs` gives them.
    """
    with evaluating(model):
        return model(batch["input_ids"], head_fn=partial(answer_log_probs, batch=batch), **apart(batch))
