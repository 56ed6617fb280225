"""Chapter 02. The feed-forward layer (MLP), GELU or SwiGLU: matrices and an activation function, at each position. Most weights are here.

Plain: down(act(up(x))), Vaswani et al. 2017, equation 2. Gated: down(act(gate(x)) * up(x)), Shazeer 2020, called SwiGLU with
silu and GeGLU with gelu; three matrices, so the inner width is two thirds for as many weights.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import to_compute_dtype


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by tanh (Hendrycks and Gimpel 2016, section 2), up to 5e-4 from the one by erf."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu}


@exercise("02.swiglu")
def swiglu(
    x: Tensor,
    gate: Callable[[Tensor], Tensor],
    up: Callable[[Tensor], Tensor],
    down: Callable[[Tensor], Tensor],
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """The gated feed-forward layer (Shazeer 2020, equation 6): one projection decides how much of the other passes.

    Number by number, what `gate` made of x, behind the activation function, is multiplied with what `up` made of it; `down` leads back
    to the width of x. The activation function is on the gate alone. Nothing that a function returned is changed: it may be x itself.

    Args:
        x: [..., D]. Left unchanged.
        gate, up: [..., D] -> [..., I]. Each is called once.
        down: [..., I] -> [..., D]. Called once.
        activation: [..., I] -> [..., I]; SiLU, x * sigmoid(x), makes it SwiGLU, GELU makes it GeGLU.

    Returns:
        [..., D].

    >>> x = torch.tensor([1.0, -1.0])
    >>> swiglu(x, gate=lambda x: 10 * x, up=lambda x: x + 2, down=lambda x: 2 * x)     # silu(10) is 10, silu(-10) about 0
    tensor([59.9973, -0.0009])
    """


class FeedForward(nn.Module):
    """down(act(up(x))): [..., D] -> [..., D]."""

    def __init__(self, config: ModelConfig, builders: Builders):
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.up_proj = builders.linear("up_proj", config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = builders.linear("down_proj", config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class GatedFeedForward(FeedForward):
    """down(act(gate(x)) * up(x)): [..., D] -> [..., D]."""

    def __init__(self, config: ModelConfig, builders: Builders):
        super().__init__(config, builders)
        self.gate_proj = builders.linear("gate_proj", config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(to_compute_dtype(x), self.gate_proj, self.up_proj, self.down_proj, self.activation)


def build_feed_forward(config: ModelConfig, builders: Builders, layer: int) -> nn.Module:
    """The configured layer: the default of `Builders.feed_forward`. The same in every block."""
    if config.experts is not None:
        raise ValueError("This model has experts: give the builder of chapter 09 as replace(PLAIN, feed_forward=...).")
    return (GatedFeedForward if config.gated else FeedForward)(config, builders)
