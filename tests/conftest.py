"""What holds for every test: no network, random numbers of its own, no terminal's colours and widths; `--chapter NN`, `--changed REV`.

A connection to another machine is an error, whichever library opens it. Hypothesis tries the same examples in each run, so that a change
fails for its own bugs only; `--hypothesis-profile=other_examples`, which `make test-all` adds, tries others.
"""

import os
import random
import re
import signal
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from changed import Affected, changed_files
from dependencies import Dependencies
from hypothesis import HealthCheck, settings
from scopes import Recorder, place, scope_of

from shared.course import running
from shared.course.paths import CHECKOUT

# An optimizer's first step imports it, which takes a second: once, in the server that forks, instead of in hundreds of children.
running.PRELOADED.append("torch._dynamo")

for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Neither a deadline nor a health check of Hypothesis's, which read the clock, belongs on a machine that does much else.
settings.register_profile(
    "same_examples", derandomize=True, database=None, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("other_examples", settings.get_profile("same_examples"), derandomize=False)
settings.load_profile("same_examples")

# What is started in the background ignores Ctrl-C, and hands that down to every program that it starts: here they must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

LOCAL = ("127.", "::1", "localhost")


def refuse_network(event: str, arguments: tuple) -> None:
    if event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and not str(address[0]).startswith(LOCAL):
            raise RuntimeError(f"A test tried to connect to {address[0]}: the course must work without a network.")


sys.addaudithook(refuse_network)

FOLDERS = {
    "01": "loop", "02": "model", "03": "data", "04": "engine", "05": "optim", "06": "parallel", "07": "tensor",
    "08": "pipeline", "09": "moe", "10": "finetune", "11": "preference", "12": "rl trainer",
}  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--chapter", metavar="NN", choices=FOLDERS, help="only this chapter's tests: its folder, parity, checks and notebook")
    parser.addoption("--record-durations", action="store_true", help="write what each part of the suite took to tests/durations.json")
    parser.addoption("--changed", metavar="REV", help="only the tests that depend on a file that differs from this commit")


def is_of_chapter(item: pytest.Item, chapter: str) -> bool:
    """By its folder, its file's name, or its parameters: an exercise's id (06.partition) or a chapter's name (06_data_parallel)."""
    parameters = getattr(item, "callspec", None)
    return (
        item.path.parent.name in FOLDERS[chapter].split()
        or item.path.name.startswith(f"test_{chapter}_")
        or bool(parameters and re.search(rf"(^|-){chapter}[._]", parameters.id))
    )


def pytest_configure(config):
    if config.getoption("--record-durations"):
        config.pluginmanager.register(Recorder())


def keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    kept = [wanted(item) for item in items]
    config.hook.pytest_deselected(items=[item for item, stays in zip(items, kept, strict=True) if not stays])
    items[:] = [item for item, stays in zip(items, kept, strict=True) if stays]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if chapter := config.getoption("--chapter"):
        keep(config, items, lambda item: is_of_chapter(item, chapter))
    if base := config.getoption("--changed"):
        keep(config, items, Affected(Dependencies(CHECKOUT), changed_files(base, CHECKOUT)).__contains__)
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        items.sort(key=place)  # or one worker ends with the longest while the others wait


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid)

    return ByScope(config, log)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Text that a byte model learns quickly. Tests only read it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on the mat; the dog sat on the log.\n" * 400, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def the_same_numbers():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
