"""Stages of a build wait until they are begun, and lazy builds fail at each: those that do nothing, return x, or refuse everything."""

import ast
import inspect
from functools import cache
from types import ModuleType

import pytest

from shared.course import assignments, build_check
from shared.course.judging import Judge
from shared.course.report import FAIL, NOT_ATTEMPTED, PASS
from shared.course.stubs import BodyFile

BUILDS = assignments.builds()
# The functions that a stage is the first to need. A stage without any asks more of those before it.
OWN = {
    "01.build": {
        "batches": ["split", "windows"], "model": ["new_model"], "loss": ["loss"], "step": ["step"], "evaluate": ["evaluate"],
        "sample": ["sample"], "train": ["start", "advance", "model_of"], "resume": ["save", "resume"], "bad_input": [],
    },
    "02.build": {
        "config": ["settings"], "tensors": ["tensors"], "create": ["create", "state"], "load": ["load"], "logits": ["logits"],
        "rope": ["frequencies"], "packed": ["packed_logits"], "gradients": ["loss", "gradients"], "half": [], "save": ["save"],
        "budgets": [], "bad_input": [],
    },
    "03.build": {
        "words": ["words"], "train": ["train", "merges", "vocabulary"], "encode": ["encode", "decode"], "fast": [],
        "special": ["encode_special"], "files": ["save", "load"], "pack": ["pack"],
        "loader": ["start", "next_batch", "state", "restore"], "bad_input": ["read_texts"],
    },
    "04.build": {
        "steps": ["make_engine", "run"], "metrics": [], "evaluate": ["evaluate"], "save": ["save", "saved", "resume"], "kill": [],
        "power": [], "resume": [], "signal": [], "bad_input": ["check_settings"],
    },
    "05.build": {
        "route": ["route"], "adamw": ["make"], "newton_schulz": ["newton_schulz"], "muon": [], "groups": [], "clip": ["clip"],
        "resume": ["state", "load"], "precision": ["loss_scale", "scale_of", "update"], "budgets": [], "bad_input": [],
    },
    "06.build": {
        "start": ["make_replica"], "gradients": ["backward", "gradients"], "buckets": [], "accumulate": [],
        "zero": ["make_zero", "update"], "gather": ["make_sharded", "forward"], "reduce": [], "recompute": [], "clip": [],
        "state": ["state", "load"], "budgets": [], "bad_input": [],
    },
    "07.build": {
        "weights": ["make_model", "state", "layout"], "feed_forward": ["feed_forward"], "attention": ["attention"],
        "vocabulary": ["embed", "head_loss"], "model": ["loss_and_gradients", "logits"], "four_ranks": [], "sequence_parallel": [],
        "budgets": [], "bad_input": [],
    },
    "08.build": {
        "cut": ["make_pipeline", "state"], "forward": ["losses"], "backward": ["step", "gradients"], "schedule": [], "chunks": [],
        "refuse": [], "split": [], "ends": ["gradient_norm"], "budgets": [], "bad_input": [],
    },
    "09.build": {
        "route": ["route"], "dispatch": ["dispatch"], "experts": ["run_experts"], "layer": ["make_layer", "state", "forward"],
        "losses": ["auxiliary_losses"], "exchange": ["exchange"], "spread": [], "gradients": ["step", "gradients", "gradient_norm"],
        "balance": ["update_bias"], "recompute": [], "budgets": [], "bad_input": [],
    },
    "10.build": {
        "targets": ["targets"], "inject": ["attach", "factors", "run", "weights"], "start": ["initial"], "train": ["step"],
        "merge": ["merge", "unmerge"], "several": ["add", "use"], "save": ["save"], "load": ["load"],
        "ranks": ["cut", "run_cut", "cut_gradients"], "four_bits": ["frozen_linear"], "budgets": ["count_trained"],
        "bad_input": ["check_config"],
    },
    "11.build": {
        "read": ["split_pair", "read_pairs"], "encode": ["encode"], "rows": ["rows", "predictions"], "log_probs": ["log_probs"],
        "reference": ["score"], "loss": ["dpo"], "relatives": ["losses"], "step": ["step"], "metrics": ["evaluate"],
        "train": ["start", "advance"], "resume": ["save", "resume"], "budgets": ["micro_batches"], "bad_input": ["check_settings"],
    },
    "12.build": {
        "cache": ["prefill", "append"], "greedy": ["greedy"], "draw": ["draw"], "sample": ["sample"], "refill": ["serve"],
        "score": ["score"], "reward": ["verify"], "advantages": ["advantages"], "loss": ["token_losses", "token_weights"],
        "update": ["update"], "train": ["start", "advance"], "resume": ["save", "resume"], "bad_input": ["check_settings"],
    },
}  # fmt: skip
GROUPED = ["06.build"]  # its three functions that make something stand together
QUICK = {  # how far a learner has come in the fast suite
    "01.build": (3, 4), "02.build": (1, 11), "03.build": (2, 7), "04.build": (2, 8), "05.build": (1, 9), "06.build": (1, 11),
    "07.build": (2, 8), "08.build": (1, 9), "09.build": (2, 11), "10.build": (1, 8), "11.build": (2, 8), "12.build": (2, 8),
}  # fmt: skip
FAR = [(build, done) for build, own in OWN.items() for done in range(len(own) + 1)]
# Begun before stage number `since`, and broken: the stages from there on wait all the same.
BROKEN = {
    "01.build": (6, ["new_model", "loss"]), "02.build": (6, ["load", "state"]), "03.build": (4, ["train", "merges"]),
    "04.build": (2, ["make_engine", "run"]), "05.build": (5, ["make", "route"]), "06.build": (9, ["make_replica", "backward"]),
    "07.build": (1, ["make_model", "state"]), "08.build": (7, ["make_pipeline", "step"]), "09.build": (5, ["make_layer", "forward"]),
    "10.build": (2, ["attach", "run"]), "11.build": (4, ["rows", "log_probs"]), "12.build": (5, ["prefill", "draw"]),
}  # fmt: skip
# What a build says that refuses everything: words that the refusals of its checks ask for.
SAYS = {"10.build": "r lora_alpha 0", "11.build": "chosen rejected prompt 0", "12.build": "limit rows seeds prompt 0"}
LAZY = ["does nothing", "returns its first argument", "returns nothing found", "refuses everything"]
by_build = pytest.mark.parametrize("build", OWN)


