"""Chapter 01. Cross-entropy, the loss of a language model: how surprised it was by what came next.

For logits z and target t, the loss is -log softmax(z)_t = logsumexp(z) - z_t, in nats. An objective turns a model and
a batch into `Totals`; this one is next-token prediction. Later chapters bring other objectives and leave this alone.
"""

from torch import Tensor, nn

from shared.course.binding import exercise
from shared.course.errors import CourseError
from shared.totals import Totals

IGNORED = -100  # a target that is not counted: padding, a prompt, the far side of a document border


@exercise("01.cross_entropy")
def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of next-token predictions, and how many targets it sums over.

    A target t with logits z costs -log(softmax(z)[t]) nats. A target of -100 costs nothing and is not counted.
    The check refuses torch's own `cross_entropy` and `nll_loss`, which are what is written here.

    Args:
        logits: [..., vocab], any floating dtype. Half-precision logits are computed with in float32.
        targets: [...] int64, token ids in 0..vocab-1, or -100.

    Returns:
        loss_sum: [] float32 (float64 for float64 logits), nats. It carries the gradient to `logits`.
        token_count: [] int64.

    Logits as large as 10,000 must give a finite loss.

    >>> logits = torch.zeros(3, 4)                      # three predictions, four tokens equally likely
    >>> loss_sum, token_count = cross_entropy(logits, torch.tensor([0, 3, -100]))
    >>> loss_sum, token_count                           # 2 * log(4)
    (tensor(2.7726), tensor(2))
    """


def next_token_objective(model: nn.Module, batch: dict[str, Tensor]) -> Totals:
    """Next-token prediction. The metric `correct` counts the targets that were the likeliest token.

    Args:
        model: maps `input_ids` [batch, seq] to logits [batch, seq, vocab].
        batch: `input_ids` and `targets`, both [batch, seq] int64; targets[b, s] is the token that follows
            input_ids[b, s], or -100.

    Any classifier fits: `input_ids` is what it is called with, and `targets` are classes.

    Raises:
        CourseError: a batch or model of another kind, which needs an objective of its own.
    """
    own = "Give the engine an objective of your own, (model, batch) -> Totals."
    if not {"input_ids", "targets"} <= batch.keys():
        raise CourseError(f"The batch holds {', '.join(batch)}, and next-token prediction needs input_ids and targets. {own}")
    logits = model(batch["input_ids"])
    if not isinstance(logits, Tensor):
        raise CourseError(f"The model returned {type(logits).__name__}, and next-token prediction needs logits [..., classes]. {own}")
    if batch["targets"].is_floating_point():
        raise CourseError(f"The targets are {batch['targets'].dtype}, and next-token prediction needs classes, as int64. {own}")
    loss_sum, token_count = cross_entropy(logits, batch["targets"])
    correct = (logits.detach().argmax(dim=-1) == batch["targets"]).sum()
    return Totals(loss_sum, token_count, {"correct": correct})
