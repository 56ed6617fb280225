"""Chapter 05. AdamW and Muon as one optimizer, from scratch: routing, groups, state by name, clipping, float32 copies, loss scale.

    AdamW divides each number's running mean by its own typical size; Muon pushes all singular values of a matrix's running mean towards 1.

One class, with one method for each rule. AdamW runs in `foreach` calls over a whole group, because its tensors are many and small; Muon
runs parameter by parameter, because its temporaries are large. (Loshchilov and Hutter 2019; Jordan et al. 2024; Liu et al. 2025.)
"""

import math

import torch

ROLES = ("embedding", "head", "norm", "bias", "matrix", "experts")
HALF, DTYPES = (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALES = {
    "original": lambda rows, columns: max(1, rows / columns) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
}


def names_of(named):
    """Each trainable parameter once, with all of its names."""
    found, owners = {}, {}
    for name, parameter in named:
        if owners.setdefault(name, parameter) is not parameter:
            raise ValueError(f"{name} stands for two different parameters.")
        if parameter.requires_grad:
            found.setdefault(parameter, []).append(name)
    return found


def asks_for(role, dimensions):
    rule = "muon" if (role, dimensions) in (("matrix", 2), ("experts", 3)) else "adamw"
    return rule, dimensions >= 2 and role not in ("norm", "bias")


def rule_of(parameter, names, roles):
    for name in names:
        if roles.get(name) not in ROLES:
            raise ValueError(f"{name} has the role {roles.get(name)!r}, and roles are {ROLES}.")
    asked = [asks_for(roles[name], parameter.ndim) for name in names]
    return "muon" if all(rule == "muon" for rule, _ in asked) else "adamw", all(decays for _, decays in asked)


def route(named, roles):
    return {names[0]: rule_of(parameter, names, roles) for parameter, names in names_of(named).items()}


def newton_schulz(matrices, steps, coefficients, eps):
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # X X^T then has the smaller side
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)  # of each matrix by itself
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = (gram @ gram).mul_(c).add_(gram, alpha=b)
        x = (polynomial @ x).add_(x, alpha=a)
    return x.mT if tall else x


class AdamWMuon(torch.optim.Optimizer):
    """`kept[parameter]` is its state: running means, the number of its steps, and `copy`, a float32 weight where it has 16 bits."""

    def __init__(self, named, roles, settings):
        check_settings(settings)
        self.names, groups = names_of(named), {}
        for parameter, names in self.names.items():
            if parameter.dtype not in DTYPES:
                raise ValueError(f"{names[0]} has the dtype {parameter.dtype}: give one of {DTYPES}.")
            groups.setdefault(rule_of(parameter, names, roles), []).append(parameter)
        if not groups:
            raise ValueError("There is no trainable parameter.")
        self.kept = {parameter: {} for parameter in self.names}
        for parameter, kept in self.kept.items():
            if parameter.dtype in HALF:
                kept["copy"] = parameter.detach().float()
        own = []
        for (rule, decays), parameters in groups.items():
            options = dict(settings[rule], rule=rule, decays=decays, params=parameters)
            own.append(options if decays else options | {"weight_decay": 0.0})
        super().__init__(own, {})

    @torch.no_grad()
    def step(self, factor=1.0):
        """factor: for all gradients, applied in float32 where they have 16 bits."""
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            weights = [self.kept[parameter].get("copy", parameter) for parameter in moved]
            if not moved:
                continue
            if group["rule"] == "adamw":
                self.adamw(group, weights, [gradient_of(parameter, factor) for parameter in moved], [self.kept[each] for each in moved])
            else:
                for parameter, weight in zip(moved, weights):
                    self.muon(group, weight, gradient_of(parameter, factor), self.kept[parameter])
            halves = [(parameter, weight) for parameter, weight in zip(moved, weights) if parameter is not weight]
            if halves:
                torch._foreach_copy_(*zip(*halves))

    def adamw(self, group, weights, gradients, kept):
        beta1, beta2 = group["betas"]
        for weight, each in zip(weights, kept):
            if "step" not in each:
                each |= {"step": 0, "mean": torch.zeros_like(weight), "squares": torch.zeros_like(weight)}
            each["step"] += 1  # of its own: it may have had no gradient so far
        means, squares = [each["mean"] for each in kept], [each["squares"] for each in kept]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        typical = torch._foreach_div(squares, [1 - beta2 ** each["step"] for each in kept])
        torch._foreach_sqrt_(typical)
        torch._foreach_add_(typical, group["eps"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(weights, means, typical, [-group["lr"] / (1 - beta1 ** each["step"]) for each in kept])

    def muon(self, group, weight, gradient, kept):
        if "momentum" not in kept:
            kept["momentum"] = torch.zeros_like(weight)
        kept["momentum"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(kept["momentum"], group["momentum"]) if group["nesterov"] else kept["momentum"]
        update = newton_schulz(direction, group["ns_steps"], group["ns_coefficients"], group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * SCALES[group["adjust_lr_fn"]](*weight.shape[-2:]))

    def state_dict(self):
        """By name: the smallest of a tied parameter's, which is the same in every order."""
        parameters = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in self.kept[parameter].items()}
                parameters[min(self.names[parameter])] = {"rule": group["rule"], "shape": list(parameter.shape), "kept": kept}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"parameters": parameters, "groups": groups}

    def load_state_dict(self, saved):
        """Not the base class's: it goes by number, and takes running means to the weight's dtype."""
        own = self.state_dict()["parameters"]
        for name in sorted(set(own) | set(saved["parameters"])):
            here, there = own.get(name), saved["parameters"].get(name)
            if here is None or there is None:
                raise ValueError(f"{name} is {'not in this optimizer' if here is None else 'not in what was saved'}.")
            for key in ("rule", "shape"):
                if here[key] != there[key]:
                    raise ValueError(f"{name} has the {key} {here[key]}, and was saved with {there[key]}.")
        for parameter, names in self.names.items():
            kept = saved["parameters"][min(names)]["kept"]
            self.kept[parameter] = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in kept.items()}
        options = {(group["rule"], group["decays"]): group for group in saved["groups"]}
        for group in self.param_groups:
            group.update(options[group["rule"], group["decays"]])


