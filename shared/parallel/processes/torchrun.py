"""Chapter 06. Ranks as processes: torch.distributed process groups, with gloo on CPUs and NCCL on GPUs, started by torchrun.

    torchrun --nproc-per-node 2 script.py                                world, device = from_torchrun()

It gives torch's collectives the interface of `Communicator`: ranks count within their group, results are in place, calls are traced.

Left out on purpose: the algorithms of gloo and NCCL. Two of gloo's are replaced by faster ones (`shared.parallel.processes.gloo_routes`);
`shared.parallel.comm.collectives` builds all-reduce from sends and receives.
"""

import atexit
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from shared.course.errors import CourseError
from shared.parallel.processes import gloo_routes
from shared.parallel.processes.rendezvous import choose_interface, route_to
from shared.parallel.comm.communicator import (
    CommunicationError,
    Communicator,
    Finish,
    RankStopped,
    Reduction,
    SingleRankCommunicator,
)
from shared.parallel.health.agreement import program, require_agreement
from shared.parallel.health.heartbeat import RAISE_GRACE, Heartbeat, Timeouts, deadline
from shared.parallel.processes.rendezvous import fresh_store
from shared.parallel.comm.trace import CommTrace

BROKEN = re.compile("gloo/transport|ncclRemoteError")  # how torch's errors of connections can be told from others
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
NCCL_LIMIT = timedelta(minutes=30)  # of an operation in the card; what ranks may wait for longer, such as text, goes over gloo
# Ranks keep the group's order, where torch lets them (2.13); a mesh's groups are in ascending order.
KEEP_ORDER = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


@dataclass(frozen=True)
class Process:
    """One rank's process, which all of its groups share. device: where the rank computes."""

    device: torch.device
    heartbeat: Heartbeat

    @property
    def timeout(self) -> timedelta:
        """Torch's own timeout of an operation, long enough for the heartbeat to find the problem first."""
        timeouts = self.heartbeat.timeouts
        return timedelta(seconds=max(timeouts.collective_timeout + 2 * timeouts.heartbeat_timeout, timeouts.init_timeout))


