"""Adapters in peft's format: peft reads ours and we read peft's, with equal logits; and adapters that are not for a model are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.finetune.adapters import (
    Adapter,
    LayerUpdate,
    add_updates,
    attach_adapter,
    base_model,
    detach_adapters,
    merge_adapter,
    target_modules,
    unmerge_adapter,
    use_adapters,
)
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_format import load_adapter, save_adapter
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained, open_pretrained, save_pretrained
from shared.model.init import materialize
from shared.model.transformer import TransformerModel

IDS = torch.arange(24).view(2, 12) % 29
SMALL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
LLAMA = SMALL | {"num_key_value_heads": 2, "intermediate_size": 24}
GPT2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
BLOOM = {"vocab_size": 31, "hidden_size": 16, "n_layer": 2, "n_head": 4}
ATTENTION = ["q_proj", "v_proj"]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
CASES = {  # family, its settings, the layers in peft's words and in ours, LoRA's settings
    "llama": ("Llama", LLAMA, ATTENTION, ATTENTION, {}),
    "qwen": ("Qwen2", LLAMA | {"tie_word_embeddings": True}, [*LINEAR, "embed_tokens", "lm_head"], [*LINEAR, "tokens", "head.linear"], {}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": None}, LINEAR, LINEAR, {"use_rslora": True}),
    "dora": ("Llama", LLAMA, LINEAR, LINEAR, {"use_dora": True}),
    "embedding": ("Llama", LLAMA, ["embed_tokens", "lm_head"], ["embedding.tokens", "head.linear"], {}),
    "gpt2": ("GPT2", GPT2, ["c_attn", "attn.c_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], {}),
    "gpt2_dora": ("GPT2", GPT2, ["c_attn", "mlp.c_proj"], ["q_proj", "k_proj", "v_proj", "down_proj"], {"use_dora": True}),
    "bloom": ("Bloom", BLOOM, ["query_key_value"], ATTENTION, {"use_rslora": True}),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4}, ATTENTION, ATTENTION, {}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folder of a small random model of each family, written by transformers."""
    import transformers

    folders = {}
    for name, (family, settings, *_) in CASES.items():
        torch.manual_seed(1)
        config = getattr(transformers, f"{family}Config")(**settings, initializer_range=0.3)
        classes = {"GPT2": "GPT2LMHeadModel"}
        folders[name] = tmp_path_factory.mktemp(name)
        getattr(transformers, classes.get(family, f"{family}ForCausalLM"))(config).save_pretrained(folders[name])
    return folders


