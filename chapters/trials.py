"""Experiments that can be believed: every variant with several seeds (trials), and its spread beside its mean.

A trial is one training run: a variant's settings and a seed. Its figures are kept as soon as it ends, so a comparison that was
interrupted resumes where it stopped. Two variants are distinguished only where their ranges over the seeds do not touch.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shared.course import figures
from shared.output_files import write_atomically

Settings = dict[str, Any]  # what makes a variant, in values that JSON can hold
Figures = dict[str, float | None]  # what a trial measured; None where it cannot be measured


@dataclass(frozen=True)
class Spread:
    """The mean of a figure over the seeds, and its range. A run that diverged makes all three infinite or its range open."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        numbers = [value if math.isfinite(value) else math.inf for value in values]
        return cls(sum(numbers) / len(numbers), min(numbers), max(numbers))

    def touches(self, other: "Spread") -> bool:
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        if math.isinf(self.mean):
            return "diverged"
        return f"{self.mean:.3f}  ({self.low:.3f} to {self.high:.3f})" if self.high > self.low else f"{self.mean:.3f}"


def run_trials(
    variants: dict[str, Settings], trial: Callable[[Settings, int], Figures], seeds: int, kept: Path, console: Console
) -> dict[str, list[Figures]]:
    """Run every variant with seeds 0 .. seeds - 1, seed by seed, so that an early stop leaves all variants equally far.

    Args:
        variants: name -> settings. A kept result counts only where its settings are the same.
        trial: trial(settings, seed) -> figures.
        kept: the JSON file of results; made if it is not there.

    Returns:
        Variant -> its figures, in the order of the seeds.

    Raises:
        ValueError: `kept` is not a file of results.
    """
    results = read_results(kept)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("trials", total=seeds * len(variants))
        for seed in range(seeds):
            for name, settings in variants.items():
                bar.update(task, description=f"{name}, seed {seed}")
                if find(results, settings, seed) is None:
                    measured = trial(settings, seed)
                    results.append({"variant": name, "settings": settings, "seed": seed, "figures": measured})
                    write_atomically(kept, json.dumps(results, indent=1).encode())
                    if not console.is_terminal:
                        console.print(f"{name}, seed {seed}: {measured}", highlight=False)
                bar.advance(task)
    return {name: [find(results, settings, seed) for seed in range(seeds)] for name, settings in variants.items()}


def find(results: list[dict], settings: Settings, seed: int) -> Figures | None:
    """The kept figures of these settings with this seed. JSON turns tuples into lists, so both sides are compared as JSON."""
    wanted = as_json(settings)
    return next((entry["figures"] for entry in results if as_json(entry["settings"]) == wanted and entry["seed"] == seed), None)


def as_json(settings: Settings) -> Settings:
    return json.loads(json.dumps(settings))


def read_results(path: Path) -> list[dict]:
    if not path.exists():
        return []
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if all({"settings", "seed", "figures"} <= set(entry) for entry in results):
            return results
    except (ValueError, TypeError):
        pass
    raise ValueError(f"{path} is not a file of experiment results: remove it, or choose another folder with --output.")


def spread_of(trials: list[Figures], figure: str) -> Spread | None:
    values = [trial[figure] for trial in trials]
    return None if any(value is None for value in values) else Spread.of(values)


def verdict(results: dict[str, list[Figures]], figure: str) -> str:
    """Which variant has the lowest figure, and which cannot be told from it with these seeds."""
    spreads = {name: spread for name, trials in results.items() if (spread := spread_of(trials, figure)) is not None}
    best = min(spreads, key=lambda name: spreads[name].mean)
    close = [name for name in spreads if name != best and spreads[name].touches(spreads[best])]
    seeds = len(results[best])
    if not close:
        return f"Lowest {figure}: {best}. Its {seeds} seeds all lie below every other variant's."
    return f"Lowest mean {figure}: {best}. With {seeds} seeds it cannot be told from: {', '.join(close)}."


def print_results(console: Console, title: str, results: dict[str, list[Figures]]) -> None:
    """A table with a row for each variant: figures that vary with the seed as mean and range."""
    columns = list(next(iter(results.values()))[0])
    table = Table(title=title)
    table.add_column("variant")
    for column in columns:
        table.add_column(column, justify="right")
    for name, trials in results.items():
        table.add_row(name, *(text_of(trials, column) for column in columns))
    console.print(table)


def text_of(trials: list[Figures], figure: str) -> str:
    values = [trial[figure] for trial in trials]
    if any(value is None for value in values):
        return "-"
    if all(isinstance(value, int) for value in values):
        return f"{values[0]:,}"
    if figure == "seconds":
        return f"{sum(values) / len(values):.0f}"
    return str(Spread.of(values))


def plot_results(results: dict[str, list[Figures]], figure: str, path: Path) -> None:
    """Each variant on a line of its own: a point for every seed, a bar at the mean. Diverged runs are left out and said."""
    from matplotlib.figure import Figure

    figures.use_style()
    drawing = Figure(figsize=(7.0, 1.2 + 0.38 * len(results)))
    axes = drawing.subplots()
    for row, trials in enumerate(results.values()):
        values = [trial[figure] for trial in trials if trial[figure] is not None and math.isfinite(trial[figure])]
        axes.plot(values, [row] * len(values), "o", color=figures.HELD_OUT, alpha=0.7, label="one seed" if row == 0 else None)
        if len(values) == len(trials):
            axes.plot([sum(values) / len(values)], [row], "|", color=figures.REFERENCE, markersize=16, label="mean" if row == 0 else None)
    labels = [
        name + ("" if all(math.isfinite(t[figure]) for t in trials if t[figure] is not None) else " (diverged)")
        for name, trials in results.items()
    ]
    axes.set_yticks(range(len(results)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(figure)
    axes.legend()
    drawing.savefig(path)


def plot_against(results: dict[str, list[Figures]], groups: dict[str, list[str]], across: str, figure: str, path: Path) -> None:
    """A line for each group of variants: the mean of a figure against another one on a logarithmic axis, with its range."""
    from matplotlib.figure import Figure

    figures.use_style()
    drawing = Figure()
    axes = drawing.subplots()
    colors = (figures.TRAINING, figures.HELD_OUT, figures.COMPUTE, figures.WRONG)
    for (group, names), color in zip(groups.items(), colors, strict=False):
        spreads = [spread_of(results[name], figure) for name in names]
        places = [results[name][0][across] for name in names]
        errors = [[spread.mean - spread.low for spread in spreads], [spread.high - spread.mean for spread in spreads]]
        axes.errorbar(places, [spread.mean for spread in spreads], yerr=errors, marker="o", capsize=3, color=color, label=group)
    axes.set_xscale("log")
    axes.set(xlabel=across, ylabel=figure)
    axes.legend()
    drawing.savefig(path)
