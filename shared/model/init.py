"""Chapter 02. Weight initialization, on the meta device or not: initial weights depend on a parameter's name and the seed alone.

Each parameter has a separate stream of random numbers, seeded by its name, so a model cut in two, built in another order
or on another device starts with the same weights. A sharded parameter is drawn whole, and the shard taken from that. Matrices and
embeddings are normal with `initializer_range`; the matrices that write into the residual stream are divided by sqrt(number of additions),
so that its variance does not grow with depth (Radford et al. 2019, section 2.3). With post-norm nothing grows, and nothing is divided.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from shared.model.config import ModelConfig
from shared.model.roles import role_of
from shared.model.sharding import Sharding


def initial_value(name: str, parameter: Tensor, config: ModelConfig, seed: int) -> Tensor:
    """The initial value of a whole parameter: float32 on the CPU, in its shape, or in that of its `sharding`.

    A parameter that carries a function as attribute `initializer` gets what that returns for (shape, generator).

    Args:
        name: its name in the uncut model.
        parameter: for its shape and its attributes `role`, `initializer` and `sharding`; its values are not read, and it may be on any
            device.
        config: a resolved configuration.
        seed: the model's.
    """
    generator = torch.Generator().manual_seed(stream_seed(name, seed))
    shape = getattr(parameter, "sharding", parameter).shape
    if initializer := getattr(parameter, "initializer", None):
        return initializer(shape, generator)
    role = role_of(name, parameter)
    if role == "norm":
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
    if role == "bias":
        return torch.zeros(shape)
    return torch.randn(shape, generator=generator) * standard_deviation(name, config)


def local_initial_value(name: str, parameter: Tensor, config: ModelConfig, seed: int, sharding: Sharding | None = None) -> Tensor:
    """What this process holds of a parameter's initial value: all of it, or, where it is sharded, its part.

    A parameter that carries a function as attribute `stored` gets what that returns for (offsets, sizes) of a slice of the whole: what is
    stored of it in files (`shared.model.hf.pretrained.open_pretrained`).

    Args:
        As for `initial_value`.
        sharding: the part, where it is not the parameter's own.
    """
    sharding = sharding or getattr(parameter, "sharding", None)
    if stored := getattr(parameter, "stored", None):
        if sharding is None:
            return stored((0,) * parameter.dim(), parameter.shape)
        region = sharding.region
        numbers = stored(region.offsets, region.sizes)
        return numbers if region.is_box else numbers.reshape(-1)[region.start : region.stop]
    whole = initial_value(name, parameter, config, seed)
    return whole if sharding is None else sharding.local(whole)


def stream_seed(name: str, seed: int) -> int:
    """63 bits that another name or another seed changes completely."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1


def standard_deviation(name: str, config: ModelConfig) -> float:
    """Of a matrix or an embedding.

    Where the scores are not divided by sqrt(head_dim), the queries start smaller by as much (Raffel et al. 2019).
    """
    if name.endswith(("o_proj.weight", "down_proj.weight")) and config.norm_position == "pre":
        stack = config.encoder() if name.startswith("encoder.") else config
        additions = stack.num_hidden_layers * (3 if stack.architecture == "encoder-decoder" else 2)
        return config.initializer_range / math.sqrt(additions)
    if name.endswith("q_proj.weight"):
        return config.initializer_range * config.head_dim**-0.5 / config.attention_scale
    return config.initializer_range


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Set every parameter of a `TransformerModel`, whole or cut, to its initial value."""
    for name, parameter in model.named_parameters():
        parameter.copy_(local_initial_value(model.logical_name(name), parameter, model.config, seed))


def materialize(model: nn.Module, device: torch.device | str, seed: int) -> None:
    """Give a model that was built on the meta device its memory and its initial weights.

    A model too large to build whole is built under `with torch.device("meta")`, cut, and then materialised.
    """
    allocate(model, device)
    initialize(model, seed)


def forget_files(model: nn.Module) -> None:
    """Remove the function `stored` from parameters whose weights are in memory: nothing need know where they came from."""
    for parameter in model.parameters():
        vars(parameter).pop("stored", None)


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """`model.to_empty(device)` that keeps the attributes of parameters, and tied parameters tied."""
    before = dict(model.named_parameters(remove_duplicate=False))
    model.to_empty(device=device)
    made: dict[Tensor, nn.Parameter] = {}
    for name, old in before.items():
        module, _, attribute = name.rpartition(".")
        owner = model.get_submodule(module)
        parameter = made.setdefault(old, getattr(owner, attribute))
        vars(parameter).update(vars(old))
        setattr(owner, attribute, parameter)
