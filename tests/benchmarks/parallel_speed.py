"""A training step on two ranks of one machine: our data, tensor and pipeline parallelism beside PyTorch's, over gloo.

    python tests/benchmarks/parallel_speed.py                                     every row
    python tests/benchmarks/parallel_speed.py --rows dp2 fsdp2 --pairs 31
    python tests/benchmarks/parallel_speed.py --quick                             few steps: does it run?

A row is a job of its own. Each contender has two processes with a group of their own, and those of the one whose turn it is not sleep in
a read from a pipe: they neither compute nor wait inside gloo, and no memory, hook or thread of one contender is in a process of the other.
Both keep freed memory (`shared.devices`), as our runs do, so that is no part of the difference; so are the objective (the sliced loss),
the optimizer's kernel (fused AdamW), the initial weights and the tokens the same. Theirs is the plain loop of PyTorch's own examples, with
the switches that make it faster. CPU time is of all threads of a rank, gloo's too: what a step costs where all cores compute, and steadier
than the clock where others compute as well. Losses of all rounds, and at the end the weights, must be the same to rounding.
"""

import argparse
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from side_by_side import Comparison, Ranks, compare
from step_speed import BATCH, PEERS, SEQ, VOCAB
from torch import Tensor

from shared.devices import keep_freed_memory
from shared.model.chunked_loss import chunked_loss, packed_next_token_objective
from shared.loop import accumulate_gradients, apply_update, train_step
from shared.model.transformer import TransformerModel, keep_part
from shared.parallel.processes.launch import loopback
from shared.parallel.processes.torchrun import join_world
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.health.heartbeat import Timeouts
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.pipeline.axis import stage_blocks
from shared.trainer.models import RUN_AXES

RANKS, WARMUP, MICROBATCHES = 2, 2, 8
ROWS = {
    "dp2": "DistributedDataParallel",
    "dp2_zero1": "DDP, ZeroRedundancyOptimizer",
    "fsdp2": "fully_shard",
    "fsdp2 kept": "fully_shard, reshard_after_forward=False",
    "fsdp2 kept, itself": "our own fsdp2, which reshards",
    "tp2": "parallelize_module, loss_parallel",
    "tp2 sequence": "parallelize_module with SequenceParallel, loss_parallel",
    "tp2, gathered": "parallelize_module, logits gathered",
    "pp2": "PipelineStage, Schedule1F1B",
    "pp2, itself": "our own pp2 on torch.distributed.pipelining (backend torch)",
}
Step = Callable[[dict[str, Tensor]], Tensor]  # step(this rank's share of a batch) -> its mean loss, or that of the whole batch


class Run:
    """One rank's rounds of `steps` steps.

    Args:
        rank, shares: which share of a batch this rank reads, of how many.
        step: does one. weights: returns the whole weights by name; every rank calls it.
    """

    def __init__(self, rank: int, shares: int, steps: int, step: Step, weights: Callable[[], dict[str, Tensor]]):
        self.rank, self.shares, self.steps, self.step, self.whole = rank, shares, steps, step, weights
        self.random = torch.Generator().manual_seed(0)

    def share(self) -> dict[str, Tensor]:
        ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=self.random).chunk(self.shares)[self.rank % self.shares]
        return {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}

    def __call__(self) -> dict[str, float]:
        shares = [self.share() for _ in range(self.steps)]
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        losses = [self.step(share) for share in shares]
        dist.barrier()  # the wait for the slower rank is part of what a step costs
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        means = torch.tensor([torch.stack(losses).mean(), busy / self.steps], dtype=torch.float64) / RANKS
        dist.all_reduce(means)
        return {"seconds": seconds / self.steps, "loss": means[0].item(), "cpu": means[1].item()}

    def weights(self) -> dict[str, Any]:
        return {name: tensor.detach().numpy() for name, tensor in self.whole().items()}


