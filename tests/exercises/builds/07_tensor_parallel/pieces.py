"""What the stages of build 07 share: sizes, weights, and the oracle, the same model in one process.

The oracle is `TransformerModel` in one process, in float64; it agrees with Hugging Face's LlamaForCausalLM (tests/parity/test_07_build.py
holds the same weights against both). Ranks are threads. Tolerance: a sum over ranks changes the order of additions, which moves float64
by some 1e-15 of the largest summand; 1e-9 is far from that and far from any mistake.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel

SIZES = {
    "vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 10, "intermediate_size": 28,
}  # fmt: skip
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
NORM_EPS = 3e-3  # not the default: a build that writes 1e-5 itself is noticed
ONE_PROCESS = "the same model in one process, in float64"
NEAR = {"rtol": 1e-9, "atol": 1e-9}

Results = dict[str, Any]


def in_letters(sizes: dict[str, int]) -> str:
    """The sizes as build.py calls them."""
    letters = ("V", "D", "L", "H", "K", "d", "F")
    return ", ".join(f"{letter} {size}" for letter, size in zip(letters, (SIZES | sizes).values(), strict=True))


def config_of(sizes: dict[str, int]) -> ModelConfig:
    return ModelConfig(**SIZES | sizes, **BIASES, norm_eps=NORM_EPS).resolved()


def weights_of(config: ModelConfig, biases: bool = True) -> dict[str, Tensor]:
    """The whole model's weights, under the names that build.py lists. None is zero or one, unless `biases` is False."""
    random, width, inner = torch.Generator().manual_seed(7), config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=random, dtype=torch.float64)

    found = {"embedding.weight": normal(config.vocab_size, width)}
    for number in range(config.num_hidden_layers):
        matrices = {
            "attention.q_proj": (queries, width), "attention.k_proj": (keys, width), "attention.v_proj": (keys, width),
            "attention.o_proj": (width, queries), "feed_forward.gate_up_proj": (2 * inner, width), "feed_forward.down_proj": (width, inner),
        }  # fmt: skip
        for norm in ("attention_norm", "feed_forward_norm"):
            found[f"blocks.{number}.{norm}.weight"] = 1 + normal(width, scale=0.2)
        for name, (rows, columns) in matrices.items():
            found[f"blocks.{number}.{name}.weight"] = normal(rows, columns, scale=columns**-0.5)
            found[f"blocks.{number}.{name}.bias"] = normal(rows, scale=0.5 if biases else 0.0)
    return found | {"final_norm.weight": 1 + normal(width, scale=0.2), "head.weight": normal(config.vocab_size, width, scale=0.3)}


def core_name(name: str) -> str:
    """The name of a weight in `TransformerModel`."""
    special = {"embedding.weight": "embedding.tokens.weight", "head.weight": "head.linear.weight"}
    return special.get(name, f"stack.{name}")


class Whole:
    """The model in one process, and gradients under the build's names."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]):
        self.model, self.names = TransformerModel(config).double(), list(weights)
        parameters = dict(self.model.named_parameters())
        for name, weight in weights.items():
            for target, part in zip(self.pieces(name), weight.chunk(len(self.pieces(name))), strict=True):
                parameters[target].data.copy_(part)

    def pieces(self, name: str) -> list[str]:
        core = core_name(name)
        return [core.replace("gate_up_proj", each) for each in ("gate_proj", "up_proj")] if "gate_up_proj" in name else [core]

    def gradients(self) -> dict[str, Tensor]:
        parameters = dict(self.model.named_parameters())
        return {name: torch.cat([parameters[piece].grad for piece in self.pieces(name)]) for name in self.names}

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """One layer's attention alone: the model runs, with `x` in place of what the layer would get."""
        seen: list[Tensor] = []
        attention = self.model.stack.blocks[str(layer)].attention
        hooks = [attention.register_forward_pre_hook(lambda module, inputs: (x, *inputs[1:]))]
        hooks += [attention.register_forward_hook(lambda module, inputs, output: seen.append(output))]
        self.model(torch.zeros(x.shape[:2], dtype=torch.int64))
        for hook in hooks:
            hook.remove()
        return seen[0]

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        return self.model.stack.blocks[str(layer)].feed_forward(x)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embedding.tokens(ids)

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model.head.linear(x), targets)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(ids), targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def stream(config: ModelConfig, length: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, length, config.hidden_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def tokens(config: ModelConfig, length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """ids and targets [batch, length]; one target in five does not count."""
    random = torch.Generator().manual_seed(5)
    ids, targets = (torch.randint(config.vocab_size, (batch, length), generator=random) for _ in range(2))
    ids[0, 0], ids[-1, -1] = config.vocab_size - 1, 0
    targets[torch.rand(batch, length, generator=random) < 0.2] = -100
    return ids, targets
