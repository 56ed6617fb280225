"""Chapter 02. Attention masks as data: causal, sliding window and document mask as small rules, combined with & and |.

A rule answers for query i and key j, counted from the start of the whole sequence: Causal() & Window(128) is Mistral,
Causal() | Prefix(n) a prefix language model, Causal() & Documents(ids) a packed batch. Rules become tensors once per forward
pass, in `to_attention_mask`, and not even then where PyTorch's kernel knows the pattern by itself, or where attention goes document by
document (`shared.model.document_attention`).

Left out on purpose: block-sparse kernels. PyTorch's FlexAttention has no backward pass on the CPU.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shared.model.document_attention import DocumentMask, PackedDocuments, pack_of, saves_work


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
    """Only the query's own document.

    ids: [batch, seq] int64, equal where positions belong together.
    packed: the same as lengths, where they were found on the host before; None to find them where `ids` is on the CPU.
    """

    ids: Tensor
    packed: PackedDocuments | None = None

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.ids[:, queries.squeeze(1), None] == self.ids[:, None, keys.squeeze(0)]


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Only real tokens as keys. valid: [batch, seq] bool over the keys, True for a real token."""

    valid: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.valid[:, None, keys.squeeze(0)]


class AttentionMask(NamedTuple):
    """A rule in the form that attention takes. With neither `causal` nor `documents` nor a tensor, every query sees every key.

    causal: the kernel's own causal pattern, for as many queries as keys.
    allowed: None, or bool broadcastable to [batch, 1, Q, K], True where the query may look.
    bias: None, or float [1, heads, Q, K], added to the scores; what is not allowed is -inf already where `allowed` is None.
    documents: packed rows, each document of which attends to itself.
    """

    causal: bool = False
    allowed: Tensor | None = None
    bias: Tensor | None = None
    documents: DocumentMask | None = None

    @property
    def kernel(self) -> str:
        """How attention takes it, in words."""
        if self.documents is not None:
            return "document by document"
        return "mask" if self.allowed is not None or self.bias is not None else "causal flag" if self.causal else "no mask"


def to_attention_mask(
    mask: Mask, queries: Tensor, keys: Tensor, bias: Tensor | None = None, *, sdpa: bool = True, in_order: bool = True,
    documents: bool = False,
) -> AttentionMask:  # fmt: skip
    """Turn a rule into what attention takes, with the position bias.

    Args:
        mask: the rule.
        queries: [Q] int64, positions of the queries in the sequence; they end where the keys end.
        keys: [K] int64, positions of the keys; -1 for the empty slots of a cache.
        bias: None, or [1, heads, Q, K].
        sdpa: whether PyTorch's kernel will take it: a causal rule then needs no tensor, and a bias takes the rule in.
        in_order: the keys are 0 .. K - 1, so that rules which they cannot break need no tensor.
        documents: whether attention may go document by document.
    """
    if in_order:
        mask = without_wide_windows(mask, len(keys))
        if sdpa and bias is None:
            if isinstance(mask, Full) or (mask == Causal() and len(queries) == 1):
                return AttentionMask()
            if mask == Causal() and len(queries) == len(keys):
                return AttentionMask(causal=True)
            if documents and len(queries) == len(keys) and (found := by_document(mask, len(keys))):
                return found
    allowed = mask.allowed(queries[:, None], (keys if in_order else keys.clamp(min=0))[None, :])
    allowed = allowed[:, None] if allowed.dim() == 3 else allowed[None, None]
    if not in_order:
        allowed = allowed & (keys >= 0)
    if sdpa and bias is not None:
        return AttentionMask(bias=bias.masked_fill(~allowed, -torch.inf))
    return AttentionMask(allowed=allowed, bias=bias)


def by_document(mask: Mask, seq: int) -> AttentionMask | None:
    """A rule for packed rows by their documents; None where it is another rule, or where a mask costs less."""
    rules = [rule for rule in parts_of(mask) if not isinstance(rule, Full)]
    kinds = sorted(type(rule).__name__ for rule in rules)
    if kinds not in (["Documents"], ["Causal", "Documents"], ["Causal", "Documents", "Window"]):
        return None
    rule = next(rule for rule in rules if isinstance(rule, Documents))
    on_cpu = rule.ids.is_cpu
    packed = pack_of(rule.ids, rule.ids.device) if rule.packed is None and on_cpu else rule.packed
    if packed is None:
        return None
    causal, window = "Causal" in kinds, next((rule.size for rule in rules if isinstance(rule, Window)), None)
    if len(packed.starts) - 1 == packed.rows and window is None:  # each row is one document
        return AttentionMask(causal=causal)
    cheaper = not on_cpu or saves_work(packed.lengths, packed.rows, seq)
    return AttentionMask(documents=DocumentMask(packed, causal, window)) if cheaper else None


def parts_of(mask: Mask) -> list[Mask]:
    """The rules that are combined by &."""
    return parts_of(mask.left) + parts_of(mask.right) if isinstance(mask, Both) else [mask]


def without_wide_windows(mask: Mask, keys: int) -> Mask:
    """The same rule for this many keys, without windows that hold all of them."""
    if isinstance(mask, Both):
        left, right = (without_wide_windows(side, keys) for side in (mask.left, mask.right))
        if isinstance(left, Full):
            return right
        return left if isinstance(right, Full) else Both(left, right)
    return Full() if isinstance(mask, Window) and mask.size >= keys else mask
