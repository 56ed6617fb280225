"""A training run on text with chapter 01's loop: evaluate on held-out files, end with a table, a plot and a sample.

Run scripts of chapters 01, 02 and 05 call `run_on_text`; those of 03, 04 and 06 take parts of it. It holds what a run needs and the loop
leaves out: the progress bar, and what is written to disk. Checkpoints and resuming are chapter 04's.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.optim import Optimizer

from chapters.byte_models import BigramModel
from shared.batches import random_batches, require_window, sequential_batches, split_batch
from shared.corpus import Corpus, embedded_corpus, read_files
from shared.course import binding
from shared.course.errors import CourseError
from shared.devices import pick_device
from shared.output_files import require_writable
from shared.loop import accumulate_gradients, apply_update, evaluate, train
from shared.loss import next_token_objective
from shared.sampling import generate, require_drawing
from shared.totals import Batch, Objective, Runner, Totals, Updater, bits_per_byte

QUICK_WINDOWS = 512  # held-out windows of an evaluation during training; the last one takes all
EVALUATION_BATCH = 64


@dataclass
class History:
    """Losses by step in bits per byte, and what speed is computed from."""

    training: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0  # of training alone

    @property
    def tokens_per_second(self) -> int:
        return round(self.tokens / self.seconds) if self.seconds else 0

    def last_losses(self) -> str:
        held_out = f"   held out {self.held_out[-1][1]:.3f}" if self.held_out else ""
        return f"training {self.training[-1][1]:.3f}{held_out}"


@dataclass
class Texts:
    """The run's data on its device: [bytes] uint8 each."""

    training: Tensor
    held_out: Tensor


def adamw(model: nn.Module, config: Any) -> Optimizer:
    """PyTorch's AdamW at a constant rate: the optimizer until chapter 05 builds its own."""
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate)


def run_on_text(
    config: Any,
    build_model: Callable[[], nn.Module],
    context: int,
    objective: Objective = next_token_objective,
    *,
    make_optimizer: Callable[[nn.Module, Any], Optimizer] = adamw,
    runner: Runner = accumulate_gradients,
    updater: Updater = apply_update,
) -> None:
    """Train the model that `build_model` makes on text, as `config` says, and leave the results in `config.output`.

    Args:
        config: the fields of chapter 01's `RunConfig`.
        build_model: makes the model; called after the seed is set.
        context: how many of the last bytes the model needs to see when it samples.
        objective: trains the model and judges it. The bigram table beside it is always judged by `next_token_objective`.
        make_optimizer: make_optimizer(model, config) -> the optimizer.
        runner, updater: parts of a step, as `shared.loop.train` takes them.
    """
    console = Console(markup=False, emoji=False)
    require_sensible(config)
    device = pick_device(config.device)
    require_writable(config.output)
    corpus = corpus_of(config.data)
    texts = texts_of(corpus, config.seq, device)
    torch.manual_seed(config.seed)
    model = build_model().to(device)
    print_header(console, corpus, model, device)

    batches = steps_of(config, texts.training)
    loop = train(model, make_optimizer(model, config), batches, objective, steps=config.steps, runner=runner, updater=updater)
    losses = ((step, bits_per_byte(totals.loss_sum, totals.token_count.item()), totals.token_count.item()) for step, totals in loop)
    history = train_with_progress(
        config, losses, lambda: bits(*evaluate_text(model, texts.held_out, config.seq, objective, QUICK_WINDOWS))[0], console
    )
    totals, byte_count = evaluate_text(model, texts.held_out, config.seq, objective)
    table_bits, _ = bits(*evaluate_text(BigramModel.count(texts.training).to(device), texts.held_out, config.seq, next_token_objective))
    model_bits, correct = bits(totals, byte_count)
    sample = sample_text(model, config, context, device)

    results = {
        "steps": len(history.training),
        "training bytes seen": history.tokens,
        "bytes per second": history.tokens_per_second,
        "held-out bits per byte": f"{model_bits:.3f}",
        "held-out bits per byte, bigram table": f"{table_bits:.3f}",
        "held-out next bytes guessed right": f"{correct:.1%}",
    }
    show_and_keep(config, console, model, sample, results, history, table_bits)


def show_and_keep(
    config: Any, console: Console, model: nn.Module, sample: str, results: dict[str, Any], history: History, table_bits: float
) -> None:
    """Print a finished run's sample and results, and write sample, plot, figures and weights into its output folder."""
    console.rule("a sample")
    console.print(sample, markup=False, highlight=False)
    console.rule()
    print_table(console, results)
    (config.output / "sample.txt").write_text(sample, encoding="utf-8")
    plot_losses(history, table_bits, "bigram table, held-out files", config.output / "loss.png", top=8.2)
    write_results(config.output, model, {"figures": results, "training": history.training, "held_out": history.held_out})
    console.print(f"Plot: {config.output / 'loss.png'}   sample, figures and weights beside it.", highlight=False)


def corpus_of(data: Path | list[Path]) -> Corpus:
    """The reader's own files, or the embedded corpus where none are given."""
    paths = data if isinstance(data, list) else [data]
    return read_files(paths) if paths else embedded_corpus()


def texts_of(corpus: Corpus, seq: int, device: torch.device) -> Texts:
    """Both parts of a corpus on the device, each long enough for one window of `seq` bytes."""
    texts = Texts(corpus.training_bytes().to(device), corpus.held_out_bytes().to(device))
    try:
        require_window(texts.training, seq)
        require_window(texts.held_out, seq)
    except ValueError as error:
        raise CourseError(str(error)) from None
    return texts


