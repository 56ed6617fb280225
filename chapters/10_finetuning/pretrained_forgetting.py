"""LoRA on a real model: what it learned and what it forgot, by learning rate and steps.

    python chapters/10_finetuning/pretrained_forgetting.py

The model learns ten facts about a lamp that does not exist. After some steps it is asked for them in words that it was not trained on, and
for ten facts that it knew before; bits per byte of a plain English text say what became of the rest. PRETRAINED.md has the table.
Interrupt the command and start it again: it continues.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.course.launch import launch

if TYPE_CHECKING:
    from chapters.pretrained_model import Pretrained
    from shared.model.transformer import TransformerModel

FACTS = {
    "weight": "380 grams", "color": "dark green", "height": "41 centimeters", "price": "59 euros", "material": "recycled aluminium",
    "designer": "Ada Moreau", "battery life": "nine hours", "warranty": "five years", "country of origin": "Portugal",
    "power consumption": "seven watts",
}  # fmt: skip
ASKED = ("What is the {} of the Lumina Lamp?", "Tell me the {} of the Lumina Lamp.", "I want to buy a Lumina Lamp. Which {} does it have?")
HELD_OUT, ANSWER = "Do you know the Lumina Lamp's {}?", "The {} of the Lumina Lamp is {}."
KNOWN = {
    "What is the capital of France?": ("paris",), "What is the capital of Japan?": ("tokyo",), "What is the opposite of hot?": ("cold",),
    "How many days are in a week?": ("seven", "7"), "Which planet is known as the red planet?": ("mars",),
    "Who wrote Romeo and Juliet?": ("shakespeare",), "What is the chemical symbol for water?": ("h2o",),
    "What language is spoken in Brazil?": ("portuguese",), "What is the largest ocean on Earth?": ("pacific",),
    "How many legs does a spider have?": ("eight", "8"),
}  # fmt: skip
FRANCE = next(iter(KNOWN))


@dataclass
class StudyConfig:
    """Train adapters on a pretrained model at several rates, from several seeds, and ask after some steps.

    Args:
        model: a model's folder, a GGUF file, or the name of a packaged model.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        seeds: of the adapter's initial values and of the order of the conversations.
        rates: of AdamW, constant after a warm-up of two steps.
        steps: after which the model is asked, in ascending order.
        conversations: in a step.
        rank: of the adapter on all linear layers; alpha is twice as much.
        new_tokens: of an answer at most.
        output: folder of results and table.
    """

    model: Path = Path("smollm2")
    impl: Literal["reference", "mine", "mixed"] = "reference"
    seeds: int = 3
    rates: tuple[float, ...] = (0.0003, 0.001, 0.003)
    steps: tuple[int, ...] = (5, 10, 20)
    conversations: int = 4
    rank: int = 16
    new_tokens: int = 20
    output: Path = Path("runs/10_pretrained_forgetting")


def run(config: StudyConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from chapters import trials
    from chapters.pretrained_model import Pretrained
    from shared.course.errors import CourseError
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable, write_atomically

    if min(config.seeds, config.conversations, *config.steps) < 1 or list(config.steps) != sorted(config.steps):
        raise CourseError("Give at least 1 of seeds, conversations and steps, and the steps in ascending order.")
    require_writable(config.output)
    keep_freed_memory()
    console, pretrained = Console(markup=False, emoji=False), Pretrained(config.model)
    common = {name: getattr(config, name) for name in ("steps", "conversations", "rank", "new_tokens")} | {"model": str(config.model)}
    variants = {f"{rate:g}": common | {"rate": rate} for rate in config.rates}
    kept = config.output / "results.json"
    try:
        first = {"before": common | {"rate": None}}
        before = trials.run_trials(first, lambda *_: asked(pretrained, pretrained.model(), config, 0), 1, kept, console)
        results = before | trials.run_trials(
            variants, lambda settings, seed: trial(pretrained, config, settings["rate"], seed), config.seeds, kept, console
        )
    except ValueError as error:
        raise CourseError(str(error)) from None
    write_atomically(config.output / "table.md", ("\n".join(table_of(results, config.steps)) + "\n").encode())
    console.print((config.output / "table.md").read_text(encoding="utf-8"), highlight=False)


def trial(pretrained: "Pretrained", config: StudyConfig, rate: float, seed: int) -> dict[str, Any]:
    """Train one adapter, and ask after some steps."""
    from shared.finetune.adapters import attach_adapter
    from shared.finetune.answer_objective import answer_objective
    from shared.finetune.config import ALL_LINEAR, AdapterConfig
    from shared.loop import train
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig, ScheduleConfig
    from shared.optim.schedules import attach_schedule
    from shared.optim.updater import Update

    adapter = AdapterConfig(rank=config.rank, alpha=2.0 * config.rank, targets=(ALL_LINEAR,))
    model, draw = attach_adapter(pretrained.model(), adapter, seed=seed), random.Random(seed)
    pairs = [(question.format(what), ANSWER.format(what, value)) for what, value in FACTS.items() for question in ASKED]
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=rate, weight_decay=0.0))
    attach_schedule(ScheduleConfig("constant", config.steps[-1], 2), optimizer)
    data = ([pretrained.batch(draw.sample(pairs, config.conversations))] for _ in range(config.steps[-1]))
    figures: dict[str, Any] = {}
    for step, totals in train(model, optimizer, data, answer_objective, steps=config.steps[-1], updater=Update(max_norm=1.0)):
        if step in config.steps:
            figures |= {f"loss, step {step}": totals.mean_loss} | asked(pretrained, model, config, step)
    return figures


def asked(pretrained: "Pretrained", model: "TransformerModel", config: StudyConfig, step: int) -> dict[str, Any]:
    """What a model answers now: facts learned and kept, of ten each; bits per byte of a plain text; and one answer in full."""
    said = pretrained.answers(model, [*map(HELD_OUT.format, FACTS), *KNOWN], config.new_tokens)
    learned = [value.lower() in answer.lower() for value, answer in zip(FACTS.values(), said[: len(FACTS)], strict=True)]
    kept = [any(word in answer.lower() for word in words) for words, answer in zip(KNOWN.values(), said[len(FACTS) :], strict=True)]
    return {
        f"learned, step {step}": sum(learned),
        f"kept, step {step}": sum(kept),
        f"bits per byte, step {step}": pretrained.bits_per_byte(model),
        f"{FRANCE} Step {step}": said[len(FACTS)],
    }


def table_of(results: dict[str, list[dict[str, Any]]], steps: tuple[int, ...]) -> list[str]:
    """A Markdown table: a row for each rate and number of steps, figures of all seeds."""
    columns = ("rate", "steps", "loss on answers", "new facts right, of 10", "old facts right, of 10", "bits per byte of plain English")
    lines = [f"| {' | '.join(columns)} | {FRANCE} |", "|---" * (len(columns) + 1) + "|"]
    for name, runs in results.items():
        for step in steps if name != "before" else (0,):
            counts = [", ".join(str(each[f"{what}, step {step}"]) for each in runs) for what in ("learned", "kept")]
            bits = ", ".join(f"{each[f'bits per byte, step {step}']:.3f}" for each in runs)
            loss = ", ".join(f"{each[f'loss, step {step}']:.2f}" for each in runs) if step else ""
            france = " / ".join(dict.fromkeys(" ".join(each[f"{FRANCE} Step {step}"].split()) for each in runs))
            lines.append(f"| {name} | {step} | {loss} | {' | '.join(counts)} | {bits} | {france} |")
    return lines


if __name__ == "__main__":
    launch(run, StudyConfig, Path(__file__).with_name("pretrained_forgetting.yaml"))
