"""The sandbox against hostile programs: each has its verdict, costs its own reward only, and harms nothing, on both levels of isolation."""

import pytest
from hostile_runs import hostile_programs, outside, try_all
from hostile_table import PAGE, verdict_rows

PROGRAMS = hostile_programs()
CONTROLS = [hostile for hostile in PROGRAMS if hostile.control]


@pytest.fixture(scope="module", params=[True, False], ids=["namespaces", "filter"])
def tried(request):
    return try_all(PROGRAMS, request.param)


def test_each_program_has_its_verdict(tried):
    """Any verdict will do where a program breaks its own interpreter: its reward and its harm are judged below all the same."""
    pairs = [(hostile, result) for hostile, result in zip(PROGRAMS, tried, strict=True) if "any" not in hostile.verdicts]
    assert not {hostile.name: result for hostile, result in pairs if result.verdict not in hostile.verdicts}


def test_a_program_costs_its_own_reward_only(tried):
    """The reward is 1 where an attempt was refused and the program then answered, else 0; the honest program after it has 1 each time."""
    for hostile, result in zip(PROGRAMS, tried, strict=True):
        assert (result.reward, result.honest) == (float(result.verdict in ("refused", "right")), 1.0), hostile.name


def test_nothing_is_harmed(tried):
    assert not {hostile.name: result.harm for hostile, result in zip(PROGRAMS, tried, strict=True) if result.harm}


@pytest.mark.parametrize("hostile", CONTROLS, ids=lambda hostile: hostile.name)
def test_without_a_sandbox_the_attempt_succeeds(hostile):
    """The negative control: what is refused above is refused by the sandbox, and not by a mistake in the attempt."""
    assert outside(hostile) == "done"


def test_the_table_is_large_and_without_twins():
    assert len(PROGRAMS) >= 200 and len(CONTROLS) >= 25
    assert len({hostile.name for hostile in PROGRAMS}) == len({hostile.text for hostile in PROGRAMS}) == len(PROGRAMS)


def test_the_page_lists_every_program():
    """`python tests/rl/hostile_table.py --write` makes the page from a run."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and line.count("|") == 5]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [row.split(" | ")[:2] for row in verdict_rows(PROGRAMS, None, None)]
