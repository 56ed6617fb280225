"""Chapter 10. Attach LoRA adapters to a model: target modules by name pattern, a frozen base, several adapters, merge and unmerge.

    attach_adapter(model, config)     on a plain model, also on the meta device; then `apply_parallel`, optimizer, training
    use_adapters(model, ["one"])      which of several take part; none: the base model
    merge_adapter(model)              the updates become part of the weights; `unmerge_adapter` puts the very weights back

An adapted layer keeps its place, its name and its parameters' names; its class gets another one in front. So initial values, files and the
plans of tensor parallelism find the base as they know it.

**Tied embeddings**: an update of the embedding or of the head is that layer's alone, as in peft. Merged into the one matrix that both use
it would change the other layer too, so that is refused.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial

import torch
from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.finetune.config import ALL_LINEAR, AdapterConfig
from shared.finetune.lora import AdaptedEmbedding, AdaptedExperts, AdaptedLayer, AdaptedLinear, LowRankUpdate
from shared.finetune.soft_prompts import attach_soft_prompt
from shared.model.init import local_initial_value, stream_seed
from shared.model.transformer import TIED, TIED_TO, TransformerModel
from shared.moe.experts import ExpertLinear

DEFAULT = "default"
Draw = Callable[..., Tensor]  # draw(shape, generator=...)
HEAD = TIED.removesuffix(".weight")
TOKENS = TIED_TO.removesuffix(".weight")


@dataclass(frozen=True)
class LayerUpdate:
    """What is known of one layer's update on every process, also on those that do not hold the layer. scaling: what multiplies B A."""

    rank: int
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model, as `model.adapters[name]` has it. layers: module name -> its update."""

    config: AdapterConfig
    layers: dict[str, LayerUpdate]


def attach_adapter(model: TransformerModel, config: AdapterConfig, name: str = DEFAULT, seed: int = 0) -> TransformerModel:
    """Freeze a model and give some of its layers trained low-rank updates, in place. The model computes what it did: B is zero.

    Initial values are peft's: A is uniform within 1 / sqrt(in); in an embedding's update A is zero and B normal. They depend on a
    parameter's name and the seed, so on no layout, and on the meta device they are drawn when the model gets its memory.

    Args:
        model: whole and plain, before `apply_parallel`; it may have other adapters already, which are frozen and inactive from now on.
        config: of kind lora; virtual tokens are attached by `shared.finetune.soft_prompts`.
        name: of the adapter.
        seed: of the initial values; with decomposed on the meta device, that of the model's too.

    Returns:
        The model.
    """
    if config.kind != "lora":
        attach_soft_prompt(model, config, seed)
        model.adapters = {name: Adapter(config, {})}
        return model
    layers = {each: LayerUpdate(config.rank, config.scaling) for each in target_modules(model, config.targets)}
    for each in layers:
        if config.rank > min(sides := update_shape(model.get_submodule(each))[-2:]):
            weight = f"the weight of {each} is {sides[0]} x {sides[1]}"
            raise SettingError(f"adapter.rank is {config.rank}, and {weight}: give at most {min(sides)}, or do not target it.")
    return add_updates(model, Adapter(config, layers), name, seed)


def add_updates(model: TransformerModel, adapter: Adapter, name: str = DEFAULT, seed: int = 0) -> TransformerModel:
    """`attach_adapter`, with what is known of each layer."""
    adapters = adapters_of(model)
    if name in adapters or not name or "." in name:
        raise SettingError(f"{name!r} cannot name another adapter: give a name without dots that is not one of {sorted(adapters)}.")
    model.requires_grad_(False)
    for module_name, update in adapter.layers.items():
        module = model.get_submodule(module_name)
        if adapter.config.decomposed and isinstance(module, nn.Embedding | ExpertLinear):
            raise SettingError(f"adapter.decomposed is for linear layers, and {module_name} is {kind_of(module)}: do not target it.")
        add_update(model, module_name, adapt(module), update, adapter.config, name, seed)
    model.adapters = adapters | {name: adapter}
    use_adapters(model, [name])
    return model


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """A model's adapters by name."""
    return getattr(model, "adapters", {})


