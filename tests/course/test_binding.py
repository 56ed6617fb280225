"""How a contract gets its body: a plain function remains, from the file that was chosen, and wrong files are refused."""

import ast
import inspect
import multiprocessing
import pickle
import subprocess
import textwrap

import pytest
import torch
from scripts import run_script

from shared import loop, loss
from shared.course import catalogue, stubs
from shared.course.binding import parameters
from shared.course.progress import Progress

CHAPTER = catalogue.find_chapter("01")


@pytest.fixture
def workspace(tmp_path):
    """A learner's folder with untouched stubs."""
    path = CHAPTER.stub_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(stubs.stub_file(CHAPTER), encoding="utf-8")
    return tmp_path


def write(workspace, **bodies: str) -> None:
    """Put bodies in place of stubs: the given text, or the solution's for the value "solution"."""
    path = CHAPTER.stub_file(workspace)
    solutions = stubs.BodyFile.read(CHAPTER.solution_file)
    for name, body in bodies.items():
        file = stubs.BodyFile.read(path)
        text = solutions.text(name) if body == "solution" else textwrap.dedent(body)
        path.write_text(file.source.replace(file.text(name), text), encoding="utf-8")


def write_all(workspace, **others: str) -> None:
    write(workspace, **{exercise.name: "solution" for exercise in CHAPTER.exercises} | others)


def python(workspace, code: str, **how) -> subprocess.CompletedProcess:
    script = workspace / "script.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    return run_script(script, cwd=workspace, **how)


def test_the_bound_function_is_plain_and_carries_the_contracts_name():
    function = loop.train_step
    assert type(function).__name__ == "function" and function.__closure__ is None and not hasattr(function, "__wrapped__")
    assert (function.__module__, function.__qualname__) == ("shared.loop", "train_step")
    assert function.__code__.co_filename == str(CHAPTER.solution_file)
    assert function.__doc__.startswith("One training step")
    assert inspect.getdoc(function).endswith("01_training_loop.py; `course read shared.loop` shows it in place.")


def test_getsource_shows_the_body():
    assert "logsumexp" in inspect.getsource(loss.cross_entropy)


def test_traceback_names_the_body_file():
    with pytest.raises(ValueError) as raised:
        loop.apply_update(torch.nn.Linear(1, 1), None, torch.tensor(0))
    assert raised.traceback[-1].path == CHAPTER.solution_file
    assert "raise ValueError" in str(raised.traceback[-1].statement)


def test_pickle_gives_the_same_function_here_and_under_spawn():
    assert pickle.loads(pickle.dumps(loss.cross_entropy)) is loss.cross_entropy
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        loss_sum, token_count = pool.apply(loss.cross_entropy, (torch.zeros(2, 4), torch.tensor([0, 3])))
    assert loss_sum.item() == pytest.approx(2.7725887) and token_count == 2


def test_torch_compile_traces_it_without_a_graph_break():
    compiled = torch.compile(loss.cross_entropy, fullgraph=True, backend="aot_eager")
    logits, targets = torch.randn(5, 7), torch.tensor([0, 6, -100, 2, 1])
    torch.testing.assert_close(compiled(logits, targets), loss.cross_entropy(logits, targets))


def test_mine_runs_the_learners_code_in_this_process_and_in_its_children(workspace):
    write_all(workspace, apply_update="""
        def apply_update(model, optimizer, token_count):
            raise RuntimeError("the learner's own update")
    """)
    done = python(workspace, """
        import multiprocessing
        from shared.course import binding
        if __name__ == "__main__":
            binding.choose("mine")
        from shared import loop
        if __name__ == "__main__":
            print(loop.apply_update.__code__.co_filename, binding.summary())
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                try:
                    pool.apply(loop.apply_update, (None, None, 1))
                except RuntimeError as error:
                    print("child:", error)
    """, fresh=True)
    # 4 of the 6 exercises stand in shared.loop, the one module that this script imports.
    assert str(CHAPTER.stub_file(workspace)) in done.stdout, done.stderr
    assert "4 of 4 parts are yours (implementation: mine)" in done.stdout
    assert "child: the learner's own update" in done.stdout


def test_mine_names_every_missing_part_before_any_work(workspace):
    write(workspace, cross_entropy="solution", train_step="solution")
    done = python(workspace, "from shared.course import binding; binding.choose('mine')\nimport shared.loop")
    message = done.stderr.splitlines()[-1]
    for name in ("accumulate_gradients", "apply_update", "evaluate", "sample_next"):
        assert f"01.{name}" in message
    assert "01.cross_entropy" not in message and "mixed" in message


