"""Chapter 10. LoRA: a linear layer with a trained low-rank addition to frozen weights, and its merge (Hu et al. 2021).

    y = x W^T + b + scaling * (x A^T) B^T          W [out, in] is frozen; A [r, in] and B [out, r] are trained
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.parallel.comm.communicator import Communicator
from shared.parallel.tensor.layers import VocabularyEmbedding, with_random_numbers_of_rank


@exercise("10.lora_linear")
def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, lora_A: Tensor, lora_B: Tensor, scaling: float, dropout: float) -> Tensor:
    """Apply a linear layer with a low-rank addition (Hu et al. 2021, equation 3).

    The layer computes as ever; the two factors add `scaling` times what their product, an update of W, would make of x. Their two narrow
    products come one after the other: neither the update nor any other matrix [out, in] is made, in the forward pass or in the backward
    pass. Dropout acts on the input of the addition alone, and draws what `torch.nn.functional.dropout` draws in one call on x, so that a
    seed gives the same run as in peft. Where `dropout` is 0 nothing is dropped; the caller passes 0 outside of training.

    All tensors have one dtype, or autocast gives the products one. x is left unchanged.

    Args:
        x: [..., in].
        weight: [out, in], frozen: it asks for no gradient. Gradients flow to x, the factors, and a bias that asks for one.
        bias: [out], or None.
        lora_A: [r, in].
        lora_B: [out, r].
        scaling: alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA: already divided.
        dropout: the probability with which an input of the addition is zeroed; the others are divided by 1 - dropout.

    Returns:
        [..., out], in the dtype of the product with `weight`.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.eye(2)
    >>> lora_linear(x, weight, None, torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0], [10.0]]), scaling=0.5, dropout=0.0)
    tensor([[ 1., 17.]])
    """


@exercise("10.merge_lora")
def merge_lora(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """Merge a low-rank addition into a weight, so that one product does what three did.

    A linear layer with the merged weight computes what `lora_linear` computes without dropout.

    Args:
        weight: [..., out, in], of any float dtype; left unchanged. Leading dimensions stack matrices, such as experts'.
        lora_A: [..., r, in], of any float dtype, as is B.
        lora_B: [..., out, r].
        scaling: alpha / r, already divided. A negative one takes a merged addition out again.

    Returns:
        A new tensor [..., out, in] in the dtype of `weight`. Product and sum are computed in that dtype, in float32 where it is narrower,
        and rounded to it once.

    >>> merge_lora(torch.eye(2), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0], [10.0]]), scaling=0.5)
    tensor([[1., 0.],
            [5., 6.]])
    """

class LowRankUpdate(nn.Module):
    """One adapter's update of one weight: `lora_A` [..., r, in], `lora_B` [..., out, r], and DoRA's `magnitude` [out], all trained.

    Args:
        shape: [..., out, in] of the weight that is updated, as a linear layer has it.
        rank: r.
        scaling: what multiplies B A.
        dropout: of the update's input, in training.
        decomposed: whether there is a magnitude.
        dtype, device: of the parameters; float32 at least. On the meta device they get values with the model's.

    Attributes:
        group: the ranks that each have some of the input features (row-parallel), over whose parts DoRA's norms are summed; or None.
    """

    def __init__(
        self,
        shape: Sequence[int],
        rank: int,
        scaling: float,
        dropout: float = 0.0,
        decomposed: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        *stack, out_features, in_features = shape
        self.rank, self.scaling, self.dropout = rank, scaling, dropout
        options = {"dtype": torch.promote_types(dtype, torch.float32), "device": device}
        self.lora_A = nn.Parameter(torch.empty(*stack, rank, in_features, **options))
        self.lora_B = nn.Parameter(torch.empty(*stack, out_features, rank, **options))
        self.magnitude = nn.Parameter(torch.empty(out_features, **options)) if decomposed else None
        self.group: Communicator | None = None

    @property
    def drops(self) -> float:
        """The probability of dropout now."""
        return self.dropout if self.training else 0.0

    def dropped(self, x: Tensor) -> Tensor:
        """What the update multiplies of x: [..., in], x itself where nothing is dropped."""
        return F.dropout(x, self.drops) if self.drops else x

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A and B as a product with x takes them: in its dtype, which autocast sees to where it is on."""
        if self.lora_A.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
            return self.lora_A, self.lora_B
        return self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)

    def forward(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Tensor:
        """The update's part of the result, of inputs that are `dropped`: [..., in] -> [..., out]. product: of rows and a weight."""
        lora_A, lora_B = self.factors(x)
        return self.scaling * product(product(x, lora_A), lora_B)

    def row_scales(self, weight: Tensor) -> Tensor:
        """What DoRA multiplies each row of W + s B A by: magnitude / norm of the row, [out]. The norm counts as a constant in the backward
        pass (Liu et al. 2024, section 4.3)."""
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            wide = torch.promote_types(weight.dtype, torch.float32)
            squares = merge_lora(weight.to(wide), self.lora_A, self.lora_B, self.scaling).square().sum(dim=-1)
            if self.group is not None:
                self.group.all_reduce(squares)
        return self.magnitude / squares.sqrt().to(self.magnitude.dtype)

    def merged(self, weight: Tensor) -> Tensor:
        """W with this update, in its dtype; a DoRA update's rows scaled to their magnitudes. Leaves `weight` unchanged."""
        if self.magnitude is None:
            return merge_lora(weight, self.lora_A.detach(), self.lora_B.detach(), self.scaling)
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        scales = self.row_scales(weight).detach().unsqueeze(-1)
        return (scales * merge_lora(wide, self.lora_A.detach(), self.lora_B.detach(), self.scaling)).to(weight.dtype)


class AdaptedLayer(nn.Module):
    """What every layer with adapters has, beside the layer that it was: a class is put in front of the layer's own (`adapt`).

    Attributes:
        adapters: name -> this layer's update.
        active: the names of those that take part in the forward pass, in order.
        unmerged: the weight as it was, while active updates are merged into it; or None.
        own_masks: this rank's number, where ranks have different inputs and so draw different dropout masks; or None.
    """

    adapters: nn.ModuleDict
    active: tuple[str, ...] = ()
    unmerged: Tensor | None = None
    own_masks: int | None = None
    knows_tensor_parallelism = needs_course_backend = True  # whose styles for PyTorch's own would cut nothing but a plain layer

    @property
    def updates(self) -> list[LowRankUpdate]:
        """The active ones; none while they are merged."""
        return [self.adapters[name] for name in self.active if name in self.adapters] if self.unmerged is None else []

    def with_masks(self, run: Callable[[], Tensor], x: Tensor) -> Tensor:
        """`run()`, where ranks have different inputs with masks of this rank's own."""
        if self.own_masks is None or not any(update.drops for update in self.updates):
            return run()
        return with_random_numbers_of_rank(run, x.device, self.own_masks)


class AdaptedLinear(AdaptedLayer):
    """A linear layer with low-rank updates: [..., in] -> [..., out].

    combine: adds up what ranks have, in a row-parallel layer: the updates' parts are in the one sum. The bias is added to it once.

    A layer that keeps its weight in another form (four bits) has `base_product(x)`, without bias, and `dequantized(dtype)`.
    """

    combine: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.combine is None:
            return self.with_masks(lambda: self.product(x, self.bias), x)
        y = self.combine(self.with_masks(lambda: self.product(x, None), x))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """What the ranks' parts of base and updates make of x."""
        updates = self.updates
        is_plain = not hasattr(self, "base_product")
        if is_plain and len(updates) == 1 and updates[0].magnitude is None:
            return lora_linear(x, self.weight, bias, *updates[0].factors(x), updates[0].scaling, updates[0].drops)
        of_base = (lambda rows: F.linear(rows, self.weight)) if is_plain else self.base_product
        base = total = of_base(x)
        for update in updates:
            dropped = update.dropped(x)
            part = update(dropped)
            if update.magnitude is not None:
                scales = update.row_scales(self.base_weight(part.dtype)).to(part.dtype)
                rows = base if dropped is x else of_base(dropped)  # the whole change of the layer meets what is left of x
                part = (scales - 1) * rows + scales * part
            total = total + part
        return total if bias is None else total + bias.to(total.dtype)

    def base_weight(self, dtype: torch.dtype) -> Tensor:
        """W, [out, in], of which this rank may hold a part; in its own dtype, or in `dtype` where it is kept in another form."""
        return self.weight if not hasattr(self, "dequantized") else self.dequantized(dtype)


class AdaptedEmbedding(AdaptedLayer, VocabularyEmbedding):
    """An embedding with low-rank updates: ids [...] -> [..., D]. Its weight [vocab, D] is a linear layer's, transposed, whose input is
    one-hot: A [r, vocab], B [D, r]. There is no dropout, as in peft."""

    first = 0
    combine = staticmethod(lambda rows: rows)

    def look_up(self, local: Tensor) -> Tensor:
        rows = super().look_up(local)
        for update in self.updates:
            rows = rows + update.scaling * F.linear(F.embedding(local, update.lora_A.T), update.lora_B).to(rows.dtype)
        return rows


class AdaptedExperts(AdaptedLayer):
    """A stack of E experts' matrices [E, out, in], each with an update of its own: A [E, r, in], B [E, out, r]."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        def run() -> Tensor:
            total = self.product(rows, self.weight, counts)
            for update in self.updates:
                total = total + update(update.dropped(rows), partial(self.product, counts=counts)).to(total.dtype)
            return total

        return self.with_masks(run, rows)
