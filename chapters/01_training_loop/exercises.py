"""Your part of chapter 01. Write each body in place of its `raise` line, in any order.

    course check 01          checks what you wrote
    course hint 01.cross_entropy    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from shared.totals import Batch, Objective, Reducer, Runner, Totals, Updater, add_totals


# The loss (15 min, difficulty 2 of 5)
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
    raise NotImplementedError("01.cross_entropy: write this body")


# Gradient accumulation (10 min, difficulty 2 of 5)
def accumulate_gradients(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
    """The runner: forward and backward of each micro-batch in turn, so that only one graph is alive at a time.

    Gradients add up in `parameter.grad` on top of what is there. Backward runs on each micro-batch's loss *sum*, so the
    result is the gradient of the sum over all tokens, however unevenly they are spread over the micro-batches.

    Args:
        model: any module that `objective` understands. The modes of its modules and what of it learns are left as they are.
        microbatches: one or more batches.
        objective: objective(model, microbatch) -> Totals(loss_sum, token_count, metrics). Its tensors are its own: it may return
            the same ones again.

    Returns:
        The totals over all micro-batches, in the dtypes of the parts. They hold no graph: `requires_grad` is False.
        Nor does anything that is kept in between, such as a metric that still hangs on its micro-batch's graph.

    >>> weight = torch.nn.Linear(1, 1, bias=False)
    >>> objective = lambda model, x: Totals(model(x).sum(), torch.tensor(x.numel()), {})
    >>> totals = accumulate_gradients(weight, [torch.ones(1, 1), torch.ones(3, 1)], objective)
    >>> weight.weight.grad, totals.token_count                     # d(sum)/dw = 1 + 3
    (tensor([[4.]]), tensor(4))
    """
    raise NotImplementedError("01.accumulate_gradients: write this body")


# Divide once, then step (5 min, difficulty 1 of 5)
def apply_update(model: nn.Module, optimizer: Optimizer, token_count: Tensor) -> None:
    """The updater: turn the gradient of the loss sum into that of the mean loss, and step.

    This is the one place where a gradient is divided. A parameter without a gradient (unused, frozen) is left alone.

    Args:
        model: its parameters' `grad` hold the gradient of the loss sum. Afterwards the same tensors hold that of the
            mean: the division is in place, whether or not a gradient is finite. Nothing else of the model changes.
        optimizer: steps over the model's parameters.
        token_count: [] int64, tokens that counted in the whole step, over all micro-batches and ranks.

    Raises:
        ValueError: token_count is 0; weights and gradients are as they were.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> model = torch.nn.ParameterList([weight])
    >>> weight.grad = torch.tensor([6.0])                          # of a sum over 3 tokens
    >>> apply_update(model, torch.optim.SGD([weight], lr=0.1), torch.tensor(3))
    >>> weight.data, weight.grad                                   # 1 - 0.1 * 6 / 3
    (tensor([0.8000]), tensor([2.]))
    """
    raise NotImplementedError("01.apply_update: write this body")


# The step (10 min, difficulty 2 of 5)
def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    microbatches: Sequence[Batch],
    objective: Objective,
    runner: Runner,
    reducer: Reducer,
    updater: Updater,
) -> Totals:
    """One training step: clear the gradients, run, reduce, update.

    Args:
        model: the model to train.
        optimizer: an optimizer over its parameters.
        microbatches: the step's data; together they are one batch.
        objective: objective(model, microbatch) -> Totals.
        runner: runner(model, microbatches, objective) -> Totals: leaves the gradient of the loss sum in `grad`.
        reducer: reducer(model, totals) -> Totals: adds gradients and totals over processes.
        updater: updater(model, optimizer, token_count): divides by the reduced count and steps.

    Returns:
        The reduced totals.

    The gradients of the step remain in `grad` afterwards, where monitoring can read them; those of an earlier
    step must not be in them, and a parameter that this step did not use has none (`None`). Nothing is skipped: what to do
    with a step of no tokens, or with a loss of NaN, is the updater's decision, and what it raises reaches the caller.
    """
    raise NotImplementedError("01.train_step: write this body")


# Evaluation (10 min, difficulty 2 of 5)
def evaluate(model: nn.Module, batches: Iterable[Batch], objective: Objective) -> Totals:
    """The objective's totals over held-out data, with dropout off and without recording gradients.

    Args:
        model: left as it was found, also where the objective raises: each module in it in training mode if it was in
            training mode, in evaluation mode if not. A block may be in another mode than the model that holds it.
        batches: one or more batches, of any sizes, possibly a generator: each is asked for when the one before is judged.
        objective: objective(model, batch) -> Totals. Its tensors are its own: it may return the same ones again.

    Returns:
        The totals over all batches, in the dtypes of the parts. Their `mean_loss` weighs every token alike; where no token
        counts, the sums are 0.

    >>> objective = lambda model, x: Totals(x.sum(), torch.tensor(x.numel()), {})
    >>> totals = evaluate(torch.nn.Dropout(), [torch.tensor([1.0]), torch.tensor([3.0, 5.0])], objective)
    >>> totals.loss_sum, totals.mean_loss                          # (1 + 3 + 5) / 3
    (tensor(9.), 3.0)
    """
    raise NotImplementedError("01.evaluate: write this body")


# Sampling (15 min, difficulty 3 of 5)
def sample_next(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Generator | None = None) -> Tensor:
    """Draw the next token of each row from softmax(logits / temperature), among the `top_k` likeliest tokens.

    Args:
        logits: [batch, vocab], any floating dtype. Left unchanged. Half-precision logits are computed with in float32, where
            dividing by a small temperature does not overflow.
        temperature: 0 takes the likeliest token; otherwise positive.
        top_k: how many of the likeliest tokens may be drawn; None for all. More than `vocab` means all. Of tokens that tie for
            the last place, one may be kept or all.
        generator: the source of randomness, on the logits' device; None for torch's default.

    Returns:
        [batch] int64 token ids.

    Raises:
        ValueError: temperature below 0, or top_k below 1, each whatever the other is.

    >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
    >>> sample_next(logits, temperature=0.0)
    tensor([1])
    >>> generator = torch.Generator().manual_seed(0)
    >>> draws = [sample_next(logits, top_k=2, generator=generator).item() for _ in range(100)]
    >>> sorted(set(draws))                                         # token 0 is cut off
    [1, 2]
    """
    raise NotImplementedError("01.sample_next: write this body")
