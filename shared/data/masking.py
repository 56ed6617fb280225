"""Chapter 03. Masked language modelling (MLM), BERT's task: hide some tokens, and predict them from both sides.

15 % of the tokens are chosen. Of these, 80 % are replaced by the mask token, 10 % by a random token and 10 % stay as they are
(Devlin et al. 2019, section 3.1), so that the model, which never meets a mask token in use, cannot trust any token to be right.

The random draws are arguments, so the rule itself is a plain function. Each token is chosen by itself, so the number of chosen
ones varies from row to row; BERT's own code took a fixed number of each row.

Left out on purpose: whole-word masking, and BERT's second task (which of two sentences comes next), which later models dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from shared.course.binding import exercise
from shared.course.bounds import Share, checked
from shared.data.packing import PADDING
from shared.totals import Batch


@exercise("03.mask_tokens")
def mask_tokens(
    input_ids: Tensor, special: Tensor, selection: Tensor, fate: Tensor, replacements: Tensor, mask_id: int, rate: float = 0.15
) -> tuple[Tensor, Tensor]:
    """Hide a share of the tokens and ask for them (Devlin et al. 2019, section 3.1).

    A token that is not special is chosen where its selection is below `rate`. What becomes of a chosen one, its fate says:

        fate < 0.8           mask_id
        0.8 <= fate < 0.9    the token of `replacements` at its place
        0.9 <= fate          it stays as it is, and must be predicted all the same

    Args:
        input_ids: [batch, seq] int64. Left unchanged.
        special: [batch, seq] bool, True for tokens that are never chosen: padding, end tokens.
        selection, fate: [batch, seq] float, drawn uniformly from [0, 1).
        replacements: [batch, seq] int64, random token ids.
        mask_id: the mask token.
        rate: the share of the tokens that is chosen.

    Returns:
        Two new tensors, which share no memory with the arguments:
        inputs: [batch, seq] int64, what the model sees.
        targets: [batch, seq] int64, the original token where one was chosen, -100 elsewhere.

    >>> ids, special = torch.tensor([[11, 12, 13, 14, 0]]), torch.tensor([[False, False, False, False, True]])
    >>> selection, fate = torch.tensor([[0.1, 0.1, 0.1, 0.5, 0.1]]), torch.tensor([[0.3, 0.85, 0.95, 0.3, 0.3]])
    >>> mask_tokens(ids, special, selection, fate, torch.full((1, 5), 99), mask_id=3)
    (tensor([[ 3, 99, 13, 14,  0]]), tensor([[  11,   12,   13, -100, -100]]))
    """


@dataclass(frozen=True)
@checked
class Masking:
    """Turns packed batches into BERT's task: `task(batch, generator) -> batch`, with new random samples each time.

    Args:
        mask_id: the mask token.
        special_ids: tokens that are neither hidden nor put in place of another.
        vocab_size: random tokens are drawn from 0 .. vocab_size - 1, without the special ones and the mask token.
        rate: the share of the tokens that is chosen.
    """

    mask_id: int
    special_ids: Sequence[int]
    vocab_size: int
    rate: Share = 0.15

    def __post_init__(self) -> None:
        if not len(self.ordinary()):
            raise ValueError(f"All {self.vocab_size} tokens are special: there is none to put in place of another.")

    def ordinary(self) -> Tensor:
        """[tokens] int64: the ids that are not special."""
        kept = torch.ones(self.vocab_size, dtype=torch.bool)
        kept[[*self.special_ids, self.mask_id]] = False
        return kept.nonzero().squeeze(1)

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        """Args:
            batch: `input_ids` [batch, seq] int64 and, where rows were packed, `documents` and `positions`. Its `targets`,
                the next tokens, are not looked at.
            generator: on the CPU.

        Returns:
            The batch with other `input_ids` and `targets`.
        """
        input_ids = batch["input_ids"]
        special = torch.isin(input_ids, torch.tensor([*self.special_ids, self.mask_id]))
        if "documents" in batch:
            special |= batch["documents"] == PADDING
        selection, fate = torch.rand(2, *input_ids.shape, generator=generator)
        ordinary = self.ordinary()
        replacements = ordinary[torch.randint(len(ordinary), input_ids.shape, generator=generator)]
        inputs, targets = mask_tokens(input_ids, special, selection, fate, replacements, self.mask_id, self.rate)
        return batch | {"input_ids": inputs, "targets": targets}
