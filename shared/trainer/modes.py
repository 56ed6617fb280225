"""Chapter 12. Training modes, such as pretraining and supervised fine-tuning: what one brings to a run, and which settings it refuses."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from shared.data.tokenizer import TextTokenizer
from shared.engine.callbacks import Callback
from shared.engine.config import require
from shared.finetune.chat.prepare import PAIRS
from shared.model.transformer import TransformerModel
from shared.parallel.strategy import ParallelStrategy
from shared.totals import Objective, Totals

if TYPE_CHECKING:
    from shared.trainer.config import TrainerConfig
    from shared.trainer.initial_weights import InitialWeights
    from shared.trainer.report import Judged
    from shared.trainer.run import Run

PREFERRING = ("reward", "dpo", "ppo")
ROLLING = ("ppo", "grpo")  # whose rows are rollouts
SECTIONS = {"preferences": PREFERRING} | {name: (name,) for name in ("reward", "dpo", "ppo", "grpo")}  # which modes read them
FIM_SLACK = 8  # positions that a row keeps free for each piece: three special tokens, and tokens that a cut splits in two


class Mode(Protocol):
    """What a run is for: where its rows come from, what is learned from them, and how it is judged.

    Attributes:
        text: what was prepared.
        tokenizer: of that text; the model has a row for each of its ids.
        end_ids: the tokens that end what the model writes.
        pad_id: of an exported model; None for what it had at first.
        left_out: weights that an exported model has not.
        objective: the loss of a micro-batch.

    A mode is made by its class: Mode(config, start, world, console), on every rank.
    """

    text: Any
    tokenizer: TextTokenizer
    end_ids: list[int]
    pad_id: int | None
    left_out: tuple[str, ...]
    objective: Objective

    def require_answerable(self, config: "TrainerConfig") -> None:
        """Refuse now what the report could not show after the last step."""

    def more_weights(self) -> "list[InitialWeights]":
        """What else than the first weights decides the run's: a reward model."""

    def shaped(self, model: TransformerModel) -> TransformerModel:
        """The plain model, perhaps without memory yet, with what the mode trains in it, such as a head of another kind. In place."""

    def loaders(self, config: "TrainerConfig", strategy: ParallelStrategy) -> tuple[Iterable, Iterable | None]:
        """What yields this rank's share of each training step, resumable, and of the held-out rows of an evaluation during training; None
        for no such evaluation. The strategy's model still has its first weights. Every rank calls it."""

    def all_held_out(self, config: "TrainerConfig", strategy: ParallelStrategy) -> Iterable | None:
        """This rank's share of all that is held out, for the last evaluation; None where the mode has no loss of it."""

    def callbacks(self, config: "TrainerConfig") -> list[Callback]:
        """The mode's own."""

    def announcement(self, config: "TrainerConfig") -> tuple[str, str]:
        """How much data there is, as the end of a sentence; and lines about it that a reader should see before the first step."""

    def judge(self, run: "Run", model: TransformerModel, totals: Totals | None) -> "Judged":
        """What the report shows of the trained model, which rank 0 has whole. totals: of the last evaluation, if there was one."""

    def save_beside(self, folder: Any, longest: int) -> None:
        """Write the tokenizer, and whatever else of text belongs to an exported model."""


def require_mode(config: "TrainerConfig") -> None:
    """Refuse what a mode does not do, in place of doing something else in silence."""
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
        *unused_sections(config),
        *(wrong_with_answers(config) if mode in (*PREFERRING, *ROLLING) else []),
        (
            virtual >= config.data.seq,
            f"adapter.virtual_tokens is {virtual} and data.seq {config.data.seq}: a row has no room for anything else.",
        ),
    ]
    for is_wrong, reason in wrong:
        require(not is_wrong, reason)


def unused_sections(config: "TrainerConfig") -> list[tuple[bool, str]]:
    """Sections in which something is given, and which the mode does not read; each with a sentence about it."""
    return [
        (
            config.mode not in modes and (section := getattr(config, name)) != type(section)(),
            f"mode is {config.mode} and the section {name} is for mode {' or '.join(modes)}: leave it out, or give such a mode.",
        )
        for name, modes in SECTIONS.items()
    ] + [
        (
            config.mode in modes and (section := getattr(config, name)) != type(section)(),
            f"mode is {config.mode} and the section {name} is for mode sft: give {instead}, or mode sft.",
        )
        for name, modes, instead in (
            ("chats", PREFERRING, "preferences"), ("instructions", PREFERRING, "preferences"), ("instructions", ("grpo",), "grpo.tasks")
        )
    ]  # fmt: skip


def wrong_with_answers(config: "TrainerConfig") -> list[tuple[bool, str]]:
    """What modes refuse that learn from preferences or rewards; each with a sentence about it."""
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


def unused_with_rollouts(config: "TrainerConfig") -> list[tuple[str, str]]:
    """What is given and would do nothing in a mode that has prompts without an end, and no held-out loss; each with the reason."""
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
