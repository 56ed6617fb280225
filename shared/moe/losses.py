"""Chapter 09. Auxiliary losses of the router: the load-balancing loss and the router z-loss, as sums over tokens.

A router left alone sends most tokens to a few experts, which then learn most: it collapses. The balance loss (Fedus et al. 2021, Switch
Transformers, equation 4) multiplies the share f_i of a row's choices that went to expert i, which has no gradient, by the mean
probability P_i that the router gave it, which has one: experts that are chosen too often are made less probable.

**Scale.** Both losses enter the objective under its one division rule: each is a sum over the valid tokens of a micro-batch, times its
coefficient, and the step divides it with the loss by the valid tokens of the global batch. f and P are taken over a single row, times
the row's tokens. So the objective is

    mean over all valid tokens of (cross-entropy + sum over layers of (c_balance * balance loss of the token's row + c_z * z-loss))

however the rows are spread over micro-batches and ranks: the gradient is the same to rounding. Statistics of a micro-batch, which
most codes take, change the objective with its size. (OLMo-core calls rows `instance`; DeepSeek-V3, section 2.1.2: sequence-wise.)
Layers are added: averaged before the product, layers with opposite imbalances would cancel.

Left out on purpose: shares over the global batch (Qiu et al. 2025), which need each step's counts before its first backward pass.
"""

from collections.abc import Callable

from torch import Tensor

from shared.course.binding import exercise
from shared.model.config import ModelConfig
from shared.moe.config import MixtureConfig


@exercise("09.balance_loss")
def balance_loss(
    probabilities: Tensor, experts: Tensor, valid: Tensor, over_row: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The load-balancing loss of a layer, row by row, each row times its valid tokens.

        sum over rows r of  n_r * sum over experts i of f_ri * P_ri

        f_ri = choices of expert i by the row's n_r valid tokens / n_r         P_ri = mean over those tokens of probabilities[..., i]

    Tokens that do not count add nothing, and their gradient is 0, whatever their probabilities are, even NaN; NaN at a token that counts
    makes the loss NaN. A row may have no valid token, and adds 0.

    Count choices in the dtype of `probabilities`, not in int64: two int64 tensors divide to float32, which is too coarse for float64.

    No loop runs over rows, tokens or experts. There are hundreds of experts: apart from the arguments, no more is held at a time than
    about three tensors of the size of `probabilities` ([batch, seq, k, E] would be k of them).

    Args:
        probabilities: [batch, seq, E] in float32 or float64, each token's adding up to 1. The loss has a gradient to them alone.
        experts: [batch, seq, k] int64, the experts that each token chose, k different ones.
        valid: [batch, seq] bool, the tokens that count.
        over_row: for context parallelism, where a rank has some tokens of every row: called once, with the counts of choices [batch, E]
            of the tokens given here, in the dtype of `probabilities`, it returns a new tensor, the counts of the whole rows. What is
            returned is then these tokens' part of the loss; the ranks' parts add up to the loss of the whole rows. None where the rows are
            whole.

    Returns:
        [], in the dtype of `probabilities`. Where all is balanced, k / E for each valid token.

    >>> probabilities, experts = torch.full((1, 2, 4), 0.25), torch.tensor([[[0, 1], [2, 3]]])
    >>> balance_loss(probabilities, experts, torch.ones(1, 2, dtype=torch.bool))               # 2 tokens * 2 / 4
    tensor(1.)
    """


@exercise("09.z_loss")
def z_loss(logits: Tensor, valid: Tensor) -> Tensor:
    """The router z-loss (Zoph et al. 2022, ST-MoE, equation 5): it keeps the logits small, so they are rounded less.

        sum over valid tokens of log(sum over experts of exp(logit)) ** 2

    Logits of hundreds must not overflow. Tokens that do not count add nothing, and their gradient is 0, whatever their logits are, even
    NaN; NaN at a token that counts makes the loss NaN. No loop runs over rows, tokens or experts.

    Args:
        logits: [batch, seq, E] in float32 or float64.
        valid: [batch, seq] bool, the tokens that count.

    Returns:
        [], in the dtype of `logits`.

    >>> z_loss(torch.zeros(1, 3, 8), torch.tensor([[True, True, False]]))                       # 2 tokens * log(8) ** 2
    tensor(8.6482)
    """


def balance_scale(config: ModelConfig, experts: MixtureConfig) -> float:
    """What multiplies a layer's `balance_loss` by the configured convention; see `MixtureConfig.balance_convention`."""
    layers = config.num_hidden_layers - experts.first_k_dense
    divisors = {"megatron": experts.num_experts_per_tok, "switch": 1, "transformers": layers}
    return experts.num_experts / divisors[experts.balance_convention]
