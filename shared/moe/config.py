"""Chapter 09. Mixture-of-experts configuration: how many experts, how the router scores and chooses them, and how their load is balanced.

    model: {experts: {num_experts: 8, moe_intermediate_size: 352, num_experts_per_tok: 2}}

Published models are points in this space. Mixtral: softmax, renormalised. OLMoE: softmax as it is. DeepSeek-V3: sigmoid scores, a bias
that steers the choice in place of a loss, groups of experts, shared experts, dense first layers.

Left out on purpose: experts of different widths, biases in experts, a mixture in every second layer only.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from shared.course.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from shared.course.errors import SettingError
from shared.course.extensions import Extension
from shared.model.config import ExpertsConfig, ModelConfig
from shared.parallel.config import ParallelConfig

CAPACITY_OF_WHOLE_ROWS = (
    "model.experts.capacity_factor with parallel.context_parallel: experts take the first choices of a row, and no rank has whole rows. "
    "Set one of the two to null or 1."
)


@dataclass(frozen=True)
@checked
class MixtureConfig(ExpertsConfig):
    """A mixture of experts in place of the feed-forward layers. Names are Hugging Face's where one exists.

    Args:
        num_experts: E, in each layer that has them.
        moe_intermediate_size: inner width of one expert.
        num_experts_per_tok: k, how many experts each token passes.
        scoring: softmax over all experts, or a sigmoid for each expert (DeepSeek-V3).
        norm_topk_prob: divide the chosen experts' scores by their sum, so that a token's weights add up to 1. With one expert per token its
            weight is then always 1, and the router has no gradient but that of its own losses: Switch, with k = 1, sets it to false.
        routed_scaling_factor: multiplies the weights after that.
        n_group, topk_group: the experts stand in `n_group` groups, and a token chooses within the best `topk_group` of them; a
            group is as good as the sum of its two best scores (DeepSeek-V3, section 2.1.2).
        num_shared_experts: experts that every token passes, with weight 1, computed as one feed-forward layer.
        first_k_dense: this many first blocks keep the dense feed-forward layer, of `intermediate_size`.
        balance_coefficient: multiplies the balance loss; 0 for none. See `shared.moe.losses` for what it is and over what it is averaged.
        balance_convention: the scale of the balance loss, for weights that come from another code. In a perfectly balanced layer it is
            megatron: 1 (also OLMo-core and DeepSeek's sequence-wise loss); switch: k (1 for Switch, where k is 1);
            transformers: k, and the mean over the layers in place of their sum.
        z_coefficient: multiplies the router z-loss; 0 for none.
        bias_update_rate: how far the choice's bias moves in a step towards equal load (Wang et al. 2024); None for a router without bias.
        capacity_factor: in training an expert takes at most capacity_factor * k * seq / E of a row's choices, and the later ones
            are dropped; None for no limit (dropless). Evaluation and generation drop nothing.
        implementation: how the experts' products are computed: one product for each expert (loop), one batched product over padded
            rows, or a grouped product. They agree; see `shared.moe.experts`.

    Raises:
        ValueError: a number out of range, or sizes that do not fit each other.
    """

    moe_intermediate_size: PositiveInt
    num_experts_per_tok: PositiveInt = 2
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: PositiveFloat = 1.0
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    num_shared_experts: NonNegativeInt = 0
    first_k_dense: NonNegativeInt = 0
    balance_coefficient: NonNegativeFloat = 0.01
    balance_convention: Literal["megatron", "switch", "transformers"] = "megatron"
    z_coefficient: NonNegativeFloat = 0.0
    bias_update_rate: NonNegativeFloat | None = None
    capacity_factor: PositiveFloat | None = None
    implementation: Literal["grouped", "batched", "loop"] = "grouped"

    def __post_init__(self) -> None:
        if self.num_experts % self.n_group or (self.n_group > 1 and self.num_experts < 2 * self.n_group):
            raise ValueError(
                f"experts.n_group is {self.n_group}, which must divide experts.num_experts ({self.num_experts}) into groups of 2 or more."
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"experts.topk_group is {self.topk_group}: give 1 to experts.n_group ({self.n_group}).")
        reachable = self.num_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > reachable:
            raise ValueError(f"experts.num_experts_per_tok is {self.num_experts_per_tok}: a token has {reachable} to choose from.")

    def is_sparse(self, layer: int) -> bool:
        """Whether block `layer` has experts."""
        return layer >= self.first_k_dense

    def parameter_counts(self, config: ModelConfig, layer: int) -> dict[str, int]:
        matrices = 3 if config.gated else 2
        if not self.is_sparse(layer):
            return {"matrix": matrices * config.hidden_size * config.intermediate_size}
        expert = matrices * config.hidden_size * self.moe_intermediate_size
        return {
            "matrix": config.hidden_size * self.num_experts + self.num_shared_experts * expert,
            "expert": self.num_experts * expert,
            "bias": 0 if self.bias_update_rate is None else self.num_experts,
        }

    def active_matrix_size(self, config: ModelConfig, layer: int) -> int:
        counts = self.parameter_counts(config, layer)
        return counts["matrix"] + counts.get("expert", 0) * self.num_experts_per_tok // self.num_experts

    @property
    def has_constant_gate(self) -> bool:
        """Whether a token's weights do not depend on the router's scores, which then have no gradient from the model's loss."""
        return self.num_experts_per_tok == 1 and self.norm_topk_prob

    @property
    def has_losses(self) -> bool:
        return self.balance_coefficient > 0 or self.z_coefficient > 0

    @property
    def has_formula(self) -> bool:
        return self.implementation != "batched"  # whose padding depends on the routing

    def cut(self, ranks: int) -> "MixtureConfig":
        return replace(self, moe_intermediate_size=-(-self.moe_intermediate_size // ranks))

    def saved_bytes(
        self, config: ModelConfig, rows: int, seq: int, width: int, ranks: int, imbalance: float
    ) -> tuple[float, float]:
        return saved_by_experts(config, rows, seq, width, ranks, imbalance)

    def split_numbers(self, config: ModelConfig, imbalance: float) -> float:
        entries, shared = 3 if config.gated else 2, self.num_shared_experts * self.moe_intermediate_size
        of_row = 2 * config.hidden_size + entries * self.moe_intermediate_size
        return self.num_experts_per_tok * imbalance * of_row + (2 * config.hidden_size + entries * shared if shared else 0)

    def comparable(self, config: ModelConfig) -> dict[str, Any]:
        """Training and the implementation are left out, and a dense width that no layer has."""
        bias = None if self.bias_update_rate is None else 0.0
        plain = replace(
            self, balance_coefficient=0.01, balance_convention="megatron", z_coefficient=0.0, bias_update_rate=bias, capacity_factor=None,
            implementation="grouped",
        )  # fmt: skip
        return {"experts": plain} | ({} if self.first_k_dense else {"intermediate_size": 1})


@dataclass(frozen=True)
class ModelParts:
    """Parts of the model by import path, in place of the core's. Each is called as its builder is (`shared.model.builders.Builders`), with
    its options besides, and returns a module.

    Args:
        norm: norm(config, size).
        attention: attention(config, builders, layer, cross).
        feed_forward: feed_forward(config, builders, layer).
    """

    norm: Extension | None = None
    attention: Extension | None = None
    feed_forward: Extension | None = None


@dataclass(frozen=True)
class MixtureModelConfig(ModelConfig):
    """One transformer, dense or with a mixture of experts: `ModelConfig` whose `experts` and `parts` can be given.

    Raises:
        ValueError: also experts in a model that they are not built for.
    """

    experts: MixtureConfig | None = None
    parts: ModelParts | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts is not None and self.parts is not None and self.parts.feed_forward is not None:
            raise ValueError("model.experts and model.parts.feed_forward both say what the feed-forward layers are: give one of them.")
        if self.experts is not None and self.mlp_bias:
            raise ValueError("model.mlp_bias is true, and experts have no biases: set it to false.")


def require_layout(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse layouts in which a mixture of experts is not proved equal to one process, and models in which no block would have one.
    Not a matter of `MixtureModelConfig`: the first blocks of a model, whose costs a pipeline's balance asks for, may all be dense.
    """
    experts, by_torch = config.experts, parallel.backend == "torch"
    if experts is None:
        return
    wrong = [
        (
            experts.first_k_dense >= config.num_hidden_layers,
            f"model.experts.first_k_dense is {experts.first_k_dense} of {config.num_hidden_layers} blocks, so none has experts: give less.",
        ),
        (
            experts.moe_intermediate_size % parallel.tensor_parallel > 0,
            f"parallel.tensor_parallel {parallel.tensor_parallel} does not divide model.experts.moe_intermediate_size "
            f"{experts.moe_intermediate_size}: change one of the two.",
        ),
        (
            by_torch and parallel.tensor_parallel > 1,
            "model.experts with parallel.backend torch and tensor_parallel: parallelize_module has no style for a stack of experts, and "
            "DTensor no rule for products of as many rows as the data say. Set tensor_parallel to 1, or backend to course.",
        ),
        (
            by_torch and parallel.expert_parallel > 1 and parallel.fully_sharded > 1,
            "parallel.expert_parallel with backend torch and fully_sharded: fully_shard adds every gradient over all its ranks, and an "
            "expert's is added over fewer. Set one of the two to 1, or backend to course.",
        ),
        (experts.capacity_factor is not None and parallel.context_parallel > 1, CAPACITY_OF_WHOLE_ROWS),
    ]
    for is_wrong, reason in wrong:
        if is_wrong:
            raise SettingError(reason)


def saved_by_experts(config: ModelConfig, rows: int, seq: int, width: int, ranks: int, imbalance: float) -> tuple[float, float]:
    """Activation memory of a layer by formula: what router and experts save of [rows, seq] tokens for the backward pass; see
    `ExpertsConfig.saved_bytes`.

    All k choices of a token count, also dropped ones. The router saves the tokens in float32, experts in the dtype of the products. Padding
    is left out: of batched products, and of the blocks that half precision pads rows to on a CPU, at most an eighth of the rows.
    """
    experts, tokens, size = config.experts, rows * seq, config.hidden_size
    number, k = experts.num_experts, experts.num_experts_per_tok
    inner, shared = experts.moe_intermediate_size, experts.num_shared_experts * experts.moe_intermediate_size
    entries = 2 if config.gated else 1  # matrices into an expert
    choices = tokens * k
    arriving = choices * imbalance
    logits = 4 * tokens * number
    balanced, z = experts.balance_coefficient > 0, experts.z_coefficient > 0
    grouped = experts.implementation == "grouped" and width <= 4

    everything = {
        "the router's input": 4 * tokens * size,
        "scores": 4 * tokens * number,
        "weights, their sum, and whether that is 0": 4 * tokens * (2 * k + 1.25 if experts.norm_topk_prob else k),
        "norms of sigmoid scores": 4 * tokens * 2 * (balanced and experts.scoring == "sigmoid"),
        "the rows' shares of choices": 4 * rows * (number + 1) * balanced,
        "logits and their logsumexp": (logits + 4 * tokens) * z,
        "experts, the sorted rows' tokens, and where rows go back to": 8 * 3 * choices,
        "ends of each expert's rows": 4 * number // ranks * (entries + 1) * grouped,
        "rows as they enter": width * arriving * size,
        "rows within experts": width * arriving * 2 * entries * inner,
        "rows as they come back": width * choices * size,
        "rows within shared experts": width * tokens * 2 * entries * shared,
        "the shared experts' input": width * tokens * size if shared and width < 4 else 0,
    }
    products = {
        "logits": logits,
        "into experts": width * arriving * entries * inner,
        "out of experts": width * arriving * size,
        "into shared experts": width * tokens * entries * shared,
        "out of shared experts": width * tokens * size * bool(shared),
    }
    return sum(everything.values()), sum(products.values())
