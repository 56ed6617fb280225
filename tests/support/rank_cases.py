"""What rank r of three does in each operation, with digit-coded numbers (rank r contributes 10**r), and what it must come to."""

import sys

import cloudpickle
import psutil
import torch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that ranks need not find this file


def digits(world, *shape, dtype=torch.float64):
    return torch.full(shape, 10**world.rank, dtype=dtype)


def all_reduce(world):
    return [reduced(world, digits(world, 5, 2), op) for op in ("sum", "max", "min")]


def reduced(world, tensor, op):
    world.all_reduce(tensor, op)
    return tensor


def all_reduce_of_every_dtype(world):
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
    return [reduced(world, digits(world, 3, dtype=kind), "sum") for kind in kinds]


def all_gather(world):
    whole, part = torch.zeros(world.size * 2, dtype=torch.float64), digits(world, 2)
    world.all_gather(whole, part)
    return whole, part


def all_gather_of_its_own_place(world):
    whole = torch.zeros(world.size * 2, dtype=torch.float64)
    part = whole[world.rank * 2 : world.rank * 2 + 2].fill_(10**world.rank)
    world.all_gather(whole, part)
    return whole


def reduce_scatter(world):
    whole = digits(world, world.size, 2) * torch.arange(1, world.size + 1).unsqueeze(1)
    part = torch.zeros(2, dtype=torch.float64)
    world.reduce_scatter(part, whole)
    return part


def reduce_scatter_into_its_own_place(world):
    whole = digits(world, world.size * 2) * torch.arange(1, world.size * 2 + 1)
    part = whole[world.rank * 2 : world.rank * 2 + 2]
    world.reduce_scatter(part, whole)
    return part.clone()


def broadcast(world):
    found = []
    for root in range(world.size):
        tensor = digits(world, 2)
        world.broadcast(tensor, root)
        found.append(tensor)
    return found


def all_to_all_uneven(world):
    """Rank r gives rank s a tensor of r * s numbers, so rank 0 gives and gets nothing."""
    sent = [digits(world, world.rank * to) * (to + 1) for to in range(world.size)]
    received = [torch.zeros(source * world.rank, dtype=torch.float64) for source in range(world.size)]
    world.all_to_all(received, sent)
    return received


def all_to_all_of_matrices(world):
    sent = [digits(world, 2, to + 1) for to in range(world.size)]
    received = [torch.zeros(2, world.rank + 1, dtype=torch.float64) for _ in range(world.size)]
    world.all_to_all(received, sent)
    return received


