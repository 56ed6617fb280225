"""A port of this machine that is free and stays so until a server that a test starts listens on it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else is given within the block. Its socket is bound and does not listen, so a server that sets SO_REUSEADDR, as
    torch's stores and Python's `create_server` do, may listen on it at any time."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
