"""Check of 05.lion_update. Oracle: torch.optim.SGD, twice: once to keep the running mean, once to step by the sign that it is handed.

lion_pytorch itself judges the core in tests/parity/test_05_optimizers.py; a check must not need it.

Tolerances. A step is a sign times lr, so float64 agrees to the last digits of the weight: 1e-13, and 1e-15 for values near 0;
float32 adds up seven roundings: 1e-5 and 1e-6. bfloat16 has 8 bits: 1e-2.
"""

import torch

from shared.course.checking import Case, Check

from .common import randn
from .pieces import after, leaves, tensors, where_it_lies

CONTRACT = "the contract"
ORACLE = "torch.optim.SGD with weight decay, fed with the sign of torch.optim.SGD's own momentum (dampened)"
CHANGED = ("parameter", "exp_avg")
NAN, INF = float("nan"), float("inf")


def numbers(w, g, m, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0, dtype=torch.float64):
    return lambda: tensors(dtype, parameter=w, gradient=g, exp_avg=m) | {"lr": lr, "betas": betas, "weight_decay": weight_decay}


def random(*shape: int, steps: int = 1, dtype=torch.float64, weight_decay: float = 0.3, transposed: bool = False):
    def given():
        parameter, gradients = randn(*shape, seed=3, dtype=dtype), randn(steps, *shape, seed=5, dtype=dtype)
        if transposed:
            parameter, gradients = parameter.mT, gradients.mT
        return {"parameter": parameter, "gradients": gradients, "lr": 0.01, "betas": (0.8, 0.95), "weight_decay": weight_decay}

    return given


def stepping(function, parameter, gradients, **settings):
    exp_avg = torch.zeros_like(parameter)
    for gradient in gradients:
        function(parameter, gradient, exp_avg, **settings)
    return {"parameter": parameter.clone(), "exp_avg": exp_avg}


def by_torch(parameter, gradients, lr, betas, weight_decay):
    """A running mean by itself is what SGD with momentum beta and dampening beta keeps; its first gradient it would take undampened, so it
    is shown a gradient of zeros first."""
    weight, memory = torch.nn.Parameter(parameter.clone()), torch.nn.Parameter(torch.zeros_like(parameter))
    step = torch.optim.SGD([weight], lr=lr, weight_decay=weight_decay)
    keep = torch.optim.SGD([memory], lr=0.0, momentum=betas[1], dampening=betas[1])
    memory.grad = torch.zeros_like(parameter)
    keep.step()
    for gradient in gradients:
        kept = keep.state[memory]["momentum_buffer"]
        weight.grad = torch.sign(kept * betas[0] + gradient * (1 - betas[0]))
        step.step()
        memory.grad = gradient.clone()
        keep.step()
    return {"parameter": weight.detach(), "exp_avg": keep.state[memory]["momentum_buffer"]}


def example(rung: str, title: str, given, expected, source: str) -> Case:
    return Case(rung, title, given, expected, source, after(*CHANGED), changes=CHANGED, rtol=1e-12, atol=1e-15)


def oracle(title: str, given, rtol: float = 1e-13, atol: float = 1e-15) -> Case:
    return Case("oracle", title, given, by_torch, ORACLE, stepping, changes=("parameter",), rtol=rtol, atol=atol)


