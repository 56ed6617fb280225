"""Chapter 10. Calibration data for quantization: run real text through the model, block by block, and collect the inputs of its layers.

The inputs of one block are held at a time. A block's inputs are the outputs of the blocks before it as they are now, so of quantized ones
where those are quantized already: each layer makes up for what the layers before it lost.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared.data.packing import PADDING
from shared.model.attention import Attention
from shared.model.block import Block
from shared.model.chunked_loss import apart
from shared.model.context import AttentionContext
from shared.model.feed_forward import FeedForward, GatedFeedForward
from shared.model.transformer import TransformerModel
from shared.sampling import evaluating
from shared.totals import Batch


class BlockInput(NamedTuple):
    """The inputs of a block for one batch: hidden states [batch, seq, D], the context, and [batch, seq] bool: which positions hold text."""

    x: Tensor
    context: AttentionContext
    kept: Tensor


class SharedInput(NamedTuple):
    """Linear layers of a block that have the same input.

    layers: their names within the block.
    before: the norm or linear layer that makes their input, and could make it in other units; None where nothing does.
    within: the module whose outputs say how well these layers do together.
    """

    layers: tuple[str, ...]
    before: str | None
    within: str


def shared_inputs(block: Block, name: str) -> list[SharedInput]:
    """The linear layers of a block by their inputs, in the order in which a forward pass meets them.

    `before` is None where the input cannot be scaled channel by channel: behind a norm whose output is the residual stream too, an
    activation that is not linear in it, or values that several heads share.
    """
    attention, feed_forward = block.attention, block.feed_forward
    for part, module, known in (("attention", attention, Attention), ("feed_forward", feed_forward, FeedForward)):
        if not isinstance(module, known):
            raise ValueError(
                f"{name}.{part} is of the kind {type(module).__name__}, and only plain {part.replace('_', '-')} layers are quantized with "
                "calibration: experts see too few tokens each. Quantize a dense model."
            )
    if block.cross_attention is not None:
        raise ValueError(f"{name} has cross-attention, and only decoders without an encoder are quantized here.")
    gated = isinstance(feed_forward, GatedFeedForward)
    own_values = attention.v_proj.out_features == attention.o_proj.in_features
    norms = ("attention_norm", "feed_forward_norm") if block.pre_norm else (None, None)
    up = ("feed_forward.gate_proj", "feed_forward.up_proj") if gated else ("feed_forward.up_proj",)
    return [
        SharedInput(("attention.q_proj", "attention.k_proj", "attention.v_proj"), norms[0], "attention"),
        SharedInput(("attention.o_proj",), "attention.v_proj" if own_values else None, "attention.o_proj"),
        SharedInput(up, norms[1], "feed_forward"),
        SharedInput(("feed_forward.down_proj",), "feed_forward.up_proj" if gated else None, "feed_forward.down_proj"),
    ]


def blocks_with_inputs(model: TransformerModel, batches: Iterable[Batch]) -> Iterator[tuple[str, Block, list[BlockInput]]]:
    """Each block in order, with its name and its inputs. Change a block before asking for the next one, whose inputs come from it.

    Args:
        model: a decoder or encoder; run in evaluation mode, without gradients.
        batches: as chapter 03's loader makes them, or `input_ids` alone; iterated over once.
    """
    if model.encoder is not None:
        raise ValueError("An encoder-decoder cannot be quantized with calibration: its blocks share more than hidden states.")
    with evaluating(model):
        inputs = [first_input(model, batch) for batch in batches]
        if not inputs:
            raise ValueError("There is no calibration text: give at least one batch.")
        for number, block in model.stack.blocks.items():
            yield f"stack.blocks.{number}", block, inputs
            inputs = [BlockInput(run(block, each), each.context, each.kept) for each in inputs]


@torch.no_grad()
def first_input(model: TransformerModel, batch: Batch) -> BlockInput:
    """The inputs of the first block, by a forward pass in which no block runs."""
    found: list[tuple[Tensor, AttentionContext]] = []
    run_block = model.stack.run_block

    def note(block: nn.Module, x: Tensor, context: AttentionContext) -> Tensor:
        found.append((x, context))
        return x

    model.stack.run_block = note
    try:
        model(batch["input_ids"], head_fn=lambda head, x: None, **apart(batch))
    finally:
        model.stack.run_block = run_block
    kept = batch["documents"] != PADDING if "documents" in batch else torch.ones_like(batch["input_ids"], dtype=torch.bool)
    return BlockInput(*found[0], kept)


@torch.no_grad()
def run(block: Block, given: BlockInput) -> Tensor:
    return block(given.x, given.context)


class Reached(Exception):
    """A watched module was called: nothing after it in its block needs to run."""


def watch(block: Block, inputs: Iterable[BlockInput], name: str, visit: Callable[[tuple[Any, ...], Tensor], None]) -> None:
    """Run a block on its inputs up to its module `name`, and call visit(arguments, kept) with what that is called with, batch by batch."""
    kept: list[Tensor] = []

    def stop(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        visit(arguments, kept[-1])
        raise Reached

    hook = block.get_submodule(name).register_forward_pre_hook(stop)
    try:
        for given in inputs:
            kept.append(given.kept)
            with suppress(Reached):
                run(block, given)
    finally:
        hook.remove()
