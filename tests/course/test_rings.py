"""The three rings of the core: every module is in one, and the core imports nothing of what is around it but what is listed here."""

import re

import pytest
from import_graph import import_graph
from workspace import Learner

from shared.course import catalogue, rings
from shared.course.errors import CourseError

MODULES = [catalogue.module_name(path) for path in catalogue.core_files()]
EXCEPTIONS = {  # module of the core -> what it imports of what is around it, and why; the list may only shrink
    "shared.rl.code_reward": ({"rl/sandbox"}, "the reward that runs code is what the sandbox is for"),
    "shared.trainer.mode": ({"trainer/records"}, "a run holds the changes that it was resumed with"),
    "shared.trainer.models": ({"finetune/peft_format"}, "an adapter that peft's format cannot hold is refused before training"),
    "shared.trainer.modes.rollouts": (
        {"trainer/planner", "parallel/planning"},
        "the memory that answers may take while they are generated is the planner's figure",
    ),
    "shared.trainer.run": (
        {"trainer/planner", "trainer/records", "trainer/reports", "trainer/results"},
        "the entry point: it binds training to what watches it, records it and reports on it",
    ),
    "shared.trainer.weights": (
        {f"finetune/{name}" for name in ("gguf", "quantization/nf4_files", "quantization/packed_files")},
        "start_from reads quantized weights as the frozen base of an adapter, and GGUF as the folder that it becomes",
    ),
}


def around_it(module: str) -> set[str]:
    return {name for name in rings.AROUND if rings.is_in(module, name)}


def test_the_core_imports_nothing_of_what_is_around_it():
    graph = import_graph()
    inner = [module for module in MODULES if rings.ring_of(module) != rings.AROUND_RING]
    imported = {module: set().union(*map(around_it, graph[module])) for module in inner}
    listed = {module: names for module, (names, _) in EXCEPTIONS.items()}
    assert {module: names for module, names in imported.items() if names} == listed, "import it where it is used, or shorten the list"
    assert len(EXCEPTIONS) <= 6


def test_every_module_is_in_one_ring_and_the_table_names_no_other():
    assert not rings.unknown() and {rings.ring_of(module) for module in MODULES} == set(rings.RINGS)
    assert rings.ring_of("shared.a_new_module") == rings.CORE_RING and rings.ring_of("shared.trainer.planner") == rings.AROUND_RING
    assert not [module for module in MODULES if len(around_it(module)) > 1], "two lines of the table name the same module"


@pytest.mark.parametrize("wrong", ["trainer/no_such_module", "loop", "trainer"])
def test_a_line_of_the_table_that_names_no_module_around_the_core_is_refused(monkeypatch, wrong):
    monkeypatch.setitem(rings.AROUND, wrong, "nothing")
    with pytest.raises(CourseError, match=f"names {wrong}, "):
        rings.ring_lines()


def test_map_of_the_rings_adds_up_to_the_whole_core(tmp_path):
    learner = Learner(tmp_path)
    printed = learner.course("map", "--rings").stdout
    rows = {name: [int(number.replace(",", "")) for number in numbers] for name, *numbers in re.findall(ROW, printed, re.MULTILINE)}
    assert [*rows] == [*rings.RINGS, *(f"  {name}" for name in rings.AROUND)]
    whole = re.search(ROW.replace(r"(\S.*?|  \S+)", "(all)"), learner.course("map").stdout, re.MULTILINE)
    assert [sum(rows[name][place] for name in rings.RINGS) for place in range(3)] == [int(n.replace(",", "")) for n in whole.groups()[1:]]
    assert rows["around it"] == [sum(rows[f"  {name}"][place] for name in rings.AROUND) for place in range(3)]
    assert learner.course("map", "--rings", "--spine").exit_code == 64


ROW = r"^(\S.*?|  \S+) +([\d,]+) +([\d,]+) +([\d,]+)(?: .*)?$"
