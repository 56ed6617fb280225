"""Reading the core with `course map` and `course read`: complete, in place, and nothing given away."""

import ast
import subprocess

import pytest
from import_graph import import_graph
from workspace import COMMAND, Learner

from shared.course import catalogue, reading, rings, stubs

FIRST = "01.cross_entropy"


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


def test_map_lists_every_module_of_the_chapter_and_marks_exercises(learner):
    told = learner.course("map", "1").stdout
    assert all(f"\n{room.module}\n" in told for room in reading.rooms("01")) and "shared.course" not in told
    for exercise in learner.chapter.exercises:
        assert f"\n  * {exercise.name}: " in told
    assert "\n    train: Train for `steps` steps" in told


def test_read_withholds_what_is_not_done(learner):
    closed = learner.course("read", "shared.loss").stdout
    assert "logsumexp(dim=-1)" not in closed and f"`course solution {FIRST}` opens the body" in closed
    opened = learner.course("read", "shared/loss.py", "--reveal").stdout
    assert "# logsumexp subtracts the largest logit" in opened
    learner.write("cross_entropy", "return mine")
    assert "\n    return mine\n" in learner.course("read", "loss", "--impl", "mine").stdout
    learner.progress.record_check(FIRST, "a fingerprint")
    assert learner.course("read", "shared.loss").stdout == opened


@pytest.mark.parametrize("contract", catalogue.contracts().values(), ids=lambda contract: contract.exercise)
def test_a_module_read_in_place_holds_the_solutions_statements(learner, contract):
    shown = ast.parse(learner.course("read", contract.module, "--reveal").stdout)
    [function] = [node for node in shown.body if getattr(node, "name", "") == contract.function]
    solution = stubs.BodyFile.read(catalogue.chapter_of(contract.exercise).solution_file).function(contract.function)
    assert list(map(ast.dump, stubs.without_docstring(function))) == list(map(ast.dump, stubs.without_docstring(solution)))


def test_a_pipe_that_closes_early_is_no_error(learner):
    script = f"{' '.join(map(repr, COMMAND[:2]))} '{COMMAND[2]}' read corpus | head -1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", script], cwd=learner.folder, capture_output=True, text=True, timeout=180)
    assert ended.stdout.startswith('"""Chapter 01.') and "Traceback" not in ended.stderr


def test_spine_is_read_in_a_weekend_and_never_jumps_ahead():
    """The modules exist, each stands after those of the spine that it imports, and the minutes fit the lines."""
    counts = {stop.path: stop.lines for stop in rings.SPINE}
    assert len(counts) == len(rings.SPINE) and 25 <= len(counts) <= 32 and 4500 <= sum(counts.values()) <= 7000
    assert sum(stop.minutes for stop in rings.SPINE) <= 16 * 60
    assert all(2 <= counts[stop.path] / stop.minutes <= 13 for stop in rings.SPINE)
    modules, graph = [catalogue.module_name(stop.file) for stop in rings.SPINE[1:]], import_graph()
    for place, module in enumerate(modules):
        assert not (later := graph[module] & set(modules[place + 1 :])), f"{module} imports {later}, which the spine lists after it"


def test_spine_holds_the_training_step_of_every_chapter():
    """Chapters in rising order, none left out, and the exercises that a step of the trainer cannot do without."""
    docstrings = [ast.get_docstring(ast.parse(stop.file.read_text(encoding="utf-8"))) for stop in rings.SPINE[1:]]
    chapters = [reading.CHAPTER_LINE.match(docstring)[1] for docstring in docstrings]
    assert chapters == sorted(chapters) and {*chapters} == {*catalogue.chapters(), "12"}
    paths = {stop.file for stop in rings.SPINE}
    for name in ("01.train_step", "02.block_forward", "03.pack_documents", "05.muon_update", "06.sync_buckets", "06.unshard_unit"):
        assert catalogue.contracts()[name].path in paths


def test_map_of_the_spine_prints_each_module_with_lines_and_minutes(learner):
    shown = learner.course("map", "--spine").stdout
    for stop in rings.SPINE:
        assert f"\n{stop.lines:>5}  {stop.minutes:>3}  {stop.path} " in shown
    assert learner.course("map", "01", "--spine").exit_code == 64


def test_map_counts_the_core_by_chapter(learner):
    source = 'r"""One.\n\nMore."""\n\n# Why.\nA = """\ntext\n"""\n\n\ndef f():\n    """Two."""\n    return A  # three\n'
    assert reading.code_lines(source) == 5  # the text of A is three lines
    shown = learner.course("map")
    rows = {line.split()[0]: [int(each.replace(",", "")) for each in line.split()[1:]] for line in shown.stdout.splitlines()[3:16]}
    assert shown.exit_code == 0 and list(rows) == [*(chapter.slug for chapter in catalogue.chapters().values()), "all"]
    assert rows["all"] == [sum(column) for column in zip(*(row for name, row in rows.items() if name != "all"), strict=True)]
    assert rows["06_data_parallel"][0] == len(reading.rooms("06")) and all(row[1] > row[2] > row[0] for row in rows.values())
