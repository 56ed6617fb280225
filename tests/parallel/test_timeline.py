"""Simulated timelines: the replay over a link against cases done by hand, and dry runs against what real ranks communicate."""

import random
from importlib import import_module

import pytest
import torch
from step_exchanges import step_cost, step_exchanges
from torch.utils.flop_counter import FlopCounterMode

from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.parallel.config import ParallelConfig
from shared.parallel.planning.costs import Link
from shared.parallel.data.ddp import DataParallel, NaiveDataParallel
from shared.parallel.data.fsdp import FullySharded
from shared.parallel.mesh import Mesh
from shared.parallel.comm.threads import run_threads
from shared.parallel.data.zero import Zero

simulation = import_module("chapters.06_data_parallel.simulation")
Begin, Compute, Wait, replay = simulation.Begin, simulation.Compute, simulation.Wait, simulation.replay

SECOND = Link(latency=0.5, bandwidth=1.0)  # two ranks: an all-reduce of B bytes is 2 messages and B bytes, so it takes 1 + B seconds
PAIR = 2


def all_reduce(seconds: float):
    return Begin("all_reduce", int(seconds - 1), PAIR)


def bars_of(timeline, rank: int) -> list[tuple[str, float, float]]:
    return sorted((bar.kind, bar.begin, bar.end) for bar in timeline.bars if bar.rank == rank)


# The replay, by hand.


def test_what_is_waited_for_at_once_is_exposed():
    timeline = replay([[Compute(3), all_reduce(2), Wait(0), Compute(1)]] * PAIR, SECOND)
    assert bars_of(timeline, 0) == bars_of(timeline, 1)
    assert bars_of(timeline, 0) == [("communication", 3, 5), ("compute", 0, 3), ("compute", 5, 6), ("idle", 3, 5)]
    assert (timeline.seconds, timeline.total("compute"), timeline.total("communication"), timeline.total("idle")) == (6, 4, 2, 2)


def test_what_runs_beside_compute_is_hidden_and_the_rest_exposed():
    """B must wait for the link until A is over."""
    program = [Compute(1), all_reduce(3), Compute(1), all_reduce(4), Compute(4), Wait(0), Wait(1)]
    timeline = replay([program] * PAIR, SECOND)
    assert bars_of(timeline, 1) == [
        ("communication", 1, 4), ("communication", 4, 8), ("compute", 0, 1), ("compute", 1, 2), ("compute", 2, 6), ("idle", 6, 8),
    ]  # fmt: skip


def test_the_slowest_rank_is_waited_for():
    timeline = replay([[Compute(1), all_reduce(2), Wait(0)], [Compute(4), all_reduce(2), Wait(0)]], SECOND)
    assert bars_of(timeline, 0) == [("communication", 4, 6), ("compute", 0, 1), ("idle", 1, 6)]
    assert bars_of(timeline, 1) == [("communication", 4, 6), ("compute", 0, 4), ("idle", 4, 6)]


def test_an_operation_that_is_over_is_not_waited_for():
    timeline = replay([[all_reduce(2), Compute(5), Wait(0), Compute(1)]] * PAIR, SECOND)
    assert timeline.total("idle") == 0 and timeline.seconds == 6


def test_latency_counts_messages_and_bandwidth_bytes():
    """Four ranks, 8 MB around a ring: 6 messages and 12 MB; gathered: 3 and 6 MB."""
    link = Link(latency=1e-3, bandwidth=1e9)
    program = [Begin("all_reduce", 8_000_000, 4), Wait(0), Begin("all_gather", 8_000_000, 4), Wait(1)]
    timeline = replay([program] * 4, link)
    assert timeline.seconds == pytest.approx(0.006 + 0.012 + 0.003 + 0.006)


def test_what_does_not_match_is_refused():
    with pytest.raises(ValueError, match=r"different operations as their number 1: \['all_gather', 'all_reduce'\]"):
        replay([[all_reduce(2), all_reduce(2)], [all_reduce(2), Begin("all_gather", 1, PAIR)]], SECOND)
    with pytest.raises(ValueError, match="Rank 0 waits for an operation that not every rank begins"):
        replay([[Compute(1), all_reduce(2), Wait(0)], [Compute(1)]], SECOND)


@pytest.mark.parametrize("seed", range(40))
def test_a_replay_keeps_its_sums(seed):
    """Each rank computes what it should, waits in between and nothing else, and the link never carries two operations at once."""
    dice = random.Random(seed)
    steps = [(dice.randint(0, 5), dice.randint(0, 5), dice.randint(0, 5), dice.random() < 0.5) for _ in range(dice.randint(1, 6))]
    programs: list[list] = [[], []]
    for number, (mine, theirs, bytes, at_once) in enumerate(steps):
        for program, seconds in zip(programs, (mine, theirs), strict=True):
            program += [Compute(seconds), Begin("all_reduce", bytes, PAIR), *([Wait(number)] if at_once else [])]
    for program in programs:
        program += [Wait(number) for number, step in enumerate(steps) if not step[3]]
    timeline = replay(programs, SECOND)
    for rank in (0, 1):
        assert timeline.total("compute", rank) == sum(step[rank] for step in steps)
        assert timeline.total("communication", rank) == sum(1 + step[2] for step in steps)
        own = sorted((bar.begin, bar.end) for bar in timeline.bars if bar.rank == rank and bar.kind != "communication")
        assert all(end == begin for (_, end), (begin, _) in zip(own, own[1:], strict=False))
        link = sorted((bar.begin, bar.end) for bar in timeline.bars if bar.rank == rank and bar.kind == "communication")
        assert all(end <= begin for (_, end), (begin, _) in zip(link, link[1:], strict=False))
        assert own[-1][1] == timeline.seconds >= max(timeline.total("compute", rank), timeline.total("communication", rank))


