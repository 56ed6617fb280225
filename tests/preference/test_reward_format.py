"""Reward models in transformers' format of sequence classification: logits of right-padded batches, in both directions, every family."""

import pytest
import torch
import transformers
from families import GPT2, LLAMA, VOCAB

from shared.course.errors import SettingError
from shared.finetune.adapters import attach_adapter
from shared.finetune.base import merged_weights
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_format import load_adapter, save_adapter
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.preference.reward_model import as_reward_model, load_reward_model, open_reward_model, score
from shared.trainer.models import RUN_AXES

PAD = 3
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "Llama": LLAMA,
    "Llama tied": LLAMA | {"tie_word_embeddings": True},
    "GPT2": GPT2,
    "Qwen2": LLAMA,
    "Qwen3": LLAMA | {"head_dim": 8},
    "Mistral": LLAMA | {"sliding_window": 7},
    "Mixtral": LLAMA | {"num_local_experts": 4, "intermediate_size": 40},
    "Qwen3Moe": LLAMA | EXPERTS | {"head_dim": 8},
    "Bloom": {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4},
}
SEQUENCES = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31], [40]]


def oracle(family: str) -> transformers.PreTrainedModel:
    name = family.split()[0]
    config = getattr(transformers, f"{name}Config")(**FAMILIES[family], num_labels=1, pad_token_id=PAD, initializer_range=0.2)
    torch.manual_seed(1)
    return getattr(transformers, f"{name}ForSequenceClassification")(config).eval()


@torch.no_grad()
def their_rewards(model: transformers.PreTrainedModel) -> torch.Tensor:
    ids = torch.full((len(SEQUENCES), max(map(len, SEQUENCES))), PAD)
    for row, each in zip(ids, SEQUENCES, strict=True):
        row[: len(each)] = torch.tensor(each)
    return model(ids, attention_mask=(ids != PAD).long()).logits.squeeze(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_rewards_equal_transformers_in_both_directions(family, tmp_path):
    theirs = oracle(family)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = their_rewards(theirs)
    assert expected.std() > 0.1, "rewards this close would hide differences"
    ours = load_reward_model(tmp_path / "theirs", builders=MIXTURE)
    torch.testing.assert_close(torch.tensor(score(ours, SEQUENCES, 3)), expected, rtol=0, atol=1e-5)
    save_pretrained(ours, tmp_path / "ours")
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    assert type(back) is type(theirs) and back.config.num_labels == 1
    assert not set(back.state_dict()) ^ set(theirs.state_dict())
    torch.testing.assert_close(their_rewards(back), expected, rtol=0, atol=1e-5)


def small() -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, initializer_range=0.2,
        tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_gives_a_new_head_and_a_warning(tied, tmp_path):
    oracle_config = transformers.LlamaConfig(**LLAMA | {"tie_word_embeddings": tied})
    transformers.LlamaForCausalLM(oracle_config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"no score.weight.*its reward head is new"):
        model = load_reward_model(tmp_path, seed=4)
    plain = as_reward_model(load_pretrained(tmp_path), seed=4)
    assert torch.equal(model.head.weight, plain.head.weight) and model.head.weight.any()
    assert score(model, SEQUENCES) == score(plain, SEQUENCES)
    with pytest.warns(UserWarning):
        assert not torch.equal(load_reward_model(tmp_path, seed=5).head.weight, model.head.weight)


@pytest.mark.parametrize("layout", ["tp2_sp", "fsdp2", "pp2"])
def test_any_layout_reads_and_writes_the_files(layout, tmp_path):
    whole = as_reward_model(TransformerModel(small(), seed=1), seed=2)
    save_pretrained(whole, tmp_path / "whole")

    def on_rank(world):
        strategy = apply_parallel(open_reward_model(tmp_path / "whole"), Mesh(parse_layout(layout), world), axes=RUN_AXES)
        save_pretrained(strategy.module, tmp_path / layout, weights=strategy.weights())
        return score(strategy.model, SEQUENCES)

    expected = torch.tensor(score(whole, SEQUENCES))
    for found in run_threads(on_rank, 2):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-6)
    assert score(load_reward_model(tmp_path / layout), SEQUENCES) == score(whole, SEQUENCES)


def with_adapter(folder, seed: int) -> TransformerModel:
    """LoRA on a reward model's base, with values that are no longer the initial ones, and a head of its own."""
    model = as_reward_model(attach_adapter(load_reward_model(folder), AdapterConfig(rank=2, targets=("q_proj", "down_proj"))), seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert ".adapters." in name or name == "head.weight"
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_an_adapter_and_its_head_are_one_file_for_peft_in_both_directions(family, tmp_path):
    import peft

    oracle(family).save_pretrained(tmp_path / "base")
    ours = with_adapter(tmp_path / "base", seed=7)
    save_adapter(ours, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(oracle(family), tmp_path / "adapter").eval()
    assert theirs.peft_config["default"].task_type == "SEQ_CLS"
    expected = their_rewards(theirs)
    torch.testing.assert_close(torch.tensor(score(ours, SEQUENCES)), expected, rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "back")
    back = load_adapter(load_reward_model(tmp_path / "base"), tmp_path / "back")
    torch.testing.assert_close(torch.tensor(score(back, SEQUENCES)), expected, rtol=0, atol=1e-5)
    assert back.head.weight.requires_grad and not back.embedding.tokens.weight.requires_grad
    save_pretrained(ours, tmp_path / "merged", weights=merged_weights(ours))
    torch.testing.assert_close(torch.tensor(score(load_reward_model(tmp_path / "merged"), SEQUENCES)), expected, rtol=0, atol=1e-5)


def test_a_reward_models_adapter_is_not_for_a_language_model(tmp_path):
    oracle("Llama").save_pretrained(tmp_path / "base")
    save_adapter(with_adapter(tmp_path / "base", seed=7), tmp_path / "adapter")
    plain = TransformerModel(ModelConfig(**{key: LLAMA[key] for key in LLAMA if key != "rms_norm_eps"}))
    with pytest.raises(PretrainedError, match=r"has modules_to_save \['score'\], which is not built here"):
        load_adapter(plain, tmp_path / "adapter")


def test_an_adapter_without_a_head_on_a_reward_model_says_whose_head_stays(tmp_path):
    oracle("Llama").save_pretrained(tmp_path / "base")
    plain = TransformerModel(ModelConfig(**{key: LLAMA[key] for key in LLAMA if key != "rms_norm_eps"}))
    save_adapter(attach_adapter(plain, AdapterConfig(rank=4), seed=7), tmp_path / "adapter")
    with pytest.warns(UserWarning, match="has no score: the model's own stays"):
        load_adapter(load_reward_model(tmp_path / "base"), tmp_path / "adapter")


def test_what_is_no_reward_model_is_refused(tmp_path):
    config = transformers.LlamaConfig(**LLAMA, num_labels=2, pad_token_id=PAD)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(PretrainedError, match=r"misshapen: score.weight is \[2, 48\], not \[1, 48\]"):
        load_reward_model(tmp_path)
    encoder = TransformerModel(ModelConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, architecture="encoder"))
    with pytest.raises(SettingError, match="A reward model is a decoder, and model.architecture is encoder"):
        as_reward_model(encoder)
