"""Chapter 12. The trainer's configuration: every key of a run, typed, with a sentence for each field.

`train.py --help` prints these classes. Each checks what it holds before work begins, `TrainerConfig` what shows only together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shared.course.extensions import Extension
from shared.course.typed import keys_of, unknown_key, usable_path
from shared.data.loader import equal_microbatches
from shared.engine.config import EngineConfig, require
from shared.engine.metrics.peaks import cpu_peak
from shared.finetune.chat.prepare import ChatConfig
from shared.finetune.config import AdapterConfig
from shared.finetune.instructions import MOST_TASKS
from shared.moe.config import MixtureModelConfig, require_layout
from shared.optim.config import OptimizerConfig
from shared.optim.precision import Precision
from shared.optim.schedules import ScheduleConfig
from shared.parallel.config import ParallelConfig, require_built
from shared.parallel.context.axis import require_shareable
from shared.parallel.context.zigzag import require_divisible
from shared.parallel.pipeline.axis import require_stages
from shared.parallel.pipeline.schedules import make_schedule
from shared.moe.parallel.axis import require_experts
from shared.parallel.tensor.axis import require_even
from shared.preference.config import PreferenceConfig
from shared.preference.dpo_config import DPOConfig
from shared.preference.ppo import PPOConfig
from shared.preference.reward_model import RewardConfig
from shared.rl.config import TaskPolicyConfig
from shared.trainer.axes import BROUGHT
from shared.trainer.data_config import DataConfig
from shared.trainer.modes import require_mode

WORTH = 1.3  # times faster must bfloat16 be, before the casts that autocast adds are paid for


@dataclass
class InstructionConfig:
    """The instruction set that is made on the spot, and the held-out tasks (`shared.finetune.instructions`).

    Args:
        examples: conversations made to train on, where chats.sources is empty.
        tasks: held-out tasks whose accuracy the report shows, before and after; 0 for none.
        seed: of the set.
        file: held-out tasks of your own, one JSON object a line with kind, prompt, answer and check; null for those of the set.
    """

    examples: int = 8000
    tasks: int = 120
    seed: int = 0
    file: Path | None = None

    def __post_init__(self):
        require(self.examples >= 1, f"instructions.examples is {self.examples}: give at least 1.")
        require(
            0 <= self.tasks and (self.tasks <= MOST_TASKS or self.file is not None),
            f"instructions.tasks is {self.tasks}: give 0 to {MOST_TASKS}, or a file of your own.",
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
        held_out_rows: rows of held-out text in the last evaluation; null for all.
    """

    prompts: list[str] = field(default_factory=lambda: ["def ", "class ", "import "])
    completions: int = 4
    new_tokens: int = 96
    temperature: float = 0.7
    top_k: int | None = 40
    export: bool = True
    held_out_rows: int | None = None

    def __post_init__(self):
        require(self.completions >= 0 and self.new_tokens >= 1, "report.completions must be at least 0, and report.new_tokens at least 1.")
        require(self.temperature >= 0, f"report.temperature is {self.temperature}: give at least 0.")
        require(self.top_k is None or self.top_k >= 1, f"report.top_k is {self.top_k}: give at least 1, or null for all.")
        require(
            self.held_out_rows is None or self.held_out_rows >= 1, f"report.held_out_rows is {self.held_out_rows}: give 1 or more, or null."
        )
        require(all(self.prompts), "report.prompts holds an empty text: give each at least one character.")


@dataclass(frozen=True)
class PolicyConfig(PPOConfig):
    """PPO: rollouts, losses, and what rewards answers. The first fields are chapter 11's (`shared.preference.ppo`).

    Args:
        reward: model, or gold for the hidden preference itself, which only prompts that are made on the spot have.
        reward_model: with reward model, the folder of a run with mode reward, or of transformers' sequence classification.
        reward_config: a configuration beside this file that trains a reward model where reward_model is not there yet; null to refuse that.
    """

    reward: Literal["model", "gold"] = "model"
    reward_model: Path | None = None
    reward_config: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward == "gold" and self.reward_model is not None:
            raise ValueError("reward is gold, which asks no reward_model: leave one out.")


