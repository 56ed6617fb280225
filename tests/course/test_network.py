"""The guard in conftest.py works: connecting to this machine is allowed, to another it is not."""

import socket

import pytest


def test_a_connection_to_another_machine_is_refused():
    with socket.socket() as client, pytest.raises(RuntimeError, match=r"192\.0\.2\.1"):
        client.connect(("192.0.2.1", 80))  # an address reserved for documentation


def test_a_connection_to_this_machine_is_allowed():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
