"""Rollouts with weights gathered once or block by block: the same answers and steps, what each holds, and who chooses."""

import threading
from dataclasses import replace

import pytest
import torch
from grpo_runs import GRPO, GRPORun
from lora_runs import layout_of
from mixture_runs import require_same
from ppo_runs import watched
from torch.distributed.tensor import DTensor

from shared.parallel.comm.threads import run_threads
from shared.parallel.processes.launch import run_processes
from shared.preference import gathering

SLOW = pytest.mark.slow
WORDS = ["fsdp2", pytest.param("fsdp2_tp2", marks=SLOW), pytest.param("pp2_fsdp2", marks=SLOW)]


def runs(word: str, gather: str, work) -> list:
    layout = layout_of(word)
    return run_threads(lambda world: work(GRPORun(world, layout, grpo=replace(GRPO, gather=gather))), layout.ranks)


@pytest.mark.parametrize("word", WORDS)
def test_both_ways_give_the_same_answers_and_steps(word):
    once, block = runs(word, "once", watched), runs(word, "block", watched)
    for here, there in zip(once, block, strict=True):
        assert here["answers"] == there["answers"] and here["metrics"] == there["metrics"]
        require_same([there], here)
        for step, gradients in enumerate(here["gradients"]):
            assert all(torch.equal(gradient, there["gradients"][step][name]) for name, gradient in gradients.items())


def rolled_out(run) -> tuple[int, int, int, int, list]:
    """Bytes of gathered weights: the peak while a block computes; the limit, which is the ends, a block and a prefetched one; all weights;
    what is left after the rollout. Then the rollout's log-probabilities."""
    most, stack = [0], run.parallel.module.stack
    inner = stack.run_block

    def watching(block, x, context):
        found = inner(block, x, context)
        most[0] = max(most[0], run.parallel.gathered_bytes)
        return found

    stack.run_block = watching
    opened = run.loader.roll_out()
    drawn = [sample.completion.log_probs for sample in opened.samples]
    ends, *blocks = (sum(flat.whole.nbytes for flat in unit.flats) for engine in run.parallel.engines for unit in engine.units)
    numbers = [drawn, opened.columns["old_log_probs"].tolist()]
    return most[0], ends + 2 * max(blocks), run.parallel.whole_bytes, run.parallel.gathered_bytes, numbers


def test_once_holds_all_and_block_by_block_a_few_units():
    both = zip(*(runs("fsdp2", each, rolled_out) for each in ("once", "block")), strict=True)
    for (most, _, whole, left, numbers), (fewest, few, _, freed, same) in both:
        assert most == whole and 0 < fewest <= few < whole and left == freed == 0
        assert numbers == same, "log-probabilities differ"


@pytest.mark.parametrize(("least", "once"), [(1e12, True), (1e3, False)])
def test_ranks_choose_alike_by_the_rank_with_least_memory(monkeypatch, least, once):
    mine = threading.local()
    monkeypatch.setattr(gathering, "free_memory", lambda device: mine.free)

    def chosen(run):
        mine.free, said = (1e12, least)[run.parallel.mesh.world.rank], []
        run.loader.say = said.append
        for _ in range(2):
            run.loader.roll_out()
        return run.loader.once, said

    found = runs("fsdp2", "auto", chosen)
    assert [each for each, _ in found] == [once] * 2 and found[0][1] == found[1][1]
    (sentence,) = found[0][1]
    assert ("once" if once else "block by block") in sentence and (once or "rank 1 has" in sentence)


@pytest.mark.parametrize(("share", "once"), [(1.001, True), (0.999, False)])
def test_whole_weights_and_the_cache_may_take_nine_tenths_of_a_ranks_share_of_the_host(monkeypatch, share, once):
    """Both ranks are threads of one host, and see the same free memory: half of it is each one's."""

    def chosen(run):
        needed = run.parallel.whole_bytes + 5000
        monkeypatch.setattr(gathering, "free_memory", lambda device: 2 * share * needed / 0.9)
        return gathering.gathers_once(run.parallel, "auto", 5000)[0]

    assert runs("fsdp2", "auto", chosen) == [once] * 2


def test_asked_or_without_shards_memory_is_not_looked_at(monkeypatch):
    monkeypatch.delattr(gathering, "free_memory")
    assert all(runs("fsdp2", "block", lambda run: gathering.gathers_once(run.parallel, "block") == (False, "")))
    assert all(runs("dp2", "auto", lambda run: gathering.gathers_once(run.parallel, "auto") == (True, "")))


def test_free_memory_of_a_cpu_is_less_than_the_machines():
    assert 0 < gathering.free_memory(torch.device("cpu")) < gathering.psutil.virtual_memory().total


def by_torch(world, reshards: bool) -> list:
    """Whole numbers that blocks hold after a forward pass, all numbers of blocks, and logits, in each of the two ways."""
    config = layout_of("fsdp2", backend="torch", reshard_after_forward=reshards)
    run, found = GRPORun(world, config), []
    blocks = list(run.parallel.module.stack.blocks.values())
    ids = torch.arange(12).view(2, 6)
    for once in (True, False):
        with torch.no_grad(), run.parallel.gathering(once):
            logits = run.parallel.model(ids)
            held = sum(each.numel() for block in blocks for each in block.parameters() if not isinstance(each, DTensor))
        found.append([held, logits.tolist()])
    left = any(not isinstance(each, DTensor) for each in run.parallel.module.parameters())
    return [*found, sum(each.numel() for block in blocks for each in block.parameters()), run.parallel.whole_bytes, left]


def by_torch_both(world) -> dict[bool, list]:
    return {reshards: by_torch(world, reshards) for reshards in (True, False)}


@pytest.fixture(scope="module")
def on_two():
    return run_processes(by_torch_both, 2, timeout=300)


@pytest.mark.parametrize("reshards", [True, False])
def test_pytorchs_engine_does_both(on_two, reshards):
    for (kept, logits), (freed, same), numbers, whole, left in (found[reshards] for found in on_two):
        assert kept == numbers and freed == 0 and logits == same and not left and whole > 8 * numbers
