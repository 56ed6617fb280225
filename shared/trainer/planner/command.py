"""Chapter 12. `course plan`: a configuration planned on hardware, with advice, as tables or as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shared.course.errors import CourseError, SettingError
from shared.trainer.planner.hardware import hardware_here, parse_hardware
from shared.trainer.planner.opening import open_planned, reward_shape
from shared.trainer.planner.plan import plan_run
from shared.trainer.planner.report import as_dictionary, show_plan
from shared.trainer.planner.search import advise


def run(
    console: Console, file: Path, words: Sequence[str], layout: str | None, hardware: str | None, model: str | None, as_json: bool
) -> int:
    """Print the plan, and return what to exit with: 0 where the run fits, 1 where it does not.

    Raises:
        CourseError: a configuration, layout or hardware that cannot be, in one sentence.
    """
    config = open_planned(file, words, layout, model)
    machine, rewards = parse_hardware(hardware) if hardware else hardware_here(), reward_shape(config)
    try:
        plan = plan_run(config, machine, rewards)
    except CourseError:
        raise
    except ValueError as error:
        raise SettingError(str(error)) from None
    advice = advise(config, machine, plan, rewards)
    if as_json:
        print(json.dumps(as_dictionary(plan, advice)))
    else:
        show_plan(console, plan, file.name, advice)
    return 0 if plan.fits else 1
