"""Chapter 10. Loss mask of a chat: which tokens of a rendered conversation are trained, from the spans of its assistant's answers.

A chat template turns messages into one text. A model should learn to write the assistant's answers and the token that ends each; what the
system, the user and the template itself say is only read. So the loss is taken on some tokens, and the others become -100.
"""

from collections.abc import Sequence

from torch import Tensor

from shared.course.binding import exercise


@exercise("10.assistant_mask")
def assistant_mask(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> Tensor:
    """Mark the tokens of a rendered chat that are trained: those with a character of an assistant's answer.

    An answer's span holds its content and the end token that the template writes after it. It does not hold the words before it
    ("<|im_start|>assistant" and a newline), nor whatever the template writes after the end token.

    Args:
        offsets: for each token the characters of the rendered text that it stands for: start and stop, in the order of the text. Tokens
            that are pieces of one character all have its start and stop. A token that stands for no text has start = stop, often (0, 0)
            wherever it is, and is never trained.
        answers: the characters of each answer: start and stop, in order, not overlapping; an empty one has start = stop. There may be
            none.

    Returns:
        [tokens] bool: True for each token that has at least one character within an answer, even if it has others outside.

    >>> assistant_mask([(0, 3), (3, 7), (7, 7), (7, 9), (9, 12)], answers=[(6, 9)])
    tensor([False,  True, False,  True, False])
    """
