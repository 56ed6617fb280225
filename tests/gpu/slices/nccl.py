"""A world of one rank over NCCL: every collective and every layout on both backends; with two GPUs also two ranks (dp2, fsdp2, ZeRO).

With one rank nothing has to be added, so weights must be those of a process without a world; what is shown is that every call that a layout
makes is one that NCCL takes: dtypes, devices, streams, groups. On a CPU gloo takes NCCL's place.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

if __name__ == "__main__":  # one of two ranks, which torchrun has started
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

import torch
import torch.distributed as dist
from gpu_machine import Machine, tf32
from gpu_models import TINY, batch_of, distance, moved
from gpu_rows import Row
from torch import Tensor

from shared.loop import accumulate_gradients, train_step
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.precision import autocast_objective
from shared.optim.updater import Update
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.processes.torchrun import (
    Process,
    ProcessCommunicator,
    all_gather_single,
    from_torchrun,
    leave_world,
    reduce_scatter_single,
)
from shared.parallel.comm.trace import CommTrace
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.context import ring
from shared.parallel.data.zero import muon_matrices
from shared.parallel.health.heartbeat import Heartbeat, Timeouts
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel, data_engines, routes_of
from shared.parallel.strategy import ParallelStrategy

LAYOUTS = {"course": ("dp2", "dp2_zero1", "dp2_zero2", "fsdp2"), "torch": ("dp2", "dp2_zero1", "fsdp2")}
CASES = [(backend, layout) for backend, layouts in LAYOUTS.items() for layout in layouts]
MUON = OptimizerConfig("muon", lr=1e-3, newton_schulz_dtype="float32")
CONFIG = replace(TINY, hidden_size=128, intermediate_size=384)
ROWS, SEQ, STEPS = 4, 64, 3
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}  # weights, of their norm: sums in another order, and Muon makes rounding larger
TWO_RANKS = 300  # seconds


def run(machine: Machine, small: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        world = world_of_one(machine, Path(folder))
        try:
            yield from collectives(world, machine)
            yield from layouts(world, machine.device, CASES, TOLERANCES if not small else {"bfloat16": TOLERANCES["bfloat16"]})
        finally:
            leave_world(world, "has finished")
            dist.destroy_process_group()
    if machine.is_gpu and torch.cuda.device_count() > 1:
        yield from two_ranks("cuda")
    else:
        yield Row("two ranks", {}, None, "not started: this machine has no second GPU")


class GroupOfOne(ProcessCommunicator):
    """A group of one rank, whose operations go to torch all the same. Two of them the core gives gloo in another way, for several ranks."""

    def _all_gather(self, whole, part):
        return self.wrap(all_gather_single(whole.view(-1), part.view(-1), self.torch_group, async_op=True))

    def _reduce_scatter(self, part, whole):
        return self.wrap(reduce_scatter_single(part.view(-1), whole.view(-1), group=self.torch_group, async_op=True))


class WorldOfOne(GroupOfOne):
    """A world whose groups are torch's own although they have one rank; the core's would send nothing."""

    def split(self, axis, groups):
        self.splits += 1
        return GroupOfOne(self.process, self.new_group(axis, [0]), (0,), axis, self.trace, self.splits)


def world_of_one(machine: Machine, folder: Path) -> WorldOfOne:
    """What `join_world` does with several ranks."""
    store, trace = dist.FileStore(str(folder / "store"), 1), CommTrace()
    process = Process(machine.device, Heartbeat(store, 0, 1, trace, Timeouts()))
    dist.init_process_group("cpu:gloo,cuda:nccl" if machine.is_gpu else "gloo", timeout=process.timeout, store=store, rank=0, world_size=1)
    process.heartbeat.start()
    return WorldOfOne(process, dist.group.WORLD, range(1), "world", trace)


def collectives(world: Communicator, machine: Machine) -> Iterator[Row]:
    """Each operation on each dtype that travels: gradients, counts, checksums, texts."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        own = torch.arange(8, device=machine.device).to(dtype)
        found = [own.clone(), own.clone(), torch.empty_like(own), torch.empty_like(own), own.clone(), torch.empty_like(own)]
        world.all_reduce(found[0])
        world.all_reduce(found[1], op="max")
        world.all_gather(found[2], own)
        world.reduce_scatter(found[3], own)
        world.broadcast(found[4], 0)
        world.all_to_all([found[5]], [own])
        yield Row(f"six collectives in {str(dtype)[6:]}", {}, all(torch.equal(each, own) for each in found))
    world.barrier()
    said = {"text": "ä" * 1000, "number": 1}
    yield Row("barrier, and objects as text", {}, world.gather_objects(said) == [said])


