"""Chapter 10. PEFT's layers and which of our matrices each of them holds: one, several that a format fuses, or a stack of experts."""

from collections.abc import Collection

import torch
from torch import Tensor

from shared.finetune.adapters import HEAD
from shared.model.config import ModelConfig
from shared.model.hf.format import FileTensor
from shared.model.hf.registry import write_config

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
        """What is trained in it, and how the names of peft's tensors end."""
        return {what: names[self.ours[0].startswith("embedding.")] for what, names in ENDINGS.items()}

    @property
    def is_transposed(self) -> bool:
        """Whether the file's weight is [in, out]."""
        return self.entry is not None and self.entry.pack([torch.empty(self.rows, 1, device="meta") for _ in self.ours]).shape[0] == 1

    def stem(self, present: Collection[str]) -> str:
        """What the names of its tensors begin with. present: the names of all layers that have an update."""
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
