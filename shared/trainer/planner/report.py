"""Chapter 12. A plan in the terminal: what fits and what does not, what limits, where time and bytes go; and the same as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.trainer.planner.memory import RankMemory
from shared.trainer.planner.plan import Plan
from shared.trainer.planner.seconds import is_message

LIMITS = {
    "products": "matrix products",
    "again": "blocks that are computed again",
    "bubble": "the pipeline's bubble",
    "exchange": "communication that nothing hides: the link",
    "optimizer": "the optimizer's step",
    "scoring": "the scoring of answers",
    "drawing": "the drawing of answers: the bandwidth of memory",
    "memory": "memory: it does not fit",
}
NAMES = {"again": "recomputation", "exchange": "communication", "drawing": "drawing answers", "scoring": "scoring answers"}
UNITS = {"billion": 1e9, "million": 1e6}


def show_plan(console: Console, plan: Plan, title: str, advice: Sequence[str] = ()) -> None:
    """Print a plan. title: of what."""
    recompute = "" if plan.recompute == "none" else f", recomputation {plan.recompute}"
    say(console, f"{title} on {plan.hardware}: mode {plan.mode}, layout {plan.layout}, {plan.precision}{recompute}")
    for table in (summary_table(plan), memory_table(plan), time_table(plan), *([traffic_table(plan)] if any(plan.traffic) else [])):
        console.print()
        console.print(table)
    console.print()
    over = plan.held.peak - plan.usable
    verdict = f"It fits, with {-over / 1e9:.1f} GB to spare" if plan.fits else f"It does not fit: {over / 1e9:.1f} GB are missing"
    say(console, f"{verdict}. What limits: {LIMITS[plan.limit]}.")
    for line in (*advice, *plan.notes):
        say(console, f"  {line}")


def say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_table(plan: Plan) -> Table:
    table = plain_table("", "")
    parameters, seconds = plan.parameters, plan.seconds.total
    active = "" if parameters.active == parameters.total else f", {amount(parameters.active)} active"
    trained = "" if parameters.trained == parameters.total else f", {amount(parameters.trained)} trained"
    rows = {
        "parameters": f"{amount(parameters.total)}{active}{trained}",
        "tokens a step": f"{plan.tokens:,}",
        "FLOPs a step": f"{plan.flops:.3g}",
        "a step takes": f"{seconds:.3g} s",
        "tokens a second": f"{plan.tokens_per_second:,.0f}",
        "utilisation (MFU)": f"{plan.mfu:.1%}",
        "the run takes": f"{plan.hours:,.1f} hours for {plan.steps:,} steps" if plan.hours >= 0.1 else f"{60 * plan.hours:.1f} minutes",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def memory_table(plan: Plan) -> Table:
    """By kind, for each stage of a pipeline; kinds that no rank has are left out."""
    ranks = ["of each rank"] if len(plan.memory) == 1 else [f"of stage {stage}" for stage in range(len(plan.memory))]
    table = plain_table("memory, GB", *ranks, right=True)
    for field in fields(RankMemory):
        held = [getattr(each, field.name) for each in plan.memory]
        if field.name != "counted" and any(held):
            table.add_row(field.name, *(gigabytes(each) for each in held))
    table.add_row("at most", *(f"{each.peak / 1e9:.2f} of {plan.usable / 1e9:.1f}" for each in plan.memory), style="bold")
    return table


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f}" if count >= 5e6 or not count else "0.00+"


def time_table(plan: Plan) -> Table:
    table = plain_table("time of a step, s", "", "share", right=True)
    for name, seconds in plan.seconds.parts.items():
        if seconds:
            table.add_row(NAMES.get(name, name), f"{seconds:.3g}", f"{seconds / plan.seconds.total:.0%}")
    if plan.seconds.hidden:
        table.add_row("(communication beside products)", f"{plan.seconds.hidden:.3g}", "")
    return table


def traffic_table(plan: Plan) -> Table:
    """Of the rank that sends longest."""
    rank = max(plan.traffic, key=lambda sent: sum(each.seconds for each in sent))
    table = plain_table("traffic of a step", "over", "ranks", "calls", "MB", "s", "beside", right=True)
    found: dict[tuple, list[float]] = {}
    for each in rank:
        beside = "products" if each.beside else "the schedule" if is_message(each) else ""
        row = found.setdefault((each.operation, each.part, each.axis, each.ranks, beside), [0.0, 0.0, 0.0])
        row[:] = [row[0] + each.calls, row[1] + each.calls * each.bytes, row[2] + each.seconds]
    for (operation, part, axis, ranks, beside), (calls, size, seconds) in found.items():
        if calls:
            table.add_row(f"{operation} of {part}", axis, str(ranks), f"{calls:,.0f}", f"{size / 1e6:,.2f}", f"{seconds:.2g}", beside)
    return table


def plain_table(first: str, *others: str, right: bool = False) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=bool(first))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right" if right else "left")
    return table


def amount(count: float) -> str:
    """1,502,905,344 -> 1.5 billion."""
    for name, size in UNITS.items():
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,.0f}"


def as_dictionary(plan: Plan, advice: Sequence[str] = ()) -> dict[str, Any]:
    """All numbers of a plan, in bytes, seconds and FLOP/s."""
    derived = {name: getattr(plan, name) for name in ("fits", "limit", "tokens_per_second", "mfu", "hours")}
    memory = [asdict(each) | {"peak": each.peak} for each in plan.memory]
    return asdict(plan) | derived | {"memory": memory, "seconds": plan.seconds.parts | {"total": plan.seconds.total}, "advice": [*advice]}
