"""Chapter 10. PEFT layers: how an adapter's tensors in peft's files relate to ours, also of fused and transposed weights.

Where a format keeps several of our matrices as one (GPT-2's c_attn), peft has one A and one B for all of them. Ours become factors of such
a layer without loss: A's stand under one another, and each B fills its own rows and columns, so the rank is the sum of theirs. (Equal A's
are written once.) The other way round, each of our matrices gets all of A and its rows of B: the same model, of that larger rank.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shared.finetune.adapters import Adapter, LayerUpdate, update_shape
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_places import ENDINGS, Place, places_of
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import Weights
from shared.model.transformer import TransformerModel

ROOT = "base_model.model."


def packed(
    place: Place, modules: list[str], adapter: Adapter, name: str, weights: Weights
) -> tuple[dict[str, Tensor], LayerUpdate]:
    """The tensors of one of peft's layers by the ending of their names, nothing where this process does not write; and its update."""
    if len({adapter.layers[module].scaling for module in modules}) > 1:
        raise ValueError(f"peft's layer {place.name} holds {', '.join(modules)}, whose updates are scaled differently: save them apart.")
    collected = {(module, what): weights.collect(f"{module}.adapters.{name}.{what}") for module in modules for what in parts_of(adapter)}
    ranks, scaling = [adapter.layers[module].rank for module in modules], adapter.layers[modules[0]].scaling
    if not weights.writes:
        return {}, LayerUpdate(sum(ranks), scaling)
    of_a, of_b = ([collected[module, what] for module in modules] for what in ("lora_A", "lora_B"))
    is_shared = len(modules) == len(place.ours) and all(torch.equal(each, of_a[0]) for each in of_a)
    lora_A = of_a[0] if is_shared else torch.cat(of_a, dim=-2)
    starts = [0 if is_shared else sum(ranks[:number]) for number in range(len(ranks))]
    rows = []
    for module in place.ours:
        out = weights.like[f"{module}.weight"].shape[-2] if len(place.ours) > 1 else of_b[0].shape[-2]
        row = lora_A.new_zeros(*lora_A.shape[:-2], out, lora_A.shape[-2])
        if module in modules:
            number = modules.index(module)
            row[..., starts[number] : starts[number] + ranks[number]] = of_b[number]
        rows.append(row)
    made = {place.endings["lora_A"]: place.whole(lora_A), place.endings["lora_B"]: place.join(rows)}
    if adapter.config.decomposed:
        made[place.endings["magnitude"]] = place.join([collected[module, "magnitude"].unsqueeze(1) for module in place.ours]).squeeze(1)
    return made, LayerUpdate(lora_A.shape[-2], scaling)


def parts_of(adapter: Adapter) -> list[str]:
    return ["lora_A", "lora_B", *(["magnitude"] if adapter.config.decomposed else [])]


def unpacked(
    model: TransformerModel,
    folder: Path,
    config: AdapterConfig,
    alphas: Mapping[str, float],
    parameters: Collection[str],
    tensors: Mapping[str, Tensor],
) -> tuple[dict[tuple[str, str], Tensor], dict[str, LayerUpdate]]:
    """Our layers' values by (module, what), and each layer's update, of an adapter's tensors. alphas: by pattern of peft's layers' names.
    parameters: `target_parameters`.
    """
    values: dict[tuple[str, str], Tensor] = {}
    layers: dict[str, LayerUpdate] = {}
    left = dict(tensors)
    places = [place for place in places_of(model.config) if place.is_meant(parameters)]
    present = [place.name for place in places]
    for place in places:
        keys = {what: f"{ROOT}{place.stem(present)}{ending}" for what, ending in place.endings.items()}
        given = {what: left.pop(key) for what, key in keys.items() if key in left}
        if not given:
            continue
        lora_A, lora_B, magnitude = (given.get(what) for what in ENDINGS)
        shapes = [update_shape(model.get_submodule(module)) for module in place.ours]
        inputs, outputs, stacked = shapes[0][-1], [shape[-2] for shape in shapes], math.prod(shapes[0][:-2])
        rank = 0 if lora_A is None else len(lora_A) // stacked
        wanted = {"lora_A": (rank * stacked, inputs), "lora_B": (sum(outputs), rank * stacked)}
        wanted |= {"magnitude": (sum(outputs),)} if config.decomposed else {}
        found = {what: tuple(tensor.shape) for what, tensor in given.items()}
        if found != wanted or not rank:
            raise PretrainedError(
                f"The adapter in {folder} is for another model: {place.name} has {found} there, and {wanted} would fit this model."
            )
        alpha = next((alpha for key, alpha in alphas.items() if re.match(rf"(.*\.)?({key})$", place.name)), config.alpha)
        update = LayerUpdate(rank, replace(config, rank=rank, alpha=alpha).scaling)
        for index, module in enumerate(place.ours):
            layers[module] = update
            values[module, "lora_A"] = place.part(lora_A)
            values[module, "lora_B"] = place.take(lora_B, index, outputs[index])
            if magnitude is not None:
                values[module, "magnitude"] = place.take(magnitude.unsqueeze(1), index, outputs[index]).squeeze(1)
    if left or not layers:
        unknown = f": no layer of it has {sorted(left)[0]}" if left else ", and holds no tensor of it"
        raise PretrainedError(f"The adapter in {folder} is for another model{unknown}.")
    return values, layers