def test_mixed_takes_the_learners_part_only_while_it_is_the_one_that_passed(workspace):
    script = """
        from shared.course import binding; binding.choose("mixed")
        import shared.loop; print(binding.origins()["01.train_step"], binding.origins()["01.evaluate"])
    """
    exercise = catalogue.find_exercise("01.train_step")
    write(workspace, train_step="solution")
    assert python(workspace, script).stdout.split() == ["reference", "reference"]
    fingerprint = stubs.BodyFile.read(CHAPTER.stub_file(workspace)).fingerprint(exercise, CHAPTER)
    assert Progress(workspace).record_check(exercise.id, fingerprint)
    assert python(workspace, script).stdout.split() == ["mine", "reference"]
    path = CHAPTER.stub_file(workspace)
    path.write_text("# a comment changes nothing\n" + path.read_text(), encoding="utf-8")
    assert python(workspace, script).stdout.split() == ["mine", "reference"]
    path.write_text(path.read_text().replace("    return reduced\n", "    return None\n", 1), encoding="utf-8")
    assert python(workspace, script).stdout.split() == ["reference", "reference"]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            "def train_step(model, optimizer, microbatches):",
            "contract: train_step(model, optimizer, microbatches, objective, runner, reducer, updater)",
        ),
        ("def train_step(model, optimiser, microbatches, objective, runner, reducer, updater):", "here:     train_step(model, optimiser, "),
        ("def train_step(model, optimizer, microbatches, objective, runner, reducer, updater=None):", "updater=None)"),
    ],
)
def test_another_signature_is_refused_with_both_shown(workspace, header, said):
    write_all(workspace, train_step=f"{header}\n    return None")
    done = python(workspace, "from shared.course import binding; binding.choose('mine')\nimport shared.loop")
    assert said in done.stderr and "contract: train_step(" in done.stderr and "here:     train_step(" in done.stderr


def test_a_decorated_body_is_refused(workspace):
    write_all(workspace, evaluate="@torch.no_grad()\ndef evaluate(model, batches, objective):\n    return None")
    done = python(workspace, "from shared.course import binding; binding.choose('mine')\nimport shared.loop")
    assert "without a decorator" in done.stderr


def test_a_file_that_raises_is_named_with_its_line(workspace):
    path = CHAPTER.stub_file(workspace)
    write_all(workspace)
    path.write_text(path.read_text() + "\n1 / 0\n", encoding="utf-8")
    done = python(workspace, "from shared.course import binding; binding.choose('mine')\nimport shared.loop")
    assert f"line {len(path.read_text().splitlines())}: ZeroDivisionError" in done.stderr


def test_the_choice_is_made_once(workspace):
    done = python(workspace, "import shared.loop\nfrom shared.course import binding; binding.choose('mine')")
    assert "bound once per process" in done.stderr


def test_the_catalogue_parses_only_files_that_may_hold_a_contract(monkeypatch):
    parsed, parse = [], ast.parse
    monkeypatch.setattr(catalogue.ast, "parse", lambda source, *how: parsed.append(source) or parse(source, *how))
    found = catalogue.contracts.__wrapped__()
    monkeypatch.undo()
    assert found.keys() == catalogue.all_exercises().keys()
    assert 0 < len(parsed) == sum("@exercise(" in path.read_text(encoding="utf-8") for path in catalogue.core_files())


@pytest.mark.parametrize(("implementation", "described"), [("reference", []), ("mine", ["01"]), ("mixed", ["01"])])
def test_binding_reads_its_own_chapter_and_no_contracts(workspace, implementation, described):
    write_all(workspace)
    done = python(workspace, f"""
        from shared.course import binding, catalogue
        binding.choose("{implementation}")
        import shared.loop
        print(catalogue.contracts.cache_info().misses, [n for n, one in catalogue.chapters().items() if "exercises" in vars(one)])
    """, fresh=True)
    assert done.stdout.strip() == f"0 {described}", done.stderr


def test_keyword_only_parameters_are_part_of_a_signature():
    def contract(a, *, b=1): ...
    def same(a, *, b=1): ...
    def other(a, b=1): ...

    assert parameters(contract) == parameters(same) != parameters(other)
