"""Ring attention: which blocks are computed, what is made and kept, what travels and in which order."""

from threading import get_ident

import pytest
import torch
from ring_runs import BATCH, PACKED, RULES, SEQ, SHARED, SIZE, given, no_bias, over_ranks
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shared.model.masks import Causal, Documents, Full, Mask, Window
from shared.parallel.comm.threads import run_threads
from shared.parallel.context import ring
from shared.parallel.context.ring import exchange, ring_attention
from shared.parallel.context.zigzag import ALL, SOME, TRIANGLE, ContextMask, SequenceShare, own_chunks
from shared.parallel.processes.launch import run_processes


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


def test_the_next_keys_travel_while_a_block_is_computed(monkeypatch):
    """Of a rank's blocks of three steps: all but the last step's are computed while sends and receives are under way."""
    inner, under_way = ring.attend_block, {}

    def attend_block(*arguments):
        under_way[get_ident()].append(sum(entry.end is None for entry in world_of[get_ident()].trace.entries))
        return inner(*arguments)

    world_of = {}
    monkeypatch.setattr(ring, "attend_block", attend_block)

    def work(world):
        world_of[get_ident()], under_way[get_ident()] = world, []
        queries = torch.randn(1, 1, 4, 2)
        ring_attention(queries, queries, queries, ContextMask(Full(), world, 12, no_bias, torch.device("cpu")), 0.5)
        return under_way[get_ident()]

    assert run_threads(work, 3) == [[4] * 8 + [0] * 4] * 3


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