class ProcessCommunicator(Communicator):
    """One process's end of a process group.

    Args:
        process: the rank's process.
        torch_group: torch's own `ProcessGroup`, which DDP and fully_shard take.
    """

    def __init__(
        self, process: Process, torch_group: dist.ProcessGroup, members: Sequence[int], axis: str, trace: CommTrace, split_number: int = 0
    ):
        super().__init__(members, torch_group.rank(), axis, trace, split_number)
        self.process, self.torch_group = process, torch_group
        gloo_routes.COMMUNICATORS.add(self)

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Finish:
        return self.wrap(dist.all_reduce(tensor, REDUCTIONS[op], self.torch_group, async_op=True))

    def _all_gather(self, whole: Tensor, part: Tensor) -> Finish:
        if whole.is_cpu:
            return gloo_routes.all_gather(whole, part, self.torch_group, self.wait_for)
        return self.wrap(all_gather_single(whole.view(-1), part.view(-1), self.torch_group, async_op=True))

    def _reduce_scatter(self, part: Tensor, whole: Tensor) -> Finish:
        if whole.is_cpu:
            return gloo_routes.reduce_scatter(part, whole, self.torch_group, self.wait_for)
        return self.wrap(reduce_scatter_single(part.view(-1), whole.view(-1), group=self.torch_group, async_op=True))

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        return self.wrap(dist.broadcast(tensor, self.members[root], self.torch_group, async_op=True))

    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Finish:
        into, out = gloo_routes.end_to_end(received), gloo_routes.end_to_end(sent)
        sizes = [tensor.numel() for tensor in received]

        def unpack() -> None:
            for tensor, part in zip(received, into.split(sizes), strict=True):
                if tensor.data_ptr() != part.data_ptr():
                    tensor.view(-1).copy_(part)

        counts = sizes, [tensor.numel() for tensor in sent]
        return self.wrap(dist.all_to_all_single(into, out, *counts, self.torch_group, async_op=True), unpack)

    def _send(self, tensor: Tensor, to: int) -> Finish:
        return self.wrap(dist.isend(tensor, self.members[to], self.torch_group), point_to_point=True)

    def _receive(self, tensor: Tensor, source: int) -> Finish:
        return self.wrap(dist.irecv(tensor, self.members[source], self.torch_group), point_to_point=True)

    def _barrier(self) -> Finish:
        return self.wrap(dist.barrier(self.torch_group, async_op=True))

    def _gather_texts(self, text: str) -> list[str]:
        """Gathered as bytes, padded to the longest text: nothing is pickled. Over gloo, which ranks on GPUs and on CPUs have in common."""
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        self._all_gather(lengths, lengths.new_tensor([len(own)]))()
        padded = own.new_zeros(int(lengths.max()))
        padded[: len(own)] = own
        everyone = own.new_zeros(self.size, len(padded))
        self._all_gather(everyone, padded)()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(everyone, lengths.tolist(), strict=True)]

    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Communicator:
        torch_groups = {group: self.new_group(axis, group) for group in groups if len(group) > 1}  # torch has every rank create every group
        return ProcessCommunicator(self.process, torch_groups[mine], mine, axis, self.trace, self.splits) if mine in torch_groups else self

    def new_group(self, axis: str, members: Sequence[int]) -> dist.ProcessGroup:
        if not KEEP_ORDER and list(members) != sorted(members):
            raise ValueError(f"torch {torch.__version__} would sort the ranks {list(members)} of the group {axis!r}: use torch 2.13.")
        group = dist.new_group(list(members), self.process.timeout, group_desc=axis, **KEEP_ORDER)
        if self.process.device.type == "cuda" and self.members[self.rank] in members:
            limit_operations(group, self.process.timeout)
        return group

    def wrap(self, work: dist.Work, finish: Callable[[], None] = lambda: None, point_to_point: bool = False) -> Finish:
        """Complete torch's work: watch the heartbeat while it is waited for, and then call `finish`."""

        def wait() -> None:
            self.wait_for(work, point_to_point)
            finish()

        return wait

    def wait_for(self, work: dist.Work, point_to_point: bool) -> None:
        """Wait for torch's work, unless the heartbeat finds a problem. point_to_point: whether it is a send or a receive."""
        heartbeat = self.process.heartbeat
        if self.process.device.type == "cpu" and not point_to_point:
            heartbeat.wait(work)
            return
        broken = None
        heartbeat.blocked = True
        try:
            work.wait()  # on a GPU it only orders streams; and gloo aborts a send or receive that is given a timeout
        except RuntimeError as error:
            broken = error
        heartbeat.blocked = False
        if broken is not None:
            raise heartbeat.connection_error(broken) from broken


def join_world(rank: int, ranks: int, init_method: str, device: torch.device, timeouts: Timeouts) -> Communicator:
    """Initialize the process group of the whole world. Every process calls it, once.

    Args:
        init_method: where the ranks find each other, as torch takes it: `env://` for the address in the environment,
            `file:///a/file/on/this/machine`.

    Raises:
        CourseError: no address or network interface leads to the others.
        CommunicationError: some ranks did not connect within `timeouts.init_timeout`. Where torch does not return, the process ends.
        RankStopped: another rank failed while it was connecting.
    """
    if ranks == 1:
        return SingleRankCommunicator()
    seconds, trace = timeouts.init_timeout, CommTrace()
    late = (
        f"rank {rank} of {ranks} could not connect to the others within {seconds:g} s: read the output on their machines, and see that no "
        f"firewall closes the ports between them (MASTER_ADDR is {os.environ.get('MASTER_ADDR', 'not set')})."
    )
    with deadline(seconds + RAISE_GRACE, late):
        try:
            if init_method == "env://":
                route_to(*master())  # refuses what torch would try for all of `seconds`
            store, _, _ = next(rendezvous(init_method, rank, ranks, timeout=timedelta(seconds=seconds)))
            store = fresh_store(store, rank, ranks, seconds)
            if init_method == "env://":
                choose_interface(store, rank, ranks, *master())
            process = Process(device, Heartbeat(store, rank, ranks, trace, timeouts))
        except dist.DistError as error:
            raise CommunicationError(f"{late} {(str(error).splitlines() or [''])[0]}") from error
        backend, own = ("gloo", {}) if device.type == "cpu" else ("cpu:gloo,cuda:nccl", {"device_id": device})
        try:
            dist.init_process_group(backend, timeout=process.timeout, store=store, rank=rank, world_size=ranks, **own)
        except RuntimeError as error:  # a rank may connect, work and end before the last one has connected
            raise RankStopped(f"rank {rank} of {ranks} could not connect to the others: {error}") from error
    if device.type == "cuda":
        limit_operations(dist.group.WORLD, process.timeout)
    atexit.register(gloo_routes.end_threads)  # called after the heartbeat's own, which is registered later
    process.heartbeat.start()
    return ProcessCommunicator(process, dist.group.WORLD, range(ranks), "world", trace)


