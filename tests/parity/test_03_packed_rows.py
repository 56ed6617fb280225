"""Packed rows beside Hugging Face's LLaMA, for both ways in which it can be told of documents.

transformers 5 keeps documents apart by positions that restart, but only without an attention mask and without a cache; or by a 4-D
mask. Both must give our logits, and its default call must not.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shared.data.objectives import apart
from shared.data.packing import pack_documents
from shared.model.hf.pretrained import load_pretrained

SIZES = {"vocab_size": 53, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES, max_position_embeddings=64), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return load_pretrained(folder).eval()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = [[9, 7, 11], [13, 5, 8]]
    packed = [pack_documents([torch.randint(53, (size,), generator=generator) for size in sizes], 24) for sizes in rows]
    assert all((row["targets"] != -100).sum() >= 23 for row in packed)
    return {name: torch.stack([row[name] for row in packed]) for name in packed[0]}


def difference(left: torch.Tensor, right: torch.Tensor, batch) -> float:
    return (left - right)[batch["documents"] >= 0].abs().max().item()


@torch.no_grad()
def test_our_rows_are_theirs_with_restarting_positions(ours, theirs, batch):
    """float32 logits of size 3: rounding."""
    expected = theirs(batch["input_ids"], position_ids=batch["positions"], attention_mask=None, use_cache=False).logits
    assert difference(ours(batch["input_ids"], **apart(batch)), expected, batch) < 1e-5


@torch.no_grad()
def test_our_rows_are_theirs_with_a_mask(ours, theirs, batch):
    same = batch["documents"][:, :, None] == batch["documents"][:, None, :]
    allowed = (same & torch.ones_like(same).tril())[:, None]
    expected = theirs(batch["input_ids"], position_ids=batch["positions"], attention_mask=allowed, use_cache=False).logits
    assert difference(ours(batch["input_ids"], **apart(batch)), expected, batch) < 1e-5


@torch.no_grad()
def test_their_default_call_and_our_unmasked_one_leak(ours, theirs, batch):
    """The negative control, on both sides: with its cache on, theirs looks into other documents, as ours does without a mask."""
    leaking = theirs(batch["input_ids"], position_ids=batch["positions"], attention_mask=torch.ones_like(batch["input_ids"])).logits
    right, unmasked = ours(batch["input_ids"], **apart(batch)), ours(batch["input_ids"], positions=batch["positions"])
    assert difference(right, leaking, batch) > 0.1
    assert difference(right, unmasked, batch) > 0.1
    assert difference(leaking, unmasked, batch) < 1e-5