CHECK = Check(
    exercise="05.lion_update",
    outputs=(),
    spoilt=tuple(f"update of {name}" for name in CHANGED),
    cases=[
        example(
            "worked example", "the first step: lr against the sign", numbers([2.0, 2.0], [4.0, -0.001], [0.0, 0.0]),
            leaves(parameter=[1.9, 2.1], exp_avg=[0.04, -0.00001]), "arithmetic: 2 - 0.1, 2 + 0.1; the memory is (1 - 0.99) g",
        ),
        example(
            "worked example", "memory and gradient disagree, and the memory is stronger", numbers([2.0], [4.0], [-1.0]),
            leaves(parameter=[2.1], exp_avg=[-0.95]), "arithmetic: 0.9 * -1 + 0.1 * 4 is negative; -0.99 + 0.04",
        ),
        example(
            "worked example", "they disagree, and the gradient is stronger", numbers([2.0], [20.0], [-1.0]),
            leaves(parameter=[1.9], exp_avg=[-0.79]),
            "arithmetic: the direction 0.9 * -1 + 0.1 * 20 is positive; the memory is -0.99 + 0.2",
        ),
        example(
            "worked example", "with a decay of 0.5", numbers([2.0], [4.0], [0.0], weight_decay=0.5),
            leaves(parameter=[1.8], exp_avg=[0.04]), "arithmetic: 2 - 0.1 * 0.5 * 2 - 0.1",
        ),
        example(
            "worked example", "betas of 0.25 and 0.4", numbers([2.0, 2.0], [4.0, -1.0], [-8.0, 8.0], betas=(0.25, 0.4)),
            leaves(parameter=[1.9, 1.9], exp_avg=[-0.8, 2.6]),
            "arithmetic: the directions -2 + 3 and 2 - 0.75 are positive; the memories are -3.2 + 2.4 and 3.2 - 0.6",
        ),
        example(
            "property", "no gradient and no memory: the weight stays", numbers([2.0, -3.0], [0.0, 0.0], [0.0, 0.0]),
            leaves(parameter=[2.0, -3.0], exp_avg=[0.0, 0.0]), "the contract: the sign of 0 is 0",
        ),
        example(
            "property", "gradients from 1e-30 to 1e6 move a weight by the same lr",
            numbers([1.0] * 5, [1e-30, 1e-6, -1e-3, 1e3, -1e6], [0.0] * 5, lr=0.25),
            leaves(parameter=[0.75, 0.75, 1.25, 0.75, 1.25], exp_avg=[1e-32, 1e-8, -1e-5, 1e1, -1e4]), "the contract",
        ),
        example(
            "property", "where the sign is 0 the decay moves the weight all the same", numbers([2.0], [0.0], [0.0], weight_decay=0.5),
            leaves(parameter=[1.9], exp_avg=[0.0]), "arithmetic: 2 - 0.1 * 0.5 * 2",
        ),
        example(
            "property", "a beta1 of 0: the gradient alone decides", numbers([2.0], [4.0], [-8.0], betas=(0.0, 0.5)),
            leaves(parameter=[1.9], exp_avg=[-2.0]), "arithmetic: the direction is 4; the memory is -4 + 2",
        ),
        example(
            "property", "a beta2 of 0: only the newest gradient is remembered", numbers([2.0], [4.0], [-8.0], betas=(0.5, 0.0)),
            leaves(parameter=[2.1], exp_avg=[4.0]), "arithmetic: the direction is -4 + 2; the memory is 4",
        ),
        example(
            "property", "a learning rate of 0: the weight stays, the memory goes on", numbers([2.0], [4.0], [0.0], lr=0.0),
            leaves(parameter=[2.0], exp_avg=[0.04]), CONTRACT,
        ),
        example(
            "property", "a gradient that is no number, and an infinite one",
            numbers([2.0] * 3, [NAN, INF, 4.0], [0.0] * 3, weight_decay=0.5),
            leaves(parameter=[1.9, 1.8, 1.8], exp_avg=[NAN, INF, 0.04]), "the contract: remembered, and without a sign",
        ),
        example(
            "property", "a single number without a dimension", numbers(2.0, 4.0, 0.0), leaves(parameter=1.9, exp_avg=0.04),
            "the contract: any shape",
        ),
        Case(
            "property", "bfloat16 stays bfloat16", numbers([2.0], [4.0], [0.0], dtype=torch.bfloat16),
            leaves(torch.bfloat16, parameter=[1.9], exp_avg=[0.04]), "the contract: any floating dtype", after(*CHANGED), changes=CHANGED,
            rtol=1e-2,
        ),
        Case(
            "property", "other tensors over the same memory see the step, and autograd goes on", numbers([2.0], [4.0], [0.0]),
            lambda **_: leaves(parameter=[1.9], exp_avg=[0.04])() | {"autograd records afterwards": True}, "the contract: in place",
            where_it_lies(*CHANGED), changes=CHANGED, rtol=1e-12,
        ),
        oracle("one step of [3, 5]", random(3, 5)),
        oracle("seven steps of [3, 5]", random(3, 5, steps=7)),
        oracle("seven steps of a transposed matrix", random(5, 7, steps=7, transposed=True)),
        oracle("seven steps in float32", random(11, 13, steps=7, dtype=torch.float32, weight_decay=0.0), rtol=1e-5, atol=1e-6),
    ],
)  # fmt: skip
