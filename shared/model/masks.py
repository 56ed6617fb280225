"""Chapter 02. Attention masks as data: causal, sliding window and document mask as small rules, combined with & and |.

A rule answers for query i and key j, counted from the start of the whole sequence: Causal() & Window(128) is Mistral,
Causal() | Prefix(n) a prefix language model, Causal() & Documents(ids) a packed batch. Rules become tensors once per forward
pass, in `to_attention_mask`, and not even then where PyTorch's kernel knows the pattern by itself.

Left out on purpose: block-sparse kernels. PyTorch's FlexAttention has no backward pass on the CPU.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Mask:
    """A rule that says which keys a query attends to."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool, broadcastable to [batch, Q, K]: True where the query may look.

        Args:
            queries: [Q, 1] int64, indices in the sequence.
            keys: [1, K] int64.
        """
        raise NotImplementedError(f"{type(self).__name__} must define allowed(queries, keys).")

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Either(self, other)


@dataclass(frozen=True)
class Both(Mask):
    """What both rules allow."""

    left: Mask
    right: Mask

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.left.allowed(queries, keys) & self.right.allowed(queries, keys)


@dataclass(frozen=True)
class Either(Mask):
    """What at least one rule allows."""

    left: Mask
    right: Mask

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.left.allowed(queries, keys) | self.right.allowed(queries, keys)


@dataclass(frozen=True)
class Full(Mask):
    """All keys: an encoder's rule."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.ones_like(keys >= queries)


@dataclass(frozen=True)
class Causal(Mask):
    """The query itself and what came before."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys <= queries


@dataclass(frozen=True)
class Window(Mask):
    """At most `size` positions back, the query itself included. Says nothing about the future: combine with Causal."""

    size: int

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys > queries - self.size


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """The first `lengths` positions of each row, seen by all. lengths: [batch] int64, or one number."""

    lengths: Tensor | int

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        lengths = self.lengths[:, None, None] if isinstance(self.lengths, Tensor) else self.lengths
        return torch.broadcast_to(keys < lengths, torch.broadcast_shapes((keys < lengths).shape, queries.shape))


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Only the query's own document. ids: [batch, seq] int64, equal where positions belong together."""

    ids: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.ids[:, queries.squeeze(1), None] == self.ids[:, None, keys.squeeze(0)]


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Only real tokens as keys. valid: [batch, seq] bool over the keys, True for a real token."""

    valid: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.valid[:, None, keys.squeeze(0)]


class AttentionMask(NamedTuple):
    """A rule in the form that attention takes. With neither `causal` nor a tensor, every query sees every key.

    causal: the kernel's own causal pattern, for as many queries as keys.
    allowed: None, or bool broadcastable to [batch, 1, Q, K], True where the query may look.
    bias: None, or float [1, heads, Q, K], added to the scores; what is not allowed is -inf already where `allowed` is None.
    """

    causal: bool = False
    allowed: Tensor | None = None
    bias: Tensor | None = None


def to_attention_mask(
    mask: Mask, queries: Tensor, keys: Tensor, bias: Tensor | None = None, *, sdpa: bool = True, in_order: bool = True
) -> AttentionMask:
    """Turn a rule into what attention takes, with the position bias.

    Args:
        mask: the rule.
        queries: [Q] int64, positions of the queries in the sequence; they end where the keys end.
        keys: [K] int64, positions of the keys; -1 for the empty slots of a cache.
        bias: None, or [1, heads, Q, K].
        sdpa: whether PyTorch's kernel will take it: a causal rule then needs no tensor, and a bias takes the rule in.
        in_order: the keys are 0 .. K - 1, so that rules which they cannot break need no tensor.
    """
    if in_order:
        mask = without_wide_windows(mask, len(keys))
        if sdpa and bias is None:
            if isinstance(mask, Full) or (mask == Causal() and len(queries) == 1):
                return AttentionMask()
            if mask == Causal() and len(queries) == len(keys):
                return AttentionMask(causal=True)
    allowed = mask.allowed(queries[:, None], (keys if in_order else keys.clamp(min=0))[None, :])
    allowed = allowed[:, None] if allowed.dim() == 3 else allowed[None, None]
    if not in_order:
        allowed = allowed & (keys >= 0)
    if sdpa and bias is not None:
        return AttentionMask(bias=bias.masked_fill(~allowed, -torch.inf))
    return AttentionMask(allowed=allowed, bias=bias)


def without_wide_windows(mask: Mask, keys: int) -> Mask:
    """The same rule for this many keys, without windows that hold all of them."""
    if isinstance(mask, Both):
        left, right = (without_wide_windows(side, keys) for side in (mask.left, mask.right))
        if isinstance(left, Full):
            return right
        return left if isinstance(right, Full) else Both(left, right)
    return Full() if isinstance(mask, Window) and mask.size >= keys else mask
