"""GPTQ folders whose zero points are those of another version than config.json says: `sym` decides, since its zero point is the middle."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AwqConfig, GPTQConfig

from shared.finetune.quantization.methods import quantize_model
from shared.finetune.quantization.packed_files import load_quantized, save_quantized
from shared.finetune.quantization.packed_settings import read_settings
from shared.finetune.quantization.rounding import Rounding
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError
from shared.model.transformer import TransformerModel

IDS = torch.arange(1, 17)[None]
MIDDLE = 0x88888888 - 2**32  # eight codes of four bits


@pytest.fixture
def folder(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    model = TransformerModel(ModelConfig(**sizes, max_position_embeddings=64, initializer_range=0.1), seed=0)
    list(quantize_model(model, [{"input_ids": IDS}], Rounding(4, 32)))
    save_quantized(model, tmp_path, layout="gptq")
    return tmp_path


def logits(folder) -> torch.Tensor:
    with torch.no_grad():
        return load_quantized(folder).eval()(IDS)


def change(folder, zero=None, layers="", **settings):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {name: value for name, value in (config["quantization_config"] | settings).items() if value != "gone"}
    path.write_text(json.dumps(config))
    if zero is not None:
        tensors = load_file(folder / "model.safetensors")
        tensors |= {name: torch.full_like(value, zero) for name, value in tensors.items() if name.endswith(f"{layers}.qzeros")}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_zero_points_of_the_newer_version_are_read_so_whatever_the_file_says(folder):
    wanted = logits(folder)
    change(folder, zero=MIDDLE)
    with pytest.warns(UserWarning, match="says checkpoint_format gptq, and its zero points are those of gptq_v2"):
        assert torch.equal(logits(folder), wanted)
    change(folder, checkpoint_format="gptq_v2")
    assert torch.equal(logits(folder), wanted)


def test_an_earlier_name_of_the_version_is_read(folder):
    wanted = logits(folder)
    change(folder, zero=MIDDLE, checkpoint_format="gone", format="gptq_v2")
    assert torch.equal(logits(folder), wanted)


def test_zero_points_that_are_not_the_middle_in_any_version_are_refused(folder):
    change(folder, zero=0x55555555)
    with pytest.raises(PretrainedError, match="says that codes are symmetric"):
        logits(folder)


@pytest.mark.parametrize("layers", ["q_proj", "down_proj"])
def test_layers_of_both_versions_in_one_folder_are_refused(layers, folder):
    """Whichever comes first, another one does not have the middle then."""
    change(folder, zero=MIDDLE, layers=layers)
    with warnings.catch_warnings(), pytest.raises(PretrainedError, match="says that codes are symmetric .* zero points of model.layers.0"):
        warnings.simplefilter("ignore")
        logits(folder)


@pytest.mark.parametrize("made", [GPTQConfig, AwqConfig])
def test_every_setting_that_transformers_writes_is_read_or_of_no_consequence(made):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_settings(json.loads(json.dumps(made(bits=4).to_dict())))


def test_a_setting_that_is_not_known_is_named(folder):
    change(folder, rotation="hadamard")
    with pytest.warns(UserWarning, match="quantization_config has rotation, which is not known here"):
        logits(folder)


@pytest.mark.parametrize("kept", [["lm_head"], [], None])
def test_an_awq_folder_that_says_its_head_is_not_converted_is_read(kept, tmp_path):
    """A head never is quantized in what is read; another list is refused."""
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    model = TransformerModel(ModelConfig(**sizes, max_position_embeddings=64, initializer_range=0.1), seed=0)
    list(quantize_model(model, [{"input_ids": IDS}], Rounding(4, 32, symmetric=False)))
    save_quantized(model, tmp_path, layout="awq")
    wanted = logits(tmp_path)
    change(tmp_path, modules_to_not_convert=kept)
    assert torch.equal(logits(tmp_path), wanted)
    change(tmp_path, modules_to_not_convert=["q_proj"])
    with pytest.raises(PretrainedError, match="modules_to_not_convert is .* not understood here"):
        logits(tmp_path)


OTHERS = {"dynamic": {"-:.*down_proj": {}}}, {"is_marlin_format": True}, {"pack_dtype": "int16"}, {"adapter": {}}


@pytest.mark.parametrize("settings", OTHERS)
def test_what_would_change_the_weights_and_is_not_read_is_refused_by_name(settings, folder):
    change(folder, **settings)
    with pytest.raises(PretrainedError, match=f"{next(iter(settings))} is .* which is not understood here"):
        logits(folder)
