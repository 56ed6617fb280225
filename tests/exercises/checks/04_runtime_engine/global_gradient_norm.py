"""Check of 04.global_gradient_norm. Oracles: torch.nn.utils.clip_grad_norm_ and get_total_norm, and NumPy in float64.

Tolerances. A sum of some thousand squares in float32, halved in its error by the root, agrees to 1e-6; in float64 to 1e-14.
Half precision is lifted before anything is computed, so the same 1e-6 holds against NumPy on the very numbers.
"""

import numpy as np
import torch
from torch import nn

from shared.course.checking import Case, Check

from .common import randn

CONTRACT = "the contract"
BY_NUMPY = "numpy.linalg.norm in float64 of all elements end to end"
SHAPES = ((3, 5), (7,), (), (2, 3, 11))


def tensors(*values, dtype=torch.float32):
    return lambda: {"gradients": [None if value is None else torch.tensor(value, dtype=dtype) for value in values]}


def random(*dtypes, scale: float = 1.0, shapes=SHAPES):
    """A gradient of each shape, the dtypes in turn."""
    made = [(shape, dtypes[number % len(dtypes)]) for number, shape in enumerate(shapes)]
    return lambda: {"gradients": [randn(*shape, seed=3 + i, dtype=dtype, scale=scale) for i, (shape, dtype) in enumerate(made)]}


def generated():
    return {"gradients": (gradient for gradient in [*random(torch.float32)()["gradients"], None])}


def cut_up():
    """The 89 numbers of `SHAPES`, cut into tensors of 7; the last has 5."""
    whole = torch.cat([gradient.flatten() for gradient in random(torch.float64)()["gradients"]])
    return {"gradients": list(whole.split(7))}


def strided():
    return {"gradients": [randn(6, 10, seed=3)[::2, ::3], randn(5, 7, seed=5).T]}


def the_same_twice():
    twice = torch.tensor([2.0])
    return {"gradients": [twice, twice, torch.tensor([4.0, 1.0])]}


def with_graph():
    return {"gradients": [torch.tensor([2.0, 1.0], requires_grad=True) * 3, torch.tensor(6.0, requires_grad=True)]}


def answer(value: float, dtype=torch.float32):
    return lambda **given: {"norm": torch.tensor(value, dtype=dtype)}


def by_numpy(gradients):
    present = [gradient for gradient in gradients if gradient is not None]
    norm = np.linalg.norm(np.concatenate([gradient.double().numpy().ravel() for gradient in present]))
    wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in present) else torch.float32
    return {"norm": torch.tensor(norm, dtype=wide)}


def by_torch(gradients):
    return {"norm": torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])}


