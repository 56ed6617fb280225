"""The grid of `12_grpo/scaling.py`: its settings, which runs it has, and how one is trained by the trainer.

Each size is trained once at a constant learning rate (the trunk). Every length is a copy of it, taken earlier, whose learning rate falls to
0 (a branch): the same weights as those of a WSD run of that length from its first step, for a fraction of its cost.
"""

import hashlib
import json
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from shared.course.errors import CourseError
from shared.course.typed import merged

HEAD_DIM = 16
LOSS = "bits per byte"  # held out
Cell = dict[str, Any]  # what a run is: width, layers, steps, and a digest of the settings that all share


@dataclass(frozen=True)
class Size:
    """A model's shape; its heads have 16 dimensions, its feed-forward layers 8/3 of the width.

    Args:
        width: hidden size, a multiple of 16.
        layers: blocks.
    """

    width: int
    layers: int

    def __post_init__(self) -> None:
        if self.width < HEAD_DIM or self.width % HEAD_DIM or self.layers < 1:
            raise ValueError(f"A size of width {self.width} and layers {self.layers}: give a multiple of {HEAD_DIM}, and at least 1 layer.")


@dataclass(frozen=True)
class GridConfig:
    """The section `grid` of the YAML file.

    Args:
        sizes: the models of the grid.
        budgets: FLOPs of a run, 6 x parameters x tokens.
        shortest, longest: steps of a run; a size is trained with the budgets that give it so many.
        seeds: runs of each cell of the widths in `repeated`; the others have one.
        repeated: see `seeds`.
        decay: share of a run's steps in which the learning rate falls to the schedule's minimum.
        big: the model whose loss is predicted.
        big_flops: its budget.
        output: folder for everything.
    """

    sizes: tuple[Size, ...]
    budgets: tuple[float, ...]
    big: Size
    big_flops: float
    shortest: int = 60
    longest: int = 2500
    seeds: int = 1
    repeated: tuple[int, ...] = ()
    decay: float = 0.2
    output: Path = Path("runs/12_grpo_scaling")

    def __post_init__(self) -> None:
        if len(set(self.sizes)) < 3 or len(set(self.budgets)) < 2:
            raise ValueError("grid.sizes needs at least three sizes and grid.budgets two: five constants are fitted.")
        if min(*self.budgets, self.big_flops) <= 0 or self.seeds < 1 or not 0 < self.decay < 1 or not 2 <= self.shortest <= self.longest:
            raise ValueError("The grid needs positive budgets, seeds of at least 1, a decay between 0 and 1, and 2 <= shortest <= longest.")
        if unknown := set(self.repeated) - {size.width for size in self.sizes}:
            raise ValueError(f"grid.repeated holds {min(unknown)}, which is the width of no size.")


