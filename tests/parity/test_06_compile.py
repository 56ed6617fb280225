"""Compiled blocks under every layout: `compile` changes how a block computes, and nothing of what travels.

The compiler's front alone (`eager`) runs what it has captured operation by operation, so the numbers are those of one process without it.
"""

from dataclasses import replace

import pytest
import torch
from layout_runs import LayoutRun, largest_difference
from layouts import layout_of
from sharded_runs import ADAMW, SMALL, alone

from shared.parallel.processes.launch import run_processes

LAYOUTS = ("course dp2", "course dp2_zero1", "course fsdp2", "torch dp2", "torch fsdp2")
CASES = [(layout, recompute) for layout in LAYOUTS for recompute in ("none", "full", "selective")]
FEW = [("course fsdp2", "full"), ("torch fsdp2", "none")]  # each costs seconds of compiling


def compiled(world, cases, backend):
    """Of each case the weights after three steps, and how many calls the compiler has captured. What is sharded is compiled in blocks, all
    of which count once for the compiler: so they are looked at one by one."""
    found = {}
    for words, recompute in cases:
        torch.compiler.reset()
        run = LayoutRun(world, replace(layout_of(words), activation_checkpointing=recompute), optimizer=ADAMW)
        run.parallel.model.compile(backend=backend)
        if run.mesh.fsdp.size > 1:
            assert all(block._compiled_call_impl is not None for block in run.plain.stack.blocks.values())
        captured = torch._dynamo.utils.counters["stats"]
        captured.clear()
        found[words, recompute] = run.train(3).weights(), captured["calls_captured"]
    return found


@pytest.fixture(scope="module")
def expected():
    return alone(SMALL, ADAMW).weights


def require_equal(cases, expected):
    for found in run_processes(compiled, 2, cases, "eager", timeout=600):
        for case, (weights, captured) in found.items():
            assert captured > 20, case  # of a block's thirty, so that products and attention are among them
            assert largest_difference(weights, expected) < 1e-9, case


def test_compiled_ranks_give_what_one_process_gives(expected):
    require_equal(FEW, expected)


@pytest.mark.slow
def test_they_do_so_on_every_layout_with_every_recomputation(expected):
    require_equal([case for case in CASES if case not in FEW], expected)


@pytest.mark.slow  # each rank translates to C++ and compiles it
@pytest.mark.parametrize("case", [case for case in CASES if "fsdp" in case[0]], ids=", ".join)
def test_sharded_blocks_that_are_machine_code_give_it_too(case, expected):
    for found in run_processes(compiled, 2, [case], "inductor", timeout=600):
        assert largest_difference(found[case][0], expected) < 1e-9
