"""Files of a base in NF4: written and read here, by transformers with bitsandbytes, over ranks, and damaged."""

import json

import pytest
import torch
from frozen_runs import SMALL
from safetensors.torch import load_file, save_file

from shared.finetune.adapters import attach_adapter
from shared.finetune.config import AdapterConfig
from shared.finetune.quantization.nf4_files import STATE, open_nf4, save_nf4
from shared.finetune.quantization.nf4_linear import quantize_base
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import open_pretrained, save_pretrained
from shared.model.init import materialize
from shared.model.transformer import TransformerModel
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.trainer.models import RUN_AXES

IDS = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(0))


def quantized(double: bool = True, targets=("*",)) -> TransformerModel:
    model = TransformerModel(SMALL, seed=3)
    quantize_base(model, targets, double)
    return model


def opened(folder) -> TransformerModel:
    model = open_nf4(folder)
    materialize(model, "cpu", seed=0)
    return model


def differing(a: TransformerModel, b: TransformerModel) -> set[str]:
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == theirs.keys()
    return {name.rpartition(".")[2] for name in ours if not ours[name].equal(theirs[name])}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("targets", [("*",), ("q_proj", "feed_forward.*")])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, double, targets):
    model = quantized(double, targets)
    save_nf4(model, tmp_path, max_shard_bytes=60_000)  # several files
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not differing(model, opened(tmp_path))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("targets", [("*",), ("feed_forward.*",)])
def test_transformers_loads_it_and_computes_the_same_logits(tmp_path, double, targets):
    from transformers import AutoModelForCausalLM

    model = quantized(double, targets)
    save_nf4(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    weight = theirs.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.uint8 and weight.quant_state.nested == double
    torch.testing.assert_close(theirs(IDS).logits, model(IDS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("double", [True, False])
def test_what_transformers_quantizes_and_saves_is_read_as_it_is(tmp_path, double):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain, four = tmp_path / "plain", tmp_path / "four"
    save_pretrained(TransformerModel(SMALL, seed=3), plain, model_type="qwen2")
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    theirs = AutoModelForCausalLM.from_pretrained(plain, device_map="cpu", dtype=torch.float32, quantization_config=how)
    theirs.save_pretrained(four)
    model = opened(four)
    torch.testing.assert_close(model(IDS), theirs(IDS).logits, rtol=0, atol=1e-5)
    # Scales' codes: their kernel for CPUs rounds before it looks for the nearest value (test_nf4.py).
    assert differing(model, quantized(double)) == ({"scale_codes"} if double else set())


@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "tp2_fsdp2"])
def test_ranks_read_what_they_hold_and_write_the_same_files_together(tmp_path, layout):
    model = quantized()
    save_nf4(model, tmp_path / "one")

    def work(world):
        parallel = apply_parallel(open_nf4(tmp_path / "one"), Mesh(parse_layout(layout), world), axes=RUN_AXES)
        save_nf4(parallel.module, tmp_path / "ranks", weights=parallel.weights())
        return {name: tensor for name, tensor in parallel.whole_weights() if tensor is not None}

    expected = dict(model.named_parameters())
    for weights in run_threads(work, parse_layout(layout).ranks):
        assert weights.keys() == expected.keys() and all(tensor.equal(expected[name]) for name, tensor in weights.items())
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "ranks" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


# What is refused, in a sentence.


def change(folder, name: str, make) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = make(tensors[name])
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def other_state(**more):
    def make(tensor):
        return torch.tensor(list(json.dumps(json.loads(bytes(tensor.tolist())) | more).encode()), dtype=torch.uint8)

    return make


UP = "model.layers.0.mlp.up_proj.weight"
DAMAGE = {
    "blocks of 128": (f"{UP}.{STATE}", other_state(blocksize=128), "is kept with another blocksize than NF4 in blocks of 64 is here"),
    "another table": (f"{UP}.quant_map", lambda values: values + 0.1, "is kept with another quant_map than NF4"),
    "no JSON": (f"{UP}.{STATE}", lambda state: state[:-3], f"{STATE} cannot be read"),
    "no shape": (f"{UP}.{STATE}", other_state(shape=None), f"{STATE} cannot be read"),
    "another shape": (f"{UP}.{STATE}", other_state(shape=[256, 64]), "does not fit the shape .256, 64. of its weight"),
    "scales cut": (f"{UP}.absmax", lambda codes: codes[:-1].clone(), "absmax does not fit the shape"),
    "no scales": (f"{UP}.absmax", lambda codes: None, "absmax does not fit the shape"),
    "no codes": (UP, lambda codes: None, "weight does not fit the shape"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_refused_by_name(tmp_path, what):
    save_nf4(quantized(), tmp_path)
    name, make, message = DAMAGE[what]
    change(tmp_path, name, make)
    with pytest.raises(PretrainedError, match=message):
        open_nf4(tmp_path)


def test_a_truncated_file_is_refused_in_a_sentence(tmp_path):
    save_nf4(quantized(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PretrainedError, match="is no complete safetensors file .* copy it again"):
        open_nf4(tmp_path)


def test_a_float_model_and_a_quantized_one_are_not_taken_for_each_other(tmp_path):
    save_pretrained(TransformerModel(SMALL), tmp_path / "float")
    with pytest.raises(PretrainedError, match="has no weights in NF4 .* open it with open_pretrained"):
        open_nf4(tmp_path / "float")
    save_nf4(quantized(), tmp_path / "four")
    with pytest.raises(PretrainedError, match="quantization_config"):
        open_pretrained(tmp_path / "four")


def test_only_a_quantized_model_without_adapters_is_written(tmp_path):
    for model in (TransformerModel(SMALL), attach_adapter(quantized(), AdapterConfig())):
        with pytest.raises(ValueError, match="Only a model whose base is in NF4 is saved here, without adapters"):
            save_nf4(model, tmp_path)


def test_formats_that_keep_weights_transposed_are_refused(tmp_path):
    biases = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
    gpt = {"position": "learned", "norm": "layer_norm", "hidden_act": "gelu_tanh", "gated": False, "tie_word_embeddings": True}
    model = TransformerModel(ModelConfig(31, 64, 1, 2, intermediate_size=128, **biases, **gpt))
    quantize_base(model)
    with pytest.raises(ValueError, match="holds several layers, or one transposed"):
        save_nf4(model, tmp_path)