def target_modules(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The names of the layers that some patterns mean, in the model's order."""
    possible = {name: module for name, module in model.named_modules() if can_adapt(module)}
    found: set[str] = set()
    for pattern in targets:
        if pattern == ALL_LINEAR:
            matched = {name for name, module in possible.items() if name != HEAD and not isinstance(module, nn.Embedding | ExpertLinear)}
        else:
            matched = {name for name in possible if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not matched:
            endings = list(dict.fromkeys(name.rpartition(".")[2] for name in possible))
            nearest = difflib.get_close_matches(pattern, endings, n=1)
            offered = f"Did you mean {nearest[0]!r}? " if nearest else ""
            raise SettingError(f"adapter.targets: no layer has a name like {pattern!r}. {offered}Their names end in {', '.join(endings)}.")
        found |= matched
    return [name for name in possible if name in found]


def can_adapt(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding | ExpertLinear) or hasattr(module, "base_product")


def kind_of(module: nn.Module) -> str:
    return "an embedding" if isinstance(module, nn.Embedding) else "a stack of experts"


def update_shape(module: nn.Module) -> tuple[int, ...]:
    """[..., out, in] of a layer's whole weight, as a linear layer has it: an embedding's input is one-hot."""
    if isinstance(module, ExpertLinear):
        return tuple(module.weight.shape)
    if isinstance(module, nn.Embedding):
        return module.embedding_dim, module.num_embeddings
    return module.out_features, module.in_features


@cache
def adapted(plain: type[nn.Module]) -> type[AdaptedLayer]:
    """The class of layers of a class that have adapters."""
    if issubclass(plain, nn.Embedding):
        return AdaptedEmbedding
    front = AdaptedExperts if issubclass(plain, ExpertLinear) else AdaptedLinear
    return type(f"Adapted{plain.__name__}", (front, plain), {})


def adapt(module: nn.Module) -> AdaptedLayer:
    """Make a layer one that can have adapters, in place."""
    if not isinstance(module, AdaptedLayer):
        module.plain_class, module.__class__ = type(module), adapted(type(module))
        module.adapters = nn.ModuleDict()
    return module


def add_update(
    model: TransformerModel, module_name: str, layer: AdaptedLayer, update: LayerUpdate, config: AdapterConfig, name: str, seed: int
) -> None:
    """Give a layer an update with its initial values, or on the meta device with what draws them."""
    reference = next(model.parameters())  # the embedding's, which no base quantizes
    options = {"dropout": config.dropout, "decomposed": config.decomposed, "dtype": reference.dtype, "device": reference.device}
    made = LowRankUpdate(update_shape(layer), update.rank, update.scaling, **options)
    layer.adapters[name] = made
    first = {"lora_A": kaiming_uniform, "lora_B": zeros}
    if isinstance(layer, nn.Embedding):
        first = {"lora_A": zeros, "lora_B": torch.randn}
    if made.magnitude is not None:
        first["magnitude"] = partial(row_norms, f"{module_name}.weight", layer, model, seed)
    for attribute, draw in first.items():
        parameter, full_name = getattr(made, attribute), f"{module_name}.adapters.{name}.{attribute}"
        if parameter.is_meta:
            parameter.initializer = partial(drawn, draw, full_name, seed)
        else:
            parameter.data.copy_(drawn(draw, full_name, seed, parameter.shape))


def drawn(draw: Draw, name: str, seed: int, shape: Sequence[int], *of_model: torch.Generator) -> Tensor:
    """An initial value from the adapter's seed and the parameter's name, whatever generator the model has for it."""
    return draw(shape, generator=torch.Generator().manual_seed(stream_seed(name, seed)))


def kaiming_uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Uniform within 1 / sqrt(in): peft's `kaiming_uniform_(a=sqrt(5))` of a matrix [..., r, in]."""
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / math.sqrt(shape[-1])


def zeros(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.zeros(shape)


def row_norms(name: str, layer: AdaptedLinear, model: nn.Module, seed: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """DoRA's first magnitudes: the norms of the rows of the whole weight, which with B = 0 changes nothing."""
    weight = layer.base_weight(torch.float32)
    if weight.is_meta:
        weight = local_initial_value(name, weight, model.config, seed)
    return torch.linalg.vector_norm(weight.detach(), dim=-1, dtype=torch.promote_types(weight.dtype, torch.float32))


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """The layers that have adapters, by module name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLayer))


def use_adapters(model: nn.Module, names: Sequence[str], trained: bool = True) -> None:
    """Activate these adapters, in the forward pass and for training; the others are frozen. None: the base model. Updates add up, and
    each DoRA scales the base's rows alone, so their order does not matter.
    """
    if unknown := [name for name in names if name not in adapters_of(model)]:
        raise SettingError(f"The model has no adapter {unknown[0]!r}: it has {sorted(adapters_of(model))}.")
    model.active_adapters = tuple(names)  # also on a pipeline's stage without a layer that has one
    for module_name, layer in adapted_layers(model):
        if layer.unmerged is not None:
            raise SettingError(f"Adapters are merged into {module_name}: call unmerge_adapter first.")
        layer.active = tuple(names)
        for name, update in layer.adapters.items():
            update.requires_grad_(trained and name in names)


@contextmanager
def base_model(model: nn.Module) -> Iterator[None]:
    """Within it, the model computes without its adapters."""
    before = {layer: layer.active for _, layer in adapted_layers(model)}
    for layer in before:
        layer.active = ()
    try:
        yield
    finally:
        for layer, active in before.items():
            layer.active = active


@torch.no_grad()
def merge_adapter(model: TransformerModel) -> None:
    """Merge the active updates into the weights, which then compute the same at a plain model's cost. Each weight is rounded once to its
    dtype; the original is kept, so `unmerge_adapter` loses nothing. Also on a tensor-parallel rank, with its slices.
    """
    require_untied(model, [name for name, layer in adapted_layers(model) if layer.updates])
    for name, layer in adapted_layers(model):
        if not layer.updates:
            continue
        if "weight" not in layer._parameters:
            raise SettingError(f"{name} has no float weight that an update could be added to: dequantize the base first.")
        if (sharding := getattr(layer.weight, "sharding", None)) is not None and not sharding.region.is_box:
            raise SettingError(f"This rank holds flattened numbers of {name}.weight: export the merged model with merged_weights instead.")
        merged, layer.unmerged = merged_weight(layer, layer.updates), layer.weight.data
        layer.weight.data = merged


@torch.no_grad()
def unmerge_adapter(model: nn.Module) -> None:
    """Put back the weights as they were before `merge_adapter`, bit for bit."""
    for _, layer in adapted_layers(model):
        if layer.unmerged is not None:
            layer.weight.data, layer.unmerged = layer.unmerged, None


def detach_adapters(model: nn.Module) -> None:
    """For scripts: make a model plain again, to save it, with its weights as they were, or merged where `merge_adapter` was called."""
    for _, layer in list(adapted_layers(model)):
        layer.__class__ = layer.plain_class
        del layer.adapters
        for fact in ("plain_class", "active", "unmerged", "own_masks"):
            vars(layer).pop(fact, None)
    model.adapters = {}


def merged_weight(layer: AdaptedLayer, updates: Sequence[LowRankUpdate]) -> Tensor:
    """A layer's weight with some updates, in its dtype."""
    weight = layer.weight.T if isinstance(layer, nn.Embedding) else layer.weight
    result = merge_all(weight.detach(), updates)
    return result.T.contiguous() if isinstance(layer, nn.Embedding) else result


def merge_all(weight: Tensor, updates: Sequence[LowRankUpdate]) -> Tensor:
    """[..., out, in] with some updates, each of which starts from `weight`; rounded once to its dtype."""
    if len(updates) == 1:
        return updates[0].merged(weight)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return (wide + sum(update.merged(wide) - wide for update in updates)).to(weight.dtype)


def require_untied(model: nn.Module, names: Collection[str]) -> None:
    if model.config.tie_word_embeddings and (tied := sorted({HEAD, TOKENS} & set(names))):
        raise SettingError(
            f"The update of {tied[0]} cannot be merged: embedding and head are one matrix (tie_word_embeddings), and the other layer would "
            "change with it. Save the adapter beside the model instead."
        )
