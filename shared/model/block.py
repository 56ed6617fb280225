"""Chapter 02. Transformer block: attention and feed-forward layer, each added to a residual stream that runs through the model.

Before (pre-norm, GPT-2): x + f(norm(x)), so the stream itself is never normalised on its way and deep models train.
After (post-norm, the original transformer, BERT): norm(x + f(x)). Xiong et al. 2020 show why post-norm needs a warm-up.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from shared.course.binding import exercise
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext


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
        cross: whether it looks at an encoder's output between its other two sublayers.
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
