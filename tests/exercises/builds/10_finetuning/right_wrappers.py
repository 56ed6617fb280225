"""A right build in another style, which is peft's: each linear layer is wrapped in a module that holds it, and factors are nn.Linear layers
in dictionaries of modules. Parameters have other names than before, so the old ones are put back where the text asks for them."""

import json
import math
import re

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import nn

FIVE = ("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules")
REFUSED = (
    "alpha_pattern", "bias", "exclude_modules", "fan_in_fan_out", "layer_replication", "layers_to_transform", "lora_bias",
    "modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip


class Wrapper(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.wrapped_linear, self.down, self.up, self.drop = linear, nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.s, self.active, self.original = {}, None, None

    def put_in(self, name, config, A, B):
        wide = torch.float64 if self.wrapped_linear.weight.dtype == torch.float64 else torch.float32
        for place, factor in ((self.down, A), (self.up, B)):
            place[name] = nn.Linear(*reversed(factor.shape), bias=False, dtype=wide)
            place[name].weight = nn.Parameter(factor.to(wide))
        self.drop[name] = nn.Dropout(config["lora_dropout"])
        self.s[name] = config["lora_alpha"] * (config["r"] ** -0.5 if config["use_rslora"] else 1 / config["r"])

    @property
    def pair(self):
        return self.down[self.active].weight, self.up[self.active].weight

    def forward(self, x):
        out = self.wrapped_linear(x)
        if self.active is None or self.original is not None:
            return out
        added = self.up[self.active](self.down[self.active](self.drop[self.active](x.to(self.pair[0].dtype))))
        return torch.add(out, added, alpha=self.s[self.active]).to(out.dtype)

    @torch.no_grad()
    def fold(self):
        if self.active is not None and self.original is None:
            A, B = self.pair
            linear = self.wrapped_linear
            self.original = [linear.weight]
            linear.weight = nn.Parameter(torch.addmm(linear.weight.to(A.dtype), B, A, alpha=self.s[self.active]).to(linear.weight.dtype))

    def unfold(self):
        if self.original is not None:
            self.wrapped_linear.weight = self.original[0]
        self.original = None


class Owner:
    def __init__(self, model):
        self.model, self.linears = model, {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
        self.wrappers, self.configs, self.active = {}, {}, None


def meant(names, target_modules):
    single = isinstance(target_modules, str)
    found = []
    for pattern in [target_modules] if single else target_modules:
        expression = re.compile(pattern if single else rf"(.*\.)?{re.escape(pattern)}", re.DOTALL)
        some = [name for name in names if expression.fullmatch(name)]
        if not some:
            raise ValueError(f"nothing is called {pattern}")
        found += some
    return sorted(set(found), key=list(names).index)


def targets(model, target_modules):
    return meant([name for name, each in model.named_modules() if isinstance(each, nn.Linear)], target_modules)


def initial(in_features, out_features, r, generator):
    A = torch.empty(r, in_features)
    nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)
    return A, torch.zeros(out_features, r)


def attach(model, name, config, seed):
    owner = Owner(model)
    insert(owner, name, config, seed)
    activate(owner, name)
    return owner


def insert(owner, name, config, seed):
    check_config(config)
    if name in owner.configs:
        raise ValueError(f"adapter {name} exists")
    names = meant(owner.linears, config["target_modules"])
    owner.model.requires_grad_(False)
    for number, place in enumerate(names):
        linear = owner.linears[place]
        if place not in owner.wrappers:
            owner.wrappers[place] = Wrapper(linear)
            parent, _, child = place.rpartition(".")
            setattr(owner.model.get_submodule(parent), child, owner.wrappers[place])
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        owner.wrappers[place].put_in(name, config, *initial(linear.in_features, linear.out_features, config["r"], generator))
    owner.configs[name] = dict(config)
    activate(owner, owner.active, fold=False)


def activate(owner, name, fold=True):
    owner.active = name
    for wrapper in owner.wrappers.values():
        if fold:
            wrapper.unfold()
        wrapper.active = name if name in wrapper.s else None
        for other in wrapper.s:
            wrapper.down[other].requires_grad_(other == name)
            wrapper.up[other].requires_grad_(other == name)


def factors(owner, name):
    found = {}
    for place, wrapper in owner.wrappers.items():
        if name in wrapper.s:
            found[place + ".lora_A"], found[place + ".lora_B"] = wrapper.down[name].weight, wrapper.up[name].weight
    return found


def run(owner, *inputs):
    return owner.model.train(False)(*inputs)


def weights(owner):
    mine = {id(each) for wrapper in owner.wrappers.values() for each in [*wrapper.down.parameters(), *wrapper.up.parameters()]}
    state = owner.model.state_dict(keep_vars=True)
    return {key.replace(".wrapped_linear.", "."): value.detach() for key, value in state.items() if id(value) not in mine}


def step(owner, optimizer, batches, loss):
    if any(wrapper.original is not None for wrapper in owner.wrappers.values()):
        raise ValueError("merged: unmerge first")
    number = sum(map(len, (targets for _, targets in batches)))
    if not number:
        raise ValueError("0 targets")
    owner.model.train()
    optimizer.zero_grad()
    value = 0
    for x, targets in batches:
        (part := loss(owner.model(x), targets) / number).backward()
        value += part.detach()
    optimizer.step()
    return value


def merge(owner):
    for wrapper in owner.wrappers.values():
        wrapper.fold()


def unmerge(owner):
    for wrapper in owner.wrappers.values():
        wrapper.unfold()


def add(owner, name, config, seed):
    insert(owner, name, config, seed)


def use(owner, name):
    if name not in (None, *owner.configs):
        raise ValueError(f"adapter {name} does not exist")
    activate(owner, name)


def save(owner, name, folder):
    folder.mkdir(parents=True, exist_ok=True)
    data = {"base_model.model." + key + ".weight": value.detach() for key, value in factors(owner, name).items()}
    (folder / "adapter_model.safetensors").write_bytes(to_bytes(data, metadata={"format": "pt"}))
    (folder / "adapter_config.json").write_text(json.dumps(owner.configs[name] | {"peft_type": "LORA", "inference_mode": True}))


def load(model, name, folder):
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise ValueError(f"no {file}")
    options = json.loads((folder / "adapter_config.json").read_text())
    if options.get("peft_type") != "LORA":
        raise ValueError("peft_type")
    for key in REFUSED:
        if options.get(key, None) not in (None, False, "none", [], {}, ""):
            raise ValueError(f"option {key}")
    config = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False} | {key: options[key] for key in FIVE if key in options}
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}
    wanted = {}
    for place in targets(model, config["target_modules"]):
        rows, columns = model.get_submodule(place).weight.shape
        wanted |= {f"{place}.lora_A": [config["r"], columns], f"{place}.lora_B": [rows, config["r"]]}
    names = {key: f"base_model.model.{key}.weight" for key in wanted}
    if other := set(names.values()) ^ set(found):
        raise ValueError(f"not the layers of this model: {other}")
    for key, shape in wanted.items():
        if list(found[names[key]].shape) != shape:
            raise ValueError(f"{key}: {found[names[key]].shape}")
    owner = attach(model, name, config, 0)
    for key, factor in factors(owner, name).items():
        factor.data.copy_(found[names[key]])
    return owner


