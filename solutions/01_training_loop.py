"""Solutions of chapter 01. Each body with the reason why it is written this way."""

from collections.abc import Iterable, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from shared.totals import Batch, Objective, Reducer, Runner, Totals, Updater, add_totals


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp subtracts the largest logit before it exponentiates, so no logit overflows. The ignored targets are
    looked up at index 0 and then masked: a gather must stay inside the vocabulary."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    counted = targets != -100
    target_logits = logits.gather(-1, targets.where(counted, 0).unsqueeze(-1)).squeeze(-1)
    losses = logits.logsumexp(dim=-1) - target_logits
    return losses.where(counted, 0).sum(), counted.sum()


def accumulate_gradients(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
    """backward() frees a micro-batch's graph before the next one is built: memory for one, gradient of all."""
    parts = []
    for microbatch in microbatches:
        totals = objective(model, microbatch)
        totals.loss_sum.backward()
        parts.append(add_totals([totals]))
    return add_totals(parts)


def apply_update(model: nn.Module, optimizer: Optimizer, token_count: Tensor) -> None:
    """The check comes before the division: with no tokens, 0 / 0 would put NaN into every weight."""
    if token_count == 0:
        raise ValueError("No target counted in this step (all are -100): the mean loss is undefined. Check the data's masks.")
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= token_count
    optimizer.step()


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    microbatches: Sequence[Batch],
    objective: Objective,
    runner: Runner,
    reducer: Reducer,
    updater: Updater,
) -> Totals:
    """Clearing comes first rather than last, so that the gradients of this step can be read after it."""
    optimizer.zero_grad(set_to_none=True)
    totals = runner(model, microbatches, objective)
    reduced = reducer(model, totals)
    updater(model, optimizer, reduced.token_count)
    return reduced


def evaluate(model: nn.Module, batches: Iterable[Batch], objective: Objective) -> Totals:
    """Sums over batches and one division by whoever reads them: a short last batch weighs what it holds. The mode is
    put back even where the objective raises, module by module: `model.train()` would wake a block that was frozen in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return add_totals(objective(model, batch) for batch in batches)
    finally:
        for module, training in modes:
            module.training = training


def sample_next(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Generator | None = None) -> Tensor:
    """Cutting by the k-th value keeps ties; topk's indices keep exactly k. The draw happens among the k and is mapped
    back to token ids, so nothing of the size of the vocabulary is sorted or masked."""
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: give 0 (likeliest token) or a positive number.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}: give at least 1, or None for all tokens.")
    if temperature == 0:
        return logits.argmax(dim=-1)
    vocab = logits.shape[-1]
    likeliest, ids = logits.float().topk(min(top_k or vocab, vocab), dim=-1)
    probabilities = (likeliest / temperature).softmax(dim=-1)
    drawn = torch.multinomial(probabilities, num_samples=1, generator=generator)
    return ids.gather(-1, drawn).squeeze(-1)
