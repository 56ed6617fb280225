"""DPO on a real model: the first sentence of its own answer is preferred to the whole answer. What that does to new answers.

    python chapters/11_preferences/pretrained_brevity.py

The pairs cost nothing: the model answers questions greedily, and each answer of more than one sentence gives a pair. Measured on other
questions: tokens of an answer, pairs ranked right, and what became of the log-probabilities of both answers. PRETRAINED.md has the table.
Interrupt the command and start it again: it continues.
"""

import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.course.launch import launch

if TYPE_CHECKING:
    from chapters.pretrained_model import Pretrained
    from shared.model.transformer import TransformerModel
    from shared.totals import Batch

QUESTIONS = (
    "Why is the sky blue?", "What is a volcano?", "How do birds fly?", "What is a library?", "Why do we sleep?", "What is bread made of?",
    "How does a bicycle work?", "What is the moon?", "Why do leaves fall in autumn?", "What is a river?", "How do fish breathe?",
    "What is money?", "Why is the sea salty?", "What is a mirror?", "How do bees make honey?", "What is glass made of?",
    "Why do cats purr?", "What is thunder?", "How does a clock work?", "What is a desert?", "Why do we laugh?", "What is a bridge?",
    "How do plants drink?", "What is a shadow?",
)  # fmt: skip
HELD_OUT = 8  # of the questions


@dataclass
class StudyConfig:
    """Train adapters with DPO on pairs of a pretrained model's own answers, from several seeds.

    Args:
        model: a model's folder, a GGUF file, or the name of a packaged model.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        seeds: of the adapter's initial values and of the order of the pairs.
        rate: of AdamW, constant after a warm-up of two steps.
        steps: after which the model is measured, in ascending order.
        pairs: in a step.
        beta: of DPO.
        rank: of the adapter on all linear layers; alpha is twice as much.
        new_tokens: of an answer at most.
        output: folder of results and table.
    """

    model: Path = Path("smollm2")
    impl: Literal["reference", "mine", "mixed"] = "reference"
    seeds: int = 3
    rate: float = 0.0003
    steps: tuple[int, ...] = (4, 8)
    pairs: int = 4
    beta: float = 0.1
    rank: int = 16
    new_tokens: int = 48
    output: Path = Path("runs/11_pretrained_brevity")


