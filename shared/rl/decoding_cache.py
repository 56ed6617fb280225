"""Chapter 12. KV cache for decoding: preallocated, with rows of several lengths, which come and go while the others stay.

    read     prompts -> the next free rows of the cache, one pass over all of them
    step     the last token of each row -> the row's next place
    drop     a row's answer is complete: the last row takes its place

Rows 0, 1, ... are in use, so that a pass looks at views of the cache and copies nothing. While the cache serves a model, each attention
layer of its decoder hands new keys and values to `cached_attention`. The model is otherwise called as ever, so tensor parallelism, full
sharding, experts and a pipeline's stages work unchanged: each rank's cache holds the heads and layers that the rank has. For a
plain model, `step` calls `shared.rl.fused_step` instead of the model; all its layers then use one attention bias.

Left out on purpose: a ring for sliding windows, which would save memory but not time, and blocks of a cache that rows share.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.devices import sent
from shared.model.attention import Attention, masked_attention
from shared.model.context import KeyValueCache, to_compute_dtype
from shared.model.masks import Padding
from shared.model.transformer import TransformerModel
from shared.preference.gathering import fits_whole, free_memory
from shared.preference.sampler import logits_at
from shared.rl import cached_attention
from shared.rl.fused_step import FusedStep


class DecodingCache(KeyValueCache):
    """Keys and values of the rows that a model continues.

    Args:
        model: what objectives call: a `TransformerModel` with a decoder, or what stands for it on a rank. In evaluation mode, without
            gradients.
        rows: that are continued at a time, at most.
        places: tokens of a row, at most.
        read_places: the same of what an encoder reads.
        multiple: the number of tokens in a pass is a multiple of this (sequence parallelism).
        fused: whether a plain model's weights are copied for the fused step (`FusedStep`); None to copy them if they fit into free memory.

    Attributes:
        used: rows in use.
        lengths: [rows] int64, the tokens of each that the cache holds. counts: the same on the host, which then need not wait for a GPU.
    """

    def __init__(self, model: nn.Module, rows: int, places: int, read_places: int = 0, multiple: int = 1, fused: bool | None = None):
        self.model, self.multiple, self.used = model, multiple, 0
        self.decoder = decoder_of(model)
        self.places = places + -places % multiple + multiple - 1  # a row's last token may be followed by padding
        require_room(self.decoder, self.places)
        device = next(model.parameters()).device
        self.lengths, self.counts = torch.zeros(rows, dtype=torch.int64, device=device), [0] * rows
        self.read_lengths, self.read_places = torch.zeros_like(self.lengths), read_places
        self.part = slice(0, 0)  # the rows of the running pass
        self.kept: dict[Attention, Tensor] = {}  # keys and values side by side, [rows, 2 K, places, d], from a layer's first pass on
        self.biases: dict[str, Tensor] = {}
        plain = FusedStep.fits(model)
        if plain and fused is None:
            fused = fits_whole(FusedStep.copied_bytes(model), free_memory(device))
        self.fused = FusedStep(model, self.places, self.attend_biased) if plain and fused else None

    # What the model asks of its cache.

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values as they are: `attend` takes them in, together with the queries."""
        return keys, values

    def keys(self, layer_type: str, queries: Tensor) -> Tensor:
        """Of no use here, since rows have places of their own; as short as can be, because the stack makes a mask of it."""
        return queries[:1]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within it, the model's attention looks at this cache."""
        blocks = self.decoder.stack.blocks.values()
        pairs = [(block.attention, self.attend) for block in blocks]
        pairs += [(block.cross_attention, self.attend_to_read) for block in blocks if block.cross_attention is not None]
        before = [attention.attend for attention, _ in pairs]
        try:
            for attention, attend in pairs:
                attention.attend = partial(attend, attention)
            yield
        finally:
            for (attention, _), attend in zip(pairs, before, strict=True):
                attention.attend = attend

    def attend(
        self, attention: Attention, queries: Tensor, keys: Tensor, values: Tensor, mask: Any = None, scale: float = 0, dropout: float = 0
    ) -> Tensor:
        """`attention.attend` of a decoder's layer: over this layer's part of the cache."""
        queries, new = to_compute_dtype(queries), to_compute_dtype(torch.cat([keys, values], dim=1))
        shared = queries.is_cuda and queries.shape[1] > keys.shape[1]  # a GPU's kernels take no mask beside shared heads
        if shared or self.decoder.config.position in ("alibi", "relative"):
            return self.attend_biased(attention, queries, new)
        cached = self.view(attention, new, self.places)
        window = self.decoder.config.sliding_window if attention.layer_type == "sliding_attention" else None
        return cached_attention.cached_attention(
            queries, *new.chunk(2, dim=1), *cached.chunk(2, dim=1), self.lengths[self.part], attention.scale, window,
            self.length + queries.shape[2],
        )  # fmt: skip

    def attend_biased(self, attention: Attention, queries: Tensor, new: Tensor) -> Tensor:
        """The same by a bias, which layers of a type share in a pass, and with the position bias of models that have one. Of one new token
        in each row, the heads that share keys are given to the kernel as if they were tokens: it then reads these keys once.

        new: keys and values side by side, [rows, 2 K, new, d].
        """
        bias = self.bias(attention.layer_type, queries)
        cached = self.view(attention, new, self.places)
        cached[self.index] = new.transpose(1, 2)
        keys, values = cached[:, :, : bias.shape[-1]].chunk(2, dim=1)
        if queries.shape[2] > 1:
            return masked_attention(queries, keys, values, bias, attention.scale)
        groups = [each.reshape(len(each), min(each.shape[1], keys.shape[1]), -1, each.shape[3]) for each in (queries, bias)]
        return F.scaled_dot_product_attention(groups[0], keys, values, groups[1], scale=attention.scale).reshape(queries.shape)

    def attend_to_read(
        self, attention: Attention, queries: Tensor, keys: Tensor, values: Tensor, mask: Any, scale: float, dropout: float
    ) -> Tensor:
        """`attention.attend` of cross-attention. The keys and values of what the encoder has read come in the first pass, later ones bring
        none."""
        queries, new = to_compute_dtype(queries), to_compute_dtype(torch.cat([keys, values], dim=1))
        cached = self.view(attention, new, self.read_places)
        cached[:, :, : new.shape[2]] = new
        allowed = torch.arange(self.read_places, device=queries.device) < self.read_lengths[self.part, None]
        return masked_attention(queries, *cached.chunk(2, dim=1), allowed[:, None, None], scale)

    def view(self, attention: Attention, new: Tensor, places: int) -> Tensor:
        """A layer's keys and values of the running pass's rows, made as large and of the dtype that its first ones say."""
        if attention not in self.kept:
            self.kept[attention] = new.new_zeros(len(self.lengths), new.shape[1], places, new.shape[3])
        return self.kept[attention][self.part]

    def new_places(self, new: int) -> Tensor:
        """[rows, new] int64: where the running pass's tokens stand in their rows."""
        return self.lengths[self.part, None] + torch.arange(new, device=self.lengths.device)

    def bias(self, layer_type: str, queries: Tensor) -> Tensor:
        """[rows, heads or 1, new, T]: the position bias of each row, or 0, and -inf where it may not look. Layers of a type share it in a
        pass."""
        if layer_type not in self.biases:
            places, config = self.new_places(queries.shape[2]), self.decoder.config
            seen = torch.arange(self.length + queries.shape[2], device=places.device)
            hidden = seen > places[..., None]
            if layer_type == "sliding_attention":
                hidden |= seen <= places[..., None] - config.sliding_window
            if config.position in ("alibi", "relative"):
                bias = self.decoder.stack.position_bias(places.flatten(), seen).squeeze(0).unflatten(1, places.shape).transpose(0, 1)
            else:
                bias = torch.zeros_like(hidden, dtype=queries.dtype)[:, None]
            self.biases[layer_type] = bias.masked_fill(hidden[:, None], -torch.inf).to(queries.dtype)
        return self.biases[layer_type]

    # Passes.

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Take in prompts as the rows behind those in use: [prompts, vocab], the logits behind each. Equal ones are computed once."""
        unique = list(dict.fromkeys(map(tuple, prompts)))
        ids, lengths = padded(unique, self.multiple, self.lengths.device)
        self.part = slice(self.used, self.used + len(unique))
        self.lengths[self.part], self.counts[self.part] = 0, [0] * len(unique)
        logits = self.forward(ids, lengths - 1)
        self.lengths[self.part], self.counts[self.part] = lengths, [len(prompt) for prompt in unique]
        if len(unique) < len(prompts):
            numbers = {prompt: number for number, prompt in enumerate(unique)}
            logits = self.copy_rows(logits, [numbers[tuple(prompt)] for prompt in prompts])
        self.used += len(prompts)
        return logits

    def read_pairs(self, prompts: Sequence[Sequence[int]], start_id: int) -> Tensor:
        """The same of an encoder-decoder, whose encoder reads the prompts, and whose decoder begins with `start_id`."""
        ids, lengths = padded(prompts, 1, self.lengths.device)
        memory = self.decoder.encode(ids, Padding(torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]))
        self.part = slice(self.used, self.used + len(prompts))
        self.lengths[self.part], self.read_lengths[self.part], self.counts[self.part] = 0, lengths, [0] * len(prompts)
        logits = self.forward(torch.full_like(ids[:, :1], start_id), torch.zeros_like(lengths), memory)
        self.lengths[self.part], self.counts[self.part] = 1, [1] * len(prompts)
        self.used += len(prompts)
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Take in one more token of each row in use, in order: [used, vocab], the logits of the token behind it."""
        self.part = slice(0, self.used)
        if self.fused is not None:
            self.start_pass(1)
            logits = self.fused(sent(torch.tensor(tokens), self.lengths.device), self.lengths[self.part])
        else:
            ids, lengths = padded([[token] for token in tokens], self.multiple, self.lengths.device)
            logits = self.forward(ids, lengths - 1)
        self.lengths[self.part] += 1
        self.counts[self.part] = [count + 1 for count in self.counts[self.part]]
        return logits

    def idle(self) -> None:
        """A pass over nothing that counts, while no row is in use: ranks with parts of the weights run the model equally often."""
        self.read([[0]])
        self.used = 0

    def start_pass(self, new: int) -> None:
        """Find the longest row and the places of the new tokens once, for all layers."""
        self.length = max(self.counts[self.part])
        places = self.new_places(new)
        self.index = torch.arange(len(places), device=places.device)[:, None], slice(None), places
        self.biases.clear()

    def forward(self, ids: Tensor, wanted: Tensor, memory: Tensor | None = None) -> Tensor:
        """One pass over new tokens, [rows, new], of the rows of `part`: the logits at one of them in each row, [rows, vocab]."""
        positions, head_fn = self.new_places(ids.shape[1]), partial(logits_at, places=wanted)
        self.start_pass(ids.shape[1])
        with self.serving():
            if self.decoder.encoder is None:
                return self.model(ids, positions=positions, cache=self, head_fn=head_fn)
            if memory is None:  # its keys and values are here already
                memory = torch.empty(len(ids), 0, self.decoder.config.hidden_size, device=ids.device, dtype=self.memory_dtype)
            self.memory_dtype = memory.dtype
            x = self.decoder.embed(ids, positions, None, self)
            return head_fn(self.decoder.head, self.decoder.stack(x, positions, cache=self, memory=memory))

    # Rows.

    def copy_rows(self, logits: Tensor, numbers: Sequence[int]) -> Tensor:
        """Give each prompt a row of its own, from the rows of the last pass."""
        index = sent(torch.tensor(numbers), self.lengths.device)
        behind, before = slice(self.used, self.used + len(numbers)), self.counts[self.part]
        longest = max(before)
        for kept in self.kept.values():
            kept[behind, :, :longest] = kept[self.part, :, :longest][index]
        self.lengths[behind], self.counts[behind] = self.lengths[self.part][index], [before[number] for number in numbers]
        return logits[index]

    def drop(self, row: int) -> None:
        """Free a row. The last row in use becomes this one."""
        self.used -= 1
        if row != self.used:
            for each in (*self.kept.values(), self.lengths, self.read_lengths):
                each[row] = each[self.used]
            self.counts[row] = self.counts[self.used]