def prepare_ours(rank: int, meeting: str, row: str, steps: int, backend: str = "course") -> Run:
    model = prepared()
    world = join_world(rank, RANKS, f"file://{meeting}", torch.device("cpu"), Timeouts())
    layout = replace(layout_of(row), backend=backend)
    parallel = apply_parallel(model, Mesh(layout, world), axes=RUN_AXES)
    optimizer = torch.optim.AdamW(parallel.optim_params.parameters(), lr=1e-4, fused=True)

    def step(share: dict[str, Tensor]) -> Tensor:
        parts = parallel.runner(accumulate_gradients), parallel.reducer, parallel.updater(apply_update)
        microbatches = cut(share) if layout.pipeline_parallel > 1 else [share]
        totals = train_step(parallel.model, optimizer, microbatches, packed_next_token_objective, *parts)
        return totals.loss_sum / totals.token_count

    whole = lambda: {name: tensor for name, tensor in parallel.whole_weights() if tensor is not None}  # noqa: E731
    return Run(rank, layout.data_ranks, steps, step, whole)


def cut(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """A batch in micro-batches."""
    rows = {name: tensor.chunk(MICROBATCHES) for name, tensor in batch.items()}
    return [{name: rows[name][number] for name in rows} for number in range(MICROBATCHES)]


def prepare_theirs(rank: int, meeting: str, row: str, steps: int) -> Run:
    model = prepared()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    if row.startswith("tp"):
        return by_styles(model, rank, row, steps)
    if row.startswith("pp"):
        return by_schedule(model, rank, stage_blocks(model.config, layout_of(row))[rank], steps)
    run, weights = (by_fully_shard if "fsdp" in row else by_ddp)(model, layout_of(row))
    kind: dict[str, Any] = {"lr": 1e-4, "fused": True}
    if layout_of(row).zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(run.parameters(), torch.optim.AdamW, **kind)
    else:
        optimizer = torch.optim.AdamW(run.parameters(), **kind)

    def step(share: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        totals = packed_next_token_objective(run, share)
        loss = totals.loss_sum / totals.token_count
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Run(rank, RANKS, steps, step, weights)


def by_ddp(model: TransformerModel, layout: ParallelConfig):
    """Its default buckets, and gradients that are views of them: one copy fewer than by default."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True), lambda: dict(model.named_parameters())


def by_fully_shard(model: TransformerModel, layout: ParallelConfig):
    """Each block, and then the rest, with the gathering ahead that it does by itself."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for unit in (*model.stack.blocks.values(), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=layout.reshard_after_forward)
    return model, lambda: {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def by_styles(model: TransformerModel, rank: int, row: str, steps: int) -> Run:
    """`parallelize_module` and the loss as PyTorch's own examples have them. The stream is gathered once for q, k and v, and once for gate
    and up, which is faster than for each."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, loss_parallel, parallelize_module

    from shared.parallel.tensor.on_torch import style_of

    by_sequence, gathered = layout_of(row).sequence_parallel, row.endswith("gathered")
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    plan = {name: style for name, _ in model.named_modules() if (style := style_of(name, by_sequence))}
    plan["head.linear"] = ColwiseParallel(output_layouts=Replicate() if gathered else Shard(-1), use_local_output=gathered)
    if by_sequence:
        plan["embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        plan["stack"] = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    model.tie_weights()
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == cut] for cut in (True, False)]  # one group takes one kind
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=1e-4, fused=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with nullcontext() if gathered else loss_parallel():
            loss = torch.nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten())
            loss.backward()
        optimizer.step()
        return loss.detach() if gathered else loss.detach().full_tensor()

    whole = lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # noqa: E731
    return Run(rank, 1, steps, step, lambda: {name: whole(parameter) for name, parameter in model.named_parameters()})


def by_schedule(model: TransformerModel, rank: int, blocks: range, steps: int) -> Run:
    """A stage of the same blocks as ours on each rank, with shapes that it knows beforehand. The last one ends in the sliced loss, as ours
    does; the tied gradient is added between the ends."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    last = rank == RANKS - 1
    keep_part(model, blocks, embedding=rank == 0, head=last)
    head, model.head = model.head, None
    hidden = torch.empty(BATCH // MICROBATCHES, SEQ, model.config.hidden_size, device="meta", requires_grad=True)
    ids = torch.empty(hidden.shape[:2], dtype=torch.int64, device="meta")
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"), hidden if rank else ids, hidden)

    def loss_fn(hidden: Tensor, targets: Tensor) -> Tensor:
        return chunked_loss(head, hidden, targets).loss_sum / (BATCH * SEQ)

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn, scale_grads=False)
    tied = head.linear.weight if last else model.embedding.tokens.weight
    optimizer = torch.optim.AdamW([*model.parameters(), *([tied] if last else [])], lr=1e-4, fused=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        schedule.step(*([] if last else [batch["input_ids"]]), target=batch["targets"], losses=losses, return_outputs=False)
        dist.all_reduce(tied.grad)
        optimizer.step()
        return RANKS * torch.stack(losses).sum().detach() if last else torch.zeros(())  # `Run` takes the mean over the ranks

    return Run(rank, 1, steps, step, lambda: dict(model.named_parameters()))


def layout_of(row: str) -> ParallelConfig:
    layout, *how = row.replace(",", "").split()
    return replace(parse_layout(layout), reshard_after_forward="kept" not in how, sequence_parallel="sequence" in how)


def prepared() -> TransformerModel:
    keep_freed_memory()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    return TransformerModel(PEERS["llama"])


def run(row: str, pairs: int, steps: int) -> Comparison:
    """Raises: RuntimeError: the two have not done the same work."""
    ours = Ranks(prepare_ours, RANKS, row=row, steps=steps)
    itself = {"fsdp2 kept, itself": {"row": "fsdp2"}, "pp2, itself": {"row": row, "backend": "torch"}}
    peer = {"prepare": prepare_ours, **itself[row]} if row in itself else {"prepare": prepare_theirs, "row": row}
    theirs = Ranks(ranks=RANKS, steps=steps, **peer)
    found = compare(ours, theirs, pairs, WARMUP)
    here, there = ({name: tensor for rank in each.asked("weights") for name, tensor in rank.items()} for each in (ours, theirs))
    ours.close(), theirs.close()
    worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(found.ours, found.theirs, strict=True))
    first = {name: parameter.detach() for name, parameter in TransformerModel(PEERS["llama"]).named_parameters()}
    here, there = ({name: torch.from_numpy(each[name]) - first[name] for name in first} for each in (here, there))
    apart, moved = (sum(t.double().square().sum() for t in ts).sqrt() for ts in ([here[n] - there[n] for n in first], there.values()))
    print(f"{row}: losses differ by {worst:.1e}, weights by {apart / moved:.1e} of the way that they have come", flush=True)
    if worst > 2e-5 or apart > 1e-2 * moved:  # AdamW amplifies rounding where a gradient is nearly 0
        raise RuntimeError("The two do not compute the same thing.")
    return found


def of_figure(found: Comparison, figure: str) -> Comparison:
    """The same rounds, compared by another figure."""
    return Comparison(*([{"seconds": entry[figure]} for entry in entries] for entries in (found.ours, found.theirs)))


def cells_of(found: Comparison) -> list[str]:
    low, high = found.interval
    return [*(f"{1000 * found.median(who):,.0f}" for who in ("ours", "theirs")), f"{found.ratio:.2f} ({low:.2f} to {high:.2f})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="in a round")
    parser.add_argument("--quick", action="store_true", help="6 pairs of 1 step")
    options = parser.parse_args()
    pairs, steps = (6, 1) if options.quick else (options.pairs, options.steps)
    title = f"A step on {RANKS} ranks, {pairs} pairs of {steps} steps, 1 thread each, gloo, torch {torch.__version__}"
    columns = "ours", "theirs", "ours, ms", "theirs, ms", "ratio (95 %)", "ours, CPU ms a rank", "theirs, CPU ms a rank", "ratio (95 %)"
    table = Table(*columns, title=title)
    for row in options.rows:
        found = run(row, pairs, steps)
        cells = [*cells_of(found), *cells_of(of_figure(found, "cpu"))]
        table.add_row(row, ROWS[row], *cells)
        print(row, *cells, flush=True)  # long before the table is whole
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
