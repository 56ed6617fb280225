"""`course runs` and `course report`: runs of all states, damaged folders, differing settings, and a page in which all text is text."""

import json
import os
import shutil
import signal
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from shared.course.cli import cli
from shared.folder_lock import FolderLock
from shared.trainer.records.record import RunRecord, find_runs, read_run
from shared.trainer.reports.page import plot
from shared.trainer.reports.side_by_side import differences, drawn, results

SETTINGS = {
    "mode": "sft", "steps": 4, "seed": 0, "data": {"batch_size": 8, "seq": 64}, "parallel": {"data_parallel": 2, "backend": "torch"},
    "engine": {"output": "anywhere"},
}  # fmt: skip
SUMMARY = {"held-out loss on answers": 0.5, "held-out tasks right after": 0.25, "tokens per second": 1200.0, "peak memory, GiB": 1.5}


def write_run(folder: Path, logged: int = 4, summary: dict | None = None, **changes) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS | changes))
    rows = [
        {
            "step": step, "train/loss": 4.0 / step, "progress/tokens": 512 * step,
            "speed/tokens_per_second": 100 * step, "memory/resident_gib": step / 8,
        }
        for step in range(1, logged + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (folder / "results.json").write_text(json.dumps({"summary": summary}))
    return folder


def course(*words) -> str:
    done = CliRunner().invoke(cli, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.output


def row(output: str, name: str) -> list[str]:
    [line] = [line for line in output.splitlines() if line.split()[:1] == [name]]
    return line.split()


def test_each_state_is_told_from_the_others(tmp_path):
    write_run(tmp_path / "done", summary=SUMMARY)
    write_run(tmp_path / "left", logged=2)
    (write_run(tmp_path / "gone", logged=3) / "run.lock").write_text("{}")
    os.utime(tmp_path / "gone" / "run.lock", (0, 0))
    again = write_run(tmp_path / "again", logged=2, summary=SUMMARY)  # started once more since its results were written
    os.utime(again / "results.json", (0, 0))
    write_run(tmp_path / "deep" / "er" / "stopped-early", logged=2, summary=SUMMARY)
    with FolderLock(write_run(tmp_path / "busy", logged=3, summary=SUMMARY)):
        output = course("runs", tmp_path)
    expected = {"done": "finished", "left": "stopped", "gone": "killed", "again": "stopped", "busy": "running"}
    assert {name: row(output, name)[2] for name in expected} == expected
    assert row(output, "deep/er/stopped-early")[2:4] == ["finished", "2/4"] and row(output, "gone")[3] == "3/4"
    assert row(course("runs", tmp_path), "busy")[2] == "finished"
    assert row(output, "done")[4:12] == ["1.000", "tasks", "right", "25.0%", "300", "1.500", "dp2", "(torch)"]
    assert row(output, "left")[4:7] == ["2.000", "200", "0.250"]


def test_the_measure_of_a_run_that_has_not_ended_comes_from_its_metrics():
    rows = {1: {"validation/loss": 3.0, "rollout/reward": 0.25}, 2: {"rollout/reward": 0.5}, 3: {"train/loss": 1.0}}
    assert RunRecord(Path(), metrics=rows).measure() == ("reward", 0.5)
    assert RunRecord(Path(), metrics=rows, summary={"held-out tasks right after": 0.75}).measure() == ("tasks right", 0.75)
    assert RunRecord(Path(), metrics={1: rows[1]} | {2: {"validation/accuracy": 0.5}}).measure() == ("pairs right", 0.5)
    assert RunRecord(Path()).measure() is None


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "results.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[[", b"null\n", b"3\n", b"- a\n", b"[" * 100_000, None])
def test_a_damaged_file_hides_no_run(tmp_path, name, content):
    write_run(tmp_path / "whole", summary=SUMMARY)
    folder = write_run(tmp_path / "hurt", summary=SUMMARY)
    (folder / name).unlink()
    if content is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(content)
    output = course("runs", tmp_path)
    assert row(output, "hurt") and row(output, "whole")
    if name != "metrics.jsonl" or content is None or b"\n" in content:  # a last line without an end is what a killed run leaves
        assert f"hurt: {name}" in " ".join(output.split())
    if content in (b"[[", None):
        page = tmp_path / "page.html"
        course("report", folder, tmp_path / "whole", "--output", page)
        assert page.stat().st_size > 1000


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "results.json", "code.json", "run.lock"])
@pytest.mark.parametrize("device", [False, True])
def test_a_pipe_or_a_device_in_place_of_a_file_keeps_no_reader_waiting(tmp_path, name, device):
    folder = write_run(tmp_path / "odd", summary=SUMMARY)
    write_run(tmp_path / "whole", summary=SUMMARY)
    (folder / name).unlink(missing_ok=True)
    if device:
        (folder / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(folder / name)
    with ended_after(60):
        output = course("runs", tmp_path)
        course("report", folder, tmp_path / "whole", "--output", tmp_path / "page.html")
    assert row(output, "odd") and row(output, "whole")
    if name.endswith(("l", "s.json")):
        assert f"odd: {name}" in " ".join(output.split())


@contextmanager
def ended_after(seconds: float):
    """A context that raises where it waits for ever."""

    def late(*_):
        pytest.fail("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_control_characters_of_names_and_settings_do_not_reach_the_terminal(tmp_path):
    folder = write_run(tmp_path / "red\x1b[31m", summary=SUMMARY, mode="sft\x1b[2J")
    (folder / "results.json").write_text("[[")
    output = course("runs", tmp_path)
    assert "\x1b" not in output and "red\ufffd[31m" in output and "sft\ufffd[2J" in output


@pytest.mark.parametrize(
    "changes",
    [{"steps": "many"}, {"steps": None}, {"parallel": 3}, {"parallel": {"unknown": 2}}, {"data": None}, {"mode": ["a"]}, {"engine": None}],
)
def test_settings_of_another_kind_hide_no_run(tmp_path, changes):
    write_run(tmp_path / "run", summary=SUMMARY | {"odd": [1], "none": None, "not a number": float("nan")}, **changes)
    assert "run" in course("runs", tmp_path)
    course("report", tmp_path / "run", write_run(tmp_path / "other"), "--output", tmp_path / "page.html")


def test_differences_and_results_stand_beside_each_other(tmp_path):
    one = read_run(write_run(tmp_path / "one", summary=SUMMARY))
    data = {"batch_size": 8, "seq": 64, "epochs": None}
    two = read_run(write_run(tmp_path / "two", logged=2, seed=1, data=data, engine={"output": "two"}))
    assert differences([one, two]) == [("seed", ["0", "1"]), ("data.epochs", ["", "null"])]
    assert differences([one, one]) == []
    found = dict(results([one, two]))
    assert found["state"] == ["finished", "stopped"] and found["tokens per second"] == ["1,200", "200"]
    assert found["held-out tasks right after"] == ["25.0%", ""] and found["last training loss"] == ["1.000", "2.000"]


def test_curves_are_those_of_the_metrics_and_tokens_where_steps_differ_in_them(tmp_path):
    runs = [read_run(write_run(tmp_path / str(size), data={"batch_size": size, "seq": 64})) for size in (8, 16)]
    found = drawn(["a", "b"], runs)
    [axes] = found["training loss"].axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[step, 4.0 / step] for step in range(1, 5)]] * 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    [axes] = found["training loss by tokens"].axes
    assert axes.lines[1].get_xdata().tolist() == [512, 1024, 1536, 2048]
    assert "training loss by tokens" not in drawn(["a", "b"], [runs[0], runs[0]])
    plot({"a $b$ _c": [(1, float("nan")), (2, float("inf")), (3, 1.0)], "b": [(1, 1.0)]}, "loss", "step").savefig(tmp_path / "odd.png")


