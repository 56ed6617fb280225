"""A right build of another design: one object for each parameter that moves itself, and an optimizer that only knows groups.

AdamW runs in one set of calls for the parameters of a group that have taken as many steps.
"""

import math

import torch

WIDE = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Part:
    """A parameter with its names, its rule and its memory."""

    def __init__(self, parameter):
        self.parameter, self.names, self.memory, self.steps = parameter, [], {}, 0

    def settle(self, roles):
        for name in self.names:
            if roles.get(name) not in ("embedding", "head", "norm", "bias", "matrix", "experts"):
                raise ValueError(f"{name!r} has no role that is known")
        kinds = {roles[name] for name in self.names}
        self.rule = "muon" if (kinds, self.parameter.ndim) in (({"matrix"}, 2), ({"experts"}, 3)) else "adamw"
        self.decays = self.parameter.ndim >= 2 and kinds.isdisjoint({"norm", "bias"})
        return self

    def prepare(self):
        if self.parameter.dtype not in WIDE:
            raise ValueError(f"{self.names[0]}: {self.parameter.dtype} cannot be trained")
        if WIDE[self.parameter.dtype] != self.parameter.dtype:
            self.memory["weight"] = self.parameter.detach().to(torch.float32)

    @property
    def weight(self):
        return self.memory.get("weight", self.parameter)

    @property
    def key(self):
        return "|".join(sorted(self.names))

    def zeros(self, name):
        if name not in self.memory:
            self.memory[name] = torch.zeros_like(self.weight)
        return self.memory[name]

    def wide_gradient(self):
        return self.parameter.grad.to(WIDE[self.parameter.dtype])

    def publish(self):
        if "weight" in self.memory:
            self.parameter.copy_(self.memory["weight"])

    def packed(self):
        shape = "x".join(map(str, self.parameter.shape))
        return {"rule": self.rule, "shape": shape, "steps": self.steps, "names": list(self.memory), "tensors": list(self.memory.values())}

    def unpack(self, saved):
        self.steps = saved["steps"]
        self.memory = {name: tensor.clone() for name, tensor in zip(saved["names"], saved["tensors"])}


def parts_of(named, roles):
    everything, by_name = {}, {}
    for name, parameter in named:
        part = everything.setdefault(id(parameter), Part(parameter))
        if by_name.setdefault(name, part) is not part:
            raise ValueError(f"{name} is the name of two parameters")
        part.names.append(name)
    return [part.settle(roles) for part in everything.values() if part.parameter.requires_grad]


def route(named, roles):
    return {part.names[0]: (part.rule, part.decays) for part in parts_of(named, roles)}


def newton_schulz(matrices, steps, coefficients, eps):
    if matrices.shape[-2] > matrices.shape[-1]:
        return newton_schulz(matrices.mT, steps, coefficients, eps).mT
    a, b, c = coefficients
    x = torch.nn.functional.normalize(matrices.flatten(-2), dim=-1, eps=eps).view(matrices.shape)
    identity = torch.eye(x.shape[-2], dtype=x.dtype)
    for _ in range(steps):
        square = torch.einsum("...ij,...kj->...ik", x, x)
        x = (a * identity + b * square + c * (square @ square)) @ x  # (a I + b A + c A A) X
    return x


class Both(torch.optim.Optimizer):
    def __init__(self, parts, settings):
        self.parts = {id(part.parameter): part for part in parts}
        groups = []
        for rule in ("muon", "adamw"):
            for decays in (False, True):
                own = [part.parameter for part in parts if (part.rule, part.decays) == (rule, decays)]
                if own:
                    options = {**settings[rule], "weight_decay": settings[rule]["weight_decay"] if decays else 0}
                    groups.append({"params": own, "rule": rule, "kind": f"{rule} {decays}", **options})
        super().__init__(groups, {})

    def step(self):
        self.apply(lambda part: part.wide_gradient())

    @torch.no_grad()
    def apply(self, gradient_of):
        for group in self.param_groups:
            moving = [self.parts[id(each)] for each in group["params"] if each.grad is not None]
            for part in moving:
                part.steps += 1
            if group["rule"] == "muon":
                for part in moving:
                    self.turn(group, part, gradient_of(part))
            else:
                for lane in {(part.steps, part.weight.dtype) for part in moving}:
                    self.divide(group, [part for part in moving if (part.steps, part.weight.dtype) == lane], gradient_of)
            for part in moving:
                part.publish()

    def turn(self, group, part, gradient):
        momentum, kept = group["momentum"], part.zeros("momentum")
        kept += (1 - momentum) * (gradient - kept)
        direction = torch.lerp(gradient, kept, momentum) if group["nesterov"] else kept
        rows, columns = part.weight.shape[-2:]
        scale = max(1, rows / columns) ** 0.5 if group["adjust_lr_fn"] == "original" else 0.2 * max(rows, columns) ** 0.5
        direction = newton_schulz(direction, group["ns_steps"], group["ns_coefficients"], group["eps"])
        part.weight.copy_((1 - group["lr"] * group["weight_decay"]) * part.weight - group["lr"] * scale * direction)

    def divide(self, group, parts, gradient_of):
        (one, two), steps = group["betas"], parts[0].steps
        gradients, weights = [gradient_of(part) for part in parts], [part.weight for part in parts]
        m, v = [part.zeros("m") for part in parts], [part.zeros("v") for part in parts]
        torch._foreach_lerp_(m, gradients, 1 - one)
        torch._foreach_mul_(v, two)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - two)
        roots = torch._foreach_sqrt(v)
        torch._foreach_mul_(roots, (1 - two**steps) ** -0.5)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(weights, m, roots, -group["lr"] / (1 - one**steps))

    def given(self):
        return [part for part in self.parts.values() if part.parameter.grad is not None]


