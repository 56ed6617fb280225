"""Train a byte model with chapter 01's loop on real text: a progress bar, then a sample, a plot and a table.

    python chapters/01_training_loop/run.py                       the embedded corpus, about a minute and a half on two cores
    python chapters/01_training_loop/run.py --impl mine           with your own exercises; with your build, where all its stages passed
    python chapters/01_training_loop/run.py --data my/texts       on your own text files
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.course.launch import launch


@dataclass
class ModelOptions:
    """The byte model's sizes.

    Args:
        window: how many bytes, the current one included, a prediction sees.
        embedding_size: size of a byte's embedding.
        hidden_size: size of the two hidden layers.
        dropout: probability of zeroing a hidden unit in training.
    """

    window: int = 16
    embedding_size: int = 32
    hidden_size: int = 256
    dropout: float = 0.0


@dataclass
class RunConfig:
    """Train a byte model with chapter 01's loop.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        data: a text file or folder to train on, or a list of them; none for the embedded corpus.
        steps: training steps.
        seq: bytes that each window of text predicts.
        batch_size: windows in a step.
        micro_batch_size: windows in one forward and backward.
        learning_rate: of AdamW, constant.
        model: the model's sizes.
        evaluate_every: steps between evaluations on held-out text.
        sample_bytes: length of the text sampled at the end.
        temperature: of that sample; 0 takes the likeliest byte.
        top_k: how many of the likeliest bytes the sample draws from; null for all.
        prompt: what the sample continues.
        seed: of the initial weights, the order of the data, and the sample.
        device: where to run; auto takes a GPU where there is one.
        output: folder for the plot, the sample, the figures and the weights.
    """

    impl: Literal["reference", "mine", "mixed"] = "reference"
    data: Path | list[Path] = field(default_factory=list)
    steps: int = 4000
    seq: int = 64
    batch_size: int = 32
    micro_batch_size: int = 32
    learning_rate: float = 0.002
    model: ModelOptions = field(default_factory=ModelOptions)
    evaluate_every: int = 250
    sample_bytes: int = 400
    temperature: float = 0.7
    top_k: int | None = 40
    prompt: str = "def "
    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    output: Path = Path("runs/01_training_loop")


def run(config: RunConfig) -> None:
    # The core is imported here, after `launch` has chosen whose exercises it runs with.
    from shared.course.build_check import build_line, passed_build

    if (build := passed_build("01")) is not None:
        from run_build import run_build

        return run_build(config, build, build_line("01"))
    if config.impl != "reference":
        print(build_line("01"))
    from chapters.byte_models import ByteModel
    from chapters.text_run import run_on_text

    run_on_text(config, lambda: ByteModel(**vars(config.model)), context=config.model.window)


if __name__ == "__main__":
    launch(run, RunConfig, Path(__file__).with_name("run.yaml"))
