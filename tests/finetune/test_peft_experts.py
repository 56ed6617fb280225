"""Updates of experts in peft's format (`target_parameters`): peft reads ours and we read peft's, with equal logits and gradients."""

import json

import pytest
import torch
from test_peft_format import IDS, LLAMA, close, merges_exactly, of_transformers, ours, randomize

from shared.finetune.adapters import attach_adapter
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_format import load_adapter, save_adapter
from shared.model.hf.files import PretrainedError

NARROW = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 2},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 4} | NARROW,
    "Dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1} | NARROW,
}
UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
TARGETS = {  # in our words and in peft's
    "all": (["q_proj", "experts.*_proj"], ["q_proj"], [UP, DOWN]),
    "experts": (["experts.*_proj"], None, [UP, DOWN]),
    "down": (["v_proj", "experts.down_proj"], ["v_proj"], [DOWN]),
    "up": (["experts.up_proj"], None, [UP]),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folder of a small random model of each family, written by transformers."""
    import transformers

    folders = {}
    for family, settings in FAMILIES.items():
        torch.manual_seed(1)
        config = getattr(transformers, f"{family}Config")(**LLAMA | settings, initializer_range=0.3)
        folders[family] = tmp_path_factory.mktemp(family)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folders[family])
    return folders


def of_peft(folder, targets: str, **settings) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    _, modules, parameters = TARGETS[targets]
    ranks = {"rank_pattern": {UP: 3}, "alpha_pattern": {UP: 9}}
    config = LoraConfig(r=2, lora_alpha=5, target_modules=modules, target_parameters=parameters, **ranks | settings)
    theirs = get_peft_model(of_transformers(folder), config).eval()
    randomize(theirs)
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_ours(family, targets, bases, tmp_path):
    from peft import PeftModel

    model = attach_adapter(ours(bases[family]), AdapterConfig(rank=3, alpha=5.0, targets=tuple(TARGETS[targets][0])))
    plain = of_transformers(bases[family])(IDS).logits
    close(model(IDS), plain)  # B = 0 changes nothing
    randomize(model)
    save_adapter(model, tmp_path, base=str(bases[family]))
    theirs = PeftModel.from_pretrained(of_transformers(bases[family]), tmp_path)
    close(model(IDS), theirs(IDS).logits)
    close(load_adapter(ours(bases[family]), tmp_path)(IDS), model(IDS))
    assert (model(IDS) - plain).norm() > 0.02 * plain.norm()


@torch.no_grad()
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_we_load_pefts_and_the_merged_model_is_the_same(family, targets, bases, tmp_path):
    theirs = of_peft(bases[family], targets)
    theirs.save_pretrained(tmp_path)
    expected = theirs(IDS).logits
    model = load_adapter(ours(bases[family]), tmp_path)
    close(model(IDS), expected)
    merges_exactly(model, expected, tmp_path / "merged")


@pytest.mark.parametrize("rslora", [False, True])
def test_gradients_are_pefts(rslora, bases, tmp_path):
    """Each of our gates and ups has the whole A of peft's one parameter, so their gradients add up to its gradient."""
    theirs = of_peft(bases["Mixtral"], "all", use_rslora=rslora)
    theirs.save_pretrained(tmp_path)
    model = load_adapter(ours(bases["Mixtral"]), tmp_path).double()
    theirs.base_model.model.set_experts_implementation("eager")  # their grouped product has no float64
    theirs.double()(IDS).logits.square().sum().backward()
    model(IDS).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    for layer in range(2):
        factor = theirs.get_submodule(f"base_model.model.model.layers.{layer}.mlp.experts")
        for wrapper, names in ((factor, ("down_proj",)), (factor.base_layer, ("gate_proj", "up_proj"))):
            of_a, of_b = (part["default"].weight.grad for part in (wrapper.lora_A, wrapper.lora_B))
            mine = [[found[f"stack.blocks.{layer}.feed_forward.experts.{name}.adapters.default.{what}"] for name in names]
                    for what in ("lora_A", "lora_B")]  # fmt: skip
            expected = of_a.view(4, -1, of_a.shape[1]), of_b.view(len(of_b), -1, 4).permute(2, 0, 1)
            for ours_, theirs_ in zip((sum(mine[0]), torch.cat(mine[1], dim=1)), expected, strict=True):
                assert theirs_.norm() > 0 and (ours_ - theirs_).norm() <= 2e-6 * theirs_.norm()  # their norms are float32


def test_initial_values_are_distributed_as_pefts(bases):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=12, target_modules=None, target_parameters=[UP, DOWN])
    theirs = get_peft_model(of_transformers(bases["Mixtral"]), config).state_dict()
    model = attach_adapter(ours(bases["Mixtral"]), AdapterConfig(rank=12, targets=("experts.*_proj",))).state_dict()

    def values(state: dict, *parts: str) -> torch.Tensor:
        return torch.cat([value.flatten() for name, value in state.items() if all(part in name for part in parts)])

    for name, inside, inputs in (("down_proj", "experts.lora", 24), ("up_proj", "base_layer.lora", 16)):
        mine, expected = values(model, f"{name}.", "lora_A"), values(theirs, inside, "lora_A")
        assert mine.abs().max() <= inputs**-0.5 and expected.abs().max() <= inputs**-0.5
        assert len(mine) == len(expected) and abs(mine.std() / expected.std() - 1) < 0.05
        assert not values(model, f"{name}.", "lora_B").any() and not values(theirs, inside, "lora_B").any()


def test_what_peft_cannot_say_or_we_cannot_read_is_refused_in_a_sentence(bases, tmp_path):
    model = attach_adapter(ours(bases["Mixtral"]), AdapterConfig(targets=("experts.down_proj",), dropout=0.1))
    with pytest.raises(ValueError, match=r"adapter.dropout is 0.1, and peft has none over experts: give 0, or do not target them"):
        save_adapter(model, tmp_path)
    model = attach_adapter(ours(bases["Mixtral"]), AdapterConfig(rank=2, targets=("experts.down_proj",)))
    save_adapter(model, tmp_path)
    with pytest.raises(PretrainedError, match=r"for another model: model.layers.1.mlp.experts.down_proj has .* would fit this model"):
        load_adapter(ours(bases["Dots1"]), tmp_path)  # whose experts are narrower
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    assert told["target_modules"] is None and told["target_parameters"] == [f"model.layers.{n}.mlp.experts.down_proj" for n in range(2)]
    for parameters in (["q_proj.weight"], ["experts.up_proj"]):
        (tmp_path / "adapter_config.json").write_text(json.dumps(told | {"target_parameters": parameters}))
        with pytest.raises(PretrainedError, match="for another model: no layer of it has"):
            load_adapter(ours(bases["Mixtral"]), tmp_path)
