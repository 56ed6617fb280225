"""Every family against transformers, in both directions: logits, loss, and every gradient by name.

Tolerance: both sides compute in float32 with other groupings of the same sums. Logits of size 3 to 5 behind three blocks then
agree to a few 1e-6; 2e-5 leaves room for other processors, and each broken rule below moves them by more than 4e-4.
"""

import pytest
import torch
import transformers
from families import BATCH, FAMILIES, SEQ, VOCAB, compare, inputs, make_oracle, oracle_logits, our_logits
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shared.model.config import ModelConfig, RopeScaling
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.hf.registry import write_config
from shared.model.masks import Documents, Padding
from shared.model.rope import rope_frequencies
from shared.model.transformer import TransformerModel

LOGITS, GRADIENTS = 2e-5, 5e-5
by_family = pytest.mark.parametrize("name", FAMILIES)


@by_family
def test_a_family_agrees_in_both_directions(name, tmp_path):
    found = compare(FAMILIES[name], tmp_path)
    assert found.size > 0.3, "logits this small would hide differences"
    assert found.imported <= LOGITS and found.exported <= LOGITS, found
    assert found.loss <= 1e-6 and found.gradients <= GRADIENTS, found


def drop_bias(model):
    model.stack.blocks["1"].attention.q_proj.bias.data.zero_()


def other_gelu(model):
    from shared.model.feed_forward import ACTIVATIONS

    for block in model.stack.blocks.values():
        block.feed_forward.activation = ACTIVATIONS["gelu"]


def interleaved(model):
    """Meta's order of the rows, as if the file had not been converted."""
    for block in model.stack.blocks.values():
        for projection in (block.attention.q_proj, block.attention.k_proj):
            heads = projection.weight.data.unflatten(0, (-1, block.attention.head_dim // 2, 2))
            projection.weight.data = heads.transpose(1, 2).flatten(0, 2)


def swap_norms(model):
    block = model.stack.blocks["0"]
    block.attention_norm, block.feed_forward_norm = block.feed_forward_norm, block.attention_norm


def wider_window(model):
    model.stack.config = type(model.config)(**{**vars(model.config), "sliding_window": 6})


def scores_scaled(model):
    for block in model.stack.blocks.values():
        block.attention.scale = 0.25


def no_slopes(model):
    model.stack.position_bias = lambda queries, keys: None


def unnormalised_heads(model):
    for block in model.stack.blocks.values():
        block.attention.q_norm = block.attention.k_norm = None


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("GPT-2", drop_bias), ("GPT-2", other_gelu), ("LLaMA 2 (GQA)", interleaved), ("LLaMA 2 (GQA)", swap_norms),
        ("Mistral (window 5)", wider_window), ("Qwen 2", drop_bias), ("Qwen 3", unnormalised_heads),
        ("BERT (padding, segments)", swap_norms), ("T5 (ReLU, tied)", scores_scaled), ("BLOOM (ALiBi)", no_slopes),
    ],
)  # fmt: skip
def test_a_broken_rule_is_noticed(name, spoil, tmp_path):
    family = FAMILIES[name]
    oracle, given = make_oracle(family), inputs(family)
    oracle.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path).eval()
    spoil(model)
    with torch.no_grad():
        difference = (our_logits(family, model, given) - oracle_logits(family, oracle, given)).abs().max().item()
    assert difference > 20 * LOGITS


@by_family
def test_a_round_trip_returns_the_same_bits(name, tmp_path):
    make_oracle(FAMILIES[name]).save_pretrained(tmp_path / "theirs")
    model = load_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours")
    again = load_pretrained(tmp_path / "ours")
    assert not model.config.differences(again.config)
    for (parameter_name, left), right in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right), parameter_name


