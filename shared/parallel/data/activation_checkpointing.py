"""Chapter 06. Activation checkpointing (recomputation): save a block's inputs only, and run the block again in the backward pass.

A block's backward pass needs about thirty tensors of its forward pass, whereas its input is one. Recomputing costs one more forward pass, a
third of a step, and saves one tensor per block (Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4). Selective
recomputation saves the results of matrix products and attention, the most expensive to recompute (Korthikanti et al. 2022, section 5, for
kernels that hold no [Q, K] matrix).

It is applied through `run_block`, the extension point that a stack calls for each of its blocks (`Builders`).

Dropout must sample the same mask when a block is run again, so the state of torch's generators is saved for every block of every step.

Left out on purpose: segments other than a block, and moving activations to the CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shared.course.binding import exercise
from shared.model.context import AttentionContext
from shared.model.document_attention import varlen_operator


def random_state_of(tensor: Tensor) -> list[Tensor]:
    """The states of torch's generators that a computation with `tensor` may use: the CPU's, and its GPU's."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(tensor.device)] if tensor.is_cuda else [])


@contextmanager
def random_numbers_from(state: list[Tensor]) -> Iterator[None]:
    """A context with the random state `state` (as torch.random.fork_rng), whose GPU state is that of the current device; afterwards
    generators are reset."""
    cpu, *gpu = state
    with torch.random.fork_rng([torch.cuda.current_device()] if gpu else []):
        torch.set_rng_state(cpu)
        for of_device in gpu:
            torch.cuda.set_rng_state(of_device)
        yield


aten = torch.ops.aten
KEPT = [  # saved by selective recomputation: matrix products, and attention through its kernels
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
    aten.mkldnn_linear.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


@exercise("06.recompute")
def recompute(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    upstream: Tensor,
    random_state: list[Tensor],
) -> tuple[Tensor | None, ...]:
    """The backward pass of activation checkpointing: run the function again from its saved inputs, now with a graph, and differentiate.

    Args:
        run: run(*inputs) -> output. It uses `parameters`, and it may draw random numbers, as dropout does.
        inputs: the inputs of the first run. Tensors of any dtype; integer tensors have no gradient. An input may have been computed from
            another one, and one tensor may be given twice. Each place gets the gradient of what `run` does with it there: what flows from
            one input to another outside of `run` is not part of it. For x and y = 2 x, and run = x * y, x gets y and y gets x.
        parameters: the other tensors that it reads. They may be frozen, and it may leave some of them unused.
        upstream: the gradient of the loss with respect to the output, in the output's shape.
        random_state: the generators as they were before the first run. `with random_numbers_from(random_state):` restores them, and resets
            them afterwards, so that the second run does not change the random numbers that are drawn next.

    Returns:
        The gradient of each input, then of each parameter, in their order and shapes. None for a tensor that does not require one, and
        for one that the output does not depend on, also where that is all of them. No `.grad` is changed: autograd accumulates the
        returned gradients, so hooks on a parameter see one gradient. Gradients are recorded here even where they are switched off
        outside, as in a backward pass.

    >>> x, weight = torch.tensor([2.0]), torch.tensor([5.0], requires_grad=True)
    >>> recompute(lambda x: (x * weight).square(), [x], [weight], torch.tensor([0.5]), random_state_of(x))    # 0.5 * 2 * (2 * 5) * 2
    (None, tensor([20.]))
    """


class CheckpointedBlock(torch.autograd.Function):
    """A checkpointed block: run(*inputs), with only the inputs saved for the backward pass.

    Parameters are arguments too, so that autograd accumulates their gradients as usual, and then calls their hooks.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], number: int, *tensors: Tensor) -> Tensor:
        inputs, ctx.parameters = tensors[:number], tensors[number:]
        ctx.run = with_autocast_of_now(run, inputs[0].device.type)
        ctx.random_state = random_state_of(inputs[0])
        ctx.save_for_backward(*inputs)
        return ctx.run(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *recompute(ctx.run, ctx.saved_tensors, ctx.parameters, upstream, ctx.random_state)


RunBlock = Callable[[nn.Module, Tensor, AttentionContext], Tensor]


def run_block_fully(inner: RunBlock, block: nn.Module, x: Tensor, context: AttentionContext) -> Tensor:
    """Full activation checkpointing, as a `run_block`: only a block's inputs are saved."""
    if not torch.is_grad_enabled():
        return inner(block, x, context)
    tensors, context_of = differentiable_parts(context)
    run = lambda x, *tensors: inner(block, x, context_of(*tensors))  # noqa: E731
    # Hooks of a parameter that is an argument here are called after this backward pass, too early for one whose gradient comes later.
    parameters = [parameter for parameter in block.parameters() if not getattr(parameter, "computed_apart", False)]
    if len(parameters) < len(list(block.parameters())) and not x.requires_grad:
        x = x.detach().requires_grad_()  # the backward pass reaches products whose weights autograd does not see through x alone
    return CheckpointedBlock.apply(run, 1 + len(tensors), x, *tensors, *parameters)


def run_block_selectively(inner: RunBlock, block: nn.Module, x: Tensor, context: AttentionContext) -> Tensor:
    """Selective activation checkpointing, as a `run_block`: PyTorch's own, which keeps the results of matrix products and attention."""
    if not torch.is_grad_enabled():
        return inner(block, x, context)
    kept = KEPT + ([varlen_operator()] if x.is_cuda else [])
    return checkpoint(inner, block, x, context, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, kept))


def run_block_by_torch(inner: RunBlock, block: nn.Module, x: Tensor, context: AttentionContext) -> Tensor:
    """A `run_block` with PyTorch's activation checkpointing of whole blocks, which goes through the hooks of `fully_shard`."""
    return checkpoint(inner, block, x, context, use_reentrant=False)


def apply_activation_checkpointing(model: nn.Module, how: Literal["none", "full", "selective"], backend: str = "course") -> None:
    """Wrap the `run_block` of a `TransformerModel` in activation checkpointing, once."""
    if how == "none":
        return
    full = run_block_by_torch if backend == "torch" else run_block_fully
    function = full if how == "full" else run_block_selectively
    for stack in (model.encoder, model.stack):
        if stack is None:
            continue
        if getattr(stack.run_block, "func", None) in (run_block_by_torch, run_block_fully, run_block_selectively):
            raise ValueError(f"parallel.activation_checkpointing is {how}, and the model's blocks run with it already.")
        stack.run_block = partial(function, stack.run_block)


def differentiable_parts(context: AttentionContext) -> tuple[list[Tensor], Callable[..., AttentionContext]]:
    """The differentiable tensors of a context, the encoder's output and position biases, and a function that replaces them by others."""
    biased = {name: mask.bias for name, mask in context.masks.items() if mask.bias is not None}
    memory = [] if context.memory is None else [context.memory]

    def context_of(*tensors: Tensor) -> AttentionContext:
        masks = context.masks | {name: context.masks[name]._replace(bias=bias) for name, bias in zip(biased, tensors, strict=False)}
        return replace(context, masks=masks, memory=tensors[-1] if memory else None)

    return [*biased.values(), *memory], context_of


def with_autocast_of_now(run: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """Wrap `run` in the current autocast state, which a backward pass does not restore. Without the cache, which would keep 16-bit copies
    of the block's weights, without their graph."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def run_in_precision(*inputs: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False):
            return run(*inputs)

    return run_in_precision
