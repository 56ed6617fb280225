"""Small folders of text to prepare, and what a preparation left in its folder."""

import hashlib
from pathlib import Path

from shared.data.prepare import PrepareConfig
from shared.data.source import Source


def write_folder(folder: Path, count: int = 120) -> Path:
    """Documents that are all different, a duplicate, a short one, and one that is no text."""
    folder.mkdir()
    for i in range(count):
        words = " + \\\n".join(f"value_{(i * 37 + j * j) % 1009}" for j in range(60 + i % 7))
        (folder / f"file{i:03}.py").write_text(f"def function_{i}():\n    return {words}\n# café\n", encoding="utf-8")
    (folder / "twice.py").write_bytes((folder / "file005.py").read_bytes())
    (folder / "tiny.py").write_text("x")
    (folder / "latin.py").write_bytes(b"caf\xe9")
    return folder


def config_of(folder: Path, **changes) -> PrepareConfig:
    return PrepareConfig(sources=(Source(str(folder)),), vocab_size=400, sentinels=3, part_bytes=30_000, **changes)


def state_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file's content, as a hash, and its time of change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}