def test_all_text_of_a_run_is_text_in_the_page(tmp_path):
    harm = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    one = write_run(tmp_path / "one<b>", summary=SUMMARY | {harm: harm}, harmful=harm)
    (one / "metrics.jsonl").write_text((one / "metrics.jsonl").read_text() + "?\n")
    output = course("report", one, write_run(tmp_path / "two"), "--output", tmp_path / "page.html")
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(page := (tmp_path / "page.html").read_text())
    assert harm in output.replace("\n", "") and page.count("&lt;script&gt;") == 3
    assert {tag for tag, _ in tags} & {"script", "b", "iframe", "link"} == set()
    assert all(attributes["src"].startswith("data:image/png;base64,") for tag, attributes in tags if tag == "img")


def test_runs_of_the_same_settings_are_said_to_be_so(tmp_path):
    output = course("compare", write_run(tmp_path / "one"), write_run(tmp_path / "two"), "--output", tmp_path / "page.html")
    assert "Settings that differ: none.\n" in output


def test_runs_are_found_below_the_folder_and_not_within_each_other(tmp_path):
    for name in ("b", "a/c", "a/c/checkpoints/step-1", ".hidden/d", "e/f/g/h/i/j"):
        write_run(tmp_path / name)
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a/c", "b"]
    assert list(find_runs(tmp_path / "b")) == [tmp_path / "b"]
    assert row(course("runs", tmp_path / "b"), "b")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("runs", "none"), "none holds no runs"),
        (("report", "none", "one"), "none holds no run"),
        (("report", "one", "one"), "given twice"),
        (("report", "one", "./one"), "given twice"),
        (("report",), "RUN RUN"),
        (("report", "one", "two", "--output", "one"), "cannot be written"),
    ],
)
def test_what_cannot_be_listed_is_a_sentence(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    write_run(Path("one"))
    write_run(Path("two"))
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code == 64 and says in " ".join(done.output.split()) and "Traceback" not in done.output


def test_runs_of_one_name_are_told_apart_and_a_moved_folder_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("a/run"))
    shutil.move(write_run(Path("x/run"), summary=SUMMARY), "b")
    Path("b").rename("b2")
    Path("c").mkdir()
    Path("b2").rename("c/run")
    output = course("report", "a/run", "c/run")
    assert "a/run" in output and "c/run" in output and Path("a/comparison.html").is_file()
