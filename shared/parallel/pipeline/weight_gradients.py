"""Chapter 08. Weight gradients apart from input gradients: the backward pass of linear layers in two parts, for zero-bubble schedules.

    y = x W^T        part I   dL/dx = dL/dy W          the previous stage blocks on it
                     part W   dL/dW = (dL/dy)^T x      nothing blocks on it

The backward pass through a stage runs part I, and defers part W to a list (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 4;
their `WeightGradStore`), as do layers of a later chapter with a method `split_backward(waiting)`. Norms, biases, embedding and head, a
small part of the work, are done in part I.

Autograd does not see these weights and calls no hook on them: a hook would report a complete gradient before part W. So data parallelism
exchanges them at the end of the step, and recomputed blocks skip them (`computed_apart`, an attribute of the weight).

Left out on purpose: matrices that FSDP frees before part W; it must keep them until the step ends (`reshard_after_forward: false`).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.parallel.tensor.layers import RowLinear

Waiting = list[tuple[nn.Parameter, Callable[[], Tensor]]]  # a weight, and what computes its gradient


class Hidden(NamedTuple):
    """Hides a weight from autograd, which sees tensors only."""

    weight: nn.Parameter


class Product(NamedTuple):
    """A product of x and a weight: y from x and W; dL/dx from dL/dy and W; dL/dW from x and dL/dy."""

    result: Callable[[Tensor, Tensor], Tensor]
    to_input: Callable[[Tensor, Tensor], Tensor]
    to_weight: Callable[[Tensor, Tensor], Tensor]


LINEAR = Product(F.linear, torch.matmul, lambda x, upstream: upstream.flatten(0, -2).T @ x.flatten(0, -2).to(upstream.dtype))


class SplitProduct(torch.autograd.Function):
    """A product whose backward pass computes x's gradient and defers the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, hidden: Hidden, product: Product, waiting: Waiting) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.product, ctx.waiting = hidden.weight, product, waiting
        return product.result(x, hidden.weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.waiting.append((ctx.weight, partial(ctx.product.to_weight, x, upstream)))
        return ctx.product.to_input(upstream, ctx.weight.to(upstream.dtype)).to(x.dtype), None, None, None, None


def split_product(x: Tensor, weight: nn.Parameter, product: Product, waiting: Waiting) -> Tensor:
    """`product` of x and a weight, with a backward pass in two parts."""
    anchor = torch.empty(0, requires_grad=True)  # calls for a backward pass even where x needs no gradient
    return SplitProduct.apply(x, anchor, Hidden(weight), product, waiting)


class SplitLinear(nn.Linear):
    """A linear layer with a backward pass in two parts. waiting: the list of deferred parts W. combine: as in a `RowLinear`."""

    waiting: Waiting
    combine: Callable[[Tensor], Tensor] = staticmethod(lambda y: y)

    def forward(self, x: Tensor) -> Tensor:
        y = self.combine(split_product(x, self.weight, LINEAR, self.waiting))
        return y if self.bias is None else y + self.bias.to(y.dtype)


def split_backward(modules: Iterable[nn.Module]) -> Waiting:
    """Defer the weight gradients of all trained linear layers within some modules to the list that is returned."""
    waiting: Waiting = []
    for module in modules:
        for linear in module.modules():
            is_linear = type(linear) in (nn.Linear, RowLinear)
            if not (is_linear or hasattr(linear, "split_backward")) or not linear.weight.requires_grad:
                continue
            linear.weight.computed_apart = True
            if is_linear:
                linear.__class__, linear.waiting = SplitLinear, waiting
            else:
                linear.split_backward(waiting)
    return waiting


@torch.no_grad()
def add_weight_gradients(taken: Waiting) -> None:
    """Part W: accumulate the deferred gradients in `weight.grad`."""
    for weight, compute in taken:
        gradient = compute()
        weight.grad = gradient.to(weight.dtype) if weight.grad is None else weight.grad.add_(gradient)
