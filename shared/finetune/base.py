"""Chapter 10. The base model of an adapter, apart from it: adapter-only checkpoints, and the export of a merged model from any layout.

A run that trains an adapter changes a thousandth of its weights. Its checkpoints hold the trained ones, with the optimizer's state, and not
the base, of which the run's folder keeps the path and a fingerprint: who resumes reads the base from its files.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shared.finetune.adapters import adapters_of, merge_all, require_untied
from shared.finetune.lora import LowRankUpdate
from shared.finetune.quantization.frozen import FrozenLinear
from shared.model.hf.pretrained import Weights, whole_weights
from shared.model.transformer import TIED_TO, TransformerModel

MARK = ".adapters."  # in the names of an adapter's parameters, behind the layer's


def keep_base_out(model: TransformerModel) -> TransformerModel:
    """Leave the frozen parameters of a model out of its checkpoints, which can then be resumed only on the same base. Before
    `apply_parallel`. The caller sees to it that the base's files are there and are the same (`start_from` of a run). Returns the model."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.kept_elsewhere = True
    return model


def merged_weights(model: TransformerModel, weights: Weights | None = None) -> Weights:
    """The weights of a model with its active adapters merged, for `save_pretrained`: one matrix at a time, in any layout.

    A quantized base is dequantized first. Each merged matrix is rounded once to its dtype, a dequantized one's is the embedding's.

    Args:
        model: this process's part of it.
        weights: of the model, with its adapters (`ParallelStrategy.weights`); None for a model that this process holds whole. All processes
            collect the same names in the same order.
    """
    weights = weights or whole_weights(model)
    adapters = [(name, adapters_of(model)[name]) for name in getattr(model, "active_adapters", ())]
    require_untied(model, [module for _, adapter in adapters for module in adapter.layers])
    dtype = weights.like[TIED_TO].dtype
    frozen = {kind_of_layer(name): layer for name, layer in model.named_modules() if isinstance(layer, FrozenLinear)}
    like: dict[str, Tensor] = {}
    packed: dict[str, FrozenLinear] = {}
    for name, tensor in weights.like.items():
        module, _, attribute = name.rpartition(".")
        layer = frozen.get(kind_of_layer(module))
        if layer is not None and attribute in layer.stored:
            packed[f"{module}.weight"] = layer
            like[f"{module}.weight"] = torch.empty(layer.weight_shape, dtype=dtype, device="meta")
        elif MARK not in name:
            like[name] = tensor

    def collect(name: str) -> Tensor | None:
        module = name.rpartition(".")[0]
        if name in packed:
            stored = [weights.collect(f"{module}.{each}") for each in packed[name].stored]
            base = packed[name].dequantize(dtype, *stored) if weights.writes else None
        else:
            base = weights.collect(name)
        updates = []
        for adapter_name, adapter in adapters if name.endswith(".weight") else ():
            if module in adapter.layers:
                prefix = f"{module}{MARK}{adapter_name}."
                values = {each.removeprefix(prefix): weights.collect(each) for each in weights.like if each.startswith(prefix)}
                updates += [update_of(values, adapter.layers[module].scaling)] if weights.writes else []
        if not updates:
            return base
        is_embedding = module.startswith("embedding.")
        merged = merge_all(base.T if is_embedding else base, updates)
        return merged.T.contiguous() if is_embedding else merged

    return Weights(like, collect, weights.writes)


def kind_of_layer(name: str) -> str:
    """What layers of all blocks have in common in their names. A process that writes has one block at least, whose layers are like the
    layers of blocks that it has not."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def update_of(values: Mapping[str, Tensor], scaling: float) -> LowRankUpdate:
    """An update with these values."""
    lora_A, lora_B = values["lora_A"], values["lora_B"]
    shape = (*lora_A.shape[:-2], lora_B.shape[-2], lora_A.shape[-1])
    options = {"decomposed": "magnitude" in values, "dtype": lora_A.dtype, "device": "meta"}
    update = LowRankUpdate(shape, lora_A.shape[-2], scaling, **options)
    for name, value in values.items():
        setattr(update, name, nn.Parameter(value))
    return update