# Dry runs of the real strategies.

MODEL = ModelConfig(vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=80)
RANKS = 4


def sharded(world, **changes) -> FullySharded:
    return FullySharded(TransformerModel(MODEL), Mesh(ParallelConfig(fully_sharded=RANKS, **changes), world))


STRATEGIES = {
    "naive": lambda world: NaiveDataParallel(TransformerModel(MODEL), world),
    "one bucket": lambda world: DataParallel(TransformerModel(MODEL), world),
    "small buckets": lambda world: DataParallel(TransformerModel(MODEL), world, 0.04),
    "zero1": lambda world: Zero(TransformerModel(MODEL), world, 1, bucket_megabytes=0.04),
    "fsdp": lambda world: sharded(world, prefetch=0),
    "fsdp, prefetch": lambda world: sharded(world, prefetch=1),
}


def one_step(parallel, rank: int) -> None:
    ids = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    totals = parallel.runner(accumulate_gradients)(parallel.model, [batch], next_token_objective)
    parallel.reducer(parallel.model, totals)
    parallel.updater(lambda model, optimizer, count: None)(parallel.model, None, totals.token_count)


def recorded_step(name: str):
    """The script of a step, computing at 1 GFLOP/s, and the trace."""
    with FlopCounterMode(display=False) as counter:
        world = simulation.dry_run(RANKS, clock=lambda: counter.get_total_flops() / 1e9)
        parallel = STRATEGIES[name](world)
        world.take_actions()
        world.trace.clear()
        one_step(parallel, 0)
        return world.take_actions(), world.trace, counter.get_total_flops() / 1e9


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_dry_run_communicates_what_real_ranks_do(name):
    def work(world):
        parallel = STRATEGIES[name](world)
        world.trace.clear()
        one_step(parallel, world.rank)
        return world.trace

    script, trace, seconds = recorded_step(name)
    for real in run_threads(work, RANKS):
        said = [[(entry.operation, entry.axis, entry.bytes, entry.size) for entry in each.entries] for each in (trace, real)]
        assert said[0] == said[1] and len(said[0]) > 1
    assert sum(action.seconds for action in script if isinstance(action, Compute)) == pytest.approx(seconds)
    begun = sum(isinstance(action, Begin) for action in script)
    assert sorted(action.number for action in script if isinstance(action, Wait)) == list(range(begun))


def test_overlap_hides_communication_and_prefetch_too():
    """A link on which communication takes about as long as computing; what each strategy leaves exposed of it."""
    scripts = {name: recorded_step(name)[0] for name in STRATEGIES}
    link = Link(latency=1e-5, bandwidth=5e7)
    timelines = {name: replay([script] * RANKS, link) for name, script in scripts.items()}
    exposed = {name: timeline.total("idle") for name, timeline in timelines.items()}
    assert len({timeline.total("compute") for timeline in timelines.values()}) == 1
    assert exposed["naive"] == pytest.approx(timelines["naive"].total("communication"))  # nothing is hidden
    assert exposed["small buckets"] < 0.7 * exposed["one bucket"] < 0.7 * exposed["naive"]
    assert exposed["fsdp, prefetch"] < 0.8 * exposed["fsdp"]
    slow_start = Link(latency=1e-3, bandwidth=5e7)  # every message is dear: many small buckets are worse than one
    assert replay([scripts["small buckets"]] * RANKS, slow_start).seconds > replay([scripts["one bucket"]] * RANKS, slow_start).seconds


def test_the_link_of_a_naive_step_is_busy_for_as_long_as_the_formulas_say():
    script, trace, _ = recorded_step("naive")
    link = Link(latency=1e-5, bandwidth=5e7)
    expected = step_cost(step_exchanges("ddp", [entry.bytes for entry in trace.entries]), RANKS).seconds(link)
    assert replay([script] * RANKS, link).total("communication") == pytest.approx(expected)


def test_a_dry_run_refuses_to_send():
    with pytest.raises(ValueError, match="a dry run has no other rank to send to"):
        simulation.dry_run(2).send(torch.zeros(1), to=1)


# Drawing.


def test_a_drawing_has_a_row_for_each_stream_and_says_that_it_is_simulated():
    import matplotlib

    matplotlib.use("Agg")
    timeline = replay([[Compute(3), all_reduce(2), Wait(0)]] * PAIR, SECOND)
    short = replay([[all_reduce(2)]] * PAIR, SECOND)
    figure = simulation.draw({"naive": timeline, "short": short}, ranks=(0, 1))
    above, below = figure.axes
    assert [label.get_text() for label in above.get_yticklabels()] == [f"rank {r}: {s}" for r in (0, 1) for s in ("compute", "link")]
    assert [label.get_text() for label in below.get_yticklabels()] == ["rank 0: link", "rank 1: link"]
    assert above.get_title(loc="left") == "naive (simulated)" and below.get_title(loc="left") == "short (simulated)"
    widths = sorted(patch.get_width() for patch in above.patches)
    assert widths == [2, 2, 2, 2, 3, 3] and below.get_xlabel() == "time, s"
