"""Folders that transformers wrote or that something went wrong with: sharded, tied, old, damaged, incomplete, pickled."""

import json

import pytest
import torch
import transformers
from families import FAMILIES, inputs, make_oracle, oracle_logits, our_logits
from safetensors.torch import load_file, save_file

from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel, keep_part

TIED, UNTIED = FAMILIES["LLaMA 3.2 (llama3 RoPE, tied)"], FAMILIES["LLaMA 2 (GQA)"]


@pytest.fixture
def folder(tmp_path):
    make_oracle(UNTIED).save_pretrained(tmp_path)
    return tmp_path


def refusal(folder) -> str:
    with pytest.raises(PretrainedError) as caught:
        load_pretrained(folder)
    return str(caught.value)


def edit_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_sharded_files_of_transformers_load(tmp_path):
    oracle = make_oracle(TIED)
    oracle.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    given = inputs(TIED)
    difference = our_logits(TIED, load_pretrained(tmp_path).eval(), given) - oracle_logits(TIED, oracle, given)
    assert difference.abs().max() < 2e-5


def test_our_sharded_files_load_in_transformers_and_hold_a_tied_head_once(tmp_path):
    make_oracle(TIED).save_pretrained(tmp_path / "theirs")
    model = load_pretrained(tmp_path / "theirs").eval()
    save_pretrained(model, tmp_path / "ours", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(shards) == len(set(index["weight_map"].values())) > 3
    assert "lm_head.weight" not in index["weight_map"]
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())
    assert all(path.stat().st_size < 25_000 for path in shards)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    given = inputs(TIED)
    assert (oracle_logits(TIED, again, given) - our_logits(TIED, model, given)).abs().max() < 2e-5


def test_saving_over_another_model_leaves_none_of_its_files(tmp_path):
    make_oracle(UNTIED).save_pretrained(tmp_path, max_shard_size="20KB")
    model = load_pretrained(tmp_path)
    save_pretrained(model, tmp_path)
    assert {path.name for path in tmp_path.glob("*model*")} == {"model.safetensors"}
    for left, right in zip(model.parameters(), load_pretrained(tmp_path).parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_bfloat16_file_loads_in_the_dtype_that_is_asked_for(tmp_path):
    oracle = make_oracle(UNTIED).to(torch.bfloat16)
    oracle.save_pretrained(tmp_path)
    wide, half = load_pretrained(tmp_path), load_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = oracle.model.layers[1].mlp.up_proj.weight
    assert torch.equal(half.stack.blocks["1"].feed_forward.up_proj.weight, expected)
    assert torch.equal(wide.stack.blocks["1"].feed_forward.up_proj.weight, expected.float())


def test_old_files_of_the_bare_model_load(tmp_path):
    """GPT-2's first files: no `transformer.` before the names, and buffers of attention among the weights."""
    family = FAMILIES["GPT-2"]
    oracle = make_oracle(family)
    oracle.save_pretrained(tmp_path)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "model.safetensors")
    given = inputs(family)
    assert (our_logits(family, load_pretrained(tmp_path).eval(), given) - oracle_logits(family, oracle, given)).abs().max() < 2e-5


def test_berts_first_files_load(tmp_path):
    """Norms called gamma and beta, and the heads of another task beside the one that is ours."""
    family = FAMILIES["BERT (padding, segments)"]
    oracle = make_oracle(family)
    oracle.save_pretrained(tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        ending = next((ending for ending in old if name.endswith(ending)), "")
        tensors[name.removesuffix(ending) + old.get(ending, "")] = tensor
    others = {"bert.pooler.dense.weight": torch.ones(48, 48), "cls.seq_relationship.weight": torch.ones(2, 48)}
    save_file(tensors | others, tmp_path / "model.safetensors")
    given = inputs(family)
    difference = our_logits(family, load_pretrained(tmp_path).eval(), given) - oracle_logits(family, oracle, given)
    assert difference[given["valid"]].abs().max() < 2e-5


def test_the_keys_of_transformers_4_are_understood(tmp_path):
    make_oracle(TIED).save_pretrained(tmp_path)
    expected = load_pretrained(tmp_path).config
    path = tmp_path / "config.json"
    told = json.loads(path.read_text())
    said = told.pop("rope_parameters")
    told |= {"rope_theta": said.pop("rope_theta"), "rope_scaling": {"type": said.pop("rope_type")} | said, "torch_dtype": "float32"}
    path.write_text(json.dumps(told))
    assert load_pretrained(tmp_path).config == expected


def test_missing_extra_and_misshapen_tensors_are_named_together(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:90].clone()

    edit_tensors(folder, change)
    said = refusal(folder)
    assert "missing: model.norm.weight" in said
    assert "extra: model.layers.7.mlp.up_proj.weight" in said
    assert "misshapen: lm_head.weight is [90, 48], not [97, 48]" in said


def test_a_head_beside_the_embedding_that_it_is_tied_to_must_be_equal(tmp_path):
    make_oracle(TIED).save_pretrained(tmp_path)
    expected = load_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(load_pretrained(tmp_path).head.linear.weight, expected.head.linear.weight)
    edit_tensors(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert "lm_head.weight in the file is another matrix: set tie_word_embeddings to false" in refusal(tmp_path)


def test_a_long_list_of_missing_tensors_is_cut(folder):
    edit_config(folder, num_hidden_layers=9)
    assert "and 42 more" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known here. These are: gpt2, llama"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "yarn RoPE scaling with mscale"),
        ({"hidden_act": "xielu"}, "activation 'xielu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"num_key_value_heads": 4}, "not a multiple of num_key_value_heads"),
    ],
)
def test_a_config_that_asks_for_what_is_not_built_is_refused(folder, changes, said):
    edit_config(folder, **changes)
    assert said in refusal(folder)


def test_a_config_without_a_key_is_refused(folder):
    path = folder / "config.json"
    told = json.loads(path.read_text())
    del told["hidden_size"]
    path.write_text(json.dumps(told))
    assert "hidden_size is missing" in refusal(folder)


def test_damaged_and_absent_files_are_named(folder, tmp_path_factory):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "model.safetensors is no complete safetensors file" in refusal(folder)
    weights.write_bytes(b"")
    assert "is no complete safetensors file" in refusal(folder)
    weights.rename(folder / "pytorch_model.bin")
    assert "pickled weights (pytorch_model.bin)" in refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "has no weights" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)
    assert "is no folder" in refusal(folder / "nowhere")


def test_a_missing_shard_and_an_index_that_points_elsewhere_are_refused(tmp_path):
    make_oracle(UNTIED).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard.name} is missing" in refusal(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    assert "has no weight_map from tensors to files of this folder" in refusal(tmp_path)


def test_a_part_of_a_model_is_not_saved_as_a_whole(tmp_path):
    make_oracle(UNTIED).save_pretrained(tmp_path)
    part = keep_part(load_pretrained(tmp_path), range(1), embedding=True, head=False)
    with pytest.raises(ValueError, match="Only a whole model can be saved"):
        save_pretrained(part, tmp_path / "part")
    assert isinstance(part, TransformerModel) and not (tmp_path / "part").exists()
