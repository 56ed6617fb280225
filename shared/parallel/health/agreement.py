"""Chapter 06. Configuration consistency check: before the first step all ranks compare code, configuration, text and model.

Each machine is started by a command of its own. If one has another learning rate, other text or other code, nothing fails: gradients of
different models are added up, and a checkpoint mixes them. So ranks exchange fingerprints, and where these differ all of them raise one
error, which names the key, both values, and the ranks with their hosts.

    topic          compared by                           facts
    program        `from_torchrun`                       source files, whose exercises run, versions, kind of device
    configuration  the trainer, and `Mesh` for layouts   every key, before any group of ranks is made by it
    text           the trainer                           what the prepared shards hold, and the tokenizer
    model          `apply_parallel`                      names, shapes and initial weights, by checksum, before anything is sharded
    run            `RuntimeEngine.fit`                   the engine's keys, the optimizer's settings, the number of steps
    checkpoint     `RankCheckpoints.candidates`         its manifest, where machines share no folder
    state          `RankSaver.save`                      `shared.parallel.health.replicas`, before every save

May differ: the patch release of Python, the host, its processor, its number of threads, and what only rank 0 uses (trackers).

Left out on purpose: a guard against intent.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

from shared.course import binding
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.parallel.comm.communicator import Communicator

CURES = {
    "program": "Bring the code and the packages of all machines to the same state.",
    "configuration": "Start all machines with the same configuration file and the same key=value settings.",
    "text": "Copy the folder data.prepared from one machine to the others, or share it.",
    "model": "Build the same model on every rank, from the same seed or file.",
    "run": "Give all ranks the same configuration, optimizer and number of steps.",
    "checkpoint": "Copy the checkpoints of the right run to the other machines, or choose another output folder.",
    "state": "Resume from the last checkpoint.",
}
LIBRARIES = ("numpy", "tokenizers", "safetensors")
LISTED = 4  # differences in a sentence
Result = TypeVar("Result")


class RanksDisagree(CourseError):
    """The ranks' code, configuration or data differ; every rank raises the same message."""

    on_all_ranks = True


def require_agreement(world: Communicator, topic: str, facts: Any) -> None:
    """Compare facts over all ranks. Every rank calls it, and all raise `RanksDisagree` where facts differ. Ranks exchange a hash, and all
    facts only where it differs.

    Args:
        topic: a key of `CURES`.
        facts: a dataclass or a dictionary, nested, whose leaves can be compared as text.
    """
    own = dict(flattened(facts))
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if len(set(world.gather_objects(digest))) > 1:
        everyone = world.gather_objects([platform.node(), own])
        raise RanksDisagree(sentence(topic, [host for host, _ in everyone], [of_rank for _, of_rank in everyone]))


def flattened(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf of nested dataclasses, dictionaries and lists: its dotted key and its value as text."""
    if is_dataclass(value):
        value = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    if isinstance(value, list | tuple):
        value = {str(number): entry for number, entry in enumerate(value)}
    if not isinstance(value, Mapping):
        yield key, str(value)
        return
    for name, entry in value.items():
        yield from flattened(entry, f"{key}.{name}" if key else str(name))


def sentence(topic: str, hosts: list[str], facts: list[dict[str, str]]) -> str:
    """The error message: what differs, in the order of the keys, and what to do."""
    keys = dict.fromkeys(key for of_rank in facts for key in of_rank)
    differing = [key for key in keys if len({of_rank.get(key) for of_rank in facts}) > 1]
    told = []
    for key in differing[:LISTED]:
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(facts):
            ranks.setdefault(of_rank.get(key, "missing"), []).append(rank)
        told.append(f"{key} is " + " and ".join(f"{value} on {rank_names(holders, hosts)}" for value, holders in ranks.items()))
    more = f"; and {len(differing) - LISTED} more" if len(differing) > LISTED else ""
    return f"The ranks do not agree: {'; '.join(told)}{more}. {CURES[topic]}"


def rank_names(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """
    >>> rank_names([0, 1], ["alpha", "alpha", "beta"])
    'ranks 0, 1 (alpha)'
    """
    machines = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} ({machines})"


def program(device: torch.device) -> dict[str, Any]:
    """Facts of this process: device, versions, and checksums of its code."""
    return {
        "device": device.type,
        "versions": versions(),
        "implementation": binding.current_choice().implementation,
        "exercises": binding.origins(),
        "files": source_files(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, without its patch release, and of the packages whose arithmetic or formats decide a run."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "torch": torch.__version__} | {name: metadata.version(name) for name in LIBRARIES}


@cache
def source_files() -> dict[str, str]:
    """Path -> checksum of the core, the solutions, the learner's exercises where they are used, and the main script."""
    choice = binding.current_choice()
    places = [(CHECKOUT, "shared/**/*.py"), (CHECKOUT, "solutions/*.py")]
    if choice.implementation != "reference":
        places.append((choice.workspace, "chapters/*/exercises.py"))
    files = {path.relative_to(folder).as_posix(): path for folder, pattern in places for path in sorted(folder.glob(pattern))}
    if script := getattr(sys.modules["__main__"], "__file__", None):
        files[Path(script).name] = Path(script)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in files.items()}


def agreed(
    world: Communicator, work: Callable[[], Result], error: type[CourseError] = CourseError, worse: type[CourseError] | None = None
) -> Result:
    """Return the result of `work`; where it raises a CourseError on any rank, raise the first such message on all of them, as `error`.
    worse: a class of errors that take precedence and keep their class."""
    result, problem = None, None
    try:
        result = work()
    except CourseError as failure:
        problem = [str(failure), worse is not None and isinstance(failure, worse)]
    if problems := [each for each in world.gather_objects(problem) if each]:
        told, is_worse = max(problems, key=lambda each: each[1])
        failure = (worse if is_worse else error)(told)
        failure.on_all_ranks = True
        raise failure
    return result


def ranks_that_share(world: Communicator, folder: Path) -> list[int]:
    """The ranks that see the same folder as this one, itself included, ascending. Every rank calls it. The same path may be another disk on
    another machine, so each rank creates a file with a unique name there and looks for the others' files."""
    if world.size == 1:
        return [0]
    names = world.gather_objects(f".rank-{world.rank}-{uuid4().hex}")
    with suppress(OSError):  # a read-only folder is looked into
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[world.rank]).touch()
    world.gather_objects(None)  # all files are there
    seen = {rank for rank, name in enumerate(names) if (folder / name).exists()}
    world.gather_objects(None)  # all ranks have looked
    with suppress(OSError):
        (folder / names[world.rank]).unlink(missing_ok=True)
    return sorted(seen | {world.rank})
