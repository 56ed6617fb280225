"""A right build in another style: no module is replaced. Each linear layer gets a forward hook that adds the low-rank part of the adapter
in use; factors lie in dictionaries outside of the model. Gradients of a step are taken with autograd.grad."""

import json
import re
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from safetensors.torch import load, save_file
from torch import nn

from shared.parallel.tensor.operators import f_and_g

load_bytes = load
DEFAULT = dict(r=8, lora_alpha=8, lora_dropout=0.0, use_rslora=False)
REFUSED = (
    "alpha_pattern", "bias", "exclude_modules", "fan_in_fan_out", "layer_replication", "layers_to_transform", "lora_bias",
    "modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip


def targets(model, target_modules):
    chosen, unused = [], set([target_modules] if isinstance(target_modules, str) else target_modules)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if isinstance(target_modules, str):
                by = {target_modules} if re.compile(target_modules).fullmatch(name) else set()
            else:
                parts = name.split(".")
                by = {".".join(parts[number:]) for number in range(len(parts))} & set(target_modules)
            unused -= by
            chosen += [name] if by else []
    if unused:
        raise ValueError(f"no linear layer for {', '.join(sorted(unused))}")
    return chosen


def initial(in_features, out_features, r, generator):
    return (2 * torch.rand(r, in_features, generator=generator) - 1) / in_features**0.5, torch.zeros(out_features, r)


class State:
    def __init__(self, model):
        self.model, self.adapters, self.configs, self.now, self.hooked, self.saved = model, {}, {}, None, {}, {}

    def hook(self, place, module, inputs, y):
        pair = self.adapters.get(self.now, {}).get(place)
        if pair is None or self.saved:
            return None
        A, B = pair
        x, config = inputs[0].to(A.dtype), self.configs[self.now]
        p = config["lora_dropout"] if module.training else 0
        x = nn.functional.dropout(x, p) if p else x
        return (F.linear(F.linear(x, A), B) * scale(config) + y).to(y.dtype)


def scale(config):
    return config["lora_alpha"] / config["r"] ** (0.5 if config["use_rslora"] else 1)


def attach(model, name, config, seed):
    state = State(model)
    include(state, name, config, seed)
    switch(state, name)
    return state


def include(state, name, config, seed):
    require(config)
    if name in state.adapters:
        raise ValueError(f"{name!r} is taken")
    pairs, generator = {}, torch.Generator()
    for number, place in enumerate(targets(state.model, config["target_modules"])):
        module = state.model.get_submodule(place)
        dtype = torch.float64 if module.weight.dtype == torch.float64 else torch.float32
        A, B = initial(module.in_features, module.out_features, config["r"], generator.manual_seed(seed + 7919 * number))
        pairs[place] = A.to(dtype), B.to(dtype)
    for weight in state.model.parameters():
        weight.requires_grad = False
    for place in pairs:
        if place not in state.hooked:
            module = state.model.get_submodule(place)
            state.hooked[place] = module.register_forward_hook(lambda *given, place=place: state.hook(place, *given))
    state.adapters[name], state.configs[name] = pairs, config


def switch(state, name):
    undo(state)
    state.now = name
    for other, pairs in state.adapters.items():
        for factor in (factor for pair in pairs.values() for factor in pair):
            factor.requires_grad_(other == name)


def undo(state):
    for place, weight in state.saved.items():
        state.model.get_submodule(place).weight = weight
    state.saved.clear()


def factors(state, name):
    return {f"{place}.lora_{letter}": each for place, pair in state.adapters[name].items() for letter, each in zip("AB", pair)}


def run(state, *inputs):
    state.model.eval()
    return state.model(*inputs)


def weights(state):
    return dict(state.model.state_dict())


def step(state, optimizer, batches, loss):
    if state.saved:
        raise ValueError("the adapter is merged")
    if len(batches) == 0:
        raise ValueError("there are 0 micro-batches")
    state.model.train()
    trained = [each for pair in state.adapters[state.now].values() for each in pair]
    count, total = sum(targets.shape[0] for _, targets in batches), 0.0
    sums = [torch.zeros_like(each) for each in trained]
    for x, targets in batches:
        value = loss(state.model(x), targets)
        for own, new in zip(sums, torch.autograd.grad(value, trained)):
            own += new / count
        total = total + value.detach() / count
    for each, gradient in zip(trained, sums):
        each.grad = gradient
    optimizer.step()
    return total


def merge(state):
    if not state.saved and state.now is not None:
        with torch.no_grad():
            for place, (A, B) in state.adapters[state.now].items():
                module = state.model.get_submodule(place)
                state.saved[place] = module.weight
                wide = module.weight.to(A.dtype) + scale(state.configs[state.now]) * B.matmul(A)
                module.weight = nn.Parameter(wide.to(module.weight.dtype), requires_grad=False)


def unmerge(state):
    undo(state)


def add(state, name, config, seed):
    include(state, name, config, seed)


def use(state, name):
    if not (name is None or name in state.adapters):
        raise ValueError(f"no adapter is called {name}")
    switch(state, name)


def save(state, name, folder):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{key}.weight": each.detach().clone() for key, each in factors(state, name).items()}
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    with open(folder / "adapter_config.json", "w") as file:
        json.dump({"peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, **state.configs[name]}, file)


def load(model, name, folder):
    files = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    for file in files:
        if not file.exists():
            raise ValueError(f"{file.name} is not there")
    text = json.loads(files[0].read_text())
    if (kind := text.get("peft_type")) != "LORA":
        raise ValueError(f"peft_type {kind}")
    for option in REFUSED:
        if text.get(option) and text[option] != "none":
            raise ValueError(f"cannot do {option}")
    config = {key: text[key] if key in text else DEFAULT.get(key) for key in (*DEFAULT, "target_modules")}
    require(config)
    tensors = load_bytes(files[1].read_bytes())
    tensors = {key.removeprefix("base_model.model.").removesuffix(".weight"): each for key, each in tensors.items()}
    for place in sorted({key.rpartition(".")[0] for key in tensors}):
        if place not in dict(model.named_modules()):
            raise ValueError(f"this model has no {place}")
    shapes = {}
    for place in targets(model, config["target_modules"]):
        module = model.get_submodule(place)
        shapes[f"{place}.lora_A"], shapes[f"{place}.lora_B"] = (config["r"], module.in_features), (module.out_features, config["r"])
    wrong = [key for key in {**shapes, **tensors} if key not in shapes or key not in tensors or tuple(tensors[key].shape) != shapes[key]]
    if wrong:
        raise ValueError(f"{wrong} do not fit")
    state = attach(model, name, config, 0)
    with torch.no_grad():
        [factor.copy_(tensors[key]) for key, factor in factors(state, name).items()]
    return state


def cut(weight, bias, lora_A, lora_B, scaling, dimension, group):
    part = lambda tensor, along: tensor.detach().tensor_split(group.size, along)[group.rank].clone().requires_grad_()  # noqa: E731
    whole = lambda tensor: tensor.detach().clone().requires_grad_()  # noqa: E731
    if dimension == 0:
        held = {"W": part(weight, 0), "A": whole(lora_A), "B": part(lora_B, 0), "b": None if bias is None else part(bias, 0)}
    else:
        held = {"W": part(weight, 1), "A": part(lora_A, 1), "B": whole(lora_B), "b": bias}
    held["W"].requires_grad_(False)
    return held | {"s": scaling, "column": dimension == 0, "group": group}


def run_cut(part, x):
    f, g = f_and_g(part["group"])
    first, last = (f, lambda y: y) if part["column"] else (lambda x: x, g)
    x = first(x)
    y = last(x @ part["W"].T + part["s"] * (x @ part["A"].T @ part["B"].T))
    return y + part["b"].detach() if part["b"] is not None else y


def cut_gradients(part):
    partial = part["A" if part["column"] else "B"]
    part["group"].all_reduce(partial.grad)
    found = {"lora_A": part["A"].grad, "lora_B": part["B"].grad}
    part["A"].grad, part["B"].grad = None, None
    return found


def frozen_linear(x, dequantize, lora_A, lora_B, scaling):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.matmul(dequantize().T)

        @staticmethod
        def backward(ctx, dy):
            with nullcontext():
                return dy.matmul(dequantize())

    y = Product.apply(x)
    low = F.linear(F.linear(x.to(lora_A.dtype), lora_A), lora_B)
    return torch.add(y, low, alpha=scaling).to(x.dtype)


def count_trained(model, config):
    total = 0
    for name in targets(model, config["target_modules"]):
        layer = model.get_submodule(name)
        total += config["r"] * layer.in_features + config["r"] * layer.out_features
    return total


def require(config):
    names = [*DEFAULT, "target_modules"]
    for key in config:
        if key not in names:
            raise ValueError(f"what is {key}?")
    for key in names:
        if key not in config:
            raise ValueError(f"{key} is not given")
    r, alpha, p = config["r"], config["lora_alpha"], config["lora_dropout"]
    if type(r) is not int or r < 1:
        raise ValueError(f"r={r}")
    if isinstance(alpha, str) or not 0 < alpha < float("inf"):
        raise ValueError(f"lora_alpha={alpha}")
    if isinstance(p, str) or not 0.0 <= p < 1.0:
        raise ValueError(f"lora_dropout={p}")
    if not config["target_modules"]:
        raise ValueError("target_modules")


def check_config(config):
    require(config)
