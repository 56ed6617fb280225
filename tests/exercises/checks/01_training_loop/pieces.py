"""What the checks of chapter 01 share: two small models in float64, objectives of both kinds, and how results are read.

`Weight` with `product_sum` adds up in the head. `TinyModel` with `next_token_loss` is a language model whose loss is torch's
own, so that no check leans on another exercise's answer.
"""

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.totals import Totals

VOCAB, WIDTH = 7, 5


class Weight(nn.Module):
    """Maps x to weight * x, with one number as its weight."""

    def __init__(self, value: float = 2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def product_sum(model, batch) -> Totals:
    """The loss sum is the sum of weight * x, so its gradient is the sum of x; the metric `x` is that sum too."""
    return Totals(model(batch["x"]).sum(), torch.tensor(batch["x"].numel()), {"x": batch["x"].sum()})


class SameCount:
    """Like product_sum for batches of one value; the count that it returns is the same tensor each time."""

    def __init__(self):
        self.count = torch.tensor(1)

    def __call__(self, model, batch) -> Totals:
        return product_sum(model, batch)._replace(token_count=self.count)


def not_a_number() -> list[dict[str, Tensor]]:
    """Two micro-batches of one value, of which the first is NaN."""
    return [{"x": torch.tensor([value], dtype=torch.float64)} for value in (float("nan"), 10.0)]


def in_float32() -> dict:
    """A model of one weight and two micro-batches of one value, all in float32."""
    return {"model": Weight().float(), "batches": [{"x": batch["x"].float()} for batch in digits(1, 1)]}


def digits(*sizes: int) -> list[dict[str, Tensor]]:
    """Micro-batch i has sizes[i] values that add up to 10**i: a gradient of 101 lacks micro-batch 1."""
    return [{"x": torch.tensor([10.0**i] + [0.0] * (size - 1), dtype=torch.float64)} for i, size in enumerate(sizes)]


class Deep(nn.Module):
    """Weights below the top level: `first` (2), which `block.tied` holds too, and `block.inner` (3). It maps x to 7 * x.

    Args:
        frozen: `block.inner` does not learn, and `block` is in evaluation mode while the model is in training mode.
    """

    def __init__(self, frozen: bool = False):
        super().__init__()
        self.first = Weight(2.0)
        self.block = nn.ModuleDict({"tied": Weight(), "inner": Weight(3.0)})
        self.block["tied"].weight = self.first.weight
        self.block["inner"].weight.requires_grad_(not frozen)
        self.block.train(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.block["tied"](x) + self.block["inner"](x)


def state(model: nn.Module) -> dict[str, list[str]]:
    """What of a model is neither a weight nor a gradient: the modules in training mode, and the weights that learn."""
    return {
        "modules in training mode": [name or "model" for name, module in model.named_modules() if module.training],
        "weights that learn": [name for name, weight in model.named_parameters() if weight.requires_grad],
    }


FROZEN_STATE = {"modules in training mode": ["model", "first"], "weights that learn": ["first.weight"]}  # of Deep(frozen=True)


class TinyModel(nn.Module):
    """Maps ids [batch, seq] to logits [batch, seq, 7]. Its `unused` weight takes no part, its `frozen` bias does not learn."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int, learns: bool = True) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64), requires_grad=learns)

        self.embedding, self.head, self.frozen, self.unused = draw(VOCAB, WIDTH), draw(WIDTH, VOCAB), draw(VOCAB, learns=False), draw(3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embedding[ids].tanh()) @ self.head + self.frozen


def next_token_loss(model, batch) -> Totals:
    """torch's own cross-entropy, summed over the targets that are not -100; `correct` counts the right guesses."""
    logits, targets = model(batch["ids"]).flatten(0, 1), batch["targets"].flatten()
    correct = (logits.detach().argmax(dim=-1) == targets).sum()
    return Totals(F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum(), {"correct": correct})


def uneven(*counted: int, seq: int = 11) -> list[dict[str, Tensor]]:
    """Micro-batches of two rows, of which `counted[i]` targets count; the others are -100."""
    generator = torch.Generator().manual_seed(11)
    microbatches = []
    for count in counted:
        ids, targets = torch.randint(VOCAB, (2, 2, seq), generator=generator)
        targets.view(-1)[count:] = -100
        microbatches.append({"ids": ids, "targets": targets})
    return microbatches


def joined(microbatches) -> dict[str, Tensor]:
    """One big batch."""
    return {name: torch.cat([part[name] for part in microbatches]) for name in microbatches[0]}


def mean_loss_by_torch(model, batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten(), reduction="mean")


def totals_by_torch(model, microbatches) -> dict:
    """The totals of one big batch."""
    with torch.no_grad():
        return next_token_loss(model, joined(microbatches))._asdict()


def gradients(model) -> dict[str, Tensor | None]:
    return {f"gradient of {name}": None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def weights(model) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def with_gradient(model: nn.Module, value: float) -> nn.Module:
    """The model with `value` in every gradient, as an earlier step may have left it."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def holds_graph(totals) -> bool:
    return any(tensor.requires_grad for tensor in [totals.loss_sum, totals.token_count, *totals.metrics.values()])


class Watched:
    """Calls another objective and notes what it finds at each call.

    sums: of the batch's `x`. gradients: of the model's weight. training, recording: the model's mode, whether autograd records.
    held: how many earlier calls still have tensors kept for their backward.
    """

    def __init__(self, objective):
        self.objective = objective
        self.sums, self.gradients, self.training, self.recording = [], [], [], []
        self.held, self.graphs = [], []

    def __call__(self, model, batch) -> Totals:
        self.sums.append(int(batch["x"].sum()))
        self.gradients.append(int(model.weight.grad or 0))
        self.training.append(model.training)
        self.recording.append(torch.is_grad_enabled())
        self.held.append(sum(any(saved() is not None for saved in graph) for graph in self.graphs))
        graph = []
        self.graphs.append(graph)

        def pack(tensor):
            saved = Saved(tensor)
            graph.append(weakref.ref(saved))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            return self.objective(model, batch)


class Saved:
    """A tensor that autograd keeps for a backward pass, in a box whose end can be noticed."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
