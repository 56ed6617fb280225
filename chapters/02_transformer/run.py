"""Train a small transformer with chapter 01's loop on real text: a progress bar, then a sample, a plot and a table.

python chapters/02_transformer/run.py                           a small LLaMA on the embedded corpus
python chapters/02_transformer/run.py --impl mine               with your own exercises; with your build, where all its stages passed
python chapters/02_transformer/run.py --model.position alibi    another model: every field of ModelConfig is an option
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.course.errors import CourseError
from shared.course.launch import launch
from shared.model.config import ModelConfig

BYTES = 256


@dataclass
class RunConfig:
    """Train a small transformer with chapter 01's loop.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        data: a text file or folder to train on, or a list of them; none for the embedded corpus.
        steps: training steps.
        seq: bytes that each window of text predicts.
        batch_size: windows in a step.
        micro_batch_size: windows in one forward and backward.
        learning_rate: of AdamW, constant.
        model: the model; every field of ModelConfig. Tokens are bytes, so the vocabulary is 256.
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
    steps: int = 1500
    seq: int = 128
    batch_size: int = 16
    micro_batch_size: int = 16
    learning_rate: float = 0.002
    model: ModelConfig = field(default_factory=ModelConfig)
    evaluate_every: int = 100
    sample_bytes: int = 400
    temperature: float = 0.7
    top_k: int | None = 40
    prompt: str = "def "
    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    output: Path = Path("runs/02_transformer")


def require_trainable(model: ModelConfig, seq: int) -> None:
    """Refuse what next-byte prediction on windows of `seq` bytes cannot train."""
    if model.architecture != "decoder":
        raise CourseError(f"architecture is {model.architecture!r}: predicting the next byte needs a decoder. The others are chapter 03's.")
    if model.vocab_size != BYTES:
        raise CourseError(f"model.vocab_size is {model.vocab_size}: tokens are bytes here, so give {BYTES}. Tokenizers are chapter 03's.")
    if seq > model.max_position_embeddings:
        raise CourseError(f"seq is {seq} and model.max_position_embeddings only {model.max_position_embeddings}: make the second as large.")


def run(config: RunConfig) -> None:
    require_trainable(config.model, config.seq)
    # The core is imported here, after `launch` has chosen whose exercises it runs with.
    from chapters.text_run import run_on_text
    from shared.course.build_check import build_line, passed_build
    from shared.devices import keep_freed_memory
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.model.transformer import TransformerModel

    keep_freed_memory()
    if (build := passed_build("02")) is not None:
        from run_build import llama_config, run_build

        if (llama := llama_config(config.model)) is not None:
            print(build_line("02"))
            return run_build(config, build, llama)
        print("02.build is not used: this model is no LLaMA, which is what the build makes.")
    elif config.impl != "reference":
        print(build_line("02"))
    run_on_text(config, lambda: TransformerModel(config.model, seed=config.seed), config.seq, packed_next_token_objective)


if __name__ == "__main__":
    launch(run, RunConfig, Path(__file__).with_name("run.yaml"))