def make(named, roles, settings):
    look_through(settings)
    parts = parts_of(named, roles)
    if not parts:
        raise ValueError("no parameter requires a gradient")
    for part in parts:
        part.prepare()
    return Both(parts, settings)


def norm_of(gradients):
    whole = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        whole += torch.linalg.vector_norm(gradient.double()) ** 2
    return float(whole.sqrt())


def clip(optimizer, max_norm):
    if type(max_norm) not in (int, float) or not max_norm > 0:
        raise ValueError(f"max_norm={max_norm!r}")
    gradients = [part.parameter.grad for part in optimizer.given()]
    norm = norm_of(gradients)
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    return norm


def state(optimizer):
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"parts": {part.key: part.packed() for part in optimizer.parts.values()}, "options": options}


def load(optimizer, saved):
    own = {part.key: part for part in optimizer.parts.values()}
    for key in set(own) | set(saved["parts"]):
        if key not in own or key not in saved["parts"]:
            raise ValueError(f"{key} is known on one side alone")
        for what in ("rule", "shape"):
            if own[key].packed()[what] != saved["parts"][key][what]:
                raise ValueError(f"{key} has another {what}")
    for key, part in own.items():
        part.unpack(saved["parts"][key])
    for group in optimizer.param_groups:
        group.update(next(options for options in saved["options"] if options["kind"] == group["kind"]))


class Scaler:
    def __init__(self, start, growth, backoff, interval):
        real = lambda value: type(value) in (int, float) and math.isfinite(value)  # noqa: E731
        right = {"start": real(start) and start > 0, "growth": real(growth) and growth > 1, "backoff": real(backoff) and 0 < backoff < 1}
        right["interval"] = type(interval) is int and interval > 0
        for name, fits in right.items():
            if not fits:
                raise ValueError(f"{name} is out of range")
        self.scale, self.growth, self.backoff, self.interval, self.since = start, growth, backoff, interval, 0


def loss_scale(start, growth, backoff, interval):
    return Scaler(start, growth, backoff, interval)


def scale_of(scaler):
    return scaler.scale


def update(optimizer, scaler, max_norm):
    good = all(bool(torch.isfinite(part.parameter.grad).all()) for part in optimizer.given())
    norm = norm_of([part.wide_gradient() for part in optimizer.given()]) / scaler.scale
    if not good:
        scaler.scale, scaler.since = scaler.scale * scaler.backoff, 0
        return norm, False
    shrink = min(1.0, max_norm / max(norm, 1e-300))
    optimizer.apply(lambda part: part.wide_gradient() / scaler.scale * shrink)
    scaler.since += 1
    if scaler.since >= scaler.interval:
        scaler.scale, scaler.since = scaler.scale * scaler.growth, 0
    return norm, True


def look_through(settings):
    real = lambda value: type(value) in (int, float) and math.isfinite(value)  # noqa: E731
    rate = lambda value: real(value) and value >= 0  # noqa: E731
    part = lambda value: real(value) and 0 <= value < 1  # noqa: E731
    row = lambda value, count, fits: type(value) in (tuple, list) and len(value) == count and all(map(fits, value))  # noqa: E731
    shared = {"lr": rate, "eps": rate, "weight_decay": rate}
    muon = {"momentum": part, "nesterov": lambda value: type(value) is bool, "ns_coefficients": lambda value: row(value, 3, real)}
    muon |= {
        "ns_steps": lambda value: type(value) is int and value >= 1,
        "adjust_lr_fn": lambda value: value in ("original", "match_rms_adamw"),
    }
    rules = {"adamw": {**shared, "betas": lambda value: row(value, 2, part)}, "muon": {**shared, **muon}}
    for section in {*rules, *settings}:
        if section not in rules or section not in settings:
            raise ValueError(f"the section {section} is wrong or missing")
        for key in {*rules[section], *settings[section]}:
            if key not in rules[section] or key not in settings[section] or not rules[section][key](settings[section][key]):
                raise ValueError(f"{key} in the section {section} is wrong or missing")
