"""Chapter 12. Layout search: the fastest of all products pp x dp x fsdp x cp x tp x ep that fits into the memory, and why others do not.

Every layout of the given ranks is a configuration, which the trainer takes or refuses with a sentence. Of each the search tries schedules,
micro-batches (powers of two) and recomputation, and keeps the fastest that fits. Without a pipeline a larger micro-batch is never slower,
so the largest that fits is tried; in a pipeline it lengthens the bubble, so all are. With more than eight ranks two choices are not tried
that have the same traffic and need more memory: tensor without sequence parallelism, and replicas without ZeRO-1.

Left out on purpose: layouts whose stages differ, what makes small micro-batches slow (the time to start kernels), and the few per cent
that selective recomputation costs.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from shared.model.config import ModelConfig
from shared.parallel.config import AXES, ParallelConfig
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.hardware import Hardware
from shared.trainer.planner.memory import run_memory, with_gathering
from shared.trainer.planner.plan import Plan, plan_run, precision_on

RECOMPUTED = ("none", "selective", "full")  # from the fastest to the smallest
SCHEDULES = (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2))
ALL_RANKS = 8  # up to which nothing is pruned
WORTH = 0.99  # of a step's time: what gains less leaves the configuration's own settings as they are


@dataclass(frozen=True)
class Candidate:
    """A configuration in another layout, and its plan."""

    config: TrainerConfig
    plan: Plan

    @property
    def seconds(self) -> float:
        return self.plan.seconds.total

    def words(self, asked: TrainerConfig) -> list[str]:
        """Settings beside the layout that differ from those of a configuration, as `make run ARGS=...` takes them."""
        ours, theirs, words = self.config.parallel, asked.parallel, []
        if self.config.data.micro_batch_size != asked.data.micro_batch_size:
            words.append(f"data.micro_batch_size={self.config.data.micro_batch_size}")
        names = ("activation_checkpointing", *(("pipeline_schedule", "pipeline_chunks") if ours.pipeline_parallel > 1 else ()))
        return words + [f"parallel.{name}={getattr(ours, name)}" for name in names if getattr(ours, name) != getattr(theirs, name)]


@dataclass
class Search:
    """best: of each layout that fits its fastest candidate, the fastest layout first. too_large: of each that does not, the bytes that are
    missing. unknown: how many have no formula for all of their memory. refused: the trainer's sentences by their kind (without numbers),
    one for each layout. usable: bytes of a rank."""

    usable: float
    best: list[Candidate] = field(default_factory=list)
    too_large: list[float] = field(default_factory=list)
    unknown: int = 0
    refused: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def layouts(self) -> int:
        return len(self.best) + len(self.too_large) + self.unknown + sum(map(len, self.refused.values()))


def search_layouts(config: TrainerConfig, hardware: Hardware, ranks: int, rewards: ModelConfig | None = None) -> Search:
    """Plan the run in every layout of so many ranks.

    Args:
        config: its layout, schedule, micro-batch and recomputation are replaced; everything else stays.
        rewards: as for `plan_run`.

    Raises:
        SettingError: more ranks than cards.
        ValueError: a model for which there are no formulas.
    """
    own = hardware.shared_by(ranks)
    config, found, rows = replace(config, precision=precision_on(config, own)), Search(own.usable), config.data.micro_batch_size
    for layout in layouts(config.parallel, ranks, config.model.experts is not None):
        made, refusal = configurations(config, layout)
        if not made:
            found.refused[re.sub(r"\d[\d,.]*\d|\d", "N", refusal)].append(refusal)
            continue
        needed: dict[tuple, float] = {}
        chosen = [each for group in made for each in fitting(group, rows, own.usable, needed, rewards)]
        if chosen:
            candidates = [Candidate(each, plan_run(each, hardware, rewards)) for each in chosen]
            fastest = min(candidates, key=lambda each: (each.seconds, each.plan.held.peak))
            unchanged = [each for each in candidates if not each.words(config) and fastest.seconds >= WORTH * each.seconds]
            found.best.append((unchanged or [fastest])[0])
        elif needed:
            found.too_large.append(min(needed.values()) - own.usable)
        else:
            found.unknown += 1
    found.best.sort(key=lambda each: (each.seconds, each.plan.held.peak))
    return found


def configurations(config: TrainerConfig, layout: ParallelConfig) -> tuple[list[list[TrainerConfig]], str]:
    """By schedule, the configurations of a layout with each micro-batch, the largest first; and the trainer's first refusal."""
    made, refusal = [], ""
    for schedule, chunks in SCHEDULES if layout.pipeline_parallel > 1 else SCHEDULES[:1]:
        found = []
        for rows in micro_batches(config, layout):
            try:
                parallel = replace(layout, pipeline_schedule=schedule, pipeline_chunks=chunks)
                found.append(replace(config, parallel=parallel, data=replace(config.data, micro_batch_size=rows)))
            except ValueError as error:
                refusal = refusal or str(error)
        made += [found] * bool(found)
    return made, refusal


