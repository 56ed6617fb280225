"""Chapter 12. The contract between a run and its training mode: what a mode brings to a run, and what it says of the trained model.

A run and what it is for know each other, so they share a module. `shared.trainer.modes` has the modes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean as mean
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from shared.course.errors import CourseError
from shared.data.completion import Gap
from shared.data.loader import StatefulLoader, require_full_step
from shared.data.tokenizer import TextTokenizer
from shared.engine.callbacks import Callback
from shared.engine.engine import RuntimeEngine
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.health.agreement import agreed, ranks_that_share, require_agreement
from shared.parallel.strategy import ParallelStrategy
from shared.rl.examination import Compared
from shared.totals import Objective, Totals
from shared.trainer.config import TrainerConfig
from shared.trainer.costs import Costs, Stopwatch, Traffic
from shared.trainer.records.changes import Changes
from shared.trainer.weights import InitialWeights, require_unchanged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 3  # answers of each kind


@dataclass
class Judged:
    """Results of a mode for the report: what it measured of the trained model, and what it shows.

    summary: name -> value, of which the first ones are the mode's. samples: prompt and continuation. completions: filled gaps.
    answered: held-out tasks. preferred: held-out prompts whose answers a hidden preference judged. example: a conversation as pieces of
    text, each with whether it was trained on. figures: the mode's own, by name. unit: of the loss.
    """

    summary: dict[str, Any]
    samples: list[tuple[str, str]] = field(default_factory=list)
    completions: list[Gap] = field(default_factory=list)
    answered: list[Compared] = field(default_factory=list)
    preferred: list[Compared] = field(default_factory=list)
    example: list[tuple[str, bool]] = field(default_factory=list)
    figures: dict[str, "Figure"] = field(default_factory=dict)
    unit: str = "nats per token"

    def accuracy(self) -> list[tuple[str, int, float, float]]:
        """For each kind of task, and for all: how many there are, and which share was right before and after."""
        return [
            (kind, len(some), mean(each.score_before == 1 for each in some), mean(each.score_after == 1 for each in some))
            for kind, some in by_kind(self.answered).items()
        ]

    def wins(self) -> list[tuple[str, int, float, float, float]]:
        """For each kind of prompt, and for all: how many there are, the mean reward before and after, and the win rate of the later answers
        over the earlier ones."""
        return [
            (kind, len(some), *(mean(getattr(each, name) for each in some) for name in ("score_before", "score_after", "won")))
            for kind, some in by_kind(self.preferred).items()
        ]

    def shown(self) -> list[Compared]:
        """The first answers of each kind, which the report puts side by side."""
        found = by_kind(self.answered or self.preferred)
        return [each for kind, some in found.items() for each in some[:SHOWN] if kind == each.kind]


def right_shares(answered: Sequence[Compared]) -> dict[str, float]:
    """The shares of held-out tasks that were right before and after, for a summary; nothing where there are none."""
    scores = {"before": [each.score_before for each in answered], "after": [each.score_after for each in answered]}
    return {f"held-out tasks right {when}": sum(score == 1 for score in some) / len(some) for when, some in scores.items() if some}


def by_kind(entries: Sequence[Any]) -> dict[str, list[Any]]:
    """Group entries by their `kind`; if there are several kinds, add the group of all entries."""
    kinds = {each.kind: [other for other in entries if other.kind == each.kind] for each in entries}
    return kinds | ({"all": list(entries)} if len(kinds) > 1 else {})


class Mode:
    """A training mode: where the rows come from, which objective is trained, and how the result is evaluated. Made on every rank.

    Attributes:
        text: what was prepared.
        tokenizer: of that text; the model has a row for each of its ids.
        end_ids: the tokens that end what the model writes.
        pad_id: of an exported model; None for what it had at first.
        left_out: weights that are dropped on export.
        objective: the loss of a micro-batch.
    """

    text: Any
    tokenizer: TextTokenizer
    end_ids: list[int]
    pad_id: int | None = None
    left_out: tuple[str, ...] = ()
    objective: Objective

    def __init__(self, config: TrainerConfig, start: InitialWeights | None, world: Communicator, console: Console):
        raise NotImplementedError(f"{type(self).__name__} must prepare its data.")

    def require_answerable(self, config: TrainerConfig) -> None:
        """Reject before training what the report could not evaluate after the last step."""

    def more_weights(self) -> list[InitialWeights]:
        """Further weights that decide the result, besides the initial ones: a reward model."""
        return []

    def shaped(self, model: TransformerModel) -> TransformerModel:
        """The plain model, perhaps without memory yet, with what the mode trains in it, such as a head of another kind. In place."""
        return model

    def loaders(self, config: TrainerConfig, strategy: ParallelStrategy) -> tuple[Iterable, Iterable | None]:
        """The training loader, resumable, and the loader of held-out rows for evaluations during training, or None for no such evaluation;
        each of this rank's shard. The strategy's model still has its initial weights. Every rank calls it."""
        raise NotImplementedError

    def all_held_out(self, config: TrainerConfig, strategy: ParallelStrategy) -> Iterable | None:
        """This rank's shard of all held-out rows, for the last evaluation; None if the mode has no held-out loss."""

    def callbacks(self, config: TrainerConfig) -> list[Callback]:
        """Callbacks of this mode."""
        return []

    def announcement(self, config: TrainerConfig) -> tuple[str, str]:
        """The amount of data, for a line of the announcement; and further lines to print before the first step."""
        raise NotImplementedError

    def judge(self, run: "Run", model: TransformerModel, totals: Totals | None) -> Judged:
        """Evaluate the trained model for the report, on rank 0, which has it unsharded. totals: of the last evaluation, if any."""
        raise NotImplementedError

    def save_beside(self, folder: Path, longest: int) -> None:
        """Write the tokenizer, and a chat template if there is one, beside an exported model."""
        self.tokenizer.save_pretrained(folder, longest)


