"""A context-parallel rank that dies is named by the ranks of its ring, and the run continues with and without it to the same weights."""

import pytest
from stage_faults import BROKEN, SAVED, TIMEOUTS, Fault, follow


@pytest.mark.parametrize("fault", [
    Fault("cp2", "1f1b", 1, "forward", "cp2"),
    pytest.param(Fault("cp2", "1f1b", 0, "backward", "one"), marks=pytest.mark.slow),
    pytest.param(Fault("cp2_tp2", "1f1b", 2, "forward", "tp2"), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_dead_rank_of_a_ring_is_named_and_the_run_continues(fault, tmp_path):
    found = follow(fault, tmp_path)
    assert f"rank {fault.rank} of" in found.error and "ended with signal SIGKILL" in found.error
    assert fault.rank not in found.told and found.told
    for seconds, sentence in found.told.values():
        assert f"rank {fault.rank} has sent no heartbeat" in sentence and seconds < 2 * TIMEOUTS.heartbeat_timeout
    assert found.step == BROKEN - SAVED
    assert found.difference == 0 if fault.resumed == fault.layout else found.difference < 1e-9
