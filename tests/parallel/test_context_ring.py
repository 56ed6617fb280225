"""Ring attention by itself: the numbers of one process for any mask, dtype and size of ring; what is computed, and what travels."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shared.model.attention import grouped_query_attention
from shared.model.masks import Causal, Documents, Full, Mask, Prefix, Window
from shared.model.positions import alibi_bias
from shared.parallel.comm.launch import run_processes
from shared.parallel.comm.threads import run_threads
from shared.parallel.context import blocks, ring
from shared.parallel.context.axis import Attend
from shared.parallel.context.blocks import merge_attention
from shared.parallel.context.mask import ALL, SOME, TRIANGLE, ContextMask
from shared.parallel.context.ring import exchange, gathered_attention, ring_attention
from shared.parallel.context.zigzag import SequenceShare, own_chunks

BATCH, HEADS, SHARED, SIZE, SEQ = 2, 4, 2, 6, 48
TWO_OF_FOUR = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
LENGTHS = [[13, 1, 2, 27, 5], [48]]
PACKED = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in LENGTHS])
RULES = {
    "full": Full(), "causal": Causal(), "window": Causal() & Window(5), "packed": Causal() & Documents(PACKED),
    "prefix": Causal() | Prefix(torch.tensor([3, 20])), "packed, both ways": Full() & Documents(PACKED),
    "window in packed": Causal() & Window(7) & Documents(PACKED), "one document is nobody's": Causal() & Window(5) & Prefix(10),
}  # fmt: skip


def given(length: int = SEQ, scale: float = 1.0, dtype=torch.float64) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(4)
    sizes = [(BATCH, heads, length, SIZE) for heads in (HEADS, SHARED, SHARED, HEADS)]
    queries, *rest = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return [x.to(dtype) for x in (scale * queries, *rest)]


def no_bias(queries: Tensor, keys: Tensor) -> None:
    return None


def alone(rule: Mask, tensors: list[Tensor], bias=no_bias, scale: float = 0.4) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values, in float64, written out."""
    *inputs, upstream = (x.double() for x in tensors)
    inputs = [x.requires_grad_() for x in inputs]
    places = torch.arange(inputs[0].shape[2])
    allowed = rule.allowed(places[:, None], places[None, :])
    allowed = allowed[:, None] if allowed.dim() == 3 else allowed[None, None]
    out = grouped_query_attention(*inputs, allowed, bias(places, places), scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def over_ranks(
    ranks: int, rule: Mask, tensors: list[Tensor], bias=no_bias, attend: Attend = ring_attention, scale: float = 0.4
) -> list[Tensor]:
    """The same by ranks that each have a share."""
    length = tensors[0].shape[2]

    def work(world):
        indices = SequenceShare(world).indices(length)
        *inputs, upstream = (x.index_select(2, indices) for x in tensors)
        inputs = [x.requires_grad_() for x in inputs]
        mask = ContextMask(rule, world, length, bias, torch.device("cpu"))
        out = attend(*inputs, mask, scale)
        return indices, [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    told = run_threads(work, ranks)
    back = torch.cat([indices for indices, _ in told]).argsort()
    return [torch.cat(parts, dim=2).index_select(2, back) for parts in zip(*(found for _, found in told), strict=True)]


def require_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("attend", [ring_attention, gathered_attention])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rule", RULES)
def test_attention_over_ranks_is_that_of_one_process(rule, ranks, attend):
    require_close(over_ranks(ranks, RULES[rule], given(), attend=attend), alone(RULES[rule], given()))


@pytest.mark.parametrize("rule", ["causal", "packed, both ways"])
def test_without_a_kernel_the_same_is_computed(rule, monkeypatch):
    monkeypatch.setattr(blocks, "has_kernel", lambda queries: False)
    require_close(over_ranks(3, RULES[rule], given()), alone(RULES[rule], given()))
    bias = partial(alibi_bias, HEADS)
    require_close(over_ranks(2, RULES[rule], given(), bias), alone(RULES[rule], given(), bias))


@pytest.mark.parametrize("rule", ["causal", "full", "window in packed"])
@pytest.mark.parametrize("attend", [ring_attention, gathered_attention])
def test_a_bias_is_that_of_the_whole_sequences_positions(rule, attend):
    bias = partial(alibi_bias, HEADS)
    require_close(over_ranks(4, RULES[rule], given(), bias, attend), alone(RULES[rule], given(), bias))


def test_two_documents_of_four_over_two_ranks():
    """Rank 0 has positions 0, 1, 6, 7 and rank 1 has 2, 3, 4, 5: each has a half of both documents."""
    rule, tensors = Causal() & Documents(TWO_OF_FOUR), given(8)
    whole = over_ranks(2, rule, tensors)
    require_close(whole, alone(rule, tensors))
    halves = [alone(Causal(), [x[:, :, half] for x in tensors]) for half in (slice(0, 4), slice(4, 8))]
    require_close(whole, [torch.cat(pair, dim=2) for pair in zip(*halves, strict=True)])


@pytest.mark.parametrize("changed, moved", [(0, [0, 1, 2, 3]), (2, [2, 3]), (4, [4, 5, 6, 7]), (7, [7])])
def test_a_changed_token_moves_the_outputs_of_its_own_document_alone(changed, moved):
    rule, tensors = Causal() & Documents(TWO_OF_FOUR), given(8)
    others = [x.clone() for x in tensors]
    others[1][:, :, changed] += 1.0
    others[2][:, :, changed] -= 1.0
    before, after = over_ranks(2, rule, tensors)[0], over_ranks(2, rule, others)[0]
    assert [place for place in range(8) if not torch.equal(before[:, :, place], after[:, :, place])] == moved


@pytest.mark.parametrize("rule", ["full", "causal", "packed"])
def test_the_error_of_bfloat16_does_not_grow_with_the_ring(rule):
    tensors = given(dtype=torch.bfloat16)
    expected = alone(RULES[rule], tensors)
    errors = {}
    for ranks in (2, 4, 8):
        found = over_ranks(ranks, RULES[rule], tensors)
        assert all(x.dtype == torch.bfloat16 for x in found)
        errors[ranks] = [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]
    assert all(error < 6e-3 for each in errors.values() for error in each), errors
    assert all(later < 1.3 * first for first, later in zip(errors[2], errors[8], strict=True)), errors


@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_large_scores_do_not_overflow(scale):
    tensors = given(scale=scale)
    found = over_ranks(4, Causal(), [x.float() for x in tensors])
    assert all(x.isfinite().all() for x in found)
    require_close(over_ranks(4, Causal(), tensors), alone(Causal(), tensors), 1e-11)


def test_a_query_that_may_look_nowhere_gets_zeros_and_passes_none():
    rule = RULES["one document is nobody's"]
    out, of_queries, of_keys, of_values = over_ranks(4, rule, given(dtype=torch.float32))
    assert not out[:, :, 14:].any() and not of_queries[:, :, 14:].any() and out[:, :, :10].all()
    assert all(x.isfinite().all() for x in (out, of_queries, of_keys, of_values))


# Who computes what, and what travels.


def masks_of(ranks: int, rule: Mask, length: int) -> list[ContextMask]:
    return run_threads(lambda world: ContextMask(rule, world, length, no_bias, torch.device("cpu")), ranks)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_causal_work_is_even(ranks):
    masks = masks_of(ranks, Causal(), 4 * ranks)
    triangles = [[mask.looks[chunk].count(TRIANGLE) for chunk in own_chunks(rank, ranks)] for rank, mask in enumerate(masks)]
    whole = [sum(mask.looks[chunk].count(ALL) for chunk in own_chunks(rank, ranks)) for rank, mask in enumerate(masks)]
    assert triangles == [[1, 1]] * ranks and whole == [2 * ranks - 1] * ranks
    assert all(mask.looks == masks[0].looks and mask.looks[0].count(SOME) == 0 for mask in masks)


@pytest.mark.parametrize(
    "rule, length, reach",
    [
        (Full(), 16, [3] * 8), (Causal(), 16, [3, 3, 3, 3, 3, 2, 1, 0]), (Causal() & Window(3), 16, [1, 1, 1, 0, 1, 1, 1, 0]),
        (Causal() & Documents(torch.arange(8)[None].repeat_interleave(2, dim=1)), 16, [0] * 8),
        (Causal() & Documents(torch.tensor([[0] * 3 + [1] * 13])), 16, [1, 3, 3, 3, 3, 2, 1, 0]),
    ],
)  # fmt: skip
def test_a_chunk_travels_as_far_as_the_last_rank_that_looks_at_it(rule, length, reach):
    assert all(mask.reach == reach for mask in masks_of(4, rule, length))


def sent(ranks: int, rule: Mask, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Bytes that each rank sends in the forward pass, and in the backward pass."""
    length = SEQ

    def work(world):
        *inputs, upstream = (x.index_select(2, SequenceShare(world).indices(length)) for x in given(dtype=dtype))
        inputs = [x.requires_grad_() for x in inputs]
        out = ring_attention(*inputs, ContextMask(rule, world, length, no_bias, torch.device("cpu")), 0.4)
        forward = world.trace.bytes()["send", "world"]
        out.backward(upstream)
        assert world.trace.calls().keys() <= {("send", "world"), ("receive", "world"), ("all_gather", "world")}
        assert world.trace.bytes()["all_gather", "world"] == 4 * world.size**2
        return forward, world.trace.bytes()["send", "world"] - forward

    return run_threads(work, ranks)


@pytest.mark.parametrize("dtype, width", [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 4)])
@pytest.mark.parametrize(
    "rule, hops", [("full", 2 * 4 * 3), ("causal", 3 * 4 * 3 // 2), ("window", 6), ("window in packed", 6), ("packed, both ways", 24)]
)
def test_what_travels_is_what_the_formula_says(rule, hops, dtype, width):
    """width: bytes of a number of a gradient that travels."""
    numbers = 2 * BATCH * SHARED * (SEQ // 8) * SIZE
    told = sent(4, RULES[rule], dtype)
    assert sum(forward for forward, _ in told) == hops * numbers * dtype.itemsize
    assert sum(backward for _, backward in told) == hops * numbers * (dtype.itemsize + width)


def test_blocks_that_nobody_looks_at_are_not_computed(monkeypatch):
    computed, inner = [], ring.attend_block
    monkeypatch.setattr(ring, "attend_block", lambda *arguments: computed.append(1) or inner(*arguments))
    for rule, count in ((Full(), 64), (Causal(), 36), (Causal() & Window(5), 15), (Causal() & Documents(PACKED.new_zeros(2, SEQ)), 36)):
        computed.clear()
        over_ranks(4, rule, given())
        assert len(computed) == count, rule


class Largest(TorchDispatchMode):
    """Notes the most numbers in a tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, *(x.numel() for x in pytree.tree_leaves(made) if isinstance(x, Tensor)), 0)
        return made


@pytest.mark.parametrize("rule", [Causal(), Causal() & Window(200), Causal() & Documents(torch.arange(512)[None] // 100)])
def test_no_rank_makes_a_matrix_of_its_queries_and_all_keys(rule):
    def work(world):
        queries = torch.randn(1, 1, 512 // world.size, 4, requires_grad=True)
        with Largest() as largest:
            mask = ContextMask(rule, world, 512, no_bias, torch.device("cpu"))
            ring_attention(queries, queries, queries, mask, 0.5).sum().backward()
        return largest.numbers

    assert max(run_threads(work, 4)) == 64 * 64 < 512 * 4 * 4


# Sends and receives.


def test_of_two_ranks_the_lower_one_sends_first_and_the_higher_one_receives_first():
    """NCCL carries out what is between two ranks in the order of their calls."""

    def work(world):
        tensors = {chunk: torch.full((3,), float(world.rank)) for chunk in range(4)}
        peer = 1 - world.rank
        sends = {chunk: (peer, tensors[chunk]) for chunk in ((3, 0) if world.rank else (1, 2))}
        exchange(world, sends, {chunk: (peer, tensors[chunk]) for chunk in tensors if chunk not in sends}).wait()
        return [entry.operation for entry in world.trace.entries], [int(tensors[chunk][0]) for chunk in range(4)]

    low, high = run_threads(work, 2)
    assert low == (["send", "send", "receive", "receive"], [1, 0, 0, 1]) and high == (["receive", "receive", "send", "send"], [1, 0, 0, 1])


def over_gloo(world):
    *inputs, upstream = (x.index_select(2, SequenceShare(world).indices(SEQ)) for x in given())
    inputs = [x.requires_grad_() for x in inputs]
    out = ring_attention(*inputs, ContextMask(RULES["packed"], world, SEQ, no_bias, torch.device("cpu")), 0.4)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_and_threads_give_the_same_bits(ranks):
    for mine, theirs in zip(run_processes(over_gloo, ranks), run_threads(over_gloo, ranks), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


# Wrong on purpose: the comparison with one process must see each.


def contiguous(rank: int, ranks: int) -> tuple[int, int]:
    return 2 * rank, 2 * rank + 1


def kept_at_the_last_rank(self, hops: int, found: dict) -> None:
    if hops == 0:
        self.home = found


WRONG = {
    "chunks in another order than positions": ("mask.own_chunks", contiguous),
    "the last part's log-sum-exp kept": ("ring.merge_attention", lambda a, b, c, d: (merge_attention(a, b, c, d)[0], d)),
    "parts added up": ("ring.merge_attention", lambda a, b, c, d: (a + c, torch.logaddexp(b, d))),
    "gradients that do not come home": ("ring.Returning.add", kept_at_the_last_rank),
    "a chunk's own indices": ("mask.ContextMask.indices", lambda self, chunk: torch.arange(self.size)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_ring_is_seen(wrong, monkeypatch):
    place, what = WRONG[wrong]
    monkeypatch.setattr(f"shared.parallel.context.{place}", what)
    found = over_ranks(4, RULES["packed"], given())
    with pytest.raises(AssertionError):
        require_close(found, alone(RULES["packed"], given()))
