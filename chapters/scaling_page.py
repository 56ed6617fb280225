"""What `12_grpo/scaling.py` shows: the plot of the grid with the prediction, and the page SCALING.md."""

from collections import defaultdict
from math import log2
from pathlib import Path
from typing import Any

from chapters.scaling_grid import LOSS

PLOT = "scaling.png"


def miss(prediction: dict[str, Any], big: dict[str, Any]) -> str:
    by_law = f" That of the law, {prediction['law'][LOSS]:.4f}, is {off(prediction['law'], big)}." if "frontier" in prediction else ""
    return (
        f"Predicted {prediction[LOSS]:.4f} {LOSS} at {prediction['written']}; trained, finished at {big['finished']}: {big[LOSS]:.4f}. "
        f"The prediction is {off(prediction, big)}.{by_law}"
    )


def off(prediction: dict[str, Any], big: dict[str, Any]) -> str:
    error = prediction[LOSS] / big[LOSS] - 1
    return f"{abs(error):.2%} too {'high' if error > 0 else 'low'}"


def method(prediction: dict[str, Any]) -> str:
    """How the prediction was made, in two or three sentences."""
    if "frontier" not in prediction:
        return (
            "The law of approach 3 predicts here: fewer than three budgets show a minimum, so approach 2 has no curve to carry on. Give "
            "larger budgets more sizes (grid.sizes, grid.budgets)."
        )
    best, law = prediction["frontier"], prediction["law"]
    low, high = law["interval"]
    return (
        f"Approach 2 predicts here: the lowest losses of the budgets follow {best['E']:.4g} + {best['B']:.4g} / FLOPs^{best['beta']:.4f},\n"
        f"and a model of another size loses {best['curvature']:.3f} times the squared logarithm of its share of the best one. The law of\n"
        f"approach 3 says {law[LOSS]:.4f} ({low:.4f} to {high:.4f}). It claims more: that the loss is a sum of what parameters and what\n"
        "tokens explain, also where a small model has seen many tokens."
    )


def gains(rows: list[dict[str, Any]]) -> dict[tuple[int, int, int], list[tuple[dict[str, Any], float]]]:
    """(width, layers, seed) -> its runs but the shortest, each with what a doubling of the tokens has gained since the run before it."""
    sizes = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["width"], row["layers"], row["seed"], row["tokens"])):
        sizes[row["width"], row["layers"], row["seed"]].append(row)
    return {
        size: [(new, (old[LOSS] - new[LOSS]) / log2(new["tokens"] / old["tokens"])) for old, new in zip(runs, runs[1:], strict=False)]
        for size, runs in sizes.items()
    }


def too_short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs that no law of this form can describe: a later doubling of the same size gains more than an earlier one.

    B / tokens^beta loses a constant share with each doubling, so what a doubling gains can only shrink. It grows at the beginning of a
    training, when the loss falls in a bend that has nothing to do with the law.
    """
    found = []
    for size, steps in gains(rows).items():
        runs = sorted((row for row in rows if (row["width"], row["layers"], row["seed"]) == size), key=lambda row: row["tokens"])
        bends = [number for number in range(1, len(steps)) if steps[number][1] > steps[number - 1][1]]
        found += runs[: max(bends) + 1] if bends else []
    return found


def remark(rows: list[dict[str, Any]]) -> str:
    """What `too_short` means for a prediction, in a sentence or two."""
    short = too_short(rows)
    if not short:
        return "Each doubling of the tokens gains less than the one before it, as the law's form demands."
    longest = max(row["steps"] for row in short)
    return (
        f"{len(short)} of the {len(rows)} runs are too short for the law: after them a doubling of the tokens gains more than before, and "
        "the law's can only gain less. Do not rely on a prediction from them: "
        f"raise grid.shortest above {longest}, and grid.budgets with it."
    )


def draw(path: Path, rows: list, law: Any, profiles: list, prediction: dict, big: dict | None) -> None:
    """IsoFLOP profiles with the law's curves, and the loss against FLOPs with the prediction and the truth."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    from shared.course import figures

    figures.use_style()
    drawing = Figure(figsize=(10, 4.2))
    left, right = drawing.subplots(1, 2)
    budgets = sorted({row["budget"] for row in rows})
    sizes = np.geomspace(min(row["parameters"] for row in rows) / 1.5, 1.5 * max(row["parameters"] for row in rows))
    for budget, color in zip(budgets, figures.sequence_colors(len(budgets)), strict=True):
        own = [row for row in rows if row["budget"] == budget]
        left.plot([row["parameters"] for row in own], [row[LOSS] for row in own], "o", color=color, label=f"{budget:.1e} FLOPs")
        left.plot(sizes, law.loss(sizes, budget / 6 / sizes), color=color)
        right.plot([row["flops"] for row in own], [row[LOSS] for row in own], "o", color=color)
    for number, profile in enumerate(each for each in profiles if each.inside):
        label = "lowest of the parabola" if number == 0 else None
        left.plot(profile.parameters, profile.loss, "x", color=figures.REFERENCE, markersize=9, label=label)
    flops = np.geomspace(budgets[0], prediction["flops"])
    best = [law.loss(*law.optimum(each)) for each in flops]
    right.plot(flops, best, color=figures.REFERENCE, linestyle="--", label="best model by approach 3, the law")
    if "frontier" in prediction:
        E, B, beta = (prediction["frontier"][name] for name in ("E", "B", "beta"))
        right.plot(flops, E + B / flops**beta, color=figures.REFERENCE, label="best model by approach 2")
    low, high = prediction["interval"]
    bars = [[max(prediction[LOSS] - low, 0)], [max(high - prediction[LOSS], 0)]]
    right.errorbar(prediction["flops"], prediction[LOSS], yerr=bars, fmt="s", color=figures.TRAINING, capsize=4, label="predicted")
    if big:
        right.plot(big["flops"], big[LOSS], "*", color=figures.HELD_OUT, markersize=13, label="trained afterwards")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    left.set(xlabel="parameters", ylabel=f"held-out {LOSS}", title="One budget each: points and the law")
    right.set(xlabel="FLOPs, 6 N D", title="Prediction and truth")
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    drawing.savefig(path, dpi=80)


