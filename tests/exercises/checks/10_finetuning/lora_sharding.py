"""Check of 10.lora_sharding. Oracle: the same layers in one process.

The answer is not compared with a table: ranks that are threads carry the plan out. Each takes its slices, computes the layer and its
gradients, adds up the gradients that the plan says are parts, and what comes out is compared. Digits: in the first such cases rank i's
share of a gradient is worth 10^i, so 11 is a sum over both ranks, 1 or 10 the part of one rank, and 22 a sum of what was whole already.

Tolerances. 1e-12 in float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.course.checking import Case, Check
from shared.course.comparing import Said
from shared.parallel.comm.threads import run_threads
from shared.parallel.tensor.operators import f_and_g

from .common import CONTRACT, randn

ONE_PROCESS = "the same layer in one process"
NAMES = ("A", "B")
LAYERS = {0: (12, 10), 1: (6, 12), None: (5, 6)}  # cut: output and input features


def planned(function, cut):
    """The two plans, and whether they can be carried out."""
    plans = function(cut)
    if not isinstance(plans, tuple) or len(plans) != 2:
        return {"returned": plans}
    told = {}
    for name, plan in zip(NAMES, plans, strict=True):
        told[f"plan for {name}"] = Said(type(plan).__name__)
        told[f"type of {name}'s summed"] = Said(type(getattr(plan, "summed", None)).__name__)
        cut_of = getattr(plan, "cut", "nothing")
        told[f"{name}'s cut"] = Said("0, 1 or None" if type(cut_of) in (type(None), int) and cut_of in (0, 1, None) else repr(cut_of))
    return told


def well_formed(**_):
    told = {}
    for name in NAMES:
        told |= {f"plan for {name}": "FactorPlan", f"type of {name}'s summed": "bool", f"{name}'s cut": "0, 1 or None"}
    return {name: Said(words) for name, words in told.items()}


def as_said(function, cut):
    return {f"plan for {name}": f"cut={plan.cut}, summed={plan.summed}" for name, plan in zip(NAMES, function(cut), strict=True)}


def plan_of(function, cut):
    """A plan as a dictionary, so that one that is a plain tuple works as well."""
    return dict(zip(NAMES, function(cut), strict=True))


def own(tensor: Tensor, cut: int | None, world) -> Tensor:
    return tensor if cut is None else tensor.chunk(world.size, dim=cut)[world.rank].contiguous()


def layer(cut, plan, f, g, x, weight, a, b, scaling):
    """What each rank computes: the layer as tensor parallelism has it, and the addition beside it, before the one collective."""
    if x.shape[-1] != a.shape[1] or a.shape[0] != b.shape[1] or b.shape[0] != weight.shape[0]:
        shapes = f"x {[*x.shape]}, W {[*weight.shape]}, A {[*a.shape]} (summed: {plan['A'][1]}), B {[*b.shape]} (summed: {plan['B'][1]})"
        raise ValueError(f"What a rank holds does not fit together: {shapes}.")
    x = f(x) if cut == 0 else x
    y = F.linear(x, weight) + scaling * F.linear(F.linear(x, a), b)
    return g(y) if cut == 1 else y


def tensors_of(tokens, size, out, rank):
    shapes = {"x": (tokens, size), "weight": (out, size), "A": (rank, size), "B": (out, rank)}
    return {name: randn(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items(), 1)}


def whole(cut, ranks, tokens, size, out, rank):
    made = tensors_of(tokens, size, out, rank)
    leaves = {name: made[name].requires_grad_() for name in ("x", "A", "B")}
    y = F.linear(made["x"], made["weight"]) + 0.5 * F.linear(F.linear(made["x"], made["A"]), made["B"])
    back = torch.autograd.grad(y, [*leaves.values()], randn(tokens, out, seed=5))
    results = ("output", *(f"gradient of {name}" for name in leaves))
    told = {f"rank {number}: {name} differs from one process": "nowhere" for number in range(ranks) for name in results}
    told["numbers of the factors that each rank holds"] = [held(cut, size, out, rank, ranks)] * ranks
    return told, y, dict(zip(leaves, back, strict=True))


def held(cut, size, out, rank, ranks):
    """A factor on the side of the cut need not be whole anywhere."""
    return rank * (size // ranks if cut == 1 else size) + rank * (out // ranks if cut == 0 else out)


def expected(**given):
    return whole(**given)[0]


def carried_out(function, cut, ranks, tokens, size, out, rank):
    """Where outputs and gradients on each rank differ from one process, when its slices are the plan's and parts are added up."""
    plan = plan_of(function, cut)
    _, y, back = whole(cut, ranks, tokens, size, out, rank)

    def work(world):
        made = tensors_of(tokens, size, out, rank)
        f, g = f_and_g(world)
        slices = {"x": 1 if cut == 1 else None, "weight": cut, "A": plan["A"][0], "B": plan["B"][0]}
        mine = {name: own(made[name].detach(), slices[name], world) for name in made}
        leaves = {name: mine[name].requires_grad_() for name in ("x", "A", "B")}
        found = layer(cut, plan, f, g, mine["x"], mine["weight"], mine["A"], mine["B"], 0.5)
        flow = own(randn(tokens, out, seed=5), 1 if cut == 0 else None, world)
        found_back = dict(zip(leaves, torch.autograd.grad(found, [*leaves.values()], flow), strict=True))
        for name in NAMES:
            if plan[name][1]:
                world.all_reduce(found_back[name])
        told = {"output": difference(found, own(y, 1 if cut == 0 else None, world))}
        told |= {f"gradient of {name}": difference(found_back[name], own(back[name], slices[name], world)) for name in leaves}
        return told, mine["A"].numel() + mine["B"].numel()

    found, numbers = zip(*run_threads(work, ranks), strict=True)
    told = {f"rank {number}: {name} differs from one process": where for number, each in enumerate(found) for name, where in each.items()}
    return told | {"numbers of the factors that each rank holds": [*numbers]}


