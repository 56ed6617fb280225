"""Chapter 06. ZeRO-1 and ZeRO-2 (stages 1 and 2): data-parallel replicas shard optimizer state and gradients, and each updates its shard.

    DDP        all-reduce the gradients, update everything everywhere
    ZeRO-1     reduce-scatter the gradients, each rank updates its shards, all-gather the weights: the same bytes, 1/n of the state
    ZeRO-2     the same after every micro-batch, so that gradients are accumulated in shards too

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5.1 and 5.2. Parameters
of elementwise optimizers may be split anywhere; Muon orthogonalises whole matrices, so each of them stays on one rank.

Left out on purpose: sharded weights (stage 3, `shared.parallel.data.fsdp`).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.model.sharding import Range, Sharding, Span, make_shard, part_sizes, split_spans
from shared.optim.routing import Route
from shared.parallel.comm.collectives import all_gather_v, are_equal, reduce_scatter_v
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.trace import Work
from shared.parallel.data.ddp import Bucket, DataParallel, take_gradients
from shared.parallel.data.engine import Parameters
from shared.totals import Batch, Objective, Runner, Totals, Updater, add_totals

MAX_UNDER_WAY = 2  # buckets: one is exchanged while the next one fills


@exercise("06.partition")
def partition(sizes: Sequence[int], whole: Sequence[bool], held: Sequence[int]) -> list[list[Range]]:
    """Partition parameters over ranks for ZeRO, so that ranks hold as nearly equal numbers of elements as possible.

    First the parameters that must stay whole, the largest first: each goes to the rank that then holds the fewest numbers. The others may
    be cut anywhere, and each of their numbers goes to a rank that holds few: afterwards a rank that received any of them holds at most one
    number more than any other rank. So 6 numbers for ranks that hold 9, 2 and 1 make 9, 5 and 4, and a rank may receive nothing.
    A model has hundreds of millions of numbers: do not go through them one by one.

    Args:
        sizes: how many numbers each parameter has, at least 1.
        whole: whether a parameter must stay on one rank.
        held: how many numbers each rank holds already, one for each rank.

    Returns:
        ranges: ranges[p][r] = (start, stop) is what rank r gets of parameter p's flattened numbers; start == stop where it gets nothing.
        Over the ranks, each number of p once.

    >>> partition([10], whole=[False], held=[0, 0, 0])
    [[(0, 4), (4, 7), (7, 10)]]
    >>> partition([2, 6, 8], whole=[True, True, False], held=[0, 0])       # rank 0 holds 6, rank 1 holds 2, and 8 level them out
    [[(0, 0), (0, 2)], [(0, 6), (0, 0)], [(0, 2), (2, 8)]]
    """


class Zero(DataParallel):
    """ZeRO: replicas that shard the optimizer state (stage 1), and the gradients too (stage 2).

    A gradient is freed as soon as its bucket has started. In stage 1, gradients of several micro-batches add up first, whole on every
    rank; in stage 2 they are exchanged after each micro-batch and add up in the shards, for as many times the bytes.

    Args:
        model: the same weights on every rank, with untrained parameters frozen already.
        group: the ranks that share a batch, and the shards.
        stage: 1 or 2.
        whole: names of parameters that must not be cut (`muon_matrices`).
        bucket_megabytes: the size of a bucket of gradients. Each bucket is partitioned by itself, so all ranks are busy with each.
        alone: whether no other engine exchanges gradients. Beside one, nothing blocks within the backward pass, because ranks may
            come to the engines' buckets in different orders.

    Attributes:
        optim_params: this rank's shards of the trained parameters, under the model's names.
        held: how many elements each rank's shards have.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Communicator,
        stage: int,
        whole: Collection[str] = (),
        bucket_megabytes: float = 25.0,
        alone: bool = True,
    ):
        self.stage, self.whole, self.alone = stage, whole, alone
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.held, self.under_way_now = [0] * group.size, deque[Work]()
        super().__init__(model, group, bucket_megabytes)
        shards = {self.names[p]: shard for bucket in self.buckets for p, shard in zip(bucket.parameters, bucket.results, strict=True)}
        self.optim_params = Parameters({name: shards[name] for name in self.names.values()})

    def make_buckets(self, plan: Sequence[Sequence[nn.Parameter]]) -> list[Bucket]:
        buckets = []
        for parameters in plan:
            # Another pipeline stage may hold this parameter too, beside others: it is partitioned alone, so alike there.
            apart = {p for p in parameters if hasattr(p, "partial_over") and self.names[p] not in self.whole}
            planned: dict[nn.Parameter, list[Range]] = {}
            if together := [p for p in parameters if p not in apart]:
                planned |= self.planned(together, self.held)
            for parameter in apart:
                planned |= self.planned([parameter], [0] * self.group.size)
            ranges = [[(min(a, p.numel()), min(b, p.numel())) for a, b in planned[p]] for p in parameters]
            shardings = [split_spans(parameter, of_ranks, self.group) for parameter, of_ranks in zip(parameters, ranges, strict=True)]
            buckets.append(SharedBucket(parameters, shardings, self.group, self.under_way_now if self.alone else None))
        return buckets

    def planned(self, parameters: Sequence[nn.Parameter], held: Sequence[int]) -> dict[nn.Parameter, list[Range]]:
        """For each parameter the range of each rank, where ranks hold so many elements already; adds them to `self.held`."""
        planned = partition([max(part_sizes(p)) for p in parameters], [self.names[p] in self.whole for p in parameters], held)
        for row in planned:
            self.held = [held + stop - start for held, (start, stop) in zip(self.held, row, strict=True)]
        return dict(zip(parameters, planned, strict=True))

    def runner(self, runner: Runner) -> Runner:
        exchanging = super().runner(runner)

        def exchange_each(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
            return add_totals([exchanging(model, [microbatch], objective) for microbatch in microbatches])

        return exchanging if self.stage == 1 else exchange_each

    def updater(self, updater: Updater) -> Updater:
        """Each rank updates its shards, and all-gathers the new weights."""

        def update(model: nn.Module, optimizer: torch.optim.Optimizer, token_count: Tensor) -> None:
            updater(self.optim_params, optimizer, token_count)
            self.group.trace.phase = "update"
            for work in [bucket.gather_weights() for bucket in self.buckets]:
                work.wait()

        return update


class SharedBucket:
    """A bucket for reduce-scatter: each rank gets the part of which it holds shards.

    Args:
        parameters: whole on every rank, contiguous.
        shardings: how each is sharded over `group`, by spans.
        under_way: the pending operations of all buckets, at most `MAX_UNDER_WAY`, which bounds their memory; None for no bound.

    Attributes:
        results: this rank's shards, views of the parameters: an optimizer that steps them changes the parameters' memory.
        sizes: how many elements of the bucket each rank has.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shardings: Sequence[Sharding], group: Communicator, under_way: deque[Work] | None
    ):
        if any(not parameter.is_contiguous() for parameter in parameters):
            raise ValueError("ZeRO's shards are views of the parameters, and one is not contiguous: call .contiguous() on it before.")
        self.parameters, self.group, self.under_way = tuple(parameters), group, under_way
        self.spans: list[tuple[Span, ...]] = [sharding.parts for sharding in shardings]
        self.results = [make_shard(each.here.of(p.data), each, p) for p, each in zip(parameters, shardings, strict=True)]
        self.used = [False] * len(self.parameters)
        self.sizes = [sum(spans[rank].stop - spans[rank].start for spans in self.spans) for rank in range(group.size)]
        travelling = group.size * max(self.sizes) if are_equal(self.sizes) else sum(self.sizes)
        self.bytes = travelling * parameters[0].element_size()

    def parts_by_rank(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """One tensor of each parameter's shape -> for each rank its parts of them, [stop - start] each."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        return [[each[slice(*spans[rank])] for each, spans in zip(flat, self.spans, strict=True)] for rank in range(self.group.size)]

    def start(self) -> Work:
        return self.enqueue(lambda: reduce_scatter_v(self.parts_by_rank(take_gradients(self)), self.group, self.add_to_shards))

    def enqueue(self, start: Callable[[], Work]) -> Work:
        if self.under_way is None:
            return start()
        while len(self.under_way) >= MAX_UNDER_WAY:
            self.under_way.popleft().wait()
        self.under_way.append(start())
        return self.under_way[-1]

    def add_to_shards(self, total: Tensor) -> None:
        """Accumulate the reduced gradients. An empty shard gets none, so no optimizer keeps state for it or waits for other ranks."""
        for piece, part in zip(self.results, total.split([piece.numel() for piece in self.results]), strict=True):
            if piece.numel():
                part = part.view(piece.shape)
                piece.grad = part if piece.grad is None else piece.grad.add_(part)

    def gather_weights(self) -> Work:
        """Start to all-gather the updated weights of all ranks' shards into the parameters."""
        own = torch.cat([piece.detach().flatten() for piece in self.results])
        return self.enqueue(lambda: all_gather_v(own, self.sizes, self.group, self.copy_weights))

    def copy_weights(self, gathered: Sequence[Tensor]) -> None:
        places = self.parts_by_rank([parameter.data for parameter in self.parameters])
        for rank, (row, parts) in enumerate(zip(gathered, places, strict=True)):
            if rank != self.group.rank:  # its own are up to date, as views
                for place, part in zip(parts, row.split([place.numel() for place in parts]), strict=True):
                    place.copy_(part)


def muon_matrices(routes: Iterable[Route] | None) -> set[str]:
    """The names of the matrices that Muon orthogonalises, which ZeRO must not split; none with other optimizers."""
    return {name for part in routes or () if part.rule == "muon" for name in part.names}


def bytes_held(numbers: int, ranks: int, stage: int, weight: float = 4, gradient: float = 4, state: float = 8) -> dict[str, float]:
    """Memory of a rank under ZeRO after a step's backward passes, by kind, in bytes; without activations and buckets under way.

    With P parameters in half precision and Adam in mixed precision (weight 2, gradient 2, state 12 bytes for each), n ranks:
    (2 + 2 + 12) P at stage 0, (2 + 2) P + 12 P / n at 1, 2 P + (2 + 12) P / n at 2, (2 + 2 + 12) P / n at 3 (Rajbhandari et al. 2020,
    figure 1).

    Args:
        numbers: P, the trained parameters' numbers.
        stage: 0 for plain replicas; 1 and 2 for `Zero`, with several micro-batches: of a single one the gradients are cut already at
            stage 1; 3 for full sharding.
        weight, gradient, state: bytes for each number. AdamW in float32 has 8 of state, Lion, Muon and SGD 4.
    """
    cut_from = {"weights": (3, weight), "gradients": (2, gradient), "optimizer state": (1, state)}
    return {kind: numbers * each / (ranks if stage >= first else 1) for kind, (first, each) in cut_from.items()}
