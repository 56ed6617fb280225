"""Settings of the model: a small one's weights, loss, gradients and logits, with dropout from one seed, and a router's bias after it."""

import torch
from torch import Tensor, nn

from setting_effects.effects import Differs, Effects, Shown, called_functions
from shared.course.extensions import Extension
from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import RopeScaling
from shared.model.transformer import TransformerModel
from shared.moe.balancing import take_loads, update_bias
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig, ModelParts
from shared.moe.layer import mixture_layers

SEQ = 24
SMALL = {
    "vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = YARN | {"rope_type": "llama3"}


def seen(config: MixtureModelConfig) -> list:
    model = TransformerModel(config, MIXTURE)
    torch.manual_seed(1)
    ids = torch.randint(config.vocab_size, (2, SEQ), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "targets": ids.roll(-1, 1)}

    def objective(model: nn.Module, batch: dict[str, Tensor]):
        if config.architecture == "encoder-decoder":
            return next_token_objective(lambda ids: model(ids, decoder_input_ids=ids), batch)
        return next_token_objective(model, batch) if config.experts is None else packed_next_token_objective(model, batch)

    totals = accumulate_gradients(model, [batch], objective)
    layers = mixture_layers(model)
    losses = [layer.losses for layer in layers]
    for layer, load in zip(layers, take_loads(model, lambda loads: loads).values(), strict=True):
        update_bias(layer, load)
    model.eval()
    with torch.no_grad():
        logits = model(ids, decoder_input_ids=ids) if config.architecture == "encoder-decoder" else model(ids)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [totals.loss_sum, losses, gradients, model.state_dict(), logits]


def calls(config: MixtureModelConfig) -> list[str]:
    model = TransformerModel(config, MIXTURE)
    return called_functions(lambda: model(torch.zeros(1, 4, dtype=torch.int64)))


class Doubled(nn.Module):
    """A part of the model by import path."""

    def __init__(self, *arguments):
        super().__init__()

    def forward(self, hidden_states: Tensor, *arguments, **settings):
        return 2 * hidden_states


OWN = Extension(f"{__file__}:Doubled")

MODEL = Effects(MixtureModelConfig, observe=seen, base=SMALL, rows={
    "vocab_size": Differs(31, 32),
    "hidden_size": Differs(24, 32),
    "num_hidden_layers": Differs(2, 3),
    "num_attention_heads": Differs(2, 4),
    "num_key_value_heads": Differs(2, 1),
    "head_dim": Differs(12, 8),
    "intermediate_size": Differs(40, 48),
    "max_position_embeddings": Differs(32, 40, beside={"position": "learned"}),
    "architecture": Differs("decoder", "encoder"),
    "num_encoder_layers": Shown("parity/test_02_families.py::test_a_family_agrees_in_both_directions"),
    "position": Differs("rope", "alibi"),
    "rope_theta": Differs(1e4, 1e3),
    "rope_scaling": Differs(None, RopeScaling("linear", 2.0)),
    "relative_attention_num_buckets": Differs(32, 16, beside={"position": "relative"}),
    "relative_attention_max_distance": Differs(128, 20, beside={"position": "relative"}),
    "norm": Differs("rms_norm", "layer_norm"),
    "norm_eps": Differs(1e-5, 1e-2),
    "norm_position": Differs("pre", "post"),
    "embedding_norm": Differs(False, True),
    "qk_norm": Differs(False, True),
    "qk_norm_over": Differs("head", "projection", beside={"qk_norm": True}),
    "hidden_act": Differs("silu", "gelu"),
    "gated": Differs(True, False),
    "attention_bias": Differs(False, True),
    "attention_output_bias": Differs(False, True),
    "mlp_bias": Differs(False, True),
    "experts": Differs(None, MixtureConfig(**EXPERTS)),
    "attention_scale": Differs(0.3, 0.9),
    "sliding_window": Differs(None, 5),
    "layer_types": Differs(("full_attention", "full_attention"), ("full_attention", "sliding_attention"), beside={"sliding_window": 5}),
    "attention": Differs("sdpa", "eager", by=calls),
    "type_vocab_size": Differs(0, 2),
    "head": Differs("linear", "mlm"),
    "tie_word_embeddings": Differs(False, True),
    "logit_scale": Differs(1.0, 0.5),
    "hidden_dropout": Differs(0.0, 0.2),
    "attention_dropout": Differs(0.0, 0.2),
    "initializer_range": Differs(0.2, 0.1),
    "parts": Differs(None, ModelParts(norm=OWN)),
})  # fmt: skip


def scaled(scaling: RopeScaling) -> list:
    return seen(MixtureModelConfig(**SMALL | {"max_position_embeddings": 16, "rope_scaling": scaling}))


ROPE = Effects(RopeScaling, observe=scaled, base={"rope_type": "linear", "factor": 2.0}, rows={
    "rope_type": Differs("linear", "dynamic"),
    "factor": Differs(2.0, 3.0),
    "original_max_position_embeddings": Differs(4096, 64, beside=YARN),
    "low_freq_factor": Differs(1.0, 2.0, beside=LLAMA3),
    "high_freq_factor": Differs(4.0, 8.0, beside=LLAMA3),
    "beta_fast": Differs(32.0, 1.5, beside=YARN),
    "beta_slow": Differs(1.0, 0.05, beside=YARN),
    "attention_factor": Differs(None, 0.7, beside=YARN),
})  # fmt: skip


def routed(experts: MixtureConfig) -> list:
    return seen(MixtureModelConfig(**SMALL, experts=experts))


def routed_by(experts: MixtureConfig) -> list[str]:
    return calls(MixtureModelConfig(**SMALL, experts=experts))


MIXED = Effects(MixtureConfig, observe=routed, base=EXPERTS, rows={
    "num_experts": Differs(4, 6),
    "moe_intermediate_size": Differs(16, 24),
    "num_experts_per_tok": Differs(2, 1),
    "scoring": Differs("softmax", "sigmoid"),
    "norm_topk_prob": Differs(True, False),
    "routed_scaling_factor": Differs(1.0, 1.5),
    "n_group": Differs(1, 2),
    "topk_group": Differs(1, 2, beside={"n_group": 2}),
    "num_shared_experts": Differs(0, 1),
    "first_k_dense": Differs(0, 1),
    "balance_coefficient": Differs(0.01, 0.1),
    "balance_convention": Differs("megatron", "switch"),
    "z_coefficient": Differs(0.0, 0.1),
    "bias_update_rate": Differs(0.01, 0.1),
    "capacity_factor": Differs(None, 0.5),
    "implementation": Differs("grouped", "loop", by=routed_by),
})  # fmt: skip

PARTS = Effects(ModelParts, observe=lambda parts: seen(MixtureModelConfig(**SMALL, parts=parts)), rows={
    "norm": Differs(None, OWN), "attention": Differs(None, OWN), "feed_forward": Differs(None, OWN),
})  # fmt: skip

ALL = [MODEL, ROPE, MIXED, PARTS]
