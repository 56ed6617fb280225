"""Chapter 12. The command `course plan`: a run planned on hardware, the fastest layout (`--search`), or a model's size (`--budget`)."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from shared.course.errors import CourseError, SettingError
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.budget import propose
from shared.trainer.planner.hardware import Hardware, hardware_here, parse_hardware
from shared.trainer.planner.opening import open_planned, reward_shape
from shared.trainer.planner.plan import plan_run
from shared.trainer.planner.report import NAMES, amount, as_dictionary, plain_table, say, show_plan
from shared.trainer.planner.search import Candidate, Search, advise, search_layouts

SHOWN = 10
TIGHT = 0.1  # of a card's memory
UNITS = {"m": 60, "h": 3600, "d": 86400}


@contextmanager
def wrong_settings() -> Iterator[None]:
    """Turn a formula's ValueError into the error of a setting."""
    try:
        yield
    except CourseError:
        raise
    except ValueError as error:
        raise SettingError(str(error)) from None


def hardware_of(word: str | None) -> Hardware:
    return parse_hardware(word) if word else hardware_here()


def run_plan(
    console: Console, file: Path, words: Sequence[str], layout: str | None, hardware: str | None, model: str | None, as_json: bool
) -> int:
    """Print the plan. Returns the exit code: 0 where the run fits, 1 where it does not."""
    config = open_planned(file, words, layout, model)
    machine, rewards = hardware_of(hardware), reward_shape(config)
    with wrong_settings():
        plan = plan_run(config, machine, rewards)
    advice = advise(config, machine, plan, rewards)
    if as_json:
        print(json.dumps(as_dictionary(plan, advice)))
    else:
        show_plan(console, plan, file.name, advice)
    return 0 if plan.fits else 1


def run_search(console: Console, file: Path, words: Sequence[str], hardware: str | None, model: str | None, as_json: bool) -> int:
    """Print the fastest layouts. Returns the exit code: 0 where one fits, 1 where none does."""
    config, machine = open_planned(file, words, "one", model), hardware_of(hardware)
    with wrong_settings(), console.status(f"planning every layout of {ranks_of(machine)} ranks"):
        found = search_layouts(config, machine, ranks_of(machine), reward_shape(config))
    if as_json:
        print(json.dumps(search_as_dictionary(found, config)))
    else:
        show_search(console, found, config, file, words, machine)
    return 0 if found.best else 1


def ranks_of(hardware: Hardware) -> int:
    """Ranks to plan for: one for each card; of a CPU one for each core, up to eight."""
    return min(psutil.cpu_count(logical=False) or 1, 8) if hardware.is_cpu else hardware.ranks


def show_search(console: Console, found: Search, config: TrainerConfig, file: Path, words: Sequence[str], hardware: Hardware) -> None:
    say(console, f"{file.name} on {hardware.name}: {found.layouts} layouts of {ranks_of(hardware)} ranks, {len(found.best)} fit.")
    if found.best:
        names = ("layout", "step, s", "tokens/s", "MFU", "GB a rank", "most of the step is", "rows", "recomputation", "schedule")
        table = plain_table(*names, right=True)
        for each in found.best[:SHOWN]:
            plan = each.plan
            numbers = f"{each.seconds:.3g}", f"{plan.tokens_per_second:,.0f}", f"{plan.mfu:.1%}", f"{plan.held.peak / 1e9:.1f}"
            parallel, rows = each.config.parallel, str(each.config.data.micro_batch_size)
            schedule = parallel.pipeline_schedule if parallel.pipeline_parallel > 1 else ""
            table.add_row(plan.layout, *numbers, NAMES.get(plan.limit, plan.limit), rows, plan.recompute, schedule)
        console.print()
        console.print(table)
        console.print()
    if found.too_large:
        least = min(found.too_large) / 1e9
        say(console, f"{len(found.too_large)} need more than the {found.usable / 1e9:.1f} GB of a card, by at least {least:.1f} GB.")
    if found.unknown:
        say(console, f"For {found.unknown} there is no formula for all of their memory, so they are not listed.")
    for sentences in sorted(found.refused.values(), key=len, reverse=True):
        say(console, f"{len(sentences)} {'is' if len(sentences) == 1 else 'are'} refused: {sentences[0]}")
    if found.best:
        say(console, f"The fastest: {run_words(found.best[0], config, file, words)}")
        spare = found.usable - found.best[0].plan.held.peak
        if spare < TIGHT * found.usable:
            say(console, f"It leaves {spare / 1e9:.1f} GB, and short-lived buffers are not counted: try it with steps=2 first.")
    else:
        say(console, "None is known to fit: make the model smaller, data.seq shorter, or add cards.")


def run_words(chosen: Candidate, config: TrainerConfig, file: Path, words: Sequence[str] = ()) -> str:
    """The command that runs a candidate."""
    settings = shlex.join([*words, *chosen.words(config)])
    return f"make run LAYOUT={chosen.plan.layout} CONFIG={file}" + (f' ARGS="{settings}"' if settings else "")


def search_as_dictionary(found: Search, config: TrainerConfig) -> dict[str, Any]:
    best = [
        {"layout": each.plan.layout, "settings": each.words(config), "seconds": each.seconds, "bytes": each.plan.held.peak,
         "tokens_per_second": each.plan.tokens_per_second, "mfu": each.plan.mfu, "limit": each.plan.limit} for each in found.best
    ]  # fmt: skip
    refused = [{"layouts": len(sentences), "sentence": sentences[0]} for sentences in found.refused.values()]
    return {"usable": found.usable, "best": best, "missing": sorted(found.too_large), "unknown": found.unknown, "refused": refused}


def run_budget(console: Console, file: Path, words: Sequence[str], hardware: str | None, budget: str, as_json: bool) -> int:
    """Print a model and its tokens for a compute budget. Returns the exit code: 0 where one fits, 1 where none does."""
    config, machine = open_planned(file, words, "one"), hardware_of(hardware)
    with console.status("planning models of several sizes"):
        proposals = propose(config, machine, ranks_of(machine), seconds_of(budget))
    if as_json:
        print(json.dumps([each.as_dictionary() for each in proposals]))
        return 0 if proposals else 1
    say(console, f"{budget} on {machine.name}, in all other settings {file.name}:")
    table = plain_table("law", "parameters", "tokens", "loss expected", "FLOPs", "beyond its runs", "layout", right=True)
    for each in proposals:
        beyond = f"{each.beyond:,.0f} times" if each.beyond > 1 else "no"
        loss = f"{each.loss:.3f} {each.law.unit}"
        table.add_row(each.law.name, amount(each.parameters), amount(each.tokens), loss, f"{each.flops:.2g}", beyond, each.best.plan.layout)
    console.print(table)
    if not proposals:
        say(console, "No model of the ladder fits: give another configuration, or more memory.")
        return 1
    chosen = min(proposals, key=lambda each: each.beyond)
    command = run_words(chosen.best, config, file, [*words, *chosen.words])
    say(console, f"By the law with the least extrapolation ({chosen.law.name}): {command}")
    say(console, "The text must have that many tokens, or is repeated; a law fitted to other text gives sizes, and its loss is not yours.")
    return 0


def seconds_of(budget: str) -> float:
    """8h, 90m or 3d as seconds.

    >>> seconds_of("1.5h")
    5400.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", budget)
    if match is None or not float(match[1]):
        raise SettingError(f"--budget is {budget!r}: give a time such as 90m, 8h or 3d.")
    return float(match[1]) * UNITS[match[2]]