@dataclass
class Run:
    """A run before its first step, as one rank sees it."""

    config: TrainerConfig
    mode: Mode
    start: InitialWeights | None
    engine: RuntimeEngine
    strategy: ParallelStrategy
    costs: Costs
    traffic: Traffic
    changes: Changes
    watch: Stopwatch

    @property
    def text(self) -> Any:
        return self.mode.text

    @property
    def sources(self) -> list[InitialWeights]:
        """All weights that it reads: those that it starts from, and the mode's, such as a reward model's."""
        return [self.start, *self.mode.more_weights()] if self.start else []

    def require_same_sources(self) -> None:
        """Refuse weights that are gone, or others than the record in the run's folder names."""
        if self.sources:
            require_unchanged(self.sources, self.config.data.prepared, self.config.engine.output)

    def start_again(self) -> InitialWeights:
        """The weights that it started from, for another look at them.

        Raises:
            SettingError: they are gone, or others are there now.
        """
        self.require_same_sources()
        return self.start


Prepared = TypeVar("Prepared")  # has `folder`, the stores `training` and `held_out`, and a `tokenizer`


def prepared_once(world: Communicator, folder: Path, make: Callable[[], Prepared], reopen: Callable[[Path], Prepared]) -> Prepared:
    """Prepare data on one of the ranks that share a folder, open it on the others, and compare it over all ranks.

    Args:
        folder: of all preparations.
        make, reopen: the two ways to it; `reopen` gets the folder of this preparation.

    Raises:
        CourseError: on every rank: it cannot be prepared or opened on one of them, or machines that share no folder have different data.
    """
    first = ranks_that_share(world, folder)[0]
    text = agreed(world, lambda: make() if world.rank == first else None)
    made = world.gather_objects(text and text.folder.name)[first]
    text = agreed(world, lambda: text or reopen(folder / made))
    stores = {"training": text.training, "held_out": text.held_out}
    sizes = {side: {"documents": len(each), "tokens": each.token_count, "sha256": each.fingerprint[:12]} for side, each in stores.items()}
    require_agreement(world, "text", sizes | {"tokenizer": text.tokenizer.identity[:12], "end_token": text.tokenizer.end})
    return text


def require_rows(loader: StatefulLoader, config: TrainerConfig) -> None:
    """Reject more steps than the text has rows for, before training rather than at its end."""
    require_full_step(loader)
    if config.data.epochs is None:
        return
    rows = config.data.epochs * loader.dataset.rows
    enough = -(-rows // config.data.batch_size)
    if enough < config.steps:
        raise CourseError(
            f"data.epochs is {config.data.epochs}, which gives {rows:,} rows, enough for {enough:,} steps of {config.data.batch_size}, and "
            f"steps is {config.steps:,}: give more text, more epochs, or fewer steps."
        )