def gradient_of(parameter, factor=1.0):
    gradient = parameter.grad.float() if parameter.dtype in HALF else parameter.grad
    return gradient if factor == 1.0 else gradient * factor


def make(named, roles, settings):
    return AdamWMuon(named, roles, settings)


def gradients(optimizer):
    return [parameter.grad for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]


def norm_of(optimizer):
    wide = [torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in gradients(optimizer)]
    return math.hypot(*[each.item() for each in wide])  # the norm of norms; NaN and infinity stay what they are


def clip(optimizer, max_norm):
    if not number(max_norm) or not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm!r}: give a number above 0.")
    norm = norm_of(optimizer)
    if norm > max_norm:
        torch._foreach_mul_(gradients(optimizer), max_norm / norm)
    return norm


def state(optimizer):
    return optimizer.state_dict()


def load(optimizer, saved):
    optimizer.load_state_dict(saved)


class LossScale:
    def __init__(self, start, growth, backoff, interval):
        limits = {"start": (start, 0, math.inf), "growth": (growth, 1, math.inf), "backoff": (backoff, 0, 1)}
        for name, (value, low, high) in limits.items():
            if not number(value) or not low < value < high:
                raise ValueError(f"{name} is {value!r}: give a number above {low} and below {high}.")
        if type(interval) is not int or interval < 1:
            raise ValueError(f"interval is {interval!r}: give an int of at least 1.")
        self.scale, self.growth, self.backoff, self.interval, self.good = float(start), growth, backoff, interval, 0

    def adapt(self, good):
        self.good = self.good + 1 if good else 0
        if not good:
            self.scale *= self.backoff
        elif self.good == self.interval:
            self.scale, self.good = self.scale * self.growth, 0


def loss_scale(start, growth, backoff, interval):
    return LossScale(start, growth, backoff, interval)


def scale_of(scaler):
    return scaler.scale


def update(optimizer, scaler, max_norm):
    """The scale is undone, and the clipping done, by one factor, which the step applies where gradients are float32."""
    norm = norm_of(optimizer) / scaler.scale
    good = math.isfinite(norm)
    if good:
        optimizer.step(min(1.0, max_norm / norm if norm else 1.0) / scaler.scale)
    scaler.adapt(good)
    return norm, good


def number(value):
    return type(value) in (int, float)  # True is an int for isinstance


def check_settings(settings):
    at_least_0 = lambda value: number(value) and 0 <= value < math.inf  # noqa: E731, NaN fails
    below_1 = lambda value: number(value) and 0 <= value < 1  # noqa: E731
    numbers = lambda value, count, each: isinstance(value, (tuple, list)) and len(value) == count and all(map(each, value))  # noqa: E731
    common = {"lr": at_least_0, "weight_decay": at_least_0, "eps": at_least_0}
    wanted = {
        "adamw": common | {"betas": lambda value: numbers(value, 2, below_1)},
        "muon": common
        | {
            "momentum": below_1,
            "nesterov": lambda value: type(value) is bool,
            "ns_coefficients": lambda value: numbers(value, 3, lambda each: number(each) and math.isfinite(each)),
            "ns_steps": lambda value: type(value) is int and value >= 1,
            "adjust_lr_fn": lambda value: isinstance(value, str) and value in SCALES,
        },
    }
    if strange := sorted(set(settings) ^ set(wanted)):
        raise ValueError(f"Section {strange[0]} of the settings is unknown or missing.")
    for section, keys in wanted.items():
        if strange := sorted(set(settings[section]) ^ set(keys)):
            raise ValueError(f"Key {strange[0]} of section {section} is unknown or missing.")
        for key, fits in keys.items():
            if not fits(settings[section][key]):
                raise ValueError(f"{key} of section {section} is {settings[section][key]!r}, which it cannot be.")
