"""The build of chapter 05: AdamW and Muon as one optimizer, yours from an empty file. About three and a half hours.

    course check 05.build                all stages; course check 05.build.route: one
    course hint 05.build.route           three hints for each stage
    course reset 05.build                this file as it was; your text is kept

You design the rest: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay thin:
a few lines each that call what you wrote. Each stage has functions of its own, and is NOT ATTEMPTED while one of them still raises
NotImplementedError, so you can work from the first stage to the last and stop after any of them.

You may use everything of chapters 01 to 04, and `torch.optim.Optimizer`, the base class. You need nothing of this chapter's exercises, and
may copy from them. Not allowed: `shared.optim`, the finished optimizers of `torch.optim` and their kernels (`torch._fused_adamw_`),
`torch.nn.utils.clip_grad_norm_` and its relatives, and `torch.amp.GradScaler`: the checks compare with these. Everything is on the CPU.

Parameters come as pairs (name, parameter), as from `model.named_parameters(remove_duplicate=False)`, once only if that is a generator.
`roles` gives each name one of six roles:
    "embedding", "head", "norm", "bias"
    "matrix"     a hidden layer's weights, mostly [rows, columns] = [outputs, inputs]
    "experts"    a batch of matrices, mostly [experts, rows, columns]
Names mean nothing: a parameter called "head.norm" has the role that `roles` says.

Routing. A name asks for Muon if its role is "matrix" and it has exactly two dimensions, or its role is "experts" and it has exactly three;
every other name asks for AdamW. A name decays unless its role is "norm" or "bias", or it has fewer than two dimensions.
A tied parameter has several names, counts once, and stands where its first name stands. It goes to Muon if all its names ask for Muon,
and decays if all of them decay. A parameter that requires no gradient belongs to no group.

Settings are {"adamw": {...}, "muon": {...}}, with these keys, which mean what they mean in `torch.optim.AdamW` and `torch.optim.Muon`:
    adamw   lr, betas, eps, weight_decay
    muon    lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn

AdamW, at a parameter's step t = 1, 2, ..., with gradient g:
    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2        both from 0
    w = w - lr weight_decay w
    w = w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

Muon, for each matrix [rows, columns] by itself, also for each of a batch:
    b = momentum b + (1 - momentum) g, from 0
    u = momentum b + (1 - momentum) g if nesterov, else b
    w = w - lr weight_decay w - lr s NewtonSchulz(u)      with w on the right as it was before the step
    s = sqrt(max(1, rows / columns)) if adjust_lr_fn is "original", 0.2 sqrt(max(rows, columns)) if it is "match_rms_adamw"

Newton-Schulz, with (a, b, c) = ns_coefficients and ||u|| the root of the sum of squares of one matrix:
    X = u / max(||u||, eps);   then, ns_steps times,   X = a X + (b A + c A A) X   with   A = X X^T

A parameter whose gradient is None takes no part in a step: no decay, no step counted, nothing remembered. A gradient of zeros is one.
`step` leaves gradients as they are. After `update` they may be anything.

The stages
    1 route          which rule each parameter goes to, by role and shape, and whether it decays
    2 adamw          an optimizer that is torch.optim.AdamW over many steps
    3 newton_schulz  the iteration, for a matrix or a batch, wide or tall, in the dtype that is given
    4 muon           torch.optim.Muon over many steps, and each expert by itself
    5 groups         both in one optimizer: decay and learning rate by group, LambdaLR, tied and missing gradients
    6 clip           one norm of all gradients, and one factor for all
    7 resume         the state by name, loaded into a fresh optimizer with its parameters in another order
    8 precision      weights of 16 bits with float32 copies, and a loss scale whose bad steps are skipped
    9 budgets        bytes of the state, bytes during a step, calls and multiplications (see `make`)
    10 bad_input     what cannot be right is refused with a ValueError that says what, before anything has changed
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

Named = Iterable[tuple[str, nn.Parameter]]
Roles = dict[str, str]
Settings = dict[str, dict[str, Any]]


def route(named: Named, roles: Roles) -> dict[str, tuple[str, bool]]:
    """For each trainable parameter, under its first name and in order: (rule, decays), with the rule "adamw" or "muon"."""
    raise NotImplementedError("05.build: route is not written yet")


def make(named: Named, roles: Roles, settings: Settings) -> torch.optim.Optimizer:
    """An optimizer of your own class, which extends torch.optim.Optimizer, so that PyTorch's schedulers work with it.

    Its `param_groups` hold the parameters themselves. Each group has its "rule", "adamw" or "muon", its "lr", and its "weight_decay": 0 for
    parameters that do not decay. How many groups there are is up to you, and which parameters of one rule and one decay share a group.
    `step()` reads each group's "lr" and "weight_decay" when it is called. It has to work only without arguments.

    A weight of bfloat16 or float16 has a float32 copy (stage 8), on which the step computes with the gradient in float32; all of its state
    is float32. After the step the weight is the copy, rounded. Float32 and float64 weights are computed in their own dtype, and have none.

    The budgets (stage 9), for a step after the first, of float32 weights unless another dtype is named:
    - The optimizer holds 8 bytes for each number of an AdamW parameter, 4 for each of a Muon parameter, 4 more where the weight has 16
      bits, and 64 bytes for each parameter.
    - AdamW: at most 3 operators more for each parameter more. New tensors of at most twice the bytes of all AdamW parameters at a time.
    - Muon: new tensors of at most eight times the bytes of the largest Muon parameter at a time, whatever the number of parameters.
    - Newton-Schulz: per matrix and iteration the multiplications of X X^T, A A and one product with X, where X has no more rows than
      columns. A batch of matrices takes as many operators as one matrix.

    Raises:
        ValueError: (stage 10) A section or key of the settings is unknown or missing: its name. An lr, weight_decay or eps that is not a
            finite number of at least 0; a beta or a momentum that is not a number of at least 0 and below 1; betas or ns_coefficients
            that are not two or three finite numbers in a tuple or list; ns_steps that is not an int of at least 1; nesterov that is not a
            bool; an unknown adjust_lr_fn: the key and the section. A number is an int or a float, and a bool is none.
            A name of a trainable parameter that has no role, or an unknown one: the name. A name that stands for two different parameters:
            the name. No trainable parameter: "parameter". A trainable parameter that is not of float64, float32, bfloat16 or float16: its
            name.
    """
    raise NotImplementedError("05.build: make is not written yet")


def newton_schulz(matrices: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """Newton-Schulz of matrices [..., rows, columns], in their dtype and shape. The argument is left as it is. Zeros stay zeros."""
    raise NotImplementedError("05.build: newton_schulz is not written yet")


def clip(optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """Scale all gradients by one factor, min(1, max_norm / norm), in place. norm is the root of the sum of squares over all parameters of
    the optimizer, computed in float32, or in float64 where the gradients are. Returns the norm before scaling; 0 without any gradient.

    A factor that is off by 1e-5 is near enough. Where the norm is at most max_norm, no bit of a gradient changes.

    Raises:
        ValueError: (stage 10) max_norm is not a number above 0 (infinity is one): "max_norm". Gradients are then as they were.
    """
    raise NotImplementedError("05.build: clip is not written yet")


def state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that the next step needs besides the weights and gradients, in a form of your own: dictionaries, lists, tensors, numbers,
    strings, so that `torch.load(..., weights_only=True)` reads it. It includes each group's options as they are now, with those that a
    scheduler has put there ("initial_lr")."""
    raise NotImplementedError("05.build: state is not written yet")


