"""Small runs over a base in four bits for the tests: three steps on a layout, and in one process with the dequantized base."""

from dataclasses import replace

import torch
from layout_runs import LayoutRun, largest_difference
from sharded_runs import ADAMW
from step_records import RunRecord
from torch import nn

from shared.finetune.quantization.frozen import FrozenLinear
from shared.finetune.quantization.nf4_linear import quantize_base
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.trainer.models import RUN_AXES

SMALL = ModelConfig(
    vocab_size=31, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256,
    initializer_range=0.1, attention_bias=True,
)  # fmt: skip


def quantized(model: TransformerModel, double: bool = True, **settings) -> TransformerModel:
    """The model with its base in four bits; what is left is trained."""
    quantize_base(model, double=double, **settings)
    return model


def with_plain_base(model: TransformerModel, double: bool = True, **settings) -> TransformerModel:
    """The same function, computed with plain frozen linear layers that hold the dequantized weights."""
    dtype = next(model.parameters()).dtype
    for name in quantize_base(model, double=double, **settings):
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, as_linear(model.get_submodule(name), dtype))
    return model


def as_linear(frozen: FrozenLinear, dtype: torch.dtype) -> nn.Linear:
    """A frozen linear layer with the dequantized weight of another, in its memory."""
    plain = nn.Linear(frozen.in_features, frozen.out_features, bias=False, dtype=dtype)
    plain.weight, plain.bias = nn.Parameter(frozen.dequantized(dtype)), frozen.bias
    return plain.requires_grad_(False)


def train(layout: str, prepare=quantized, config: ModelConfig = SMALL, how: dict | None = None, **settings) -> list[RunRecord]:
    """Three steps on each rank of a layout: gradients and weights are whole. how: further fields of the layout."""
    parallel = replace(parse_layout(layout), **how or {})
    settings = {"config": config, "optimizer": ADAMW, "axes": RUN_AXES, "prepare": prepare} | settings
    work = lambda world: LayoutRun(world, parallel, **settings).record()  # noqa: E731
    return [work(SingleRankCommunicator())] if parallel.ranks == 1 else run_threads(work, parallel.ranks)


def trained(tensors: dict) -> dict:
    """Without frozen biases, codes and scales."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_floating_point()}


def require_same(found: list[RunRecord], one: RunRecord, tolerance: float = 1e-9) -> None:
    """Loss, norm, every gradient and every trained weight of each rank, relative to one process."""
    names = {name for name, gradient in one.gradients[0].items() if gradient is not None}
    for rank in found:
        for mine, theirs in zip(rank.losses + rank.norms, one.losses + one.norms, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=0)
        for mine, theirs in zip(rank.gradients, one.gradients, strict=True):
            held = {name: tensor for name, tensor in mine.items() if tensor is not None}
            assert held.keys() <= names and held
            assert largest_difference(held, {name: theirs[name] for name in held}) < tolerance
        held = {name: tensor for name, tensor in rank.weights.items() if name in names}
        assert held and largest_difference(held, {name: one.weights[name] for name in held}) < tolerance
    assert {name for rank in found for name, gradient in rank.gradients[0].items() if gradient is not None} == names
