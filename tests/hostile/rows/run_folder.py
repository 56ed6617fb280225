"""What lies in the folder of a run: damaged logs and records, another process, things in the way of files."""

import os
import shutil
import time
from pathlib import Path

from hostile import Row, call, trainer

MORE = trainer("steps=6")  # the finished run's


def spoiled(name, content):
    """Make: the file of the run has this content."""

    def make(folder):
        (folder / "run" / name).write_bytes(content)

    return make


def replaced(name, by):
    """Make: something else is in the place of the file of the run."""

    def make(folder):
        path = folder / "run" / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        by(path)

    return make


def line_of_zeros(folder):
    path = folder / "run" / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bytes(len(rest[0])) + b"\n" + b"".join(rest[1:]))


def hold_and_train():
    """Two runs in one folder, the first in another process."""
    from shared.engine.config import EngineConfig
    from shared.engine.engine import RuntimeEngine
    from shared.folder_lock import FolderLock

    import torch

    reader, writer = os.pipe()
    if not os.fork():
        with FolderLock(Path("run")):
            os.write(writer, b"has it")
            while os.getppid() != 1 and not Path("done").exists():
                time.sleep(0.01)
        os._exit(0)
    os.read(reader, 6)
    model = torch.nn.Linear(2, 2)
    try:
        RuntimeEngine(model, torch.optim.SGD(model.parameters()), EngineConfig(output=Path("run"), trackers=[])).fit([], steps=1)
    finally:
        Path("done").touch()
        os.wait()


def read_log():
    from shared.engine.trackers.jsonl import read_jsonl

    Path("metrics.jsonl").write_bytes(b'{"step": 1}\nnonsense\n')
    read_jsonl("metrics.jsonl")


def read_a_dump():
    from shared.engine.debug.dump import read_dump

    Path("dump.json").write_bytes(b'{"step": 1, "entries": {"weights": {"a": 7}}}')
    read_dump(".")


KEPT = ("is damaged", "it is kept as", "metrics.1.jsonl", "The report:")
WRITTEN = "cannot be written (Is a directory)"
ROWS = [
    Row("a log with a line of zeros", MORE, KEPT, code=0, make=line_of_zeros, trained=True),
    Row("a log that is no UTF-8", MORE, KEPT, code=0, make=spoiled("metrics.jsonl", b"\xff\xfe\n"), trained=True),
    Row("a log that is another file", MORE, KEPT, code=0, make=spoiled("metrics.jsonl", b"step,loss\n1,2\n"), trained=True),
    Row("a log that is a folder", MORE, KEPT, code=0, make=replaced("metrics.jsonl", Path.mkdir), trained=True),
    Row("a log that is a pipe", MORE, KEPT, code=0, make=replaced("metrics.jsonl", os.mkfifo), trained=True),
    Row("an empty log", MORE, "The report:", code=0, make=spoiled("metrics.jsonl", b""), trained=True),
    Row("no log", MORE, "The report:", code=0, make=replaced("metrics.jsonl", lambda path: None), trained=True),
    Row("a record of zeros", MORE, "config.yaml is damaged", code=1, make=spoiled("config.yaml", bytes(99)), trained=True),
    Row("a record cut short", MORE, "config.yaml is damaged", code=1, make=spoiled("config.yaml", b"steps: [1"), trained=True),
    Row("a record that is a folder", MORE, "config.yaml is damaged", code=1, make=replaced("config.yaml", Path.mkdir), trained=True),
    Row("a record that is a pipe", MORE, "config.yaml is damaged", code=1, make=replaced("config.yaml", os.mkfifo), trained=True),
    Row("damaged results", MORE, "The report:", code=0, make=spoiled("results.json", b"\0{"), trained=True),
    Row("results that are a folder", MORE, f"results.json {WRITTEN}", code=1, make=replaced("results.json", Path.mkdir), trained=True),
    Row("a report that is a folder", MORE, f"report.html {WRITTEN}", code=1, make=replaced("report.html", Path.mkdir), trained=True),
    Row("a code record that is a folder", MORE, f"code.json {WRITTEN}", code=1, make=replaced("code.json", Path.mkdir), trained=True),
    Row("an export that is a file", MORE, "run/model cannot be written", code=1, make=replaced("model", Path.touch), trained=True),
    Row("figures that are a file", MORE, "cannot be written", code=1, make=replaced("figures", Path.touch), trained=True),
    Row("a folder that another process is in", call(hold_and_train), ("run is in use by process", "since"), code=1),
    Row("a lock that is a folder", MORE, "run.lock cannot be written", code=1, make=replaced("run.lock", Path.mkdir), trained=True),
    Row("a lock of zeros", MORE, "The report:", code=0, make=spoiled("run.lock", bytes(200)), trained=True),
    Row("a damaged log, read", call(read_log), ("metrics.jsonl is damaged", "line 2"), code=1),
    Row("a damaged dump, read", call(read_a_dump), "dump.json is damaged", code=1),
]  # fmt: skip