@dataclass(frozen=True)
class Grid:
    """The grid, its cells and its files. settings: of the trainer, as the YAML file gives them."""

    plan: GridConfig
    settings: dict[str, Any]
    console: Console

    @cached_property
    def digest(self) -> str:
        """Of all that decides what a cell's loss is, beside the cell itself."""
        decisive = {name: value for name, value in self.settings.items() if name not in ("engine", "report", "impl")}
        decisive["data"] = {name: value for name, value in decisive.get("data", {}).items() if name != "prepared"}
        return hashlib.sha256(json.dumps([decisive, self.plan.decay], sort_keys=True, default=str).encode()).hexdigest()[:12]

    @cached_property
    def text(self) -> Any:
        from shared.data.prepare import prepare

        data = self.config(self.plan.sizes[0], self.plan.longest, 0, self.plan.output).data
        return prepare(data.prepare, data.prepared, self.console)

    def config(self, size: Size, steps: int, seed: int, folder: Path, constant: bool = False) -> Any:
        """The trainer's configuration of one run."""
        from shared.trainer.config import TrainerConfig
        from shared.trainer.settings import from_settings

        schedule = {"name": "constant"} if constant else {"name": "wsd", "decay_steps": self.decay_steps(steps)}
        heads = size.width // HEAD_DIM
        model = {"hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": heads}
        model |= {"intermediate_size": size.width * 8 // 3 // 8 * 8}
        own = {"steps": steps, "seed": seed, "model": model, "schedule": schedule, "engine": {"output": str(folder)}}
        return from_settings(TrainerConfig, merged(self.settings, own))

    def decay_steps(self, steps: int) -> int:
        return max(1, round(self.plan.decay * steps))

    def parameters(self, size: Size) -> int:
        """All of them, the tied embedding once: at the output it costs as many FLOPs as any other matrix."""
        from shared.model.counting import parameter_counts

        model = self.config(size, self.plan.longest, 0, self.plan.output).model
        return sum(parameter_counts(replace(model, vocab_size=self.text.tokenizer.vocab_size)).values())

    @cached_property
    def step_tokens(self) -> int:
        data = self.config(self.plan.sizes[0], self.plan.longest, 0, self.plan.output).data
        return data.batch_size * data.seq

    def steps(self, size: Size, budget: float) -> int:
        return round(budget / (6 * self.parameters(size) * self.step_tokens))

    def cell(self, size: Size, steps: int) -> Cell:
        return {"width": size.width, "layers": size.layers, "steps": steps, "settings": self.digest}

    def cells(self) -> dict[str, Cell]:
        """Name -> cell, size by size, the shortest first.

        Raises:
            CourseError: there are too few to fit five constants, or the text is too short for one.
        """
        cells = {}
        for size in self.plan.sizes:
            for budget in sorted(self.plan.budgets):
                steps = self.steps(size, budget)
                if self.plan.shortest <= steps <= self.plan.longest:
                    cells[f"{size.width}x{size.layers}, {steps} steps"] = self.cell(size, steps) | {"budget": budget}
        if len(cells) < 6:
            raise CourseError(
                f"Only {len(cells)} runs have between {self.plan.shortest} and {self.plan.longest} steps, and five constants are fitted: "
                "give other grid.budgets, or a wider range."
            )
        for cell in cells.values():
            self.config(Size(cell["width"], cell["layers"]), cell["steps"], 0, self.plan.output)  # refuses a schedule that does not fit
        return cells

    @property
    def kept(self) -> Path:
        return self.plan.output / "grid.json"

    def rows(self) -> list[dict[str, Any]]:
        """The runs of this grid that are done: cell, seed and figures in one."""
        from chapters.trials import find, read_results

        kept = read_results(self.kept)
        seeds = {name: self.seeds(cell) for name, cell in self.cells().items()}
        return [
            cell | {"seed": seed} | found
            for name, cell in self.cells().items()
            for seed in range(seeds[name])
            if (found := find(kept, cell, seed)) is not None
        ]

    def seeds(self, cell: Cell) -> int:
        return self.plan.seeds if cell["width"] in self.plan.repeated else 1


# Training.


def train_grid(grid: Grid) -> None:
    """Train every cell that is not trained yet, and keep its figures."""
    from chapters.trials import run_trials
    from shared.devices import keep_freed_memory

    keep_freed_memory()
    cells, done = grid.cells(), len(grid.rows())
    wanted = sum(map(grid.seeds, cells.values()))
    if done < wanted:
        grid.console.print(f"{wanted} runs of {len(grid.plan.sizes)} sizes, {done} done. {cost(grid)}", highlight=False, soft_wrap=True)
    trial = partial(train_cell, grid)
    run_trials(cells, trial, 1, grid.kept, grid.console)
    repeated = {name: cell for name, cell in cells.items() if grid.seeds(cell) > 1}
    run_trials(repeated, trial, grid.plan.seeds, grid.kept, grid.console)


def train_cell(grid: Grid, cell: Cell, seed: int) -> dict[str, float]:
    """One length of one size: the trunk as far as the decay, then a copy of it through the decay."""
    size, steps, began = Size(cell["width"], cell["layers"]), cell["steps"], time.perf_counter()
    before = steps - grid.decay_steps(steps)
    trunk = grid.plan.output / "runs" / f"{size.width}x{size.layers}-seed{seed}-{grid.digest}"
    branch = trunk.with_name(f"{trunk.name}-{steps}")
    if not (branch / "checkpoints").is_dir():
        if fitted(grid, grid.config(size, grid.plan.longest, seed, trunk, constant=True), before).engine.step != before:
            shutil.rmtree(trunk)  # it is longer already, since a row was taken out of the results: begin again
            fitted(grid, grid.config(size, grid.plan.longest, seed, trunk, constant=True), before)
        copy = branch / "copying"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(trunk / "checkpoints", copy)
        copy.rename(branch / "checkpoints")
    figures = measured(grid, grid.config(size, steps, seed, branch), steps)
    shutil.rmtree(branch)
    return figures | {"seconds": time.perf_counter() - began}


def fitted(grid: Grid, config: Any, steps: int, evaluated: bool = False) -> Any:
    """The trainer's run, trained up to `steps`.

    Raises:
        SystemExit: it was asked to leave, and is saved.
        CourseError: it stopped by itself.
    """
    from shared.trainer.run import build

    run = build(config, Console(quiet=True))
    loader, held_out = run.mode.loaders(run.config, run.strategy)
    engine = run.engine.fit(loader, held_out if evaluated else None, steps=steps)
    if engine.leaving:
        grid.console.print("Saved. The same command continues.")
        raise SystemExit(128 + signal.Signals[engine.stopped])
    if engine.step < steps:
        raise CourseError(f"The run in {config.engine.output} stopped after step {engine.step} of {steps}: {engine.stopped}.")
    return run


def measured(grid: Grid, config: Any, steps: int) -> dict[str, float]:
    """What a finished run is: parameters, tokens, FLOPs by both counts, held-out loss."""
    from shared.engine.metrics.flops import model_flops_per_token
    from shared.model.counting import parameter_counts
    from shared.totals import bits_per_byte
    from shared.trainer.modes.pretrain import evaluation_loader

    run = fitted(grid, config, steps, evaluated=True)
    engine, config = run.engine, run.config
    if engine.validation is None:  # it was killed after its last step, before its row was kept
        engine.evaluate()
    size = evaluation_loader(config, run.text, config.data.held_out_rows).byte_count(run.text.tokenizer.byte_lengths)
    parameters, tokens = sum(parameter_counts(config.model).values()), steps * grid.step_tokens
    return {
        "parameters": parameters,
        "tokens": tokens,
        "flops": 6 * parameters * tokens,
        "flops with attention": model_flops_per_token(config.model, config.data.seq) * tokens,
        LOSS: bits_per_byte(engine.validation.loss_sum, size),
        "nats per token": engine.validation.mean_loss,
    }


def cost(grid: Grid) -> str:
    """What the missing runs will take, from a few steps of each size."""
    done = {(row["width"], row["layers"], row["steps"], row["seed"]) for row in grid.rows()}
    steps: dict[Size, int] = {}
    for cell in grid.cells().values():
        size = Size(cell["width"], cell["layers"])
        left = sum((size.width, size.layers, cell["steps"], seed) not in done for seed in range(grid.seeds(cell)))
        decay = grid.decay_steps(cell["steps"])
        steps[size] = max(steps.get(size, 0), left and grid.seeds(cell) * (cell["steps"] - decay)) + left * decay
    seconds = sum(count * seconds_of_step(grid, size) for size, count in steps.items() if count)
    return f"About {seconds / 60:.0f} minutes, by the speed of a few steps."


def seconds_of_step(grid: Grid, size: Size, steps: int = 8) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = fitted(grid, grid.config(size, grid.plan.longest, 0, Path(folder), constant=True), 1)
        loader, _ = run.mode.loaders(run.config, run.strategy)
        began = time.perf_counter()
        run.engine.fit(loader, None, steps=1 + steps)
        return (time.perf_counter() - began) / steps
