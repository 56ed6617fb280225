"""Check of 05.muon_update. Oracle: torch.optim.Muon in float32 for a whole step; arithmetic for each part.

Tolerances. Worked examples are float64 arithmetic: 1e-12. The oracle orthogonalises in bfloat16, as the answer is asked to there; the
directions differ by a float32 rounding, 1e-7, which decides the last bfloat16 digit of few entries: 2e-2 beside entries of up to 1, as
measured for two implementations that agree.
"""

import torch

from shared.course.checking import Case, Check
from shared.optim.muon import newton_schulz

from .common import randn
from .pieces import tensors

CONTRACT = "the contract"
NAN, INF = float("nan"), float("inf")
# original, of [7, 5]; match_rms_adamw, of the others
SCALES = {(2, 7, 5): 1.4**0.5, (3, 2, 7, 5): 1.4**0.5, (2, 5, 7): 0.2 * 7**0.5, (9, 2, 3): 0.2 * 3**0.5}
ORACLE = "torch.optim.Muon, its change of the weight over the learning rate"


def as_it_is(direction):
    """Returns the direction as it is."""
    return direction


def double(direction):
    """Returns twice the direction."""
    return 2 * direction


def by_its_norm(direction):
    """Returns each matrix divided by its own norm."""
    return direction / torch.linalg.matrix_norm(direction, keepdim=True)


def whole_sum(part):
    """Stands for a gathering one: returns the part plus 100."""
    return part + 100


def numbers(g: list, b: list, orthogonalize=as_it_is, shape=None, momentum=0.9, nesterov=False, scaling="original"):
    settings = {"orthogonalize": orthogonalize, "momentum": momentum, "nesterov": nesterov, "scaling": scaling}
    return lambda: tensors(gradient=g, momentum_buffer=b) | {"shape": shape or tuple(torch.tensor(g).shape)} | settings


def random(*shape: int, whole: tuple = (), dtype=torch.float64, **more):
    settings = {"orthogonalize": double, "momentum": 0.8, "nesterov": True, "scaling": "original"} | more
    return lambda: {
        "gradient": randn(*shape, seed=3, dtype=dtype), "momentum_buffer": randn(*shape, seed=5, dtype=dtype), "shape": whole or shape,
    } | settings  # fmt: skip


def call(function, momentum_buffer, **given):
    update = function(momentum_buffer=momentum_buffer, **given)
    return {"update": update.clone(), "momentum_buffer": momentum_buffer.clone()}


def what_it_touches(function, momentum_buffer, **given):
    """The update, and what stands in the memory that the buffer had before the call."""
    before = momentum_buffer.detach()
    try:
        update = function(momentum_buffer=momentum_buffer, **given)
        return {
            "update": update.clone(), "momentum_buffer": before, "autograd records afterwards": torch.is_grad_enabled(),
            "the update lies in the buffer's memory": update.untyped_storage().data_ptr() == before.untyped_storage().data_ptr(),
        }
    finally:
        torch.set_grad_enabled(True)


def beside(update: list, buffer: list):
    kept = {"autograd records afterwards": True, "the update lies in the buffer's memory": False}
    return lambda **_: tensors(update=update, momentum_buffer=buffer) | kept


def counted(function, orthogonalize, **given):
    calls = []
    function(orthogonalize=lambda direction: calls.append(1) or orthogonalize(direction), **given)
    return {"calls of orthogonalize": len(calls)}


def answer(update: list, buffer: list):
    return lambda **_: tensors(update=update, momentum_buffer=buffer)


def example(rung: str, title: str, given, expected, source: str) -> Case:
    return Case(rung, title, given, expected, source, call, changes=("momentum_buffer",), rtol=1e-12, atol=1e-15)


def by_lerp(gradient, momentum_buffer, orthogonalize, shape, momentum, nesterov, scaling):
    """torch.optim.SGD's momentum with dampening is the running mean; the scale by hand."""
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=momentum, dampening=momentum)
    sgd.state[weight]["momentum_buffer"] = momentum_buffer.clone()
    weight.grad = gradient.clone()
    sgd.step()
    buffer = sgd.state[weight]["momentum_buffer"]
    direction = momentum * buffer + (1 - momentum) * gradient if nesterov else buffer
    return {"update": orthogonalize(direction) * SCALES[shape], "momentum_buffer": buffer}


