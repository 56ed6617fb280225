"""Chapter 02. `TransformerModel`: a transformer of any family (decoder, encoder, encoder-decoder), by configuration alone.

    ids -> embedding -> (encoder ->) stack of blocks -> norm -> head -> logits [batch, seq, vocab]

`model(input_ids)` is all that chapter 01's loop needs. Submodule names are stable: the same with any builders, and in a
part of the model as in the whole (`keep_part`), so checkpoints and initial weights do not depend on how it is laid out.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shared.model.attention import Attention
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext, KeyValueCache
from shared.model.embedding import Embedding, Head
from shared.model.feed_forward import build_feed_forward
from shared.model.init import initialize
from shared.model.masks import Mask
from shared.model.norm import build_norm
from shared.model.block import Stack

TIED = "head.linear.weight"
TIED_TO = "embedding.tokens.weight"


def build_linear(name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
    return nn.Linear(in_features, out_features, bias=bias)


def build_embedding(name: str, num_embeddings: int, size: int) -> nn.Module:
    return nn.Embedding(num_embeddings, size)


def run_block(block: nn.Module, x: Tensor, context: AttentionContext) -> Tensor:
    return block(x, context)


PLAIN = Builders(build_linear, build_embedding, build_norm, Attention, build_feed_forward, run_block)  # every piece as chapter 02 makes it


class TransformerModel(nn.Module):
    """A transformer of any family.

    Args:
        config: which one. `model.config` is its resolved form.
        builders: what its pieces are made of; later chapters put their own in.
        seed: of the initial weights. On the meta device there are none; see `shared.model.init.materialize`.

    `embedding`, `head`, single blocks of `stack.blocks` and `stack.final_norm` may be absent, which makes the model one
    stage of a pipeline; see `keep_part`. `loss_scale` is what an objective's loss is multiplied by before its backward pass:
    `set_loss_scale` sets it, for layers that have a loss of their own. `token_ids` holds what an imported model's files say of the tokens
    that end, begin and pad a text (`shared.model.hf.files`), for its export. `stored_as`, where a model has another head (chapter 11),
    makes of its family's `Format` and `config.json` the ones that say so, and `trained_whole` names, beside adapters, the head's parameters
    and what files call them.
    """

    def __init__(self, config: ModelConfig, builders: Builders = PLAIN, seed: int = 0):
        super().__init__()
        self.config = config = config.resolved()
        self.loss_scale = 1.0
        self.token_ids: dict[str, Any] = {}
        self.stored_as: Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]] | None = None
        self.trained_whole: dict[str, str] = {}
        self.embedding: Embedding | None = Embedding(config, builders)
        self.encoder = Stack(config.encoder(), builders) if config.architecture == "encoder-decoder" else None
        self.stack = Stack(config, builders)
        self.head: Head | None = Head(config, builders)
        self.tie_weights()
        if not any(parameter.is_meta for parameter in self.parameters()):
            initialize(self, seed)

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        pattern: Mask | None = None,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_mask: Mask | None = None,
        cross_mask: Mask | None = None,
        cache: KeyValueCache | None = None,
        valid: Tensor | None = None,
        head_fn: Callable[[nn.Module, Tensor], Any] | None = None,
    ) -> Any:
        """The logits [batch, seq, vocab]; without a head, the hidden states [batch, seq, D].

        Args:
            input_ids: [batch, seq] int64; without an embedding, the hidden states [batch, seq, D] of the stage before. Those
                of the encoder in an encoder-decoder.
            positions: [seq] or [batch, seq] int64; None to count from 0, or on from a cache.
            mask: restricts attention beyond the model's own pattern: padding, documents. `shared.model.masks`.
            pattern: takes the place of the model's own pattern (causal, or full): `Causal() | Prefix(n)`.
            token_type_ids: [batch, seq] int64 segments, for models that have them; None for all 0.
            decoder_input_ids: [batch, seq] int64, of the decoder in an encoder-decoder. `positions`, `mask`, `pattern`
                and the logits are then the decoder's.
            encoder_mask: restricts attention within the encoder.
            cross_mask: restricts what the decoder sees of the encoder.
            cache: keys and values of positions before these, and a place for the new ones; chapter 12.
            valid: [batch, seq] bool, the valid tokens (of the loss); None for all. Attention ignores it: it is for
                feed-forward layers with a loss of their own. Or float, what each of them weighs there, 0 for none.
            head_fn: head_fn(head, hidden_states) is called in place of head(hidden_states), and its result is returned: a loss
                that never holds all logits, the logits of some positions only. Called inside `forward`, so that wrappers
                of the model see it.
        """
        self.require_inputs(decoder_input_ids, encoder_mask, cross_mask)
        memory = None
        if self.encoder is not None:
            memory = self.encode(input_ids, encoder_mask)
            input_ids = decoder_input_ids
        if positions is None:
            past = cache.length if cache is not None else 0
            positions = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids, positions, token_type_ids, cache)
        x = self.stack(
            x, positions, mask=mask, pattern=pattern, cache=cache, memory=memory, memory_mask=cross_mask,
            valid=valid, loss_scale=self.loss_scale,
        )  # fmt: skip
        if self.head is None:
            return x
        return self.head.whole_logits(self.head(x)) if head_fn is None else head_fn(self.head, x)

    def encode(self, input_ids: Tensor, mask: Mask | None = None) -> Tensor:
        """An encoder-decoder's encoder alone: [batch, T] ids -> [batch, T, D]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.encoder(self.embed(input_ids, positions), positions, mask=mask)

    def embed(
        self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Ids to [batch, seq, D]; without an embedding, what came in is that already."""
        if self.embedding is None:
            return input_ids
        length = input_ids.shape[1] + (cache.length if cache is not None else 0)
        return self.embedding(input_ids, positions, token_type_ids, length)

    def require_inputs(self, decoder_input_ids: Tensor | None, encoder_mask: Mask | None, cross_mask: Mask | None) -> None:
        if self.encoder is not None and decoder_input_ids is None:
            raise ValueError("An encoder-decoder needs decoder_input_ids: [batch, seq], what the decoder has read so far.")
        extra = {"decoder_input_ids": decoder_input_ids, "encoder_mask": encoder_mask, "cross_mask": cross_mask}
        given = [name for name, value in extra.items() if value is not None]
        if self.encoder is None and given:
            raise ValueError(f"{', '.join(given)} given to a model without an encoder: architecture is {self.config.architecture!r}.")

    def tie_weights(self) -> None:
        """Tied embeddings: make the head's weight the token embedding, where both are here and the configuration ties them."""
        if self.config.tie_word_embeddings and self.embedding is not None and self.head is not None:
            self.head.linear.weight = self.embedding.tokens.weight

    def logical_name(self, name: str) -> str:
        """The name under which a parameter is stored and initialised: a tied head is the token embedding."""
        return TIED_TO if name == TIED and self.config.tie_word_embeddings else name


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Tell each `TransformerModel` within a module what the loss is multiplied by before its backward pass."""
    for module in model.modules():
        if isinstance(module, TransformerModel):
            module.loss_scale = scale


def keep_part(model: TransformerModel, blocks: Iterable[int], *, embedding: bool, head: bool) -> TransformerModel:
    """Cut a model down to one stage of a pipeline, in place: some blocks, and the ends or not. Names do not change.

    The final norm stays with the head. Where embeddings are tied, the stages at the two ends each hold the weight, and
    its two gradients must be added up.
    """
    blocks, present = set(blocks), {int(layer) for layer in model.stack.blocks}
    if missing := sorted(blocks - present):
        raise ValueError(f"The model has no blocks {missing}: it has {sorted(present)}.")
    if model.encoder is not None or model.stack.relative_bias is not None:
        raise ValueError("An encoder-decoder, or a model with relative positions, cannot be cut: its blocks share more than hidden states.")
    for layer in present - blocks:
        del model.stack.blocks[str(layer)]
    if not head:
        model.head, model.stack.final_norm = None, None
    if not embedding:
        model.embedding = None
    return model
