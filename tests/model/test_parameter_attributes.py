"""What modules state on their parameters (role, initializer, sharding) survives the meta device, and decides initial weights."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from shared.model.config import ModelConfig
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.init import allocate, initial_value, local_initial_value, materialize
from shared.model.roles import parameters_by_role
from shared.model.transformer import PLAIN, TransformerModel, build_linear

CONFIG = ModelConfig(vocab_size=29, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True)


@dataclass
class Columns:
    """The columns `start` to `stop` of a matrix, as tensor parallelism cuts o_proj: no range of flattened numbers."""

    shape: torch.Size
    start: int
    stop: int

    def local(self, whole: Tensor) -> Tensor:
        return whole[:, self.start : self.stop]

    def gather(self, part: Tensor) -> Tensor:
        raise NotImplementedError("There is one process here.")


def cut_columns(model: TransformerModel, rank: int) -> None:
    """Half of each o_proj, from outside."""
    for block in model.stack.blocks.values():
        layer = block.attention.o_proj
        width = layer.weight.shape[1] // 2
        sharding = Columns(layer.weight.shape, rank * width, (rank + 1) * width)
        layer.weight = nn.Parameter(torch.empty(layer.weight.shape[0], width, device=layer.weight.device))
        layer.weight.sharding = sharding


def test_attributes_stand_on_the_parameter_after_the_meta_device():
    ones = lambda shape, generator: torch.ones(shape)  # noqa: E731

    def linear(name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
        layer = build_linear(name, in_features, out_features, bias)
        if name == "up_proj":
            layer.weight.role, layer.weight.initializer, layer.weight.note = "expert", ones, {"of": "a later chapter"}
        return layer

    with torch.device("meta"):
        model = TransformerModel(CONFIG, replace(PLAIN, linear=linear))
    notes = [block.feed_forward.up_proj.weight.note for block in model.stack.blocks.values()]
    materialize(model, "cpu", seed=3)
    for block, note in zip(model.stack.blocks.values(), notes, strict=True):
        weight = block.feed_forward.up_proj.weight
        assert weight.role == "expert" and weight.note is note and weight.initializer is ones and (weight == 1).all()
    assert len(parameters_by_role(model)["expert"]) == 2
    assert model.head.linear.weight is model.embedding.tokens.weight


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_that_is_cut_starts_as_its_part_of_the_whole(rank, meta):
    whole = TransformerModel(CONFIG, seed=3)
    with torch.device("meta" if meta else "cpu"):
        model = TransformerModel(CONFIG, seed=4)
    cut_columns(model, rank)
    materialize(model, "cpu", seed=3)
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        part = expected[:, 8 * rank : 8 * rank + 8] if name.endswith("o_proj.weight") else expected
        assert torch.equal(parameter, part), name
        assert torch.equal(initial_value(name, parameter, model.config, 3), expected)
        assert torch.equal(local_initial_value(name, parameter, model.config, 3), part)
        assert hasattr(parameter, "sharding") == name.endswith("o_proj.weight")


def test_an_initializer_draws_the_whole_of_a_parameter_that_is_cut():
    model, shapes = TransformerModel(CONFIG), []
    cut_columns(model, 1)
    weight = model.stack.blocks["0"].attention.o_proj.weight
    weight.initializer = lambda shape, generator: shapes.append(shape) or torch.arange(256.0).view(shape)
    assert torch.equal(local_initial_value("w", weight, model.config, 0), torch.arange(256.0).view(16, 16)[:, 8:])
    assert shapes == [(16, 16)]


def test_tied_parameters_stay_tied_when_allocated():
    with torch.device("meta"):
        model = TransformerModel(CONFIG)
    blocks = model.stack.blocks
    blocks["1"].attention.q_proj.weight = blocks["0"].attention.q_proj.weight
    blocks["1"].attention.k_proj.weight.requires_grad_(False)
    allocate(model, "cpu")
    assert blocks["1"].attention.q_proj.weight is blocks["0"].attention.q_proj.weight
    assert model.head.linear.weight is model.embedding.tokens.weight and not model.head.linear.weight.is_meta
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["stack.blocks.1.attention.k_proj.weight"]


def test_a_loaded_model_keeps_what_its_builders_state(tmp_path):
    def linear(name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
        layer = build_linear(name, in_features, out_features, bias)
        layer.weight.note = name
        return layer

    save_pretrained(TransformerModel(CONFIG), tmp_path)
    model = load_pretrained(tmp_path, builders=replace(PLAIN, linear=linear), dtype=torch.bfloat16)
    block = model.stack.blocks["1"]
    assert (block.attention.q_proj.weight.note, block.feed_forward.up_proj.weight.note) == ("q_proj", "up_proj")
    assert model.head.linear.weight is model.embedding.tokens.weight and block.attention.q_proj.weight.dtype == torch.bfloat16
