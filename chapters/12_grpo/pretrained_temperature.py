"""A real model's answers before any training, by temperature: right ones, pass@k, entropy, and groups that GRPO could learn from.

    python chapters/12_grpo/pretrained_temperature.py

Small sums are asked in the model's own chat template, and each is answered greedily and several times at each temperature. PRETRAINED.md
has the table. Interrupt the command and start it again: it continues.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.course.launch import launch

if TYPE_CHECKING:
    from chapters.pretrained_model import Pretrained
    from shared.model.transformer import TransformerModel

LARGEST = 20  # of a sum's two numbers


@dataclass
class StudyConfig:
    """Ask a pretrained model for small sums at several temperatures.

    Args:
        model: a model's folder, a GGUF file, or the name of a packaged model.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        seeds: of the draws; the sums are the same.
        temperatures: 0 takes the likeliest token.
        sums: how many are asked.
        answers: to each of them, a power of 2.
        new_tokens: of an answer at most.
        output: folder of results and table.
    """

    model: Path = Path("smollm2")
    impl: Literal["reference", "mine", "mixed"] = "reference"
    seeds: int = 3
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.7, 1.0, 1.3)
    sums: int = 8
    answers: int = 8
    new_tokens: int = 20
    output: Path = Path("runs/12_pretrained_temperature")


def run(config: StudyConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from chapters import trials
    from chapters.pretrained_model import Pretrained
    from shared.course.errors import CourseError
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable, write_atomically

    if min(config.seeds, config.sums, config.answers, config.new_tokens) < 1 or min(config.temperatures) < 0:
        raise CourseError("Give at least 1 of seeds, sums, answers and new_tokens, and no temperature below 0.")
    require_writable(config.output)
    keep_freed_memory()
    console, pretrained = Console(markup=False, emoji=False), Pretrained(config.model)
    model = pretrained.model()
    common = {name: getattr(config, name) for name in ("sums", "answers", "new_tokens")} | {"model": str(config.model)}
    results: dict[str, list[dict[str, Any]]] = {}
    for temperature in config.temperatures:
        settings = {f"{temperature:g}": common | {"temperature": temperature}}
        ask = lambda one, seed: asked(pretrained, model, config, one["temperature"], seed)  # noqa: E731
        try:
            results |= trials.run_trials(settings, ask, config.seeds if temperature else 1, config.output / "results.json", console)
        except ValueError as error:
            raise CourseError(str(error)) from None
    write_atomically(config.output / "table.md", ("\n".join(table_of(results)) + "\n").encode())
    console.print((config.output / "table.md").read_text(encoding="utf-8"), highlight=False)


def asked(pretrained: "Pretrained", model: "TransformerModel", config: StudyConfig, temperature: float, seed: int) -> dict[str, Any]:
    """Answers to every sum at one temperature, and what they are worth."""
    from shared.rl.examination import mean_pass_at_k
    from shared.rl.generation import Drawing, generate_tokens

    draw, count = random.Random(0), config.answers if temperature else 1
    sums = [(draw.randint(1, LARGEST), draw.randint(1, LARGEST)) for _ in range(config.sums)]
    prompts = [pretrained.prompt(f"What is {one} + {other}?") for one, other in sums for _ in range(count)]
    ids, log_probs, ended = [[] for _ in prompts], [], 0
    drawn = generate_tokens(
        model, prompts, config.new_tokens, drawing=Drawing(temperature), stops=pretrained.stops,
        seeds=[1_000_000 * seed + number for number in range(len(prompts))], context=model.config.max_position_embeddings,
    )  # fmt: skip
    for each in drawn:
        log_probs.append(each.log_prob)
        ended += each.ended
        if not each.ended:
            ids[each.number].append(each.token)
    said = [pretrained.tokenizer.decode(some) for some in ids]
    right = [sum(is_right(answer, sum(pair)) for answer in said[number * count : (number + 1) * count]) for number, pair in enumerate(sums)]
    return {
        "right": mean_pass_at_k(right, count, 1),
        f"pass@{config.answers}": mean_pass_at_k(right, count, count) if temperature else None,
        "groups with a signal": sum(0 < each < count for each in right) / len(sums) if temperature else None,
        "entropy": -sum(log_probs) / len(log_probs) if temperature else 0.0,
        "ended": ended / len(prompts),
        "an answer": said[0],
    }


def is_right(answer: str, wanted: int) -> bool:
    """Whether the last number of an answer is the sum."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and int(numbers[-1]) == wanted


def table_of(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A Markdown table: a row for each temperature, mean and range over the seeds."""
    columns = [name for name in next(iter(results.values()))[0] if name != "an answer"]
    lines = ["| temperature | " + " | ".join(columns) + " | one answer |", "|---|" + "---|" * (len(columns) + 1)]
    for name, runs in results.items():
        cells = []
        for column in columns:
            values, form = [each[column] for each in runs], ".2f" if column == "entropy" else ".0%"
            if None in values:
                cells.append("")
                continue
            mean = f"{sum(values) / len(values):{form}}"
            cells.append(mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})")
        lines.append(f"| {name} | {' | '.join(cells)} | {' '.join(runs[0]['an answer'].split())} |")
    return lines


if __name__ == "__main__":
    launch(run, StudyConfig, Path(__file__).with_name("pretrained_temperature.yaml"))
