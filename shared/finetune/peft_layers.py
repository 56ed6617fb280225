"""Chapter 10. PEFT layers: which of our matrices each of them holds, and how its tensors in peft's files relate to ours.

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

from shared.finetune.adapters import HEAD, Adapter, LayerUpdate, update_shape
from shared.finetune.config import AdapterConfig
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError
from shared.model.hf.format import FileTensor
from shared.model.hf.pretrained import Weights
from shared.model.hf.registry import write_config
from shared.model.transformer import TransformerModel

ROOT = "base_model.model."
ROUTER = re.compile(r"\.(mlp|block_sparse_moe)\.gate\.(base_layer\.)*lora_")
UP, DOWN = "gate_up_proj", "down_proj"  # of experts
ENDINGS = {  # of tensors: what is trained in a layer, as peft 0.21 writes it; embeddings have names of their own
    "lora_A": (".lora_A.weight", ".lora_embedding_A"),
    "lora_B": (".lora_B.weight", ".lora_embedding_B"),
    "magnitude": (".lora_magnitude_vector", ".lora_magnitude_vector"),
}


class Place:
    """A layer of peft's, and how it holds one or several of ours. entry: the tensor of its weight; None for a tied head. rows: of a matrix
    with all heads."""

    def __init__(self, name: str, entry: FileTensor | None, ours: tuple[str, ...], rows: int):
        self.name, self.entry, self.ours, self.rows = name, entry, ours, rows

    @property
    def endings(self) -> dict[str, str]:
        """The trained parts, and the endings of peft's tensor names."""
        return {what: names[self.ours[0].startswith("embedding.")] for what, names in ENDINGS.items()}

    @property
    def is_transposed(self) -> bool:
        """Whether the file's weight is [in, out]."""
        return self.entry is not None and self.entry.pack([torch.empty(self.rows, 1, device="meta") for _ in self.ours]).shape[0] == 1

    def stem(self, present: Collection[str]) -> str:
        """The prefix of its tensors' names. present: the names of all layers that have an update."""
        return self.name

    def is_meant(self, parameters: Collection[str]) -> bool:
        """Whether a file may hold it. parameters: its `target_parameters`."""
        return True

    def whole(self, lora_A: Tensor) -> Tensor:
        """Our A as the file's."""
        return lora_A

    def part(self, lora_A: Tensor) -> Tensor:
        """The file's A as ours."""
        return lora_A

    def join(self, parts: list[Tensor]) -> Tensor:
        """Rows of our layers [out, n] -> rows of the file's layer, in its order."""
        if self.entry is None or len(self.ours) == 1:
            return parts[0]
        packed = self.entry.pack(parts)
        return packed.T if self.is_transposed else packed

    def take(self, whole: Tensor, index: int, rows: int) -> Tensor:
        """The rows of one of our layers, out of the file's layer's [out, n]."""
        if self.entry is None or len(self.ours) == 1:
            return whole
        shape = rows, whole.shape[1]
        there, take = self.entry.locate([(0, size) for size in shape], index, shape)
        return take((whole.T if self.is_transposed else whole)[tuple(slice(*each) for each in there)])


class ExpertsPlace(Place):
    """A parameter of a layer's experts in transformers 5, [E, out, in], which peft wraps (`target_parameters`): gate_up_proj holds our
    gates and ups, down_proj our downs. peft's A is [E r, in], expert by expert, and B [out, r E], where column e + E k is column k of
    expert e."""

    def __init__(self, layer: str, parameter: str, ours: tuple[str, ...], experts: int):
        super().__init__(f"{layer}.{parameter}", None, ours, 0)
        self.layer, self.experts = layer, experts

    def stem(self, present: Collection[str]) -> str:
        """The wrapper of down_proj is around that of gate_up_proj, if both are there."""
        return self.layer + ".base_layer" * (self.name.endswith(UP) and f"{self.layer}.{DOWN}" in present)

    def is_meant(self, parameters: Collection[str]) -> bool:
        return any(self.name == each or self.name.endswith(f".{each}") for each in parameters)

    def whole(self, lora_A: Tensor) -> Tensor:
        return lora_A.flatten(0, 1)

    def part(self, lora_A: Tensor) -> Tensor:
        return lora_A.unflatten(0, (self.experts, -1))

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=1).permute(1, 2, 0).flatten(1)

    def take(self, whole: Tensor, index: int, rows: int) -> Tensor:
        return whole.unflatten(1, (-1, self.experts)).permute(2, 0, 1)[:, index * rows : (index + 1) * rows]


