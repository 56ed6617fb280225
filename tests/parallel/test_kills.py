"""A slice of the table of kills (`tests/tables/kill_table.py`): killed runs end with the weights of one that is not killed."""

import pytest
from kill_table import compared


@pytest.mark.slow
@pytest.mark.parametrize(
    "row, torchrun", [("one/course", False), ("dp2_zero1/course", False), ("fsdp2/torch", False), ("fsdp2/course", True)]
)
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_weights(row, torchrun, tmp_path):
    found = compared(row, 3, 5, torchrun, tmp_path)
    assert found.same and found.landed == 3 and not found.strange