def limit_operations(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give NCCL a limit of its own, of minutes where gloo's may be a day: on a GPU `wait` orders streams only, so the heartbeat does not
    see a rank wait, and an operation that hangs in a card is noticed by this limit alone."""
    group._get_backend(torch.device("cuda"))._set_default_timeout(min(timeout, NCCL_LIMIT))


@contextmanager
def broken_connections_named(world: Communicator) -> Iterator[None]:
    """Raise the heartbeat's `CommunicationError` in place of torch's error where a connection is lost within the block: in torch's own
    engines, and where gloo refuses to start an operation over a broken connection."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(world, ProcessCommunicator) or not BROKEN.search(str(error)):
            raise
        raise world.process.heartbeat.connection_error(error) from error


def leave_world(world: Communicator, ended: str, whole: bool = False) -> None:
    """Publish to the other ranks that this one has ended. ended: how, as in "has finished". whole: all ranks end like this one, so that the
    process group of GPUs can be destroyed, which frees NCCL's communicators in order."""
    if isinstance(world, ProcessCommunicator):
        world.process.heartbeat.close(ended)
        if whole and world.process.device.type == "cuda":
            dist.destroy_process_group()


def whole_number(variable: str, default: str | None = None) -> int:
    """The whole number in an environment variable that torchrun sets for each rank."""
    text = os.environ.get(variable, default)
    if text is None or not text.isdecimal():
        raise CourseError(
            f"The environment variable {variable} is {'not set' if text is None else repr(text)}, and should be a whole number: start the "
            "ranks with torchrun, which sets it, or remove RANK and WORLD_SIZE for a run of one process."
        )
    return int(text)


def master() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT: the address of torchrun's rendezvous."""
    if (port := whole_number("MASTER_PORT")) > 65535:
        raise CourseError(f"The environment variable MASTER_PORT is {port}; ports end at 65535. Give torchrun another --master-port.")
    return os.environ.get("MASTER_ADDR", ""), port


def from_torchrun(
    heartbeat_timeout: float = 30.0, device: str = "auto", collective_timeout: float = 1800.0, init_timeout: float = 300.0
) -> tuple[Communicator, torch.device]:
    """Join the world of torchrun, as `init_process_group` does, and choose this rank's device; one rank where torchrun was not used.

    A rank that ends because another one failed has the exit code `shared.parallel.health.heartbeat.EXIT_CODE`;
    `torchrun --max-restarts 3` then restarts all of them.

    Args:
        heartbeat_timeout: seconds without a heartbeat after which a rank counts as dead.
        collective_timeout: seconds that a rank waits in one operation for a rank that is alive.
        init_timeout: seconds until all ranks have connected.
        device: cpu, cuda, or auto, which takes a GPU where there is one; a rank's GPU is the one of its LOCAL_RANK.

    Raises:
        RanksDisagree: ranks run different code, packages or kinds of device.
        CourseError: the machine has fewer GPUs than ranks, an environment variable is malformed, or no address leads to the others.
        CommunicationError: not all ranks connected.
    """
    rank, ranks, local_rank = whole_number("RANK", "0"), whole_number("WORLD_SIZE", "1"), whole_number("LOCAL_RANK", "0")
    if rank >= ranks:
        raise CourseError(f"The environment variable RANK is {rank}, and WORLD_SIZE {ranks}: ranks count from 0. Start them with torchrun.")
    chosen = torch.device("cpu")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        if local_rank >= torch.cuda.device_count():
            raise CourseError(
                f"Rank {local_rank} of this machine has no GPU of its own: it has {torch.cuda.device_count()}. Start no more ranks than "
                "GPUs, or set the device to cpu."
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    timeouts = Timeouts(heartbeat_timeout, collective_timeout, min(1.0, heartbeat_timeout / 10), init_timeout)
    world = join_world(rank, ranks, "env://", chosen, timeouts)
    require_agreement(world, "program", program(chosen))
    return world, chosen
