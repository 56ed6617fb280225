"""Stages of build 12 wait until they are begun, and lazy builds fail at each: those that do nothing, return x, or refuse everything."""

import ast
import inspect
from types import SimpleNamespace

import pytest

from shared.course import build_check, builds
from shared.course.outcome import FAIL, NOT_ATTEMPTED, PASS
from shared.course.stubs import BodyFile

BUILD = builds.builds()["12.build"]
STAGES = build_check.read_checks(BUILD.checks)
OWN = {
    "cache": ["prefill", "append"], "greedy": ["greedy"], "draw": ["draw"], "sample": ["sample"], "refill": ["serve"],
    "score": ["score"], "reward": ["verify"], "advantages": ["advantages"], "loss": ["token_losses", "token_weights"],
    "update": ["update"], "train": ["start", "advance"], "resume": ["save", "resume"], "bad_input": ["check_settings"],
}  # fmt: skip


def functions_with(replaced: dict[str, object]) -> build_check.Functions:
    """The solution, but with other functions where the checks call them; what it calls itself stays."""
    solution = build_check.load(BodyFile.read(BUILD.solution_file), BUILD.adapters)
    unwritten = build_check.load(BodyFile.parsed(BUILD.solution_file, BUILD.template), BUILD.adapters)
    named = {name: getattr(solution.module, name) for name in BUILD.adapters}
    named |= {name: other or getattr(unwritten.module, name) for name, other in replaced.items()}
    return build_check.Functions(SimpleNamespace(**named))


def states(functions: build_check.Functions, stages: list[str]) -> dict[str, str]:
    found = {}
    for stage in stages:
        functions.missing = ""
        found[stage] = build_check.run_stage(STAGES[stage], functions, {}).state
    return found


def test_each_function_belongs_to_one_stage_and_stages_come_in_this_order():
    assert [stage.name for stage in BUILD.stages] == list(STAGES) == list(OWN)
    assert [name for names in OWN.values() for name in names] == list(BUILD.adapters)


@pytest.mark.parametrize(
    "done", [pytest.param(done, marks=[] if done in (2, 8) else [pytest.mark.slow]) for done in range(len(OWN) + 1)]
)
def test_a_learner_who_has_come_so_far_sees_no_fail_behind_it(done):
    """Stages that are done pass without the functions of those behind, which are NOT ATTEMPTED."""
    names = list(OWN)
    functions = functions_with(dict.fromkeys(name for stage in names[done:] for name in OWN[stage]))
    wanted = {stage: PASS if names.index(stage) < done else NOT_ATTEMPTED for stage in names[max(0, done - 1) :]}
    assert states(functions, list(wanted)) == wanted


def test_broken_beginnings_do_not_fail_later_stages():
    def broken(*given):
        raise RuntimeError("half written")

    left = list(OWN)[5:]
    functions = functions_with(dict.fromkeys(name for stage in left for name in OWN[stage]) | dict.fromkeys(("prefill", "draw"), broken))
    assert states(functions, left) == dict.fromkeys(left, NOT_ATTEMPTED)


LAZY = {
    "does nothing": {name: (lambda *given: None) for name in BUILD.adapters},
    "returns its first argument": {name: (lambda first, *given: first) for name in BUILD.adapters},
    "returns nothing found": {name: (lambda *given: {}) for name in BUILD.adapters},
    "refuses everything": {
        name: (lambda *given: (_ for _ in ()).throw(ValueError("limit rows seeds prompt 0"))) for name in BUILD.adapters
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("stage", OWN)
def test_a_lazy_build_fails_at_every_stage(lazy, stage):
    """Also where only the stage's own functions are lazy, and the earlier ones are right."""
    for replaced in (LAZY[lazy], {name: LAZY[lazy][name] for name in OWN[stage]}):
        assert build_check.run_stage(STAGES[stage], functions_with(replaced), {}).state == FAIL, (lazy, stage)


def test_the_released_functions_have_the_parameters_of_the_solution():
    unwritten = {node.name: node for node in ast.parse(BUILD.template).body if isinstance(node, ast.FunctionDef)}
    solution = build_check.load(BodyFile.read(BUILD.solution_file), BUILD.adapters).module
    for name, node in unwritten.items():
        assert [argument.arg for argument in node.args.args] == list(inspect.signature(getattr(solution, name)).parameters), name