def in_bfloat16(direction):
    """Newton-Schulz in bfloat16, by the course's solution."""
    return newton_schulz(direction.bfloat16()).to(direction.dtype)


def three_steps(function, weights, gradients, scaling):
    """The weights that three updates make, and the buffer."""
    weight, buffer = weights.clone(), torch.zeros_like(weights)
    for gradient in gradients:
        weight -= 0.02 * function(gradient, buffer, in_bfloat16, tuple(weight.shape), momentum=0.95, nesterov=True, scaling=scaling)
    return {"weights": weight, "momentum_buffer": buffer}


def three_steps_by_torch(weights, gradients, scaling):
    weight = torch.nn.Parameter(weights.clone())
    adjust = None if scaling == "original" else scaling
    optimizer = torch.optim.Muon([weight], lr=0.02, weight_decay=0.0, momentum=0.95, nesterov=True, adjust_lr_fn=adjust)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return {"weights": weight.detach(), "momentum_buffer": optimizer.state[weight]["momentum_buffer"]}


def training(*shape: int, scaling: str):
    make = {"weights": (shape, 3), "gradients": ((3, *shape), 5)}
    return lambda: {name: randn(*size, seed=seed, dtype=torch.float32) for name, (size, seed) in make.items()} | {"scaling": scaling}


