"""Check of 05.adamw_update. Oracle: torch.optim.AdamW, its plain loop.

Tolerances. Worked examples are float64 arithmetic on a handful of digits: 1e-12. The oracle rounds each of its dozen operations, and so
does the answer, in another order: 1e-12 in float64 after five steps, with 1e-15 for values near 0; float32 has 1e-6 for each of them, and
a weight of size 1 moves by 0.01, so 1e-6 and 1e-7. bfloat16 has 8 bits, one part in 256 a rounding: 1e-2.
"""

import torch

from shared.course.checking import Case, Check

from .common import randn
from .pieces import after, leaves, tensors, where_it_lies

CONTRACT = "the contract"
ORACLE = "torch.optim.AdamW(foreach=False)"
CHANGED = ("parameter", "exp_avg", "exp_avg_sq")
NAN, INF = float("nan"), float("inf")


def numbers(w, g, m, v, step: int, lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0, dtype=torch.float64):
    settings = {"step": step, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return lambda: tensors(dtype, parameter=w, gradient=g, exp_avg=m, exp_avg_sq=v) | settings


def random(*shape: int, dtype=torch.float64, steps: int = 1, weight_decay: float = 0.3, transposed: bool = False, eps: float = 1e-8):
    """Weights, and the gradients of `steps` steps."""

    def given():
        parameter, gradients = randn(*shape, seed=3, dtype=dtype), randn(steps, *shape, seed=5, dtype=dtype)
        parameter = parameter.mT if transposed else parameter
        gradients = gradients.mT if transposed else gradients
        settings = {"lr": 0.01, "betas": (0.9, 0.97), "eps": eps, "weight_decay": weight_decay}
        return {"parameter": parameter, "gradients": gradients} | settings

    return given


def stepping(function, parameter, gradients, **settings):
    exp_avg, exp_avg_sq = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, gradient in enumerate(gradients, 1):
        function(parameter, gradient, exp_avg, exp_avg_sq, step, **settings)
    return {"parameter": parameter.clone(), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def by_torch(parameter, gradients, lr, betas, eps, weight_decay):
    weight = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW([weight], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[weight]
    return {"parameter": weight.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def example(title: str, given, expected, source: str, rtol: float = 1e-12) -> Case:
    return Case("worked example", title, given, expected, source, after(*CHANGED), changes=CHANGED, rtol=rtol, atol=1e-15)


def oracle(title: str, given, rtol: float = 1e-12, atol: float = 1e-15) -> Case:
    return Case("oracle", title, given, by_torch, ORACLE, stepping, changes=("parameter",), rtol=rtol, atol=atol)


CHECK = Check(
    exercise="05.adamw_update",
    outputs=(),
    spoilt=tuple(f"update of {name}" for name in CHANGED),
    cases=[
        example(
            "the first step: the gradient's size cancels", numbers([2.0], [4.0], [0.0], [0.0], 1),
            leaves(parameter=[1.9], exp_avg=[0.4], exp_avg_sq=[0.16]),
            "arithmetic: m / 0.1 = 4, v / 0.01 = 16, and 2 - 0.1 * 4 / 4",
        ),
        example(
            "a gradient of 0 and a decay of 0.5: the weight shrinks by lr * 0.5 of itself, the means fade",
            numbers([2.0], [0.0], [0.0], [1.0], 3, weight_decay=0.5), leaves(parameter=[1.9], exp_avg=[0.0], exp_avg_sq=[0.99]),
            "arithmetic: 2 - 0.1 * 0.5 * 2",
        ),
        example(
            "decay and gradient together: the gradient's part does not shrink", numbers([2.0], [4.0], [0.0], [0.0], 1, weight_decay=0.5),
            leaves(parameter=[1.8], exp_avg=[0.4], exp_avg_sq=[0.16]), "arithmetic: 2 - 0.1 * 0.5 * 2 - 0.1",
        ),
        example(
            "eps of 12 beside a corrected root of 4", numbers([2.0], [4.0], [0.0], [0.0], 1, eps=12.0),
            leaves(parameter=[1.975], exp_avg=[0.4], exp_avg_sq=[0.16]), "arithmetic: 2 - 0.1 * 4 / (4 + 12)",
        ),
        example(
            "the second step of a mean that stands at (0.4, 0.16)", numbers([2.0], [-4.0], [0.4], [0.16], 2),
            leaves(parameter=[2 + 0.1 * (0.04 / 0.19) / 4], exp_avg=[-0.04], exp_avg_sq=[0.3184]),
            "arithmetic: m = 0.36 - 0.4, over 1 - 0.81; v = 0.1584 + 0.16, over 1 - 0.9801 is 16", rtol=1e-11,
        ),
        Case(
            "property", "five gradients from 1e-6 to 1e6: each weight moves by lr",
            numbers([1.0] * 5, [1e-6, -1e-3, 1.0, -1e3, 1e6], [0.0] * 5, [0.0] * 5, 1), leaves(parameter=[0.9, 1.1, 0.9, 1.1, 0.9]),
            "the contract: at step 1 only the sign of the gradient counts", after("parameter"), changes=CHANGED, rtol=1e-9,
        ),
        Case(
            "property", "betas of 0: no memory, every step is a first one",
            numbers([1.0, 1.0], [3.0, -3.0], [5.0, 5.0], [7.0, 7.0], 4, betas=(0.0, 0.0)),
            leaves(parameter=[0.9, 1.1], exp_avg=[3.0, -3.0], exp_avg_sq=[9.0, 9.0]), "arithmetic", after(*CHANGED), changes=CHANGED,
            rtol=1e-12,
        ),
        Case(
            "property", "other tensors over the same memory see the step, and autograd goes on", numbers([2.0], [4.0], [0.0], [0.0], 1),
            lambda **_: leaves(parameter=[1.9], exp_avg=[0.4], exp_avg_sq=[0.16])() | {"autograd records afterwards": True},
            "the contract: in place", where_it_lies(*CHANGED), changes=CHANGED, rtol=1e-12,
        ),
        Case(
            "property", "a gradient that is no number, or infinite, is not hidden",
            numbers([2.0] * 3, [NAN, INF, 4.0], [0.0] * 3, [0.0] * 3, 1),
            leaves(parameter=[NAN, NAN, 1.9], exp_avg=[NAN, INF, 0.4], exp_avg_sq=[NAN, INF, 0.16]), "arithmetic: inf / inf is no number",
            after(*CHANGED), changes=CHANGED, rtol=1e-12,
        ),
        Case(
            "property", "a hundredth gradient of 1: the corrections still count", numbers([2.0], [1.0], [1 - 0.9**99], [1 - 0.99**99], 100),
            leaves(parameter=[1.9], exp_avg=[1 - 0.9**100], exp_avg_sq=[1 - 0.99**100]), "arithmetic: both corrected means are 1",
            after(*CHANGED), changes=CHANGED, rtol=1e-11,
        ),
        Case(
            "property", "a learning rate of 0: the weight stays, the means go on", numbers([2.0], [4.0], [0.0], [0.0], 1, lr=0.0),
            leaves(parameter=[2.0], exp_avg=[0.4], exp_avg_sq=[0.16]), CONTRACT, after(*CHANGED), changes=CHANGED, rtol=1e-12,
        ),
        Case(
            "property", "a single number without a dimension", numbers(2.0, 4.0, 0.0, 0.0, 1),
            leaves(parameter=1.9, exp_avg=0.4, exp_avg_sq=0.16), "the contract: any shape", after(*CHANGED), changes=CHANGED, rtol=1e-12,
        ),
        Case(
            "property", "bfloat16 stays bfloat16", numbers([2.0], [4.0], [0.0], [0.0], 1, dtype=torch.bfloat16),
            leaves(torch.bfloat16, parameter=[1.9], exp_avg=[0.4], exp_avg_sq=[0.16]), "the contract: any floating dtype",
            after(*CHANGED), changes=CHANGED, rtol=1e-2,
        ),
        oracle("one step of [3, 5]", random(3, 5)),
        oracle("five steps of [3, 5]", random(3, 5, steps=5)),
        oracle("five steps without decay, a large eps", random(7, steps=5, weight_decay=0.0, eps=0.1)),
        oracle("five steps of a transposed matrix", random(3, 5, steps=5, transposed=True)),
        oracle("five steps in float32", random(11, 13, steps=5, dtype=torch.float32), rtol=1e-6, atol=1e-7),
    ],
)  # fmt: skip
