"""Chapter 12. The trainer's configuration: every key of a run, typed, with a sentence for each field; and what each mode refuses.

`train.py --help` prints these classes. Each checks what it holds before work begins, `TrainerConfig` what shows only together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal


from shared.course.bounds import PositiveFloat, PositiveInt, Seed, checked
from shared.course.extensions import Extension
from shared.course.typed import keys_of, unknown_key, usable_path
from shared.data.loader import equal_microbatches
from shared.engine.config import EngineConfig, require
from shared.finetune.chat.prepare import PAIRS, ChatConfig
from shared.finetune.config import AdapterConfig
from shared.moe.config import MixtureModelConfig, require_layout
from shared.moe.parallel.axis import require_experts
from shared.optim.config import OptimizerConfig
from shared.optim.schedules import ScheduleConfig
from shared.parallel.config import ParallelConfig
from shared.parallel.context.axis import require_shareable
from shared.parallel.context.zigzag import require_divisible
from shared.parallel.pipeline.axis import require_stages
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.tensor.axis import require_even
from shared.preference.config import DPOConfig, PreferenceConfig
from shared.preference.reward_model import RewardConfig
from shared.rl.config import TaskPolicyConfig
from shared.trainer.sections import FIM_SLACK, PREFERRING, ROLLING, DataConfig, InstructionConfig, PolicyConfig, ReportConfig, section

PAIRED = dict.fromkeys(PREFERRING, "preferences")


@dataclass
@checked
class TrainerConfig:
    """Train a language model.

    Args:
        mode: the training objective. pretrain predicts the next token of text. The others start from the weights of start_from: sft
            (supervised fine-tuning) trains on answers in conversations; reward trains a reward model on preference pairs; dpo trains the
            policy on preference pairs; ppo optimizes the score of a reward model; grpo optimizes verifiable rewards.
        start_from: weights to start from: a folder of Hugging Face's format, a run's folder, or a checkpoint. It decides the model (the
            section may change only attention, dropout and RoPE's length) and, unless one is given, the tokenizer; null for random weights.
        start_config: a configuration beside this file that trains a smaller model first if start_from does not exist yet; null to refuse
            a start_from that does not exist.
        continue_from: a run, or one of its checkpoints, to continue in a new folder with its whole state: weights, optimizer state, step
            and position in the data. start_from loads only weights, and starts at step 0.
        continue_with: settings that are allowed to differ from the run being resumed, such as steps,optimizer.lr; or sections, such as
            schedule. Any other difference is refused.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        steps: training steps.
        seed: seed of the initial weights, the order of the data, dropout and sampling.
        data: the text, and how it becomes batches. prepare and fim are read in mode pretrain alone.
        chats: with mode sft, the conversations; with mode grpo, their template and system prompt.
        instructions: with mode sft, generated conversations if chats has no sources, and held-out tasks.
        preferences: with modes reward, dpo and ppo, pairs of answers and held-out prompts.
        reward: with mode reward, the loss.
        dpo: with mode dpo, the loss.
        ppo: with mode ppo, the rollouts, the loss and the reward.
        grpo: with mode grpo, the tasks, the rollouts, the loss and the rewards.
        adapter: in the modes that fine-tune, train an adapter over frozen weights; null for full fine-tuning.
        model: the model; the vocabulary's size is the tokenizer's.
        objective: your own loss by import path, called with the model, a micro-batch and the mode's objective; null for the mode's.
        optimizer: the optimizer and its hyperparameters.
        schedule: the learning rate schedule; its length is `steps`.
        precision: dtype of matrix products (mixed precision); auto measures whether bfloat16 is faster here. Weights are float32.
        max_grad_norm: gradient clipping: the largest norm of the whole gradient; null for no clipping.
        parallel: how the run is parallelized over processes, which torchrun starts.
        elastic: whether the data axes shrink and grow with the ranks that torchrun starts, at each start (`shared.trainer.launch.elastic`).
        engine: logging, evaluation, checkpoints and early stopping.
        report: what the report shows.
    """

    mode: Literal["pretrain", "sft", "reward", "dpo", "ppo", "grpo"] = "pretrain"
    start_from: Path | None = None
    start_config: Path | None = None
    continue_from: Path | None = None
    continue_with: list[str] | str = field(default_factory=list)
    impl: Literal["reference", "mine", "mixed"] = "reference"
    steps: PositiveInt = 1000
    seed: Seed = 0
    data: DataConfig = field(default_factory=DataConfig)
    chats: ChatConfig = section(ChatConfig, "pretrain", "sft", "grpo", instead=PAIRED)
    instructions: InstructionConfig = section(InstructionConfig, "pretrain", "sft", instead=PAIRED | {"grpo": "grpo.tasks"})
    preferences: PreferenceConfig = section(PreferenceConfig, *PREFERRING)
    reward: RewardConfig = section(RewardConfig, "reward")
    dpo: DPOConfig = section(DPOConfig, "dpo")
    ppo: PolicyConfig = section(PolicyConfig, "ppo")
    grpo: TaskPolicyConfig = section(TaskPolicyConfig, "grpo")
    adapter: AdapterConfig | None = None
    model: MixtureModelConfig = field(default_factory=MixtureModelConfig)
    objective: Extension | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_grad_norm: PositiveFloat | None = 1.0
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    elastic: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    @property
    def virtual_tokens(self) -> int:
        """Number of trained vectors (soft prompt) before each conversation."""
        return self.adapter.virtual_tokens if self.adapter and self.adapter.kind != "lora" else 0

    @classmethod
    def completed(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Take the section `model` from the weights in start_from."""
        folder, given = settings.get("start_from"), settings.get("model") or {}
        if not isinstance(folder, str) or not isinstance(given, Mapping):  # refused, where it is wrong, with the other settings
            return settings
        from shared.trainer.model_section import model_section
        from shared.trainer.weights import find_initial_weights  # needs this module's neighbours

        start = find_initial_weights(usable_path(folder, "start_from"))
        return settings | {"model": model_section(given, start)}

    def __post_init__(self):
        if isinstance(self.continue_with, str):
            self.continue_with = [name.strip() for name in self.continue_with.split(",") if name.strip()]
        known = {*keys_of(TrainerConfig)} if self.continue_with else set()
        for name in self.continue_with:
            require(name in known, f"continue_with: {unknown_key(name, sorted(known))}")
        self.schedule = replace(self.schedule, steps=self.steps)
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


def require_mode(config: TrainerConfig) -> None:
    """Refuse settings that the mode would silently ignore."""
    architecture, mode = config.model.architecture, config.mode
    pretraining, tuning = mode == "pretrain", mode == "sft"
    pairs, virtual = config.chats.template == PAIRS, config.virtual_tokens
    template = "null" if config.chats.template is None else repr(config.chats.template)
    moved = pretraining and config.data.fim.rate > 0
    wrong = [
        (
            moved and config.data.seq <= 4 * FIM_SLACK,
            f"data.seq is {config.data.seq}: moving middles needs rows of more than {4 * FIM_SLACK} tokens.",
        ),
        (
            moved and config.data.strategy == "sequential",
            "data.strategy sequential fills rows to the last position: with moved middles, which add tokens, use best_fit.",
        ),
        (
            pretraining and architecture != "decoder",
            f"model.architecture is {architecture!r}: pretraining predicts the next token, which needs a decoder.",
        ),
        (not pretraining and config.start_from is None, f"mode is {mode} and start_from is null: give the folder of a model to fine-tune."),
        (
            tuning and architecture == "encoder",
            "mode is sft and the model of start_from is an encoder, which writes no text: give a decoder.",
        ),
        (
            tuning and pairs != (architecture == "encoder-decoder"),
            f"chats.template is {template} and the model of start_from is of the kind {architecture}: pairs is for an "
            "encoder-decoder, and other templates are for a decoder.",
        ),
        (
            config.adapter is not None and pretraining,
            "adapter is for the modes that fine-tune: give mode sft, reward, dpo, ppo or grpo, or leave adapter out.",
        ),
        (bool(config.chats.sources) and pretraining, "chats is for mode sft: give mode sft, or text in data.prepare.sources."),
        *unread_sections(config),
        *(wrong_with_answers(config) if mode in (*PREFERRING, *ROLLING) else []),
        (
            virtual >= config.data.seq,
            f"adapter.virtual_tokens is {virtual} and data.seq {config.data.seq}: a row has no room for anything else.",
        ),
    ]
    for is_wrong, reason in wrong:
        require(not is_wrong, reason)


def unread_sections(config: TrainerConfig) -> list[tuple[bool, str]]:
    """Sections in which something is set and which the mode does not read; each with an error message."""
    found = []
    for name, about in ((entry.name, entry.metadata) for entry in fields(config) if "modes" in entry.metadata):
        is_set = (value := getattr(config, name)) != type(value)()
        readers = " or ".join(mode for mode in about["modes"] if mode != "pretrain")  # which ignores them
        remedy = f"give {instead}" if (instead := about["instead"].get(config.mode)) else "leave it out"
        message = f"mode is {config.mode} and the section {name} is for mode {readers}: {remedy}, or give such a mode."
        found.append((is_set and config.mode not in about["modes"], message))
    return found


def wrong_with_answers(config: TrainerConfig) -> list[tuple[bool, str]]:
    """Refusals of the modes that learn from preferences or rewards; each with its error message."""
    mode, architecture, parallel, grpo = config.mode, config.model.architecture, config.parallel, config.grpo
    of_model, judged = config.ppo.reward == "model", not config.preferences.sources
    unused = unused_with_rollouts(config) if mode in ROLLING else []
    return [
        (
            mode == "ppo" and of_model and config.ppo.reward_model is None,
            "ppo.reward is model and ppo.reward_model is null: give the folder of a reward model, or ppo.reward gold.",
        ),
        (
            mode == "ppo" and not of_model and not judged,
            "ppo.reward is gold, and no hidden preference is known for prompts of your own (preferences.sources): give a reward model.",
        ),
        (
            mode == "grpo" and bool(config.chats.sources),
            "mode is grpo and chats.sources are conversations, for mode sft: give grpo.tasks, or mode sft.",
        ),
        (
            mode == "grpo" and config.chats.template == PAIRS,
            f"mode is grpo and chats.template is {PAIRS}, which is for an encoder-decoder: give chatml, a file or folder, or null.",
        ),
        (
            mode == "grpo" and grpo.kl_coefficient > 0 and (grpo.kl_in, grpo.kl_estimator, grpo.kl_times_ratio) == ("loss", "k1", False),
            "grpo.kl_estimator is k1, whose gradient in the loss is 0 on average: give grpo.kl_in reward, grpo.kl_times_ratio true, or k3.",
        ),
        (architecture != "decoder", f"mode is {mode} and the model of start_from is of the kind {architecture}: give a decoder."),
        (
            config.virtual_tokens > 0,
            f"adapter.kind is {config.adapter and config.adapter.kind}, and mode {mode} trains low-rank updates alone: give lora.",
        ),
        (
            parallel.context_parallel > 1,
            f"parallel.context_parallel is {parallel.context_parallel}, and mode {mode} needs each answer whole on a rank: give 1.",
        ),
        (
            config.data.strategy != "best_fit",
            f"data.strategy is {config.data.strategy}, and mode {mode} packs whole answers: leave it out.",
        ),
        (
            mode in ROLLING and parallel.pipeline_schedule == "interleaved",
            f"parallel.pipeline_schedule is interleaved, which takes a multiple of the stages as micro-batches; in mode {mode} the "
            "answers' lengths decide how many there are: give another schedule.",
        ),
        *((True, f"{name} has no effect with mode {mode}{why}: leave it out.") for name, why in unused),
    ]


def unused_with_rollouts(config: TrainerConfig) -> list[tuple[str, str]]:
    """Settings without effect in a mode with rollouts, which has no epochs and no held-out loss; each with the reason."""
    data, engine, no_loss = type(config.data)(), type(config.engine)(), ", which has no held-out loss"
    evaluated = config.engine.evaluate_every not in (0, engine.evaluate_every)
    found = [
        (config.data.epochs != data.epochs, "data.epochs", ", where steps alone say how long prompts are answered"),
        (config.data.held_out_rows != data.held_out_rows, "data.held_out_rows", no_loss),
        (config.report.held_out_rows is not None, "report.held_out_rows", no_loss),
        (evaluated, "engine.evaluate_every", no_loss),
        (bool(config.engine.early_stopping), "engine.early_stopping", no_loss),
    ]
    return [(name, why) for is_given, name, why in found if is_given]
