"""The all-to-all of expert parallelism and its backward pass, and the table of who adds whose gradients."""

import sys

import cloudpickle
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.moe.parallel.all_to_all import begin_exchange, exchange_counts, exchange_rows
from shared.moe.parallel.groups import expert_groups, gradient_ranks
from shared.parallel.comm.communicator import CommunicationError, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import AXES, ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.processes.launch import run_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SENT = {  # SENT[...][r][s]: how many rows rank r sends to rank s
    "uneven": [[2, 0, 3], [1, 4, 0], [5, 1, 1]],
    "a rank without rows": [[2, 0, 1], [0, 0, 0], [3, 0, 2]],
    "a rank that only receives": [[0, 3, 0], [0, 0, 0], [0, 2, 0]],
    "no rows at all": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    "one rank": [[4]],
}


def rows_of(rank: int, to: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """[number, 3], every row another one."""
    return (100 * rank + 10 * to + torch.arange(number).view(-1, 1) + torch.tensor([0.0, 0.25, 0.5])).to(dtype)


def exchanged(world, sent: list[list[int]], dtype: torch.dtype):
    """What a rank receives, and the gradient of what it sent, where rank s times s + 1 is what it makes of its rows."""
    rank, received = world.rank, [row[world.rank] for row in sent]
    rows = torch.cat([rows_of(rank, to, number, dtype) for to, number in enumerate(sent[rank])]).requires_grad_()
    arrived = exchange_rows(rows, sent[rank], received, world)
    (arrived * (rank + 1)).sum().backward()
    return arrived.detach(), rows.grad


def require_exchange(found, sent, dtype):
    for rank, (arrived, gradient) in enumerate(found):
        expected = [rows_of(source, rank, row[rank], dtype) for source, row in enumerate(sent)]
        torch.testing.assert_close(arrived, torch.cat(expected), rtol=0, atol=0)
        expected = [torch.full((number, 3), to + 1, dtype=dtype) for to, number in enumerate(sent[rank])]
        torch.testing.assert_close(gradient, torch.cat(expected), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
def test_rows_go_to_their_ranks_and_gradients_come_back(sent, dtype):
    found = run_threads(exchanged, len(sent), sent, dtype)
    require_exchange(found, sent, dtype)


def test_an_exchange_that_has_arrived_holds_no_rows():
    def work(world):
        rows, exchange = begin_exchange(torch.ones(2, 3, requires_grad=True), [1, 1], [1, 1], world)
        arrived = exchange.finish(rows)
        assert exchange.arriving is exchange.work is None, "or a layer keeps its rows until the next step"
        arrived.sum().backward()
        assert exchange.arriving is exchange.work is None, "nor their gradients"

    run_threads(work, 2)


class Operations(TorchDispatchMode):
    """The names of all operations, in order."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


def exchanged_by_torch(world, sent: list[list[int]]):
    """The same through PyTorch's differentiable collective."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

    rank, received = world.rank, [row[world.rank] for row in sent]
    rows = torch.cat([rows_of(rank, to, number, torch.float32) for to, number in enumerate(sent[rank])]).requires_grad_()
    arrived = wait_tensor(all_to_all_single_autograd(rows, received, sent[rank], dist.group.WORLD))
    (arrived * (rank + 1)).sum().backward()
    with Operations() as operations:
        ours = exchanged(world, sent, torch.float32)
    return (arrived.detach(), rows.grad), ours, exchanged(world, SENT["a rank without rows"], torch.float64), operations.names


def test_processes_exchange_rows_as_pytorchs_own_collective_does():
    sent = SENT["uneven"]
    theirs, ours, with_an_idle_rank, operations = zip(*run_processes(exchanged_by_torch, 3, sent), strict=True)
    require_exchange(ours, sent, torch.float32)
    require_exchange(with_an_idle_rank, SENT["a rank without rows"], torch.float64)
    for (here, gradient), (there, expected) in zip(ours, theirs, strict=True):
        assert torch.equal(here, there) and torch.equal(gradient, expected)
    for names in operations:
        assert names.count("cat") == 1 and names.count("copy_") == 0, "rows go straight from tensor to tensor: one is of the test"


def test_ranks_are_told_how_many_rows_each_of_their_experts_gets():
    def told(world):
        counts = torch.tensor([[1, 0, 5, 2], [0, 0, 0, 0], [3, 4, 0, 1]])[world.rank % 3]
        return exchange_counts(counts, world)

    first, second = run_threads(told, 2)
    assert first[:2] == ([1, 7], [[1, 0], [0, 0]]) and first[2].tolist() == [1, 0]
    assert second[:2] == ([0, 0], [[5, 2], [0, 0]]) and second[2].tolist() == [5, 2]


def test_a_rank_that_does_not_join_is_named():
    def work(world):
        if world.rank == 0:
            exchange_rows(torch.ones(1, 2), [0, 1], [0, 0], world)

    with pytest.raises(CommunicationError, match="deadlock: rank 0 waits in all_to_all #1 of world; rank 1 has finished"):
        run_threads(work, 2)


def test_ranks_that_count_rows_differently_are_named():
    def work(world):
        exchange_rows(torch.ones(1, 2), [[0, 1], [1, 0]][world.rank], [[0, 2], [1, 0]][world.rank], world)

    with pytest.raises(CommunicationError, match="rank 0 expects 4 numbers of float32 from rank 1, which sends 2"):
        run_threads(work, 2)


# Who adds whose gradients.


def degrees(grid, **more) -> ParallelConfig:
    return ParallelConfig(**dict(zip(AXES.values(), grid, strict=True)), **more)


@pytest.mark.parametrize(
    "grid, ep", [((2, 2, 2, 1, 2), 2), ((1, 2, 1, 2, 1), 2), ((1, 1, 4, 1, 1), 4), ((1, 2, 2, 2, 2), 2), ((1, 3, 1, 1, 1), 3)]
)
def test_every_gradient_is_added_once_over_all_that_have_a_part_of_it(grid, ep):
    """By brute force over the coordinates: the table's groups hold each stage's and each tensor slice's ranks as they should."""
    pp, dp, fsdp, cp, tp = grid
    table = gradient_ranks(pp, dp * fsdp, cp, tp, ep, 12)
    places = [(p, d, c, t) for p in range(pp) for d in range(dp * fsdp) for c in range(cp) for t in range(tp)]
    assert len(table) == len(places)
    ranks_where = lambda test: [rank for rank, place in enumerate(places) if test(*place)]  # noqa: E731
    for line, (p, d, c, t) in zip(table, places, strict=True):
        assert line.experts == (d % ep * (12 // ep), (d % ep + 1) * (12 // ep))
        assert line.exchange == ranks_where(lambda *at: (at[0], at[1] // ep, at[2], at[3]) == (p, d // ep, c, t))  # noqa: B023
        assert line.same_experts == ranks_where(lambda *at: (at[0], at[1] % ep, at[3]) == (p, d % ep, t))  # noqa: B023
        assert line.everything_else == ranks_where(lambda *at: (at[0], at[3]) == (p, t))  # noqa: B023
        assert sorted(expert for rank in line.exchange for expert in range(*table[rank].experts)) == list(range(12))


def test_the_groups_of_the_table_are_made():
    """Two stages of 4 data ranks with 2 tensor ranks each: experts over 2 of the 4, the same ones on every second."""

    def groups(world):
        mesh = Mesh(degrees((2, 2, 2, 1, 2), expert_parallel=2), world)
        ep, edp, ranges = expert_groups(mesh, 8)
        return mesh.data.members, ep.members, edp.members, ranges

    for rank, (data, ep, edp, ranges) in enumerate(run_threads(groups, 16)):
        place = data.index(rank)
        assert ep == (data[place // 2 * 2], data[place // 2 * 2 + 1]) and edp == (data[place % 2], data[place % 2 + 2])
        assert ranges == [(0, 4), (4, 8)]


def test_a_table_that_adds_the_router_elsewhere_than_the_mesh_is_refused(monkeypatch):
    from shared.moe.parallel import groups

    wrong = [line._replace(everything_else=line.same_experts) for line in gradient_ranks(1, 2, 1, 1, 2, 4)]
    monkeypatch.setattr(groups, "gradient_ranks", lambda *degrees: wrong)
    with pytest.raises(ValueError, match=r"router's gradient would be added over the ranks \[0\], not \[0, 1\]"):
        run_threads(lambda world: expert_groups(Mesh(degrees((1, 2, 1, 1, 1), expert_parallel=2), world), 4), 2)


def test_one_rank_exchanges_with_itself():
    assert exchange_counts(torch.tensor([2, 0, 1]), SingleRankCommunicator())[:2] == ([3], [[2, 0, 1]])