class CutLinear(nn.Module):
    def __init__(self, weight, bias, A, B, s, dimension, group):
        super().__init__()
        mine = lambda t, d: t.narrow(d, group.rank * (t.shape[d] // group.size), t.shape[d] // group.size).clone()  # noqa: E731
        self.weight, self.s, self.dimension, self.group = mine(weight, dimension), s, dimension, group
        self.bias = bias if bias is None or dimension else mine(bias, 0)
        self.A = nn.Parameter(mine(A, 1) if dimension else A.clone())
        self.B = nn.Parameter(B.clone() if dimension else mine(B, 0))

    def forward(self, x):
        narrow = x @ self.A.T
        return x @ self.weight.T + self.s * (narrow @ self.B.T)


class Sum(torch.autograd.Function):
    """In one of the two directions the sum over the ranks, in the other nothing."""

    @staticmethod
    def forward(ctx, x, group, backward):
        ctx.group, ctx.sums = group, backward
        return x.clone() if backward else summed(x, group)

    @staticmethod
    def backward(ctx, dx):
        return summed(dx, ctx.group) if ctx.sums else dx, None, None


def summed(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(x)
    return x


def cut(weight, bias, lora_A, lora_B, scaling, dimension, group):
    return CutLinear(weight, bias, lora_A, lora_B, scaling, dimension, group)


def run_cut(part, x):
    y = Sum.apply(part(x), part.group, False) if part.dimension else part(Sum.apply(x, part.group, True))
    return y if part.bias is None else part.bias + y


def cut_gradients(part):
    found, partial = {"lora_A": part.A.grad, "lora_B": part.B.grad}, "lora_B" if part.dimension else "lora_A"
    found[partial] = summed(found[partial], part.group)
    part.zero_grad(set_to_none=True)
    return found


class FromCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, A, B, s, make):
        ctx.save_for_backward(x, A, B)
        ctx.s, ctx.make = s, make
        wide = x.to(A.dtype)
        return (x @ make().T + s * (wide @ A.T) @ B.T).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, A, B = ctx.saved_tensors
        rows, wide = dy.to(A.dtype).reshape(-1, dy.shape[-1]), x.to(A.dtype).reshape(-1, x.shape[-1])
        back = ctx.s * rows @ B
        dx = (dy @ ctx.make() + (back @ A).reshape(x.shape)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, back.T @ wide, ctx.s * rows.T @ (wide @ A.T), None, None


def frozen_linear(x, dequantize, lora_A, lora_B, scaling):
    return FromCodes.apply(x, lora_A, lora_B, scaling, dequantize)


def count_trained(model, config):
    return sum(config["r"] * sum(model.get_submodule(name).weight.shape) for name in targets(model, config["target_modules"]))


def check_config(config):
    for key in [*FIVE, *config]:
        if (key in FIVE) != (key in config) or (key in config and key not in FIVE):
            raise ValueError(f"key {key}")
    good = {
        "r": lambda r: isinstance(r, int) and r > 0 and r is not True,
        "lora_alpha": lambda a: isinstance(a, (int, float)) and 0 < a < float("inf"),
        "lora_dropout": lambda p: isinstance(p, (int, float)) and 0 <= p < 1,
        "target_modules": bool,
    }
    for key, rule in good.items():
        if not rule(config[key]):
            raise ValueError(f"{key}: {config[key]}")
