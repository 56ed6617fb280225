"""Files of a model hold all of it: what no format names is refused, and a tensor of a file may be one expert of a stack."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import to_compute_dtype
from shared.model.feed_forward import build_feed_forward
from shared.model.hf import registry
from shared.model.hf.files import PretrainedError
from shared.model.hf.format import FileTensor, Format
from shared.model.hf.llama import LLAMA
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import PLAIN, TransformerModel, build_linear

CONFIG = ModelConfig(vocab_size=29, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
IDS = torch.arange(12).view(2, 6)


class LowRank(nn.Linear):
    """A low-rank addition beside `weight`, as chapter 10 makes it: the class of a linear layer is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


def add_adapters(model: nn.Module) -> None:
    for block in model.stack.blocks.values():
        layer = block.attention.q_proj
        layer.__class__ = LowRank
        layer.lora_a, layer.lora_b = nn.Parameter(torch.ones(2, layer.in_features)), nn.Parameter(torch.ones(layer.out_features, 2))


def test_a_model_with_adapters_is_not_saved_as_its_base(tmp_path):
    model = TransformerModel(CONFIG)
    add_adapters(model)
    with pytest.raises(ValueError, match=r"llama format holds stack.blocks.0.attention.q_proj.lora_a, .*1.attention.q_proj.lora_b"):
        save_pretrained(model, tmp_path / "model")
    assert not (tmp_path / "model").exists(), "nothing is written"


def test_a_buffer_that_belongs_to_the_model_is_not_left_out(tmp_path):
    model = TransformerModel(CONFIG)
    model.stack.blocks["1"].attention.register_buffer("scales", torch.ones(3))
    with pytest.raises(ValueError, match=r"stack\.blocks\.1\.attention\.scales"):
        save_pretrained(model, tmp_path)
    model.stack.blocks["1"].attention.register_buffer("scales", torch.ones(3), persistent=False)
    save_pretrained(model, tmp_path)  # what its own state does not hold is no part of it


def test_loading_refuses_to_leave_parameters_without_values(tmp_path):
    def linear(name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
        layer = build_linear(name, in_features, out_features, bias)
        if name == "v_proj":
            layer.extra = nn.Parameter(torch.ones(2))
        return layer

    save_pretrained(TransformerModel(CONFIG), tmp_path)
    with pytest.raises(PretrainedError, match=r"blocks\.0\.attention\.v_proj\.extra.* without values"):
        load_pretrained(tmp_path, builders=replace(PLAIN, linear=linear))


class Stacked(nn.Module):
    """Three experts of a gated layer as stacks [E, out, in], all of them used: chapter 09 in little."""

    def __init__(self, config: ModelConfig, builders: Builders, layer: int):
        super().__init__()
        wide, narrow = (3, config.intermediate_size, config.hidden_size), (3, config.hidden_size, config.intermediate_size)
        self.experts = nn.Module()
        for name, shape in (("gate_proj", wide), ("up_proj", wide), ("down_proj", narrow)):
            setattr(self.experts, name, nn.Module())
            getattr(self.experts, name).weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        x = to_compute_dtype(x).unsqueeze(-3)
        gate, up, down = (getattr(self.experts, name).weight.transpose(1, 2) for name in ("gate_proj", "up_proj", "down_proj"))
        return (torch.nn.functional.silu(x @ gate) * (x @ up) @ down).mean(dim=-3)


class Listed(nn.Module):
    """The same experts one by one, as the file has them."""

    def __init__(self, config: ModelConfig, builders: Builders, layer: int):
        super().__init__()
        self.experts = nn.ModuleList(build_feed_forward(config, builders, layer) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(expert(x) for expert in self.experts) / 3


def format_of(expert: Callable[[str, str, int], FileTensor], experts: int = 3) -> Format:
    """A format with one tensor for each expert, as Mixtral's."""

    def tensors(config: ModelConfig) -> list[FileTensor]:
        plain = [entry for entry in LLAMA.tensors(config) if ".mlp." not in entry.name]
        for layer in range(config.num_hidden_layers):
            for name in ("gate_proj", "up_proj", "down_proj"):
                ours, theirs = f"stack.blocks.{layer}.feed_forward.experts", f"model.layers.{layer}.mlp.experts"
                plain += [expert(f"{theirs}.{i}.{name}.weight", f"{ours}.*{name}.weight", i) for i in range(experts)]
        return plain

    return replace(LLAMA, model_type="experts", tensors=tensors)


def in_a_stack(name: str, ours: str, number: int) -> FileTensor:
    return FileTensor(name, (ours.replace("*", ""),), part=number)


IN_STACKS = format_of(in_a_stack)
ONE_BY_ONE = format_of(lambda name, ours, i: FileTensor(name, (ours.replace("*", f"{i}."),)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_tensor_of_a_file_is_one_expert_of_a_stack(tmp_path, monkeypatch, dtype):
    model = TransformerModel(CONFIG, replace(PLAIN, feed_forward=Stacked), seed=2).to(dtype)
    monkeypatch.setitem(registry.FORMATS, "experts", IN_STACKS)
    save_pretrained(model, tmp_path, model_type="experts", max_shard_bytes=20_000)
    files = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    stack = model.stack.blocks["1"].feed_forward.experts.up_proj.weight
    assert all(torch.equal(files[f"model.layers.1.mlp.experts.{i}.up_proj.weight"], stack[i]) for i in range(3))
    again = load_pretrained(tmp_path, builders=replace(PLAIN, feed_forward=Stacked), dtype=dtype)
    for (name, left), right in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right), name
    monkeypatch.setitem(registry.FORMATS, "experts", ONE_BY_ONE)  # the same file, other modules
    listed = load_pretrained(tmp_path, builders=replace(PLAIN, feed_forward=Listed), dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(listed(IDS), model(IDS), rtol=1e-5, atol=1e-6)


def test_an_expert_that_no_tensor_holds_is_missed(tmp_path, monkeypatch):
    model = TransformerModel(CONFIG, replace(PLAIN, feed_forward=Stacked))
    monkeypatch.setitem(registry.FORMATS, "experts", IN_STACKS)
    save_pretrained(model, tmp_path, model_type="experts")
    monkeypatch.setitem(registry.FORMATS, "experts", format_of(in_a_stack, experts=2))
    with pytest.raises(ValueError, match=r"experts\.gate_proj\.weight\[2\]"):
        save_pretrained(model, tmp_path / "less", model_type="experts")
    with pytest.raises(PretrainedError, match=r"experts\.gate_proj\.weight\[2\]"):
        load_pretrained(tmp_path, builders=replace(PLAIN, feed_forward=Stacked))


def test_a_file_with_a_misshapen_expert_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.FORMATS, "experts", IN_STACKS)
    save_pretrained(TransformerModel(CONFIG, replace(PLAIN, feed_forward=Stacked)), tmp_path, model_type="experts")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    wrong = "model.layers.0.mlp.experts.1.up_proj.weight"
    save_file(tensors | {wrong: tensors[wrong].T.contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(PretrainedError, match=r"misshapen: model.layers.0.mlp.experts.1.up_proj.weight is \[16, 24\], not \[24, 16\]"):
        load_pretrained(tmp_path, builders=replace(PLAIN, feed_forward=Stacked))
