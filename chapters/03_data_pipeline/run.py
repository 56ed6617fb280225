"""Prepare text and train on it: what cleaning did, packed rows with moved middles, held-out bits per byte, and gaps filled in.

    python chapters/03_data_pipeline/run.py                          the embedded corpus, about three minutes on two cores
    python chapters/03_data_pipeline/run.py --impl mine              with your own exercises
    python chapters/03_data_pipeline/run.py --data my/texts          a file, a folder, or a dataset of the Hugging Face hub
"""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal

from shared.course.launch import launch
from shared.data.prepare import PrepareConfig
from shared.model.config import ModelConfig


@dataclass
class RunConfig:
    """Prepare text and train a small transformer on it.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        data: a file, a folder or the name of a hub dataset, or a list of them; none for `prepare.sources`.
        prepare: how text becomes data: where it comes from, how it is cleaned, tokenized and stored.
        fim_rate: share of the documents whose middle is moved to their end; 0 for none.
        fim_spm_share: of these, the share that is written suffix first.
        fim_split: where a document is cut.
        slack: positions that a row keeps free for each document, since a moved one is a few tokens longer.
        steps: training steps.
        seq: tokens that each row predicts.
        batch_size: rows in a step.
        micro_batch_size: rows in one forward and backward.
        learning_rate: of AdamW, constant.
        model: the model; every field of ModelConfig. Its vocabulary is the tokenizer's.
        evaluate_every: steps between evaluations on held-out text.
        gaps: how many held-out lines the model fills in at the end.
        middle_tokens: the longest filling.
        temperature: of the fillings; 0 takes the likeliest token.
        top_k: how many of the likeliest tokens a filling draws from; null for all.
        seed: of the initial weights, the order of the data, and the fillings.
        device: where to run; auto takes a GPU where there is one.
        output: folder for the prepared text, the plot, the figures and the weights.
    """

    impl: Literal["reference", "mine", "mixed"] = "reference"
    data: str | list[str] = field(default_factory=list)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    fim_rate: float = 0.5
    fim_spm_share: float = 0.5
    fim_split: Literal["character", "line", "token"] = "character"
    slack: int = 8
    steps: int = 600
    seq: int = 256
    batch_size: int = 8
    micro_batch_size: int = 8
    learning_rate: float = 0.002
    model: ModelConfig = field(default_factory=ModelConfig)
    evaluate_every: int = 100
    gaps: int = 3
    middle_tokens: int = 30
    temperature: float = 0.6
    top_k: int | None = 20
    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    output: Path = Path("runs/03_data_pipeline")


def run(config: RunConfig) -> None:
    # What holds exercises is imported here, after `launch` has chosen whose they are.
    from shared.course.build_check import unused_line
    from shared.devices import keep_freed_memory

    if config.impl != "reference":
        print(unused_line("03", "the core's preparation cleans, splits and stores the text, and trains its tokenizer in between."))
    keep_freed_memory()
    import_module("chapters.03_data_pipeline.prepared_run").run_on_prepared(config)


if __name__ == "__main__":
    launch(run, RunConfig, Path(__file__).with_name("run.yaml"))
