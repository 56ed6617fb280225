"""Builds test themselves: solutions pass every stage, wrong builds fail at theirs with their own sentence, right ones pass."""

import re
from functools import cache

import pytest
from known_builds import Known
from reached import Original
from workspace import Learner

from shared.course import assignments, build_check, maintainer_commands, status
from shared.course.assignments import with_edits
from shared.course.errors import BrokenFile
from shared.course.paths import CHECKOUT
from shared.course.progress import Progress
from shared.course.report import FAIL, NOT_ATTEMPTED, PASS, plain
from shared.course.stubs import BodyFile

BUILDS = assignments.builds()
RIGHT = CHECKOUT / "tests" / "exercises" / "builds"
WRONG = {f"{build.id}-{name}": (build, entry) for build in BUILDS.values() for name, entry in build.wrong_builds().items()}
by_build = pytest.mark.parametrize("build", BUILDS.values(), ids=lambda build: build.id)


@pytest.fixture(scope="module")
def known():
    """What is known of each build, found out once."""
    return cache(lambda build_id: Known(BUILDS[build_id]))


def climb(build, functions, judge_of):
    """Outcomes of all stages, up to the first that fails."""
    outcomes = []
    for stage in build.stages:
        outcomes.append(build_check.run_stage(judge_of(stage.name), functions))
        if outcomes[-1].state != PASS:
            break
    return outcomes


@pytest.mark.check
@by_build
def test_the_solution_passes_every_stage(build, known):
    assert [stage.name for stage in build.stages] == list(known(build.id).checks)
    outcomes = climb(build, known(build.id).functions, known(build.id).solution_judge)
    assert [outcome.state for outcome in outcomes] == [PASS] * len(build.stages), outcomes[-1]


@pytest.mark.parametrize("path", sorted(RIGHT.glob("*/right_*.py")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_right_builds_that_are_not_the_solution_pass(path, known):
    build = next(build for build in BUILDS.values() if build.slug == path.parent.name)
    file = BodyFile.read(path)
    assert not build_check.forbidden_import(file, build)
    outcomes = climb(build, build_check.load(file, build.adapters), known(build.id).right_judge)
    assert [outcome.state for outcome in outcomes] == [PASS] * len(build.stages), outcomes[-1]


@pytest.mark.parametrize("name", [name for name, (_, entry) in WRONG.items() if not entry.slow])
def test_each_wrong_build_fails_at_its_stage_with_its_own_sentence(name, known):
    """Compared with the wrong builds of its stage and before, on the cases that their edits reach."""
    build, entry = WRONG[name]
    of_build = known(build.id)
    outcome = build_check.run_stage(of_build.stage_judge(entry.stage), of_build.again(entry.name), confirm=False)
    assert (outcome.state, outcome.misconception) == (FAIL, entry.says), outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_build_is_told_from_those_of_all_stages(name, known):
    build, entry = WRONG[name]
    of_build = known(build.id)
    outcome = build_check.run_stage(of_build.whole_judge(entry.stage), of_build.again(entry.name), confirm=False)
    assert (outcome.state, outcome.misconception) == (FAIL, entry.says), outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_build_passes_the_stages_before_its_own(name, known):
    build, entry = WRONG[name]
    assert list(known(build.id).rejecting(entry.name)) == []


@by_build
def test_the_fast_suite_tries_a_wrong_build_of_each_stage(build):
    """Those that `wrong.toml` leaves to the slow suite are left out for their time alone."""
    assert {entry.stage for entry in build.wrong_builds().values() if not entry.slow} == {stage.name for stage in build.stages}


SOURCE = """import math

LIMIT = 3

def first(x):
    if x > LIMIT:
        y = x - 1
        return y
    return x

def second(x):
    return first(x) + math.pi

class Third:
    def run(self):
        return LIMIT
"""


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        (("y = x - 1", "y = x - 2"), {6, 7, 8}),
        (("    return x\n", "    x = -x\n    return x\n"), {8, 9}),
        (("        return y", "    return y"), {5, 6, 7, 8, 9}),
        (("y = x - 1", "math = x - 1"), {5, 6, 7, 8, 9}),
        (("def second(x):", "def second(x, y=1):"), {11, 12}),
        (("import math", "import math, sys"), {1, 2}),
        (("class Third", "def fourth():\n    return 4\n\nclass Third"), {13, 14}),
        (("LIMIT = 3", "LIMIT = 4"), None),
        (("return LIMIT", "return LIMIT\n\n    def train(self):\n        return 1"), None),
        (("class Third", "class Third(dict)"), None),
    ],
)
def test_an_edit_concerns_the_lines_that_can_run_otherwise(edit, changed):
    found = Original(SOURCE).changed_by(with_edits(SOURCE, [edit], "SOURCE"))
    near = {line + beside for line in changed or () for beside in (-1, 0, 1)}
    assert found is changed is None or changed <= found <= near