def trained(seed: int):
    """A small model with the gradients of one batch, in float64."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model(torch.arange(11)).square().sum().backward()
    return model


def of_a_model():
    return {"gradients": [parameter.grad for parameter in trained(3).parameters()]}


def by_clipping(gradients):
    return {"norm": torch.nn.utils.clip_grad_norm_(trained(3).parameters(), max_norm=1e9)}


def graph_of(function, gradients):
    """The norm, and whether gradients and autograd are as they were."""
    try:
        norm = function(gradients)
        kept = torch.is_grad_enabled() and all(gradient.requires_grad for gradient in gradients)
        return {"norm": norm.detach(), "the norm requires a gradient": norm.requires_grad, "gradients and autograd are as before": kept}
    finally:
        torch.set_grad_enabled(True)


def on_meta(function, shapes):
    """Nothing can be asked of a tensor on the meta device: it has a shape and no numbers."""
    norm = function([torch.empty(shape, device="meta") for shape in shapes])
    return {"form": f"{norm.dtype} {list(norm.shape)} on {norm.device}"}


CHECK = Check(
    exercise="04.global_gradient_norm",
    outputs=("norm",),
    spoilt=("norm",),
    cases=[
        Case("shape and dtype", "float32 gradients give a float32 scalar", random(torch.float32), by_numpy, CONTRACT),
        Case("shape and dtype", "half precision gives float32", random(torch.float16, torch.bfloat16), by_numpy, CONTRACT),
        Case("shape and dtype", "float64 among float32 gives float64", random(torch.float32, torch.float64), by_numpy, CONTRACT),
        Case("shape and dtype", "no gradients at all give float32", lambda: {"gradients": []}, answer(0.0), CONTRACT),
        Case(
            "shape and dtype", "gradients on another device, here the one without numbers: the norm stays there, and nothing asks for it",
            lambda: {"shapes": [[3, 5], [7]]}, lambda **given: {"form": "torch.float32 [] on meta"}, CONTRACT, on_meta,
        ),
        Case("worked example", "(3, 4)", tensors([3.0, 4.0]), answer(5.0), "arithmetic: the root of 9 + 16"),
        Case("worked example", "(3, 0), None and ((4))", tensors([3.0, 0.0], None, [[4.0]]), answer(5.0), "arithmetic: the root of 9 + 16"),
        Case(
            "worked example", "three tensors of norms 2, 3 and 6", tensors([-2.0], [[1.0, -2.0], [2.0, 0.0]], 6.0), answer(7.0),
            "arithmetic: the root of 4 + 9 + 36",
        ),
        Case("property", "only None", tensors(None, None), answer(0.0), CONTRACT),
        Case("property", "zeros, and a tensor without elements", tensors([0.0, 0.0], []), answer(0.0), CONTRACT),
        Case(
            "property", "the same 89 numbers, cut into 13 tensors in place of 4", cut_up,
            lambda **given: by_numpy(**random(torch.float64)()), f"the contract; {BY_NUMPY}", rtol=1e-14,
        ),
        Case(
            "property", "float16: 300 squared is beyond its 65,504", tensors([300.0, 300.0], [-300.0, 300.0], dtype=torch.float16),
            answer(600.0), "arithmetic: the root of 4 * 300^2",
        ),
        Case(
            "property", "float16: the norm itself is beyond 65,504", tensors([60000.0, 40000.0], [40000.0], dtype=torch.float16),
            answer(6_800_000_000**0.5), "arithmetic: the root of 60,000^2 + 2 * 40,000^2",
        ),
        Case(
            "property", "float64: 1 and a hundred-thousandth, which squared is nothing beside 1 in float32",
            tensors([1.0], [1e-5], dtype=torch.float64), by_numpy, BY_NUMPY, rtol=1e-15,
        ),
        Case("property", "one element is infinite", tensors([1.0, -torch.inf], [2.0]), answer(torch.inf), CONTRACT),
        Case("property", "one element is NaN", tensors([1.0, 2.0], [torch.nan, 1.0]), answer(torch.nan), CONTRACT),
        Case(
            "property", "gradients that carry graphs: the norm does not", with_graph,
            lambda **given: {
                "norm": torch.tensor(9.0), "the norm requires a gradient": False, "gradients and autograd are as before": True,
            }, "arithmetic: the root of 36 + 9 + 36", graph_of,
        ),
        Case("property", "the same tensor twice is two gradients", the_same_twice, answer(5.0), "arithmetic: the root of 4 + 4 + 16 + 1"),
        Case("property", "a generator, which can be read once", generated, lambda **given: by_numpy(**random(torch.float32)()), BY_NUMPY),
        Case("property", "tensors that are not contiguous", strided, by_numpy, BY_NUMPY, rtol=1e-14),
        Case("oracle", "float32", random(torch.float32, shapes=((17, 23), (31,), (5, 3))), by_torch, "torch.nn.utils.get_total_norm"),
        Case("oracle", "a model's gradients in float64", of_a_model, by_clipping, "torch.nn.utils.clip_grad_norm_", rtol=1e-14),
        Case("oracle", "bfloat16 and float16", random(torch.bfloat16, torch.float16, scale=100.0), by_numpy, BY_NUMPY),
        Case("oracle", "bfloat16, float32 and float64", random(torch.bfloat16, torch.float32, torch.float64), by_numpy, BY_NUMPY),
    ],
)