def places_of(config: ModelConfig, model_type: str | None = None) -> list[Place]:
    """The layers of the format of a model's files whose weights are matrices of ours."""
    known, _ = write_config(config, model_type)
    rows = config.num_attention_heads * config.head_dim
    entries = [entry for entry in known.tensors(config) if entry.name.endswith(".weight") and entry.part is None]
    places = [
        Place(entry.name.removesuffix(".weight"), entry, tuple(name.removesuffix(".weight") for name in entry.ours), rows)
        for entry in entries
    ]
    if config.tie_word_embeddings and known.tied:
        places.append(Place(known.tied[0].removesuffix(".weight"), None, (HEAD,), rows))
    return places + experts_places(known.tensors(config), config)


def experts_places(entries: list[FileTensor], config: ModelConfig) -> list[ExpertsPlace]:
    """The parameters of the experts of each layer; the formats whose files hold each expert by itself name their module alike."""
    stacks = [entry.ours[0].removesuffix(".weight") for entry in entries if entry.part == 0]
    found = []
    for layer in dict.fromkeys(name.rpartition(".")[0] for name in stacks):
        theirs = f"model.layers.{layer.split('.')[2]}.mlp.experts"
        held = {UP: (f"{layer}.gate_proj", f"{layer}.up_proj"), DOWN: (f"{layer}.down_proj",)}
        found += [ExpertsPlace(theirs, parameter, ours, config.experts.num_experts) for parameter, ours in held.items()]
    return found


def layers_in_files(config: ModelConfig, modules: list[str], model_type: str | None) -> dict[Place, list[str]]:
    """The layers of a format that hold some of ours, and which of ours are meant."""
    places = [place for place in places_of(config, model_type) if set(place.ours) & set(modules)]
    if missing := sorted(set(modules) - {name for place in places for name in place.ours}):
        raise ValueError(f"peft has no layer for the adapter of {missing[0]}, so it cannot be saved so: leave it out of targets.")
    return {place: [name for name in place.ours if name in modules] for place in places}


def short_names(layers: Collection[str], places: Collection[Place]) -> list[str]:
    """`target_modules`: the last parts of layers' names, such as q_proj, where peft finds exactly these layers by them; else whole names.

    Args:
        layers: that have an update.
        places: every layer of the format. Experts are kept as layers by some versions of transformers and not by others, so beside them
            names stay whole.
    """
    last = lambda name: name.rpartition(".")[2]  # noqa: E731
    if any(isinstance(place, ExpertsPlace) for place in places):
        return sorted(layers)
    others = {last(place.name) for place in places if place.name not in layers}
    return sorted({last(name) if last(name) not in others else name for name in layers})


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
    if routers := [key for key in left if ROUTER.search(key)]:
        raise PretrainedError(f"The adapter in {folder} updates a router ({routers[0]}), which is not built here: merge it in peft.")
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
    left = without_base(model, folder, places, left)
    if left or not layers:
        unknown = f": no layer of it has {sorted(left)[0]}" if left else ", and holds no tensor of it"
        raise PretrainedError(f"The adapter in {folder} is for another model{unknown}.")
    return values, layers


def without_base(model: TransformerModel, folder: Path, places: list[Place], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's tensors without the base's own weights, which peft saves of embedding and head where one of them is a target, or where
    the vocabulary has grown.

    Raises:
        PretrainedError: such a weight is not the base's.
    """
    left = dict(tensors)
    for place in places:
        for key in (f"{ROOT}{place.name}.base_layer.weight", f"{ROOT}{place.name}.weight"):
            if key not in left:
                continue
            theirs, own = left.pop(key), weight_of(model, place.ours[0])
            if theirs.shape != own.shape:
                raise PretrainedError(
                    f"The adapter in {folder} brings {place.name} as {list(theirs.shape)}, and the base has {list(own.shape)}: it was "
                    "trained after the vocabulary had changed. Merge it in peft, and start from the merged model."
                )
            if not (torch.equal(theirs.to(own.dtype), own) or torch.equal(theirs, own.to(theirs.dtype))):
                raise PretrainedError(
                    f"The adapter in {folder} brings another {place.name} than the base's, trained beside the updates, which is not built "
                    "here: merge it in peft, and start from the merged model."
                )
    return left


def weight_of(model: TransformerModel, module: str) -> Tensor:
    """The weight of a layer; of a tied head, the embedding's. On the meta device it is read from its files."""
    names = dict(model.named_parameters())
    weight = names.get(f"{module}.weight", model.embedding.tokens.weight)
    return weight.stored([0] * weight.dim(), list(weight.shape)) if weight.is_meta else weight.detach().cpu()
