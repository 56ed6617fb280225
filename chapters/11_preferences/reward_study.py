"""What a reward model learns from pairs: accuracy and calibration over the number of pairs and wrong labels, and length bias.

    python chapters/11_preferences/reward_study.py        about two minutes on two cores at rest: a table and two plots

The hidden preference is known: a question has one right answer of sixty, and an answer that names it is preferred, whatever else it says.
Answers have up to six words besides that, which say nothing. In some variants the right answer is also the longer one in most pairs, as in
pairs of people, who like long answers and right ones: nothing in such data tells the two apart.

Interrupt it and start it again: it continues.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.course.launch import launch

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from shared.model.transformer import TransformerModel
    from shared.preference.calibration import Reliability
    from shared.totals import Batch

FACTS, WORDS, LONGEST = 60, 8, 6  # questions with an answer each, words that say nothing, and how many of those an answer has at most
END = 2 * FACTS + WORDS
SEQ = LONGEST + 3  # question, answer, words, end
MODEL = {
    "vocab_size": END + 1, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 2 * SEQ, "initializer_range": 0.1,
}  # fmt: skip
AMOUNTS = (100, 200, 400, 800, 1600)
FLIPPED = (0.0, 0.2)
LONGER = (0.5, 0.7, 0.9, 0.98)
BIASED = 400  # pairs of the variants in which the right answer is often the longer one
VARIANTS: dict[str, dict[str, Any]] = {
    f"{pairs} pairs" + f", {flipped:.0%} wrong labels" * bool(flipped): {"pairs": pairs, "flipped": flipped, "longer": 0.5}
    for flipped in FLIPPED
    for pairs in AMOUNTS
} | {
    f"{BIASED} pairs, right is longer in {longer:.0%}": {"pairs": BIASED, "flipped": 0.0, "longer": longer} for longer in LONGER[1:]
}


@dataclass
class StudyConfig:
    """Train reward models on a hidden preference, from several seeds.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        seeds: training runs of each variant; the seed sets weights, pairs and their order.
        steps: of each run.
        batch_size: pairs in a step.
        learning_rate: AdamW's peak.
        held_out: held-out pairs of each kind.
        output: folder of results and drawings.
    """

    impl: Literal["reference", "mine", "mixed"] = "reference"
    seeds: int = 3
    steps: int = 150
    batch_size: int = 64
    learning_rate: float = 0.003
    held_out: int = 1000
    output: Path = Path("runs/11_reward_study")


def run(config: StudyConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from chapters import trials
    from shared.course.errors import CourseError
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable

    for name, least in (("seeds", 1), ("steps", 4), ("batch_size", 1), ("held_out", 1)):
        if getattr(config, name) < least:
            raise CourseError(f"{name} is {getattr(config, name)}: give at least {least}.")
    require_writable(config.output)
    keep_freed_memory()
    console = Console(markup=False, emoji=False)
    common = {name: getattr(config, name) for name in ("steps", "batch_size", "learning_rate", "held_out")}
    variants = {name: variant | common for name, variant in VARIANTS.items()}
    try:
        results = trials.run_trials(variants, trial, config.seeds, config.output / "results.json", console)
    except ValueError as error:
        raise CourseError(str(error)) from None
    hidden = [f"{what}, {words} words" for what in ("right", "wrong") for words in range(LONGEST + 1)]
    shown = {name: [{key: value for key, value in each.items() if key not in hidden} for each in of] for name, of in results.items()}
    trials.print_results(console, f"reward models: {config.steps} steps, {config.seeds} seeds", shown)
    draw_amounts(results, config.output / "pairs.png")
    draw_lengths(results, config.output / "lengths.png")
    console.print(f"Plots: pairs.png and lengths.png in {config.output}; the figures of every run beside them.", highlight=False)


def texts(questions: "Tensor", answers: "Tensor", words: "Tensor", generator: "Generator") -> tuple["Tensor", "Tensor"]:
    """Question, an answer somewhere among words, end. Arguments: [texts]. Returns ids [texts, SEQ] and lengths [texts]."""
    import torch

    rows = torch.arange(len(questions))
    ids = 2 * FACTS + torch.randint(WORDS, (len(questions), SEQ), generator=generator)
    place = (torch.rand(len(questions), generator=generator) * (words + 1)).long()
    ids[:, 0] = questions
    ids[rows, 1 + place] = FACTS + answers
    ids[rows, 2 + words] = END
    return ids, words + 3


def draw_pairs(pairs: int, generator: "Generator", longer: float = 0.5, flipped: float = 0.0) -> "Batch":
    """Packed pairs, one in a row, as every objective on pairs takes them.

    Args:
        longer: share of the pairs in which the right answer is the longer one; in the others it is the shorter one, or as long.
        flipped: share of wrong labels.
    """
    import torch

    questions = torch.randint(FACTS, (pairs,), generator=generator)
    others = (questions + 1 + torch.randint(FACTS - 1, (pairs,), generator=generator)) % FACTS
    short, long = torch.randint(LONGEST + 1, (2, pairs), generator=generator).sort(dim=0).values
    is_longer = torch.rand(pairs, generator=generator) < longer
    right = texts(questions, questions, long.where(is_longer, short), generator)
    wrong = texts(questions, others, short.where(is_longer, long), generator)
    swapped = torch.rand(pairs, generator=generator) < flipped
    first, second = (
        (one[0].where(~swapped[:, None], other[0]), one[1].where(~swapped, other[1])) for one, other in ((right, wrong), (wrong, right))
    )
    positions = torch.arange(SEQ)
    documents = [torch.where(positions < lengths[:, None], number, -1) for number, (_, lengths) in enumerate((first, second))]
    return {
        "input_ids": torch.cat([first[0], second[0]], dim=1),
        "documents": torch.cat(documents, dim=1),
        "positions": positions.repeat(pairs, 2),
    }


def trained(settings: dict[str, Any], seed: int) -> "TransformerModel":
    """A reward model, trained on the pairs of a variant."""
    import torch

    from shared.loop import train
    from shared.model.config import ModelConfig
    from shared.model.transformer import TransformerModel
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig, ScheduleConfig
    from shared.optim.schedules import attach_schedule
    from shared.optim.updater import Update
    from shared.preference.reward_model import RewardConfig, RewardObjective, as_reward_model

    generator, steps = torch.Generator().manual_seed(seed), settings["steps"]
    pairs = draw_pairs(settings["pairs"], generator, settings["longer"], settings["flipped"])
    model = as_reward_model(TransformerModel(ModelConfig(**MODEL), seed=seed), seed=seed)
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=settings["learning_rate"], weight_decay=0.01))
    attach_schedule(ScheduleConfig("cosine", steps, max(1, steps // 10)), optimizer)

    def batch() -> "Batch":
        chosen = torch.randint(settings["pairs"], (settings["batch_size"],), generator=generator)
        return {name: rows[chosen] for name, rows in pairs.items()}

    objective = RewardObjective(RewardConfig(centering=0.01))
    for _ in train(model, optimizer, ([batch()] for _ in range(steps)), objective, steps=steps, updater=Update(max_norm=1.0)):
        pass
    return model


def reliability_on(model: "TransformerModel", pairs: "Batch") -> "Reliability":
    from shared.loop import evaluate
    from shared.preference.calibration import calibration_objective, reliability

    return reliability(evaluate(model, [pairs], calibration_objective))


def trial(settings: dict[str, Any], seed: int) -> dict[str, float]:
    """Figures of one run, on held-out pairs without wrong labels in which length says nothing."""
    import torch

    from shared.preference.reward_model import score

    model = trained(settings, seed)
    generator, count = torch.Generator().manual_seed(seed + 1000), settings["held_out"]
    found = reliability_on(model, draw_pairs(count, generator))
    figures = {
        "accuracy": found.accuracy,
        "calibration error": found.expected_calibration_error,
        "accuracy, right is shorter": reliability_on(model, draw_pairs(count, generator, longer=0.0)).accuracy,
    }
    means, questions = {}, torch.arange(FACTS).repeat(4)
    for what, answers in (("right", questions), ("wrong", (questions + torch.arange(1, 5).repeat_interleave(FACTS)) % FACTS)):
        for words in range(LONGEST + 1):
            ids, lengths = texts(questions, answers, torch.full((len(questions),), words), generator)
            rewards = score(model, [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)], len(questions))
            means[f"{what}, {words} words"] = sum(rewards) / len(rewards)
    gains = [(means[f"{what}, {LONGEST} words"] - means[f"{what}, 0 words"]) / LONGEST for what in ("right", "wrong")]
    figures |= {"reward of a word": sum(gains) / 2, "reward of being right": means["right, 3 words"] - means["wrong, 3 words"]}
    return figures | means


def draw_amounts(results: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Accuracy and calibration error over the number of pairs, with right and with some wrong labels: mean and range over the seeds."""
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    drawing = Figure(figsize=(9.0, 3.6))
    for axes, figure in zip(drawing.subplots(1, 2), ("accuracy", "calibration error"), strict=True):
        for flipped, color in zip(FLIPPED, (figures.HELD_OUT, figures.WRONG), strict=True):
            runs = [results[next(name for name, each in VARIANTS.items() if each == variant)] for variant in of_amounts(flipped)]
            values = [[run[figure] for run in each] for each in runs]
            axes.plot(AMOUNTS, [sum(each) / len(each) for each in values], "o-", color=color, label=f"{flipped:.0%} wrong labels")
            axes.fill_between(AMOUNTS, list(map(min, values)), list(map(max, values)), color=color, alpha=0.2, linewidth=0)
        axes.set(xscale="log", xlabel="pairs", ylabel=f"held-out {figure}", xticks=AMOUNTS)
        axes.set_xticks([], minor=True)
        axes.set_xticklabels([str(amount) for amount in AMOUNTS])
        axes.legend()
    drawing.savefig(path)


