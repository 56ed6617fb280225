"""Repairs test themselves: right programs pass, broken ones print their symptom, wrong repairs are rejected; the command `course hunt`."""

import tomllib
from collections import Counter

import pytest
from scripts import run_script
from workspace import Learner

from shared.course import assignments, build_check
from shared.course.assignments import with_edits
from shared.course.judging import Judge
from shared.course.paths import CHECKOUT
from shared.course.report import FAIL, NOT_ATTEMPTED, PASS
from shared.course.stubs import BodyFile

HUNTS = assignments.hunts()
by_hunt = pytest.mark.parametrize("hunt", HUNTS.values(), ids=lambda hunt: hunt.id)


@pytest.fixture(scope="session")
def repairs():
    """What judges each repair, by folder and letter."""
    checks = {slug: build_check.read_checks(assignments.HUNTS / f"{slug}.py") for slug in {hunt.slug for hunt in HUNTS.values()}}
    return {slug: {letter: Judge(check, {}) for letter, check in of.items()} for slug, of in checks.items()}


def outcome_of(hunt, repairs, source: str):
    file = BodyFile.parsed(hunt.solution_file.with_name(f"{hunt.letter}.py#mended"), source)
    return build_check.run_stage(repairs[hunt.slug][hunt.letter], build_check.load(file, ()))


@by_hunt
def test_the_right_program_passes_and_the_broken_one_fails(hunt, repairs):
    assert outcome_of(hunt, repairs, hunt.solution_file.read_text(encoding="utf-8")).state == PASS
    assert outcome_of(hunt, repairs, hunt.template).state == FAIL
    assert 30 <= len(hunt.template.splitlines()) <= 100 and hunt.title and hunt.after and 1 <= hunt.answer <= len(hunt.choices)


@by_hunt
def test_the_symptom_is_what_the_broken_program_prints(hunt, tmp_path):
    path = tmp_path / f"{hunt.letter}.py"
    path.write_text(hunt.template, encoding="utf-8")
    assert run_script(path, cwd=CHECKOUT).stdout == hunt.symptom


# Wrong repairs, as edits of the right program: they make one number right, or take the feature away.
WRONG_REPAIRS = {
    "a": {
        "all random numbers differ": ("manual_seed(seed)", "manual_seed(seed + world.rank)"),
        "no dropout of the features": ("hidden = dropped(hidden, inner_rate, own)", "pass"),
        "no dropout of the output": ("return dropped(y, output_rate, random)", "return y"),
        "the noise is scaled": ("seed + (1 + world.rank) * 1_000_003)", "seed); inner_rate = inner_rate / world.size"),
        "the seed is left out": ("manual_seed(seed + (1 + world.rank) * 1_000_003)", "manual_seed(world.rank)"),
        "rank 0 meets the output's seed": ("seed + (1 + world.rank) * 1_000_003", "seed + world.rank"),
        "rank 1 meets the output's seed": ("seed + (1 + world.rank) * 1_000_003", "seed + 1_000_003 * (1 - world.rank)"),
        "rank 0's output is broadcast": (
            "return dropped(y, output_rate, random)",
            "y = dropped(y, output_rate, own)\n    world.broadcast(y, root=0)\n    return y",
        ),
        "no seed": ("torch.Generator().manual_seed(seed + (1 + world.rank) * 1_000_003)", "torch.Generator(); own.seed()"),
    },
    "b": {
        "divided": ('@ parts["down"].T, world) + parts["down_bias"]', '@ parts["down"].T + parts["down_bias"] / world.size, world)'),
        "no bias": (', world) + parts["down_bias"]', ', world) + 0 * parts["down_bias"]'),
        "on one rank": ('.T, world) + parts["down_bias"]', '.T + parts["down_bias"] * (world.rank == 0), world)'),
        "the output is divided": ('.apply(hidden @ parts["down"].T, world)', '.apply(hidden @ parts["down"].T, world) / world.size'),
    },
    "c": {
        "every second row": ("torch.cat([columns, inner + columns])", "torch.arange(world.rank, 2 * inner, world.size)"),
        "up in front": ("torch.cat([columns, inner + columns])", "torch.cat([inner + columns, columns])"),
        "no gate": ("(F.silu(gate) * up)", "(F.silu(gate) + up)"),
    },
    "d": {
        "no maximum": ("largest = logits.amax(dim=-1)", "largest = torch.zeros_like(logits[:, 0])"),
        "the smallest maximum": ('op="max"', 'op="min"'),
        "the mean of the maxima": ('world.all_reduce(largest, op="max")', "world.all_reduce(largest); largest /= world.size"),
        "the mean of the losses": (
            'world.all_reduce(largest, op="max")\n    exponentials',
            "mean = largest.clone(); world.all_reduce(mean); largest = mean / 2\n    exponentials",
        ),
    },
    "e": {
        "averaged": ('world.all_reduce(gradients["norm"])', 'world.all_reduce(gradients["norm"]); gradients["norm"] /= world.size'),
        "rank 0's": ('world.all_reduce(gradients["norm"])', 'world.broadcast(gradients["norm"], root=0)'),
        "not trained": ('world.all_reduce(gradients["norm"])', 'gradients["norm"] *= 0'),
        "all are summed": ('world.all_reduce(gradients["norm"])', "[world.all_reduce(each) for each in gradients.values()]"),
        "the largest": ('world.all_reduce(gradients["norm"])', 'world.all_reduce(gradients["norm"], op="max")'),
    },
}