def difference(found: Tensor, wanted: Tensor) -> str:
    if found.shape != wanted.shape:
        return f"shape {[*found.shape]}, expected {[*wanted.shape]}"
    if torch.allclose(found, wanted, rtol=1e-12, atol=1e-12):
        return "nowhere"
    ratio = (found * wanted).sum() / (wanted * wanted).sum()
    if torch.allclose(found, ratio * wanted, rtol=1e-9, atol=1e-12):
        return f"everywhere: it is {ratio:.3g} times as large"
    return "in its numbers: other parts of the sum are in it"


def digits(function, cut, ranks):
    """The gradients of A and B, one number each (or one for each slice), where rank i's share of what is computed is 10^i.

    One feature in and out for each rank, rank 1, and all numbers are 1, but for those that differ by rank: the outputs' gradients behind a
    layer that is cut by outputs, the inputs of one that is cut by inputs.
    """
    plan = plan_of(function, cut)
    worth = torch.tensor([[10.0**number for number in range(ranks)]], dtype=torch.float64)
    one = torch.ones(1, ranks, dtype=torch.float64)

    def work(world):
        f, g = f_and_g(world)
        x = own(worth if cut == 1 else one, 1 if cut == 1 else None, world)
        a = own(one, plan["A"][0], world).clone().requires_grad_()
        b = own(one.T, plan["B"][0], world).clone().requires_grad_()
        weight = own(torch.zeros(ranks, ranks, dtype=torch.float64), cut, world)
        y = layer(cut, plan, f, g, x, weight, a, b, 1.0)
        flow = own(worth if cut == 0 else one, 1 if cut == 0 else None, world)
        found = dict(zip(NAMES, torch.autograd.grad(y, [a, b], flow), strict=True))
        for name in NAMES:
            if plan[name][1]:
                world.all_reduce(found[name])
        return {f"gradient of {name}": found[name].long().flatten().tolist() for name in NAMES}

    return {f"rank {number}": each for number, each in enumerate(run_threads(work, ranks))}


def digits_of_one(cut, ranks):
    """In one process, by autograd; cut as the tensors are that a rank needs of it."""
    worth = torch.tensor([[10.0**number for number in range(ranks)]], dtype=torch.float64)
    one = torch.ones(1, ranks, dtype=torch.float64)
    a, b = one.clone().requires_grad_(), one.T.clone().requires_grad_()
    y = F.linear(F.linear(worth if cut == 1 else one, a), b)
    back = torch.autograd.grad(y, [a, b], worth if cut == 0 else one)
    parts = [[tensor.flatten()[number : number + 1] if cut is not None and cut == side else tensor.flatten() for number in range(ranks)]
             for tensor, side in zip(back, (1, 0), strict=True)]  # fmt: skip
    return {f"rank {number}": {f"gradient of {name}": part[number].long().tolist() for name, part in zip(NAMES, parts, strict=True)}
            for number in range(ranks)}  # fmt: skip


