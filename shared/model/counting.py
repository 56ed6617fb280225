"""Chapter 02. Parameter count of a model, by formula and by role, without building it."""

from torch import nn

from shared.model.config import ModelConfig
from shared.model.roles import ROLES, Role, parameters_by_role


def parameter_counts(config: ModelConfig) -> dict[Role, int]:
    """Parameters by role; a tied head counts once. `sum(parameter_counts(config).values())` is the model's size."""
    config = config.resolved()
    counts = dict.fromkeys(ROLES, 0)
    add(counts, stack_counts(config, cross=config.architecture == "encoder-decoder"))
    if config.num_encoder_layers:
        add(counts, stack_counts(config.encoder(), cross=False))
    positions = config.max_position_embeddings if config.position == "learned" else 0
    counts["embedding"] += (config.vocab_size + positions + config.type_vocab_size) * config.hidden_size
    counts["embedding"] += 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    counts["norm"] += config.embedding_norm * norm_size(config, config.hidden_size)
    if config.head == "mlm":
        head = {
            "matrix": config.hidden_size**2,
            "bias": config.hidden_size + config.vocab_size,
            "norm": norm_size(config, config.hidden_size),
        }
        add(counts, head)
    return counts


def stack_counts(config: ModelConfig, cross: bool) -> dict[Role, int]:
    """The blocks, with the final norm and the relative biases."""
    counts = dict.fromkeys(ROLES, 0)
    for layer in range(config.num_hidden_layers):
        add(counts, block_counts(config, layer, cross))
    counts["norm"] += norm_size(config, config.hidden_size) if config.norm_position == "pre" else 0
    relative = config.relative_attention_num_buckets * config.num_attention_heads
    counts["embedding"] += relative if config.position == "relative" else 0
    return counts


def block_counts(config: ModelConfig, layer: int, cross: bool = False) -> dict[Role, int]:
    """Parameters by role of one block of a resolved configuration."""
    size = config.hidden_size
    inner, shared = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    normalised = 2 * config.head_dim if config.qk_norm_over == "head" else inner + shared
    attention = {
        "matrix": 2 * size * (inner + shared),
        "bias": config.attention_bias * (inner + 2 * shared) + config.attention_output_bias * size,
        "norm": config.qk_norm * norm_size(config, normalised) + norm_size(config, size),
    }
    counts = dict.fromkeys(ROLES, 0) | {"norm": norm_size(config, size)}
    for _ in range(2 if cross else 1):
        add(counts, attention)
    add(counts, feed_forward_counts(config, layer))
    return counts


def feed_forward_counts(config: ModelConfig, layer: int) -> dict[Role, int]:
    """Parameters by role in the feed-forward layer of one block of a resolved configuration; experts count themselves."""
    if config.experts is not None:
        return config.experts.parameter_counts(config, layer)
    size, width = config.hidden_size, config.intermediate_size
    return {"matrix": (3 if config.gated else 2) * size * width, "bias": config.mlp_bias * ((2 if config.gated else 1) * width + size)}


def active_feed_forward_size(config: ModelConfig, layer: int) -> int:
    """Numbers in the matrices that a token passes in the feed-forward layer of one block of a resolved configuration."""
    if config.experts is not None:
        return config.experts.active_matrix_size(config, layer)
    return feed_forward_counts(config, layer)["matrix"]


def norm_size(config: ModelConfig, size: int) -> int:
    return 2 * size if config.norm == "layer_norm" else size


def add(counts: dict[Role, int], more: dict[Role, int]) -> None:
    for role, count in more.items():
        counts[role] += count


def count_parameters(model: nn.Module) -> dict[Role, int]:
    """Parameters by role, counted in a built model."""
    return {role: sum(p.numel() for p in parameters.values()) for role, parameters in parameters_by_role(model).items()}