@cache
def stages_of(build: str) -> dict:
    return build_check.read_checks(BUILDS[build].checks)


def functions_with(build: str, replaced: dict[str, object]) -> build_check.Functions:
    """The solution, but with other functions where the checks call them, or unwritten ones; what it calls itself stays."""
    entry = BUILDS[build]
    solution = build_check.load(BodyFile.read(entry.solution_file), entry.adapters).module
    unwritten = build_check.load(BodyFile.parsed(entry.solution_file, entry.template), entry.adapters).module
    mixed = ModuleType("mixed")
    mixed.__file__ = str(entry.solution_file)
    vars(mixed).update({name: getattr(solution, name) for name in entry.adapters})
    vars(mixed).update({name: other or getattr(unwritten, name) for name, other in replaced.items()})
    return build_check.Functions(mixed)


def states(build: str, functions: build_check.Functions, stages: list[str]) -> dict[str, str]:
    found = {}
    for stage in stages:
        functions.missing = ""
        found[stage] = build_check.run_stage(Judge(stages_of(build)[stage], {}), functions).state
    return found


def unwritten_from(build: str, since: int) -> dict[str, None]:
    return dict.fromkeys(name for names in list(OWN[build].values())[since:] for name in names)


def lazy_functions(build: str, lazy: str) -> dict[str, object]:
    def refuse(*given):
        raise ValueError(SAYS.get(build, "0"))

    answers = [lambda *given: None, lambda first, *given: first, lambda *given: {}, refuse]
    return dict.fromkeys(BUILDS[build].adapters, answers[LAZY.index(lazy)])


@by_build
def test_each_function_belongs_to_one_stage_and_stages_come_in_this_order(build):
    assert [stage.name for stage in BUILDS[build].stages] == list(stages_of(build)) == list(OWN[build])
    own, adapters = [name for names in OWN[build].values() for name in names], list(BUILDS[build].adapters)
    assert own == adapters or (build in GROUPED and sorted(own) == sorted(adapters))


@pytest.mark.parametrize(
    ("build", "done"), [pytest.param(*far, marks=[] if far[1] in QUICK[far[0]] else [pytest.mark.slow]) for far in FAR]
)
def test_a_learner_who_has_come_so_far_sees_no_fail_behind_it(build, done):
    """Stages that are done pass without the functions of those behind, which are NOT ATTEMPTED: all that begin a function of their own."""
    names = list(OWN[build])
    found = states(build, functions_with(build, unwritten_from(build, done)), names[max(0, done - 1) :])
    wanted = {stage: PASS if names.index(stage) < done else NOT_ATTEMPTED for stage in found}
    begun_by_others = [stage for stage in names[done:] if not OWN[build][stage]]
    assert found == wanted | {stage: PASS for stage in begun_by_others if found[stage] == PASS}


@by_build
def test_broken_beginnings_do_not_fail_later_stages(build):
    def broken(*given):
        raise RuntimeError("half written")

    since, begun = BROKEN[build]
    functions = functions_with(build, unwritten_from(build, since) | dict.fromkeys(begun, broken))
    later = [stage for stage in list(OWN[build])[since:] if OWN[build][stage]]
    assert later and states(build, functions, later) == dict.fromkeys(later, NOT_ATTEMPTED)


@pytest.mark.slow
@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize(("build", "stage"), [(build, stage) for build, own in OWN.items() for stage in own])
def test_a_lazy_build_fails_at_every_stage(build, stage, lazy):
    """Also where only the stage's own functions are lazy, and the earlier ones are right."""
    every = lazy_functions(build, lazy)
    for replaced in (every, {name: every[name] for name in OWN[build][stage] or every}):
        assert states(build, functions_with(build, replaced), [stage]) == {stage: FAIL}


@by_build
def test_the_released_functions_have_the_parameters_of_the_solution(build):
    unwritten = {node.name: node for node in ast.parse(BUILDS[build].template).body if isinstance(node, ast.FunctionDef)}
    solution = build_check.load(BodyFile.read(BUILDS[build].solution_file), BUILDS[build].adapters).module
    for name, node in unwritten.items():
        asked = [argument.arg for argument in node.args.args] + ([node.args.vararg.arg] if node.args.vararg else [])
        assert asked == list(inspect.signature(getattr(solution, name)).parameters), name