def layouts(world: Communicator, device: torch.device, cases: list[tuple[str, str]], precisions: dict[str, float]) -> Iterator[Row]:
    for precision, tolerance in precisions.items():
        expected, _ = trained(SingleRankCommunicator(), device, ParallelConfig(), precision)
        for backend, name in cases:
            layout = parse_layout(name, ParallelConfig(backend=backend))
            found, calls = trained(world, device, layout, precision)
            far, where = distance(found, expected)
            figures = {"difference": far, "worst": where, "collectives a step": calls}
            what = f"{backend} {name}, {world.size} rank{'s' * (world.size > 1)}, {precision}"
            yield Row(what, figures, far <= tolerance, f"weights to {tolerance:g}")


def trained(world: Communicator, device: torch.device, layout: ParallelConfig, precision: str) -> tuple[dict[str, Tensor], float]:
    """The whole weights after three steps of two micro-batches, and this rank's collectives in a step."""
    strategy = strategy_of(world, device, layout, None if precision == "float32" else getattr(torch, precision))
    optimizer = build_optimizer(strategy.optim_params, MUON, strategy.routes)
    runner, update = strategy.runner(accumulate_gradients), strategy.updater(Update(1.0, norm=strategy.grad_norm))
    objective, data = autocast_objective(packed_next_token_objective, precision), strategy.mesh.data
    before = sum(world.trace.calls().values())
    with tf32(False):
        for step in range(STEPS):
            batches = [moved(batch_of(CONFIG, ROWS, SEQ, seed=2 * step + i, packed=True), device) for i in range(2)]
            share = ROWS // data.size
            shares = [{name: x[data.rank * share :][:share] for name, x in batch.items()} for batch in batches]
            train_step(strategy.model, optimizer, shares, objective, runner, strategy.reducer, update)
    calls = (sum(world.trace.calls().values()) - before) / STEPS
    return {name: tensor.detach().double().cpu() for name, tensor in strategy.whole_weights()}, calls


def strategy_of(world: Communicator, device: torch.device, layout: ParallelConfig, dtype: torch.dtype | None) -> ParallelStrategy:
    """`apply_parallel`; in the world of one rank its engines, which would not be made, because there is nothing to do."""
    model = TransformerModel(CONFIG).to(device)
    if not isinstance(world, WorldOfOne):
        return apply_parallel(model, Mesh(layout, world), MUON, dtype, device)
    mesh = Mesh(ParallelConfig(), world)
    mesh.config = layout
    routes = routes_of(model, MUON)
    whole = muon_matrices(routes) if layout.zero else set()
    return ParallelStrategy(model, mesh, data_engines(model, mesh, whole, dtype, device, 0), routes=routes)


def two_ranks(device: str) -> Iterator[Row]:
    """The rows that rank 0 of two wrote."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "rows.json")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
        problem = ""
        try:
            ended = subprocess.run([*words, __file__, str(found), device], capture_output=True, text=True, timeout=TWO_RANKS)
            problem = ended.stderr[-600:] if ended.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"more than {TWO_RANKS} s"
        lines = found.read_text(encoding="utf-8").splitlines() if found.is_file() else []
        yield from (Row(**json.loads(line)) for line in lines)
        if problem:
            yield Row("two ranks", {"rows until then": len(lines)}, False, problem)


def exchange(world: Communicator, device: torch.device) -> Iterator[Row]:
    """Both ranks send and receive at once, as ring attention does: it must not depend on how much NCCL buffers. If both sent first, each
    would wait for the other (NVIDIA/nccl issue 479)."""
    for megabytes in (1, 64):
        sent = torch.full((megabytes * 2**18,), float(world.rank), device=device)
        received, other = torch.empty_like(sent), 1 - world.rank
        ring.exchange(world, {0: (other, sent)}, {0: (other, received)}).wait()
        yield Row(f"both ranks send and receive {megabytes} MiB at once", {}, bool((received == other).all()))


def main(path: str, device: str) -> None:
    """One rank. Rank 0 writes each row at once, so that a rank that hangs takes none with it."""
    world, here = from_torchrun(device=device)
    for row in chain(layouts(world, here, CASES, {"float32": TOLERANCES["float32"]}), exchange(world, here)):
        if world.rank == 0:
            with Path(path).open("a", encoding="utf-8") as out:
                out.write(json.dumps(vars(row)) + "\n")
    world.barrier()
    leave_world(world, "has finished")


if __name__ == "__main__":
    main(*sys.argv[1:])
