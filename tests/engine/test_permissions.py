"""What is written has the permissions that the umask says: others of the group can read an export, and nobody else where they must not."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from layout_runs import LayoutRun
from runs import Loader, make_engine, weights
from trainer_runs import TRAIN, settings_file

from shared.course.progress import replace_text
from shared.data.shards import write_shard
from shared.engine.config import CheckpointConfig
from shared.engine.debug.anomalies import save_anomaly
from shared.engine.debug.dump import Dump, write_dump
from shared.engine.trackers.jsonl import JsonlTracker
from shared.model.hf.pretrained import save_pretrained
from shared.output_files import write_atomically
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout

by_umask = pytest.mark.parametrize("umask", [0o022, 0o027], ids=oct)


@pytest.fixture
def created_with(umask):
    before = os.umask(umask)
    yield umask
    os.umask(before)


def require_modes(folder: Path, umask: int, least: int) -> None:
    """Every file and folder below has the mode of one that is simply created."""
    found = {str(path.relative_to(folder)): (path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*")}
    assert len(found) >= least
    assert not {name: oct(mode) for name, (is_folder, mode) in found.items() if mode != (0o777 if is_folder else 0o666) & ~umask}


@by_umask
def test_every_kind_of_file_has_the_mode_that_the_umask_says(created_with, tmp_path):
    folder = tmp_path / "written"
    engine = make_engine(folder / "run", [JsonlTracker()], checkpoint=CheckpointConfig(every=2, asynchronous=True)).fit(Loader(), steps=3)
    write_dump(folder / "dump", Dump(3, {"weights": {}}), weights(engine))
    save_anomaly(folder / "anomaly", engine, "a spike", {}, weights(engine))
    save_pretrained(engine.model, folder / "export")
    write_shard(folder / "shards" / "0.tokens.safetensors", [[1, 2]], [2], "a tokenizer", 3)
    write_atomically(folder / "report.json", b"{}")
    replace_text(folder / "progress.json", "{}")
    layout = parse_layout("fsdp2")
    run_threads(lambda world: LayoutRun(world, layout).train(1).save(folder / "ranks"), 2)
    require_modes(folder, created_with, least=30)


@pytest.mark.slow
@by_umask
def test_all_that_a_run_of_the_trainer_leaves_has_the_mode_that_the_umask_says(umask, tmp_path):
    settings = settings_file(tmp_path / "work", tmp_path / "work" / "prepared", engine={"trackers": ["console", "jsonl"]})
    done = subprocess.run([sys.executable, TRAIN, settings], capture_output=True, text=True, umask=umask)
    assert done.returncode == 0, done.stderr
    settings.unlink()
    require_modes(tmp_path / "work" / "run", umask, least=30)
    require_modes(tmp_path / "work" / "prepared", umask, least=10)
