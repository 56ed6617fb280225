"""Chapter 12. Abilities by stage: what each stage of a training pipeline is judged by at its end, asked of the model of every stage.

    pretrain        bits per byte of the held-out text
    sft             held-out tasks that are right, with the likeliest token each time
    dpo, ppo        the hidden preference's reward of answers to held-out prompts
    grpo            held-out tasks that are right: the likeliest answer, and pass@k of drawn ones

All models read the same prompts, in the template of the stage that brings them, which a model from before that stage has never seen. What
was measured is kept beside the model, and measured again where the model or the prompts are others.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from shared.devices import on_device, pick_device
from shared.loop import evaluate
from shared.model.chunked_loss import packed_next_token_objective
from shared.optim.precision import autocast_objective
from shared.output_files import write_atomically
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.rl.examination import Advance, Answer, Examination
from shared.totals import bits_per_byte
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.mode import by_kind
from shared.trainer.modes import MODES
from shared.trainer.modes.answering import Answering
from shared.trainer.modes.pretrain import Pretraining, evaluation_loader
from shared.trainer.pipeline.stages import Stage
from shared.trainer.weights import InitialWeights

FILE = "abilities.json"  # in a stage's folder
PREFERRING = ("dpo", "ppo")  # modes that the hidden preference judges
TITLES = {
    "pretrain": "Held-out text of {}",
    "sft": "Held-out tasks of {}",
    **dict.fromkeys(PREFERRING, "Held-out prompts of {}, by the hidden preference"),
    "grpo": "Held-out tasks of {}",
}
ALL, ENDED = "all", "answers that end"


@dataclass
class Measured:
    """The result of one measure for one model. values: row of the table -> value."""

    values: dict[str, float]
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True)
class TextMeasure:
    """Bits per byte of a pretraining stage's held-out text."""

    stage: Stage
    mode: Pretraining

    @property
    def identity(self) -> list[Any]:
        return [self.mode.text.held_out.fingerprint, self.config.data.seq, self.mode.tokenizer.identity, self.precision]

    @property
    def config(self) -> TrainerConfig:
        return self.stage.config

    @property
    def precision(self) -> str:
        return provenance.saved_value(self.stage.folder, "precision")

    def __len__(self) -> int:
        return len(evaluation_loader(self.config, self.mode.text, None))

    def __call__(self, model: nn.Module, advance: Advance) -> Measured:
        device, loader = pick_device(self.config.engine.device), evaluation_loader(self.config, self.mode.text, None)
        batches = (on_device(batch, device) for batch in counted(loader, advance))
        totals = evaluate(model, batches, autocast_objective(packed_next_token_objective, self.precision))
        amount = bits_per_byte(totals.loss_sum, loader.byte_count(self.mode.tokenizer.byte_lengths))
        return Measured({"bits per byte": amount, "next tokens guessed right": totals.mean_metrics()["correct"]})

    def close(self) -> None:
        """Nothing was started."""


@dataclass(frozen=True)
class AnswerMeasure:
    """Answers to a stage's held-out prompts. row: what a score is called in the table."""

    stage: Stage
    mode: Answering
    row: str

    @cached_property
    def examination(self) -> Examination:
        return self.mode.examination(self.stage.config)

    @property
    def identity(self) -> list[Any]:
        asked, config = self.examination, self.stage.config
        tasks = [[task.kind, task.answer, task.check] for task in asked.tasks]
        drawing = [asked.drawing.temperature if asked.samples else 1.0, asked.samples]
        return [asked.prompts, tasks, sorted(self.mode.stops), asked.new_tokens, config.data.seq, *drawing, config.seed]

    def __len__(self) -> int:
        return len(self.examination)

    def __call__(self, model: nn.Module, advance: Advance) -> Measured:
        answers = self.examination.answers(model, advance)
        values = {f"{self.row}: {kind} ({len(some)})": fmean(each.score for each in some) for kind, some in by_kind(answers).items()}
        values[ENDED] = fmean(each.ended for each in answers)
        for k, found in self.examination.mean_pass_at_k(model, advance).items():
            values[f"right at temperature {self.examination.drawing.temperature:g}: pass@{k}"] = found
        return Measured(values, answers)

    def close(self) -> None:
        self.mode.close()


Measure = TextMeasure | AnswerMeasure


def measure_of(stage: Stage) -> Measure | None:
    """The measure of a finished stage.

    Returns:
        None for a reward model, and where nothing is held out that anybody can judge.
    """
    config = stage.config
    if config.mode == "reward":
        return None
    mode = MODES[config.mode](config, stage.initial_weights(), SingleRankCommunicator(), Console(quiet=True))
    if config.mode == "pretrain":
        return TextMeasure(stage, mode)
    mode.require_answerable(config)
    return AnswerMeasure(stage, mode, "mean reward" if config.mode in PREFERRING else "right") if mode.tasks else None


def measure_all(stages: Sequence[Stage], measures: dict[str, Measure], console: Console) -> None:
    """Apply each measure to each stage's model where that is not done yet, and keep the results in the stage's folder.

    Args:
        stages: that are finished.
        measures: by the name of the stage that brings them.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        for stage in stages:
            if stage.config.mode == "reward":
                continue
            start = stage.trained
            weights, kept = start.fingerprint(stage.digests), read_kept(stage.folder)
            for name, measure in measures.items():
                key = hashlib.sha256(json.dumps([weights, measure.identity]).encode()).hexdigest()
                if kept.get(name, {}).get("key") == key:
                    continue
                task = bar.add_task(f"{stage.name}: {TITLES[measure.stage.config.mode].format(name).lower()}", total=len(measure))
                model = model_for(start, measure)
                with closing(measure):
                    found = measure(model, partial(bar.advance, task))
                kept[name] = {"key": key, "values": found.values, "answers": [each._asdict() for each in found.answers]}
                write_atomically(stage.folder / FILE, json.dumps(kept, indent=1).encode())


def model_for(start: InitialWeights, measure: Measure) -> nn.Module:
    """The model with a row for each token of a measure's prompts."""
    rows = max(start.model.vocab_size, measure.mode.tokenizer.vocab_size)
    return start.load(replace(start.model, vocab_size=rows), pick_device(measure.stage.config.engine.device))


def read_kept(folder: Path) -> dict[str, dict[str, Any]]:
    """The kept results of a stage's model, by measure; empty if the file is missing or damaged, so that they are measured again."""
    found, _ = provenance.read_object(folder / FILE)
    return {name: each for name, each in found.items() if isinstance(each, dict) and {"key", "values", "answers"} <= each.keys()}


def counted(batches: Any, advance: Advance) -> Iterator[Any]:
    for batch in batches:
        yield batch
        advance(1)
