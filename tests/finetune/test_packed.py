"""Quantized models as files: read back, unpacked by a reader of its own and run by transformers, damaged, and used as a base."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shared.finetune.adapters import attach_adapter
from shared.finetune.config import AdapterConfig
from shared.finetune.quantization.awq import AWQ
from shared.finetune.quantization.gptq import GPTQ
from shared.finetune.quantization.methods import quantize_model
from shared.finetune.quantization.packed import QuantizedLinear
from shared.finetune.quantization.packed_files import load_quantized, save_quantized
from shared.finetune.quantization.packed_settings import read_settings
from shared.finetune.quantization.rounding import Rounding, round_to_nearest
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained
from shared.model.transformer import TransformerModel
from shared.sampling import generate

SIZES = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 128, "max_position_embeddings": 64, "initializer_range": 0.1}  # fmt: skip
CASES = {
    "gptq, 4 bits": ("gptq", GPTQ(Rounding(4, 32), act_order=True)),
    "gptq, 3 bits": ("gptq", GPTQ(Rounding(3, 32))),
    "gptq, 4 bits, asymmetric": ("gptq", GPTQ(Rounding(4, 32, symmetric=False))),
    "gptq, 4 bits, 8 outputs": ("gptq", GPTQ(Rounding(4, 32))),
    "gptq, 8 bits, rows": ("gptq", Rounding(8, None)),
    "awq": ("awq", AWQ(Rounding(4, 32, symmetric=False))),
}


def ids(seed=0):
    return torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Case -> the model and its folder; made when first asked for."""
    made = {}

    def find(case):
        if case not in made:
            layout, method = CASES[case]
            changes = {"num_key_value_heads": 1, "head_dim": 8} if "8 outputs" in case else {"tie_word_embeddings": case == "awq"}
            model = TransformerModel(ModelConfig(**SIZES | changes), seed=0)
            list(quantize_model(model, [{"input_ids": ids(seed)} for seed in range(3)], method))
            folder = tmp_path_factory.mktemp("quantized")
            save_quantized(model, folder, layout=layout)
            made[case] = model, folder
        return made[case]

    return find


@pytest.mark.parametrize("case", CASES)
def test_a_model_comes_back_from_its_files(saved, case):
    model, folder = saved(case)
    back = load_quantized(folder)
    with torch.no_grad():
        torch.testing.assert_close(back(ids()), model(ids()), rtol=0, atol=0)
    assert {name: parameter.requires_grad for name, parameter in back.named_parameters()} == {
        name: parameter.requires_grad for name, parameter in model.named_parameters()
    }
    tokens = list(generate(back, ids()[:, :4], 5, context=64, temperature=0))
    assert torch.equal(torch.stack(tokens), torch.stack(list(generate(model, ids()[:, :4], 5, context=64, temperature=0))))


def unpack_gptq(tensors, name, bits, version):
    """From the layout as published: code i of a column stands at bit i * bits of its stream of words, lowest first; zero points along a
    row, minus 1 in the first version; g_idx says which group an input is in."""
    codes = bits_of(tensors[f"{name}.qweight"].numpy().T, bits)
    zeros = bits_of(tensors[f"{name}.qzeros"].numpy(), bits) + (version == "gptq")
    group, scales = tensors[f"{name}.g_idx"].numpy(), tensors[f"{name}.scales"].numpy().astype(np.float32)
    return (codes.T - zeros[group]) * scales[group]


