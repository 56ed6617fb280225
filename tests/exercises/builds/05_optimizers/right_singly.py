"""A right build of another design: a group for each parameter, the base class's `state`, tensors of steps, functions for the rules."""

import math
from collections import defaultdict

import torch

KINDS = {"embedding", "head", "norm", "bias", "matrix", "experts"}


def collect(named):
    parameters, names, seen = [], defaultdict(list), {}
    for name, parameter in named:
        if name in seen and seen[name] is not parameter:
            raise ValueError(f"two parameters are called {name}")
        seen[name] = parameter
        if not names[id(parameter)] and parameter.requires_grad:
            parameters.append(parameter)
        names[id(parameter)].append(name)
    return parameters, names


def decide(parameter, names, roles):
    kinds = []
    for name in names:
        if name not in roles or roles[name] not in KINDS:
            raise ValueError(f"no role, or an unknown one: {name}")
        kinds.append(roles[name])
    dimensions = parameter.dim()
    muon = all(kind == {2: "matrix", 3: "experts"}.get(dimensions) for kind in kinds)
    return ("muon" if muon else "adamw"), dimensions > 1 and not {"norm", "bias"} & set(kinds)


def route(named, roles):
    parameters, names = collect(named)
    return {names[id(each)][0]: decide(each, names[id(each)], roles) for each in parameters}


def newton_schulz(matrices, steps, coefficients, eps):
    a, b, c = coefficients
    x = matrices.flatten(0, -3) if matrices.dim() > 2 else matrices[None]
    rows, columns = x.shape[-2:]
    if rows > columns:
        x = x.transpose(1, 2)
    x = x / x.square().sum(dim=(1, 2), keepdim=True).sqrt().clamp_min(eps) if x.dtype == torch.float64 else normalised(x, eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if rows > columns else x).reshape(matrices.shape)


def normalised(x, eps):
    return x / x.norm(dim=(1, 2), keepdim=True).clamp_min(eps)


def scale_for(kind, shape):
    rows, columns = shape[-2], shape[-1]
    return math.sqrt(max(1, rows / columns)) if kind == "original" else 0.2 * math.sqrt(max(rows, columns))


class Optimizer(torch.optim.Optimizer):
    def __init__(self, parameters, names, rules, settings):
        groups = []
        for parameter in parameters:
            rule, decays = rules[names[id(parameter)][0]]
            group = {"params": [parameter], "rule": rule, **settings[rule]}
            if not decays:
                group["weight_decay"] = 0.0
            groups.append(group)
        super().__init__(groups, {})
        self.called = {each: sorted(names[id(each)]) for each in parameters}
        for each in parameters:
            if each.dtype.itemsize == 2:
                self.state[each]["whole"] = each.detach().to(torch.float32)

    def step(self):
        with torch.no_grad():
            self.move({each: each.grad for group in self.param_groups for each in group["params"] if each.grad is not None})

    def move(self, gradients):
        lanes = defaultdict(list)
        for group in self.param_groups:
            [parameter] = group["params"]
            if parameter in gradients:
                whole = self.state[parameter].get("whole", parameter)
                gradient = gradients[parameter].to(whole.dtype)
                if group["rule"] == "muon":
                    self.turn(group, parameter, whole, gradient)
                else:
                    lanes[group["betas"], group["eps"]].append((group, parameter, whole, gradient))
        for (betas, eps), rows in lanes.items():
            self.divide(betas, eps, *zip(*rows))

    def turn(self, group, parameter, whole, gradient):
        state, momentum = self.state[parameter], group["momentum"]
        buffer = state.setdefault("buffer", torch.zeros_like(whole))
        buffer.mul_(momentum).add_(gradient, alpha=1 - momentum)
        direction = momentum * buffer + (1 - momentum) * gradient if group["nesterov"] else buffer
        step = newton_schulz(direction, group["ns_steps"], tuple(group["ns_coefficients"]), group["eps"])
        whole.sub_(whole, alpha=group["lr"] * group["weight_decay"])
        whole.sub_(step, alpha=group["lr"] * scale_for(group["adjust_lr_fn"], whole.shape))
        if whole is not parameter:
            parameter.copy_(whole)

    def divide(self, betas, eps, groups, parameters, wholes, gradients):
        states = [self.state[each] for each in parameters]
        for state, whole in zip(states, wholes):
            state["t"] = state.get("t", 0) + 1
            if "m" not in state:
                state["m"], state["v"] = torch.zeros_like(whole), torch.zeros_like(whole)
        m, v = [state["m"] for state in states], [state["v"] for state in states]
        wholes, gradients = list(wholes), list(gradients)
        torch._foreach_mul_(m, betas[0])
        torch._foreach_add_(m, gradients, alpha=1 - betas[0])
        torch._foreach_mul_(v, betas[1])
        torch._foreach_addcmul_(v, gradients, gradients, value=1 - betas[1])
        below = torch._foreach_sqrt(v)
        torch._foreach_div_(below, [math.sqrt(1 - betas[1] ** state["t"]) for state in states])
        torch._foreach_add_(below, eps)
        torch._foreach_mul_(wholes, [1 - group["lr"] * group["weight_decay"] for group in groups])
        torch._foreach_addcdiv_(wholes, m, below, [-group["lr"] / (1 - betas[0] ** state["t"]) for group, state in zip(groups, states)])
        for parameter, whole in zip(parameters, wholes):
            if parameter is not whole:
                parameter.copy_(whole)


