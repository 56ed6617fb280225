"""Chapter 06. Network interface selection for gloo and NCCL on several machines (GLOO_SOCKET_IFNAME): the one on the route to MASTER_ADDR.

Left alone, gloo takes the address of the machine's own hostname. On Debian that is 127.0.1.1, which no other machine can reach, and
elsewhere the name may lead nowhere: one machine fails, and the others wait for it. But each rank has reached MASTER_ADDR already, so the
machine's routing table knows an address that works. Rank 0's machine may itself call MASTER_ADDR 127.0.1.1: there it is the address that
the others reach it by.

Left out on purpose: machines that reach each other over other networks than MASTER_ADDR. Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
"""

import ipaddress
import json
import os
import socket
from collections.abc import Mapping, Sequence

import psutil
from torch.distributed import Store

from shared.course.errors import CourseError

VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}  # NCCL takes a name without = for the beginning of names


def route_to(host: str, port: int) -> tuple[str, str]:
    """The address of this machine from which packets go to `host`, and the address of `host` as this machine knows it. Nothing is sent.

    Raises:
        CourseError: the name cannot be resolved, or there is no route.
    """
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
    """Set the network interface of gloo and NCCL, where the user has set none. Every rank calls it, after it has connected to the store.

    Args:
        store: of these ranks alone. host, port: MASTER_ADDR and MASTER_PORT.

    Raises:
        CourseError: on every rank: a machine has no interface that the others can reach.
    """
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
    """The addresses by which other machines may reach this one, and the interface that has one of them.

    Args:
        own: the address of this machine on its route to MASTER_ADDR.
        routes: of each rank, what `route_to` returned. interfaces: of this machine, with their addresses.
    """
    reached = [own]
    if is_loopback(own):  # of the only machine; or of rank 0's, which the others know by another address
        reached = sorted({there for here, there in routes if not is_loopback(here)}) or reached
    return reached, next((name for name, has in interfaces.items() if not set(reached).isdisjoint(map(plain, has))), None)


def exchange(store: Store, key: str, rank: int, ranks: int, value: object) -> list:
    """Every rank's value, by the store of the rendezvous: there are no connections between ranks yet."""
    store.set(f"{key}/{rank}", json.dumps(value))
    return [json.loads(text) for text in store.multi_get([f"{key}/{other}" for other in range(ranks)])]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def plain(address: str) -> str:
    """An address without the interface that IPv6 addresses of one link carry."""
    return address.split("%")[0]
