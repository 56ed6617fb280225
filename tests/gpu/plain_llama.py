"""A LLaMA as one would write it in nanoGPT's manner, in one file and with nothing of the course: the peer of the speed slice."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.shared, self.size = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.head = self.size // self.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(self.size, config.norm_eps), nn.RMSNorm(self.size, config.norm_eps)
        self.qkv = nn.Linear(self.size, (self.heads + 2 * self.shared) * self.head, bias=False)
        self.out = nn.Linear(self.size, self.size, bias=False)
        self.gate_up = nn.Linear(self.size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, self.size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        parts = self.qkv(self.norm_1(x)).split([self.heads * self.head, *[self.shared * self.head] * 2], dim=-1)
        q, k, v = (part.view(rows, seq, -1, self.head).transpose(1, 2) for part in parts)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if self.heads != self.shared:
            k, v = (part.repeat_interleave(self.heads // self.shared, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, seq, self.size))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class PlainLlama(nn.Module):
    """ids [batch, seq] -> logits [batch, seq, vocab]; the head is the embedding."""

    def __init__(self, config):
        super().__init__()
        config = config.resolved()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([PlainBlock(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.arange(config.max_position_embeddings).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, seq = self.embedding(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        """The course's weights, by its names."""
        self.embedding.weight.copy_(weights["embedding.tokens.weight"])
        self.norm.weight.copy_(weights["stack.final_norm.weight"])
        for number, block in enumerate(self.blocks):
            of_block = {name: weights[f"stack.blocks.{number}.{name}.weight"] for name in NAMES}
            q, k, v, out, gate, up, down, norm_1, norm_2 = (of_block[name] for name in NAMES)
            block.qkv.weight.copy_(torch.cat([q, k, v]))
            block.gate_up.weight.copy_(torch.cat([gate, up]))
            for own, given in ((block.out, out), (block.down, down), (block.norm_1, norm_1), (block.norm_2, norm_2)):
                own.weight.copy_(given)


NAMES = (
    *(f"attention.{name}_proj" for name in "qkvo"), *(f"feed_forward.{name}_proj" for name in ("gate", "up", "down")), "attention_norm",
    "feed_forward_norm",
)  # fmt: skip
