"""Train chapter 02's small LLaMA with the engine: watched, saved, and resumed exactly. Interrupt it and start it again.

python chapters/04_runtime_engine/run.py                               continues where it stopped, if it did
python chapters/04_runtime_engine/run.py --impl mine                   with your own exercises
python chapters/04_runtime_engine/run.py --engine.dump.every 500       every field of EngineConfig is an option
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shared.course.launch import launch
from shared.engine.config import EngineConfig
from shared.model.config import ModelConfig

if TYPE_CHECKING:
    from rich.console import Console

    from shared.engine.engine import RuntimeEngine
    from chapters.text_run import Texts


@dataclass
class RunConfig:
    """Train a small transformer with the runtime engine.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        data: a text file or folder to train on, or a list of them; none for the embedded corpus.
        steps: training steps of the whole run, those before an interruption included.
        seq: bytes that each window of text predicts.
        batch_size: windows in a step.
        micro_batch_size: windows in one forward and backward.
        learning_rate: of AdamW, constant.
        model: the model; every field of ModelConfig. Tokens are bytes, so the vocabulary is 256.
        engine: how the run is watched, saved and ended; every field of EngineConfig.
        held_out_windows: windows of held-out text in an evaluation.
        sample_bytes: length of the text sampled at the end.
        temperature: of that sample; 0 takes the likeliest byte.
        top_k: how many of the likeliest bytes the sample draws from; null for all.
        prompt: what the sample continues.
        seed: of the initial weights, the order of the data, and the sample.
    """

    impl: Literal["reference", "mine", "mixed"] = "reference"
    data: Path | list[Path] = field(default_factory=list)
    steps: int = 1500
    seq: int = 128
    batch_size: int = 16
    micro_batch_size: int = 16
    learning_rate: float = 0.002
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    held_out_windows: int = 512
    sample_bytes: int = 400
    temperature: float = 0.7
    top_k: int | None = 40
    prompt: str = "def "
    seed: int = 0


def run(config: RunConfig) -> None:
    # The core is imported here, after `launch` has chosen whose exercises it runs with.
    import torch
    from rich.console import Console

    from chapters.text_run import corpus_of, print_header, texts_of
    from chapters.text_windows import TextWindows
    from shared.course.build_check import unused_line
    from shared.devices import keep_freed_memory
    from shared.batches import sequential_batches
    from shared.data.loader import StatefulLoader
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.engine.engine import RuntimeEngine
    from shared.model.transformer import TransformerModel

    console = Console(markup=False, emoji=False)
    require_trainable(config)
    if config.impl != "reference":
        print(unused_line("04", "it shows what the core's engine watches and how it ends, for which the build has no functions."))
    keep_freed_memory()
    corpus = corpus_of(config.data)
    texts = texts_of(corpus, config.seq, torch.device("cpu"))
    loader = StatefulLoader(
        TextWindows(texts.training, config.seq, config.seed), batch_size=config.batch_size, micro_batch_size=config.micro_batch_size
    )
    held_out = list(sequential_batches(texts.held_out, 64, config.seq, config.held_out_windows))

    torch.manual_seed(config.seed)  # dropout, where the model has any
    model = TransformerModel(config.model, seed=config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    engine = RuntimeEngine(model, optimizer, config.engine, objective=packed_next_token_objective, console=console)
    print_header(console, corpus, model, engine.device)  # after the engine, whose callbacks bring the last of the parts that it counts
    engine.fit(loader, held_out, steps=config.steps)
    if engine.shutdown.reason and engine.step < config.steps:
        console.print(f"The same command resumes from step {engine.step}.", highlight=False)
    else:
        show_results(config, engine, texts, console)


def require_trainable(config: RunConfig) -> None:
    """Refuse, before any work, what would only fail after it."""
    from shared.course.errors import CourseError
    from chapters.text_run import require_numbers, require_sample

    model = config.model
    require_numbers(config, ("steps", "seq", "batch_size", "micro_batch_size", "held_out_windows", "sample_bytes"))
    if model.architecture != "decoder" or model.vocab_size != 256:
        raise CourseError("Predicting the next byte needs a decoder with model.vocab_size 256.")
    if config.seq > model.max_position_embeddings:
        longest = model.max_position_embeddings
        raise CourseError(f"seq is {config.seq} and model.max_position_embeddings only {longest}: make the second as large.")
    require_sample(config)


def show_results(config: RunConfig, engine: "RuntimeEngine", texts: "Texts", console: "Console") -> None:
    """A sample, a table and a plot of what the run wrote down of itself."""
    from chapters.text_run import print_table, sample_text
    from shared.engine.trackers.jsonl import read_jsonl
    from shared.totals import bits_per_byte

    evaluation = engine.validation or engine_evaluation(engine)
    console.rule("a sample")
    console.print(sample_text(engine.model, config, config.seq, engine.device), markup=False, highlight=False)
    console.rule()
    rows = {"steps": engine.step, "held-out bits per byte": f"{bits_per_byte(evaluation.loss_sum, evaluation.token_count):.3f}"}
    print_table(console, rows | {"checkpoints": ", ".join(map(str, engine.checkpoints.steps()))})
    figures = engine.output / "metrics.jsonl"
    if figures.is_file():
        plot(read_jsonl(figures), engine.output / "run.png")
        console.print(f"Plot: {engine.output / 'run.png'}   every figure of every log: {figures}", highlight=False)


def engine_evaluation(engine: "RuntimeEngine"):
    """Of a run that was complete already and took no step now."""
    engine.evaluate()
    return engine.validation


def plot(logged: dict[int, dict[str, float]], path: Path) -> None:
    from math import log

    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    figure = Figure(figsize=(7.0, 5.0))
    losses, norms = figure.subplots(2, sharex=True)
    for axes, name, label, color, unit in (
        (losses, "train/loss", "training", figures.TRAINING, 1 / log(2)),
        (losses, "validation/loss", "held-out files", figures.HELD_OUT, 1 / log(2)),
        (norms, "norm/gradient", "gradient", figures.TRAINING, 1),
    ):
        points = [(step, told[name] * unit) for step, told in logged.items() if name in told]
        axes.plot(*zip(*points, strict=True), color=color, label=label)
        axes.legend()
    losses.set(ylabel="loss (bits per byte)", ylim=(0, None))
    norms.set(xlabel="training step", ylabel="global norm", yscale="log")
    figure.savefig(path)


if __name__ == "__main__":
    launch(run, RunConfig, Path(__file__).with_name("run.yaml"))
