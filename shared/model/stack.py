"""Chapter 02. Stack of transformer blocks with what they share: masks, RoPE tables or position biases, the last norm."""

import torch
from torch import Tensor, nn

from shared.model.block import Block
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext, KeyValueCache
from shared.model.masks import Causal, Full, Mask, Window, to_attention_mask
from shared.model.positions import RelativeBias, alibi_bias
from shared.model.rope import rope_tables


class Stack(nn.Module):
    """The blocks of a model, or of one half of an encoder-decoder: [batch, seq, D] -> [batch, seq, D].

    Blocks are kept by their number, so that a part of them has the names that the whole has. `run_block` may also be set
    later, from outside; see `Builders`.

    Args:
        config: a resolved configuration; its architecture says whether the stack is causal and has cross-attention.
    """

    def __init__(self, config: ModelConfig, builders: Builders):
        super().__init__()
        self.config, self.run_block = config, builders.run_block
        self.pattern: Mask = Full() if config.architecture == "encoder" else Causal()
        cross = config.architecture == "encoder-decoder"
        bidirectional = config.architecture == "encoder"
        self.relative_bias = RelativeBias(config, bidirectional) if config.position == "relative" else None
        self.blocks = nn.ModuleDict({str(layer): Block(config, builders, layer, cross) for layer in range(config.num_hidden_layers)})
        self.final_norm = builders.norm(config, config.hidden_size) if config.norm_position == "pre" else None

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        mask: Mask | None = None,
        pattern: Mask | None = None,
        cache: KeyValueCache | None = None,
        memory: Tensor | None = None,
        memory_mask: Mask | None = None,
        valid: Tensor | None = None,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """See `TransformerModel.forward`. positions: [seq] or [batch, seq] int64; memory: [batch, T, D]."""
        past = cache.length if cache is not None else 0
        queries = torch.arange(past, past + x.shape[1], device=x.device)
        context = self.context(queries, positions, past + x.shape[1], mask, pattern, cache)
        context.valid, context.loss_scale = valid, loss_scale
        if memory is not None:
            context.memory = memory
            remembered = torch.arange(memory.shape[1], device=x.device)
            context.memory_mask = to_attention_mask(memory_mask or Full(), queries, remembered, sdpa=self.sdpa)
        for block in self.blocks.values():
            x = self.run_block(block, x, context)
        return x if self.final_norm is None else self.final_norm(x)

    def context(
        self,
        queries: Tensor,
        positions: Tensor,
        length: int,
        mask: Mask | None = None,
        pattern: Mask | None = None,
        cache: KeyValueCache | None = None,
    ) -> AttentionContext:
        """What the blocks share, made once: a mask for each layer type, position biases, RoPE tables.

        Args:
            queries: [seq] int64, where the new positions stand in the sequence.
            positions: what they are called: [seq] or [batch, seq] int64.
            length: of the whole sequence, these positions included.
        """
        masks = {}
        for name, rule in self.rules(mask, pattern).items():
            cached = cache.keys(name, queries) if cache is not None else None
            keys = torch.arange(length, device=queries.device) if cached is None else cached
            bias = self.position_bias(queries, keys)
            masks[name] = to_attention_mask(rule, queries, keys, bias, sdpa=self.sdpa, in_order=cached is None)
        rope = rope_tables(self.config, positions, length) if self.config.position == "rope" else None
        return AttentionContext(masks, rope, cache)

    def rules(self, mask: Mask | None = None, pattern: Mask | None = None) -> dict[str, Mask]:
        """Which keys a query may look at, for each layer type."""
        rule = pattern or self.pattern
        rule = rule if mask is None else rule & mask
        names = {self.config.layer_types[int(layer)] for layer in self.blocks}
        return {name: rule & Window(self.config.sliding_window) if name == "sliding_attention" else rule for name in names}

    def position_bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        if self.relative_bias is not None:
            return self.relative_bias(queries, keys)
        return alibi_bias(self.config.num_attention_heads, queries, keys) if self.config.position == "alibi" else None

    @property
    def sdpa(self) -> bool:
        return self.config.attention == "sdpa"