def page(
    rows: list, law: Any, fit: dict, profiles: list, prediction: dict, big: dict | None, rates: dict, decay: float, text_tokens: int
) -> str:
    """The page of results, whose sentences say what the figures do and no more.

    Args:
        rates: the trainer's section `optimizer`.
        decay: share of a run in which the learning rate falls.
        text_tokens: of the training text.
    """
    misses = [law.loss(row["parameters"], row["tokens"]) / row[LOSS] - 1 for row in rows]
    table = "\n".join(
        f"| {row['width']} x {row['layers']} | {row['parameters']:,} | {row['steps']:,} | {row['tokens']:,} | "
        f"{row['tokens'] / text_tokens:.2f} | {row['flops']:.2e} | {row['seed']} | {row[LOSS]:.4f} | {missed:+.2%} |"
        for row, missed in zip(rows, misses, strict=True)
    )
    ranges, (low, high) = fit["intervals"], prediction["interval"]
    constants = "\n".join(f"| {name} | {fit['law'][name]:.4g} | {one:.4g} to {other:.4g} |" for name, (one, other) in ranges.items())
    best = "\n".join(
        f"| {each.flops:.1e} | {each.parameters:,.0f}{'' if each.inside else ' (outside the runs)'} | {each.loss:.4f} | "
        f"{law.optimum(each.flops)[0]:,.0f} | {law.loss(*law.optimum(each.flops)):.4f} |"
        for each in profiles
    )
    said = {size: ", ".join(f"{gain:.3f} to {row['steps']:,}" for row, gain in steps) for size, steps in gains(rows).items()}
    doublings = "\n".join(f"| {width} x {layers}, seed {seed} | {each} |" for (width, layers, seed), each in said.items() if each)
    isoflop = fit["isoflop"]
    second = (
        f"{isoflop['exponent']:.2f} ({isoflop['interval'][0]:.2f} to {isoflop['interval'][1]:.2f})"
        if isoflop["exponent"] is not None
        else f"none, for {isoflop['why']}"
    )
    third, around = fit["optimum_exponent"], fit["optimum_exponent_interval"]
    result = miss(prediction, big) if big else f"Predicted {prediction[LOSS]:.4f} {LOSS} at {prediction['written']}; not trained yet."
    parameters, at = prediction["parameters"], law.optimum(prediction["flops"])
    return f"""# A larger model's loss, predicted

`python chapters/12_grpo/scaling.py` writes this page. It trains {len(rows)} models of {rows[0]['parameters']:,} to
{max(row['parameters'] for row in rows):,} parameters, fits the loss of held-out text against parameters and tokens, predicts a larger model
and then trains it. The method is that of Hoffmann et al. 2022, approaches 2 and 3, with the corrections of Besiroglu et al. 2024.

- **Parameters** are all of them, the tied embedding once: with a vocabulary of {fit['vocabulary']} it is
  {rows[0]['width'] * fit['vocabulary'] / rows[0]['parameters']:.0%} of the smallest model, and at the output it costs as much as any other
  matrix. FLOPs are 6 x parameters x tokens, which leaves out attention's scores.
- **Tokens** are of {fit['bytes_per_token']:.2f} bytes each. The text has {text_tokens:,}, so no run sees one twice.
- **Learning rates** are the same for all sizes, {rates['lr']} for matrices (Muon's original scaling, which keeps a
  layer's change the same at any width) and {rates['adamw_lr']} for the embedding.
- **Lengths** of one size come from one run at a constant rate: at {1 - decay:.0%} of a length a copy of it begins, whose rate falls to 0.
  It ends with the weights of a whole run of that length. So runs of one size share most of their noise, and bootstrap intervals
  are somewhat too narrow.

![IsoFLOP profiles, the law, the prediction and the truth]({PLOT})

## The prediction

{result}

It has {parameters:,} parameters and {prediction['tokens']:,} tokens: {prediction['times the largest of the grid']:.1f} times the FLOPs of
the grid's largest run. The interval ({fit['level']:.0%}) is {low:.4f} to {high:.4f}. By the law, the best model for these FLOPs has
{at[0]:,.0f} parameters and {at[1]:,.0f} tokens, and reaches {law.loss(*at):.4f}.

{method(prediction)}

## The law

Loss in {LOSS} = E + A / parameters^alpha + B / tokens^beta.

| constant | value | {fit['level']:.0%} interval |
|---|---|---|
{constants}

The best number of parameters grows with FLOPs to the power {third:.2f} ({around[0]:.2f} to {around[1]:.2f}) by this law (approach 3).
By the parabolas (approach 2): {second.rstrip('.')}.

| FLOPs | best parameters, parabola | loss | best parameters, law | loss |
|---|---|---|---|---|
{best}

## Whether the runs follow the law

{remark(rows)}

| width x layers | {LOSS} that a doubling of the tokens gains, up to so many steps |
|---|---|
{doublings}

## The runs

Miss is the law's, of a run that it was fitted to. Epochs are shares of the text.

| width x layers | parameters | steps | tokens | epochs | FLOPs | seed | {LOSS} | miss |
|---|---|---|---|---|---|---|---|---|
{table}
"""