def test_cases_that_an_edit_does_not_reach_are_judged_as_the_solution_is(known):
    """A sample of chapter 01's wrong builds on the cases that are left out for them: each passes there, as the solution does."""
    of_build = known("01.build")
    for name, wrong in [*of_build.wrong.items()][::12]:
        for stage, check in of_build.checks.items():
            judge = of_build.whole_judge(stage)
            for case in (case for case in check.cases[::5] if not of_build.can_tell(stage, case, wrong.changed)):
                assert not judge.rejects(case, judge.answer(wrong)), (name, case.title)


@by_build
def test_the_released_file_is_the_adapters_text_and_not_attempted(build):
    """Unless it holds a learner's work, of whatever kind."""
    try:
        assert build.is_released(CHECKOUT) or build.attempted(BodyFile.read(build.file(CHECKOUT))), f"`course reset {build.id}`"
    except BrokenFile:
        pass
    assert not build.attempted(BodyFile.parsed(build.file(CHECKOUT), build.template))
    assert set(build.adapters) <= {node.name for node in BodyFile.read(build.solution_file).tree.body if hasattr(node, "name")}


@by_build
def test_the_text_names_every_stage_and_each_has_three_hints(build):
    for stage in build.stages:
        assert stage.name in build.template and stage.minutes > 0 and stage.title
        assert len(stage.hints) == 3 and all(hint.strip() for hint in stage.hints)
    assert 120 <= build.minutes <= 300 and len(build.solution_file.read_text(encoding="utf-8").splitlines()) <= 260


