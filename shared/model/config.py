"""Chapter 02. Model configuration: the choices and sizes that tell one transformer from another.

Field names are those of Hugging Face's LLaMA configuration where one exists, so what is known from there can be typed here.
The defaults are a small LLaMA: causal, RoPE, RMSNorm before each sublayer, SwiGLU. `shared.model.families` holds the
values of the published models, `shared.model.hf` reads and writes their `config.json`.

Left out on purpose: how a model is trained or sharded, and token ids with a meaning (end of text, padding).
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from shared.course.bounds import BelowOne, Bounds, NonNegativeInt, PositiveFloat, PositiveInt, checked

Blocks = Annotated[int, Bounds(ge=1, le=10_000)]


@dataclass(frozen=True)
@checked
class RopeScaling:
    """How RoPE's frequencies are changed so that a model reads further than it was trained to. See `shared.model.rope`.

    Args:
        rope_type: linear (Chen et al. 2023), dynamic (NTK-aware, grows with the sequence), yarn (Peng et al. 2023) or
            llama3 (Grattafiori et al. 2024, section 3.2).
        factor: how many times longer than the original the context is to become.
        original_max_position_embeddings: the length of training; yarn and llama3 need it.
        low_freq_factor: llama3: wavelengths above original / low_freq_factor are stretched by the whole factor.
        high_freq_factor: llama3: wavelengths below original / high_freq_factor are left alone.
        beta_fast: yarn: dimensions that turn more often than this over the original length are left alone.
        beta_slow: yarn: dimensions that turn less often than this are stretched by the whole factor.
        attention_factor: yarn: multiplies cos and sin; None for 0.1 log(factor) + 1.
    """

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: Annotated[float, Bounds(ge=1)]
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if self.rope_type in ("yarn", "llama3") and not self.original_max_position_embeddings:
            raise ValueError(f"{self.rope_type} scaling needs original_max_position_embeddings, the length of training.")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor is {self.high_freq_factor}: give more than low_freq_factor ({self.low_freq_factor}).")


@dataclass(frozen=True)
@checked
class ExpertsConfig:
    """Mixture of experts in place of feed-forward layers: what is asked of chapter 09's configuration, which derives from this one.

    Args:
        num_experts: in each layer that has them.

    Attributes:
        has_losses, has_formula: whether such a layer adds losses of its own, and whether `saved_bytes` says what it keeps.
    """

    num_experts: PositiveInt
    has_losses, has_formula = False, False

    def parameter_counts(self, config: "ModelConfig", layer: int) -> dict[str, int]:
        """Parameters by role in the feed-forward layer of block `layer` of a resolved configuration, the router included."""
        raise NotImplementedError(f"{type(self).__name__} must define parameter_counts(config, layer).")

    def active_matrix_size(self, config: "ModelConfig", layer: int) -> int:
        """Numbers in the matrices that one token passes in that layer: the router's, and those of the experts that it is sent to."""
        raise NotImplementedError(f"{type(self).__name__} must define active_matrix_size(config, layer).")

    def cut(self, ranks: int) -> "ExpertsConfig":
        """The experts as a tensor-parallel rank computes them: with 1 / ranks of their inner width."""
        return self

    def saved_bytes(
        self, config: "ModelConfig", rows: int, seq: int, width: int, ranks: int, imbalance: float
    ) -> tuple[float, float]:
        """What such a layer of a resolved configuration keeps of [rows, seq] tokens (`shared.parallel.planning.activations.Saved`). width:
        bytes of a number in products. ranks: that hold the experts. imbalance: rows of this one's, in shares of an equal number."""
        raise NotImplementedError(f"{type(self).__name__} must define saved_bytes(config, rows, seq, width, ranks, imbalance).")

    def split_numbers(self, config: "ModelConfig", imbalance: float) -> float:
        """For each token, the inputs of such a layer's matrices and the gradients of their outputs."""
        raise NotImplementedError(f"{type(self).__name__} must define split_numbers(config, imbalance).")

    def comparable(self, config: "ModelConfig") -> dict[str, Any]:
        """Changes of `config` that bring what has no effect on the model's output to one value, as `shared.model.hf.registry` compares."""
        return {}


