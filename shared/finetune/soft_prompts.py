"""Chapter 10. Prompt tuning and prefix tuning: trained virtual tokens before the text, in front of a frozen model.

    prompt tuning    n trained rows [n, D] take the place of embeddings (Lester et al. 2021)
    prefix tuning    n trained keys and values in every layer (Li and Liang 2021, without the reparametrization)

Virtual token i is the id vocab_size + i. Data puts these ids before each example, as its first positions and without a target. So packing,
document masks, pipelines and shares of a sequence treat them as they treat all tokens, and no layer needs to know how many there are. Under
prefix tuning the rows computed at these positions are wasted: their keys and values are replaced, and nothing else of them is seen.

Left out on purpose: peft's two-layer reparametrization of a prefix, which is thrown away after the training.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from shared.course.errors import SettingError
from shared.finetune.config import AdapterConfig
from shared.model.attention import Attention
from shared.model.context import KeyValueCache
from shared.model.init import initial_value
from shared.model.sharding import cut_parameter, sharding_of
from shared.model.transformer import TransformerModel
from shared.parallel.mesh import Mesh

PROMPT, PREFIX = "prompt", "prefix"  # how the modules of the trained rows are called


class VirtualTokens(nn.Module):
    """Trained rows: `weight` is [n, ...], in the role of embeddings (AdamW's). At first they are normal with deviation `spread`."""

    def __init__(self, shape: tuple[int, ...], spread: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.weight.role = "embedding"
        self.weight.initializer = lambda size, generator: draw(size, generator) * spread


def draw(size: torch.Size, generator: Generator) -> Tensor:
    return torch.randn(size, generator=generator)


def attach_soft_prompt(model: TransformerModel, config: AdapterConfig, seed: int = 0) -> None:
    """Put virtual tokens before a plain model's text, in place, and freeze everything else. The model may be on the meta device.

    Initial values: of prompt tuning normal like the model's own embeddings (`initializer_range`), of prefix tuning standard normal, as in
    peft. They depend on name and seed alone.

    Args:
        config: kind prompt or prefix, and virtual_tokens.
    """
    if model.config.architecture != "decoder":
        raise SettingError(f"adapter.kind {config.kind} is for decoders, and model.architecture is {model.config.architecture}: use lora.")
    if config.virtual_tokens >= model.config.max_position_embeddings:
        raise SettingError(
            f"adapter.virtual_tokens is {config.virtual_tokens}, and the model has {model.config.max_position_embeddings} positions for "
            "them and for the text: give fewer."
        )
    model.requires_grad_(False)
    n, made = config.virtual_tokens, {}
    if config.kind == "prompt":
        made["embedding"] = VirtualTokens((n, model.config.hidden_size), model.config.initializer_range)
        model.embedding.add_module(PROMPT, made["embedding"])
    else:
        for layer, block in model.stack.blocks.items():
            rows = VirtualTokens((n, 2, model.config.num_key_value_heads * model.config.head_dim), 1.0)
            block.attention.add_module(PREFIX, rows)
            made[f"stack.blocks.{layer}.attention"] = rows
        model.register_forward_pre_hook(with_prefixes, with_kwargs=True)
    model.embedding.tokens.forward = embed_virtual_tokens(model.embedding, model.config.vocab_size)
    reference = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    for place, module in made.items():
        name = f"{place}.{PROMPT if config.kind == 'prompt' else PREFIX}.weight"
        if not reference.is_meta:
            with torch.no_grad():
                module.weight.copy_(initial_value(name, module.weight, model.config, seed))
        moved = module.weight.to(reference.device)
        if moved is not module.weight:
            module.weight = move(module.weight, moved)


def move(parameter: nn.Parameter, numbers: Tensor) -> nn.Parameter:
    """A parameter with other numbers, or the same on another device, and with its attributes."""
    moved = nn.Parameter(numbers.detach())
    vars(moved).update(vars(parameter))
    return moved


def virtual_ids(model: TransformerModel) -> list[int]:
    """The ids that come before every text: none for a model without virtual tokens."""
    return list(range(model.config.vocab_size, model.config.vocab_size + count_virtual_tokens(model)))


def count_virtual_tokens(model: nn.Module) -> int:
    """How many virtual tokens a model has: 0 where none were attached to it, or to this part of it."""
    found = [module.weight for module in model.modules() if isinstance(module, VirtualTokens)]
    return getattr(found[0], "sharding", found[0]).shape[0] if found else 0


def embed_virtual_tokens(embedding: nn.Module, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """`tokens.forward` of an embedding: rows of `embedding.prompt` for virtual tokens, or zeros where it has none.

    The class of `embedding.tokens` is asked for when it is called: tensor parallelism changes it.
    """
    tokens = embedding.tokens

    def forward(ids: Tensor) -> Tensor:
        is_virtual = ids >= vocab_size
        rows = type(tokens).forward(tokens, ids.masked_fill(is_virtual, 0))
        prompt = getattr(embedding, PROMPT, None)
        if prompt is None:
            return rows.masked_fill(is_virtual.unsqueeze(-1), 0)
        trained = nn.functional.embedding((ids - vocab_size).clamp(min=0), prompt.weight)
        return torch.where(is_virtual.unsqueeze(-1), trained.to(rows.dtype), rows)

    return forward


class PrefixedCache(KeyValueCache):
    """A KV cache that puts the trained keys and values in the place of the computed ones, at the positions of virtual tokens.

    Args:
        prefixes: the attention modules by layer; their weights are looked up when the layer runs, where FSDP has gathered them.
        positions: [seq] or [batch, seq] int64, of the tokens of this forward pass within their texts.
        inner: the cache of generation, which keeps what this one returns; None while training.
    """

    def __init__(self, prefixes: dict[int, Attention], positions: Tensor, inner: KeyValueCache | None):
        self.prefixes, self.positions, self.inner = prefixes, positions, inner
        self.length = inner.length if inner is not None else 0

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        weight = getattr(self.prefixes[layer], PREFIX).weight
        n, heads, head_dim = len(weight), keys.shape[1], keys.shape[3]
        is_virtual = (self.positions < n).view(-1, 1, self.positions.shape[-1], 1)
        rows = self.positions.clamp(max=n - 1).view(-1, self.positions.shape[-1])
        trained = nn.functional.embedding(rows, weight.flatten(1)).view(*rows.shape, 2, heads, head_dim)
        keys, values = (
            torch.where(is_virtual, trained[:, :, which].transpose(1, 2).to(computed.dtype), computed)
            for which, computed in enumerate((keys, values))
        )
        return (keys, values) if self.inner is None else self.inner.update(layer, keys, values)

    def keys(self, layer_type: str, queries: Tensor) -> Tensor | None:
        return None if self.inner is None else self.inner.keys(layer_type, queries)


def with_prefixes(model: TransformerModel, inputs: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A forward pre-hook: virtual tokens are the first positions of each text, also on a stage of a pipeline that sees no ids."""
    x, inner, positions = inputs[0] if inputs else options["input_ids"], options.get("cache"), options.get("positions")
    if positions is None:
        past = inner.length if inner is not None else 0
        positions = torch.arange(past, past + x.shape[1], device=x.device)
    attentions = {int(layer): block.attention for layer, block in model.stack.blocks.items()}
    return inputs, options | {"cache": PrefixedCache(attentions, positions, inner)}


def shard_prefixes(model: nn.Module, mesh: Mesh) -> None:
    """Tensor parallelism of prefix tuning: each rank has the keys and values of its heads, cut as `k_proj` is, in place.

    Where several ranks hold copies of a head their gradients are parts, as `k_proj`'s are. A prompt is whole on every rank, as the residual
    stream is.
    """
    for module in model.modules():
        rows = getattr(module, PREFIX, None) if isinstance(module, Attention) else None
        sharding = sharding_of(module.k_proj.weight) if rows is not None else None
        if sharding is not None and mesh.tp.size > 1:
            ranges = [(box.offsets[0], box.offsets[0] + box.sizes[0]) for box in sharding.parts]
            part = cut_parameter(rows, "weight", 2, ranges, mesh.tp)
            if hasattr(module.k_proj.weight, "partial_over"):
                part.partial_over = module.k_proj.weight.partial_over


def to_peft(weights: dict[str, Tensor], virtual_tokens: int) -> Tensor:
    """peft's one tensor "prompt_embeddings": [n, D], or for prefixes [n, layers * 2 * K * d], with keys before values in each layer.

    Args:
        weights: the trained tensors by name, whole.
    """
    of_layers = {name: value for name, value in weights.items() if name.endswith(f".{PREFIX}.weight")}
    if not of_layers:
        return weights[f"embedding.{PROMPT}.weight"]
    in_order = sorted(of_layers, key=lambda name: int(name.split(".")[2]))
    return torch.cat([of_layers[name].reshape(virtual_tokens, -1) for name in in_order], dim=1)


def from_peft(table: Tensor, names: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The trained tensors by name, from peft's one tensor.

    Args:
        names: name -> shape of the model's virtual tokens (`VirtualTokens`).
    """
    in_order = sorted(names, key=lambda name: int(name.split(".")[2]) if name.startswith("stack.") else 0)
    wanted = (next(iter(names.values()))[0], sum(names[name][1:].numel() for name in in_order))
    if tuple(table.shape) != wanted:
        raise SettingError(
            f"The adapter's prompt_embeddings have the shape {list(table.shape)}, and this model needs {list(wanted)}: it was trained for "
            "another model, or with another number of virtual tokens."
        )
    parts = table.split([names[name][1:].numel() for name in in_order], dim=1)
    return {name: part.reshape(names[name]).contiguous() for name, part in zip(in_order, parts, strict=True)}
