"""Chapter 06. Rendezvous of ranks that are not connected yet: a fresh part of the store, missing ranks, and the network interface.

A rank that never connected sends nothing, so a dead machine looks like one that reads its packages from a slow disk: both get
`parallel.init_timeout` to connect. Meanwhile messages name the missing ranks.

The network interface (GLOO_SOCKET_IFNAME) is the one on the route to MASTER_ADDR. By default gloo takes the address of the machine's own
hostname, which on Debian is 127.0.1.1, unreachable for other machines, and elsewhere may not resolve: one machine fails, and the others
wait for it. But each rank has reached MASTER_ADDR already, so the routing table has an address that works. Where rank 0's machine resolves
MASTER_ADDR to 127.0.1.1, it takes the address by which the others reach it.

Left out on purpose: machines that reach each other over other networks than MASTER_ADDR. Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
"""

import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import uuid4

import psutil
import torch.distributed as dist
from torch.distributed import Store

from shared.course.errors import CourseError
from shared.parallel.comm.communicator import CommunicationError

VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}  # NCCL takes a name without = for the beginning of names


def route_to(host: str, port: int) -> tuple[str, str]:
    """This machine's address on the route to `host`, and the address of `host` as this machine resolves it. Nothing is sent."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                if probe.connect_ex(address) == 0:
                    return plain(probe.getsockname()[0]), plain(address[0])
        reason = "there is no route to it"
    except (OSError, UnicodeError) as error:  # UnicodeError: of a name that can be none
        reason = str(error)
    raise CourseError(
        f"MASTER_ADDR is {host!r}, which this machine cannot reach ({reason}). Give torchrun addresses instead of names, on each machine: "
        "--master-addr with the first machine's; with --rdzv-backend c10d also --local-addr with the machine's own."
    )


def choose_interface(store: Store, rank: int, ranks: int, host: str, port: int) -> None:
    """Set the network interface of gloo and NCCL, unless the user has. Every rank calls it after it has connected to the store; where a
    machine has no reachable interface, all raise the same error. host, port: MASTER_ADDR and MASTER_PORT."""
    routes = exchange(store, "route", rank, ranks, route_to(host, port))
    interfaces = {name: [each.address for each in addresses] for name, addresses in psutil.net_if_addrs().items()}
    reached, name = reachable_interface(routes[rank][0], routes, interfaces)
    problem = ""
    if name is None and "GLOO_SOCKET_IFNAME" not in os.environ:
        problem = (
            f"Rank {rank}, on {socket.gethostname()}: MASTER_ADDR is {host!r}, which other machines reach at {' or '.join(reached)}, and "
            "that is no address of this machine. Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface by which they "
            f"reach it, one of: {', '.join(interfaces)}."
        )
    if problems := [each for each in exchange(store, "problem", rank, ranks, problem) if each]:
        raise CourseError(problems[0])
    for variable, written in VARIABLES.items():
        if name is not None:
            os.environ.setdefault(variable, written.format(name))


def reachable_interface(
    own: str, routes: Sequence[Sequence[str]], interfaces: Mapping[str, Sequence[str]]
) -> tuple[list[str], str | None]:
    """The addresses at which other machines may reach this one, and the interface that has one of them.

    Args:
        own: the address of this machine on its route to MASTER_ADDR.
        routes: of each rank, what `route_to` returned. interfaces: of this machine, with their addresses.
    """
    reached = [own]
    if is_loopback(own):  # of the only machine; or of rank 0's, which the others know by another address
        reached = sorted({there for here, there in routes if not is_loopback(here)}) or reached
    return reached, next((name for name, has in interfaces.items() if not set(reached).isdisjoint(map(plain, has))), None)


def exchange(store: Store, key: str, rank: int, ranks: int, value: object) -> list:
    """Gather every rank's value over the store: there are no connections between ranks yet."""
    store.set(f"{key}/{rank}", json.dumps(value))
    return [json.loads(text) for text in store.multi_get([f"{key}/{other}" for other in range(ranks)])]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def plain(address: str) -> str:
    """An address without its zone (IPv6 link-local)."""
    return address.split("%")[0]


FIRST, NEXT = 15.0, 60.0  # seconds of waiting before the first line about it, and between two


class Patience:
    """Prints periodically which ranks are missing. timeout: in seconds."""

    def __init__(self, timeout: float):
        self.timeout, self.began = timeout, time.monotonic()
        self.due = FIRST

    @property
    def waited(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds until the next line, or the end."""
        return max(min(self.due, self.timeout) - self.waited, 0.001)

    def say(self, whom: str) -> None:
        """Print a line if one is due. whom: as in "ranks [2, 3] to connect"."""
        if self.waited >= self.due:
            self.due += NEXT
            said = f"Waiting for {whom}: {self.waited:.0f} s so far, {self.timeout:g} at most (parallel.init_timeout)."
            print(said, file=sys.stderr, flush=True)


def fresh_store(store: dist.Store, rank: int, ranks: int, timeout: float) -> dist.Store:
    """A fresh part of the rendezvous store, under a prefix that rank 0 chooses.

    torchrun restarts ranks with a store that still has the addresses of the ranks that died. So each rank asks for the prefix under a
    unique name, and rank 0 answers under it.

    Raises:
        CommunicationError: on rank 0: some ranks did not connect within `timeout` seconds.
        dist.DistError: on the others: rank 0 did not answer in time.
    """
    name, patience = uuid4().hex, Patience(timeout)
    if rank > 0:
        store.set(f"asks/{rank}", name)
        wait_for(store, f"prefix/{name}", patience, f"rank 0, to which rank {rank} of {ranks} wants to connect")
        prefix = store.get(f"prefix/{name}").decode()
        store.set(f"joined/{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    while missing := [other for other in range(1, ranks) if not store.check([f"joined/{name}/{other}"])]:
        if patience.waited > timeout:
            raise CommunicationError(f"ranks {missing} did not connect within {timeout:g} s: read the output on their machines.")
        patience.say(f"ranks {missing} of {ranks} to connect")
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"prefix/{store.get(f'asks/{other}').decode()}", name)
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def wait_for(store: dist.Store, key: str, patience: Patience, whom: str) -> None:
    """Wait until the store has a key, or raise `dist.DistError`."""
    while True:
        try:
            return store.wait([key], timedelta(seconds=patience.left))
        except dist.DistStoreError:  # its time is over; a store that is gone is a DistNetworkError
            if patience.waited >= patience.timeout:
                raise
            patience.say(whom)
