"""Your part of chapter 10. Write each body in place of its `raise` line, in any order.

    course check 10          checks what you wrote
    course hint 10.assistant_mask    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.finetune.lora_parallel import FactorPlan


# Loss mask of a chat (15 min, difficulty 2 of 5)
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
    raise NotImplementedError("10.assistant_mask: write this body")


# LoRA: the forward pass (10 min, difficulty 1 of 5)
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
    raise NotImplementedError("10.lora_linear: write this body")


# LoRA: the merge (10 min, difficulty 1 of 5)
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
    raise NotImplementedError("10.merge_lora: write this body")


# LoRA under tensor parallelism (15 min, difficulty 3 of 5)
def lora_sharding(cut: int | None) -> tuple[FactorPlan, FactorPlan]:
    """Decide how LoRA's factors A [r, in] and B [out, r] follow a weight W [out, in] that tensor parallelism cuts.

    Where the weight is cut by output features, the ranks get the same input x: it passes through f before the layer, and in the backward
    pass f sums the gradients of x. Where it is cut by input features, each rank gets its own. The ranks' results are
    those of the whole layer, and the addition may not communicate: only the layer's own f or g does.

    Args:
        cut: the dimension along which the weight is cut: 0 for output features (column-parallel, and a head cut by tokens), 1 for input
            features (row-parallel); None for a weight that every rank holds whole, and with which all compute the same.

    Returns:
        The plan for A and the plan for B. Dimensions are counted from 0. A factor is cut where it can be, so that no rank computes or
        holds what it has no use for.

    >>> lora_sharding(None)
    (FactorPlan(cut=None, summed=False), FactorPlan(cut=None, summed=False))
    """
    raise NotImplementedError("10.lora_sharding: write this body")


# NF4: quantize (25 min, difficulty 3 of 5)
def quantize_nf4(weight: Tensor, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to four bits, block by block (Dettmers et al. 2023, section 3).

    The numbers are taken in row-major order, `block` at a time; the last block may be shorter. A block's scale is its largest absolute
    value. Each number is multiplied by 1 / scale, and becomes the number of the nearest of the 16 `values`: the borders between two
    neighbouring values are their means, and a number on a border goes to the lower value. All of this is float32 arithmetic, in this
    order, since bitsandbytes computes so, and a division may round another way. Where a scale is below 1e-38, 1 / 1e-38 takes the place
    of 1 / scale, which would overflow: so a block of zeros has the scale 0, and its numbers become 0.0.

    Two codes share a byte: the first number's in the high four bits, the second's in the low four. With an odd number of codes the last
    low half is the code of 0.0.

    Weights fill the memory before they are quantized, so hold less than ten float32 numbers for each of them: no table of distances to all
    16 values. All blocks are computed at once.

    Args:
        weight: any shape and float dtype, all finite; left unchanged.
        values: [16] float32, ascending, from -1 to 1, with 0 among them.
        block: how many numbers share a scale.

    Returns:
        codes [ceil(n / 2)] uint8, and scales [ceil(n / block)] float32.

    >>> values = torch.cat([torch.arange(-7, 0) / 7, torch.arange(9) / 8])          # -1, six more, 0, seven more, 1
    >>> quantize_nf4(torch.tensor([0.5, -2.0, 4.0, 0.1]), values, block=2)             # codes 9 and 0, 15 and 7
    (tensor([144, 247], dtype=torch.uint8), tensor([2., 4.]))
    """
    raise NotImplementedError("10.quantize_nf4: write this body")


# NF4: dequantize (15 min, difficulty 2 of 5)
def dequantize_nf4(codes: Tensor, scales: Tensor, values: Tensor, block: int, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Turn four-bit codes back into numbers: the value of each code, times the scale of its block.

    Args:
        codes: [ceil(n / 2)] uint8, two codes a byte, the first in the high four bits. With an odd n the last low half means nothing.
        scales: [ceil(n / block)] float32.
        values: [16] float32.
        block: how many numbers share a scale.
        shape: of the tensor that was quantized, with n numbers in row-major order.
        dtype: of the result; the product is computed in float32 and rounded once.

    Returns:
        A tensor of `shape` and `dtype`.

    >>> dequantize_nf4(torch.tensor([240, 15]).byte(), torch.tensor([1.0, 10.0]), torch.linspace(-1, 1, 16), 2, (3,), torch.float32)
    tensor([  1.,  -1., -10.])
    """
    raise NotImplementedError("10.dequantize_nf4: write this body")


# GPTQ: one column (20 min, difficulty 3 of 5)
def gptq_column(weights: Tensor, column: int, factor: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    """Quantize one column of a block of weights, and spread its error over the columns after it (Frantar et al. 2022, algorithm 1).

    Column j becomes what it is rounded to. Of all moves of the later columns, the one is made with which the layer's outputs change least:
    the sum of their squared changes over the calibration inputs is as small as it can be with this column j. No system is solved for it,
    because the upper triangular factor U of the inverse Hessian, H^-1 = U^T U, holds the moves in its row j.

    Args:
        weights: [out, n], the columns of the block, with the errors of earlier columns spread over them already. It may be a part of a
            larger matrix. Changed in place: column j becomes exactly its quantized values, later columns take over its error, all at
            once, and earlier ones stay.
        column: j, from 0.
        factor: [n, n], U: upper triangular, with a positive diagonal. Not the inverse itself.
        quantize: [out] -> [out], rounds a column to the values that it may have; called once, with column j as it is.

    Returns:
        What column j lost by the rounding, in units of U_jj, [out]: columns outside of the block need it.

    >>> weights, factor = torch.tensor([[0.6, 0.6]]), torch.tensor([[1.0, -0.5], [0.0, 1.0]])
    >>> gptq_column(weights, 0, factor, torch.round), weights
    (tensor([-0.4000]), tensor([[1.0000, 0.4000]]))
    """
    raise NotImplementedError("10.gptq_column: write this body")


# AWQ: search the scales (15 min, difficulty 2 of 5)
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
    raise NotImplementedError("10.awq_scales: write this body")