def repairs_to_try():
    """(hunt, name, which program is edited, edits, what the check must say): chapter 07's above, those of later chapters in files."""
    for letter, names in WRONG_REPAIRS.items():
        for name, edit in names.items():
            yield HUNTS[f"07.hunt.{letter}"], name, "right", [edit], FAIL
    for path in sorted((assignments.HUNTS / "tried").glob("*.toml")):
        for letter, entries in tomllib.loads(path.read_text(encoding="utf-8")).items():
            for tried in entries:
                of, state = tried.get("of", "broken"), tried.get("state", FAIL)
                yield HUNTS[f"{path.stem[:2]}.hunt.{letter}"], tried["name"], of, tried["edits"], state


REPAIRS = [pytest.param(hunt, *repair, id=f"{hunt.id}-{name}") for hunt, name, *repair in repairs_to_try()]


@pytest.mark.parametrize(("hunt", "of", "edits", "state"), REPAIRS)
def test_a_wrong_repair_is_rejected_and_another_right_one_passes(hunt, of, edits, state, repairs):
    begun = hunt.template if of == "broken" else hunt.solution_file.read_text(encoding="utf-8")
    assert outcome_of(hunt, repairs, with_edits(begun, edits, hunt.id)).state == state


def test_each_hunt_has_wrong_repairs_to_reject():
    assert all(count >= 3 for count in Counter(hunt.id for hunt, *_, state in repairs_to_try() if state == FAIL).values())
    assert {hunt.id for hunt, *_ in repairs_to_try()} == HUNTS.keys()


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


def test_a_hunt_from_the_list_to_the_reason(learner):
    listed = learner.course("hunt", "07").stdout
    assert all(hunt.title in listed and hunt.after not in listed for hunt in assignments.find_hunts("07"))
    assert learner.course("hunt", "07", "c", "--check").exit_code == 2
    started = learner.course("hunt", "07", "c")
    hunt = HUNTS["07.hunt.c"]
    path = hunt.file(learner.folder)
    assert "python chapters/07_tensor_parallel/hunts/c.py" in started.stdout and path.read_text(encoding="utf-8") == hunt.template
    untouched = learner.course("hunt", "07", "c", "--check")
    assert untouched.exit_code == 2 and NOT_ATTEMPTED in untouched.stdout
    right, broken = hunt.edits[0]
    path.write_text(hunt.template.replace(broken, "    rows = columns + inner\n"), encoding="utf-8")
    wrong = learner.course("hunt", "07", "c", "--check")
    assert wrong.exit_code == 1 and "c.py, line" in wrong.stdout
    path.write_text(hunt.template.replace(broken, right), encoding="utf-8")
    repaired = learner.course("hunt", "07", "c", "--check")
    assert repaired.exit_code == 2 and "The repair is right. One question is still open" in repaired.stdout
    assert "--check --because NUMBER" in repaired.stdout
    misread = learner.course("hunt", "07", "c", "--check", "--because", "1")
    assert misread.exit_code == 1 and "the mistake was not 1" in misread.stdout
    assert "PASS" not in misread.stdout and "still open" not in misread.stdout
    assert "07.hunt   0 of 5 repaired" in learner.course("status").stdout
    done = learner.course("hunt", "07", "c", "--check", "--because", str(hunt.answer))
    assert done.exit_code == 0 and hunt.after.split()[0] in done.stdout
    assert done.stdout.count("PASS") == 1 and "still open" not in done.stdout and hunt.choices[0][:20] not in done.stdout
    assert "07.hunt   1 of 5 repaired: c" in learner.course("status").stdout
    assert learner.course("hunt", "07", "c", "--check", "--because", "1").exit_code == 1
    unknown = learner.course("hunt", "07", "c", "--check", "--because", "99")
    assert unknown.exit_code == 64 and "There is no choice 99" in unknown.stderr
    assert "07.hunt   1 of 5 repaired: c" in learner.course("status").stdout, "what was explained stays so"
    learner.course("hunt", "07", "c")
    assert right in path.read_text(encoding="utf-8"), "a copy that was worked on stays"
    assert "as released" in learner.course("reset", "07.hunt.c").stdout and path.read_text(encoding="utf-8") == hunt.template


def test_an_unknown_hunt_is_refused(learner):
    assert "There are: a, b, c, d, e" in learner.course("hunt", "07", "z").stderr
    assert "Chapter 13 has no hunts. There are: course hunt 0" in learner.course("hunt", "13").stderr