def fitting(
    group: list[TrainerConfig], rows: int, usable: float, needed: dict[tuple, float], rewards: ModelConfig | None
) -> Iterator[TrainerConfig]:
    """Of configurations with falling micro-batches those worth a plan: with each recomputation the largest that fits, in a pipeline every
    one with the first recomputation that fits. Those without a formula for their memory are left out.

    Args:
        rows: a micro-batch that is tried in any case. needed: is given the bytes of all that were tried.
    """
    pipeline = group[0].parallel.pipeline_parallel > 1
    pairs = [(how, each) for how in RECOMPUTED for each in group]
    if pipeline:
        pairs = [(how, each) for each in group for how in RECOMPUTED]
    done, best = set(), False  # best: the largest micro-batch fits without recomputation, and nothing is faster
    for how, each in pairs:
        key = each.data.micro_batch_size if pipeline else how
        own = each.data.micro_batch_size == rows and how == RECOMPUTED[0]
        if (key in done or best) and not own:
            continue
        tried = replace(each, parallel=replace(each.parallel, activation_checkpointing=how))
        memory = run_memory(with_gathering(tried, usable, rewards), rewards, usable)
        if not all(rank.counted for rank in memory):
            continue
        bytes = max(rank.peak for rank in memory)
        needed[tried.parallel.pipeline_schedule, each.data.micro_batch_size, how] = bytes
        if bytes <= usable:
            done.add(key)
            best |= not pipeline and each is group[0] and how == RECOMPUTED[0]
            yield tried


def micro_batches(config: TrainerConfig, layout: ParallelConfig) -> list[int]:
    """Powers of two that divide a rank's share of the batch and the configuration's own size, the largest first; the latter alone where
    the batch cannot be shared out."""
    share, left = divmod(config.data.batch_size, layout.data_ranks)
    if left or not share:
        return [config.data.micro_batch_size]
    sizes = {2**power for power in range(share.bit_length())} | {config.data.micro_batch_size}
    return sorted((each for each in sizes if share % each == 0), reverse=True)


def layouts(base: ParallelConfig, ranks: int, experts: bool) -> Iterator[ParallelConfig]:
    """Degrees that multiply to `ranks`; sequence parallelism where tp, ZeRO where dp and no fsdp, ep where it divides dp x fsdp. ZeRO-2 in
    a pipeline contradicts itself. `base` says the rest."""
    everything = ranks <= ALL_RANKS
    for degrees in products(ranks, len(AXES)):
        named = dict(zip(AXES.values(), degrees, strict=True))
        pipeline, replicas, sharded = (named[name] for name in ("pipeline_parallel", "data_parallel", "fully_sharded"))
        stages = [0] if replicas == 1 or sharded > 1 else [0, 1, 2][not everything : 3 - (pipeline > 1)]
        slices = [False] if named["tensor_parallel"] == 1 else [False, True][not everything :]
        spread = [each for each in divisors(replicas * sharded) if experts or each == 1]
        for ep, zero, sp in product(spread, stages, slices):
            settings = {"expert_parallel": ep, "zero": zero, "sequence_parallel": sp, "activation_checkpointing": "none"}
            yield replace(base, **named, **settings, pipeline_schedule="1f1b", pipeline_chunks=1, pipeline_layers="flops")


def products(number: int, factors: int) -> Iterable[tuple[int, ...]]:
    """Every way to write a number as an ordered product.

    >>> list(products(2, 2))
    [(1, 2), (2, 1)]
    """
    if factors == 1:
        return [(number,)]
    return [(first, *rest) for first in divisors(number) for rest in products(number // first, factors - 1)]


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


WORTH_SAYING = 0.98  # of the time; a smaller gain is within what the plan misses by


def advise(config: TrainerConfig, hardware: Hardware, plan: Plan, rewards: ModelConfig | None = None) -> list[str]:
    """Up to three changes that would make the run fit or faster, the best first."""
    found: list[tuple[float, str]] = []
    for word, change in changes(config):
        try:
            other = plan_run(change, hardware, rewards)
        except ValueError:  # the trainer refuses it
            continue
        if all(each.counted for each in plan.memory) and not all(each.counted for each in other.memory):
            continue  # whether it fits is not known
        faster, held = other.seconds.total / plan.seconds.total, other.held.peak / 1e9
        if not plan.fits and other.held.peak < plan.held.peak:
            verdict, order = ("fits", faster) if other.fits else ("still does not fit", other.held.peak)
            found.append((order, f"{word}: {held:.1f} GB, {verdict}, {faster:.2f} times as long."))
        elif plan.fits and other.fits and faster < WORTH_SAYING:
            found.append((faster, f"{word}: {held:.1f} GB, {faster:.2f} times as long."))
    return [line for _, line in sorted(found)[:3]]


def changes(config: TrainerConfig) -> Iterator[tuple[str, TrainerConfig]]:
    """Overrides to try, each with the configuration under them; without those that the trainer refuses."""
    parallel, data = config.parallel, config.data
    sections = [
        (f"parallel.activation_checkpointing={how}", {"parallel": (parallel, {"activation_checkpointing": how})})
        for how in ("none", "selective", "full")
        if how != parallel.activation_checkpointing
    ]
    for rows in (data.micro_batch_size // 2, 2 * data.micro_batch_size):
        sections.append((f"data.micro_batch_size={rows}", {"data": (data, {"micro_batch_size": rows})}))
    if not parallel.zero and not parallel.fully_sharded > 1 and parallel.data_parallel > 1:
        sections.append(("parallel.zero=1", {"parallel": (parallel, {"zero": 1})}))
    if parallel.data_parallel > 1:
        cut = {"data_parallel": 1, "fully_sharded": parallel.data_ranks, "zero": 0}
        words = f"parallel.data_parallel=1 parallel.fully_sharded={parallel.data_ranks}" + " parallel.zero=0" * (parallel.zero > 0)
        sections.append((words, {"parallel": (parallel, cut)}))
    if config.adapter and config.adapter.base == "float" and config.adapter.kind == "lora":
        sections.append(("adapter.base=nf4", {"adapter": (config.adapter, {"base": "nf4"})}))
    for words, of in sections:
        try:
            yield words, replace(config, **{name: replace(section, **values) for name, (section, values) in of.items()})
        except ValueError:
            continue
