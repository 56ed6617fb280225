"""Chapter 12. The trainer's configuration: every key of a run, typed, with a sentence for each field.

`python chapters/12_grpo/train.py --help` prints this file's classes. What they hold is checked before any work begins; what only
shows together (a sequence longer than the model's positions) is checked in `TrainerConfig`.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from shared.data.fim import FimConfig
from shared.data.prepare import PrepareConfig
from shared.engine.config import EngineConfig, require
from shared.engine.metrics.peaks import measure_peak
from shared.moe.config import MixtureModelConfig, require_layout
from shared.optim.config import OptimizerConfig
from shared.optim.precision import Precision
from shared.optim.schedules import ScheduleConfig
from shared.parallel.config import ParallelConfig, require_built
from shared.parallel.context.axis import require_shareable
from shared.parallel.context.zigzag import require_divisible
from shared.parallel.pipeline.axis import require_stages
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.expert.axis import require_experts
from shared.parallel.tensor.axis import require_even
from shared.trainer.axes import BROUGHT

WORTH = 1.3  # times faster must bfloat16 be, before the casts that autocast adds are paid for
FIM_SLACK = 8  # positions that a row keeps free for each piece: three special tokens, and tokens that a cut splits in two


@dataclass
class DataConfig:
    """The text, and how it becomes batches.

    Args:
        prepare: sources, cleaning, tokenizer.
        prepared: the folder in which prepared text is kept, for every run that asks for the same.
        seq: tokens that a row predicts.
        batch_size: the global batch size: rows in a step, over all micro-batches and ranks.
        micro_batch_size: rows in one forward and backward of a rank; where its share of the batch is smaller, the share.
        fim: how often a document's middle is moved to its end.
        strategy: how documents are packed into rows.
        epochs: how often the text may be gone through; null for as often as the steps need.
        held_out_rows: rows of held-out text in an evaluation during training; null for all. The last evaluation takes all.
    """

    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    prepared: Path = Path("runs/prepared")
    seq: int = 256
    batch_size: int = 16
    micro_batch_size: int = 8
    fim: FimConfig = field(default_factory=FimConfig)
    strategy: Literal["best_fit", "sequential"] = "best_fit"
    epochs: int | None = None
    held_out_rows: int | None = 128

    def __post_init__(self):
        self.prepared = Path(self.prepared).expanduser()
        for name in ("seq", "batch_size", "micro_batch_size"):
            require(getattr(self, name) >= 1, f"data.{name} is {getattr(self, name)}: give at least 1.")
        require(self.epochs is None or self.epochs >= 1, f"data.epochs is {self.epochs}: give at least 1, or null.")
        require(
            self.held_out_rows is None or self.held_out_rows >= 1, f"data.held_out_rows is {self.held_out_rows}: give at least 1, or null."
        )
        require(
            self.fim.rate == 0 or self.seq > 4 * FIM_SLACK,
            f"data.seq is {self.seq}: moving middles needs rows of more than {4 * FIM_SLACK} tokens.",
        )
        require(
            self.epochs is None or self.prepare.sources[0].weight is None,
            "data.epochs limits how often the text is gone through, and sources with a weight are gone through in their shares: "
            "give data.epochs null, or no weights.",
        )
        if self.fim.rate > 0 and self.strategy == "sequential":
            raise ValueError(
                "data.strategy sequential fills rows to the last position: with moved middles, which add tokens, use best_fit."
            )
        require(
            self.batch_size % self.micro_batch_size == 0,
            f"data.batch_size is {self.batch_size} and not a multiple of data.micro_batch_size, {self.micro_batch_size}: change one.",
        )


@dataclass
class ReportConfig:
    """What the report shows of the trained model.

    Args:
        prompts: texts that the model continues.
        completions: gaps in held-out files that the model fills, from the text on both sides.
        new_tokens: at most, for each prompt.
        temperature: of the prompts' samples; 0 takes the likeliest token. Gaps are always filled with the likeliest.
        top_k: how many of the likeliest tokens a sample draws from; null for all.
        export: also write the model in Hugging Face's format.
    """

    prompts: list[str] = field(default_factory=lambda: ["def ", "class ", "import "])
    completions: int = 4
    new_tokens: int = 96
    temperature: float = 0.7
    top_k: int | None = 40
    export: bool = True

    def __post_init__(self):
        require(self.completions >= 0 and self.new_tokens >= 1, "report.completions must be at least 0, and report.new_tokens at least 1.")
        require(self.temperature >= 0, f"report.temperature is {self.temperature}: give at least 0.")
        require(self.top_k is None or self.top_k >= 1, f"report.top_k is {self.top_k}: give at least 1, or null for all.")
        require(all(self.prompts), "report.prompts holds an empty text: give each at least one character.")


@dataclass
class TrainerConfig:
    """Train a language model.

    Args:
        mode: what is trained for. pretrain predicts the next token of text.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        steps: training steps.
        seed: of the initial weights, the order of the data, dropout and the samples.
        data: the text, and how it becomes batches.
        model: the model; the vocabulary's size is the tokenizer's.
        optimizer: which optimizer, with what.
        schedule: how the learning rate moves; its steps are the run's.
        precision: of the matrix products; auto measures whether bfloat16 is faster here. Weights are float32.
        max_grad_norm: the longest gradient that is stepped with; null for no clipping.
        parallel: how the run is parallelized over processes, which torchrun starts.
        engine: how the run is watched, saved and ended.
        report: what the report shows.
    """

    mode: Literal["pretrain"] = "pretrain"
    impl: Literal["reference", "mine", "mixed"] = "reference"
    steps: int = 1000
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: MixtureModelConfig = field(default_factory=MixtureModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_grad_norm: float | None = 1.0
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    def __post_init__(self):
        require_built(self.parallel, BROUGHT)
        require(self.steps >= 1, f"steps is {self.steps}: give at least 1.")
        require(self.seed >= 0, f"seed is {self.seed}: give at least 0.")
        require(self.seed < 2**63, f"seed is {self.seed}: give less than 2**63.")
        self.schedule = replace(self.schedule, steps=self.steps)
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"max_grad_norm is {self.max_grad_norm}: give a positive length, or null.",
        )
        require(
            self.model.architecture == "decoder",
            f"model.architecture is {self.model.architecture!r}: pretraining predicts the next token, which needs a decoder.",
        )
        require_layout(self.model, self.parallel)
        require_experts(self.model, self.parallel.expert_parallel)
        share, left = divmod(self.data.batch_size, self.parallel.data_ranks)
        require(
            left == 0,
            f"data.batch_size is {self.data.batch_size} and cannot be shared equally among {self.parallel.data_ranks} ranks "
            f"(parallel.data_parallel x fully_sharded): give a multiple of {self.parallel.data_ranks}.",
        )
        require(
            share % min(self.data.micro_batch_size, share) == 0,
            f"A rank's share of the batch is {share} rows and not a multiple of data.micro_batch_size, {self.data.micro_batch_size}.",
        )
        stages, microbatches = self.parallel.pipeline_parallel, share // min(self.data.micro_batch_size, share)
        if stages > 1:
            require_stages(self.model.resolved(), self.parallel)
            make_schedule(self.parallel.pipeline_schedule, stages, microbatches, self.parallel.pipeline_chunks)
        ranks, shares = self.parallel.tensor_parallel, self.parallel.context_parallel
        require_even(self.model.resolved(), ranks)
        if shares > 1:
            require_shareable(self.model.resolved())
            require_divisible(self.data.seq, shares, "A row (data.seq)")
        require(
            not self.parallel.sequence_parallel or self.data.seq % (shares * ranks) == 0,
            f"data.seq is {self.data.seq}, which parallel.sequence_parallel cuts over {ranks} ranks"
            f"{f' in each of {shares} shares' if shares > 1 else ''}: give a multiple of {shares * ranks}.",
        )
        longest = self.model.max_position_embeddings
        require(
            self.data.seq <= longest,
            f"data.seq is {self.data.seq} and model.max_position_embeddings only {longest}: make the second as large.",
        )


def resolve_precision(asked: str, device: torch.device) -> Precision:
    """`asked`, or for "auto" the faster of bfloat16 and float32 on this device.

    A GPU since Ampere multiplies bfloat16 many times faster. A CPU does so only with instructions of its own (AMX, AVX512-BF16), and is
    slower without, so there it is measured.
    """
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type != "cpu":
        return "float32"
    return "bfloat16" if measure_peak(torch.bfloat16) > WORTH * measure_peak(torch.float32) else "float32"