@dataclass(frozen=True)
@checked
class ModelConfig:
    """One transformer.

    Args:
        vocab_size: number of token ids.
        hidden_size: D, the width of the residual stream.
        num_hidden_layers: blocks (of the decoder, where there are both).
        num_attention_heads: H, query heads.
        num_key_value_heads: K, which divides H. None for H (multi-head attention); 1 is multi-query attention.
        head_dim: size of a head; None for D / H.
        intermediate_size: inner width of the feed-forward layer; None for 4 D, or about 8/3 D where it is gated, which
            holds as many weights.
        max_position_embeddings: the longest sequence that the model is made for.

        architecture: decoder (causal), encoder (every position sees every other) or encoder-decoder.
        num_encoder_layers: blocks of the encoder of an encoder-decoder; None for num_hidden_layers.
        position: how positions are encoded: a learned embedding, rotation of queries and keys (rope), a penalty that grows
            with the distance (alibi), a learned bias per distance (relative), or not at all.
        rope_theta: the base of RoPE's frequencies.
        rope_scaling: how they are stretched, if they are.
        relative_attention_num_buckets: how many groups of distances `relative` tells apart.
        relative_attention_max_distance: from here on all distances are one group.

        norm: rms_norm or layer_norm.
        norm_eps: added to the mean square, or the variance, before the root.
        norm_position: pre (before each sublayer, and once at the end) or post (after each residual sum).
        embedding_norm: normalise the embeddings as well.
        qk_norm: normalise queries and keys before RoPE.
        qk_norm_over: each head by itself (Qwen 3), or all heads as one vector (projection, OLMoE).
        hidden_act: the feed-forward activation; gelu_tanh is GPT-2's approximation.
        gated: multiply the activation by a second projection (SwiGLU with silu, GeGLU with gelu).
        attention_bias: biases on the query, key and value projections.
        attention_output_bias: a bias on the output projection of attention.
        mlp_bias: biases in the feed-forward layer.
        experts: a mixture of experts in place of the feed-forward layers; comes with chapter 09.
        attention_scale: multiplies queries times keys; None for head_dim ** -0.5.
        sliding_window: each position sees this many last ones, itself included; None for all.
        layer_types: for each block `full_attention` or `sliding_attention`; None for the window in all blocks.
        attention: sdpa (PyTorch's kernel) or eager (`grouped_query_attention`, written out).

        type_vocab_size: number of segment embeddings, as BERT has two; 0 for none.
        head: linear, or mlm for BERT's: a layer with activation and norm before, a bias after.
        tie_word_embeddings: the head's weight is the token embedding.
        logit_scale: multiplies what goes into the head; T5 uses hidden_size ** -0.5 with tied embeddings.
        hidden_dropout: on the embeddings and on each sublayer's output.
        attention_dropout: on the attention weights.
        initializer_range: standard deviation of the initial weights.

    Raises:
        ValueError: an unknown choice, sizes that do not divide, or options that exclude each other.
    """

    vocab_size: PositiveInt = 256
    hidden_size: PositiveInt = 256
    num_hidden_layers: Blocks = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    max_position_embeddings: PositiveInt = 1024

    architecture: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    num_encoder_layers: Blocks | None = None
    position: Literal["none", "learned", "rope", "alibi", "relative"] = "rope"
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    relative_attention_num_buckets: PositiveInt = 32
    relative_attention_max_distance: PositiveInt = 128

    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: PositiveFloat = 1e-5
    norm_position: Literal["pre", "post"] = "pre"
    embedding_norm: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    hidden_act: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    attention_scale: PositiveFloat | None = None
    sliding_window: PositiveInt | None = None
    layer_types: tuple[str, ...] | None = None
    attention: Literal["sdpa", "eager"] = "sdpa"

    type_vocab_size: NonNegativeInt = 0
    head: Literal["linear", "mlm"] = "linear"
    tie_word_embeddings: bool = False
    logit_scale: PositiveFloat = 1.0
    hidden_dropout: BelowOne = 0.0
    attention_dropout: BelowOne = 0.0
    initializer_range: PositiveFloat = 0.02

    def __post_init__(self) -> None:
        require_divisible(self)
        require_compatible(self)

    def resolved(self) -> "ModelConfig":
        """The same model with every None that stands for a number replaced by that number. A model keeps this one."""
        return replace(
            self,
            num_key_value_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            intermediate_size=self.intermediate_size or default_intermediate_size(self.hidden_size, self.gated),
            num_encoder_layers=(self.num_encoder_layers or self.num_hidden_layers) if self.architecture == "encoder-decoder" else None,
            attention_scale=self.attention_scale or (self.head_dim or self.hidden_size // self.num_attention_heads) ** -0.5,
            layer_types=self.layer_types or (("sliding_attention" if self.sliding_window else "full_attention"),) * self.num_hidden_layers,
        )

    def encoder(self) -> "ModelConfig":
        """The encoder of a resolved encoder-decoder, as a model of its own."""
        changes = {"architecture": "encoder", "num_hidden_layers": self.num_encoder_layers, "num_encoder_layers": None}
        return replace(self, **changes, sliding_window=None, layer_types=None).resolved()

    def differences(self, other: "ModelConfig") -> dict[str, tuple]:
        """The fields in which two configurations describe different models: name -> (here, there)."""
        here, there = self.resolved(), other.resolved()
        names = dict.fromkeys(field.name for config in (here, there) for field in fields(config))  # one may be of a later chapter
        pairs = {name: (getattr(here, name, None), getattr(there, name, None)) for name in names}
        return {name: (left, right) for name, (left, right) in pairs.items() if left != right}


def default_intermediate_size(hidden_size: int, gated: bool) -> int:
    """4 D, or 8/3 D rounded up to a multiple of 64 where three matrices share the weights of two (Shazeer 2020, section 3)."""
    return -(-8 * hidden_size // (3 * 64)) * 64 if gated else 4 * hidden_size


def require_divisible(config: ModelConfig) -> None:
    heads, groups = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if config.head_dim is None and config.hidden_size % heads:
        raise ValueError(
            f"hidden_size ({config.hidden_size}) is not a multiple of num_attention_heads ({heads}): change one, or give head_dim."
        )
    if heads % groups:
        raise ValueError(
            f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({groups}), so groups would differ: change one."
        )
    head_dim = config.head_dim or config.hidden_size // heads
    if config.position == "rope" and head_dim % 2:
        raise ValueError(f"The head size is {head_dim}: rope turns pairs of dimensions, so make it even.")


def require_compatible(config: ModelConfig) -> None:
    """Refuse options that exclude each other: with one, the other would have no effect or be wrong."""
    wrong = [
        (config.rope_scaling and config.position != "rope", "rope_scaling needs position 'rope'"),
        (config.num_encoder_layers and config.architecture != "encoder-decoder", "num_encoder_layers needs architecture 'encoder-decoder'"),
        (config.sliding_window and config.architecture == "encoder", "sliding_window looks back only, and an encoder looks both ways"),
        (config.attention == "eager" and config.attention_dropout, "eager attention has no dropout: set attention_dropout to 0"),
        (config.layer_types and len(config.layer_types) != config.num_hidden_layers, "layer_types needs one entry for each block"),
        (
            config.layer_types and set(config.layer_types) - {"full_attention", "sliding_attention"},
            "layer_types takes 'full_attention' and 'sliding_attention'",
        ),
        ("sliding_attention" in (config.layer_types or ()) and not config.sliding_window, "sliding_attention needs sliding_window"),
        (type(config.experts) is ExpertsConfig, "experts come with chapter 09, whose configuration derives from ExpertsConfig"),
        (config.type_vocab_size and config.architecture == "encoder-decoder", "segment embeddings are for one stack only"),
    ]
    for is_wrong, reason in wrong:
        if is_wrong:
            raise ValueError(f"This model cannot be built: {reason}.")
