"""A slice of the table of killed commands (`tests/tables/command_kills.py`): exports, reports, quantization and evaluation, given again."""

import command_kills
import pytest


@pytest.mark.slow
def test_commands_that_are_killed_leave_what_those_leave_that_are_not(tmp_path):
    for name, found in command_kills.table(tmp_path, ["sft_lora", "quantize", "eval"], kills=3, seed=1):
        assert found.kills.total() and not (found.differing or found.left or found.strange), command_kills.line(name, found)
