"""The oracle of build 08: its one process has the gradients of torch.distributed.pipelining on two processes, and so has the solution.
Its schedules by chance can run: the core's validation says so."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from shared.course import assignments, build_check
from shared.course.stubs import BodyFile
from shared.parallel.comm.communicator import Communicator
from shared.parallel.pipeline.simulate import ScheduleError, validate
from shared.parallel.processes.launch import run_processes

RANKS, MICROBATCHES, BLOCKS = 2, 4, 5
SCHEDULES = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}


def pieces_of_the_build():
    return build_check.read_module(assignments.builds()["08.build"].folder / "pieces.py")


def by_torch(world: Communicator, pieces, name: str) -> dict[str, torch.Tensor]:
    """The gradients of this rank's weights, of a step of PyTorch's own schedule."""
    schedule, chunks = SCHEDULES[name]
    model, cut, stages = pieces.Model(BLOCKS), pieces.cut_of(BLOCKS, RANKS * chunks), []
    for number in range(world.rank, len(cut), RANKS):
        parts = [model.embedding] * (number == 0) + [model.blocks[block] for block in cut[number]]
        parts += [model.norm, model.head] * (number == len(cut) - 1)
        stages.append(PipelineStage(nn.Sequential(*parts), number, len(cut), torch.device("cpu"), group=dist.group.WORLD))
    runner = schedule(stages[0] if chunks == 1 else stages, MICROBATCHES, loss_fn=pieces.summed_loss, scale_grads=False)
    ids, targets = (torch.cat(parts) for parts in zip(*pieces.even(MICROBATCHES), strict=True))
    runner.step(*[ids] * (world.rank == 0), **({"target": targets} if world.rank == RANKS - 1 else {}))
    return {name: weight.grad / targets.numel() for name, weight in model.named_parameters() if weight.grad is not None}


def by_the_solution(world: Communicator, pieces, name: str) -> dict[str, torch.Tensor]:
    build, chunks = assignments.builds()["08.build"], SCHEDULES[name][1]
    solution = build_check.load(BodyFile.read(build.solution_file), build.adapters)
    pipeline = solution.make_pipeline(pieces.Model(BLOCKS), pieces.cut_of(BLOCKS, RANKS * chunks), world, pieces.summed_loss)
    solution.step(pipeline, pieces.even(MICROBATCHES), pieces.schedule_of(name, RANKS, MICROBATCHES, chunks))
    return solution.gradients(pipeline)


def two_processes(world: Communicator, names: list[str]) -> list[dict[str, dict[str, torch.Tensor]]]:
    pieces = pieces_of_the_build()
    return [{name: run(world, pieces, name) for name in names} for run in (by_torch, by_the_solution)]


def test_one_process_is_what_pytorchs_pipelines_compute():
    pieces = pieces_of_the_build()
    whole = pieces.Whole(pieces.Model(BLOCKS), pieces.even(MICROBATCHES)).gradients
    for found in zip(*run_processes(two_processes, RANKS, list(SCHEDULES)), strict=True):
        for name in SCHEDULES:
            gradients = [gradient for ranks in found for gradient in ranks[name].items()]
            assert sorted(name for name, _ in gradients) == sorted(whole)
            for weight, gradient in gradients:
                torch.testing.assert_close(gradient, whole[weight], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 3), (3, 2)])
def test_schedules_by_chance_can_run(ranks, chunks):
    pieces, lists, disordered = pieces_of_the_build(), [], 0
    for seed in range(20):
        lists.append(pieces.random_schedule(seed, ranks, 5, chunks, split=seed % 2 == 1))
        validate(lists[-1], 5, chunks)
        try:
            validate(pieces.random_schedule(seed, ranks, 5, chunks, same_order=False), 5, chunks)
        except ScheduleError as error:
            assert "Messages have no names" in str(error)
            disordered += 1
    assert disordered > 10 and len({str(each) for each in lists}) == 20
