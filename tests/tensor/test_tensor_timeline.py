"""Chapter 07's scripts: the simulated step of two cards sends what the formulas say, and both ways of bringing matrices to Muon agree."""

from importlib import import_module

import pytest

from shared.course.paths import CHECKOUT
from shared.parallel.config import parse_layout
from shared.parallel.planning.costs import Link, total_cost
from shared.parallel.planning.memory import StepSizes
from shared.parallel.planning.tensor_costs import tensor_exchanges

timeline = import_module("chapters.07_tensor_parallel.timeline")
muon_exchange = import_module("chapters.07_tensor_parallel.muon_exchange")
PAGE = (CHECKOUT / "chapters" / "07_tensor_parallel" / "MEMORY.md").read_text(encoding="utf-8")
SLOW = Link(timeline.LATENCY, timeline.PCIE * 1e9)
WIDTH = 256


@pytest.fixture(scope="module")
def steps():
    """Of one row and of two rows on each card, of a model of two layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "LAYERS", 2)
        step = StepSizes(2, timeline.SEQ, precision="bfloat16")
        exchanges = tensor_exchanges(timeline.config_of(WIDTH), parse_layout("tp2"), timeline.ADAMW, step)
        found = {(word, rows): timeline.simulated(word, WIDTH, rows, SLOW) for word in timeline.LAYOUTS for rows in (1, 2)}
    timeline.program.cache_clear()
    return found | {"expected": total_cost(exchanges).seconds(SLOW)}


def test_tensor_parallelism_sends_what_the_formulas_say_and_hides_none_of_it(steps):
    expected = steps["expected"]
    assert steps["tp2", 1].total("communication") == pytest.approx(expected)
    assert steps["tp2", 1].total("idle") == pytest.approx(expected)


def test_both_cards_compute_as_much_in_each_layout(steps):
    for rows in (1, 2):
        seconds = [steps[word, rows].total("compute") for word in timeline.LAYOUTS]
        assert seconds == pytest.approx([seconds[0]] * 3)
        assert seconds[0] == pytest.approx(rows * steps["dp2", 1].total("compute"))


def test_more_tokens_are_more_to_send_for_tensor_parallelism_alone(steps):
    sent = {key: steps[key].total("communication") for key in steps if key != "expected"}
    assert sent["dp2", 2] == pytest.approx(sent["dp2", 1]) and sent["tp2", 2] > 1.9 * sent["tp2", 1]
    exposed = [steps["dp2", rows].total("idle") / steps["dp2", rows].seconds for rows in (1, 2)]
    assert exposed[1] < 0.8 * exposed[0]


@pytest.mark.slow
def test_the_widths_at_which_it_turns_are_those_of_the_page():
    assert timeline.turning_width(SLOW, 1) == 128 and timeline.turning_width(SLOW, 2) == 896
    assert "| 2,048 | 3,200 | 128 |" in PAGE and "| 4,096 | above 8,192 | 896 |" in PAGE


def test_the_memory_of_a_card_is_that_of_the_page():
    assert "\n".join(timeline.memory_table()) in PAGE


def test_both_ways_to_muon_agree_and_send_what_the_page_says():
    assert "\n".join(muon_exchange.table()) in PAGE
