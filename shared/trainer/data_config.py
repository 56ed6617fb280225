"""Chapter 12. Configuration of a run's data: the text, and how it becomes batches."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.data.fim import FimConfig
from shared.data.prepare import PrepareConfig
from shared.engine.config import require


@dataclass
class DataConfig:
    """The text, and how it becomes batches.

    Args:
        prepare: sources, cleaning, tokenizer.
        prepared: the folder in which prepared text is kept, for every run that asks for the same.
        seq: tokens that a row predicts.
        batch_size: the global batch size: rows in a step, over all micro-batches and ranks. Rollouts have their own (ppo.minibatches).
        micro_batch_size: rows in one forward and backward of a rank; where its share of the batch is smaller, the share.
        fim: how often a document's middle is moved to its end.
        strategy: how documents are packed into rows.
        epochs: how often the text may be gone through; null for as often as the steps need.
        held_out_rows: rows of held-out text in an evaluation during training; null for all. The last one has report.held_out_rows.
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
            self.epochs is None or self.prepare.sources[0].weight is None,
            "data.epochs limits how often the text is gone through, and sources with a weight are gone through in their shares: "
            "give data.epochs null, or no weights.",
        )
        require(
            self.batch_size % self.micro_batch_size == 0,
            f"data.batch_size is {self.batch_size} and not a multiple of data.micro_batch_size, {self.micro_batch_size}: change one.",
        )
