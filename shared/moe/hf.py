"""Chapter 09. Hugging Face formats of mixture-of-experts models: Mixtral, OLMoE, Qwen 3 MoE, and dots.llm1, DeepSeek-V3's router over GQA.

Importing this module adds them to the formats of `shared.model.hf.registry`. Files hold each expert by itself, as tensors that are slices
of our stacks [E, out, in]; attention and norms are LLaMA's. Load with `load_pretrained(folder, builders=MIXTURE)`.

Left out on purpose, in reading and in writing: what is said of training (the balance loss's coefficient, router noise), which changes no
logit. A coefficient would have to be converted as well: see `balance_convention`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from shared.model.config import ModelConfig
from shared.model.hf import llama
from shared.model.hf.format import ConfigJson, FileTensor, Format, same
from shared.model.hf.registry import FORMATS
from shared.moe.config import MixtureConfig, MixtureModelConfig


def with_experts(config: ModelConfig, **choices: Any) -> MixtureModelConfig:
    """An imported model has no loss of its own, as in transformers, where one must ask for it."""
    return MixtureModelConfig(**vars(config) | {"experts": MixtureConfig(**choices, balance_coefficient=0.0)})


def read_mixtral(raw: ConfigJson) -> ModelConfig:
    experts = {"num_experts": raw.get("num_local_experts", 8), "num_experts_per_tok": raw.get("num_experts_per_tok", 2)}
    common = replace(llama.read_common({"rope_theta": 1e6} | raw, 131072, 1e-5), sliding_window=raw.get("sliding_window"))
    return with_experts(common, **experts, moe_intermediate_size=raw["intermediate_size"])


def write_mixtral(config: ModelConfig, experts: MixtureConfig) -> ConfigJson:
    return llama.write_mistral(config) | {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "intermediate_size": experts.moe_intermediate_size,
        "output_router_logits": False,
    }


def read_olmoe(raw: ConfigJson) -> ModelConfig:
    bias = raw.get("attention_bias", False)
    changes = {"attention_bias": bias, "attention_output_bias": bias, "qk_norm": True, "qk_norm_over": "projection", "head_dim": None}
    return with_experts(
        replace(llama.read_common(raw, 4096, 1e-5), **changes),
        num_experts=raw.get("num_experts") or raw.get("num_local_experts", 64),
        num_experts_per_tok=raw.get("num_experts_per_tok", 8),
        moe_intermediate_size=raw["intermediate_size"],
        norm_topk_prob=raw.get("norm_topk_prob", False),
    )


def write_olmoe(config: ModelConfig, experts: MixtureConfig) -> ConfigJson:
    return llama.write_llama(config) | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "intermediate_size": experts.moe_intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
    }


def read_qwen3(raw: ConfigJson) -> ModelConfig:
    bias, window = raw.get("attention_bias", False), raw.get("sliding_window") if raw.get("use_sliding_window") else None
    changes = {"attention_bias": bias, "attention_output_bias": bias, "qk_norm": True, "sliding_window": window}
    return with_experts(
        replace(llama.read_common(raw, 32768), **changes),
        num_experts=raw.get("num_experts") or raw.get("num_local_experts", 128),  # transformers 4 and 5
        num_experts_per_tok=raw.get("num_experts_per_tok", 8),
        moe_intermediate_size=raw.get("moe_intermediate_size", 768),
        norm_topk_prob=raw.get("norm_topk_prob", False),
    )


def write_qwen3(config: ModelConfig, experts: MixtureConfig) -> ConfigJson:
    window = config.sliding_window
    return llama.write_llama(config) | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.moe_intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def read_dots(raw: ConfigJson) -> ModelConfig:
    bias, layers, window = raw.get("attention_bias", False), raw["num_hidden_layers"], raw.get("sliding_window", 4096)
    first = raw.get("max_window_layers", 62)
    kinds = raw.get("layer_types") or ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    windows = {"sliding_window": window, "layer_types": tuple(kinds)} if "sliding_attention" in kinds else {}
    changes = {"attention_bias": bias, "attention_output_bias": bias, "qk_norm": True} | windows
    return with_experts(
        replace(llama.read_common(raw, 2048), **changes),
        num_experts=raw.get("n_routed_experts") or raw["num_local_experts"],
        num_experts_per_tok=raw["num_experts_per_tok"],
        moe_intermediate_size=raw.get("moe_intermediate_size", 1408),
        scoring="sigmoid",
        norm_topk_prob=raw.get("norm_topk_prob", False),
        routed_scaling_factor=raw.get("routed_scaling_factor", 1.0),
        n_group=raw.get("n_group") or 1,
        topk_group=raw.get("topk_group") or 1,
        num_shared_experts=raw.get("n_shared_experts") or 1,  # transformers cannot build one without
        first_k_dense=raw.get("first_k_dense_replace") or 0,
        bias_update_rate=0.0,
    )


def write_dots(config: ModelConfig, experts: MixtureConfig) -> ConfigJson:
    return llama.write_llama(config) | {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.moe_intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "routed_scaling_factor": experts.routed_scaling_factor,
        "n_group": experts.n_group,
        "topk_group": experts.topk_group,
        "n_shared_experts": experts.num_shared_experts,
        "first_k_dense_replace": experts.first_k_dense,
        "sliding_window": config.sliding_window,
        "layer_types": list(config.layer_types),
        "max_window_layers": config.num_hidden_layers,
    }


NAMES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def tensors(config: ModelConfig, mlp: str = "mlp", names: dict[str, str] = NAMES) -> list[FileTensor]:
    """LLaMA's, with the router and each expert by itself. mlp, names: what a format calls the layer, and its projections."""
    sparse = [f"stack.blocks.{layer}.feed_forward." for layer in range(config.num_hidden_layers) if config.experts.is_sparse(layer)]
    stored = [entry for entry in llama.tensors(config) if not entry.ours[0].startswith(tuple(sparse))]
    for ours in sparse:
        theirs = f"model.layers.{ours.split('.')[2]}.{mlp}"
        stored.append(same(f"{theirs}.gate.weight", f"{ours}router.weight"))
        if config.experts.bias_update_rate is not None:
            stored.append(same(f"{theirs}.gate.e_score_correction_bias", f"{ours}router.bias"))
        for name, their_name in names.items():
            if config.experts.num_shared_experts:
                stored.append(same(f"{theirs}.shared_experts.{their_name}.weight", f"{ours}shared_experts.{name}.weight"))
            stored += [
                FileTensor(f"{theirs}.experts.{expert}.{their_name}.weight", (f"{ours}experts.{name}.weight",), part=expert)
                for expert in range(config.experts.num_experts)
            ]
    return stored


