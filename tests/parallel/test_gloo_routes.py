"""The ring and the shorter routes between processes come to the bits that threads come to. Imports are few: every rank repeats them."""

import torch
from torch import Tensor

from shared.parallel.processes import gloo_routes
from shared.parallel.comm.collectives import ring_all_reduce
from shared.parallel.comm.threads import reduce_in_rank_order, run_threads
from shared.parallel.processes.launch import run_processes


def random(rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11 + rank), dtype=torch.float64).to(dtype)


def over_gloo(world):
    """What ring and shorter routes leave on a rank, for lengths on both sides of the limit between the routes."""
    results = {}
    for length in (0, 2, 7):
        tensor = 10.0**world.rank * torch.arange(1.0, length + 1)
        ring_all_reduce(tensor, world)
        results["ring", length] = tensor
    group = world.split("dp", [[2, 0], [1]])
    if group.size > 1:
        tensor = torch.full((3,), 10.0**world.rank)
        ring_all_reduce(tensor, group)
        results["ring in a group"] = tensor
    for numbers in (5, gloo_routes.LONG // 4 // world.size + 1):
        for dtype in (torch.float32, torch.bfloat16):
            whole = random(world.rank, world.size, numbers, dtype=dtype)
            part = torch.empty(numbers, dtype=dtype)
            world.reduce_scatter(part, whole.clone())
            results["scattered", numbers, dtype] = part
            own = whole[world.rank]
            world.reduce_scatter(own, whole)  # into its own place
            results["scattered in place", numbers, dtype] = own.clone()
            gathered = torch.empty(world.size, numbers, dtype=dtype)
            world.all_gather(gathered, part)
            results["gathered", numbers, dtype] = gathered[:, :5].clone()
            gathered[world.rank] = part
            gathered[world.rank - 1] = 0
            world.all_gather(gathered, gathered[world.rank])
            results["gathered in place", numbers, dtype] = gathered[:, :5].clone()
    return results


def test_gloo_processes_and_threads_give_the_same_bits():
    """Threads add in rank order, and so does the gloo route between processes: an empty chunk, a group and each rank's own place
    in the whole among the cases."""
    processes, threads = run_processes(over_gloo, 3), run_threads(over_gloo, 3)
    assert len(processes[0]) == 3 + 1 + 2 * 2 * 4
    for mine, theirs in zip(processes, threads, strict=True):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_adding_in_another_order_is_noticed_by_the_test_above():
    """Its negative control: bfloat16 sums in reverse order are other bits."""
    rows = [random(rank, 1000, dtype=torch.bfloat16) for rank in range(3)]
    assert not torch.equal(reduce_in_rank_order(rows), reduce_in_rank_order(rows[::-1]))


def test_tensors_that_lie_one_after_the_other_are_one_without_a_copy():
    whole = torch.arange(12.0).view(6, 2)
    parts = whole.split([2, 0, 3, 1])
    for first, stop, expected in ((0, 4, whole), (1, 3, whole[2:5]), (1, 2, whole[:0])):
        joined = gloo_routes.end_to_end(parts[first:stop])
        assert torch.equal(joined, expected.flatten()) and joined.data_ptr() == (expected.data_ptr())
    for apart in ([parts[2], parts[0]], [parts[0], parts[3]], [parts[0], whole.clone()], [parts[0], parts[0]]):
        joined = gloo_routes.end_to_end(apart)
        assert torch.equal(joined, torch.cat([part.flatten() for part in apart])) and joined.data_ptr() != apart[0].data_ptr()
