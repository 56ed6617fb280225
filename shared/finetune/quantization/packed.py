"""Chapter 10. Quantized linear layer with packed int4 or int8 weights: unpack, dequantize, multiply; or PyTorch's fused CPU kernels.

The weight is frozen, and a gradient flows to the layer's input, so a quantized model can be the base of adapters.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shared.finetune.quantization.frozen import AT_ONCE, FrozenLinear
from shared.finetune.quantization.rounding import WORD, QuantizedWeight, Rounding, pack, unpack

Kernel = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out] in the same dtype, without gradients
INT4_GROUPS = (32, 64, 128, 256)  # that PyTorch's kernel has
INT4_ROWS = 16  # which must divide the outputs of that kernel
TOKENS = Rounding(8, group=None, kept_in=torch.float32)  # activations quantized by row


class QuantizedLinear(FrozenLinear):
    """A linear layer whose weight is kept as packed codes, with scales and zero points by group of neighbouring inputs.

    Args:
        rounding: bits and groups.
        bias: frozen here; None for a layer without.

    Attributes:
        codes: [out, in / 32, bits] int32, as `pack` makes them. scales: [out, groups]. zeros: [out, groups] uint8.
        kernel: computes the product where no gradient is asked for; None for the reference path: unpack, dequantize, multiply.
    """

    stored = ("codes", "scales", "zeros")

    def __init__(self, out_features: int, in_features: int, bias: nn.Parameter | None, rounding: Rounding):
        super().__init__(out_features, in_features, bias)
        width = rounding.columns(in_features)
        if in_features % WORD or in_features % width:
            raise ValueError(f"A layer of {in_features} inputs cannot be quantized in groups of {width}: its inputs must be a multiple of "
                             f"the group and of {WORD}.")  # fmt: skip
        self.rounding, self.kernel = rounding, None
        self.unit, self.per_column = math.lcm(WORD, width), {"codes": WORD, "scales": width, "zeros": width}
        groups = in_features // width
        self.codes = frozen(torch.zeros(out_features, in_features // WORD, rounding.bits, dtype=torch.int32))
        self.scales = frozen(torch.ones(out_features, groups, dtype=rounding.kept_in))
        self.zeros = frozen(torch.zeros(out_features, groups, dtype=torch.uint8))

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: nn.Parameter | None, rounding: Rounding) -> "QuantizedLinear":
        """The layer with these codes for its weight."""
        made = cls(*weight.codes.shape, bias, rounding)
        made.codes, made.zeros = frozen(pack(weight.codes, rounding.bits)), frozen(weight.zeros.to(torch.uint8))
        made.scales = frozen(weight.scales.to(rounding.kept_in))
        return made

    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(unpack(self.codes, self.rounding.bits), self.scales.float(), self.zeros.float())

    def dequantize(self, dtype: torch.dtype, *stored: Tensor) -> Tensor:
        """The weight [out, in], computed in float32, some rows at a time, and rounded once."""
        weight = torch.empty(len(stored[0]), WORD * stored[0].shape[1], dtype=dtype, device=stored[0].device)
        rows = max(1, AT_ONCE // weight.shape[1])
        for part, codes, scales, zeros in zip(*(each.split(rows) for each in (weight, *stored)), strict=True):
            part.copy_(QuantizedWeight(unpack(codes, self.rounding.bits), scales.float(), zeros.float()).values())
        return weight

    def base_product(self, x: Tensor) -> Tensor:
        if self.kernel is None or torch.is_grad_enabled() and x.requires_grad:
            return super().base_product(x)
        return self.kernel(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def frozen(tensor: Tensor) -> nn.Parameter:
    made = nn.Parameter(tensor, requires_grad=False)
    made.full_precision = True  # engines that gather weights in 16 bits leave scales as they are
    return made


def use_kernels(model: nn.Module, make: Callable[[QuantizedLinear], Kernel | None] | None) -> int:
    """Let each quantized layer of a model compute with the kernel that `make` finds for it; None for the reference path. Returns how many
    layers have one. A kernel keeps its own copy of the weight."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    for layer in layers:
        layer.kernel = None if make is None else make(layer)
    return sum(layer.kernel is not None for layer in layers)


def fused_kernel(layer: QuantizedLinear) -> Kernel | None:
    """PyTorch's fused CPU product for the layer, or None where it has none. It multiplies in bfloat16: for float32 it is a plain loop.

    INT4 has one for groups of 32, 64, 128 or 256 and outputs that are a multiple of 16; INT8 for symmetric whole rows.
    """
    weight, bits = layer.quantized_weight(), layer.rounding.bits
    width = layer.in_features // weight.scales.shape[1]
    if layer.codes.device.type != "cpu":
        return None
    if bits == 4 and width in INT4_GROUPS and layer.out_features % INT4_ROWS == 0:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.to(torch.int32), 1)
        middle = (8 - weight.zeros) * weight.scales  # the kernel computes (code - 8) * scale + this
        both = torch.stack([weight.scales, middle], dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), packed, width, both).to(x.dtype)
    if by_rows(layer):
        signed, scales = to_int8(weight.codes), weight.scales[:, 0].to(torch.bfloat16)
        return lambda x: torch.ops.aten._weight_int8pack_mm(x.to(torch.bfloat16), signed, scales).to(x.dtype)
    return None


def dynamic_kernel(layer: QuantizedLinear) -> Kernel | None:
    """INT8 with activations quantized row by row, as they come: an integer product, times both scales (Dettmers et al. 2022, "LLM.int8()",
    section 2.1, without outliers). None for a layer that is not symmetric INT8 by whole rows."""
    if not by_rows(layer):
        return None
    weight = layer.quantized_weight()
    signed, scales = to_int8(weight.codes), weight.scales[:, 0]

    def product(x: Tensor) -> Tensor:
        of_rows, zeros = (each.unsqueeze(1) for each in TOKENS.scales(x.float()))
        codes = to_int8(TOKENS.encode(x.float(), of_rows, zeros))
        return (torch._int_mm(codes, signed.t()).float() * of_rows * scales).to(x.dtype)

    return product


def by_rows(layer: QuantizedLinear) -> bool:
    """Whether a layer is symmetric INT8 with one scale for each output."""
    return layer.rounding.bits == 8 and layer.rounding.symmetric and layer.scales.shape[1] == 1


def to_int8(codes: Tensor) -> Tensor:
    """Codes around 128 as signed numbers."""
    return (codes.to(torch.int16) - 128).to(torch.int8)
