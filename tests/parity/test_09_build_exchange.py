"""Build 09 on two processes: the solution's exchange of rows is PyTorch's all_to_all_single, and its step is the oracle's one process."""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from shared.course import assignments, build_check
from shared.course.stubs import BodyFile
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.processes.launch import run_processes

EXPERTS, CHOSEN = 6, 2
NUMBERS, SHAPES = [[2, 3], [0, 4]], [[(2, 3), (1, 4)], [(1, 2), (0, 3)]]


def on_two_processes(world: Communicator) -> tuple[dict, dict]:
    """Results of this rank by the oracles and by the solution."""
    build = assignments.builds()["09.build"]
    pieces = build_check.read_module(build.folder / "pieces.py")
    adapters = build_check.load(BodyFile.read(build.solution_file), build.adapters)
    sent, received = NUMBERS[world.rank], [row[world.rank] for row in NUMBERS]
    rows = pieces.randn(sum(sent), pieces.WIDTH, seed=world.rank).requires_grad_()
    ways = (
        all_to_all_single_autograd(rows, received, sent, dist.group.WORLD),
        adapters.exchange(rows, sent, received, world),
    )
    towards = pieces.randn(sum(received), pieces.WIDTH, seed=5 + world.rank)
    exchanged = [{"arrived": way.detach() * 1, "gradient": torch.autograd.grad(way * 1, rows, towards)[0]} for way in ways]
    weights, batches = pieces.weights_of(EXPERTS), pieces.batches_by_rank(SHAPES)
    loss, gradients = pieces.Whole(weights, CHOSEN, True).step(sum(batches, []), 0.3, 0.1)
    layer = adapters.make_layer(weights, CHOSEN, True, world, SingleRankCommunicator())
    step = {"loss": adapters.step(layer, batches[world.rank], pieces.squared_error, 0.3, 0.1).detach()}
    whole = {name: pieces.part(name, gradient, world.rank, 2) for name, gradient in gradients.items()}
    return exchanged[0] | {"loss": loss} | whole, exchanged[1] | step | adapters.gradients(layer)


def test_the_exchange_is_pytorchs_and_a_step_on_processes_is_one_process():
    for expected, found in run_processes(on_two_processes, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
