"""Build 06 beside torch.distributed: its DDP, ZeRO-1 and FSDP leave the gradients and weights that PyTorch's engines leave.

Two processes over gloo, three steps of AdamW, two micro-batches of unequal token counts on each rank, float64. Both sides add the same
numbers in another order, which moves float64 by some 1e-15 of the largest summand; 1e-9 of a tensor's length is far from any mistake.
"""

import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shared.course import assignments, build_check
from shared.course.stubs import BodyFile
from shared.parallel.processes.launch import run_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])
BUILD = assignments.builds()["06.build"]
ADAMW = {"lr": 0.05, "weight_decay": 0.1}
ENGINES = {"replica": "DDP", "zero": "ZeroRedundancyOptimizer", "sharded": "fully_shard", "recompute": "fully_shard"}


def model_of(pieces) -> nn.Module:
    """`spare` is used by nobody, and frozen: `fully_shard` would give it a gradient of zeros, with which AdamW lets a weight decay."""
    model = pieces.Model(blocks=3, tied=True, frozen=[f"blocks.{number}.spare" for number in range(3)])
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # PyTorch's FSDP takes no other
    return model


def batches_of(pieces, rank: int) -> list:
    return [pieces.batches_of([(2, 5), (3, 5)], seed=10 * step + rank, ignored=0.2 + 0.4 * rank) for step in range(3)]


def theirs(pieces, world, kind: str) -> dict[str, tuple]:
    """Each trained weight's gradient in the last step, and each weight after it, by PyTorch's engine."""
    model, engine, mesh = model_of(pieces), ENGINES[kind], DeviceMesh.from_group(world.torch_group, "cpu")
    if engine == "fully_shard":
        for unit in [*model.blocks, model]:
            fully_shard(unit, mesh=mesh)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no other way to sum
        wrapped, factor = model, 1
    else:
        wrapped, factor = DistributedDataParallel(model, process_group=world.torch_group, bucket_cap_mb=0.001), world.size
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if engine == "ZeroRedundancyOptimizer":
        optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, process_group=world.torch_group, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(trained, **ADAMW)
    for own, *others in zip(*(batches_of(pieces, (world.rank + place) % world.size) for place in range(world.size))):
        tokens = sum(int((targets != -100).sum()) for batches in (own, *others) for _, targets in batches)
        optimizer.zero_grad()
        for place, (ids, targets) in enumerate(own):
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.require_backward_grad_sync = place == len(own) - 1
            (pieces.summed_loss(wrapped(ids), targets) * factor / tokens).backward()  # DDP divides by the ranks
        optimizer.step()
    whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # noqa: E731
    return {name: (whole(p.grad) if p.requires_grad else None, whole(p.detach())) for name, p in model.named_parameters()}


def ours(pieces, world, kind: str) -> dict[str, tuple]:
    functions = build_check.load(BodyFile.read(BUILD.solution_file), BUILD.adapters)
    parallel = pieces.make(functions, kind, model_of(pieces), world)
    for own in batches_of(pieces, world.rank):
        functions.backward(parallel, own, pieces.summed_loss)
        gradients = functions.gradients(parallel)
        functions.update(parallel)
    return {name: (gradients.get(name), weight) for name, weight in functions.state(parallel)["model"].items()}


def compared(world) -> dict[str, list[str]]:
    """For each kind, how many tensors were compared, and those that are further than 1e-9 of their length apart."""
    pieces, found = build_check.read_module(BUILD.folder / "pieces.py"), {}
    for kind in ENGINES:
        mine, reference = ours(pieces, world, kind), theirs(pieces, world, kind)
        assert mine.keys() == reference.keys()
        pairs = [(name, a, b) for name in mine for a, b in zip(mine[name], reference[name]) if a is not None or b is not None]
        found[kind] = len(pairs), [name for name, a, b in pairs if not (a - b).norm() <= 1e-9 * b.norm()]
    return found


@pytest.fixture(scope="module")
def results():
    return run_processes(compared, 2, timeout=300)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_build_leaves_the_gradients_and_weights_of_pytorchs_engine(kind, results):
    for by_kind in results:
        count, apart = by_kind[kind]
        assert count > 40 and apart == []