def trained(function, ranks, steps):
    """A column layer, a nonlinearity and a row layer, trained for some steps; B begins at 0, so A has no gradient in the first."""
    plans = {cut: plan_of(function, cut) for cut in (0, 1, None)}

    def run(world):
        f, g = f_and_g(world)
        mine = {}
        for cut, (out, size) in LAYERS.items():
            factors = zip((randn(3, size, seed=2), torch.zeros(out, 3).double()), plans[cut].values(), strict=True)
            leaves = [own(factor, plan[0], world).clone().requires_grad_() for factor, plan in factors]
            mine[cut] = [own(randn(out, size, seed=1), cut, world), *leaves]
        losses = []
        for step in range(steps):
            x = randn(8, 10, seed=20 + step)
            for cut in (0, 1, None):
                x = layer(cut, plans[cut], f, g, x, *mine[cut], 2.0)
                x = x if cut is None else x.tanh()
            loss = (x - randn(8, 5, seed=30 + step)).square().sum()
            leaves = [(cut, name, mine[cut][place]) for cut in mine for place, name in enumerate(NAMES, 1)]
            for (cut, name, leaf), gradient in zip(leaves, torch.autograd.grad(loss, [leaf for *_, leaf in leaves]), strict=True):
                if plans[cut][name][1]:
                    world.all_reduce(gradient)
                with torch.no_grad():
                    leaf -= 0.001 * gradient
            losses.append(loss.detach())
        return torch.stack(losses)

    return {f"rank {number}: the losses of {steps} steps": losses for number, losses in enumerate(run_threads(run, ranks))}


def in_one(ranks, steps):
    losses = alone(steps)
    return {f"rank {number}: the losses of {steps} steps": losses for number in range(ranks)}


def alone(steps):
    layers = []
    for shape in LAYERS.values():
        a, b = randn(3, shape[1], seed=2), torch.zeros(shape[0], 3).double()
        layers.append([randn(*shape, seed=1), a.requires_grad_(), b.requires_grad_()])
    losses = []
    for step in range(steps):
        y = randn(8, 10, seed=20 + step)
        for place, (weight, a, b) in enumerate(layers):
            y = y @ (weight + 2 * b @ a).T
            y = y.tanh() if place < 2 else y
        loss = (y - randn(8, 5, seed=30 + step)).square().sum()
        loss.backward()
        with torch.no_grad():
            for leaf in (leaf for one in layers for leaf in one[1:]):
                leaf -= 0.001 * leaf.grad
                leaf.grad = None
        losses.append(loss.detach())
    return torch.stack(losses)


def case(rung, title, given, expected, source, observe):
    return Case(rung, title, lambda: dict(given), expected, source, observe, rtol=1e-12)


def run(title, cut, ranks, **sizes):
    sizes = {"tokens": 5, "size": 12, "out": 18, "rank": 4} | sizes
    return case("two ranks", title, {"cut": cut, "ranks": ranks} | sizes, expected, ONE_PROCESS, carried_out)


NOTHING = {"plan for A": "cut=None, summed=False", "plan for B": "cut=None, summed=False"}

CHECK = Check(
    exercise="10.lora_sharding",
    outputs=("plans",),
    spoilt=("plans",),
    cases=[
        case("shape and dtype", "a weight cut by output features", {"cut": 0}, well_formed, CONTRACT, planned),
        case("worked example", "a weight that every rank holds whole", {"cut": None}, lambda cut: dict(NOTHING), CONTRACT, as_said),
        case("property", "types: a weight cut by input features", {"cut": 1}, well_formed, CONTRACT, planned),
        case("property", "types: a weight that every rank holds whole", {"cut": None}, well_formed, CONTRACT, planned),
        case("two ranks", "digits: column-parallel, two ranks", {"cut": 0, "ranks": 2}, digits_of_one, ONE_PROCESS, digits),
        case("two ranks", "digits: row-parallel, two ranks", {"cut": 1, "ranks": 2}, digits_of_one, ONE_PROCESS, digits),
        case("two ranks", "digits: column-parallel, three ranks", {"cut": 0, "ranks": 3}, digits_of_one, ONE_PROCESS, digits),
        case("two ranks", "digits: row-parallel, three ranks", {"cut": 1, "ranks": 3}, digits_of_one, ONE_PROCESS, digits),
        run("a column-parallel layer", 0, 2),
        run("a row-parallel layer", 1, 2),
        run("a layer that both ranks hold whole", None, 2),
        run("column-parallel on three ranks, with as many features in as out as ranks of the factors", 0, 3, size=12, out=12, rank=12),
        run("row-parallel on three ranks, with as many features in as out as ranks of the factors", 1, 3, size=12, out=12, rank=12),
        case("two ranks", "three layers, three steps: column, row, whole", {"ranks": 2, "steps": 3}, in_one, ONE_PROCESS, trained),
    ],
)  # fmt: skip
