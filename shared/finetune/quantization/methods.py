"""Chapter 10. Quantize a transformer after training (post-training quantization): round to nearest, GPTQ or AWQ, layer by layer."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shared.finetune.quantization.awq import AWQ, UNCLIPPED, clip_weights, fold_scales, search_scales
from shared.finetune.quantization.calibration import BlockInput, SharedInput, blocks_with_inputs, shared_inputs, watch
from shared.finetune.quantization.gptq import GPTQ, Hessian, output_error, quantize_gptq
from shared.finetune.quantization.packed import WORD, QuantizedLinear
from shared.finetune.quantization.rounding import Rounding, round_to_nearest
from shared.model.block import Block
from shared.model.transformer import TransformerModel
from shared.totals import Batch


class LayerReport(NamedTuple):
    """How well a layer was quantized: |X (W - Q)^T|^2 / |X W^T|^2 on the calibration inputs that it has in the quantized model.

    name: of the layer. error: with the method. rounded: with rounding to nearest of the same bits and groups.
    """

    name: str
    error: float
    rounded: float


def quantize_model(model: TransformerModel, batches: Iterable[Batch], method: Rounding | GPTQ | AWQ) -> Iterator[LayerReport]:
    """Replace the linear layers of a model's blocks by quantized ones, in order; yields a report after each.

    Embedding, norms and head stay. `layers_of` says how many reports there will be. Where the iteration stops early, the model is left
    between the two.

    Args:
        model: a decoder or encoder, in float32; changed in place.
        batches: calibration text, as `blocks_with_inputs` takes it.
        method: `Rounding` alone rounds to nearest.
    """
    rounding = method if isinstance(method, Rounding) else method.rounding
    require_sizes(model, rounding)
    for name, block, inputs in blocks_with_inputs(model, batches):
        folded = scale_inputs(block, inputs, method, name) if isinstance(method, AWQ) else {}
        for group in shared_inputs(block, name):
            hessian = hessian_of(block, inputs, group)
            for layer in group.layers:
                yield quantize_layer(block, f"{name}.", layer, hessian, method, rounding, folded.get(group.layers[0]))


def layers_of(model: TransformerModel) -> int:
    """How many layers `quantize_model` replaces."""
    return sum(len(group.layers) for name, block in model.stack.blocks.items() for group in shared_inputs(block, f"stack.blocks.{name}"))


def require_sizes(model: TransformerModel, rounding: Rounding) -> None:
    """Reject settings that do not fit some layer's sizes, before any work is done, and name groups that fit. Weights may be on meta."""
    for number, block in model.stack.blocks.items():
        for layer in (layer for group in shared_inputs(block, f"stack.blocks.{number}") for layer in group.layers):
            linear = block.get_submodule(layer)
            try:
                with torch.device("meta"):
                    QuantizedLinear(linear.out_features, linear.in_features, None, rounding)
            except ValueError as error:
                raise ValueError(f"stack.blocks.{number}.{layer}: {error}{groups_that_fit(model)}") from None


def groups_that_fit(model: TransformerModel) -> str:
    """Multiples of 32 that divide the inputs of every layer, in a sentence; empty where there are none."""
    blocks = model.stack.blocks.items()
    names = [(block, layer) for name, block in blocks for group in shared_inputs(block, f"stack.blocks.{name}") for layer in group.layers]
    common = math.gcd(*(block.get_submodule(layer).in_features for block, layer in names))
    fitting = [str(group) for group in range(WORD, common + 1, WORD) if common % group == 0]
    return f" Groups that fit all layers: {', '.join(fitting)}; or null for whole rows." if fitting else ""


def scale_inputs(block: Block, inputs: list[BlockInput], method: AWQ, name: str) -> dict[str, Tensor]:
    """AWQ's scales for each input of a block that can be scaled, folded in: first layer that has it -> scales."""
    found = {}
    for group in shared_inputs(block, name):
        if group.before is not None:
            found[group.layers[0]] = search_scales(block, group, inputs, method, name)
            fold_scales(block, group, found[group.layers[0]])
    return found


def hessian_of(block: Block, inputs: list[BlockInput], group: SharedInput) -> Tensor:
    weight = block.get_submodule(group.layers[0]).weight
    hessian = Hessian(weight.shape[1], torch.promote_types(weight.dtype, torch.float32), weight.device)
    watch(block, inputs, group.layers[0], lambda arguments, kept: hessian.add(arguments[0][kept]))
    return hessian.value()


@torch.no_grad()
def quantize_layer(
    block: Block, prefix: str, layer: str, hessian: Tensor, method: Rounding | GPTQ | AWQ, rounding: Rounding, folded: Tensor | None
) -> LayerReport:
    """Replace one layer. folded: the scales that its weight was multiplied by; plain rounding, for comparison, is of the weight before."""
    linear = block.get_submodule(layer)
    weight = linear.weight.to(hessian.dtype)
    scales = torch.ones_like(weight[0]) if folded is None else folded.to(weight)
    plain = round_to_nearest(weight / scales, rounding).values() * scales
    if isinstance(method, GPTQ):
        quantized = quantize_gptq(weight, hessian, method, prefix + layer)
    else:
        clipped = isinstance(method, AWQ) and method.clip and layer not in UNCLIPPED
        quantized = round_to_nearest(clip_weights(weight, hessian, rounding) if clipped else weight, rounding)
    block.set_submodule(layer, QuantizedLinear.of(quantized, linear.bias, rounding))
    errors = (output_error(weight - values, weight, hessian) for values in (quantized.values(), plain))
    return LayerReport(prefix + layer, *errors)
