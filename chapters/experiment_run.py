"""Variants of a small model compared over seeds on text: what the experiments of chapters 02, 05 and 09 share.

The core is imported within the functions, after a script's `launch` has chosen whose exercises it runs with.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from chapters.text_run import Texts
    from chapters.trials import Figures, Settings


@dataclass
class ExperimentConfig:
    """Compare variants of a small model, each trained from several seeds.

    Args:
        experiment: which comparison.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        seeds: training runs of each variant; the seed sets the initial weights and the windows that are drawn.
        steps: training steps of each run.
        seq: bytes that each window of text predicts.
        batch_size: windows in a step.
        learning_rate: AdamW's peak.
        windows: held-out windows of the evaluation, the same for all runs.
        data: a text file or folder, or a list of them; none for the embedded corpus.
        device: where to run; auto takes a GPU where there is one.
        output: folder for the results, tables and plots.
    """

    experiment: str
    impl: Literal["reference", "mine", "mixed"] = "reference"
    seeds: int = 3
    steps: int = 200
    seq: int = 64
    batch_size: int = 8
    learning_rate: float = 0.004
    windows: int = 128
    data: Path | list[Path] = field(default_factory=list)
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    output: Path = Path("runs/experiments")

    def settings(self, *names: str) -> dict[str, Any]:
        """These fields, and the text: what a trial's figures depend on in every experiment, in values that JSON can hold."""
        paths = self.data if isinstance(self.data, list) else [self.data]
        return {name: getattr(self, name) for name in names} | {"data": [str(path) for path in paths]}


def prepare(
    config: ExperimentConfig, longest: int, window: int | None = None, least_steps: int = 1
) -> tuple["Texts", "torch.device", "Console"]:
    """Refuse what would only fail later, and load the text: it, the device, and the console to print to.

    Args:
        longest: how many bytes the models take.
        window: of how many bytes the text must hold one; None for `config.seq`.
        least_steps: that the runs' schedule needs.

    Raises:
        CourseError: names the field.
    """
    from rich.console import Console

    from chapters.text_run import corpus_of, texts_of
    from shared.course.errors import CourseError
    from shared.devices import keep_freed_memory, pick_device
    from shared.output_files import require_writable

    for name, least in (("seeds", 1), ("seq", 1), ("batch_size", 1), ("windows", 1), ("steps", least_steps)):
        if getattr(config, name) < least:
            raise CourseError(f"{name} is {getattr(config, name)}: give at least {least}.")
    if config.seq > longest:
        raise CourseError(f"seq is {config.seq}: these models are made for at most {longest}.")
    require_writable(config.output)
    keep_freed_memory()
    device = pick_device(config.device)
    return texts_of(corpus_of(config.data), window or config.seq, device), device, Console(markup=False, emoji=False)


def compare(
    config: ExperimentConfig,
    variants: dict[str, "Settings"],
    trial: Callable[["Settings", int], "Figures"],
    console: "Console",
    *,
    title: str | None = None,
    kept: str | None = None,
    seeds: int | None = None,
) -> dict[str, list["Figures"]]:
    """Run every variant from every seed, and print the table. title, kept: of the table, and of the file of results; `config.experiment`
    where they are None, as `config.seeds` are the seeds."""
    from chapters import trials
    from shared.course.errors import CourseError

    seeds = seeds or config.seeds
    try:
        results = trials.run_trials(variants, trial, seeds, config.output / f"{kept or config.experiment}.json", console)
    except ValueError as error:
        raise CourseError(str(error)) from None
    trials.print_results(console, f"{title or config.experiment}: {config.steps} steps, {seeds} seeds", results)
    return results