def ring(world):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    first, second = torch.zeros(2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    sent = [world.send(digits(world, 2), right, asynchronous=True), world.send(digits(world, 3) * 7, right, asynchronous=True)]
    world.receive(first, left)
    world.receive(second, left)
    for work in sent:
        work.wait()
    return first, second


def both_receive_before_they_send(world):
    if world.rank == 2:
        return None
    found, other = torch.zeros(2, dtype=torch.float64), 1 - world.rank
    work = world.receive(found, other, asynchronous=True)
    world.send(digits(world, 2), other)
    work.wait()
    return found


def asynchronous_out_of_order(world):
    tensors = [digits(world, size) for size in (2, 3, 5)]
    works = [world.all_reduce(tensor, asynchronous=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        work.wait()  # a second wait is nothing
    return tensors


def empty(world):
    nothing = torch.zeros(0, dtype=torch.float64)
    world.all_reduce(nothing)
    world.all_gather(nothing, nothing.clone())
    world.reduce_scatter(nothing, nothing.clone())
    return nothing


def objects(world):
    return world.gather_objects({"rank": world.rank, "text": "é" * world.rank, "list": (1, None, 0.1)})


def parameters(world):
    """Autograd neither forbids it nor remembers it."""
    weight = torch.nn.Parameter(digits(world, 2))
    product = (weight * weight).sum()
    world.all_reduce(weight)
    product.backward()
    return weight.detach(), weight.grad


def groups(world):
    pair = world.split("pair", [(2, 0), (1,)])
    tensor = digits(world, 1)
    pair.all_reduce(tensor)
    other = digits(world, 1)
    pair.broadcast(other, 0)
    trio = world.split("trio", [(1, 2, 0)])
    whole = torch.zeros(3, dtype=torch.float64)
    trio.all_gather(whole, digits(world, 1))
    return tensor, other, whole, pair.members, pair.rank, trio.members, trio.rank, trio.gather_objects(world.rank)


IN_ORDER = [
    all_reduce,
    all_reduce_of_every_dtype,
    all_gather,
    all_gather_of_its_own_place,
    reduce_scatter,
    reduce_scatter_into_its_own_place,
    broadcast,
    all_to_all_uneven,
    all_to_all_of_matrices,
    ring,
    both_receive_before_they_send,
    asynchronous_out_of_order,
    empty,
    objects,
    parameters,
    groups,
]
CASES = {case.__name__: case for case in IN_ORDER}


def run_cases(world):
    """Each case's result and what the trace says of it."""
    found = {}
    for name, case in CASES.items():
        world.trace.clear()
        result = case(world)
        entries = [(entry.operation, entry.axis, entry.bytes, entry.size, entry.description) for entry in world.trace.entries]
        assert all(entry.begin <= entry.end for entry in world.trace.entries)
        found[name] = plain(result), entries, (world.trace.calls(), world.trace.bytes())
    addresses = {each.laddr.ip for each in psutil.Process().net_connections("inet")}
    world.barrier()
    return found, addresses


def plain(value):
    """A result as numbers, with its tensors' dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def tensors(*rows, dtype="torch.float64"):
    return [(dtype, tuple(torch.tensor(row).shape), row) for row in rows]


EXPECTED = {
    "all_reduce": lambda r: tensors([[111.0] * 2] * 5, [[100.0] * 2] * 5, [[1.0] * 2] * 5),
    "all_gather": lambda r: tensors([1.0, 1.0, 10.0, 10.0, 100.0, 100.0], [10.0**r] * 2),
    "all_gather_of_its_own_place": lambda r: tensors([1.0, 1.0, 10.0, 10.0, 100.0, 100.0])[0],
    "reduce_scatter": lambda r: tensors([111.0 * (r + 1)] * 2)[0],
    "reduce_scatter_into_its_own_place": lambda r: tensors([111.0 * (2 * r + 1), 111.0 * (2 * r + 2)])[0],
    "broadcast": lambda r: tensors([1.0] * 2, [10.0] * 2, [100.0] * 2),
    "all_to_all_uneven": lambda r: tensors(*[[10.0**source * (r + 1)] * (source * r) for source in range(3)]),
    "all_to_all_of_matrices": lambda r: tensors(*[[[10.0**source] * (r + 1)] * 2 for source in range(3)]),
    "ring": lambda r: tensors([10.0 ** ((r - 1) % 3)] * 2, [7 * 10.0 ** ((r - 1) % 3)] * 3),
    "both_receive_before_they_send": lambda r: None if r == 2 else tensors([10.0 ** (1 - r)] * 2)[0],
    "asynchronous_out_of_order": lambda r: tensors([111.0] * 2, [111.0] * 3, [111.0] * 5),
    "empty": lambda r: tensors([])[0],
    "objects": lambda r: [{"rank": rank, "text": "é" * rank, "list": [1, None, 0.1]} for rank in range(3)],
    "parameters": lambda r: tensors([111.0] * 2, [222.0] * 2),
    "all_reduce_of_every_dtype": lambda r: [
        (f"torch.{kind}", (3,), [111] * 3) for kind in ("float32", "bfloat16", "float16", "int64", "int32", "uint8")
    ],
    "groups": lambda r: [
        *tensors([10.0] if r == 1 else [101.0], [10.0] if r == 1 else [100.0], [10.0, 100.0, 1.0]),
        [1] if r == 1 else [2, 0], [1, 0, 0][r], [1, 2, 0], [2, 0, 1][r], [1, 2, 0],
    ],
}  # fmt: skip
