"""pass@k against the enumeration of every choice of k answers."""

from itertools import combinations

import pytest

from shared.rl.examination import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("answers", range(1, 9))
def test_it_is_the_share_of_choices_that_hold_a_right_answer(answers):
    for right in range(answers + 1):
        marks = [place < right for place in range(answers)]
        for k in range(1, answers + 1):
            chosen = [any(some) for some in combinations(marks, k)]
            assert pass_at_k(answers, right, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-15)


def test_it_is_unbiased_where_the_share_of_right_answers_is_not():
    """Over all outcomes of 6 answers that are right with probability 0.3, its mean is 1 - 0.7^k."""
    from math import comb

    for k in range(1, 7):
        chances = [comb(6, right) * 0.3**right * 0.7 ** (6 - right) for right in range(7)]
        mean = sum(chance * pass_at_k(6, right, k) for right, chance in enumerate(chances))
        biased = sum(chance * (1 - (1 - right / 6) ** k) for right, chance in enumerate(chances))
        assert mean == pytest.approx(1 - 0.7**k, abs=1e-12)
        assert k == 1 or biased < mean - 0.01


def test_means_and_what_cannot_be():
    assert mean_pass_at_k([0, 4, 1], 4, 1) == pytest.approx((0 + 1 + 0.25) / 3)
    for numbers in ((4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match="k must be 1 to the number of answers"):
            pass_at_k(*numbers)
