"""Pipeline parallelism over gloo against one process: losses, norms, every gradient and the weights after three steps, in float64."""

import pytest
from pipeline_runs import expected, make, observed, require_same

from shared.parallel.comm.communicator import Communicator
from shared.parallel.processes.launch import run_processes

Case = tuple[str, str, str, str]  # layout, family, optimizer, schedule
TWO: list[Case] = [
    ("pp2", "llama", "muon", "1f1b"), ("pp2", "gpt2", "adamw", "gpipe"), ("pp2", "gpt2", "sgd", "interleaved"),
    ("pp2", "qwen3", "sgd", "zero_bubble"),
]  # fmt: skip
FOUR: list[Case] = [
    *(("pp4", family, "adamw", schedule) for family in ("gpt2", "qwen3") for schedule in ("gpipe", "1f1b", "zero_bubble")),
    *((layout, family, "muon", "1f1b") for layout in ("pp2_dp2", "pp2_tp2", "pp2_fsdp2") for family in ("llama", "gpt2", "qwen3")),
    *((layout, "llama", "adamw", "interleaved") for layout in ("pp2_dp2", "pp2_dp2_zero1", "pp2_fsdp2")),
    ("pp2_dp2_zero1", "qwen3", "adamw", "zero_bubble"), ("pp2_tp2_sp", "gpt2", "sgd", "1f1b"),
]  # fmt: skip


def trained(world: Communicator, cases: list[Case]) -> dict[Case, dict]:
    return {case: observed(make(world, *case)) for case in cases}


@pytest.fixture(scope="module")
def on_two():
    return run_processes(trained, 2, TWO, timeout=300)


@pytest.fixture(scope="module")
def on_four():
    return run_processes(trained, 4, FOUR, timeout=600)


@pytest.mark.parametrize("case", TWO, ids=", ".join)
def test_two_processes_do_what_one_does(case, on_two):
    require_same([found[case] for found in on_two], expected(*case[1:3]))


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=", ".join)
def test_four_processes_do_what_one_does(case, on_four):
    require_same([found[case] for found in on_four], expected(*case[1:3]))
