"""Experts under `engine.compile`: what lies around the layers is compiled, and the numbers stay.

The compiler's front alone (`eager`) runs what it has captured operation by operation, so the numbers are those of one process without it.
"""

from dataclasses import replace

import pytest
import torch
from mixture_runs import MixtureRun, alone, observed, require_same

from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.processes.launch import run_processes


def compiled(world, layout: ParallelConfig) -> tuple[dict, int]:
    """What three steps give, and how many calls the compiler has captured."""
    torch.compiler.reset()
    run = MixtureRun(world, layout)
    run.parallel.model.compile(backend="eager")
    captured = torch._dynamo.utils.counters["stats"]
    captured.clear()
    return observed(run), captured["calls_captured"]


SLOW = [pytest.param(how, marks=pytest.mark.slow) for how in ("none", "full")]  # each costs seconds of compiling


@pytest.mark.parametrize("recompute", ["selective", *SLOW])
def test_one_process_gives_what_it_gives_uncompiled(recompute):
    found, captured = compiled(SingleRankCommunicator(), ParallelConfig(activation_checkpointing=recompute))
    require_same([found], alone())
    assert captured > 20, "attention is compiled"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["fsdp2", "tp2", "pp2", "dp2_ep2"])
def test_so_do_ranks(word):
    layout = replace(parse_layout(word), activation_checkpointing="full")
    found = run_processes(compiled, 2, layout, timeout=600)
    require_same([each for each, _ in found], alone())
    assert all(captured > 20 for _, captured in found)
