"""Chapter 04. FLOPs per token: how much arithmetic a token costs.

A matrix of n numbers that a token passes costs 2n operations forward (a product and a sum each) and 4n backward: 6n. Attention
adds the two products that have no weights, of queries with keys and of attention weights with values. What is left, norms,
activations, the softmax, the optimizer, is small and by convention not counted (Chowdhery et al. 2022, PaLM, appendix B).

    model FLOPs utilisation = FLOPs per token * tokens per second / peak FLOP/s

Left out on purpose: recomputation. Activation checkpointing costs time and no *model* FLOPs, so the utilisation shows its price.
"""

from dataclasses import replace

from shared.course.binding import exercise
from shared.model.config import ModelConfig
from shared.model.counting import active_feed_forward_size


@exercise("04.flops_per_token")
def flops_per_token(config: ModelConfig, seq: int) -> int:
    """Floating-point operations of one token's training step, forward and backward, in matrix products.

        6 * (numbers in the matrices that the token passes) + 12 * layers * heads * head_dim * seq

    The matrices are those of attention (queries [D, H * d], keys and values [D, K * d] each, output [H * d, D]), of the
    feed-forward layers (two, or three where it is gated) and of the head ([D, vocab]; where `head` is mlm, a
    [D, D] before it). The look-up in the embedding is no product, though a tied head is one. All seq^2 scores are counted, as the
    convention has it, although causal attention needs half.

    Args:
        config: a decoder, or an encoder (bidirectional). Resolved or not.
        seq: tokens in a sequence.

    Raises:
        ValueError: an encoder-decoder, whose two sides see different lengths, or a seq below 1.

    >>> gpt2 = ModelConfig(vocab_size=50257, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, gated=False)
    >>> flops_per_token(gpt2, 1024) == 6 * (12 * (4 * 768**2 + 2 * 768 * 3072) + 768 * 50257) + 12 * 12 * 768 * 1024
    True
    """


def model_flops_per_token(config: ModelConfig, seq: int) -> int:
    """`flops_per_token` of any model: of experts (chapter 09) only those are counted that a token passes, layer by layer."""
    dense = replace(config, experts=None)
    flops = flops_per_token(dense, seq)
    if config.experts is None:
        return flops
    sparse, dense = config.resolved(), dense.resolved()
    more = (active_feed_forward_size(sparse, layer) - active_feed_forward_size(dense, layer) for layer in range(dense.num_hidden_layers))
    return flops + 6 * sum(more)
