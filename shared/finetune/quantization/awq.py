"""Chapter 10. AWQ: scale up the input channels that matter before rounding, and scale the activations down by as much.

Lin et al. (2023), "AWQ: Activation-aware Weight Quantization". The scale of a channel is a power of the mean of its absolute activations,
and the power is searched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.course.binding import exercise
from shared.course.bounds import PositiveInt, checked
from shared.finetune.quantization.calibration import BlockInput, SharedInput, watch
from shared.finetune.quantization.rounding import Rounding, round_to_nearest
from shared.model.block import Block

CLIPPED = tuple(1 - number / 20 for number in range(11))  # shares of a group's largest weight that are tried as its limit
UNCLIPPED = ("attention.q_proj", "attention.k_proj")  # an error in a score is multiplied by another one


@exercise("10.awq_scales")
def awq_scales(means: Tensor, loss_of: Callable[[Tensor], float], ratios: Sequence[float]) -> Tensor:
    """Search the scales of a layer's input channels (Lin et al. 2023, equation 5).

    The scales of a ratio are that power of the means; none is below 1e-4. Then one number divides them all, so that the largest is as far
    above 1 as the smallest is below it: their product is 1. Each ratio is tried once, in order, and the scales with the smallest loss are
    taken; of several with the same loss, the first. A loss that is NaN or infinite is never the smallest.

    Args:
        means: [channels] float, the mean absolute activation of each channel over the calibration tokens; 0 for a channel that is never on.
        loss_of: scales [channels] -> the error of the layer's outputs when its weights are quantized with these scales, a Python float,
            0 or more. A call takes as long as a run over the calibration tokens.
        ratios: powers to try, 0 or more, in any order; 0 stands for no scaling.

    Returns:
        The best scales, [channels], in the dtype of `means`.

    Raises:
        ValueError: no ratio has a finite loss.

    >>> awq_scales(torch.tensor([1.0, 4.0]), lambda scales: abs(scales[1].item() - 2.0), ratios=[0.0, 0.5, 1.0])
    tensor([0.5000, 2.0000])
    """


@dataclass(frozen=True)
@checked
class AWQ:
    """Settings of AWQ.

    Args:
        rounding: bits and groups; asymmetric in the paper's models.
        ratios: powers to try, how many of them, evenly from 0 to below 1.
        clip: also search how far the largest weights of each group are cut off, which leaves finer steps for the others.
    """

    rounding: Rounding = Rounding(symmetric=False)
    ratios: PositiveInt = 20
    clip: bool = True


class InputMean:
    """The mean absolute value of each channel of a layer's inputs, added up over batches in float64."""

    def __init__(self) -> None:
        self.sum, self.rows = torch.zeros(()), 0

    def add(self, inputs: Tensor) -> None:
        """inputs: [rows, features]."""
        self.sum = self.sum + inputs.abs().sum(dim=0, dtype=torch.float64)
        self.rows += len(inputs)

    def value(self) -> Tensor:
        return (self.sum / max(self.rows, 1)).float()


@torch.no_grad()
def search_scales(block: Block, group: SharedInput, inputs: Sequence[BlockInput], settings: AWQ, name: str) -> Tensor:
    """The scales [channels] of the input that some layers share: those with the smallest squared error of the outputs of `group.within`
    when these layers are quantized with them. The block is as before afterwards.
    """
    mean = InputMean()
    watch(block, inputs, group.layers[0], lambda arguments, kept: mean.add(arguments[0][kept]))
    means = mean.value()
    if not means.any():
        raise ValueError(f"The inputs of {name}.{group.layers[0]} are all 0: no calibration text reached it. Calibrate with other text.")
    within, calls = block.get_submodule(group.within), []
    watch(block, inputs, group.within, lambda arguments, kept: calls.append((arguments, kept)))
    wanted = [within(*arguments)[kept] for arguments, kept in calls]
    layers = [block.get_submodule(layer) for layer in group.layers]
    weights = [layer.weight.clone() for layer in layers]

    def loss_of(scales: Tensor) -> float:
        for layer, weight in zip(layers, weights, strict=True):
            scales = scales.to(weight)
            layer.weight.copy_(round_to_nearest(weight * scales, settings.rounding).values() / scales)
        pairs = zip(calls, wanted, strict=True)
        errors = ((within(*arguments)[kept] - right).double().square().sum() for (arguments, kept), right in pairs)
        return sum(errors).item() / sum(right.numel() for right in wanted)

    try:
        return awq_scales(means, loss_of, [number / settings.ratios for number in range(settings.ratios)])
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.copy_(weight)


@torch.no_grad()
def fold_scales(block: Block, group: SharedInput, scales: Tensor) -> None:
    """Multiply the columns of layers that share an input by `scales` [channels], and divide what makes that input: a norm's weight and
    bias, or the rows of the linear layer before. The block computes what it did, up to rounding.
    """
    if group.before is None:
        raise ValueError(f"Nothing before {', '.join(group.layers)} can take scales.")
    for layer in group.layers:
        weight = block.get_submodule(layer).weight
        weight.mul_(scales.to(weight))
    for parameter in block.get_submodule(group.before).parameters(recurse=False):
        divisors = scales.to(parameter)
        parameter.div_(divisors if parameter.dim() == 1 else divisors.unsqueeze(1))


def clip_weights(weight: Tensor, hessian: Tensor, rounding: Rounding) -> Tensor:
    """Cut the weights of each row and group at a share of the largest one, at least half, that makes the error of this group's part of the
    outputs smallest when it is rounded (the paper's authors do this in their code, after the scales).

    Args:
        weight: [out, in]. hessian: [in, in] of its inputs: of it, the blocks of columns that are a group count.

    Returns:
        [out, in].
    """
    grouped = weight.unflatten(1, (-1, rounding.columns(weight.shape[1])))
    of_groups = torch.stack([hessian[columns][:, columns] for columns in torch.arange(len(hessian)).view(grouped.shape[1:])])
    largest = grouped.abs().amax(dim=-1, keepdim=True)
    best, least = grouped, torch.full_like(largest, torch.inf)
    for share in CLIPPED:
        clipped = grouped.clamp(-share * largest, share * largest)
        change = round_to_nearest(clipped.flatten(1), rounding).values().view_as(grouped) - grouped
        error = (torch.einsum("ogi,gij->ogj", change, of_groups) * change).sum(dim=-1, keepdim=True)
        best, least = torch.where(error < least, clipped, best), torch.minimum(error, least)
    return best.flatten(1)
