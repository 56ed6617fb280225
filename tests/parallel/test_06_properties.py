"""Property tests of chapter 06's contracts: sentences of the docstrings, held against the solutions on inputs that hypothesis invents."""

import importlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.comm.trace import Work
from shared.parallel.data.activation_checkpointing import random_state_of

SOLUTION = importlib.import_module("solutions.06_data_parallel")
FEW = settings(max_examples=40)


@FEW
@given(st.integers(1, 6), st.integers(0, 15), st.sampled_from([torch.int64, torch.float32, torch.bfloat16]))
def test_the_ring_leaves_the_sum_on_all_ranks_by_equal_chunks_to_the_next(ranks, length, dtype):
    def add_up(world):
        tensor, sent, send = ((torch.arange(length) + world.rank) % 3).to(dtype), [], world.send
        world.send = lambda piece, to, **more: sent.append((to, piece.numel())) or send(piece, to, **more)
        SOLUTION.ring_all_reduce(tensor, world)
        return tensor.tolist(), sent

    expected = [sum((place + rank) % 3 for rank in range(ranks)) for place in range(length)]
    for rank, (found, sent) in enumerate(run_threads(add_up, ranks)):
        assert found == expected and len(sent) == 2 * (ranks - 1)
        assert all(to == (rank + 1) % ranks and size in (length // ranks, -(-length // ranks)) for to, size in sent)


class NotedBucket:
    def __init__(self, number, parameters, notes):
        self.number, self.parameters, self.notes = number, parameters, notes

    def start(self):
        self.notes.append((self.number, [None if p.grad is None else p.grad.item() for p in self.parameters]))
        return Work()


@FEW
@given(st.data())
def test_buckets_start_once_in_order_with_the_gradients_of_all_micro_batches(data):
    count = data.draw(st.integers(1, 6))
    passes = data.draw(st.lists(st.lists(st.integers(0, count - 1), min_size=1, unique=True), min_size=1, max_size=3))
    order, cuts = data.draw(st.permutations(range(count))), data.draw(st.sets(st.integers(1, count)))
    weights, notes = [nn.Parameter(torch.ones(())) for _ in range(count)], []
    ends = [0, *sorted(cuts | {count})]
    listed = [[order[place] for place in range(*pair)] for pair in zip(ends, ends[1:])]
    buckets = [NotedBucket(number, [weights[each] for each in own], notes) for number, own in enumerate(listed)]
    for number, used in enumerate(passes):
        if number == len(passes) - 1:
            finish = SOLUTION.sync_buckets(buckets)
        sum(10**number * weights[each] for each in used).backward()
    full = 0
    while full < len(listed) and set(listed[full]) <= set(passes[-1]):
        full += 1
    assert [number for number, _ in notes] == list(range(full))  # those that could have started in the pass have
    assert finish() is None
    digits = [sum(10**number for number, used in enumerate(passes) if each in used) or None for each in range(count)]
    assert notes == [(number, [digits[each] for each in own]) for number, own in enumerate(listed)]
    sum(weights).backward()
    assert len(notes) == len(listed)


@FEW
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=8), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_a_partition_gives_each_number_once_and_levels_what_may_be_cut(parameters, held):
    sizes, whole = [size for size, _ in parameters], [stays for _, stays in parameters]
    ranges = SOLUTION.partition(sizes, whole, held)
    holds, received = list(held), [0] * len(held)
    for size, stays, own in zip(sizes, whole, ranges, strict=True):
        assert len(own) == len(held)
        covered = sorted(number for start, stop in own for number in range(start, stop))
        assert covered == list(range(size)) and all(start <= stop for start, stop in own)
        assert not stays or sum(start < stop for start, stop in own) == 1
        for rank, (start, stop) in enumerate(own):
            holds[rank] += stop - start
            received[rank] += (stop - start) * (not stays)
    assert all(holds[rank] <= min(holds) + 1 for rank in range(len(held)) if received[rank])


@FEW
@given(st.lists(st.booleans(), min_size=1, max_size=3), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=3), st.integers(0, 9))
def test_a_recomputed_backward_pass_is_autograds(wanted, weights, seed):
    """wanted: whether an input requires a gradient. weights: whether a parameter does, and whether it is used."""
    torch.manual_seed(seed)
    inputs = [torch.randn(4, requires_grad=on) for on in wanted]
    parameters, upstream = [torch.randn(4, requires_grad=on) for on, _ in weights], torch.randn(4)
    read = [parameter for parameter, (_, used) in zip(parameters, weights) if used]

    def run(*given):
        return nn.functional.dropout(sum(x.sin() * (number + 1) for number, x in enumerate(given)) * torch.stack([*read, given[0]]).prod(0))

    before = random_state_of(upstream)
    output, after = run(*inputs), torch.get_rng_state()
    asked = [tensor for tensor in (*inputs, *parameters) if tensor.requires_grad]
    graph = asked and output.requires_grad
    found = iter(torch.autograd.grad(output, asked, upstream, allow_unused=True) if graph else [None] * len(asked))
    expected = [next(found) if tensor.requires_grad else None for tensor in (*inputs, *parameters)]
    with torch.no_grad():
        answers = SOLUTION.recompute(run, inputs, parameters, upstream, before)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(tensor.grad is None for tensor in (*inputs, *parameters))
    for answer, right in zip(answers, expected, strict=True):
        assert answer is right is None or torch.equal(answer, right)


@FEW
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4), st.integers(0, 3))
def test_a_unit_is_gathered_in_place_and_its_gradients_are_summed_in_shards(ranks, parameters, padding):
    """parameters: their sizes, and whether rank 0 has used them; the other ranks have used all."""
    sizes = [size for size, _ in parameters]
    share = -(-(sum(sizes) + padding) // ranks)

    def unit(world):
        whole = torch.zeros(share * ranks)
        view = whole[: sizes[0]]
        whole.untyped_storage().resize_(0)
        shard = torch.arange(share, dtype=torch.float64) + share * world.rank
        SOLUTION.unshard_unit(whole, shard, world).wait()
        gathered = whole.tolist(), view.tolist()
        used = [world.rank > 0 or used for _, used in parameters]
        gradients = [torch.full((size,), 10.0**world.rank) if on else None for size, on in zip(sizes, used)]
        part, work = SOLUTION.reshard_unit(whole, gradients, sizes, torch.float64, world)
        work.wait()
        assert part.dtype == torch.float64 and part.untyped_storage().nbytes() == 8 * share == part.nbytes
        assert whole.untyped_storage().nbytes() == 0 and torch.equal(shard, torch.arange(share) + share * world.rank)
        return gathered, part.tolist()

    results = [unit(SingleRankCommunicator())] if ranks == 1 else run_threads(unit, ranks)
    others = sum(10.0**rank for rank in range(1, ranks))
    summed = [others + used for size, used in parameters for _ in range(size)]
    summed += [0.0] * (share * ranks - len(summed))
    for rank, ((whole, view), part) in enumerate(results):
        assert whole == list(range(share * ranks)) and view == whole[: sizes[0]]
        assert part == summed[share * rank : share * (rank + 1)]
