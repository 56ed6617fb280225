"""Every verdict on every known answer of exercises: `python tests/tables/verdicts.py FILE [EXERCISE ...] [--against OTHER]`.

FILE gets, as JSON, how the check of each exercise (default: all) judges its solution, other right answers, mutants and spoilt answers,
and which of its cases are idle. `--against` compares it with such a file of another version: what a check, or how it is run, became
cheaper by must change nothing that a learner reads. No learner reads what is said of a spoilt answer, so sentences on these are left out.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT.parents[1])]

from children import in_child  # noqa: E402
from known_answers import try_known_answers  # noqa: E402

from shared.course import catalogue  # noqa: E402
from shared.course.report import Outcome  # noqa: E402

SECONDS = 1800.0  # of processor time, for one exercise


def verdicts(exercise_id: str) -> dict:
    """The verdicts on one exercise's answers, by the answers' names, with the processor time that they took; in a fresh process."""
    began = time.process_time()
    known = try_known_answers(exercise_id)
    right = {f"right {name}": outcome for name, outcome in known["right"].items()}
    judged = {"solution": known["solution"]} | right | known["wrong"]
    answers = {name: verdict(outcome) for name, outcome in judged.items()}
    return {"answers": answers, "rungs": known["rungs"], "idle": known["idle"], "seconds": round(time.process_time() - began, 2)}


def verdict(outcome: Outcome) -> dict:
    told = {"state": outcome.state, "rung": outcome.rung, "title": outcome.title, "cases": outcome.cases, "of": outcome.of}
    problem = [re.sub(r"(course-\w+-)\d+", r"\1N", line) for line in outcome.problem]  # a folder named by the process
    return told | {"problem": problem, "sentence": outcome.misconception}


def compared(found: dict, before: dict) -> list[str]:
    """A line for each verdict that differs, and one that says how many are the same."""
    lines, same = [], 0
    for exercise_id in found.keys() & before.keys():
        answers, others = found[exercise_id]["answers"], before[exercise_id]["answers"]
        for name in answers | others:
            here, there = told(answers, name), told(others, name)
            same += here == there
            lines += [f"{exercise_id}, {name}:\n  {there}\n  {here}"] if here != there else []
        lines += [f"{exercise_id}: other {key}" for key in ("rungs", "idle") if found[exercise_id][key] != before[exercise_id][key]]
    alone = sorted(found.keys() ^ before.keys())
    return [*sorted(lines), *([f"only in one: {', '.join(alone)}"] if alone else []), f"{same} verdicts are the same."]


def told(answers: dict[str, dict], name: str) -> dict:
    kept = dict(answers.get(name, {}))
    if name.startswith("spoilt "):
        kept.pop("sentence", None)
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("exercises", nargs="*", default=list(catalogue.all_exercises()))
    parser.add_argument("--against", type=Path, metavar="OTHER")
    options = parser.parse_args()
    found = {}
    for exercise_id in options.exercises:
        found[exercise_id] = in_child(verdicts, exercise_id, seconds=SECONDS)
        options.file.write_text(json.dumps(found, indent=1), encoding="utf-8")  # each time: an exercise may take minutes
        answers, seconds = len(found[exercise_id]["answers"]), found[exercise_id]["seconds"]
        print(f"{exercise_id:32}{answers:5} answers{seconds:9.2f} s", file=sys.stderr, flush=True)
    if options.against:
        print(*compared(found, json.loads(options.against.read_text(encoding="utf-8"))), sep="\n")