def unpack_awq(tensors, name, group):
    """From the layout as published: place p of a word, from the lowest four bits, holds output order[p] of its eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def codes(key):
        words = tensors[f"{name}.{key}"].numpy().view(np.uint32)
        found = np.zeros((len(words), words.shape[1] * 8), dtype=np.int64)
        for place, column in enumerate(order):
            found[:, column::8] = words >> np.uint32(4 * place) & np.uint32(15)
        return found

    zeros, scales = codes("qzeros"), tensors[f"{name}.scales"].numpy().astype(np.float32)
    rows = np.arange(tensors[f"{name}.qweight"].shape[0]) // group
    return (codes("qweight") - zeros[rows]) * scales[rows]


def bits_of(words, bits):
    """[m, words] int32 -> [m, words * 32 / bits]: numbers of `bits` bits, lowest first."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return (stream.reshape(len(words), -1, bits) << np.arange(bits)).sum(axis=2).astype(np.int64)


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same_from_independently_unpacked_files(saved, case):
    """gptqmodel, which transformers hands these files to, is not installed here: the test's own reader unpacks them into a plain model."""
    import transformers

    model, folder = saved(case)
    told = json.loads((folder / "config.json").read_text())
    settings, tensors = told.pop("quantization_config"), load_file(folder / "model.safetensors")
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        if settings["quant_method"] == "awq":
            weight = unpack_awq(tensors, name, settings["group_size"])
        else:
            weight = unpack_gptq(tensors, name, settings["bits"], settings["checkpoint_format"])
        for key in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{name}.{key}", None)
        tensors[f"{name}.weight"] = torch.from_numpy(weight.T.astype(np.float32)).contiguous()
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**told)).eval()
    assert not theirs.load_state_dict(tensors, strict=not told["tie_word_embeddings"]).unexpected_keys
    with torch.no_grad():
        torch.testing.assert_close(theirs.float()(ids()).logits, model(ids()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_the_quantization_config(saved, case):
    from transformers import AutoConfig
    from transformers.quantizers.auto import AutoQuantizationConfig

    settings = AutoQuantizationConfig.from_dict(AutoConfig.from_pretrained(saved(case)[1]).quantization_config)
    layout, method = CASES[case]
    rounding = method if isinstance(method, Rounding) else method.rounding
    assert (settings.quant_method, settings.bits, settings.group_size) == (layout, rounding.bits, rounding.group or -1)
    assert settings.format == ("gemm" if layout == "awq" else "gptq" if rounding.symmetric else "gptq_v2")
    assert (settings.zero_point if layout == "awq" else not settings.sym) == (not rounding.symmetric)


def changed(folder, copy_to, **settings):
    """A copy of a folder whose quantization_config says something else."""
    copy_to.mkdir()
    for file in folder.iterdir():
        (copy_to / file.name).write_bytes(file.read_bytes())
    told = json.loads((copy_to / "config.json").read_text())
    told["quantization_config"] |= settings
    (copy_to / "config.json").write_text(json.dumps(told))
    return copy_to


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"group_size": 64}, "do not match its config.json; look at bits and group_size .*misshapen: .*qzeros is"),
        ({"group_size": 48}, "groups of 48: its inputs must be a multiple"),
        ({"bits": 3}, "do not match its config.json.*misshapen"),
        ({"bits": 5}, "config.json: bits is 5: give one of 2, 3, 4, 8"),
        ({"bits": "4"}, "bits is '4' and group_size 32 in quantization_config: both must be whole numbers"),
        ({"quant_method": "bitsandbytes"}, "the method 'bitsandbytes': those that are read here are gptq, awq"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"lm_head": True}, "lm_head is True"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_a_sentence(saved, tmp_path, settings, says):
    with pytest.raises(PretrainedError, match=says):
        load_quantized(changed(saved("gptq, 4 bits")[1], tmp_path / "changed", **settings))


def test_damaged_and_unquantized_folders_are_refused_in_a_sentence(saved, tmp_path):
    folder = changed(saved("gptq, 4 bits")[1], tmp_path / "changed")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PretrainedError, match="is no complete safetensors file"):
        load_quantized(folder)
    (folder / "model.safetensors").write_bytes(whole)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.g_idx"] = tensors["model.layers.0.self_attn.q_proj.g_idx"].flip(0)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(PretrainedError, match=r"model.layers.0.self_attn.q_proj.g_idx is not that of groups of 32"):
        load_quantized(folder)
    with pytest.raises(PretrainedError, match="quantization_config"):
        load_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    del told["quantization_config"]
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(PretrainedError, match="quantization_config has the method None"):
        load_quantized(folder)