@by_build
def test_the_chapters_page_lists_stages_and_repairs(build):
    text = (build.file(CHECKOUT).parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (\d+) \|$", text, re.M)
    assert rows == [(stage.name, stage.title, str(stage.minutes)) for stage in build.stages]
    listed = re.findall(r"^\| `(\w)` \| ([^|]+) \|$", text, re.M)
    assert listed == [(hunt.letter, hunt.title) for hunt in assignments.hunts().values() if hunt.slug == build.slug]


@pytest.fixture
def learner(tmp_path):
    learner = Learner(tmp_path)
    learner.course("reset", "07.build")
    learner.build = BUILDS["07.build"].file(tmp_path)
    return learner


def write(learner, solution: str, *edits: tuple[str, str]) -> None:
    for old, new in edits:
        assert solution.count(old) == 1, old
        solution = solution.replace(old, new)
    learner.build.write_text(solution, encoding="utf-8")


SOLUTION = BUILDS["07.build"].solution_file.read_text(encoding="utf-8")
FIRST = "07.build.weights"
TOP, INSIDE = "from torch import Tensor\n", "        self.partial = {}\n"


def test_an_untouched_build_is_not_attempted(learner):
    checked = learner.course("check", "07.build")
    assert checked.exit_code == 2 and checked.stdout.count(NOT_ATTEMPTED) == 9 and checked.stdout.endswith("0 of 9 stages passed.\n")
    assert "07.build  not attempted" in learner.course("status").stdout


def test_a_stage_passes_on_its_own_and_is_kept(learner):
    write(learner, SOLUTION, ("    return model.attention(layer, x)\n", '    raise NotImplementedError("attention comes tomorrow")\n'))
    assert learner.course("check", FIRST).exit_code == 0
    tomorrow = learner.course("check", "07.build.attention")
    assert tomorrow.exit_code == 2 and "attention comes tomorrow" in tomorrow.stdout
    assert "07.build  1 of 9 stages passed" in learner.course("status").stdout
    assert learner.course("hint", "07.build").stdout.startswith("07.build.feed_forward  hint 1 of 3")
    assert learner.course("solution", "07.build").exit_code == 1
    learner.course("hint", "07.build")
    learner.course("hint", "07.build")
    assert "def plan(config" in learner.course("solution", "07.build").stdout
    assert "Your text is kept" in learner.course("reset", "07.build").stdout and learner.build.read_text() == BUILDS["07.build"].template


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ((TOP, f"from shared.parallel.tensor.axis import Cutter\n{TOP}"), "is what this build is to write"),
        ((TOP, f"import importlib\nimportlib.import_module('shared.parallel.tensor')\n{TOP}"), "Your code imported"),
        ((TOP, f"open('solutions/builds/07_tensor_parallel.py')\n{TOP}"), "this reads the solution"),
        (("def state(model):", "@torch.no_grad()\ndef state(model):"), "must be a plain function written in this file"),
        (("def state(model):", "def other(model):"), "has no function 'state'"),
        ((TOP, f"{TOP}}}\n"), "build.py, line 18: Python cannot read this file"),
        ((TOP, f"no_such_name\n{TOP}"), "NameError: name 'no_such_name' is not defined"),
        ((INSIDE, f"{INSIDE}        group.rank or group.barrier()\n"), "deadlock: rank 0 waits in barrier #1"),
        ((INSIDE, f"{INSIDE}        parts = weights.missing\n"), "build.py, line"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_build_that_cannot_be_right_is_explained(learner, edit, sentence):
    write(learner, SOLUTION, edit)
    checked = learner.course("check", FIRST)
    assert checked.exit_code == 1 and sentence in " ".join(checked.stdout.split()), checked.stdout


def test_an_unknown_build_or_stage_is_refused(learner):
    assert "Its stages: weights, feed_forward" in learner.course("check", "07.build.nonsense").stderr
    assert "Chapter 13 has no build" in learner.course("check", "13.build").stderr


def test_the_build_comes_after_a_chapters_exercises(tmp_path):
    lines = plain(status.next_build_lines("07", tmp_path))
    assert lines.startswith("Then: 07.build") and "stage 1 of 9" in lines and "course check 07.build.weights" in lines
    progress = Progress(tmp_path)
    for stage in BUILDS["07.build"].stages:
        progress.record_check(stage.id, "a fingerprint")
    assert status.next_build_lines("07", tmp_path) == status.next_build_lines("13", tmp_path) == []


def test_the_generator_writes_a_missing_build_and_compares_one(learner, monkeypatch):
    monkeypatch.setattr(maintainer_commands, "chosen", lambda number: [])  # leaves the checkout's own exercises alone
    kind, file = assignments.Assignment, assignments.Assignment.file
    monkeypatch.setattr(kind, "file", lambda self, workspace: learner.build if self.id == "07.build" else file(self, workspace))
    assert "build.py" not in learner.course("stubs", "--check").stdout
    write(learner, SOLUTION)
    compared = learner.course("stubs", "--check")
    assert compared.exit_code == 1 and "`course reset 07.build` copies it" in compared.stdout
    learner.course("stubs")
    assert learner.build.read_text(encoding="utf-8") == SOLUTION, "a learner's work stays"
    learner.build.unlink()
    assert "build.py is missing" in learner.course("check", "07.build").stdout
    learner.course("stubs")
    assert learner.build.read_text(encoding="utf-8") == BUILDS["07.build"].template
