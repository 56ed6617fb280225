"""Chapter 09. Hugging Face formats of mixture-of-experts models: Mixtral, OLMoE, Qwen 3 MoE, and dots.llm1, DeepSeek-V3's router over GQA.

Importing this module adds them to the formats of `shared.model.hf.registry`. Files hold each expert by itself, as tensors that are slices
of our stacks [E, out, in]; a state dict of transformers 5 holds stacks as well. Attention and norms are LLaMA's. Load with
`load_pretrained(folder, builders=MIXTURE)`.

Left out on purpose, in reading and in writing: what is said of training (the balance loss's coefficient, router noise), which changes no
logit. A coefficient would have to be converted as well: see `balance_convention`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shared.model.config import ModelConfig
from shared.model.hf import llama
from shared.model.hf.format import ConfigJson, FileTensor, Format, Key, concatenated_experts, read_keys, same, write_keys
from shared.model.hf.registry import FORMATS
from shared.moe.config import MixtureConfig, MixtureModelConfig

PER_TOKEN, NORMALIZED = Key("num_experts_per_tok", 8), Key("norm_topk_prob", False)
MIXTRAL = {"num_experts": Key("num_local_experts", 8), "num_experts_per_tok": Key("num_experts_per_tok", 2),
           "moe_intermediate_size": Key("intermediate_size")}  # fmt: skip
OLMOE = {"num_experts": Key("num_experts", 64), "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": Key("intermediate_size"),
         "norm_topk_prob": NORMALIZED}  # fmt: skip
QWEN3 = OLMOE | {"num_experts": Key("num_experts", 128), "moe_intermediate_size": Key("moe_intermediate_size", 768)}
DOTS = {
    "num_experts": Key("n_routed_experts"),
    "num_experts_per_tok": Key("num_experts_per_tok"),
    "moe_intermediate_size": Key("moe_intermediate_size", 1408),
    "norm_topk_prob": NORMALIZED,
    "routed_scaling_factor": Key("routed_scaling_factor", 1.0),
    "n_group": Key("n_group", 1),
    "topk_group": Key("topk_group", 1),
    "num_shared_experts": Key("n_shared_experts", 1),
    "first_k_dense": Key("first_k_dense_replace", 0),
}
POSITIVE = ("n_group", "topk_group", "n_shared_experts")  # where 0 stands for 1: transformers cannot build a model without


def read_experts(keys: Mapping[str, Key], raw: ConfigJson) -> dict[str, Any]:
    """Fields of a `MixtureConfig`. transformers 5 calls the number of experts `num_local_experts` in every format."""
    given = {name: value for name, value in raw.items() if value is not None and not (name in POSITIVE and value == 0)}
    if "num_local_experts" in given:
        given.setdefault(keys["num_experts"].name, given["num_local_experts"])
    return read_keys(keys, given, MixtureConfig)


def read_mixtral(raw: ConfigJson) -> ModelConfig:
    common, window = llama.read_common(raw, 131072, 1e-5, 1e6), raw.get("sliding_window")
    return replace(common, **llama.read_windows(raw, window, listed=False))


def with_bias(raw: ConfigJson, common: ModelConfig, **changes: Any) -> ModelConfig:
    """A model whose attention has norms of queries and keys, and biases where the file says so."""
    bias = raw.get("attention_bias", False)
    return replace(common, attention_bias=bias, attention_output_bias=bias, qk_norm=True, **changes)


def read_olmoe(raw: ConfigJson) -> ModelConfig:
    """Its norms of queries and keys have hidden_size: the heads share that, and transformers' class has no key for another size."""
    llama.read_windows(raw, None, listed=False)
    common = llama.read_common(raw, 4096, 1e-5)
    if common.head_dim not in (None, own := common.hidden_size // common.num_attention_heads):
        raise ValueError(f"head_dim is {common.head_dim}, and the heads of an olmoe model share hidden_size: only {own} fits it.")
    return with_bias(raw, common, qk_norm_over="projection", head_dim=None)


def write_olmoe(config: ModelConfig) -> ConfigJson:
    return {key: value for key, value in llama.write_llama(config).items() if key != "head_dim"}


def read_qwen3(raw: ConfigJson) -> ModelConfig:
    return with_bias(raw, llama.read_common(raw, 32768), **llama.read_windows(raw, llama.qwen_window(raw), listed=False))


def write_qwen3(config: ModelConfig) -> ConfigJson:
    window = {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
    return llama.write_llama(config) | window | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def read_dots(raw: ConfigJson) -> ModelConfig:
    windows = llama.read_windows(raw, raw.get("sliding_window", 4096), raw.get("max_window_layers", 62))
    return with_bias(raw, llama.read_common(raw, 2048), **windows)


def write_dots(config: ModelConfig) -> ConfigJson:
    windows = {"sliding_window": config.sliding_window, "layer_types": list(config.layer_types)}
    return llama.write_llama(config) | windows | {"max_window_layers": config.num_hidden_layers}


NAMES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def sparse_layers(config: ModelConfig) -> list[str]:
    """Beginnings of parameters' names."""
    return [f"stack.blocks.{layer}.feed_forward." for layer in range(config.num_hidden_layers) if config.experts.is_sparse(layer)]


def tensors(config: ModelConfig, mlp: str = "mlp", names: dict[str, str] = NAMES) -> list[FileTensor]:
    """LLaMA's, with the router and each expert by itself. mlp, names: what a format calls the layer, and its projections."""
    sparse = sparse_layers(config)
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


def stacked_tensors(config: ModelConfig) -> list[FileTensor]:
    """The same with the experts of a layer in two tensors: [E, 2 intermediate, hidden], gate first, and [E, hidden, intermediate]."""
    stored = [entry for entry in tensors(config) if entry.part is None]
    for ours in sparse_layers(config):
        theirs = f"model.layers.{ours.split('.')[2]}.mlp.experts"
        gate, up, down = (f"{ours}experts.{name}.weight" for name in NAMES)
        stored += [concatenated_experts(f"{theirs}.gate_up_proj", (gate, up)), same(f"{theirs}.down_proj", down)]
    return stored


def mixture(
    model_type: str,
    architecture: str,
    keys: Mapping[str, Key],
    read: Callable[[ConfigJson], ModelConfig],
    write: Callable[[ModelConfig], ConfigJson],
    *,
    fixed: dict[str, Any] | None = None,
    written: dict[str, Any] | None = None,
    tensors: Callable = tensors,
    required: Any = None,
    **token_ids: int,
) -> Format:
    """A format. read, write: all but the experts, which `keys` give both ways. fixed: what holds of the experts of every such model.
    written: keys that every such file has."""

    def read_all(raw: ConfigJson) -> ModelConfig:
        """An imported model has no loss of its own, as in transformers, where one must ask for it."""
        experts = MixtureConfig(**read_experts(keys, raw), **(fixed or {}), balance_coefficient=0.0)
        return MixtureModelConfig(**vars(read(raw)) | {"experts": experts})

    def write_all(config: ModelConfig) -> ConfigJson:
        is_mixture = isinstance(config.experts, MixtureConfig)  # of another model, reading back says what is lost
        experts = config.experts if is_mixture else MixtureConfig(1, 1, 1)
        return write(config) | write_keys(keys, experts) | (written or {})

    required = llama.COMMON_REQUIRED | (required or {})
    known = llama.relative(model_type, architecture, read_all, write_all, **token_ids)
    return replace(known, tensors=tensors, stacked=stacked_tensors, required=required)


MIXTURES: dict[str, Format] = {
    known.model_type: known
    for known in (
        mixture(
            "mixtral", "MixtralForCausalLM", MIXTRAL, read_mixtral, llama.write_window, written={"output_router_logits": False},
            tensors=partial(tensors, mlp="block_sparse_moe", names=MIXTRAL_NAMES), bos_token_id=1, eos_token_id=2,
        ),
        mixture(
            "olmoe", "OlmoeForCausalLM", OLMOE, read_olmoe, write_olmoe, required={"clip_qkv": (None,)}, pad_token_id=1,
            eos_token_id=50279,
        ),
        mixture(
            "qwen3_moe", "Qwen3MoeForCausalLM", QWEN3, read_qwen3, write_qwen3,
            required={"decoder_sparse_step": (1,), "mlp_only_layers": (None, [])},
        ),
        mixture("dots1", "Dots1ForCausalLM", DOTS, read_dots, write_dots, fixed={"scoring": "sigmoid", "bias_update_rate": 0.0}),
    )
}  # fmt: skip
FORMATS.update(MIXTURES)