def make(named, roles, settings):
    validate(settings)
    parameters, names = collect(named)
    if not parameters:
        raise ValueError("not one parameter to train")
    for each in parameters:
        if each.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{names[id(each)][0]} is of {each.dtype}")
    rules = {names[id(each)][0]: decide(each, names[id(each)], roles) for each in parameters}
    return Optimizer(parameters, names, rules, settings)


def clip(optimizer, max_norm):
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or math.isnan(max_norm) or max_norm <= 0:
        raise ValueError(f"max_norm cannot be {max_norm}")
    found = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    norm = total(found)
    factor = max_norm / (norm + 1e-6)
    for gradient in found if factor < 1 else ():
        gradient.mul_(factor)
    return norm


def total(gradients):
    return math.sqrt(math.fsum((each if each.dtype == torch.float64 else each.float()).square().sum().item() for each in gradients))


def state(optimizer):
    saved = {}
    for group in optimizer.param_groups:
        [parameter] = group["params"]
        own = dict(optimizer.state[parameter])
        options = {key: value for key, value in group.items() if key != "params"}
        saved[" ".join(optimizer.called[parameter])] = {"state": own, "options": options, "size": tuple(parameter.shape)}
    return saved


def load(optimizer, saved):
    groups = {" ".join(optimizer.called[group["params"][0]]): group for group in optimizer.param_groups}
    for name in groups.keys() ^ saved.keys():
        raise ValueError(f"only on one side: {name}")
    for name, group in groups.items():
        if tuple(group["params"][0].shape) != tuple(saved[name]["size"]) or group["rule"] != saved[name]["options"]["rule"]:
            raise ValueError(f"not what was saved: {name}")
    for name, group in groups.items():
        own = {key: value.clone() if torch.is_tensor(value) else value for key, value in saved[name]["state"].items()}
        optimizer.state[group["params"][0]] = own
        group.update(saved[name]["options"])


def loss_scale(start, growth, backoff, interval):
    for name, value, low, high in (("start", start, 0, math.inf), ("growth", growth, 1, math.inf), ("backoff", backoff, 0, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < high:
            raise ValueError(f"{name} cannot be {value}")
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval cannot be {interval}")
    return {"now": start, "growth": growth, "backoff": backoff, "interval": interval, "row": 0}


def scale_of(scaler):
    return scaler["now"]


def update(optimizer, scaler, max_norm):
    gradients = {}
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                gradients[each] = each.grad.to(each.dtype if each.dtype.itemsize > 2 else torch.float32) / scaler["now"]
    finite = all(gradient.isfinite().all() for gradient in gradients.values())
    norm = total(gradients.values())
    if not finite:
        scaler["now"], scaler["row"] = scaler["now"] * scaler["backoff"], 0
        return norm, False
    with torch.no_grad():
        if norm > max_norm:
            gradients = {each: gradient * (max_norm / (norm + 1e-6)) for each, gradient in gradients.items()}
        optimizer.move(gradients)
    scaler["row"] += 1
    if scaler["row"] == scaler["interval"]:
        scaler["now"], scaler["row"] = scaler["now"] * scaler["growth"], 0
    return norm, True


def validate(settings):
    keys = {"adamw": "lr betas eps weight_decay", "muon": "lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn"}
    for section in settings.keys() ^ keys.keys():
        raise ValueError(f"section {section}")
    for section, wanted in keys.items():
        for key in settings[section].keys() ^ set(wanted.split()):
            raise ValueError(f"{section} and {key}: unknown, or missing")
        for key, value in settings[section].items():
            if not right(key, value):
                raise ValueError(f"{section}: {key} cannot be {value}")


def right(key, value):
    real = lambda each: isinstance(each, (int, float)) and not isinstance(each, bool) and math.isfinite(each)  # noqa: E731
    if key in ("betas", "ns_coefficients"):
        count, fits = (2, lambda each: real(each) and 0 <= each < 1) if key == "betas" else (3, real)
        return isinstance(value, (list, tuple)) and len(value) == count and all(fits(each) for each in value)
    if key == "nesterov":
        return value is True or value is False
    if key == "ns_steps":
        return isinstance(value, int) and value is not True and value > 0
    if key == "adjust_lr_fn":
        return value in ("original", "match_rms_adamw")
    return real(value) and value >= 0 and (key != "momentum" or value < 1)
