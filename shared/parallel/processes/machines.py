"""Chapter 06. Network check of several machines (bandwidth, latency, interfaces, shared folder) before a run: `course doctor --machines`.

One process on each machine joins the others as ranks do, over gloo, by the interfaces that a run would take. Machine 0 then measures its
link to each of the others, one after another.

Left out on purpose: links between the other machines, and NCCL's own transports (RDMA), which may be faster.
"""

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from shared.course.doctor import OK, PROBLEM, WARNING, Finding
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import RanksDisagree, program, ranks_that_share, require_agreement
from shared.parallel.health.heartbeat import Timeouts
from shared.parallel.processes.rendezvous import route_to
from shared.parallel.processes.torchrun import join_world, leave_world

ROUND_TRIPS = 20
FIRST_BYTES, SECONDS = 2**18, 0.5  # what is sent to see how fast a link is, and for how long it is then measured
LARGEST_BYTES = 2**26
EXAMPLE = 124_000_000 * 4  # bytes of the gradients of two_3090s.yaml's model in float32


@dataclass(frozen=True)
class LinkSpeed:
    """latency: seconds of one way, half a round trip of 4 bytes. bandwidth: bytes per second, one way."""

    latency: float
    bandwidth: float

    @property
    def text(self) -> str:
        return f"{self.latency * 1e3:.2f} ms, {self.bandwidth / 1e6:,.0f} MB/s ({self.bandwidth * 8 / 1e9:.2g} Gbit/s)"


def examine_machines(machine: int, machines: int, address: str, port: int, folder: Path | None, patience: float) -> Iterator[Finding]:
    """Check several machines. One process on each of them calls it; all get the same findings.

    Args:
        machine: this machine's number, of `machines`.
        address, port: of machine 0, as torchrun's --master-addr and --master-port.
        folder: a folder that all should share, or None.
        patience: seconds until all must have connected.
    """
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    timeouts = Timeouts(heartbeat_timeout=30.0, collective_timeout=120.0, init_timeout=patience)
    world = join_world(machine, machines, "env://", torch.device("cpu"), timeouts)
    yield from presence(world, address, port)
    yield same_program(world)
    yield from links(world)
    if folder is not None:
        yield shared_folder(world, folder)
    world.barrier()
    leave_world(world, "has finished")


def presence(world: Communicator, address: str, port: int) -> Iterator[Finding]:
    """Each machine's hostname, its address on the route to machine 0, its interface and its GPUs."""
    graphics = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    own = platform.node(), route_to(address, port)[0], os.environ.get("GLOO_SOCKET_IFNAME", "gloo's choice"), graphics
    for number, (host, here, interface, devices) in enumerate(world.gather_objects(own)):
        yield Finding(OK, f"machine {number}", f"{host}, {here} by {interface}; {', '.join(devices) or 'no GPU'}")


def same_program(world: Communicator) -> Finding:
    """Whether all machines would run the same code and packages."""
    try:
        require_agreement(world, "program", program(torch.device("cpu")))
    except RanksDisagree as error:
        return Finding(PROBLEM, "program", str(error))
    return Finding(OK, "program", "the same code, exercises and packages on all machines")


def links(world: Communicator) -> Iterator[Finding]:
    """The speed of the link between machine 0 and each other one, and what it means for a run."""
    speeds = [measure_link(world, other) for other in range(1, world.size)]
    for other, speed in enumerate(speeds, start=1):
        yield Finding(OK, f"link 0-{other}", speed.text)
    slowest = min(speed.bandwidth for speed in speeds)
    seconds = 2 * (world.size - 1) / world.size * EXAMPLE / slowest  # a ring all-reduce
    sentence = f"the gradients of 124 million parameters in float32 take at least {seconds:.1f} s a step to be added over these machines"
    level = WARNING if seconds > 5 else OK
    cure = ": choose a larger batch, fewer exchanges (data_parallel between machines only), or a faster network" if level == WARNING else ""
    yield Finding(level, "gradients", f"{sentence}{cure}.")


def measure_link(world: Communicator, other: int) -> LinkSpeed:
    """Measure the link between member 0 and another one while the others wait. All return the same."""
    speed = None
    if world.rank in (0, other):
        trip = median(round_trip(world, other, 4) for _ in range(ROUND_TRIPS))
        rate = 2 * FIRST_BYTES / round_trip(world, other, FIRST_BYTES)
        size = torch.tensor([min(LARGEST_BYTES, max(FIRST_BYTES, int(rate * SECONDS / 2)))])  # both need the same: member 0's
        world.send(size, other) if world.rank == 0 else world.receive(size, 0)
        speed = trip / 2, 2 * int(size) / median(round_trip(world, other, int(size)) for _ in range(3))
    return LinkSpeed(*world.gather_objects(speed)[0])


def round_trip(world: Communicator, other: int, size: int) -> float:
    """Seconds for `size` bytes from member 0 to another one and back."""
    payload = torch.zeros(size, dtype=torch.uint8)
    began = time.perf_counter()
    for sender, receiver in ((0, other), (other, 0)):
        world.send(payload, receiver) if world.rank == sender else world.receive(payload, sender)
    return time.perf_counter() - began


def shared_folder(world: Communicator, folder: Path) -> Finding:
    """Whether all machines see one folder under a path."""
    together = world.gather_objects(ranks_that_share(world, folder))
    if all(len(ranks) == world.size for ranks in together):
        return Finding(OK, "folder", f"{folder} is one folder for all machines")
    apart = [number for number, ranks in enumerate(together) if 0 not in ranks]
    return Finding(
        WARNING,
        "folder",
        f"{folder} on machine {', '.join(map(str, apart))} is not that of machine 0: each machine prepares its own text and keeps whole "
        "checkpoints of its own, so each needs a whole replica.",
    )
