"""What the command says of builds: which stages fail, whose hints are opened, what counts as passed, and what has changed since."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from workspace import Learner

from shared.course import assignments, build_check, check_command
from shared.course.checking import Case, Check
from shared.course.errors import CourseError
from shared.course.judging import Judge
from shared.course.progress import ALL_HINTS, Progress
from shared.course.report import FAIL, NOT_ATTEMPTED, PASS, Outcome, plain
from shared.course.status import build_lines
from shared.course.stubs import BodyFile

BUILD = assignments.builds()["07.build"]
NAMES = [stage.id for stage in BUILD.stages]


@pytest.fixture
def learner(tmp_path):
    learner = Learner(tmp_path)
    learner.course("reset", BUILD.id)
    return learner


def said(
    monkeypatch, folder, states: list[str], reference: bool = False
) -> tuple[int, str, list]:
    """Exit code and text of a check whose stages come out so, and the files that were checked. Nothing is run."""
    seen, text = [], io.StringIO()

    def outcomes(build, stages, file):
        for stage, state in zip(stages, states, strict=True):
            seen.append(file.path)
            reason = {
                PASS: [],
                FAIL: [f"{stage.name} is wrong"],
                NOT_ATTEMPTED: ["Nothing is written yet."],
            }[state]
            yield Outcome(stage.id, state, problem=reason, fingerprint="f")

    monkeypatch.setattr(build_check, "check_build", outcomes)
    monkeypatch.setattr(check_command, "find_workspace", lambda: folder)
    code = check_command.check_build(Console(file=text, width=200), BUILD, None, not reference)
    return code, text.getvalue(), seen


def test_one_failure_is_explained_and_the_others_are_named(learner, monkeypatch):
    code, text, _ = said(
        monkeypatch, learner.folder, [FAIL, FAIL, *[PASS] * (len(NAMES) - 2)]
    )
    first, second = (stage.name for stage in BUILD.stages[:2])
    assert (
        code == 1 and f"{first} is wrong" in text and f"{second} is wrong" not in text
    )
    assert (
        f"`course check {NAMES[1]}` shows it." in text
        and f"`course check {NAMES[0]}` shows it." not in text
    )
    assert "To think about" not in text


def test_what_is_not_written_is_said_once_and_each_stage_has_its_own_title_and_minutes(
    learner, monkeypatch
):
    code, text, _ = said(monkeypatch, learner.folder, [NOT_ATTEMPTED] * len(NAMES))
    assert code == 2 and text.count("Nothing is written yet.") == 1
    assert all(
        f"{stage.title}: about {stage.minutes} minutes." in text
        for stage in BUILD.stages
    )


def test_the_question_comes_after_all_stages_and_passes_are_kept(learner, monkeypatch):
    code, text, seen = said(monkeypatch, learner.folder, [PASS] * len(NAMES))
    assert (
        code == 0
        and "To think about" in text
        and BUILD.after.split()[0] in text
        and set(seen) == {BUILD.file(learner.folder)}
    )
    assert all(Progress(learner.folder).passed(name) == "f" for name in NAMES)


def test_a_check_of_the_solution_reads_the_solution_and_keeps_nothing(
    learner, monkeypatch
):
    code, _, seen = said(
        monkeypatch, learner.folder, [PASS] * len(NAMES), reference=True
    )
    assert (
        code == 0
        and set(seen) == {BUILD.solution_file}
        and not Progress(learner.folder).read()
    )


def test_hints_are_those_of_the_stage_that_is_named_and_else_of_the_first_open_one(
    learner,
):
    assert learner.course("hint", NAMES[3]).stdout.startswith(
        f"{NAMES[3]}  hint 1 of 3"
    )
    learner.progress.record_check(NAMES[0], "f")
    assert learner.course("hint", BUILD.id).stdout.startswith(
        f"{NAMES[1]}  hint 1 of 3"
    )


def test_the_solution_opens_after_the_third_hint_of_a_stage_or_after_all_stages(
    learner,
):
    for hint in range(ALL_HINTS):
        assert learner.course("solution", NAMES[2]).exit_code == 1, (
            f"{hint} hints were read"
        )
        learner.progress.record_hint(NAMES[2], hint + 1)
    assert (
        learner.course("solution", NAMES[2]).exit_code == 0
        and learner.course("solution", BUILD.id).exit_code == 1
    )
    for number, name in enumerate(NAMES):
        assert learner.course("solution", NAMES[-1]).exit_code == 1, (
            f"{number} stages have passed"
        )
        learner.progress.record_check(name, "f")
    assert learner.course("solution", NAMES[-1]).exit_code == 0


def test_status_says_whether_a_build_has_changed_since_it_passed(learner):
    def status():
        return plain(build_lines(learner.folder))

    path, solution = (
        BUILD.file(learner.folder),
        BUILD.solution_file.read_text(encoding="utf-8"),
    )
    path.write_text(solution, encoding="utf-8")
    assert f"0 of {len(NAMES)} stages passed" in status() and "changed" not in status()
    for name in NAMES[:2]:
        learner.progress.record_check(name, assignments.fingerprint(BodyFile.read(path)))
    assert f"2 of {len(NAMES)} stages passed" in status() and "changed" not in status()
    path.write_text(f"{solution}# a comment\n", encoding="utf-8")
    assert "changed" not in status()
    path.write_text(f"{solution}\nMORE = 1\n", encoding="utf-8")
    assert f"2 of {len(NAMES)} stages passed, changed since" in status()
    path.write_text("def (\n", encoding="utf-8")
    assert "07.build  file cannot be read" in status()


@pytest.mark.parametrize(
    "edits, times",
    [([("a", "c")], 2), ([("z", "c")], 0), ([("b", "z"), ("b", "c")], 0)],
)
def test_an_edit_of_a_solution_must_fit_once(edits, times):
    with pytest.raises(
        CourseError, match=rf"the one: '\w' is {times} times in the solution, not once"
    ):
        assignments.with_edits("a b a", edits, "the one")


def test_a_wrong_function_is_reported_though_the_next_one_is_not_written_yet():
    """Its diagnosis asks later cases, which call the function that is missing."""

    def unwritten() -> int:
        raise NotImplementedError("second is not written yet")

    def case(name: str) -> Case:
        return Case("property", name, dict, lambda: {"y": 1}, "arithmetic", lambda functions: {"y": getattr(functions, name)()})

    check = Check("07.build.weights", ("y",), [case("first"), case("second")], ("y",))
    mistake = build_check.Functions(SimpleNamespace(first=lambda: 2, second=lambda: 1))
    kept = []
    answer = build_check.Functions(SimpleNamespace(first=lambda: 2, second=unwritten))
    outcome = build_check.run_stage(Judge(check, {"first counts from 1.": mistake}), answer, kept.append)
    assert (outcome.state, outcome.title) == (FAIL, "first") and kept == [outcome]
    alone = build_check.Functions(SimpleNamespace(first=lambda: 1, second=unwritten))
    assert build_check.run_stage(Judge(check, {}), alone).state == NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("result", "said"), [(None, "returned None"), ([1], "returned an object of type list")]
)
def test_a_result_that_the_check_cannot_read_is_said_to_be_the_learners(result, said):
    """The error is the check's own, and its words name nothing that the learner wrote."""
    pairs = lambda functions: {"pairs": dict(functions.read_pairs())}  # noqa: E731
    check = Check("07.build.weights", ("pairs",), [Case("property", "pairs", dict, lambda: {"pairs": {}}, "arithmetic", pairs)], ())
    answer = build_check.Functions(SimpleNamespace(read_pairs=lambda: result))
    problem = build_check.run_stage(Judge(check, {}), answer).problem
    place = next(number for number, line in enumerate(problem) if line.startswith("raised    TypeError"))
    assert problem[place + 1].strip() == f"in the check, after your read_pairs {said}"


def test_an_error_within_a_function_is_not_put_down_to_an_earlier_result():
    def second() -> int:
        raise KeyError("left")

    both = lambda functions: {"y": functions.first() and functions.second()}  # noqa: E731
    check = Check("07.build.weights", ("y",), [Case("property", "both", dict, lambda: {"y": 1}, "arithmetic", both)], ())
    answer = build_check.Functions(SimpleNamespace(first=lambda: 1, second=second))
    assert not any("in the check" in line for line in build_check.run_stage(Judge(check, {}), answer).problem)