def require_sensible(config: Any) -> None:
    """Refuse, before any work, values that would only fail after it."""
    require_numbers(config, ("steps", "seq", "batch_size", "micro_batch_size", "evaluate_every", "sample_bytes"))
    require_sample(config)


def require_sample(config: Any) -> None:
    """Refuse a prompt and a way to draw that would only fail when the model has been trained."""
    if not config.prompt:
        raise CourseError("The prompt is empty: give at least one character to continue from.")
    try:
        config.prompt.encode()
        require_drawing(config.temperature, config.top_k)
    except UnicodeEncodeError:
        raise CourseError(f"The prompt {config.prompt!r} is not UTF-8: give other characters.") from None
    except ValueError as error:
        raise CourseError(str(error)) from None


def require_numbers(config: Any, counts: Sequence[str]) -> None:
    """Refuse a count below 1, a seed that no generator takes, and a learning rate, where there is one, that is not above 0."""
    for name in counts:
        if getattr(config, name) < 1:
            raise CourseError(f"{name} is {getattr(config, name)}: give at least 1.")
    if not 0 <= config.seed < 2**63:
        raise CourseError(f"seed is {config.seed}: give at least 0 and less than 2**63.")
    rate = getattr(config, "learning_rate", 1.0)
    if not 0 < rate < math.inf:
        raise CourseError(f"learning_rate is {rate}: give a number above 0.")


def require_finite(loss: float, step: int) -> None:
    """Stop a training that has diverged where it did, rather than at whatever fails later."""
    if not math.isfinite(loss):
        raise CourseError(f"The loss is {loss} at step {step}: the training has diverged, start it again with a smaller learning rate.")


def print_header(console: Console, corpus: Corpus, model: nn.Module, device: torch.device) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    megabytes = sum(len(document.content) for document in corpus.training) / 1e6
    console.print(
        f"{type(model).__name__}, {parameters:,} parameters, on {device}. {len(corpus.training)} files to train on "
        f"({megabytes:.1f} MB), {len(corpus.held_out)} held out.\n{binding.summary()}",
        highlight=False,
    )


def train_with_progress(
    config: Any, losses: Iterable[tuple[int, float, int]], held_out: Callable[[], float], console: Console
) -> History:
    """Train, under a progress bar; without a terminal, a line at each evaluation instead. Ctrl-C ends it early.

    Args:
        losses: trains as it is iterated over: (step, bits per byte, tokens) of each step.
        held_out: a quick evaluation, in bits per byte.
    """
    history = History()
    bar = Progress(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    try:
        with bar:
            task = bar.add_task("training", total=config.steps, loss="")
            began = time.perf_counter()
            for step, loss, tokens in losses:
                require_finite(loss, step)
                history.training.append((step, loss))
                history.tokens += tokens
                if step % config.evaluate_every == 0 or step == config.steps:
                    history.seconds += time.perf_counter() - began
                    history.held_out.append((step, held_out()))
                    require_finite(history.held_out[-1][1], step)
                    if not console.is_terminal:
                        console.print(f"step {step:>6}   {history.last_losses()} bits per byte", highlight=False)
                    began = time.perf_counter()
                bar.update(task, advance=1, loss=f"{history.last_losses()} bits per byte")
    except KeyboardInterrupt:
        if not history.held_out:
            raise
        console.print("Stopped early: what follows is the model as it is now.", style="yellow")
    return history


def steps_of(config: Any, stream: Tensor) -> Iterator[list[Batch]]:
    generator = torch.Generator().manual_seed(config.seed)
    for batch in random_batches(stream, config.batch_size, config.seq, generator):
        yield split_batch(batch, config.micro_batch_size)


def evaluate_text(
    model: nn.Module, stream: Tensor, seq: int, objective: Objective, limit: int | None = None
) -> tuple[Totals, int]:
    """The totals over held-out text and the bytes that they cover. Here a token is a byte."""
    totals = evaluate(model, sequential_batches(stream, EVALUATION_BATCH, seq, limit), objective)
    return totals, totals.token_count.item()


def bits(totals: Totals, byte_count: int) -> tuple[float, float]:
    """Bits per byte, and the share of bytes that were the model's first guess."""
    return bits_per_byte(totals.loss_sum, byte_count), totals.mean_metrics()["correct"]


def sample_text(model: nn.Module, config: Any, context: int, device: torch.device) -> str:
    """The prompt and what the model continues it with, up to the end of a document."""
    prompt = torch.tensor([list(config.prompt.encode())], device=device)
    generator = torch.Generator(device).manual_seed(config.seed)
    drawn = generate(
        model, prompt, config.sample_bytes, context=context,
        temperature=config.temperature, top_k=config.top_k, generator=generator,
    )
    content = bytes(token.item() for token in drawn)
    return config.prompt + content.partition(b"\0")[0].decode(errors="replace")


def print_table(console: Console, figures: dict[str, Any]) -> None:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)


def write_results(folder: Path, model: nn.Module, record: dict[str, Any]) -> None:
    (folder / "figures.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    save_model(model, str(folder / "model.safetensors"))  # holds a tensor that two modules share once


def plot_losses(history: History, reference: float, name: str, path: Path, top: float) -> None:
    """Both losses, beside a `reference` of this `name`, in bits per byte up to `top`."""
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    figure = Figure()
    axes = figure.subplots()
    axes.plot(*zip(*history.training, strict=True), color=figures.TRAINING, alpha=0.35, linewidth=0.8, label="training batch")
    axes.plot(*zip(*history.held_out, strict=True), color=figures.HELD_OUT, marker="o", label="held-out files")
    axes.axhline(reference, color=figures.REFERENCE, linestyle="--", label=name)
    axes.set(xlabel="training step", ylabel="loss (bits per byte)", ylim=(0, top))
    axes.legend()
    figure.savefig(path)
