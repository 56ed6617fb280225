"""One tiny random model of each family, made by transformers, and the comparison of ours with it in both directions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from shared.loss import cross_entropy
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.masks import Padding
from shared.model.transformer import TransformerModel

VOCAB, BATCH, SEQ = 97, 3, 29
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
T5 = {"vocab_size": VOCAB, "d_model": 48, "d_kv": 16, "num_heads": 4, "d_ff": 80, "num_layers": 3, "num_decoder_layers": 2}


def rope(kind: str, **options) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | options}


@dataclass(frozen=True)
class Family:
    """architecture: a model class of transformers. options: of its configuration. untied: give it a head of its own by hand."""

    architecture: str
    config: str
    options: dict = field(default_factory=dict)
    untied: bool = False
    padded: bool = False


FAMILIES: dict[str, Family] = {
    "GPT-2": Family("GPT2LMHeadModel", "GPT2Config", GPT2),
    "GPT-2, untied": Family("GPT2LMHeadModel", "GPT2Config", GPT2 | {"tie_word_embeddings": False}),
    "GPT-3, dense": Family("GPT2LMHeadModel", "GPT2Config", GPT2 | {"n_positions": 128, "n_layer": 2, "n_inner": 160}),
    "LLaMA 1 (MHA)": Family("LlamaForCausalLM", "LlamaConfig", LLAMA | {"num_key_value_heads": 6, "rms_norm_eps": 1e-6}),
    "LLaMA 2 (GQA)": Family("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "LLaMA, MQA": Family("LlamaForCausalLM", "LlamaConfig", LLAMA | {"num_key_value_heads": 1}),
    "LLaMA, biases": Family("LlamaForCausalLM", "LlamaConfig", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "LLaMA 3.2 (llama3 RoPE, tied)": Family(
        "LlamaForCausalLM", "LlamaConfig",
        LLAMA | {"tie_word_embeddings": True, "head_dim": 16}
        | rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "LLaMA, linear RoPE": Family("LlamaForCausalLM", "LlamaConfig", LLAMA | rope("linear", factor=4.0)),
    "LLaMA, dynamic RoPE": Family("LlamaForCausalLM", "LlamaConfig", LLAMA | {"max_position_embeddings": 16} | rope("dynamic", factor=2.0)),
    "LLaMA, YaRN": Family("LlamaForCausalLM", "LlamaConfig", LLAMA | rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "Qwen 2": Family("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "Qwen 2, windows": Family(
        "Qwen2ForCausalLM", "Qwen2Config", LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "Qwen 3": Family("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 16, "tie_word_embeddings": True}),
    "Mistral (window 5)": Family("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 5}),
    "BERT (padding, segments)": Family("BertForMaskedLM", "BertConfig", BERT, padded=True),
    "T5 (ReLU, tied)": Family("T5ForConditionalGeneration", "T5Config", T5),
    "T5 1.1 (GeGLU, untied)": Family(
        "T5ForConditionalGeneration", "T5Config", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, untied=True
    ),
    "BLOOM (ALiBi)": Family("BloomForCausalLM", "BloomConfig", {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
}  # fmt: skip


def make_oracle(family: Family) -> nn.Module:
    """Transformers' model in float32 with every parameter random, norms and biases too: at 1 and 0 they would hide mistakes."""
    config = getattr(transformers, family.config)(**family.options)
    architecture = getattr(transformers, family.architecture)
    torch.manual_seed(0)
    oracle = architecture._from_config(config, attn_implementation="eager").eval()
    if family.untied:
        oracle.lm_head.weight = nn.Parameter(torch.empty_like(oracle.lm_head.weight))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            scale, centre = (0.3, 1.0) if "norm" in name.lower() or "ln_" in name else (0.12, 0.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + centre * (not name.endswith("bias")))
    return oracle


def inputs(family: Family) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids, targets, others = torch.randint(VOCAB, (3, BATCH, SEQ), generator=generator)
    targets[:, ::5] = -100
    given = {"ids": ids, "targets": targets}
    if family.padded:
        given["segments"] = torch.randint(2, (BATCH, SEQ), generator=generator)
        given["valid"] = torch.arange(SEQ) < torch.tensor([SEQ, 17, 23])[:, None]
        given["targets"] = targets.where(given["valid"], -100)
    if "T5" in family.architecture:
        given |= {"decoder_ids": others[:, :-6], "targets": targets[:, :-6]}
    return given