def of_transformers(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ours(folder: Path):
    from shared.moe.builders import MIXTURE

    return load_pretrained(folder, builders=MIXTURE).eval()


def randomize(model: torch.nn.Module) -> None:
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "adapters." in name:
            parameter.data.add_(0.2 * torch.randn_like(parameter))


def adapter_of(case: str) -> AdapterConfig:
    *_, targets, settings = CASES[case]
    asked = {"decomposed": settings.get("use_dora", False), "rank_stabilized": settings.get("use_rslora", False)}
    return AdapterConfig(rank=3, alpha=5.0, targets=tuple(targets), **asked)


def close(found, expected) -> None:
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def merges_exactly(model: TransformerModel, expected: torch.Tensor, folder: Path) -> None:
    """Merged, unmerged to the same bits, merged again and saved for transformers: logits stay as expected."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merge_adapter(model)
    close(model(IDS), expected)
    unmerge_adapter(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    merge_adapter(model)
    detach_adapters(model)
    save_pretrained(model, folder)
    close(of_transformers(folder)(IDS).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_ours(case, bases, tmp_path):
    from peft import PeftModel

    model = attach_adapter(ours(bases[case]), adapter_of(case))
    plain = of_transformers(bases[case])(IDS).logits
    close(model(IDS), plain)  # B = 0 changes nothing
    randomize(model)
    save_adapter(model, tmp_path / "adapter", base=str(bases[case]))
    theirs = PeftModel.from_pretrained(of_transformers(bases[case]), tmp_path / "adapter")
    close(model(IDS), theirs(IDS).logits)
    assert (model(IDS) - plain).abs().max() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_we_load_pefts_and_the_merged_model_is_the_same(case, bases, tmp_path):
    from peft import LoraConfig, get_peft_model

    _, _, targets, _, settings = CASES[case]
    theirs = get_peft_model(of_transformers(bases[case]), LoraConfig(r=3, lora_alpha=5, target_modules=targets, **settings)).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)
    expected = theirs(IDS).logits
    model = load_adapter(ours(bases[case]), tmp_path)
    close(model(IDS), expected)
    with base_model(model):
        close(model(IDS), of_transformers(bases[case])(IDS).logits)
    if case == "qwen":  # tied: merged, the embedding's update would be the head's too
        with pytest.raises(ValueError, match="cannot be merged"):
            merge_adapter(model)
        return
    merges_exactly(model, expected, tmp_path / "merged")


@torch.no_grad()
def test_an_adapter_comes_onto_a_model_on_the_meta_device(bases, tmp_path):
    model = attach_adapter(ours(bases["dora"]), adapter_of("dora"), seed=3)
    randomize(model)
    save_adapter(model, tmp_path)
    again = load_adapter(open_pretrained(bases["dora"]), tmp_path)
    materialize(again, "cpu", seed=0)
    assert torch.equal(again(IDS), model(IDS))
    fresh, meta = attach_adapter(ours(bases["dora"]), adapter_of("dora"), seed=3), open_pretrained(bases["dora"])
    materialize(attach_adapter(meta, adapter_of("dora"), seed=3), "cpu", seed=9)
    assert all(torch.equal(value, meta.state_dict()[name]) for name, value in fresh.state_dict().items())


@torch.no_grad()
def test_initial_values_are_distributed_as_pefts(bases):
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(of_transformers(bases["llama"]), LoraConfig(r=64, target_modules=["q_proj", "embed_tokens"])).state_dict()
    base, config = ours(bases["llama"]), AdapterConfig(rank=64, targets=("q_proj", "embedding.tokens"))
    layers = {name: LayerUpdate(config.rank, config.scaling) for name in target_modules(base, config.targets)}
    model = add_updates(base, Adapter(config, layers)).state_dict()  # attach_adapter refuses a rank above 16 here: many values are wanted
    values = lambda state, part: torch.cat([value.flatten() for name, value in state.items() if part in name])  # noqa: E731
    for here, there in (("q_proj.adapters.default.lora_A", "q_proj.lora_A"), ("tokens.adapters.default.lora_B", "lora_embedding_B")):
        found, expected = values(model, here), values(theirs, there)
        assert len(found) == len(expected) and abs(found.std() / expected.std() - 1) < 0.1 and abs(found.mean()) < 0.1 * expected.std()
    assert values(model, "q_proj.adapters.default.lora_A").abs().max() <= 16**-0.5
    assert not values(model, "q_proj.adapters.default.lora_B").any() and not values(model, "tokens.adapters.default.lora_A").any()


def test_adapters_that_are_not_for_a_model_are_refused_in_a_sentence(bases, tmp_path):
    good = tmp_path / "good"
    model = attach_adapter(ours(bases["llama"]), adapter_of("llama"))
    save_adapter(model, good, base="bases/this", fingerprint="1234")
    for changes, match in [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 0}, "rank is 0"),
        ({"lora_alpha": None}, "does not say what an adapter needs"),
    ]:
        bad = tmp_path / "bad"
        bad.mkdir(exist_ok=True)
        (bad / "adapter_model.safetensors").write_bytes((good / "adapter_model.safetensors").read_bytes())
        (bad / "adapter_config.json").write_text(json.dumps(json.loads((good / "adapter_config.json").read_text()) | changes))
        with pytest.raises(ValueError, match=match):
            load_adapter(ours(bases["llama"]), bad)
    with pytest.raises(PretrainedError, match="for another model: no layer of it has base_model"):
        load_adapter(ours(bases["bloom"]), good)
    with pytest.raises(PretrainedError, match=r"for another model: model.layers.0.self_attn.q_proj has .* would fit this model"):
        load_adapter(TransformerModel(replace(model.config, hidden_size=32, head_dim=4)), good)
    with pytest.raises(PretrainedError, match="trained for other weights"):
        load_adapter(ours(bases["llama"]), good, base="elsewhere/this", fingerprint="9")
    with pytest.raises(PretrainedError, match="trained for bases/this, and the base is that"):
        load_adapter(ours(bases["llama"]), good, base="that")
    (good / "adapter_model.safetensors").write_bytes((good / "adapter_model.safetensors").read_bytes()[:-9])
    with pytest.raises(PretrainedError, match="no complete safetensors file"):
        load_adapter(ours(bases["llama"]), good)


@pytest.mark.parametrize(
    "settings", [{"lora_dropout": 0.3}, {"use_dora": True}, {"use_rslora": True}, {"use_dora": True, "lora_dropout": 0.3}]
)
def test_gradients_and_dropout_masks_are_pefts(settings, bases, tmp_path):
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(of_transformers(bases["llama"]), LoraConfig(r=3, lora_alpha=5, target_modules=ATTENTION, **settings)).train()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    model = load_adapter(ours(bases["llama"]), tmp_path).train().double()
    theirs.double()
    torch.manual_seed(4)
    theirs(IDS).logits.square().sum().backward()
    torch.manual_seed(4)
    model(IDS).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(found) == len(gradients) and not any(parameter.grad is not None for parameter in model.embedding.parameters())
    for layer, projection in ((0, "q_proj"), (0, "v_proj"), (1, "q_proj"), (1, "v_proj")):
        for what, suffix in (("lora_A", ".weight"), ("lora_B", ".weight"), ("magnitude", ".weight")):
            their_name = f"base_model.model.model.layers.{layer}.self_attn.{projection}.{what.replace('mag', 'lora_mag')}"
            their_name += ("_vector" if what == "magnitude" else "") + f".default{suffix}"
            if their_name in gradients:
                expected = gradients[their_name]
                difference = found[f"stack.blocks.{layer}.attention.{projection}.adapters.default.{what}"] - expected
                assert difference.norm() <= 2e-6 * expected.norm()
                del gradients[their_name]
    assert not gradients


@torch.no_grad()
def test_several_adapters_take_part_on_one_base_or_one_or_none(bases, tmp_path):
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(of_transformers(bases["llama"]), LoraConfig(r=3, target_modules=ATTENTION), "one").eval()
    theirs.add_adapter("two", LoraConfig(r=2, lora_alpha=7, target_modules=LINEAR))
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    theirs.double()  # in float32, products of some CPUs round by as much as is compared
    model = load_adapter(load_adapter(ours(bases["llama"]), tmp_path / "one", "one"), tmp_path / "two", "two").double()
    for names in (["one"], ["two"], ["one", "two"]):
        use_adapters(model, names)
        theirs.base_model.set_adapter(names)
        expected = theirs(IDS).logits
        close(model(IDS), expected)
        merge_adapter(model)
        close(model(IDS), expected)
        unmerge_adapter(model)
    use_adapters(model, [])
    close(model(IDS), of_transformers(bases["llama"]).double()(IDS).logits)
    with pytest.raises(ValueError, match=r"no adapter 'three': it has \['one', 'two'\]"):
        use_adapters(model, ["three"])


def test_targets_that_a_model_does_not_have_are_refused_by_name(bases):
    for settings, match in [
        ({"targets": ("q_porj",)}, r"no layer has a name like 'q_porj'. Did you mean 'q_proj'\? Their names end in"),
        ({"targets": ("embedding.tokens",), "decomposed": True}, "embedding.tokens is an embedding"),
        ({"targets": ("v_proj",), "rank": 9}, "rank is 9, and the weight of .*v_proj is 8 x 16: give at most 8, or do not"),
        ({"targets": ("final_norm",)}, "no layer has a name like 'final_norm'"),
    ]:
        with pytest.raises(ValueError, match=match):
            attach_adapter(ours(bases["llama"]), AdapterConfig(**settings))
    model = attach_adapter(ours(bases["llama"]), AdapterConfig())
    with pytest.raises(ValueError, match="'default' cannot name another adapter"):
        attach_adapter(model, AdapterConfig())


def test_equal_adapters_are_equal_files(tmp_path):
    model = attach_adapter(TransformerModel(ModelConfig(**LLAMA), seed=0), AdapterConfig(rank=2, targets=("all-linear",)))
    for number in range(12):  # the safetensors library would write its metadata in either order
        save_adapter(model, tmp_path / str(number), fingerprint="abc")
    assert len({path.read_bytes() for path in tmp_path.glob("*/adapter_model.safetensors")}) == 1
