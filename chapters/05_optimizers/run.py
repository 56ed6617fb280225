"""Train chapter 02's small transformer twice, with AdamW and with another optimizer, and say when the second was where the first ended.

python chapters/05_optimizers/run.py                             AdamW, then Muon
python chapters/05_optimizers/run.py --impl mine                 with your own exercises; with your build, where all its stages passed
python chapters/05_optimizers/run.py --optimizer.name lion --optimizer.lr 0.0006
python chapters/05_optimizers/run.py --baseline null --precision bfloat16 --schedule.name wsd
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shared.course.errors import CourseError
from shared.course.launch import launch
from shared.model.config import ModelConfig
from shared.optim.config import OptimizerConfig, Precision, ScheduleConfig


@dataclass
class RunConfig:
    """Train a small transformer with an optimizer of your choice, beside AdamW.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        data: a text file or folder to train on, or a list of them; none for the embedded corpus.
        steps: training steps of each run.
        seq: bytes that each window of text predicts.
        batch_size: windows in a step.
        micro_batch_size: windows in one forward and backward.
        optimizer: the optimizer; every field of OptimizerConfig.
        baseline: the optimizer to compare with, trained first; null for none.
        schedule: of both runs' learning rates; its `steps` are the run's.
        precision: of the matrix products. float16 brings a loss scale along.
        max_norm: the longest gradient that is not clipped; null for no clipping.
        model: the model; every field of ModelConfig. Tokens are bytes, so the vocabulary is 256.
        evaluate_every: steps between evaluations on held-out text.
        sample_bytes: length of the text sampled at the end.
        temperature: of that sample; 0 takes the likeliest byte.
        top_k: how many of the likeliest bytes the sample draws from; null for all.
        prompt: what the sample continues.
        seed: of the initial weights, the order of the data, and the sample.
        device: where to run; auto takes a GPU where there is one.
        output: folder for both runs' plots, samples, figures and weights, and the plot that compares them.
    """

    impl: Literal["reference", "mine", "mixed"] = "reference"
    data: Path | list[Path] = field(default_factory=list)
    steps: int = 400
    seq: int = 128
    batch_size: int = 16
    micro_batch_size: int = 16
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    baseline: OptimizerConfig | None = None
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: Precision = "float32"
    max_norm: float | None = 1.0
    model: ModelConfig = field(default_factory=ModelConfig)
    evaluate_every: int = 50
    sample_bytes: int = 400
    temperature: float = 0.7
    top_k: int | None = 40
    prompt: str = "def "
    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    output: Path = Path("runs/05_optimizers")


def run(config: RunConfig) -> None:
    # The core is imported here, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from chapters.text_run import require_sensible
    from shared.course.build_check import build_line
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable

    require_sensible(config)
    try:
        config = replace(config, schedule=replace(config.schedule, steps=config.steps))
    except ValueError as error:
        raise CourseError(str(error)) from None
    if config.model.architecture != "decoder" or config.model.vocab_size != 256:
        raise CourseError("Predicting the next byte needs a decoder of 256 tokens: leave model.architecture and model.vocab_size.")
    if config.seq > (longest := config.model.max_position_embeddings):
        raise CourseError(f"seq is {config.seq} and model.max_position_embeddings only {longest}: make the second as large.")
    require_writable(config.output)
    keep_freed_memory()
    console = Console(markup=False, emoji=False)
    if config.impl != "reference":
        print(build_line("05"))
    runs = {"baseline": config.baseline, "run": config.optimizer}
    for name, optimizer in runs.items():
        if optimizer is not None:
            console.rule(f"{name}: {optimizer.name}, peak rate {optimizer.lr:g}")
            train_with(replace(config, optimizer=optimizer, output=config.output / name))
    if config.baseline is not None:
        console.print(compared(config), highlight=False)


def train_with(config: RunConfig) -> None:
    """One run, with every part of a step that this chapter adds."""
    from chapters.text_run import run_on_text
    from shared.course.build_check import passed_build
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.loop import accumulate_gradients
    from shared.model.transformer import TransformerModel
    from shared.optim.build import build_optimizer
    from shared.optim.loss_scale import LossScaler
    from shared.optim.precision import autocast_objective
    from shared.optim.schedules import attach_schedule
    from shared.optim.updater import Update
    from run_build import built_optimizer

    def make_optimizer(model: Any, config: RunConfig) -> Any:
        optimizer = built_optimizer(passed_build("05"), model, config.optimizer) or build_optimizer(model, config.optimizer)
        attach_schedule(config.schedule, optimizer)
        return optimizer

    scaler = LossScaler() if config.precision == "float16" else None
    try:
        update = Update(config.max_norm, scaler)
        run_on_text(
            config,
            lambda: TransformerModel(config.model, seed=config.seed),
            config.seq,
            autocast_objective(packed_next_token_objective, config.precision),
            make_optimizer=make_optimizer,
            runner=scaler.scaled(accumulate_gradients) if scaler else accumulate_gradients,
            updater=update,
        )
    except ValueError as error:  # a pattern that matches nothing, a run that diverged
        raise CourseError(str(error)) from None


def compared(config: RunConfig) -> str:
    """When the run was where the baseline ended, on the held-out text that both looked at; and a plot of both."""
    files = {name: config.output / name / "figures.json" for name in ("baseline", "run")}
    curves = {name: json.loads(file.read_text(encoding="utf-8"))["held_out"] for name, file in files.items()}
    plot_both(config, curves)
    last, wanted = curves["baseline"][-1]
    reached = next((step for step, loss in curves["run"] if loss <= wanted), None)
    name = config.optimizer.name
    when = f"was there after {reached}" if reached is not None else f"did not get there and ended at {curves['run'][-1][1]:.3f}"
    ended = f"{config.baseline.name} ended at {wanted:.3f} held-out bits per byte after {last} steps"
    return f"{ended}; {name} {when}.\nPlot: {config.output / 'both.png'}"


def plot_both(config: RunConfig, curves: dict[str, list]) -> None:
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    drawing = Figure()
    axes = drawing.subplots()
    colors, optimizers = (figures.REFERENCE, figures.HELD_OUT), (config.baseline, config.optimizer)
    for (name, curve), color, optimizer in zip(curves.items(), colors, optimizers, strict=True):
        axes.plot(*zip(*curve, strict=True), marker="o", color=color, label=f"{optimizer.name} ({name})")
    axes.set(xlabel="training step", ylabel="held-out loss (bits per byte)")
    axes.legend()
    drawing.savefig(config.output / "both.png")


if __name__ == "__main__":
    launch(run, RunConfig, Path(__file__).with_name("run.yaml"))