CHECK = Check(
    exercise="05.muon_update",
    outputs=("update",),
    spoilt=("update", "update of momentum_buffer"),
    cases=[
        Case(
            "shape and dtype", "[3, 5] in float64", random(3, 5), lambda gradient, **_: {"update": gradient}, CONTRACT,
            changes=("momentum_buffer",),
        ),
        Case(
            "shape and dtype", "[2, 7, 5] in float32", random(2, 7, 5, dtype=torch.float32), lambda gradient, **_: {"update": gradient},
            CONTRACT,
            changes=("momentum_buffer",),
        ),
        Case(
            "shape and dtype", "[3, 5] in bfloat16", random(3, 5, dtype=torch.bfloat16), lambda gradient, **_: {"update": gradient},
            CONTRACT, changes=("momentum_buffer",),
        ),
        example(
            "worked example", "the first step of a wide matrix, without nesterov", numbers([[10.0, 20.0]], [[0.0, 0.0]]),
            answer([[1.0, 2.0]], [[1.0, 2.0]]), "arithmetic: a tenth of the gradient, and a scale of 1",
        ),
        example(
            "worked example", "a second step", numbers([[10.0, 20.0]], [[1.0, 2.0]]), answer([[1.9, 3.8]], [[1.9, 3.8]]),
            "arithmetic: 0.9 * 1 + 0.1 * 10",
        ),
        example(
            "worked example", "with nesterov", numbers([[10.0, 20.0]], [[1.0, 2.0]], nesterov=True), answer([[2.71, 5.42]], [[1.9, 3.8]]),
            "arithmetic: 0.9 * 1.9 + 0.1 * 10; the buffer is as without",
        ),
        example(
            "worked example", "four outputs, one input: the original scale is 2", numbers([[10.0], [20.0], [30.0], [40.0]], [[0.0]] * 4),
            answer([[2.0], [4.0], [6.0], [8.0]], [[1.0], [2.0], [3.0], [4.0]]), "arithmetic: sqrt(4 / 1)",
        ),
        example(
            "worked example", "one output, four inputs: match_rms_adamw scales by 0.2 * 2",
            numbers([[10.0, 20.0, 30.0, 40.0]], [[0.0] * 4], scaling="match_rms_adamw"),
            answer([[0.4, 0.8, 1.2, 1.6]], [[1.0, 2.0, 3.0, 4.0]]), "arithmetic: 0.2 * sqrt(4)",
        ),
        example(
            "worked example", "four outputs, one input: it does the same",
            numbers([[10.0], [20.0], [30.0], [40.0]], [[0.0]] * 4, scaling="match_rms_adamw"),
            answer([[0.4], [0.8], [1.2], [1.6]], [[1.0], [2.0], [3.0], [4.0]]), "arithmetic: 0.2 * sqrt(4), whichever side is the larger",
        ),
        example(
            "worked example", "a momentum of 0.25", numbers([[8.0, 16.0]], [[4.0, 8.0]], momentum=0.25),
            answer([[7.0, 14.0]], [[7.0, 14.0]]),
            "arithmetic: 0.25 * 4 + 0.75 * 8",
        ),
        example(
            "worked example", "no momentum", numbers([[8.0, 16.0]], [[4.0, 8.0]], momentum=0.0), answer([[8.0, 16.0]], [[8.0, 16.0]]),
            "arithmetic: the gradient alone",
        ),
        example(
            "worked example", "the direction is doubled where it is orthogonalised, not before",
            numbers([[10.0, 20.0]], [[1.0, 2.0]], orthogonalize=double),
            answer([[3.8, 7.6]], [[1.9, 3.8]]), "arithmetic: twice 1.9; the buffer keeps 1.9",
        ),
        example(
            "property", "one row of a whole [9, 1] matrix: the scale is the whole one's",
            numbers([[10.0]], [[0.0]], orthogonalize=whole_sum, shape=(9, 1)),
            answer([[303.0]], [[1.0]]),
            "the contract: rows and columns are those of `shape`, and `orthogonalize` gathers before the scale: (1 + 100) * 3",
        ),
        example(
            "property", "a part that is no matrix any more, of a whole [2, 50]",
            numbers([10.0, 20.0, 30.0], [0.0, 0.0, 0.0], shape=(2, 50), scaling="match_rms_adamw"),
            answer([0.2 * 50**0.5 * value for value in (1.0, 2.0, 3.0)], [1.0, 2.0, 3.0]), "arithmetic: 0.2 * sqrt(50)",
        ),
        example(
            "property", "nine [2, 3] matrices have nothing to do with each other",
            random(9, 2, 3, orthogonalize=by_its_norm, nesterov=False, scaling="match_rms_adamw"), by_lerp,
            "torch.optim.SGD's dampened momentum, each matrix by its norm, and 0.2 * sqrt(3)",
        ),
        example(
            "property", "a stack of stacks, [3, 2, 7, 5]: rows and columns are the last two of four numbers", random(3, 2, 7, 5), by_lerp,
            "torch.optim.SGD's dampened momentum, and sqrt(7 / 5)",
        ),
        Case(
            "property", "other tensors over the buffer's memory see it, the update has memory of its own, and autograd goes on",
            numbers([[10.0, 20.0]], [[0.0, 0.0]]), beside([[1.0, 2.0]], [[1.0, 2.0]]), CONTRACT, what_it_touches,
            changes=("momentum_buffer",), rtol=1e-12,
        ),
        Case(
            "property", "`orthogonalize` is called once: from a part it gathers the whole", numbers([[10.0, 20.0]], [[0.0, 0.0]]),
            lambda **_: {"calls of orthogonalize": 1}, CONTRACT, counted, changes=("momentum_buffer",),
        ),
        example(
            "property", "a gradient that is no number, or infinite, is not hidden", numbers([[NAN, INF, 10.0]], [[0.0, 0.0, 0.0]]),
            answer([[NAN, INF, 1.0]], [[NAN, INF, 1.0]]), "arithmetic: a tenth of the gradient",
        ),
        example("oracle", "[2, 7, 5], nesterov", random(2, 7, 5), by_lerp, "torch.optim.SGD's dampened momentum; arithmetic for the scale"),
        example(
            "oracle", "[2, 5, 7], match_rms_adamw, no nesterov", random(2, 5, 7, nesterov=False, scaling="match_rms_adamw"), by_lerp,
            "torch.optim.SGD's dampened momentum; arithmetic for the scale",
        ),
        Case(
            "oracle", "three steps of [11, 5]", training(11, 5, scaling="original"), three_steps_by_torch, ORACLE, three_steps, rtol=1e-6,
            atol=4e-4,
        ),
        Case(
            "oracle", "three steps of [5, 11], match_rms_adamw", training(5, 11, scaling="match_rms_adamw"), three_steps_by_torch, ORACLE,
            three_steps, rtol=1e-6, atol=4e-4,
        ),
    ],
)  # fmt: skip
