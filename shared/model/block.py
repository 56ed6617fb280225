"""Chapter 02. Transformer block (attention and feed-forward layer, each added to a residual stream), and the stack of a model's blocks.

Before (pre-norm, GPT-2): x + f(norm(x)), so the stream itself is never normalised on its way and deep models train.
After (post-norm, the original transformer, BERT): norm(x + f(x)). Xiong et al. 2020 show why post-norm needs a warm-up.
The stack makes what its blocks share once in a forward pass: masks, RoPE tables or position biases.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext, KeyValueCache
from shared.model.document_attention import takes_documents
from shared.model.masks import Causal, Full, Mask, Window, to_attention_mask
from shared.model.rope import RelativeBias, alibi_bias, rope_tables


@exercise("02.block_forward")
def block_forward(x: Tensor, sublayers: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]], pre_norm: bool) -> Tensor:
    """Pass the residual stream through a block's sublayers, in order (Xiong et al. 2020, table 1).

    Each sublayer's output is added to the stream. In a pre-norm block a sublayer reads the stream through its norm, and the stream itself
    passes no norm. In a post-norm block a sublayer reads the stream as it is, and its norm is applied to the sum, which is the stream for
    the next one. Nothing that a function returned is changed: it may be the stream itself.

    Args:
        x: [batch, seq, D]. Left unchanged.
        sublayers: pairs (norm, sublayer) of functions [batch, seq, D] -> [batch, seq, D]: attention, then feed-forward; in
            a decoder with an encoder, cross-attention stands between them. Each function is called once. There may be none.
        pre_norm: which of the two.

    Returns:
        [batch, seq, D].

    >>> double, minus_one = (lambda x: 2 * x), (lambda x: x - 1)
    >>> block_forward(torch.tensor([[[3.0]]]), [(minus_one, double)], pre_norm=True)      # 3 + 2 * (3 - 1)
    tensor([[[7.]]])
    >>> block_forward(torch.tensor([[[3.0]]]), [(minus_one, double)], pre_norm=False)     # (3 + 2 * 3) - 1
    tensor([[[8.]]])
    """


class Block(nn.Module):
    """One block: [batch, seq, D] -> [batch, seq, D].

    Args:
        config: a resolved configuration.
        layer: its number in its stack, from 0.
        cross: whether it has cross-attention to an encoder's output between its other two sublayers.
    """

    def __init__(self, config: ModelConfig, builders: Builders, layer: int, cross: bool = False):
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.attention_norm = builders.norm(config, config.hidden_size)
        self.attention = builders.attention(config, builders, layer, False)
        self.cross_attention_norm = builders.norm(config, config.hidden_size) if cross else None
        self.cross_attention = builders.attention(config, builders, layer, True) if cross else None
        self.feed_forward_norm = builders.norm(config, config.hidden_size)
        self.feed_forward = builders.feed_forward(config, builders, layer)
        self.dropout = nn.Dropout(config.hidden_dropout) if config.hidden_dropout else nn.Identity()

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        sublayers = [(self.attention_norm, lambda h: self.dropout(self.attention(h, context)))]
        if self.cross_attention is not None:
            sublayers.append((self.cross_attention_norm, lambda h: self.dropout(self.cross_attention(h, context))))
        wanted = (context,) if getattr(self.feed_forward, "needs_context", False) else ()
        sublayers.append((self.feed_forward_norm, lambda h: self.dropout(self.feed_forward(h, *wanted))))
        return block_forward(x, sublayers, self.pre_norm)


class Stack(nn.Module):
    """The blocks of a model, or of one half of an encoder-decoder: [batch, seq, D] -> [batch, seq, D].

    Blocks are kept by their number, so that a part of them has the names that the whole has. `run_block` may also be set
    later, from outside; see `Builders`.

    Args:
        config: a resolved configuration; its architecture says whether the stack is causal and has cross-attention.

    Attributes:
        attended: `AttentionMask.kernel` -> masks of it that forward passes in training made; a compiled model counts none.
    """

    def __init__(self, config: ModelConfig, builders: Builders):
        super().__init__()
        self.config, self.run_block = config, builders.run_block
        self.attended: Counter[str] = Counter()
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
            documents = takes_documents(queries.device, self.config.head_dim, self.config.attention_dropout)
            masks[name] = to_attention_mask(
                rule, queries, keys, bias, sdpa=self.sdpa, in_order=cached is None, documents=documents
            )
        if self.training and not torch.compiler.is_compiling():
            self.attended.update(mask.kernel for mask in masks.values())
        rope = rope_tables(self.config, positions, length) if self.config.position == "rope" else None
        return AttentionContext(masks, rope, cache)

    def rules(self, mask: Mask | None = None, pattern: Mask | None = None) -> dict[str, Mask]:
        """Which keys a query attends to, for each layer type."""
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