def mixture(
    model_type: str, architecture: str, read: Callable, write: Callable, tensors: Callable = tensors, required: Any = None, **token_ids: int
) -> Format:
    def write_any(config: ModelConfig) -> ConfigJson:
        is_mixture = isinstance(config.experts, MixtureConfig)  # of another model, reading back says what is lost
        return write(config, config.experts if is_mixture else MixtureConfig(1, 1, 1))

    required = llama.COMMON_REQUIRED | (required or {})
    known = llama.relative(model_type, architecture, read, write_any, **token_ids)
    return replace(known, tensors=tensors, required=required)


MIXTURES: dict[str, Format] = {
    known.model_type: known
    for known in (
        mixture(
            "mixtral", "MixtralForCausalLM", read_mixtral, write_mixtral,
            partial(tensors, mlp="block_sparse_moe", names=MIXTRAL_NAMES), bos_token_id=1, eos_token_id=2,
        ),
        mixture("olmoe", "OlmoeForCausalLM", read_olmoe, write_olmoe, required={"clip_qkv": (None,)}, pad_token_id=1, eos_token_id=50279),
        mixture(
            "qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3, write_qwen3,
            required={"decoder_sparse_step": (1,), "mlp_only_layers": (None, [])},
        ),
        mixture("dots1", "Dots1ForCausalLM", read_dots, write_dots),
    )
}  # fmt: skip
FORMATS.update(MIXTURES)
