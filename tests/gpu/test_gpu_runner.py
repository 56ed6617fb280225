"""The runner of the GPU slices: resume, slices that fail in any way, time over, the table. The slices here are one line each."""

import json
import sys

import pytest
from gpu_rows import FAILED, HELD, MEASURED, NO_GPU, Row, in_words
from gpu_runner import Runner, fingerprint_of_code
from gpu_table import table, write_into

ROW = json.dumps({"what": "a", "figures": {"x": 1.5}, "note": "", "state": HELD})
GOOD = f"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text({ROW!r} + chr(10))"
BODIES = {
    "good": GOOD,
    "raises": GOOD + "; raise MemoryError('CUDA out of memory')",
    "dies": GOOD + "; import os; os.kill(os.getpid(), 9)",
    "hangs": GOOD + "; import time; time.sleep(600)",
    "says nothing": "pass",
    "claims too much": GOOD.replace(HELD, FAILED),
    "leaves a child": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); " + GOOD,
}


def runner_in(folder, bodies=BODIES, limit=60.0, **options) -> Runner:
    """A runner whose slices are these programs. `started` notes their names in order."""
    started = []

    def command(name, rows):
        started.append(name)
        return [sys.executable, "-c", bodies[name], str(rows)]

    belongs = {"machine": {"device": "one"}, "code": "first"} | options
    runner = Runner(folder, "cuda", "full", command=command, limit=limit, **belongs)
    runner.started = started
    return runner


def test_a_result_is_kept_for_the_same_code_and_machine_only(tmp_path):
    assert runner_in(tmp_path).result("good")["state"] == "done"
    second = runner_in(tmp_path)
    assert second.result("good")["rows"][0]["figures"] == {"x": 1.5} and second.started == []
    for other in ({"code": "second"}, {"machine": {"device": "two"}}):
        again = runner_in(tmp_path, **other)
        assert again.kept("good") is None and again.result("good") and again.started == ["good"]
    assert second.result("good", again=True) and second.started == ["good"]


@pytest.mark.parametrize("name, said", [("raises", "CUDA out of memory"), ("dies", "SIGKILL"), ("says nothing", "without a row")])
def test_a_slice_that_fails_is_recorded_with_its_error_and_the_rows_before_it(tmp_path, name, said):
    runner = runner_in(tmp_path)
    record = runner.result(name)
    assert record["state"] == "failed" and said in record["error"]
    assert len(record["rows"]) == (name != "says nothing")
    assert runner.result("good")["state"] == "done"  # it stops no other one
    assert runner.records().keys() == {name, "good"}


def test_a_claim_that_does_not_hold_fails_its_slice(tmp_path):
    record = runner_in(tmp_path).result("claims too much")
    assert record["state"] == "failed" and record["error"] == ""


def test_a_slice_whose_time_is_over_is_stopped(tmp_path):
    record = runner_in(tmp_path, limit=3.0).result("hangs")
    assert record["state"] == "failed" and "more than 3 s" in record["error"] and len(record["rows"]) == 1


def test_what_a_slice_has_started_ends_with_it(tmp_path):
    import psutil

    runner_in(tmp_path).result("leaves a child")
    left = [each for each in psutil.process_iter(["cmdline"]) if "time.sleep(600)" in (each.info["cmdline"] or [""])[-1]]
    assert not psutil.wait_procs(left, timeout=60)[1]  # a process that was killed takes a moment to end


def test_without_a_gpu_nothing_counts_as_held():
    claim, figure, broken = Row("claim", holds=True), Row("figure", {"x": 1}), Row("broken", holds=False)
    assert [row.state(on_gpu=True) for row in (claim, figure, broken)] == [HELD, MEASURED, FAILED]
    assert [row.state(on_gpu=False) for row in (claim, figure, broken)] == [NO_GPU, NO_GPU, FAILED]


def test_the_code_is_what_slices_run(tmp_path):
    for path in ("shared/model/a.py", "tests/gpu/run.py", "README.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x = 1", encoding="utf-8")
    before = fingerprint_of_code(tmp_path)
    (tmp_path / "README.md").write_text("other", encoding="utf-8")
    assert fingerprint_of_code(tmp_path) == before
    (tmp_path / "shared/model/a.py").write_text("x = 2", encoding="utf-8")
    assert fingerprint_of_code(tmp_path) != before


def test_the_table_goes_between_its_marks(tmp_path):
    runner = runner_in(tmp_path)
    runner.result("good"), runner.result("raises")
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- gpu: begin -->\nold\n<!-- gpu: end -->\nbelow\n", encoding="utf-8")
    write_into(readme, table(runner.records(), str))
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("above\n") and text.endswith("<!-- gpu: end -->\nbelow\n") and "old" not in text
    assert "| a | held | x 1.5 |  |" in text and "CUDA out of memory" in text and "device one" in text
    readme.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="no place"):
        write_into(readme, "x")


def test_figures_read_like_numbers():
    assert in_words({"a": 1234567, "b": 0.25, "c": 1.2e-7, "d": None, "e": "flash"}) == "a 1,234,567, b 0.25, c 1.20e-07, d -, e flash"
