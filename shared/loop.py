"""Chapter 01. The training loop: forward, loss, backward, gradient accumulation, step, on one page.

`train_step` names the four things that a step consists of and calls them: the runner (forward and backward of every
micro-batch), the reducer (adds up what several processes hold), the updater (divides once, steps) and the objective.
What later chapters bring, a pipeline schedule, data parallelism, loss scaling, is another runner, reducer or updater; the
step itself stays as it is here.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from shared.course.binding import exercise
from shared.totals import Batch, Objective, Reducer, Runner, Totals, Updater


@exercise("01.accumulate_gradients")
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


def keep_totals(model: nn.Module, totals: Totals) -> Totals:
    """The reducer of a single process, which has nothing to sum."""
    return totals


@exercise("01.apply_update")
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


@exercise("01.train_step")
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


@exercise("01.evaluate")
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


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Sequence[Batch]],
    objective: Objective,
    *,
    steps: int,
    runner: Runner = accumulate_gradients,
    reducer: Reducer = keep_totals,
    updater: Updater = apply_update,
) -> Iterator[tuple[int, Totals]]:
    """Train for `steps` steps, yielding (step number from 1, totals) after each; the caller decides what to do between.

    Args:
        batches: yields each step's sequence of micro-batches.

    Raises:
        ValueError: `batches` ends before `steps` steps.
    """
    model.train()
    source = iter(batches)
    for step in range(1, steps + 1):
        microbatches = next(source, None)
        if microbatches is None:
            raise ValueError(f"The data ended after {step - 1} of {steps} steps: give more data or ask for fewer steps.")
        yield step, train_step(model, optimizer, microbatches, objective, runner, reducer, updater)