def of_amounts(flipped: float) -> list[dict[str, Any]]:
    return [{"pairs": pairs, "flipped": flipped, "longer": 0.5} for pairs in AMOUNTS]


def draw_lengths(results: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Length bias: the mean reward of right and wrong answers over their words, for data in which the right one is more and more often the
    longer one."""
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    drawing = Figure(figsize=(7.0, 4.2))
    axes, lengths = drawing.subplots(), range(LONGEST + 1)
    for longer, color in zip(LONGER, figures.sequence_colors(len(LONGER)), strict=True):
        variant = {"pairs": BIASED, "flipped": 0.0, "longer": longer}
        runs = results[next(name for name, each in VARIANTS.items() if each == variant)]
        for what, line in (("right", "-"), ("wrong", "--")):
            means = [sum(run[f"{what}, {words} words"] for run in runs) / len(runs) for words in lengths]
            axes.plot(lengths, means, line, color=color, label=f"right is longer in {longer:.0%}" if what == "right" else None)
    axes.plot([], [], "--", color=figures.REFERENCE, label="wrong answers")
    axes.set(xlabel="words of the answer that say nothing", ylabel="mean reward")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    drawing.savefig(path)


if __name__ == "__main__":
    launch(run, StudyConfig, Path(__file__).with_name("reward_study.yaml"))