def decoder_of(model: nn.Module) -> TransformerModel:
    """The `TransformerModel` with a decoder within a model."""
    found = next((module for module in model.modules() if isinstance(module, TransformerModel)), None)
    if found is None or found.config.architecture == "encoder":
        raise ValueError(f"A {type(model).__name__} without a decoder writes no text: give a decoder or an encoder-decoder.")
    odd = [type(block.attention).__name__ for block in found.stack.blocks.values() if not isinstance(block.attention, Attention)]
    if odd:
        raise ValueError(f"A KV cache serves chapter 02's Attention, and this model has {odd[0]}: draw with PlainSampler.")
    return found


def require_room(decoder: TransformerModel, places: int) -> None:
    """Reject texts that do not fit into the cache or the model's positions."""
    config = decoder.config
    dynamic = config.rope_scaling is not None and config.rope_scaling.rope_type == "dynamic"
    if (config.position == "learned" or dynamic) and places > config.max_position_embeddings:
        why = "keys that are kept would have other frequencies under dynamic RoPE scaling" if dynamic else "no more are learned"
        raise ValueError(
            f"Prompt and answer have up to {places} positions, and max_position_embeddings is {config.max_position_embeddings}: {why}. "
            "Give shorter prompts or fewer new tokens."
        )


def padded(rows: Sequence[Sequence[int]], multiple: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids as [rows, longest], padded with 0 on the right to a multiple, and their lengths [rows], both int64."""
    longest = max(map(len, rows))
    longest += -longest % multiple
    ids = sent(torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows]), device)
    return ids, sent(torch.tensor([len(row) for row in rows]), device)
