"""What ranks compare, in which words they say that it differs, and which of them see one folder."""

import platform
import shutil
import sys
from pathlib import Path

import pytest
import torch
from agreement_table import said

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.health import agreement
from shared.parallel.health.agreement import agreed, program, ranks_that_share, require_agreement
from shared.parallel.processes.launch import run_processes

CPU = torch.device("cpu")


# What is compared, and how it is said.


def test_the_sentence_names_each_key_both_values_and_the_ranks_with_their_hosts(monkeypatch):
    def compare(world):
        facts = {"same": [1, {"x": Path("a")}], "rate": 0.1 + 0.2 * (world.rank == 1), "only": {"here": None} if world.rank else {}}
        return said(lambda: require_agreement(world, "configuration", facts))

    monkeypatch.setattr(platform, "node", lambda: "alpha")
    assert set(run_threads(compare, 3)) == {
        "The ranks do not agree: rate is 0.1 on ranks 0, 2 (alpha) and 0.30000000000000004 on rank 1 (alpha); only.here is missing on "
        "rank 0 (alpha) and None on ranks 1, 2 (alpha). Start all machines with the same configuration file and the same key=value "
        "settings."
    }
    facts = {"nan": float("nan"), "config": ParallelConfig()}
    assert run_threads(lambda world: said(lambda: require_agreement(world, "run", facts)), 2) == ["", ""]


def test_of_many_differences_the_first_are_listed_and_the_others_counted():
    compare = lambda world: said(lambda: require_agreement(world, "text", {f"key{n}": world.rank for n in range(7)}))  # noqa: E731
    told, _ = run_threads(compare, 2)
    assert told.count(" is 0 on rank 0 ") == agreement.LISTED and "; and 3 more. Copy the folder" in told


def test_what_fails_on_one_rank_fails_on_all_with_its_sentence():
    def fail(rank):
        if rank == 1:
            raise CourseError("rank 1's disk is full")
        return rank

    assert run_threads(lambda world: said(lambda: agreed(world, lambda: fail(world.rank))), 3) == ["rank 1's disk is full"] * 3
    assert run_threads(lambda world: agreed(world, lambda: world.rank), 3) == [0, 1, 2]


def test_ranks_find_out_which_of_them_see_one_folder_and_leave_nothing_there(tmp_path):
    at = {0: "a", 1: "b", 2: "a", 3: "c"}
    assert run_threads(lambda world: ranks_that_share(world, tmp_path / at[world.rank]), 4) == [[0, 2], [1], [0, 2], [3]]
    assert not list(tmp_path.glob("*/*")) and not list(tmp_path.glob("*/.*"))


def python(*version):
    return lambda patch: patch.setattr(platform, "python_version_tuple", lambda: version)


def library(patch):
    patch.setattr(agreement.metadata, "version", lambda name: "0.1")


MINOR = platform.python_version_tuple()[:2]
PROGRAMS = {  # what is another on rank 1 -> how it gets there, and what the sentence must hold; nothing where that may differ
    "torch": (lambda patch: patch.setattr(torch, "__version__", "2.9.1"), "versions.torch is"),
    "python": (python("3", "10", "1"), "and 3.10 on rank 1"),
    "patch release": (python(*MINOR, "99"), ""),
    "library": (library, "versions.safetensors is"),
    "exercises": (lambda patch: patch.setattr(agreement.binding, "origins", lambda: {"01.train_step": "mine"}), "mine on rank 1"),
    "place of the copy": (lambda patch: patch.setattr(agreement, "CHECKOUT", Path("copy")), ""),
    "core": (lambda patch: patch.setattr(agreement, "CHECKOUT", Path("core")), "files.shared/loss.py is"),
    "solution": (lambda patch: patch.setattr(agreement, "CHECKOUT", Path("solution")), "files.solutions/01_training_loop.py is"),
    "one file more": (lambda patch: patch.setattr(agreement, "CHECKOUT", Path("more")), "files.shared/new.py is missing on rank 0"),
}


def programs(world, folder):
    told = {}
    for what, (change, _) in PROGRAMS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(agreement, "CHECKOUT", Path("right"))
            if world.rank:
                change(patch)
            agreement.source_files.cache_clear()
            told[what] = said(lambda: require_agreement(world, "program", program(CPU)))
    told["device"] = said(lambda: require_agreement(world, "program", program(torch.device("cuda" if world.rank else "cpu"))))
    return told


def test_other_code_or_packages_on_a_rank_are_named(tmp_path):
    edits = {"right": "", "copy": "", "core": "shared/loss.py", "solution": "solutions/01_training_loop.py", "more": "shared/new.py"}
    for name, edit in edits.items():
        for part in ("shared", "solutions"):
            (tmp_path / name / part).mkdir(parents=True)
        for file in ("shared/loss.py", "solutions/01_training_loop.py"):
            shutil.copy(CHECKOUT / file, tmp_path / name / file)
        if edit:
            with (tmp_path / name / edit).open("a") as edited:
                edited.write("# edited\n")
    told = run_processes(programs, 2, tmp_path)
    assert told[0] == told[1] and "device is cpu on rank 0" in told[0].pop("device")
    for what, (_, words) in PROGRAMS.items():
        assert words in told[0][what] and bool(words) == bool(told[0][what]), (what, told[0][what])


def test_the_script_that_was_started_is_compared_with_the_core(monkeypatch, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import torch\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    agreement.source_files.cache_clear()
    files = agreement.source_files()
    agreement.source_files.cache_clear()
    assert {"mine.py", "shared/loop.py", "solutions/01_training_loop.py"} <= files.keys()
