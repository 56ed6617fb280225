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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from shared.devices import on_device, pick_device
from shared.finetune.instructions import Task
from shared.loop import evaluate
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.init import stream_seed
from shared.optim.precision import autocast_objective
from shared.output_files import write_atomically
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.rl.generation import Drawing, generate_tokens
from shared.rl.pass_at_k import mean_pass_at_k
from shared.rl.rewards import RewardPart, RewardSet
from shared.sampling import evaluating
from shared.totals import bits_per_byte
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.mode import by_kind
from shared.trainer.modes.answering import Answering
from shared.trainer.modes.grpo import TaskPolicyOptimization
from shared.trainer.modes.pairs import PreferenceTuning
from shared.trainer.modes.ppo import PolicyOptimization
from shared.trainer.modes.pretrain import Pretraining, evaluation_loader
from shared.trainer.modes.sft import FineTuning
from shared.trainer.pipeline.stages import Stage
from shared.trainer.weights import InitialWeights

FILE = "abilities.json"  # in a stage's folder
MODES = {"sft": FineTuning, "dpo": PreferenceTuning, "ppo": PolicyOptimization, "grpo": TaskPolicyOptimization}
TITLES = {
    "pretrain": "Held-out text of {}",
    "sft": "Held-out tasks of {}",
    "dpo": "Held-out prompts of {}, by the hidden preference",
    "ppo": "Held-out prompts of {}, by the hidden preference",
    "grpo": "Held-out tasks of {}",
}
ALL, ENDED = "all", "answers that end"


class Answer(NamedTuple):
    """A model's likeliest answer to a held-out prompt. score: 1 for right and 0 for wrong, or the hidden preference's reward. ended:
    whether the model ended it before the limit."""

    kind: str
    prompt: str
    wanted: str
    text: str
    score: float
    ended: bool


@dataclass
class Measured:
    """What one measure says of one model. values: row of the table -> value."""

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

    def __call__(self, model: nn.Module, advance: Callable[[], None]) -> Measured:
        device, loader = pick_device(self.config.engine.device), evaluation_loader(self.config, self.mode.text, None)
        batches = (on_device(batch, device) for batch in counted(loader, advance))
        totals = evaluate(model, batches, autocast_objective(packed_next_token_objective, self.precision))
        amount = bits_per_byte(totals.loss_sum, loader.byte_count(self.mode.tokenizer.byte_lengths))
        return Measured({"bits per byte": amount, "next tokens guessed right": totals.mean_metrics()["correct"]})

    def close(self) -> None:
        """Nothing was started."""


