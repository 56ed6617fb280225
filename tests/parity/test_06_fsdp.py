"""Floor 6 beside PyTorch's own FSDP: `fully_shard` on the same units, in two processes over gloo, started once.

PyTorch cuts by rows and we by numbers, and both add the same products, so float64 agrees to rounding. Its operations are counted where they
pass PyTorch's dispatcher (`CommDebugMode`, which does so too, loses its place among modules that are called from a stack's `run_block`),
ours by the trace.
"""

from collections import Counter

import pytest
import torch
from sharded_runs import ADAMW, MICROBATCHES, SMALL, alone, batch_of, build, require_equal, share, sharded
from step_records import STEPS

from shared.loop import accumulate_gradients, train_step
from shared.loss import next_token_objective
from shared.optim.build import build_optimizer
from shared.parallel.config import ParallelConfig
from shared.parallel.processes.launch import run_processes
from shared.parallel.data.engine import add_over

TWO = ParallelConfig(fully_sharded=2)
VARIANTS = {
    "resharded": TWO,
    "kept": ParallelConfig(fully_sharded=2, reshard_after_forward=False),
    "recomputed": ParallelConfig(fully_sharded=2, activation_checkpointing="full"),
}


def by_torch(world, layout: ParallelConfig) -> dict:
    """Weights after three steps on `fully_shard`, and what one backward and forward pass says to the other rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = Counter()

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.calls[operation.name()] += 1
            return operation(*args, **(kwargs or {}))

    mesh, model = init_device_mesh("cpu", (2,)), build(SMALL)
    if layout.activation_checkpointing == "full":
        model.stack.run_block = lambda block, x, context: checkpoint(block, x, context, use_reentrant=False)
    for module in (*model.stack.blocks.values(), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=layout.reshard_after_forward if module is not model else None)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = build_optimizer(model, ADAMW)

    def update(model, optimizer, token_count):
        norm = torch.stack([p.grad.full_tensor().square().sum() for p in model.parameters()]).sum().sqrt() / token_count
        for parameter in model.parameters():
            parameter.grad.mul_((1 / (norm + 1e-6)).clamp(max=1.0) / token_count)
        optimizer.step()

    shares = lambda step: [share(batch_of(step, number), world.rank, 2) for number in range(MICROBATCHES)]  # noqa: E731
    for step in range(STEPS):
        reducer = lambda model, totals: add_over(totals, world)  # noqa: E731
        train_step(model, optimizer, shares(step), next_token_objective, accumulate_gradients, reducer, update)
    with Counting() as counting:
        accumulate_gradients(model, shares(0)[:1], next_token_objective)
    calls = {name.split("::")[1]: count for name, count in counting.calls.items() if name.startswith("c10d::")}
    return {"weights": {name: p.full_tensor().detach() for name, p in model.named_parameters()}, "calls": calls}


def by_hand(world, layout: ParallelConfig) -> dict:
    seen = []
    told = sharded(world, layout, SMALL, watch=seen.append)
    parallel = seen[0]
    world.trace.clear()
    mine = share(batch_of(0, 0), world.rank, 2)
    parallel.reducer(parallel.model, accumulate_gradients(parallel.model, [mine], next_token_objective))
    return {"told": told, "calls": world.trace.calls()}


def both(world) -> dict:
    return {name: (by_torch(world, layout), by_hand(world, layout)) for name, layout in VARIANTS.items()}


@pytest.fixture(scope="module")
def ranks():
    return run_processes(both, 2, timeout=300)


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_fsdp_steps_equal_fully_shard_and_one_process(variant, ranks):
    expected = alone(SMALL)
    for found in ranks:
        theirs, mine = found[variant]
        require_equal(mine["told"], expected)
        for name, weight in mine["told"].weights.items():
            assert torch.allclose(weight, theirs["weights"][name], rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_many_operations_as_fully_shard(variant, ranks):
    for found in ranks:
        theirs, mine = (each["calls"] for each in found[variant])
        assert theirs == {"_allgather_base_": 4 if variant == "kept" else 7, "_reduce_scatter_base_": 4}
        assert mine["all_gather", "fsdp"] == theirs["_allgather_base_"]
        assert mine["reduce_scatter", "fsdp"] == theirs["_reduce_scatter_base_"]
