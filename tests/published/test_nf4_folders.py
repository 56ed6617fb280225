"""4-bit folders as bitsandbytes writes them: with other storage, after a forward pass that repacked the weights, and in FP4."""

import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu, _convert_weight_packed_for_cpu_inverse
from safetensors import safe_open
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from shared.finetune.quantization.nf4_files import open_nf4
from shared.model.hf.files import PretrainedError
from shared.model.init import materialize
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.trainer.models import RUN_AXES
from shared.trainer.weights import frozen_files

SIZES = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
IDS = torch.arange(1, 17)[None]
UP = "model.layers.0.mlp.up_proj.weight"


def four_bit(tmp_path, **how):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.1)).save_pretrained(tmp_path / "base")
    config = BitsAndBytesConfig(load_in_4bit=True, **how)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map="cpu", dtype=torch.float32, quantization_config=config).eval()


def logits(folder) -> torch.Tensor:
    model = open_nf4(folder)
    materialize(model, "cpu", seed=0)
    with torch.no_grad():
        return model.eval()(IDS)


def repack(model) -> None:
    """What bitsandbytes does to each weight in the first forward pass on a CPU with AVX512-BF16, and back in `state_dict()`."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            packed, state = _convert_weight_packed_for_cpu(module.weight.data, module.weight.quant_state)
            module.weight.data, module.weight.quant_state = _convert_weight_packed_for_cpu_inverse(packed, state)


def stored(folder, name: str) -> tuple[list[int], str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()


def test_scales_that_a_forward_pass_left_transposed_are_those_of_the_same_blocks(tmp_path):
    model = four_bit(tmp_path, bnb_4bit_quant_type="nf4")
    wanted = model(IDS).logits.detach()
    repack(model)
    model.save_pretrained(tmp_path / "four")
    assert stored(tmp_path / "four", f"{UP}.absmax") == ([2, 256], "BF16")
    difference = (logits(tmp_path / "four") - wanted).abs().max() / wanted.abs().max()
    assert 0 < difference < 0.01  # the scales are rounded to bfloat16; those of other blocks are off by 0.4 and more


def test_ranks_read_their_slices_of_transposed_scales(tmp_path):
    model = four_bit(tmp_path, bnb_4bit_quant_type="nf4")
    repack(model)
    model.save_pretrained(tmp_path / "four")
    whole = open_nf4(tmp_path / "four")
    materialize(whole, "cpu", seed=0)

    def work(world):
        parallel = apply_parallel(open_nf4(tmp_path / "four"), Mesh(parse_layout("tp2"), world), axes=RUN_AXES)
        return {name: tensor for name, tensor in parallel.whole_weights() if tensor is not None}

    expected = dict(whole.named_parameters())
    for weights in run_threads(work, 2):
        assert all(tensor.equal(expected[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("storage", "number"), [("bfloat16", 2), ("float32", 4)])
def test_codes_that_are_stored_as_another_dtype_are_the_same_bytes(storage, number, double, tmp_path):
    model = four_bit(tmp_path, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=storage, bnb_4bit_use_double_quant=double)
    model.save_pretrained(tmp_path / "four")
    assert stored(tmp_path / "four", UP)[0] == [256 * 128 // 2 // number, 1]
    torch.testing.assert_close(logits(tmp_path / "four"), model(IDS).logits, rtol=0, atol=1e-5)


def test_fp4_is_refused_by_its_name(tmp_path):
    four_bit(tmp_path).save_pretrained(tmp_path / "four")
    with pytest.raises(PretrainedError, match="holds weights in FP4 .* bitsandbytes' default for load_in_4bit"):
        frozen_files(tmp_path / "four")
