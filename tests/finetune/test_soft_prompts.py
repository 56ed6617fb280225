"""Prompt and prefix tuning: peft's logits, peft's files, packed rows, and the same training in every layout."""

import copy

import pytest
import torch
from peft_base import OurModelForPeft

from shared.course.errors import SettingError
from shared.data.packing import pack_documents
from shared.finetune import soft_prompts
from shared.finetune.adapters import attach_adapter
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_format import load_adapter, save_adapter
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import load_pretrained
from shared.model.transformer import TransformerModel
from shared.sampling import generate

N = 3
TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = ["prompt", "prefix"]


def config_of(kind: str) -> AdapterConfig:
    return AdapterConfig(kind=kind, virtual_tokens=N)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A LLaMA with random weights, in a folder that transformers wrote, and in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return folder, theirs


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_peft(kind, base):
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    folder, _ = base
    from transformers import AutoModelForCausalLM

    config = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}[kind](task_type="CAUSAL_LM", num_virtual_tokens=N)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).eval()
    with torch.no_grad():
        theirs.prompt_encoder["default"].embedding.weight.normal_()
    table = theirs.prompt_encoder["default"].embedding.weight.detach()
    ours = load_pretrained(folder).eval()
    soft_prompts.attach_soft_prompt(ours, config_of(kind))
    trained = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    loaded = soft_prompts.from_peft(table, {name: parameter.shape for name, parameter in trained.items()})
    for name, parameter in trained.items():
        parameter.data.copy_(loaded[name])
    assert torch.equal(soft_prompts.to_peft({name: p.detach() for name, p in trained.items()}, N), table)
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(1))
    virtual = torch.tensor([soft_prompts.virtual_ids(ours)] * 2)
    with torch.no_grad():
        wanted = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -11:]
        found = ours(torch.cat([virtual, ids], dim=1))[:, N:]
        theirs_alone, ours_alone = AutoModelForCausalLM.from_pretrained(folder)(ids).logits, load_pretrained(folder).eval()(ids)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    # The two programs add numbers up in another order without virtual tokens too; these must add nothing to that.
    assert (found - wanted).abs().max() <= 4 * (ours_alone - theirs_alone).abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_over_the_same_model_pefts_logits_are_ours_bit_for_bit(kind):
    """peft's virtual tokens before our own model: what remains of the distance to peft is the distance to transformers' model."""
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    base = TransformerModel(ModelConfig(**TINY)).eval()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.normal_(std=0.3)
    ours = attach_adapter(copy.deepcopy(base), config_of(kind), seed=2).eval()
    heads, width = (4, 64) if kind == "prompt" else (2, 32)  # peft asks for the keys' and values', where they are fewer
    config = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}[kind](
        task_type="CAUSAL_LM", num_virtual_tokens=N, num_layers=2, token_dim=width, num_attention_heads=heads
    )
    theirs = get_peft_model(OurModelForPeft(base), config).eval()
    trained = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        theirs.prompt_encoder["default"].embedding.weight.copy_(soft_prompts.to_peft(trained, N))
        ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(1))
        wanted = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -11:]
        found = ours(torch.cat([torch.tensor([soft_prompts.virtual_ids(ours)] * 2), ids], dim=1))[:, N:]
        assert torch.equal(found, wanted) and not torch.allclose(base(ids), wanted, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_our_folders_and_we_load_pefts(kind, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, _ = base
    ours = attach_adapter(load_pretrained(folder).eval(), config_of(kind), seed=2)
    save_adapter(ours, tmp_path / "ours", base=str(folder))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "ours").eval()
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_pretrained(folder).eval()
    load_adapter(back, tmp_path / "theirs")
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -11:]
        for model in (ours, back):
            virtual = torch.tensor([soft_prompts.virtual_ids(model)] * 2)
            torch.testing.assert_close(model(torch.cat([virtual, ids], dim=1))[:, N:], wanted, rtol=0, atol=2e-5)


def packed(model: TransformerModel, texts: list[torch.Tensor], seq: int) -> dict:
    virtual = torch.tensor(soft_prompts.virtual_ids(model))
    row = pack_documents([torch.cat([virtual, text]) for text in texts], seq)
    row["targets"] = row["targets"].masked_fill(row["positions"] < N - 1, -100)  # the last virtual token predicts the first of the text
    row["targets"] = row["targets"].masked_fill(row["targets"] >= 97, -100)
    return {name: value.unsqueeze(0) for name, value in row.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_examples_each_have_the_virtual_tokens(kind):
    model = TransformerModel(ModelConfig(**TINY)).double()
    soft_prompts.attach_soft_prompt(model, config_of(kind))
    texts = [torch.arange(5) + 3, torch.arange(7) + 40]
    together = packed_next_token_objective(model, packed(model, texts, 24))
    apart = [packed_next_token_objective(model, packed(model, [text], 24)) for text in texts]
    torch.testing.assert_close(together.loss_sum, sum(each.loss_sum for each in apart))
    assert together.token_count == sum(each.token_count for each in apart) == 5 + 7


@pytest.mark.parametrize("kind", KINDS)
def test_only_virtual_tokens_are_trained_and_all_of_them_matter(kind):
    model = TransformerModel(ModelConfig(**TINY)).double()
    soft_prompts.attach_soft_prompt(model, config_of(kind))
    packed_next_token_objective(model, packed(model, [torch.arange(9)], 16)).loss_sum.backward()
    for name, parameter in model.named_parameters():
        is_soft = f".{kind}." in name
        assert parameter.requires_grad == is_soft
        assert not is_soft or (parameter.grad.flatten(1).norm(dim=1) > 0).all()


def test_generation_keeps_the_virtual_tokens_in_front():
    model = TransformerModel(ModelConfig(**TINY)).eval()
    soft_prompts.attach_soft_prompt(model, config_of("prompt"))
    prompt = torch.tensor([[*soft_prompts.virtual_ids(model), 5, 6]])
    drawn = [int(token) for token in generate(model, prompt, 4, context=32, temperature=0.0)]
    assert all(0 <= token < 97 for token in drawn) and len(drawn) == 4


def test_initial_values_do_not_depend_on_the_device_of_the_model():
    whole = TransformerModel(ModelConfig(**TINY))
    soft_prompts.attach_soft_prompt(whole, config_of("prefix"), seed=4)
    with torch.device("meta"):
        later = TransformerModel(ModelConfig(**TINY))
    soft_prompts.attach_soft_prompt(later, config_of("prefix"), seed=4)
    from shared.model.init import materialize

    materialize(later, "cpu", 4)
    name = "stack.blocks.1.attention.prefix.weight"
    assert torch.equal(whole.get_parameter(name), later.get_parameter(name)) and whole.get_parameter(name).std() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_for_another_model_is_refused(kind):
    model = TransformerModel(ModelConfig(**TINY))
    soft_prompts.attach_soft_prompt(model, config_of(kind))
    names = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}
    with pytest.raises(SettingError, match="trained for another model"):
        soft_prompts.from_peft(torch.zeros(N, 65), names)


def test_encoders_are_refused():
    with pytest.raises(SettingError, match="is for decoders"):
        soft_prompts.attach_soft_prompt(TransformerModel(ModelConfig(**TINY | {"architecture": "encoder"})), config_of("prompt"))
