"""Chapter 05. The Muon optimizer: momentum of a whole matrix, orthogonalised by Newton-Schulz, so that all directions move equally far.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". A gradient of a linear layer is dominated by a few
directions; its orthogonalised version has the same ones, all with a length near 1. It is for the matrices inside a model; embeddings,
head, norms and biases keep AdamW (`shared.optim.routing`).

Newton-Schulz. A matrix G = U S V^T stretches some directions more than others; U V^T is the nearest matrix that stretches none. The
singular value decomposition would give it, slowly; an odd polynomial applied to G a few times acts on the singular values alone,

    p(X) = a X + b (X X^T) X + c (X X^T)^2 X,      p(U S V^T) = U p(S) V^T,      p(s) = a s + b s^3 + c s^5,

and needs only matrix products. The coefficients of Jordan et al. do not converge to 1: their slope a at 0 is as steep as possible, so that
tiny singular values are lifted within five steps, and all end between about 0.7 and 1.2. That is enough.

It needs the full matrix: orthogonalising a shard gives other singular vectors, hence another update. A parameter that is sharded over
processes carries its `sharding`, which gathers the full matrix at the one place where it is orthogonalised, `orthogonalized`.

Left out on purpose: convolutions, whose weights are no matrices; a learning rate that depends on the number of experts; coefficients that
change from step to step (Polar Express), which get closer to 1.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.course.binding import exercise
from shared.model.sharding import Sharding

BATCH_ELEMENTS = 2**24  # numbers in the matrices that are orthogonalised together; bounds what a step needs beside the state


@exercise("05.newton_schulz")
def newton_schulz(
    matrices: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315), eps: float = 1e-7
) -> Tensor:
    """The matrices with their singular values pushed towards 1 (Jordan et al. 2024, "Muon", section "Newton-Schulz").

        X = G / max(||G||, eps);   then, `steps` times,   X = a X + (b A + c A A) X   with   A = X X^T

    ||G|| is the Frobenius norm, the root of the sum of all squares of one matrix: no singular value is larger.

    Args:
        matrices: [..., rows, columns], any floating dtype, which the computation keeps. Left unchanged. Leading dimensions count
            matrices that have nothing to do with each other, such as experts: where one holds NaN or infinity, it alone comes back as NaN.
        steps: how often the polynomial is applied.
        coefficients: (a, b, c).
        eps: the smallest norm to divide by, so that a matrix of zeros stays one.

    Returns:
        [..., rows, columns]. The product X X^T has the smaller of the two sides: a matrix with more rows than columns is
        transposed before, and back afterwards.

    >>> matrix = torch.tensor([[3.0, 0.0], [0.0, 4.0]])            # of norm 5: s = 0.6 and 0.8, and s + s^3 of each is
    >>> newton_schulz(matrix, steps=1, coefficients=(1.0, 1.0, 0.0))
    tensor([[0.8160, 0.0000],
            [0.0000, 1.3120]])
    """


@exercise("05.muon_update")
def muon_update(
    gradient: Tensor,
    momentum_buffer: Tensor,
    orthogonalize: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    momentum: float,
    nesterov: bool,
    scaling: str,
) -> Tensor:
    """What Muon subtracts from a matrix, before the learning rate (Jordan et al. 2024).

        b = momentum b + (1 - momentum) g
        d = momentum b + (1 - momentum) g   with nesterov, which looks one step ahead;    d = b   without
        update = orthogonalize(d) * scale

    scale for a matrix with `rows` outputs and `columns` inputs:
        original: sqrt(max(1, rows / columns)).
        match_rms_adamw: 0.2 sqrt(max(rows, columns)), which gives the update AdamW's typical size, so that both can share a
            learning rate (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2).

    Args:
        gradient: g, [..., rows, columns]; or a process's part of it, of any shape. Left unchanged.
        momentum_buffer: b, in the shape of the gradient; zeros before the first step. Changed in place.
        orthogonalize: maps a direction to the orthogonalised one, in the same shape. Called once: from a part it first
            gathers the whole.
        shape: (..., rows, columns) of the whole parameter, which the scale is read from.
        momentum: in [0, 1).
        nesterov: see above.
        scaling: see above.

    Returns:
        The update, in the shape of the gradient, in memory of its own: the buffer's is not the caller's to change.

    >>> b = torch.zeros(4, 1)                                      # b = 1, d = 0.9 * 1 + 0.1 * 10, times sqrt(4)
    >>> muon_update(torch.full((4, 1), 10.0), b, lambda d: d, (4, 1), momentum=0.9, nesterov=True, scaling="original").T
    tensor([[3.8000, 3.8000, 3.8000, 3.8000]])
    >>> b.T
    tensor([[1., 1., 1., 1.]])
    """


def muon_step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """One step of Muon for a parameter group of matrices; parameters without a gradient are skipped.

    Matrices of one shape are orthogonalised together: a handful of large products in place of hundreds of small ones.

    Args:
        group: params, lr, weight_decay, momentum, nesterov, scaling, steps (of Newton-Schulz), dtype (its dtype's name).
        state: parameter -> momentum_buffer, like the parameter.
    """
    for parameters in bucket_by_shape(group["params"]):
        for parameter in parameters:
            if not state[parameter]:
                state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradients = torch.stack([parameter.grad for parameter in parameters])
        buffers = torch.stack([state[parameter]["momentum_buffer"] for parameter in parameters])
        sharding = sharding_to_gather(parameters[0])
        whole = partial(orthogonalized, sharding=sharding, steps=group["steps"], dtype=getattr(torch, group["dtype"]))
        shape = tuple(parameters[0].shape if sharding is None else sharding.shape)
        updates = muon_update(gradients, buffers, whole, shape, group["momentum"], group["nesterov"], group["scaling"])
        for parameter, buffer, update in zip(parameters, buffers, updates, strict=True):
            state[parameter]["momentum_buffer"].copy_(buffer)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def bucket_by_shape(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group parameters that have a gradient into batches of one shape, dtype and device; a sharded parameter is a separate batch."""
    batches: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if sharding_to_gather(parameter) is not None:
            yield [parameter]
            continue
        batch = batches.setdefault((parameter.shape, parameter.dtype, parameter.device), [])
        batch.append(parameter)
        if (len(batch) + 1) * parameter.numel() > BATCH_ELEMENTS:
            yield batches.pop((parameter.shape, parameter.dtype, parameter.device))
    yield from batches.values()


def sharding_to_gather(parameter: Tensor) -> Sharding | None:
    """The sharding of a parameter that must be gathered, because this process lacks a part of it."""
    sharding = getattr(parameter, "sharding", None)
    return sharding if sharding is not None and sharding.needs_gathering else None


def orthogonalized(direction: Tensor, sharding: Sharding | None, steps: int, dtype: torch.dtype) -> Tensor:
    """Orthogonalise the directions of a batch of parameters as full matrices; a sharded one is gathered first.

    Args:
        direction: [batch, ..., rows, columns]; for a sharded parameter [1, ...] with this process's shard.
        sharding: how the parameter is sharded; None where this process has all of it.
        steps: the steps of Newton-Schulz.
        dtype: the dtype in which Newton-Schulz computes; the result has the direction's own.
    """
    if sharding is not None:
        whole = newton_schulz(sharding.gather(direction[0]).to(dtype), steps).to(direction.dtype)
        return sharding.local(whole).to(direction.device).unsqueeze(0)
    return newton_schulz(direction.to(dtype), steps).to(direction.dtype)
