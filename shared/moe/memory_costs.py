"""Chapter 09. Activation memory of a mixture of experts by formula: what router, experts and shared experts keep for the backward pass.

Every token's k choices are counted, also those that a capacity drops. The router keeps the tokens in float32, experts and shared experts
keep them in the dtype of the products.

Left out on purpose: batched products, whose padding depends on the routing, and the blocks that half precision pads rows to on a CPU
(`shared.moe.experts.in_blocks`): at most an eighth of the rows within experts.
"""

from shared.model.config import ModelConfig


def saved_by_experts(config: ModelConfig, rows: int, seq: int, width: int, ranks: int, imbalance: float) -> tuple[float, float]:
    """What a layer keeps of [rows, seq] tokens; see `ExpertsConfig.saved_bytes`."""
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