@dataclass(frozen=True)
class AnswerMeasure:
    """Answers to a stage's held-out prompts.

    Args:
        score: of answers, each to its task.
        row: what a score is called in the table.
        temperature, count: of further answers to each prompt that are drawn, for pass@k.
        close: ends the processes that score.
    """

    stage: Stage
    mode: Answering
    score: Callable[[Sequence[Task], Sequence[str]], list[float]]
    row: str
    temperature: float = 1.0
    count: int = 0
    close: Callable[[], None] = lambda: None

    @property
    def new_tokens(self) -> int:
        return self.stage.config.grpo.new_tokens if self.stage.config.mode == "grpo" else self.stage.config.report.new_tokens

    @cached_property
    def prompts(self) -> list[list[int]]:
        return self.mode.prompts_of(self.mode.tasks)

    @property
    def identity(self) -> list[Any]:
        tasks = [[task.kind, task.answer, task.check] for task in self.mode.tasks]
        config = self.stage.config
        return [self.prompts, tasks, sorted(self.mode.stops), self.new_tokens, config.data.seq, self.temperature, self.count, config.seed]

    def __len__(self) -> int:
        return len(self.mode.tasks) * (1 + self.count)

    def __call__(self, model: nn.Module, advance: Callable[[], None]) -> Measured:
        tasks = self.mode.tasks
        said = self.answered(model, self.prompts, Drawing(temperature=0.0), None, advance)
        scores = self.score(tasks, [text for text, _ in said])
        answers = [
            Answer(task.kind, task.prompt, task.answer, text, score, ended)
            for task, (text, ended), score in zip(tasks, said, scores, strict=True)
        ]
        values = {f"{self.row}: {kind} ({len(some)})": fmean(each.score for each in some) for kind, some in by_kind(answers).items()}
        values[ENDED] = fmean(each.ended for each in answers)
        if self.count:
            drawing, repeated = Drawing(temperature=self.temperature), [task for task in tasks for _ in range(self.count)]
            prompts = [prompt for prompt in self.prompts for _ in range(self.count)]
            seeds = [stream_seed(f"held-out {number}", self.stage.config.seed) for number in range(len(prompts))]  # as the mode draws
            drawn = [text for text, _ in self.answered(model, prompts, drawing, seeds, advance)]
            scores = self.score(repeated, drawn)
            right = [sum(score == 1 for score in scores[first : first + self.count]) for first in range(0, len(scores), self.count)]
            for power in range(self.count.bit_length()):
                values[f"right at temperature {self.temperature:g}: pass@{2**power}"] = mean_pass_at_k(right, self.count, 2**power)
        return Measured(values, answers)

    def answered(
        self, model: nn.Module, prompts: list[list[int]], drawing: Drawing, seeds: list[int] | None, advance: Callable[[], None]
    ) -> list[tuple[str, bool]]:
        """The text of each answer, and whether the model ended it."""
        ids, ended = [[] for _ in prompts], [False] * len(prompts)
        how = {"drawing": drawing, "seeds": seeds, "stops": self.mode.stops, "context": self.stage.config.data.seq}
        with evaluating(model):
            for drawn in generate_tokens(model, prompts, self.new_tokens, **how):
                if drawn.ended:
                    ended[drawn.number] = True
                else:
                    ids[drawn.number].append(drawn.token)
                if drawn.last:
                    advance()
        return [(self.mode.tokenizer.decode(each), is_ended) for each, is_ended in zip(ids, ended, strict=True)]


Measure = TextMeasure | AnswerMeasure


def measure_of(stage: Stage) -> Measure | None:
    """What a finished stage is judged by.

    Returns:
        None for a reward model, and where nothing is held out that anybody can judge.
    """
    config, mode = stage.config, stage.config.mode
    start, alone, quiet = stage.initial_weights(), SingleRankCommunicator(), Console(quiet=True)
    if mode == "pretrain":
        return TextMeasure(stage, Pretraining(config, start, alone, quiet))
    if mode == "reward":
        return None
    found = MODES[mode](config, start, alone, quiet)
    found.require_answerable(config)
    if not found.tasks:
        return None
    if mode == "grpo":
        found.verdicts = RewardSet((RewardPart(),), found.tasks, found.tokenizer.decode, code=found.code)
        return AnswerMeasure(stage, found, found.right, "right", config.grpo.temperature, config.grpo.held_out_answers, found.close)
    row, judge = ("right", Task.solved_by) if mode == "sft" else ("mean reward", lambda task, text: found.judge_of(task.prompt, text))
    return AnswerMeasure(stage, found, lambda tasks, texts: [float(judge(*each)) for each in zip(tasks, texts, strict=True)], row)


def measure_all(stages: Sequence[Stage], measures: dict[str, Measure], console: Console) -> None:
    """Ask each stage's model what has not been asked of it yet, and keep it in the stage's folder.

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
                    found = measure(model, lambda task=task: bar.advance(task))
                kept[name] = {"key": key, "values": found.values, "answers": [each._asdict() for each in found.answers]}
                write_atomically(stage.folder / FILE, json.dumps(kept, indent=1).encode())


def model_for(start: InitialWeights, measure: Measure) -> nn.Module:
    """The model with a row for each token of a measure's prompts."""
    rows = max(start.model.vocab_size, measure.mode.tokenizer.vocab_size)
    return start.load(replace(start.model, vocab_size=rows), pick_device(measure.stage.config.engine.device))


def read_kept(folder: Path) -> dict[str, dict[str, Any]]:
    """What was measured of a stage's model, by measure; nothing where the file is missing or damaged, so it is measured again."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {name: each for name, each in found.items() if {"key", "values", "answers"} <= each.keys()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def counted(batches: Any, advance: Callable[[], None]) -> Iterator[Any]:
    for batch in batches:
        yield batch
        advance()
