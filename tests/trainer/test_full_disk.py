"""A disk that becomes full: one sentence names the file, what was trained is still there, the same command resumes once space is free."""

import errno
import json
import os
import subprocess

import pytest
from rich.console import Console
from trainer_runs import settings_file, train

from shared.course.errors import CourseError
from shared.data.prepare import prepare
from shared.engine.checkpoint.folder import Checkpoints
from shared.trainer.config import TrainerConfig
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words

FSYNC = os.fsync


@pytest.fixture
def full(monkeypatch):
    """full(name): from now on the disk has no room for files whose path holds the name."""

    def full(name):
        def fsync(handle):
            if name in os.readlink(f"/proc/self/fd/{handle}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            FSYNC(handle)

        monkeypatch.setattr(os, "fsync", fsync)

    return full


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    config = parse_words(TrainerConfig, [str(settings_file(folder, folder / "prepared", steps=3, report={"completions": 0}))])
    train_model(config, Console(quiet=True))
    return config


def test_no_room_when_a_run_goes_on_or_ends_is_a_sentence_and_the_same_command_goes_on(run, full, monkeypatch):
    """Each file in turn is the one that does not fit, of a run that has ended and is reported once more."""
    before = json.loads((run.engine.output / "results.json").read_text())["summary"]["held-out bits per byte"]
    for name in ("run.lock", "config.yaml", "code.json", "model", "loss.png", "report.html", "results.json"):
        full(name)
        with pytest.raises(CourseError, match=f"{name} cannot be written \\(No space left on device\\): free space there"):
            train_model(run, Console(quiet=True))
        monkeypatch.undo()
        assert Checkpoints(run.engine.output / "checkpoints").steps() == [2, 3] and not list(run.engine.output.rglob("*.partial"))
    assert train_model(run, Console(quiet=True)).judged.summary["held-out bits per byte"] == before


def test_no_room_for_prepared_text_is_a_sentence_and_preparing_goes_on(run, full, monkeypatch, tmp_path):
    for name in ("00000.parquet", "00000.json", "report.json", "report.png", "tokenizer.json", "00000.tokens.safetensors"):
        full(name)
        with pytest.raises(CourseError, match=f"{name} cannot be written \\(No space left on device\\): free space there"):
            prepare(run.data.prepare, tmp_path)
        monkeypatch.undo()
    assert prepare(run.data.prepare, tmp_path).tokenizer.identity == prepare(run.data.prepare, run.data.prepared).tokenizer.identity
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".partial", ".lock")]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(tmp_path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"A file system cannot be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.slow
def test_a_run_on_a_disk_that_is_full_at_any_moment_ends_with_sentences_and_goes_on(small_disk, tmp_path_factory):
    """Ballast leaves more and more room, from none to enough, so each file of a run is once the one that does not fit."""
    folder, said = tmp_path_factory.mktemp("settings"), []
    file = settings_file(folder, small_disk / "prepared", engine={"output": str(small_disk / "run")})
    ballast, done = small_disk / "ballast", None
    ballast.write_bytes(bytes(2**24))
    while done is None or done.returncode:
        before = Checkpoints(small_disk / "run" / "checkpoints").steps()
        done = train(file)
        assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) <= 1, done.stderr
        if done.returncode:
            said.append(done.stderr.strip())
            assert "No space left on device" in said[-1] and "free space" in said[-1]
        assert not before or Checkpoints(small_disk / "run" / "checkpoints").steps()[-1] >= before[-1]
        size = ballast.stat().st_size
        assert done.returncode == 0 or size, "there was enough room"
        os.truncate(ballast, max(0, size - 2**17))
    print(*said, sep="\n")
    whole = train(settings_file(folder / "whole", folder / "prepared"))
    assert whole.returncode == 0
    summaries = [json.loads((each / "results.json").read_text())["summary"] for each in (small_disk / "run", folder / "whole" / "run")]
    assert summaries[0]["held-out bits per byte"] == summaries[1]["held-out bits per byte"]
