"""A log never ends a run: one that is damaged is set aside, one for which the disk has no room waits, and readers say what is wrong."""

import errno
import json
import os
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console
from runs import Loader, make_engine, printed

from shared.course.errors import CourseError
from shared.engine.config import CheckpointConfig
from shared.engine.debug.anomalies import CatchAnomalies, load_batch, read_anomaly
from shared.engine.debug.dump import ModelDump, read_dump
from shared.engine.trackers import make_tracker
from shared.engine.trackers.jsonl import JsonlTracker, read_damaged, read_jsonl

LINES = [json.dumps({"step": step, "train/loss": float(step)}).encode() + b"\n" for step in (2, 4, 6, 8)]
WHOLE = b"".join(LINES)
DAMAGED = {
    "zeros": (LINES[0] + bytes(50) + b"\n" + LINES[2], [2, 6], "1 of its 3 lines cannot be read, the first is line 2"),
    "no UTF-8": (LINES[0] + b'{"step": 4, "name": "\xff"}\n' + LINES[2], [2, 6], "1 of its 3 lines cannot be read, the first is line 2"),
    "torn and gone on": (LINES[0] + LINES[1][:9] + LINES[2] + LINES[3], [2, 8], "1 of its 3 lines cannot be read, the first is line 2"),
    "another file": (b"hello\n[1]\n{}\n", [], "3 of its 3 lines cannot be read, the first is line 1"),
    "nested too deep": (b"[" * 100_000 + b"\n" + LINES[0], [2], "1 of its 2 lines cannot be read, the first is line 1"),
}


def engine_at(folder, step):
    return SimpleNamespace(output=folder, step=step, console=Console(file=StringIO(), width=1000))


def resumed(folder, step):
    """What a tracker says that resumes at a step, logs the next and ends."""
    tracker, engine = make_tracker("jsonl"), engine_at(folder, step)
    tracker.on_start(engine)
    engine.step += 1
    tracker.on_log(engine, {"train/loss": 0.5})
    tracker.on_end(engine)
    return printed(engine)


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_log_is_kept_beside_its_readable_lines(tmp_path, kind):
    content, readable, words = DAMAGED[kind]
    (tmp_path / "metrics.jsonl").write_bytes(content)
    said = resumed(tmp_path, 100)
    assert f"metrics.jsonl is damaged ({words}): it is kept as {tmp_path / 'metrics.1.jsonl'}" in said and said.count("\n") == 1
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == content
    assert list(read_jsonl(tmp_path / "metrics.jsonl")) == [*readable, 101]


def a_folder(path):
    path.mkdir()
    (path / "kept").touch()


def a_pipe(path):
    os.mkfifo(path)


def a_loop(path):
    path.symlink_to(path)


@pytest.mark.parametrize("make", [a_folder, a_pipe, a_loop])
def test_what_is_no_file_is_set_aside(tmp_path, make):
    make(tmp_path / "metrics.jsonl")
    said = resumed(tmp_path, 4)
    assert "metrics.jsonl is damaged" in said and list(read_jsonl(tmp_path / "metrics.jsonl")) == [5]
    assert os.path.lexists(tmp_path / "metrics.1.jsonl")


def test_a_whole_log_stays_where_it_is(tmp_path):
    """And what a killed run left half written, zeros of a power cut among it, is no damage."""
    (tmp_path / "metrics.jsonl").write_bytes(WHOLE + b'{"step": 10, "tr' + bytes(20))
    assert resumed(tmp_path, 6) == ""
    assert list(read_jsonl(tmp_path / "metrics.jsonl")) == [2, 4, 6, 7] and len(list(tmp_path.iterdir())) == 1


def test_readers_name_the_file_and_the_line_or_take_what_there_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(DAMAGED["zeros"][0])
    with pytest.raises(CourseError, match=r"metrics.jsonl is damaged \(1 of its 3 lines cannot be read, the first is line 2\)"):
        read_jsonl(path)
    assert read_damaged(path) == ({2: {"train/loss": 2.0}, 6: {"train/loss": 6.0}}, DAMAGED["zeros"][2])
    path.write_text('{"step": 1, "train/loss": "spoiled", "validation/loss": 2}\n')
    assert read_damaged(path) == ({1: {"validation/loss": 2}}, ""), "a plot takes numbers only"
    assert read_damaged(tmp_path / "none.jsonl") == ({}, "No such file or directory")


class Disk:
    """The tracker's file, on a disk that has room for some bytes more."""

    def __init__(self, file):
        self.file, self.room = file, 0

    def write(self, line):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(line[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_lines_wait_for_room_on_the_disk(tmp_path):
    tracker, engine = JsonlTracker(), engine_at(tmp_path, 0)
    tracker.on_start(engine)
    tracker.on_log(engine, {"train/loss": 1.0})
    tracker.file = Disk(tracker.file)
    for engine.step, room in ((1, 0), (2, 10), (3, 0)):  # of step 2 a part would fit
        tracker.file.room = room
        tracker.on_log(engine, {"train/loss": 1.0})
        assert list(read_jsonl(tmp_path / "metrics.jsonl")) == [0] and (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert printed(engine) == (
        f"{tmp_path / 'metrics.jsonl'} cannot be written (No space left on device): free space there. Its lines wait in memory; "
        "training continues.\n"
    )
    tracker.file.room, engine.step = 10**6, 4
    tracker.on_log(engine, {"train/loss": 1.0})
    assert list(read_jsonl(tmp_path / "metrics.jsonl")) == [0, 1, 2, 3, 4]
    tracker.file.room, engine.step = 0, 5
    tracker.on_log(engine, {"train/loss": 1.0})
    tracker.on_end(engine)
    assert "The last 1 logs are missing" in printed(engine)


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_dump_and_a_spike_for_which_there_is_no_room_do_not_end_the_run(tmp_path, monkeypatch):
    for module in ("dump", "anomalies"):
        monkeypatch.setattr(f"shared.engine.debug.{module}.save_tensors", full)
        monkeypatch.setattr(f"shared.engine.debug.{module}.atomic_save", full)
    class Spike(CatchAnomalies):
        def limit(self):
            return 0.0

    console = Console(file=StringIO(), width=1000)
    engine = make_engine(tmp_path, [ModelDump(every=2), Spike()], checkpoint=CheckpointConfig(every=2), console=console)
    engine.fit(Loader(), steps=3)
    said = printed(engine)
    assert f"{tmp_path / 'dumps' / 'step-00000002'} cannot be written (No space left on device): free space there" in said
    assert said.count("loss spike") == said.count(f"{tmp_path / 'anomalies'}") == 3 and engine.checkpoints.steps() == [2, 3]


@pytest.mark.parametrize(("name", "read"), [("dump.json", read_dump), ("anomaly.json", read_anomaly), ("batch.safetensors", load_batch)])
@pytest.mark.parametrize("content", [b"", bytes(100), b'{"step": 1', b"\xff\xfe"])
def test_a_damaged_dump_is_a_sentence(tmp_path, name, read, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CourseError, match=f"{name} is damaged"):
        read(tmp_path)
