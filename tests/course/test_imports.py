"""What a command imports: each only what it uses, in a process of its own. Importing torch takes longer than most commands, and its
compiler, tables, templates, figures and symbols as long again."""

import gc
import subprocess
import sys
import textwrap

import pytest
from rich.console import Console
from scripts import run_script
from trainer_runs import settings_file
from workspace import Learner

from shared.course.importing import all_stays
from shared.course.paths import CHECKOUT
from shared.data.prepare import prepare
from shared.trainer.config import TrainerConfig
from shared.trainer.settings import parse_words

TRAIN = CHECKOUT / "chapters" / "12_grpo" / "train.py"
LAPTOP = str(TRAIN.with_name("laptop.yaml"))
COURSE = """
import sys
from shared.course.cli import main
try:
    main()
finally:
    sys.stderr.write(" ".join(["imported:", *sys.modules]))
"""
NEVER = {"datasets", "transformers", "pandas", "pyarrow", "ftfy", "sympy", "torch._dynamo", "nbformat", "IPython"}
TRAINING = NEVER | {"jinja2", "matplotlib", "jsonargparse", "pygments"}
LIGHT = TRAINING | {"torch", "numpy", "psutil", "shared.course.running"}


@pytest.fixture
def run(tmp_path):
    """One of two runs that have logged a step, a and b."""
    for name in "ab":
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("mode: pretrain\nsteps: 2\n")
        (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n')
    return folder


def imported_by(*words: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", COURSE, *words], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("imported:")[2].split())


@pytest.mark.parametrize(
    "words",
    [
        "", "--help", "next", "status", "hint 01.cross_entropy --rung 1", "map 01", "read shared.loss", "hunt 07", "stubs --check",
        "check --help",
    ],
)  # fmt: skip
def test_a_command_that_needs_no_torch_imports_neither_it_nor_what_starts_processes(words, tmp_path, monkeypatch):
    Learner(tmp_path).progress.record_hint("01.cross_entropy", 1)
    monkeypatch.chdir(tmp_path)
    assert not imported_by(*words.split()) & LIGHT


def test_a_list_of_runs_is_read_without_torch(run):
    assert not imported_by("runs", str(run.parent)) & LIGHT


def test_runs_are_compared_without_torch(run):
    found = imported_by("report", str(run), str(run.with_name("a")))
    assert not found & (NEVER | {"torch", "jsonargparse", "pygments", "shared.course.running"})


def test_a_plan_imports_what_it_computes_with():
    found = imported_by("plan", LAPTOP, "--hardware", "3090")
    assert "torch" in found and not found & (TRAINING | {"shared.trainer.run", "shared.course.running"})


def test_the_trainers_help_imports_no_run(tmp_path):
    script = tmp_path / "help.py"
    script.write_text(
        "import runpy, sys\n"
        f"sys.argv = ['train.py', '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
        "finally:\n"
        "    sys.stderr.write(' '.join(sys.modules))\n"
    )
    done = run_script(script, cwd=tmp_path, fresh=True)
    assert done.returncode == 0 and "--optimizer.lr" in done.stdout
    assert not {*done.stderr.split()} & (TRAINING - {"jsonargparse"} | {"shared.trainer.run", "shared.course.running"})


def test_a_step_on_prepared_text_imports_neither_the_compiler_nor_what_prepares(tmp_path):
    (tmp_path / "listing.py").write_text(
        textwrap.dedent("""
        import os, sys
        from shared.engine.callbacks import Callback

        class ListModules(Callback):
            def on_step(self, engine):
                sys.stderr.write(" ".join(sys.modules))
                sys.stderr.flush()
                os._exit(0)
        """)
    )
    engine = {"callbacks": ["listing.ListModules"]}
    path = settings_file(tmp_path, tmp_path / "prepared", engine=engine)
    config = parse_words(TrainerConfig, [str(path)])
    prepare(config.data.prepare, config.data.prepared, Console(quiet=True))
    done = run_script(TRAIN, path, cwd=tmp_path, fresh=True)
    found = {*done.stderr.split()}
    # The loss asks autograd for a gradient in the forward pass, for which PyTorch imports sympy.
    assert "shared.optim.muon" in found, done.stderr[-2000:]
    assert not found & (TRAINING - {"sympy"})


def test_a_check_runs_the_main_module_once(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
        print("begun", flush=True)
        if __name__ == "__main__":
            from shared.course import catalogue, running
            [outcome] = running.check_solutions([catalogue.find_exercise("01.cross_entropy")])
            print(outcome.state)
        """)
    )
    done = run_script(script, cwd=tmp_path, fresh=True)
    assert done.stdout.split() == ["begun", "PASS"], done.stderr


def test_the_server_of_checks_holds_torch_and_nothing_of_the_core(tmp_path):
    script = tmp_path / "preloaded.py"
    script.write_text("import sys, gc, shared.course.preloaded\nprint(gc.get_freeze_count(), *sys.modules)")
    frozen, *found = run_script(script, cwd=tmp_path, fresh=True).stdout.split()
    assert {"torch", "cloudpickle", "shared.course.running"} <= {*found} and int(frozen) > 100_000
    assert not {name for name in found if name.startswith("shared.") and not name.startswith("shared.course")}


def test_nothing_is_collected_while_torch_is_imported(monkeypatch):
    with all_stays():
        assert gc.isenabled()  # it is there already
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with all_stays():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
