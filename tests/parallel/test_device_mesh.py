"""The mesh against torch's own DeviceMesh, and what a layout refuses, sentence by sentence."""

import sys

import cloudpickle
import pytest
import torch

from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import AXES, ParallelConfig, layout_name, parse_layout, require_built
from shared.parallel.processes.launch import run_processes
from shared.parallel.mesh import Mesh
from shared.parallel.comm.threads import run_threads

cloudpickle.register_pickle_by_value(sys.modules[__name__])
GRIDS = [(1, 2, 2, 1, 1), (1, 4, 1, 1, 1), (1, 1, 4, 1, 1), (2, 3, 2, 1, 2), (2, 1, 3, 2, 1), (1, 3, 1, 2, 2)]  # pp, dp, fsdp, cp, tp
JOINED = {"data": ("dp", "fsdp"), "loss": ("dp", "fsdp", "cp"), "replicas": ("dp", "cp")}


def degrees(grid, **more) -> ParallelConfig:
    """Also those that later chapters bring."""
    return ParallelConfig(**dict(zip(AXES.values(), grid, strict=True)), **more)


def places(world, grid):
    mesh = Mesh(degrees(grid), world)
    groups = {axis: getattr(mesh, axis) for axis in (*AXES, *JOINED)}
    return {axis: (list(group.members), group.rank) for axis, group in groups.items()}


def places_by_torch(world):
    """For each grid and each rank what torch says, in one process: its `fake` backend takes any number of ranks and sends nothing."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def place(grid, rank):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(grid).numel())
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=tuple(AXES))
        groups = {axis: mesh.get_group(axis) for axis in AXES}
        groups |= {name: mesh[axes]._flatten(name).get_group() for name, axes in JOINED.items()}
        found = {axis: (dist.get_process_group_ranks(group), dist.get_group_rank(group, rank)) for axis, group in groups.items()}
        dist.destroy_process_group()
        return found

    return [[place(grid, rank) for rank in range(torch.Size(grid).numel())] for grid in GRIDS]


@pytest.fixture(scope="module")
def by_torch():
    return run_processes(places_by_torch, 1)[0]


@pytest.mark.parametrize("index", range(len(GRIDS)), ids=lambda index: "x".join(map(str, GRIDS[index])))
def test_mesh_coordinates_equal_torchs_device_mesh(by_torch, index):
    assert run_threads(places, torch.Size(GRIDS[index]).numel(), GRIDS[index]) == by_torch[index]


def test_processes_stand_where_threads_do():
    assert run_processes(places, 4, GRIDS[0]) == run_threads(places, 4, GRIDS[0])


def test_losses_add_over_the_data_axis_and_the_context_axis():
    """Ranks of one tensor-parallel group see the same batch: the data axis holds one of them. Ranks of a context-parallel group see parts
    of the same rows."""

    def count(world, grid):
        mesh, tokens, rows = Mesh(degrees(grid), world), torch.ones(1), torch.ones(1)
        mesh.loss.all_reduce(tokens)
        mesh.data.all_reduce(rows)
        return tokens.item(), rows.item()

    assert run_threads(count, 8, (1, 2, 2, 1, 2)) == [(4.0, 4.0)] * 8
    assert run_threads(count, 8, (1, 2, 1, 2, 2)) == [(4.0, 2.0)] * 8


def test_too_few_ranks_are_refused_with_the_degrees():
    with pytest.raises(ValueError, match=r"needs 4 ranks \(data_parallel 2 x fully_sharded 2\) and there are 3"):
        run_threads(lambda world: Mesh(parse_layout("dp2_fsdp2"), world), 3)
    with pytest.raises(ValueError, match=r"needs 1 ranks \(1\) and there are 2"):
        run_threads(lambda world: Mesh(ParallelConfig(), world), 2)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"data_parallel": 0}, "data_parallel is 0: give at least 1"),
        ({"expert_parallel": 2, "data_parallel": 3}, "expert_parallel is 2, which does not divide the 3"),
        ({"sequence_parallel": True}, "needs tensor parallelism"),
        ({"zero": 2, "data_parallel": 2, "pipeline_parallel": 2}, "Use zero 1"),
        ({"zero": 1}, "there is one replica"),
        ({"zero": 1, "data_parallel": 2, "fully_sharded": 2}, "full sharding already cuts"),
        ({"zero": 2, "data_parallel": 2, "backend": "torch"}, "PyTorch has no such engine"),
        ({"prefetch": -1}, "prefetch is -1: give at least 0"),
        ({"heartbeat_timeout": 0.0}, "heartbeat_timeout is 0.0: give a number above 0"),
        ({"bucket_megabytes": 0.0}, "bucket_megabytes"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        ParallelConfig(**given)


@pytest.mark.parametrize(
    "given, chapter",
    [
        ({"tensor_parallel": 2}, "07"),
        ({"tensor_parallel": 2, "sequence_parallel": True}, "07"),
        ({"context_parallel": 2}, "07"),
        ({"pipeline_parallel": 2}, "08"),
        ({"expert_parallel": 2, "data_parallel": 2}, "09"),
    ],
)
def test_what_no_axis_brings_is_refused_with_its_chapter(given, chapter):
    name = next(iter(given))
    with pytest.raises(ValueError, match=f"parallel.{name} is 2: it comes with chapter {chapter}"):
        require_built(ParallelConfig(**given))
    require_built(ParallelConfig(**given), given)
    with pytest.raises(ValueError, match=f"it comes with chapter {chapter}"):
        require_built(ParallelConfig(**given), ["another"])


@pytest.mark.parametrize("word", ["pp2_dp2_fsdp2_cp3_tp2", "dp4_ep2", "fsdp4_tp2_ep4", "dp2_tp2_zero1_sp"])
def test_layouts_of_later_chapters_are_words_too(word):
    assert layout_name(parse_layout(word)) == word


@pytest.mark.parametrize("word", ["one", "dp2", "fsdp4", "dp2_fsdp3", "dp4_zero1", "dp2_zero2"])
def test_a_layout_is_one_word(word):
    config = parse_layout(word)
    assert layout_name(config) == word
    assert config.ranks == config.data_ranks == torch.Size([int(part[-1]) for part in word.split("_") if part[:2] in ("dp", "fs")]).numel()


def test_a_word_says_all_degrees_and_nothing_else():
    base = ParallelConfig(backend="torch", data_parallel=3, zero=1, heartbeat_timeout=7.0)
    assert parse_layout("fsdp2", base) == ParallelConfig(backend="torch", fully_sharded=2, heartbeat_timeout=7.0)
    assert parse_layout("one", base) == ParallelConfig(backend="torch", heartbeat_timeout=7.0)


@pytest.mark.parametrize(
    "word, part",
    [
        ("dp", "dp"),
        ("dp2_dp3", "dp3"),
        ("ddp2", "ddp2"),
        ("dp2-fsdp2", "dp2-fsdp2"),
        ("zero", "zero"),
        ("", ""),
        ("sp2_tp2", "sp2"),
        ("tp2_sp_sp", "sp"),
    ],
)
def test_a_word_that_is_not_understood_is_refused_at_its_part(word, part):
    with pytest.raises(ValueError, match=f"is not understood at {part!r}"):
        parse_layout(word)
