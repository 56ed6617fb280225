"""Chapter 10. LoRA adapters on any model, from scratch, in the format of peft: inject, train, merge, switch, save, load, cut, four bits.

    y = x W^T + b + s * (dropout(x) A^T) B^T       W [out, in] and b are frozen; A [r, in] and B [out, r] are trained

Each nn.Linear is replaced by a subclass that takes over its parameters, so the names of a model's weights stay, and so does what is tied. A
merged weight is a new parameter, and the old one is kept: subtracting in 16 bits would not give it back.

Under tensor parallelism the factor on the side of the cut is cut and has its whole gradient. The other one meets a part of what it would
meet in one process, A of the gradients (columns), B of the activations (rows): the ranks' gradients of it are summed.

(Hu et al. 2021, section 4.1; rank-stabilized: Kalajdzievski 2023; four bits: Dettmers et al. 2023, equation 5.)
"""

import json
import math
import re
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared.parallel.tensor.operators import f_and_g

REFUSED = (
    "alpha_pattern", "bias", "exclude_modules", "fan_in_fan_out", "layer_replication", "layers_to_transform", "lora_bias",
    "modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "target_modules": []}  # peft's
RULES = {  # a bool is an int, and NaN is above nothing
    "r": (lambda value: type(value) is int and value >= 1, "a whole number of 1 or more"),
    "lora_alpha": (lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0"),
    "lora_dropout": (lambda value: type(value) in (int, float) and 0 <= value < 1, "a number of at least 0 and below 1"),
    "target_modules": (len, "the layers that are to be adapted"),
}
PREFIX, WEIGHTS, CONFIG = "base_model.model.", "adapter_model.safetensors", "adapter_config.json"


def targets(model, target_modules):
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if isinstance(target_modules, str):
        found = {target_modules: [name for name in names if re.fullmatch(target_modules, name)]}
    else:  # with a dot before each: "proj" does not mean q_proj
        found = {ending: [name for name in names if f".{name}".endswith(f".{ending}")] for ending in target_modules}
    if nothing := [pattern for pattern, meant in found.items() if not meant]:
        raise ValueError(f"target_modules: {nothing[0]!r} means no linear layer of this model. There are {names[:4]} and others.")
    return [name for name in names if any(name in meant for meant in found.values())]


def initial(in_features, out_features, r, generator):
    bound = in_features**-0.5
    return torch.empty(r, in_features).uniform_(-bound, bound, generator=generator), torch.zeros(out_features, r)


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with factors by adapter. used: which is computed. plain: while it is merged, the weight as it was."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.training = linear.weight, linear.bias, linear.training
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.scaling, self.dropout, self.used, self.plain = {}, {}, None, []

    def add(self, name: str, config, factors: tuple[Tensor, Tensor]) -> None:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        for held, factor in zip((self.lora_A, self.lora_B), factors):
            held[name] = nn.Parameter(factor.to(self.weight.device, dtype), requires_grad=False)
        self.scaling[name] = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
        self.dropout[name] = config["lora_dropout"]

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.used not in self.scaling or self.plain:
            return y
        A, B = self.lora_A[self.used], self.lora_B[self.used]
        narrow = F.linear(F.dropout(x.to(A.dtype), self.dropout[self.used], self.training), A)
        return (y + self.scaling[self.used] * F.linear(narrow, B)).to(y.dtype)

    def merge(self) -> None:
        if self.used in self.scaling and not self.plain:
            A, B = self.lora_A[self.used].detach(), self.lora_B[self.used].detach()
            self.plain.append(self.weight)  # in a list, which the module does not take for a parameter of its own
            merged = self.weight.to(A.dtype) + self.scaling[self.used] * (B @ A)
            self.weight = nn.Parameter(merged.to(self.weight.dtype), requires_grad=False)  # who shares the old one does not see it

    def unmerge(self) -> None:
        if self.plain:
            self.weight = self.plain.pop()


def replaced(model: nn.Module, linear: nn.Linear) -> AdaptedLinear:
    adapted = AdaptedLinear(linear)
    for parent, child in [(parent, child) for parent in model.modules() for child, each in parent._modules.items() if each is linear]:
        setattr(parent, child, adapted)
    return adapted


def attach(model, name, config, seed):
    """names: of the weights before there were adapters. configs: by adapter. layers: those with factors, by their names."""
    adapted = SimpleNamespace(model=model, names=list(model.state_dict()), configs={}, layers={})
    add(adapted, name, config, seed)
    use(adapted, name)
    return adapted


def factors(adapted, name):
    layers = {place: layer for place, layer in adapted.layers.items() if name in layer.scaling}
    return {f"{place}.{kind}": getattr(layer, kind)[name] for place, layer in layers.items() for kind in ("lora_A", "lora_B")}


def run(adapted, *inputs):
    adapted.model.eval()
    return adapted.model(*inputs)


def weights(adapted):
    return {name: weight for name, weight in adapted.model.state_dict().items() if name in adapted.names}


def step(adapted, optimizer, batches, loss):
    if any(layer.plain for layer in adapted.layers.values()):
        raise ValueError("An adapter is merged, and its factors would get no gradient: unmerge it before a step.")
    count, total = sum(len(targets) for _, targets in batches), 0
    if not count:
        raise ValueError(f"{len(batches)} micro-batches with 0 targets were given: there is nothing to divide by.")
    adapted.model.train()
    optimizer.zero_grad()
    for x, targets in batches:
        part = loss(adapted.model(x), targets) / count  # divided once: micro-batches need not have equal sizes
        part.backward()
        total += part.detach()
    optimizer.step()
    return total


def merge(adapted):
    for layer in adapted.layers.values():
        layer.merge()


def unmerge(adapted):
    for layer in adapted.layers.values():
        layer.unmerge()


def add(adapted, name, config, seed):
    check_config(config)
    if name in adapted.configs:
        raise ValueError(f"There is an adapter {name!r} already: take another name.")
    chosen, generator = targets(adapted.model, config["target_modules"]), torch.Generator().manual_seed(seed)
    for weight in adapted.model.parameters() if not adapted.configs else ():
        weight.requires_grad_(False)
    for place in chosen:
        if place not in adapted.layers:
            adapted.layers[place] = replaced(adapted.model, adapted.model.get_submodule(place))
        linear = adapted.layers[place]
        linear.add(name, config, initial(linear.in_features, linear.out_features, config["r"], generator))
    adapted.configs[name] = config


def use(adapted, name):
    if name is not None and name not in adapted.configs:
        raise ValueError(f"There is no adapter {name!r}, only {list(adapted.configs)}.")
    unmerge(adapted)
    for layer in adapted.layers.values():
        layer.used = name
    for other in adapted.configs:
        for factor in factors(adapted, other).values():
            factor.requires_grad_(other == name)


def save(adapted, name, folder):
    tensors = {f"{PREFIX}{key}.weight": factor.detach().contiguous() for key, factor in factors(adapted, name).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(adapted.configs[name] | {"peft_type": "LORA", "bias": "none"}), encoding="utf-8")


def load(model, name, folder):
    if missing := [file for file in (CONFIG, WEIGHTS) if not (folder / file).exists()]:
        raise ValueError(f"{folder} has no {missing[0]}, so it is no adapter that peft saved.")
    read = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if read.get("peft_type") != "LORA":
        raise ValueError(f"{folder / CONFIG}: peft_type is {read.get('peft_type')!r}, and only LORA can be loaded.")
    if options := [key for key in REFUSED if read.get(key) and read[key] != "none"]:
        raise ValueError(f"{folder / CONFIG}: {options[0]} is {read[options[0]]!r}, which changes what the adapter computes.")
    config = {key: read.get(key, default) for key, default in DEFAULTS.items()}
    check_config(config)
    tensors, shapes = load_file(folder / WEIGHTS), {}
    for place in targets(model, config["target_modules"]):
        linear = model.get_submodule(place)
        shapes[f"{PREFIX}{place}.lora_A.weight"] = (config["r"], linear.in_features)
        shapes[f"{PREFIX}{place}.lora_B.weight"] = (linear.out_features, config["r"])
    for key in shapes | tensors:
        wanted, found = shapes.get(key), tuple(tensors[key].shape) if key in tensors else None
        if wanted != found:
            raise ValueError(f"{folder / WEIGHTS}: {key} has shape {found}, and this model needs {wanted}: it is for another model.")
    adapted = attach(model, name, config, seed=0)
    with torch.no_grad():
        for key, factor in factors(adapted, name).items():
            factor.copy_(tensors[f"{PREFIX}{key}.weight"])
    return adapted


def cut(weight, bias, lora_A, lora_B, scaling, dimension, group):
    def own(tensor: Tensor, along: int | None) -> Tensor:
        return (tensor if along is None else tensor.chunk(group.size, along)[group.rank]).detach().clone()

    part = SimpleNamespace(weight=own(weight, dimension), scaling=scaling, rows=dimension == 1, group=group)
    part.bias = None if bias is None else own(bias, None if part.rows else 0)
    part.lora_A = own(lora_A, 1 if part.rows else None).requires_grad_()
    part.lora_B = own(lora_B, None if part.rows else 0).requires_grad_()
    return part


def run_cut(part, x):
    f, g = f_and_g(part.group)  # f adds up gradients, g outputs
    x = x if part.rows else f(x)  # one sum, of W's part of x's gradient and of A's
    y = F.linear(x, part.weight) + part.scaling * F.linear(F.linear(x, part.lora_A), part.lora_B)
    y = g(y) if part.rows else y
    return y if part.bias is None else y + part.bias  # after the sum: once


def cut_gradients(part):
    found = {"lora_A": part.lora_A.grad, "lora_B": part.lora_B.grad}
    part.group.all_reduce(found["lora_B" if part.rows else "lora_A"])  # of the whole factor each rank has a part of the gradient
    part.lora_A.grad = part.lora_B.grad = None
    return found


class FrozenProduct(torch.autograd.Function):
    """x W^T, where W is made from its codes once forward and once backward. W has no gradient."""

    @staticmethod
    def forward(ctx, x, dequantize):
        ctx.dequantize = dequantize
        return F.linear(x, dequantize())

    @staticmethod
    def backward(ctx, upstream):
        return upstream @ ctx.dequantize(), None


def frozen_linear(x, dequantize, lora_A, lora_B, scaling):
    y = FrozenProduct.apply(x, dequantize)
    return (y + scaling * F.linear(F.linear(x.to(lora_A.dtype), lora_A), lora_B)).to(y.dtype)


def count_trained(model, config):
    return sum(config["r"] * sum(model.get_submodule(name).weight.shape) for name in targets(model, config["target_modules"]))


def check_config(config):
    if strange := sorted(set(config) ^ set(DEFAULTS)):
        raise ValueError(f"{strange[0]} is {'unknown' if strange[0] in config else 'missing'}. A config has {', '.join(DEFAULTS)}.")
    for key, (is_right, wanted) in RULES.items():
        if not is_right(config[key]):
            raise ValueError(f"{key} is {config[key]!r}: give {wanted}.")
