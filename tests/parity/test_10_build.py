"""Build 10 and peft: each loads the other's files with equal logits, and the oracle of the checks has peft's gradients."""

import json

import pytest
import torch

from shared.course import assignments, build_check
from shared.course.stubs import BodyFile

ENDINGS, R, ALPHA = ["q_proj", "down_proj", "lm_head"], 3, 5
IDS = torch.tensor([[1, 5, 9, 3], [7, 2, 8, 6]])
FILES = build_check.read_module(assignments.builds()["10.build"].folder / "files.py")


@pytest.fixture(scope="module")
def peft():
    import peft

    return peft


@pytest.fixture(scope="module")
def build():
    build = assignments.builds()["10.build"]
    return build_check.load(BodyFile.read(build.solution_file), build.adapters)


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes)).eval()


def fill(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in sorted(factors):
            factors[name].copy_(torch.randn(factors[name].shape, generator=generator))
    return factors


def by_peft(peft, rslora: bool, target_modules=ENDINGS) -> torch.nn.Module:
    given = {"r": R, "lora_alpha": ALPHA, "lora_dropout": 0.25, "use_rslora": rslora, "target_modules": target_modules}
    model = peft.get_peft_model(llama(), peft.LoraConfig(**given)).eval()
    factors = {name: each for name, each in model.named_parameters() if each.requires_grad}
    fill({name.removeprefix("base_model.model.").replace(".default.weight", ""): each for name, each in factors.items()})
    return model


@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rank-stabilized"])
def test_peft_loads_what_the_build_saves_with_equal_logits(peft, build, tmp_path, rslora):
    config = FILES.config_of(ENDINGS, r=R, alpha=ALPHA, dropout=0.25, rslora=rslora)
    adapted = build.attach(llama(), "default", config, 0)
    fill(build.factors(adapted, "default"))
    build.save(adapted, "default", tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    ours, theirs = build.run(adapted, IDS).logits, loaded(IDS).logits
    assert not torch.allclose(theirs, llama()(IDS).logits, atol=0.1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # float32
    build.merge(adapted)
    merged = loaded.merge_and_unload().state_dict()
    torch.testing.assert_close(build.weights(adapted), merged, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target_modules", [ENDINGS, r"model\.layers\.1\..*(q|down)_proj"], ids=["endings", "expression"])
def test_the_build_loads_what_peft_saves_and_has_its_logits_and_gradients(peft, build, tmp_path, target_modules):
    theirs = by_peft(peft, True, target_modules)
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)  # else it has the frozen head too, which is adapted
    adapted = build.load(llama(), "loaded", tmp_path)
    ours = build.run(adapted, IDS).logits
    expected = theirs(IDS).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    towards = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4))
    named = {name: each for name, each in theirs.named_parameters() if each.requires_grad}
    found = dict(zip(named, torch.autograd.grad(expected, list(named.values()), towards), strict=True))
    factors = build.factors(adapted, "loaded")
    for name, gradient in zip(factors, torch.autograd.grad(ours, list(factors.values()), towards), strict=True):
        torch.testing.assert_close(gradient, found[f"base_model.model.{name}.default.weight"], rtol=1e-4, atol=1e-5)


def test_the_oracle_has_pefts_outputs_and_gradients(peft):
    """In float64, on the model of the checks."""
    pieces, config = FILES, FILES.config_of(["q_proj", "out.proj"], r=3, alpha=5, rslora=True)
    layers = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("q_proj", "out.proj")]
    values = pieces.values_of(pieces.made(pieces.Net), layers, config)
    oracle, x = pieces.Dense(pieces.made(pieces.Net), config, values), pieces.randn(3, 5)
    model = peft.get_peft_model(pieces.made(pieces.Net), peft.LoraConfig(**config), autocast_adapter_dtype=False).double().eval()
    held = {name: model.get_submodule(f"base_model.model.{name}.default").weight for name in values}
    with torch.no_grad():
        for name, factor in held.items():
            factor.copy_(values[name])
    torch.testing.assert_close(pieces.answer(oracle.run(x), {}, oracle.factors), pieces.answer(model(x), {}, held), rtol=1e-12, atol=1e-12)


def test_what_the_checks_know_of_peft_is_what_peft_writes(peft, tmp_path):
    """The stored keys and values are of peft 0.21; `PEFT` misses none of those that peft writes."""
    by_peft(peft, False).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    known = FILES.PEFT | FILES.DEFAULTS | {"target_modules": []}
    assert set(written) == set(known)
    same = [name for name in FILES.PEFT if name not in FILES.MEANINGLESS]
    assert {name: written[name] for name in same} == {name: FILES.PEFT[name] for name in same}
    default = peft.LoraConfig()
    assert {name: getattr(default, name) for name in FILES.DEFAULTS} == FILES.DEFAULTS


@pytest.mark.parametrize("option", ["use_dora", "rank_pattern", "modules_to_save"])
def test_what_peft_saves_and_the_build_does_not_have_is_refused(peft, build, tmp_path, option):
    value = {"use_dora": True, "rank_pattern": {"q_proj": 4}, "modules_to_save": ["lm_head"]}[option]
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=R, target_modules=["q_proj"], **{option: value}))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=option):
        build.load(llama(), "loaded", tmp_path)