def oracle_logits(family: Family, oracle: nn.Module, given: dict[str, Tensor]) -> Tensor:
    if "T5" in family.architecture:
        return oracle(input_ids=given["ids"], decoder_input_ids=given["decoder_ids"], use_cache=False).logits
    if family.padded:
        return oracle(input_ids=given["ids"], attention_mask=given["valid"].long(), token_type_ids=given["segments"]).logits
    return oracle(input_ids=given["ids"], use_cache=False).logits


def our_logits(family: Family, model: TransformerModel, given: dict[str, Tensor]) -> Tensor:
    if "T5" in family.architecture:
        return model(given["ids"], decoder_input_ids=given["decoder_ids"])
    if family.padded:
        return model(given["ids"], mask=Padding(given["valid"]), token_type_ids=given["segments"])
    return model(given["ids"])


@dataclass(frozen=True)
class Agreement:
    """Largest differences. imported, exported: of the logits, absolute; `size` is the largest logit. loss: relative.

    gradients: relative to the largest entry of the tensor, or to a thousandth of the largest of all where that is more: the
    gradient of a key's bias is rounding and nothing else, since softmax does not see it. worst: the tensor that they are of.
    """

    imported: float
    exported: float
    size: float
    loss: float
    gradients: float
    worst: str


def oracle_gradients(family: Family, oracle: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = oracle_logits(family, oracle, given)
    loss = F.cross_entropy(logits.flatten(0, 1), given["targets"].flatten(), reduction="sum", ignore_index=-100)
    oracle.zero_grad()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in oracle.named_parameters() if parameter.grad is not None}


def compare(family: Family, folder: Path, spoil: Callable[[TransformerModel], None] | None = None) -> Agreement:
    """Transformers' model saved and loaded by ours, and ours saved and loaded by transformers.

    spoil: changes our model after loading, for a comparison that has to fail.
    """
    oracle, given = make_oracle(family), inputs(family)
    oracle.save_pretrained(folder / "theirs")
    model = load_pretrained(folder / "theirs").eval()
    if spoil:
        spoil(model)
    with torch.no_grad():
        expected, found = oracle_logits(family, oracle, given), our_logits(family, model, given)
    real = given.get("valid", torch.ones(found.shape[:2], dtype=torch.bool))
    imported = (found - expected)[real].abs().max().item()

    expected_loss, expected_gradients = oracle_gradients(family, oracle, given)
    loss, _ = cross_entropy(our_logits(family, model, given), given["targets"])
    loss.backward()
    ours = packed_gradients(model)
    if set(ours) != set(expected_gradients):
        raise AssertionError(f"Gradients of other tensors: {set(ours) ^ set(expected_gradients)}")
    largest = max(gradient.abs().max().item() for gradient in expected_gradients.values())
    relative = {
        name: (ours[name] - gradient).abs().max().item() / max(gradient.abs().max().item(), largest / 1000)
        for name, gradient in expected_gradients.items()
    }
    worst = max(relative, key=relative.get)

    save_pretrained(model, folder / "ours")
    architecture = getattr(transformers, family.architecture)
    again, report = architecture.from_pretrained(folder / "ours", attn_implementation="eager", output_loading_info=True)
    if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise AssertionError(f"Transformers found our folder incomplete: {report}")
    with torch.no_grad():
        exported = (oracle_logits(family, again.eval(), given) - found)[real].abs().max().item()
    loss_difference = abs(loss.item() / expected_loss.item() - 1)
    return Agreement(imported, exported, expected[real].abs().max().item(), loss_difference, relative[worst], worst)


def packed_gradients(model: TransformerModel) -> dict[str, Tensor]:
    """Our gradients under the format's names and in its shapes. A gradient is packed as its parameter is."""
    from shared.model.hf.registry import write_config

    known, _ = write_config(model.config)
    gradients = {model.logical_name(name): parameter.grad for name, parameter in model.named_parameters()}
    return {entry.name: entry.pack([gradients[name] for name in entry.ours]) for entry in known.tensors(model.config)}
