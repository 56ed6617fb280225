"""Chapter 02. Layer builders, the extension points of the model: the functions that make its linear layers, norms, attention and blocks.

A `Builders` handed to `TransformerModel` replaces any of them: linear layers that hold a slice, a low-rank addition or four-bit
weights, a mixture of experts as feed-forward layer, an attention of another kind, a way to run a block that recomputes it. Names
of submodules stay as they are, so checkpoints and initial weights do not depend on who built a piece.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from shared.model.config import ModelConfig
from shared.model.context import AttentionContext


@dataclass(frozen=True)
class Builders:
    """How a model makes its pieces. Every configuration that they get is resolved.

    linear: linear(name, in_features, out_features, bias) -> module [..., in] -> [..., out]. The names are q_proj, k_proj,
        v_proj, o_proj, gate_proj, up_proj, down_proj, transform and head. A tied head's weight becomes the token
        embedding's, so its module must have a `weight` of that shape.
    embedding: embedding(name, num_embeddings, size) -> module, int64 [...] -> [..., size], with a `weight`. The names are
        tokens, positions and types.
    norm: norm(config, size) -> module over the last dimension.
    attention: attention(config, builders, layer, cross) -> module, called as module(x, context).
    feed_forward: feed_forward(config, builders, layer) -> module, [batch, seq, D] -> [batch, seq, D]. It is called as module(x), or as
        module(x, context) where its class says `needs_context = True`: a router needs to know which tokens count.
    run_block: run_block(block, x, context) -> x, called for each block in a forward pass.
    """

    linear: Callable[[str, int, int, bool], nn.Module]
    embedding: Callable[[str, int, int], nn.Module]
    norm: Callable[[ModelConfig, int], nn.Module]
    attention: Callable[[ModelConfig, "Builders", int, bool], nn.Module]
    feed_forward: Callable[[ModelConfig, "Builders", int], nn.Module]
    run_block: Callable[[nn.Module, Tensor, AttentionContext], Tensor]
