"""Floor 12: what each rank holds and sends in a training step is what the planner's formulas say, on the layouts of the covering set."""

import pytest
from memory_products import COVERING, PAGE, WITHIN, compared, exchanged, on_ranks
from products import case_of

QUICK = COVERING[:16]  # up to four ranks: every axis, every recomputation, both optimizers


@pytest.mark.parametrize("line", [*QUICK, *(pytest.param(line, marks=pytest.mark.slow) for line in COVERING[len(QUICK) :])])
def test_each_rank_holds_what_is_predicted(line):
    case = case_of(line)
    found = on_ranks(case)
    kinds = compared(case, found)
    assert {kind: both for kind, both in kinds.items() if not abs(both[1] - both[0]) <= WITHIN * both[0]} == {}
    if line.endswith("adamw"):
        for predicted, traced in exchanged(case, found):
            assert predicted == pytest.approx(traced, rel=1e-9)
    assert f"| {' | '.join(line.split())} |" in PAGE.read_text(encoding="utf-8")


def test_formulas_without_a_ring_or_for_another_recomputation_would_be_noticed():
    """The control: the same measurement beside another layout's prediction."""
    found = on_ranks(case_of("dp2_zero2 dense selective muon"))
    for other in ("cp2 dense selective muon", "dp2_zero2 dense full muon", "dp2_zero2 dense none muon"):
        predicted, measured = compared(case_of(other), found)["activations"]
        assert abs(measured - predicted) > WITHIN * predicted
