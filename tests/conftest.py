"""Nothing in the tests reaches out: a connection to another machine is an error, whoever opens it. And what a terminal or a CI service
says about colours and widths is not said to the programs that the tests start. Each test draws the same numbers, whichever ran before it."""

import os
import random
import signal
import sys

import numpy as np
import pytest
import torch

from shared.course import running

# An optimizer's first step imports it, which takes a second: once, in the server that forks, instead of in hundreds of children.
running.PRELOADED.append("torch._dynamo")

for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)

# What is started in the background ignores Ctrl-C, and hands that down to every program that it starts: here they must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

LOCAL = ("127.", "::1", "localhost")


def refuse_network(event: str, arguments: tuple) -> None:
    if event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and not str(address[0]).startswith(LOCAL):
            raise RuntimeError(f"A test tried to connect to {address[0]}: the course must work without a network.")


sys.addaudithook(refuse_network)


@pytest.fixture
def text_file(tmp_path):
    """Text that a byte model learns quickly."""
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat; the dog sat on the log.\n" * 400, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def the_same_numbers():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
