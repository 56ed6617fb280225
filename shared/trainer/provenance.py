"""Chapter 12. Provenance of a run: the resolved configuration and the code's version, kept beside its results.

A run that is resumed must be the same run, so what decides its weights is compared with what was saved (`shared.trainer.records.changes`).
"""

import json
import platform
import re
import subprocess
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from shared.course import binding
from shared.course.errors import CourseError
from shared.course.extensions import content_hash
from shared.course.paths import CHECKOUT
from shared.engine.trackers.services import flat
from shared.output_files import write_atomically

CONFIG, CODE, START = "config.yaml", "code.json", "start.json"
MAY_CHANGE = (  # decides nothing about the weights, but for rounding
    "engine", "report", "impl", "parallel", "elastic", "data.prepared", "data.held_out_rows", "data.prepare.workers",
    "data.micro_batch_size", "optimizer.fused", "model.attention", "model.experts.implementation",
    "continue_from", "continue_with", "ppo.gather", "grpo.gather",
    "schedule.steps",  # the same as steps, which is compared
    "start_from", "start_config", "ppo.reward_model", "ppo.reward_config",  # paths; what they hold is compared, as `start`
)  # fmt: skip


def plain(value: Any) -> Any:
    """A configuration as YAML and JSON hold it."""
    if is_dataclass(value):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def keep_record(config: Any, output: Path, start: str | None = None) -> None:
    """Write the configuration and the code's version into the run's folder.

    Args:
        start: the fingerprint of the weights that the run starts from, where it starts from any.
    """
    write_settings(plain(config), output)  # a run that is killed right here must still find it
    write_atomically(output / START, json.dumps({"sha256": start}).encode())
    write_code(plain(config), output)


def write_code(settings: dict[str, Any], output: Path) -> None:
    write_atomically(output / CODE, json.dumps(code_version() | own_code(settings), indent=1).encode())


def own_code(settings: dict[str, Any]) -> dict[str, str]:
    """The hash of each file from which a configuration takes code by import path, by the file's name and the code's. What such a file
    imports is not among them."""
    places = re.findall(r'"([^"]+\.py:\w+)"', json.dumps(settings, default=repr))
    return {Path(place).name: content_hash(place) for place in places}


def edited_code(output: Path, settings: dict[str, Any]) -> list[str]:
    """Import paths whose code was edited since the run in this folder last started."""
    before, _ = read_object(output / CODE)  # the run goes on where that is damaged
    return [name for name, now in own_code(settings).items() if before.get(name, now) != now]


def write_settings(settings: dict[str, Any], output: Path) -> None:
    """Write a run's configuration without `continue_with`, which holds for one command."""
    write_atomically(output / CONFIG, yaml.safe_dump(settings | {"continue_with": []}, sort_keys=False).encode())


def saved_value(output: Path, key: str) -> Any:
    """A key's value in the configuration of the run in this folder; None if there is no run."""
    path = output / CONFIG
    return read_record(path).get(key) if path.exists() else None


def saved_start(output: Path) -> str | None:
    """The fingerprint of the weights that the run in this folder started from; None for random weights."""
    start, damage = read_object(output / START)
    if damage:
        raise CourseError(f"{output / START} is damaged, so what this run started from is unknown: give another engine.output.")
    return start.get("sha256")


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """A JSON object, empty where the file is missing or damaged; and an error message where it is damaged."""
    try:
        if path.exists() and not path.is_file():  # a pipe would keep its reader waiting
            return {}, f"{path.name} is not a file"
        return dict(json.loads(path.read_bytes())), ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, TypeError, RecursionError):
        return {}, f"{path.name} cannot be read"


def read_record(path: Path) -> dict[str, Any]:
    """The configuration in the record of a run, or an error if the file is damaged."""
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise CourseError(
            f"{path} is damaged, so the configuration of this run is unknown: restore the file, or give another engine.output."
        )
    return record


def changed(saved: dict, now: dict) -> dict[str, list[Any]]:
    """Keys that differ, with both values."""
    before, after = flat(saved), flat(now)
    keys = sorted(before.keys() | after.keys())
    differing = [key for key in keys if without_folders(before.get(key)) != without_folders(after.get(key))]
    return {key: [before.get(key), after.get(key)] for key in differing}


def differences(saved: dict, now: dict) -> dict[str, list[Any]]:
    """Keys that differ and decide the weights, with both values."""
    found = {key: values for key, values in changed(saved, now).items() if not may_change(key)}
    if found.keys() & {"precision", "optimizer.name"}:
        found.pop("optimizer.newton_schulz_dtype", None)  # which follows them
    return found


def in_words(found: dict[str, list[Any]], most: int = 4) -> str:
    """
    >>> in_words({"steps": [40, 80], "seed": [0, 1]}, most=1)
    'steps (40 there, 80 here), ...'
    """
    said = [f"{key} ({before!r} there, {after!r} here)" for key, (before, after) in found.items()]
    return ", ".join([*said[:most], *(["..."] * (len(said) > most))])


def without_folders(value: Any) -> str:
    """A setting as text, whatever the order of its keys. Folders of what it names by import path are left out: a project that was moved is
    the same."""
    return re.sub(r"/[^'\"]*/(?=[^/'\"]+\.py:\w)", "", json.dumps(value, sort_keys=True, default=repr))


def may_change(key: str) -> bool:
    """Whether a setting changes the weights by rounding at most."""
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def code_version() -> dict[str, Any]:
    """The commit and whether files were changed since, the versions of what computes, the machine, and whose parts ran."""
    import torch  # here and below: what reads a run's folder needs none

    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "version": metadata.version("train-language-models"),
        "commit": git("rev-parse", "HEAD"),
        "changed_files": None if changed is None else [line[3:] for line in changed.splitlines()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": machine(),
        "parts": binding.summary(),
    }


def git(*arguments: str) -> str | None:
    """Output of git; None without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None


def machine() -> str:
    """The GPU's name, or the CPU's with its number of threads."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = next(
        (line.split(":", 1)[1].strip() for line in cpu_lines() if line.startswith("model name")), platform.processor() or platform.machine()
    )
    return f"{model}, {torch.get_num_threads()} threads"


def cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