# RoPE's frequencies, to the last bit or two.


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 2.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7, "beta_fast": 9.0, "beta_slow": 2.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    ],
)
@pytest.mark.parametrize("length", [50, 200])
def test_scaled_frequencies(kind, options, length):
    theirs = transformers.LlamaConfig(
        hidden_size=96, num_attention_heads=4, max_position_embeddings=128, rope_parameters={"rope_type": kind, "rope_theta": 1e4} | options
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
    config = ModelConfig(hidden_size=96, num_attention_heads=4, max_position_embeddings=128, rope_scaling=RopeScaling(kind, **options))
    frequencies, factor = rope_frequencies(config.resolved(), length)
    torch.testing.assert_close(frequencies, expected, rtol=3e-7, atol=0)
    assert factor == pytest.approx(magnitude, rel=1e-12)


# Packed documents and padding.


def llama(folder) -> tuple[torch.nn.Module, TransformerModel]:
    oracle = make_oracle(FAMILIES["LLaMA 2 (GQA)"])
    oracle.save_pretrained(folder)
    return oracle, load_pretrained(folder).eval()


def packed() -> tuple[Tensor, Tensor, Tensor]:
    ids = inputs(FAMILIES["LLaMA 2 (GQA)"])["ids"]
    documents = torch.tensor([0] * 11 + [1] * 7 + [2] * (SEQ - 18)).expand(BATCH, SEQ)
    starts = torch.tensor([0] * 11 + [11] * 7 + [18] * (SEQ - 18))
    return ids, documents, (torch.arange(SEQ) - starts).expand(BATCH, SEQ)


def test_packed_documents_equal_transformers_and_each_document_alone(tmp_path):
    oracle, model = llama(tmp_path)
    ids, documents, positions = packed()
    with torch.no_grad():
        found = model(ids, positions=positions, mask=Documents(documents))
        expected = oracle(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits
        alone = torch.cat([model(ids[:, :11]), model(ids[:, 11:18]), model(ids[:, 18:])], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS)
    torch.testing.assert_close(found, alone, rtol=0, atol=LOGITS)


def test_changing_one_document_changes_no_other(tmp_path):
    _, model = llama(tmp_path)
    ids, documents, positions = packed()
    changed = ids.clone()
    changed[:, :11] = (changed[:, :11] + 1) % VOCAB
    with torch.no_grad():
        before, after = (model(x, positions=positions, mask=Documents(documents)) for x in (ids, changed))
        leaking = model(changed, positions=positions)
    assert torch.equal(before[:, 11:], after[:, 11:]) and not torch.equal(before[:, :11], after[:, :11])
    assert (leaking[:, 11:] - before[:, 11:]).abs().max() > 0.01, "positions that begin anew do not separate documents by themselves"


def test_padding_on_the_left_changes_nothing(tmp_path):
    oracle, model = llama(tmp_path)
    ids = inputs(FAMILIES["LLaMA 2 (GQA)"])["ids"]
    padded = torch.cat([torch.zeros(BATCH, 5, dtype=torch.long), ids], dim=1)
    valid = torch.arange(5 + SEQ).expand(BATCH, -1) >= 5
    positions = (torch.arange(5 + SEQ) - 5).clamp(min=0)
    with torch.no_grad():
        found = model(padded, positions=positions, mask=Padding(valid))[:, 5:]
        expected = oracle(input_ids=padded, attention_mask=valid.long(), position_ids=positions.expand(BATCH, -1), use_cache=False).logits[
            :, 5:
        ]
        plain = model(ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS)
    torch.testing.assert_close(found, plain, rtol=0, atol=LOGITS)


@by_family
def test_fused_and_written_out_attention_agree(name, tmp_path):
    family = FAMILIES[name]
    make_oracle(family).save_pretrained(tmp_path)
    sdpa, given = load_pretrained(tmp_path, dtype=torch.float64).eval(), inputs(family)  # float64: what is left is rounding
    eager = TransformerModel(type(sdpa.config)(**{**vars(sdpa.config), "attention": "eager", "attention_dropout": 0.0})).double().eval()
    eager.load_state_dict(sdpa.state_dict())
    left, right = (our_logits(family, model, given) for model in (sdpa, eager))
    real = given.get("valid", torch.ones(left.shape[:2], dtype=torch.bool))
    torch.testing.assert_close(left[real], right[real], rtol=0, atol=1e-12)
    cotangent = torch.randn(left.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    cotangent[~real] = 0
    for logits in (left, right):
        (logits * cotangent).sum().backward()
    largest = max(parameter.grad.abs().max() for parameter in sdpa.parameters())
    for (parameter_name, a), b in zip(sdpa.named_parameters(), eager.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-12 * largest, parameter_name


def test_a_model_that_no_format_describes_is_refused_with_what_it_would_lose():
    config = ModelConfig(vocab_size=VOCAB, hidden_size=48, num_attention_heads=4, norm="layer_norm", position="none")
    with pytest.raises(ValueError, match="No known format can describe this model.*would lose"):
        write_config(config)
    with pytest.raises(ValueError, match="llama would lose: qk_norm True"):
        write_config(ModelConfig(qk_norm=True), "llama")
