"""Scaling laws: train a grid of small models, fit loss against parameters and tokens, predict a larger model's loss, then train it.

    python chapters/12_grpo/scaling.py                  all of it: says first how long it will take
    python chapters/12_grpo/scaling.py --grid           one stage; likewise --predict, --big and --plot
    python chapters/12_grpo/scaling.py my.yaml grid.seeds=3 optimizer.lr=0.01       another grid, other settings

Interrupt it and start it again: it continues. The prediction is written before the larger model is trained, and never afterwards. The page
SCALING.md, the plot and the fit land in `grid.output`.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from chapters.scaling_grid import LOSS, Grid, GridConfig, Size, measured, seconds_of_step, train_grid
from chapters.scaling_page import PLOT, draw, miss, page, remark
from shared.course import binding
from shared.course.errors import CourseError, SettingError
from shared.course.launch import INTERRUPTED, refuse
from shared.course.typed import configured, with_words
from shared.output_files import write_atomically

DRAWS, LEVEL = 100, 0.9  # of the bootstrap, and of its intervals
AHEAD = 8  # times the FLOPs of the grid's largest run should the predicted model take
FIT, PREDICTION, BIG, PAGE = "scaling_fit.json", "prediction.json", "big.json", "SCALING.md"


def all_rows(grid: Grid) -> list[dict[str, Any]]:
    """The finished runs of the grid.

    Raises:
        CourseError: some are missing.
    """
    rows, wanted = grid.rows(), sum(map(grid.seeds, grid.cells().values()))
    if len(rows) < wanted:
        raise CourseError(f"{len(rows)} of the grid's {wanted} runs are done: python chapters/12_grpo/scaling.py --grid trains the others.")
    return rows


def runs_of(rows: list[dict[str, Any]]) -> list[tuple[float, Any]]:
    """(budget, point) of each run, as the fits take them."""
    from shared.trainer.planner.scaling_law import Point

    return [(row["budget"], Point(row["parameters"], row["tokens"], row[LOSS])) for row in rows]


def predict(grid: Grid) -> None:
    """Fit the law, and write down what the larger model will reach. Once that model is trained, the prediction stays as it is."""
    from shared.trainer.planner.scaling_law import bootstrap, bootstrap_frontier, fit_law, frontier, interval, isoflop_profiles, write_fit

    output, rows = grid.plan.output, all_rows(grid)
    if (output / BIG).exists():
        grid.console.print(f"The larger model is trained: {output / PREDICTION} stays as it was written before.", soft_wrap=True)
        return
    runs = runs_of(rows)
    points = [point for _, point in runs]
    law, laws = fit_law(points), bootstrap(points, DRAWS)
    parameters, steps = grid.parameters(grid.plan.big), grid.steps(grid.plan.big, grid.plan.big_flops)
    tokens, largest = steps * grid.step_tokens, max(rows, key=lambda row: row["flops"])
    profiles = isoflop_profiles(runs)
    try:
        parabolas = {"exponent": frontier(profiles)[0], "interval": interval(bootstrap_frontier(runs, DRAWS), LEVEL)}
    except ValueError as error:
        parabolas = {"exponent": None, "why": str(error)}
    write_fit(
        output / FIT,
        law,
        intervals={name: interval([getattr(each, name) for each in laws], LEVEL) for name in asdict(law)},
        level=LEVEL,
        unit=LOSS,
        bytes_per_token=largest["nats per token"] / (math.log(2) * largest[LOSS]),
        vocabulary=grid.text.tokenizer.vocab_size,
        flops="6 x parameters x tokens; all parameters, a tied embedding once",
        runs=len(rows),
        largest={name: largest[name] for name in ("parameters", "tokens", "flops")},
        optimum_exponent=law.beta / (law.alpha + law.beta),
        optimum_exponent_interval=interval([each.beta / (each.alpha + each.beta) for each in laws if each.alpha + each.beta], LEVEL),
        isoflop=parabolas,
    )
    prediction = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "size": asdict(grid.plan.big),
        "steps": steps,
        "settings": grid.digest,
        "parameters": parameters,
        "tokens": tokens,
        "flops": 6 * parameters * tokens,
        "times the largest of the grid": 6 * parameters * tokens / largest["flops"],
        LOSS: float(law.loss(parameters, tokens)),
        "interval": interval([float(each.loss(parameters, tokens)) for each in laws], LEVEL),
    }
    write_atomically(output / PREDICTION, json.dumps(prediction, indent=1).encode())
    ratio = prediction["times the largest of the grid"]
    few = f" That is less than {AHEAD} times: raise grid.big_flops for a prediction that says something." if ratio < AHEAD else ""
    grid.console.print(
        f"Predicted for {parameters:,} parameters and {tokens:,} tokens, {ratio:.1f} times the FLOPs of the grid's largest run: "
        f"{prediction[LOSS]:.4f} {LOSS} ({prediction['interval'][0]:.4f} to {prediction['interval'][1]:.4f}).{few}",
        highlight=False,
        soft_wrap=True,
    )
    grid.console.print(remark(rows), highlight=False, soft_wrap=True)


def train_big(grid: Grid) -> None:
    """Train the model that was predicted, and keep what it reached.

    Raises:
        CourseError: nothing was predicted with these settings.
    """
    output = grid.plan.output
    prediction = read(output / PREDICTION)
    if prediction is None or prediction["settings"] != grid.digest:
        raise CourseError(f"{output} holds no prediction with these settings: scaling.py --predict writes one first.")
    size, steps = Size(**prediction["size"]), prediction["steps"]
    if read(output / BIG) is None:
        minutes = steps * seconds_of_step(grid, size) / 60
        grid.console.print(f"{prediction['parameters']:,} parameters, {steps:,} steps: about {minutes:.0f} minutes.", highlight=False)
        folder = output / "runs" / f"big-{size.width}x{size.layers}-{steps}-{grid.digest}"
        found = measured(grid, grid.config(size, steps, 0, folder), steps)
        found["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        write_atomically(output / BIG, json.dumps(found, indent=1).encode())
    grid.console.print(miss(prediction, read(output / BIG)), highlight=False, soft_wrap=True)


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError:
        raise CourseError(f"{path} is damaged: remove it, and repeat the stage that writes it.") from None


def show(grid: Grid) -> None:
    """The plot and the page, with the larger model where it is trained.

    Raises:
        CourseError: there is no fit yet.
    """
    from shared.trainer.planner.scaling_law import isoflop_profiles, read_fit

    output, rows = grid.plan.output, all_rows(grid)
    law, fit = read_fit(output / FIT)
    prediction, big = read(output / PREDICTION), read(output / BIG)
    profiles = isoflop_profiles(runs_of(rows))
    draw(output / PLOT, rows, law, profiles, prediction, big)
    facts = page(rows, law, fit, profiles, prediction, big, grid.settings["optimizer"], grid.plan.decay, grid.text.training.token_count)
    write_atomically(output / PAGE, facts.encode())
    grid.console.print(f"Page and plot: {output / PAGE}, {output / PLOT}", highlight=False, soft_wrap=True)


RUN = {"grid": train_grid, "predict": predict, "big": train_big, "plot": show}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for stage, function in RUN.items():
        what = function.__doc__.split(".")[0]
        parser.add_argument(f"--{stage}", action="append_const", const=stage, dest="stages", help=what)
    parser.add_argument("words", nargs="*", metavar="FILE.yaml key=value", help="another file, other settings")
    asked = parser.parse_intermixed_args(words)  # flags may stand between the words
    try:
        grid = read_grid(asked.words)
        if "predict" in (asked.stages or RUN):
            from shared.trainer.planner.scaling_law import require_scipy

            require_scipy()  # now, and not after the hours of the grid
    except CourseError as error:
        refuse(error)
    for stage, function in RUN.items():
        if stage in (asked.stages or RUN):
            function(grid)


def read_grid(words: list[str]) -> Grid:
    """The grid that a file and `key=value` words describe.

    Raises:
        CourseError: a file or a setting that cannot be used.
    """
    from shared.trainer.settings import read_settings

    files, said = [word for word in words if "=" not in word], dict(word.split("=", 1) for word in words if "=" in word)
    if len(files) > 1:
        raise SettingError(f"Two configurations cannot be given ({files[0]}, {files[1]}): write settings as key=value.")
    settings = read_settings(Path(files[0]) if files else Path(__file__).with_suffix(".yaml"))
    if not isinstance(settings.get("grid"), dict):
        raise SettingError("There is no section grid, which says what to train: see chapters/12_grpo/scaling.yaml.")
    binding.choose(settings.get("impl", "reference"))
    from shared.trainer.config import TrainerConfig

    own = {key.removeprefix("grid."): value for key, value in said.items() if key.startswith("grid.")}
    plan = configured(GridConfig, with_words(GridConfig, settings.pop("grid"), own), "grid")
    shared = with_words(TrainerConfig, settings, {key: value for key, value in said.items() if not key.startswith("grid.")})
    grid = Grid(plan, shared, Console(markup=False, emoji=False))
    grid.config(plan.sizes[0], plan.longest, 0, plan.output)  # refuses the trainer's settings now
    return grid


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CourseError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(INTERRUPTED)