@dataclass
class TrainerConfig:
    """Train a language model.

    Args:
        mode: what is trained for. pretrain predicts the next token of text. The others begin with the weights of start_from: sft answers in
            conversations; reward makes a model of which answers are preferred, and dpo one that gives them, both from pairs; ppo makes one
            that a reward model likes; grpo one whose answers a program finds right.
        start_from: weights to start from: a folder of Hugging Face's format, a run's folder, or a checkpoint. It decides the model (the
            section may change attention, dropout and RoPE's length alone) and, where none is given, the tokenizer; null for random weights.
        start_config: a configuration beside this file, of a smaller model that is trained first where start_from is not there yet; null to
            refuse a start_from that is not there.
        continue_from: a run, or one of its checkpoints, that is continued in another folder with all of its state: weights, the optimizer's
            state, the step and the place in the data. start_from takes weights alone, and begins at step 0.
        continue_with: settings that a run is continued with although they change it, such as steps,optimizer.lr; or sections, such as
            schedule. Any other difference from the run that is there is refused.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        steps: training steps.
        seed: of the initial weights, the order of the data, dropout and the samples.
        data: the text, and how it becomes batches. With other modes than pretrain, prepare and fim mean nothing.
        chats: with mode sft, the conversations; with mode grpo, their template and system prompt.
        instructions: with mode sft, conversations made on the spot where there are no others, and held-out tasks.
        preferences: with modes reward, dpo and ppo, pairs of answers and held-out prompts.
        reward: with mode reward, the loss.
        dpo: with mode dpo, the loss.
        ppo: with mode ppo, the rollouts, the loss and the reward.
        grpo: with mode grpo, the tasks, the rollouts, the loss and the rewards.
        adapter: with other modes than pretrain, what is trained in place of the weights; null to train all of them.
        model: the model; the vocabulary's size is the tokenizer's.
        objective: a loss of your own by import path, called with the model, a micro-batch and the mode's own objective; null for that one.
        optimizer: which optimizer, with what.
        schedule: how the learning rate moves; its steps are the run's.
        precision: of the matrix products; auto measures whether bfloat16 is faster here. Weights are float32.
        max_grad_norm: the longest gradient that is stepped with; null for no clipping.
        parallel: how the run is parallelized over processes, which torchrun starts.
        elastic: whether the data axes shrink and grow with the ranks that torchrun starts, at each start (`shared.trainer.elastic`).
        engine: how the run is watched, saved and ended.
        report: what the report shows.
    """

    mode: Literal["pretrain", "sft", "reward", "dpo", "ppo", "grpo"] = "pretrain"
    start_from: Path | None = None
    start_config: Path | None = None
    continue_from: Path | None = None
    continue_with: list[str] | str = field(default_factory=list)
    impl: Literal["reference", "mine", "mixed"] = "reference"
    steps: int = 1000
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    chats: ChatConfig = field(default_factory=ChatConfig)
    instructions: InstructionConfig = field(default_factory=InstructionConfig)
    preferences: PreferenceConfig = field(default_factory=PreferenceConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    ppo: PolicyConfig = field(default_factory=PolicyConfig)
    grpo: TaskPolicyConfig = field(default_factory=TaskPolicyConfig)
    adapter: AdapterConfig | None = None
    model: MixtureModelConfig = field(default_factory=MixtureModelConfig)
    objective: Extension | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_grad_norm: float | None = 1.0
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    elastic: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    @property
    def virtual_tokens(self) -> int:
        """How many trained vectors stand before each conversation."""
        return self.adapter.virtual_tokens if self.adapter and self.adapter.kind != "lora" else 0

    @classmethod
    def completed(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings with the section `model` of the weights that they start from.

        Raises:
            SettingError: there are none, or the section contradicts them.
        """
        folder, given = settings.get("start_from"), settings.get("model") or {}
        if not isinstance(folder, str) or not isinstance(given, Mapping):  # refused, where it is wrong, with the other settings
            return settings
        from shared.trainer.initial_weights import find_initial_weights  # needs this module's neighbours
        from shared.trainer.model_section import model_section

        start = find_initial_weights(usable_path(folder, "start_from"))
        return settings | {"model": model_section(given, start)}

    def __post_init__(self):
        if isinstance(self.continue_with, str):
            self.continue_with = [name.strip() for name in self.continue_with.split(",") if name.strip()]
        known = {*keys_of(TrainerConfig)} if self.continue_with else set()
        for name in self.continue_with:
            require(name in known, f"continue_with: {unknown_key(name, sorted(known))}")
        require_built(self.parallel, BROUGHT)
        require(self.steps >= 1, f"steps is {self.steps}: give at least 1.")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}: give at least 0 and less than 2**63.")
        self.schedule = replace(self.schedule, steps=self.steps)
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"max_grad_norm is {self.max_grad_norm}: give a positive length, or null.",
        )
        require_mode(self)
        require_layout(self.model, self.parallel)
        require_experts(self.model, self.parallel.expert_parallel)
        share, left = divmod(self.data.batch_size, self.parallel.data_ranks)
        require(
            left == 0 or self.elastic,
            f"data.batch_size is {self.data.batch_size} and cannot be shared equally among {self.parallel.data_ranks} ranks "
            f"(parallel.data_parallel x fully_sharded): give a multiple of {self.parallel.data_ranks}.",
        )
        require(
            share % min(self.data.micro_batch_size, max(share, 1)) == 0 or self.elastic,
            f"A rank's share of the batch is {share} rows and not a multiple of data.micro_batch_size, {self.data.micro_batch_size}.",
        )
        stages = self.parallel.pipeline_parallel
        microbatches, _ = equal_microbatches(self.data.batch_size, self.data.micro_batch_size, self.parallel.data_ranks)
        if stages > 1:
            require_stages(self.model.resolved(), self.parallel)
            make_schedule(self.parallel.pipeline_schedule, stages, microbatches, self.parallel.pipeline_chunks)
        ranks, shares = self.parallel.tensor_parallel, self.parallel.context_parallel
        require_even(self.model.resolved(), ranks, self.parallel.backend)
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
    return "bfloat16" if cpu_peak(torch.bfloat16) > WORTH * cpu_peak(torch.float32) else "float32"
