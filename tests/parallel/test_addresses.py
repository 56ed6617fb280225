"""Which network interface gloo and NCCL get: the one on the route to MASTER_ADDR, whatever names lead to."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared.course.errors import CourseError
from shared.parallel.processes import rendezvous
from shared.parallel.processes.rendezvous import choose_interface, reachable_interface, route_to
from shared.parallel.processes.torchrun import from_torchrun

A = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.1.5"], "eth1": ["10.0.0.1", "fe80::1%eth1"]}
B = {"lo": ["127.0.0.1"], "wlan0": ["10.0.0.2"]}


@pytest.mark.parametrize(
    "rank, routes, interface",
    [
        (0, [("10.0.0.1", "10.0.0.1"), ("10.0.0.2", "10.0.0.1")], "eth1"),
        (1, [("10.0.0.1", "10.0.0.1"), ("10.0.0.2", "10.0.0.1")], "wlan0"),
        (0, [("127.0.0.1", "127.0.1.1"), ("10.0.0.2", "10.0.0.1")], "eth1"),  # Debian: a's own name is 127.0.1.1 to itself
        (0, [("127.0.0.1", "127.0.1.1"), ("127.0.0.1", "127.0.1.1"), ("10.0.0.2", "10.0.0.1")], "eth1"),  # two ranks on a
        (0, [("127.0.0.1", "127.0.1.1"), ("127.0.0.1", "127.0.1.1")], "lo"),  # one machine
        (0, [("::1", "::1"), ("fe80::2", "fe80::1")], "eth1"),
        (0, [("127.0.0.1", "127.0.1.1"), ("10.0.0.2", "203.0.113.7")], None),  # a is behind a router that translates addresses
    ],
)
def test_the_interface_is_the_one_that_others_reach(rank, routes, interface):
    assert reachable_interface(routes[rank][0], routes, [A, B][rank])[1] == interface


@pytest.fixture
def no_choice(monkeypatch):
    for name in rendezvous.VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


def test_what_is_chosen_is_set_and_what_the_user_has_set_stays(monkeypatch, no_choice):
    monkeypatch.setattr(rendezvous, "route_to", lambda host, port: ("127.0.0.1", "127.0.0.1"))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    choose_interface(torch.distributed.HashStore(), 0, 1, "localhost", 29400)
    assert os.environ["GLOO_SOCKET_IFNAME"] in dict(socket.if_nameindex()).values() and os.environ["NCCL_SOCKET_IFNAME"] == "mine"


def test_nccl_gets_the_whole_name_and_not_the_beginning_of_names(monkeypatch, no_choice):
    """Without `=`, eth1 stands for eth10 as well."""
    monkeypatch.setattr(rendezvous, "route_to", lambda host, port: ("127.0.0.1", "127.0.0.1"))
    choose_interface(torch.distributed.HashStore(), 0, 1, "localhost", 29400)
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={os.environ['GLOO_SOCKET_IFNAME']}"


def test_a_machine_without_such_an_address_names_the_setting_unless_it_is_set(monkeypatch, no_choice):
    monkeypatch.setattr(rendezvous, "route_to", lambda host, port: ("192.0.2.1", "192.0.2.9"))
    with pytest.raises(CourseError, match=r"^Rank 0, on .* at 192\.0\.2\.1, .* Set GLOO_SOCKET_IFNAME .* one of: .*lo"):
        choose_interface(torch.distributed.HashStore(), 0, 1, "a", 29400)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    choose_interface(torch.distributed.HashStore(), 0, 1, "a", 29400)
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_what_one_machine_lacks_is_said_by_all_ranks(monkeypatch, no_choice):
    routes = {"a": ("127.0.0.1", "127.0.1.1"), "b": ("192.0.2.1", "127.0.0.1")}  # by what each calls MASTER_ADDR; b has no such address
    monkeypatch.setattr(rendezvous, "route_to", lambda host, port: routes[host])
    store = torch.distributed.HashStore()

    def choose(rank):
        with pytest.raises(CourseError) as refused:
            choose_interface(store, rank, 2, "ab"[rank], 29400)
        return str(refused.value)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(choose, range(2))
    assert first == second and first.startswith("Rank 1, on ")


def test_the_route_to_this_machine_itself_is_found():
    assert route_to("127.0.0.1", 29400) == ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize("host", ["no-such-machine.invalid", "a b", "x" * 300, "", "300.1.2.3", "http://a"])
def test_a_master_address_that_leads_nowhere_is_refused_at_once(host, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CourseError, match="MASTER_ADDR is .*Give torchrun addresses instead of names, on each machine: --master-addr"):
        from_torchrun(device="cpu")


@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("RANK", "x", "RANK is 'x', and should be a whole number"),
        ("RANK", "-1", "RANK is '-1', and should be"),
        ("RANK", "2", "RANK is 2, and WORLD_SIZE 2: ranks count from 0"),
        ("WORLD_SIZE", "", "WORLD_SIZE is '', and should be"),
        ("LOCAL_RANK", "1.5", "LOCAL_RANK is '1.5', and should be"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http', and should be"),
        ("MASTER_PORT", "70000", "MASTER_PORT is 70000"),
        ("MASTER_PORT", None, "MASTER_PORT is not set"),
    ],
)
def test_variables_of_torchrun_that_are_malformed_are_named(name, value, sentence, monkeypatch):
    for each, good in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(each, good)
    monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    with pytest.raises(CourseError, match=f"The environment variable {sentence}"):
        from_torchrun(device="cpu")
