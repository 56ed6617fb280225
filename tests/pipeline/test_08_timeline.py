"""Chapter 08's comparison of two cards, `timeline.py`: steps worked out by hand, and rows of the tables on the chapter's page."""

from importlib import import_module

import pytest

from shared.course.paths import CHECKOUT
from shared.engine.metrics.flops import flops_per_token
from shared.parallel.planning.costs import Link

timeline = import_module("chapters.08_pipeline_parallel.timeline")
two_cards, FAST, WIDTH, ROWS = timeline.two_cards, Link(0.0, 1e30), 768, 4
TOKENS = ROWS * two_cards.SEQ


def test_blocks_and_head_compute_what_the_model_does():
    config = two_cards.config_of(WIDTH)
    block, head = timeline.stage_seconds(WIDTH, ROWS)
    whole = flops_per_token(config, two_cards.SEQ) * TOKENS / two_cards.SPEED
    assert two_cards.LAYERS * block + head == pytest.approx(whole)
    assert head == pytest.approx(6 * config.vocab_size * WIDTH * TOKENS / two_cards.SPEED)


@pytest.mark.parametrize("microbatches", [1, 5])
def test_a_step_waits_for_the_dear_stage_and_its_messages(microbatches):
    """6 blocks before 6 with the head: rank 0's first and last passes, all micro-batches through rank 1, and a message there and back."""
    block, head = timeline.stage_seconds(WIDTH, ROWS)
    ends = 6 * block + microbatches * (6 * block + head)
    seconds = lambda link, schedule="1f1b": timeline.pipeline_seconds(WIDTH, ROWS, microbatches, schedule, (6, 6), link)  # noqa: E731
    assert seconds(FAST) == pytest.approx(ends)
    saved = min(4 * block, min(microbatches, 2) * (6 * block + head) / 3)  # rank 0 need not wait for the last parts W of rank 1
    assert seconds(FAST, "zero_bubble") == pytest.approx(ends - saved)
    tied = 4 * two_cards.VOCABULARY * WIDTH  # which two ranks all-reduce: each sends as many bytes as it has
    link = Link(0.0, 20e9)
    assert seconds(link) - seconds(FAST) == pytest.approx((2 * 4 * TOKENS * WIDTH + tied) / link.bandwidth, rel=1e-5)
    assert seconds(Link(1e-3, 1e30)) - seconds(FAST) == pytest.approx(5e-3, rel=0.3)  # two messages, the all-reduce's two, the totals


def test_replicas_and_tensor_parallel_cards_share_the_work_where_nothing_is_slow():
    block, head = timeline.stage_seconds(WIDTH, ROWS)
    computing = 6 * (two_cards.LAYERS * block + head) / 2
    assert timeline.others(WIDTH, ROWS, 6, FAST) == {"dp2": pytest.approx(computing, rel=0.02), "tp2": pytest.approx(computing, rel=0.02)}


def test_rows_of_the_page_are_what_the_command_prints():
    page = (CHECKOUT / "chapters" / "08_pipeline_parallel" / "MEMORY.md").read_text(encoding="utf-8")
    for gigabytes in (two_cards.NVLINK, two_cards.PCIE):
        link = Link(two_cards.LATENCY, gigabytes * 1e9)
        for line in timeline.table(link, (WIDTH,)):
            assert line in page
    assert timeline.splits(768) == {"even": (6, 6), "balanced": (8, 4)} and timeline.splits(2048)["balanced"] == (7, 5)