def load(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a `state` into an optimizer that was made with the same names and roles, in any order; the names of a tied parameter may come in
    another order too. Options of its groups become the saved ones. `saved` may be loaded twice: later steps do not change it.

    Raises:
        ValueError: (stage 10) saved has parameters that this optimizer lacks, or lacks some that this one has, or one had another shape or
            another rule: a name of one of these parameters. The optimizer is then as it was.
    """
    raise NotImplementedError("05.build: load is not written yet")


def loss_scale(start: float, growth: float, backoff: float, interval: int) -> object:
    """A dynamic loss scale, whatever you make it. It begins at `start`. After a step that was skipped it is multiplied by `backoff`, after
    `interval` good steps in a row by `growth`.

    Raises:
        ValueError: (stage 10) start is not a finite number above 0, growth not one above 1, backoff not one above 0 and below 1, or
            interval not an int of at least 1: the argument's name.
    """
    raise NotImplementedError("05.build: loss_scale is not written yet")


def scale_of(scaler: object) -> float:
    """The number that the next loss is to be multiplied by."""
    raise NotImplementedError("05.build: scale_of is not written yet")


def update(optimizer: torch.optim.Optimizer, scaler: object, max_norm: float) -> tuple[float, bool]:
    """A step with gradients of a loss that was multiplied by `scale_of(scaler)`: undo the scale, clip to max_norm, step, adapt the scale.

    Of weights with 16 bits, gradients are taken to float32 before the scale is undone: in float16 what is small would become 0.
    Where a gradient has NaN or infinity the step is skipped: weights and state stay as they were, and no step is counted.

    Returns:
        The norm of the unscaled gradients before clipping (not finite, if the step was skipped), and whether the step was made.
    """
    raise NotImplementedError("05.build: update is not written yet")
