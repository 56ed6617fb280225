"""What the stages of build 10 share: models, configs, factors, and the oracle, in which each adapted layer has one dense weight W + s B A.

Gradients of the factors are taken through the dense weight, so the oracle has no narrow product. tests/parity/test_10_build.py holds it
against peft. Tolerance: (x A^T) B^T and x (B A)^T round differently, which moves float64 by some 1e-15 of the largest summand.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.course.comparing import Said

TEXT = "the text of build.py: stage {}"
DENSE = "the model with one dense weight W + s B A for each adapted layer, in float64"
NEAR = {"rtol": 1e-9, "atol": 1e-9}
EXACT = {"rtol": 0.0, "atol": 0.0}
WITHIN = "within the budget"

Results = dict[str, Any]
Config = dict[str, Any]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Models. Widths of inputs are 5, and every dimension is another number.


class Mixer(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.q_proj, self.kq_proj = nn.LayerNorm(width), nn.Linear(width, inner, bias=False), nn.Linear(width, inner)
        self.out = nn.ModuleDict({"proj": nn.Linear(inner, width)})

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.out["proj"](torch.tanh(self.q_proj(h)) * torch.sigmoid(self.kq_proj(h)))


class Net(nn.Module):
    """layers.0.norm, layers.0.q_proj, layers.0.kq_proj, layers.0.out.proj, ..., embed, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(5, 6), nn.ModuleList([Mixer(6, 7), Mixer(6, 8)]), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Twice(nn.Module):
    """One block that stands at two places."""

    def __init__(self) -> None:
        super().__init__()
        block = Mixer(5, 7)
        self.first, self.then, self.head = block, block, nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.then(self.first(x)))


class Tied(nn.Module):
    """A head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(9, 6), Mixer(6, 7), nn.Linear(6, 9)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(ids)))


class Strange(nn.Module):
    """Names that an implementation may use itself, a buffer, and a layer that is called with several inputs before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.model, self.lora_A, self.weight = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 5, bias=False), nn.Linear(5, 4)
        self.register_buffer("shift", torch.zeros(5))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = self.lora_A(torch.tanh(self.model(self.base(x)))) + self.shift
        return self.weight(x) + self.weight(more[0] if more else 2 * x)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


def dropping() -> nn.Module:
    """In training mode nothing but the last bias comes out."""
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(1.0), nn.Linear(6, 4))


def made(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with weights of its own, always the same."""
    model, generator = kind().to(dtype), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / max(1, tensor.shape[-1]) ** 0.5)
    return model


# Configs and factors


def config_of(target_modules: list[str] | str, r: int = 2, alpha: float = 3, dropout: float = 0.0, rslora: bool = False) -> Config:
    return {"r": r, "lora_alpha": alpha, "lora_dropout": dropout, "use_rslora": rslora, "target_modules": target_modules}


def scaling_of(config: Config) -> float:
    return config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])


def values_of(model: nn.Module, layers: list[str], config: Config, seed: int = 5) -> dict[str, Tensor]:
    """Factors of chosen layers, without a zero among them."""
    found, r = {}, config["r"]
    for number, name in enumerate(layers):
        out_features, in_features = model.get_submodule(name).weight.shape
        found[f"{name}.lora_A"] = randn(r, in_features, seed=seed + 2 * number)
        found[f"{name}.lora_B"] = randn(out_features, r, seed=seed + 2 * number + 1)
    return found


def put(adapters: Any, adapted: Any, name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write values into a build's factors, and return the factors."""
    held = dict(adapters.factors(adapted, name))
    if set(held) != set(values):
        raise ValueError(f"factors() has {sorted(held)}, and should have {sorted(values)}")
    with torch.no_grad():
        for key, value in values.items():
            held[key].copy_(value)
    return held


class Dense:
    """The oracle: a model whose chosen layers have the weight W + s B A, made for each call. factors: leaves in float64."""

    def __init__(self, model: nn.Module, config: Config, values: dict[str, Tensor]):
        self.model, self.scaling = model.requires_grad_(False).eval(), scaling_of(config)
        self.factors = {key: value.clone().requires_grad_() for key, value in values.items()}
        layers = [key.removesuffix(".lora_A") for key in values if key.endswith(".lora_A")]
        self.plain = {name: model.get_submodule(name)._parameters.pop("weight").double() for name in layers}  # from here on an attribute

    def run(self, *inputs: Tensor) -> Tensor:
        for name, plain in self.plain.items():
            A, B = self.factors[f"{name}.lora_A"], self.factors[f"{name}.lora_B"]
            self.model.get_submodule(name).weight = plain + self.scaling * torch.einsum("or,ri->oi", B, A)
        return self.model(*inputs)


def answer(y: Tensor, inputs: dict[str, Tensor], factors: dict[str, Tensor]) -> Results:
    """y and the gradients of inputs and factors."""
    asked = {name: tensor for name, tensor in (inputs | factors).items() if tensor.requires_grad}
    found = torch.autograd.grad(y, list(asked.values()), randn(*y.shape, seed=77).to(y.dtype), allow_unused=True)
    said = {f"gradient of {name}": Said("nothing") if each is None else each for name, each in zip(asked, found, strict=True)}
    return {"y": y.detach().clone()} | said


def trained_leaves(y: Tensor, known: dict[str, Tensor]) -> list[str]:
    """The leaves that a backward pass through y reaches, by name where they are known."""
    names, seen, left = set(), set(), [y.grad_fn]
    by_id = {id(tensor): name for name, tensor in known.items()}
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            names.add(by_id.get(id(node.variable), f"another tensor of shape {list(node.variable.shape)}"))
        left += [earlier for earlier, _ in node.next_functions]
    return sorted(names)


def state_of(model: nn.Module) -> Results:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def as_it_was(model: nn.Module, before: Results) -> str:
    """Whether a model that was to be left alone has the weights that it had, each with a gradient if it had one."""
    after = model.state_dict()
    if set(after) != set(before):
        return f"other names: {sorted(set(after) ^ set(before))[:3]}"
    if changed := [name for name in before if not torch.equal(before[name], after[name])]:
        return f"{changed[0]} has changed"
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    return f"{frozen[0]} is frozen" if frozen else "as it was"


# Budgets


def budget(value: int, limit: int, unit: str) -> str:
    return WITHIN if value <= limit else f"{value:,} {unit}, and the budget is {limit:,}"


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


FACTORS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0}  # where the two factors stand


class Watch(TorchDispatchMode):
    """Watches operations. multiplications: of numbers, in matrix products. largest: the most numbers that a new tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications, self.largest = 0, 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        given = tensors_in([*arguments, *(named or {}).values()])
        before = {tensor.untyped_storage()._cdata for tensor in given}
        result = function(*arguments, **named or {})
        name = function._schema.name.removeprefix("aten::")
        if name in FACTORS:
            left, right = given[FACTORS[name] :][:2]
            self.multiplications += left.numel() * (right.shape[-1] if right.dim() > 1 else 1)
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self.largest = max(self.largest, tensor.numel())
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        """Bytes of the tensors that were made and still are."""
        return sum(size for reference, size in self.storages.values() if not reference.expired())


# Stages