def test_what_no_file_can_hold_is_refused(saved, tmp_path):
    plain = TransformerModel(ModelConfig(**SIZES))
    with pytest.raises(ValueError, match="The model is not quantized"):
        save_quantized(plain, tmp_path, layout="gptq")
    with pytest.raises(ValueError, match="AWQ's layout has 4 bits and these weights have 3"):
        save_quantized(saved("gptq, 3 bits")[0], tmp_path, layout="awq")
    with pytest.raises(ValueError, match="layout is 'exl2'"):
        save_quantized(saved("awq")[0], tmp_path, layout="exl2")
    narrow = TransformerModel(ModelConfig(**SIZES | {"num_key_value_heads": 1, "head_dim": 8}))
    list(quantize_model(narrow, [{"input_ids": ids()}], Rounding(3, 32)))
    with pytest.raises(ValueError, match="stack.blocks.0.attention.k_proj has 8 outputs, which codes of 3 bits"):
        save_quantized(narrow, tmp_path, layout="gptq")
    gpt2 = TransformerModel(ModelConfig(vocab_size=61, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                                        norm="layer_norm", gated=False, hidden_act="gelu_tanh", position="learned", attention_bias=True,
                                        attention_output_bias=True, mlp_bias=True, tie_word_embeddings=True))  # fmt: skip
    list(quantize_model(gpt2, [{"input_ids": ids()}], Rounding(4, 32)))
    with pytest.raises(ValueError, match="holds several layers, or one transposed"):
        save_quantized(gpt2, tmp_path, layout="gptq")


def test_a_quantized_layer_passes_gradients_to_its_input_alone():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    rounding = Rounding(4, 32, symmetric=False)
    layer = QuantizedLinear.of(round_to_nearest(weight, rounding), nn.Parameter(torch.randn(32)), rounding)
    plain = nn.Linear(64, 32)
    plain.weight.data, plain.bias.data = layer.dequantized(), layer.bias.detach()
    x = torch.randn(3, 5, 64, requires_grad=True)
    given = torch.randn(3, 5, 32)
    [ours] = torch.autograd.grad(layer(x), x, given)
    [theirs] = torch.autograd.grad(plain(x), x, given)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(ours, theirs)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert sum(each.nbytes for each in (layer.codes, layer.scales, layer.zeros)) == 32 * 64 // 2 + 32 * 2 * 3
    assert layer.to(torch.bfloat16).scales.dtype == torch.float16  # rounded scales would be another weight


def test_a_quantized_model_is_a_base_for_adapters(saved):
    """Gradients of LoRA's factors are those with the dequantized weights as plain linear layers."""
    base = load_quantized(saved("gptq, 4 bits")[1])
    plain = TransformerModel(ModelConfig(**SIZES))
    plain.load_state_dict(
        {name: base.get_submodule(name.removesuffix(".weight")).dequantized() if "_proj" in name else base.state_dict()[name]
         for name in plain.state_dict()}
    )  # fmt: skip
    gradients = []
    for model in (base, plain):
        attach_adapter(model, AdapterConfig(kind="lora", rank=4, alpha=8.0, targets=("q_proj", "down_proj")), seed=0)
        factors = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        generator = torch.Generator().manual_seed(1)
        for name in sorted(factors):
            factors[name].data.normal_(generator=generator)
        loss = model(ids()).logsumexp(dim=-1).sum()
        gradients.append(dict(zip(factors, torch.autograd.grad(loss, list(factors.values())), strict=True)))
    assert len(gradients[0]) == 8 and all(gradient.any() for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-5)


def test_a_quantized_model_can_be_copied(saved):
    model, _ = saved("awq")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(ids()), model(ids()), rtol=0, atol=0)


def test_files_that_do_not_say_whether_codes_are_symmetric_have_each_tools_default():
    """AutoGPTQ's is symmetric; AutoAWQ's has zero points."""
    said = {"bits": 4, "group_size": 32}
    assert read_settings(said | {"quant_method": "gptq"})[1].symmetric and not read_settings(said | {"quant_method": "awq"})[1].symmetric