def run(config: StudyConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from chapters import trials
    from chapters.pretrained_model import Pretrained
    from shared.course.errors import CourseError
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable, write_atomically

    if min(config.seeds, config.pairs, *config.steps) < 1 or list(config.steps) != sorted(config.steps):
        raise CourseError("Give at least 1 of seeds, pairs and steps, and the steps in ascending order.")
    require_writable(config.output)
    keep_freed_memory()
    console, study = Console(markup=False, emoji=False), Study(Pretrained(config.model), config)
    names = ("rate", "steps", "pairs", "beta", "rank", "new_tokens")
    variants = {"DPO": {name: getattr(config, name) for name in names} | {"model": str(config.model)}}
    try:
        results = trials.run_trials(variants, lambda _, seed: study.trial(seed), config.seeds, config.output / "results.json", console)
    except ValueError as error:
        raise CourseError(str(error)) from None
    write_atomically(config.output / "table.md", ("\n".join(table_of(results["DPO"], (0, *config.steps))) + "\n").encode())
    console.print((config.output / "table.md").read_text(encoding="utf-8"), highlight=False)


class Study:
    """A model, its own answers, and the pairs that they give."""

    def __init__(self, pretrained: "Pretrained", config: StudyConfig):
        self.pretrained, self.config = pretrained, config

    @cached_property
    def reference(self) -> "TransformerModel":
        return self.pretrained.model()

    @cached_property
    def answers(self) -> dict[str, str]:
        return dict(zip(QUESTIONS, self.pretrained.answers(self.reference, QUESTIONS, self.config.new_tokens), strict=True))

    def pairs_of(self, questions: tuple[str, ...]) -> list[tuple[str, str, str]]:
        """Question, first sentence, whole answer: of answers with more than a sentence."""
        firsts = [(question, re.match(r".*?[.!?](?=\s)", self.answers[question], re.DOTALL)) for question in questions]
        return [(question, first[0], self.answers[question]) for question, first in firsts if first]

    def batch(self, pairs: list[tuple[str, str, str]]) -> "Batch":
        from shared.preference.log_probs import score_answers

        batch = self.pretrained.batch([(question, answer) for question, *both in pairs for answer in both])
        return batch | {"reference": score_answers(self.reference, batch)}

    def trial(self, seed: int) -> dict[str, Any]:
        """Train one adapter, and measure it before and after some steps."""
        from shared.finetune.adapters import attach_adapter
        from shared.finetune.config import ALL_LINEAR, AdapterConfig
        from shared.loop import train
        from shared.optim.build import build_optimizer
        from shared.optim.config import OptimizerConfig, ScheduleConfig
        from shared.optim.schedules import attach_schedule
        from shared.optim.updater import Update
        from shared.preference.config import DPOConfig
        from shared.preference.objective import PreferenceObjective

        config, draw = self.config, random.Random(seed)
        adapter = AdapterConfig(rank=config.rank, alpha=2.0 * config.rank, targets=(ALL_LINEAR,))
        model = attach_adapter(self.pretrained.model(), adapter, seed=seed)
        training, held_out = self.pairs_of(QUESTIONS[HELD_OUT:]), self.batch(self.pairs_of(QUESTIONS[:HELD_OUT]))
        optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=config.rate, weight_decay=0.0))
        attach_schedule(ScheduleConfig("constant", config.steps[-1], 2), optimizer)
        objective, last = PreferenceObjective(DPOConfig(beta=config.beta)), config.steps[-1]
        data = ([self.batch(draw.sample(training, config.pairs))] for _ in range(last))
        figures = {"training pairs": len(training)} | self.measured(model, objective, held_out, 0)
        for step, _ in train(model, optimizer, data, objective, steps=last, updater=Update(max_norm=1.0)):
            if step in config.steps:
                figures |= self.measured(model, objective, held_out, step)
        return figures

    def measured(self, model: "TransformerModel", objective: Any, held_out: "Batch", step: int) -> dict[str, Any]:
        from shared.loop import evaluate

        said = self.pretrained.answers(model, QUESTIONS[:HELD_OUT], self.config.new_tokens)
        lengths = [len(self.pretrained.tokenizer.encode(answer)) for answer in said]
        found = evaluate(model, [held_out], objective).mean_metrics()
        figures = {name: found[name] for name in ("accuracy", "margin", "chosen_log_prob", "rejected_log_prob")}
        cut = sum(length >= self.config.new_tokens for length in lengths)
        figures |= {"tokens": sum(lengths) / len(lengths), "cut": cut, "an answer": said[0]}
        return {f"{name}, step {step}": value for name, value in figures.items()}


def table_of(runs: list[dict[str, Any]], steps: tuple[int, ...]) -> list[str]:
    """A Markdown table: a row for each number of steps, mean and range over the seeds."""
    columns = {"tokens": ".1f", "cut": ".1f", "accuracy": ".0%", "margin": ".2f", "chosen_log_prob": ".1f", "rejected_log_prob": ".1f"}
    lines = [f"| steps | {' | '.join(columns)} | {QUESTIONS[0]} |", "|---|" + "---|" * (len(columns) + 1)]
    for step in steps:
        cells = []
        for column, form in columns.items():
            values = [each[f"{column}, step {step}"] for each in runs]
            mean, low, high = (f"{value:{form}}" for value in (sum(values) / len(values), min(values), max(values)))
            cells.append(mean if low == high else f"{mean} ({low} to {high})")
        lines.append(f"| {step} | {' | '.join(cells)} | {' '.join(runs[0][f'an answer, step {step}'].split())} |")
    return lines


if __name__ == "__main__":
    launch(run, StudyConfig, Path(__file__).with_name("pretrained_brevity.yaml"))
