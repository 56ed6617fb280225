"""Chapter 12. Sections of the configuration that are the trainer's own: data, instructions, report, policy; and which mode reads which."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from shared.course.bounds import Bounds, MadeCount, NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from shared.data.fim import FimConfig
from shared.data.prepare import PrepareConfig
from shared.engine.config import require
from shared.finetune.instructions import MOST_TASKS
from shared.preference.ppo import PPOConfig

PREFERRING = ("reward", "dpo", "ppo")
ROLLING = ("ppo", "grpo")  # whose rows are rollouts


def section(kind: type, *modes: str, instead: dict[str, str] | None = None) -> Any:
    """A section of the configuration that only some modes read. instead: mode -> what it reads in place of this section."""
    return field(default_factory=kind, metadata={"modes": modes, "instead": instead or {}})


@dataclass
@checked
class DataConfig:
    """The text, and how it becomes batches.

    Args:
        prepare: sources, cleaning, tokenizer.
        prepared: cache of prepared text, shared by all runs with the same settings.
        seq: sequence length: tokens that a row predicts.
        batch_size: the global batch size: rows in a step, over all micro-batches and ranks. Rollouts have their own (ppo.minibatches).
        micro_batch_size: rows in one forward and backward pass of a rank; at most its share of the batch.
        fim: fill-in-the-middle: how often a document's middle is moved to its end.
        strategy: sequence packing: how documents are packed into rows.
        epochs: the largest number of passes over the text; null for as many as the steps need.
        held_out_rows: rows of held-out text per evaluation during training; null for all. The last evaluation has report.held_out_rows.
    """

    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    prepared: Path = Path("runs/prepared")
    seq: PositiveInt = 256
    batch_size: PositiveInt = 16
    micro_batch_size: PositiveInt = 8
    fim: FimConfig = field(default_factory=FimConfig)
    strategy: Literal["best_fit", "sequential"] = "best_fit"
    epochs: PositiveInt | None = None
    held_out_rows: PositiveInt | None = 128

    def __post_init__(self):
        self.prepared = Path(self.prepared).expanduser()
        require(
            self.epochs is None or self.prepare.sources[0].weight is None,
            "data.epochs limits how often the text is gone through, and sources with a weight are gone through in their shares: "
            "give data.epochs null, or no weights.",
        )
        require(
            self.batch_size % self.micro_batch_size == 0,
            f"data.batch_size is {self.batch_size} and not a multiple of data.micro_batch_size, {self.micro_batch_size}: change one.",
        )


@dataclass
@checked
class InstructionConfig:
    """Generated instructions and held-out tasks (`shared.finetune.instructions`).

    Args:
        examples: training conversations to generate if chats.sources is empty.
        tasks: held-out tasks whose accuracy the report shows, before and after training; 0 for none.
        seed: seed of the generated set.
        file: your own held-out tasks, one JSON object a line with kind, prompt, answer and check; null for generated ones.
    """

    examples: MadeCount = 8000
    tasks: NonNegativeInt = 120
    seed: int = 0
    file: Path | None = None

    def __post_init__(self):
        require(
            self.tasks <= MOST_TASKS or self.file is not None,
            f"instructions.tasks is {self.tasks}: give 0 to {MOST_TASKS}, or a file of your own.",
        )


@dataclass
@checked
class ReportConfig:
    """What the report shows of the trained model.

    Args:
        prompts: texts that the model continues.
        completions: number of gaps in held-out files that the model fills (infilling).
        new_tokens: the largest number of tokens that it generates for a prompt.
        temperature: sampling temperature for the prompts; 0 for greedy decoding, which gaps are always filled with.
        top_k: sample from this many most likely tokens; null for all.
        export: also write the model in Hugging Face's format.
        dtype: of its weights in the files.
        held_out_rows: rows of held-out text in the last evaluation; null for all.
    """

    prompts: list[str] = field(default_factory=lambda: ["def ", "class ", "import "])
    completions: Annotated[int, Bounds(ge=0, le=10_000)] = 4
    new_tokens: PositiveInt = 96
    temperature: NonNegativeFloat = 0.7
    top_k: PositiveInt | None = 40
    export: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    held_out_rows: PositiveInt | None = None

    def __post_init__(self):
        require(all(self.prompts), "report.prompts holds an empty text: give each at least one character.")


@dataclass(frozen=True)
class PolicyConfig(PPOConfig):
    """PPO: rollouts, losses, and what rewards answers. The first fields are chapter 11's (`shared.preference.ppo`).

    Args:
        reward: model for a reward model; gold for the hidden preference itself, which only generated prompts have.
        reward_model: with reward model, the folder of a run with mode reward, or of transformers' sequence classification.
        reward_config: a configuration beside this file that trains a reward model if reward_model does not exist yet; null to refuse that.
    """

    reward: Literal["model", "gold"] = "model"
    reward_model: Path | None = None
    reward_config: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward == "gold" and self.reward_model is not None:
            raise ValueError("reward is gold, which asks no reward_model: leave one out.")


FIM_SLACK = 8  # positions that a row keeps free for each piece: three special tokens, and tokens that a cut splits in two
