"""GRPO from a fine-tuned start: what a verifier alone teaches, beside a reward that means nothing and more imitation. Several seeds.

    python chapters/12_grpo/grpo_study.py                       four kinds of runs from each of three seeds
    python chapters/12_grpo/grpo_study.py --seeds 1 --steps 4          ends within a minute or two and shows only that it runs
    python chapters/12_grpo/grpo_study.py --config chapters/12_grpo/learning/counts.yaml           counting words
    python chapters/12_grpo/grpo_study.py --config chapters/12_grpo/learning/functions.yaml        programs, run in the sandbox

Sums and training are the same as in the chapter's run (`chapters/checked_run.py`), with smaller numbers and a smaller model. Interrupt it
and start it again: it continues. At the end it writes its tables as LEARNING.md, and draws the plots, into its folder.
"""

import copy
import functools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chapters.checked_run import CheckedConfig
from shared.course.launch import launch

START = ("task", "digits", "start_accuracy", "start_drawn", "start_rate", "most_start_steps", "width", "layers")
TRIES = (1, 2, 4, 8, 16)  # k of pass@k
SMOOTHED = 10  # rollouts at the end of a run that a figure is the mean of
ASKED = 200  # held-out tasks that are answered TRIES[-1] times
GREEDY, KL, ENTROPY, LENGTH = "greedy", "KL to the start, nats", "entropy, nats", "tokens of an answer"
WORDS = {  # of each task, for the page: what it is, and one of it
    "sums": ("sums of two numbers of up to {digits} digits", "sum"),
    "counts": ("counts of the words in a list of two to nine", "count"),
    "functions": ("functions of one line, which the sandbox runs on five pairs of numbers", "function"),
}
VARIANTS = {
    "the start": "nothing",
    "GRPO": "verifier",
    "GRPO, random reward": "coin",
    "imitation, as many steps": "imitation",
}


@dataclass
class StudyConfig(CheckedConfig):
    """Train one fine-tuned start in several ways for as many steps.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        seeds: runs of each kind; a seed sets weights, tasks and answers.
        coin_steps: of GRPO with the random reward.
        output: folder for results, page and plots.
    """

    impl: Literal["reference", "mine", "mixed"] = "reference"
    seeds: int = 3
    coin_steps: int = 200
    output: Path = Path("runs/12_grpo_study")


def run(config: StudyConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    import torch
    from rich.console import Console

    from chapters import trials
    from shared.course.errors import CourseError
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable, write_atomically

    if config.seeds < 1:
        raise CourseError(f"seeds is {config.seeds}: give at least 1.")
    require_writable(config.output)
    keep_freed_memory()
    torch.set_num_threads(1)
    console = Console(markup=False, emoji=False)
    given = {name: getattr(config, name) for name in CheckedConfig.__dataclass_fields__ if name != "seed"}
    steps = {"coin": {"steps": config.coin_steps}}
    variants = {name: {"taught by": teacher} | given | steps.get(teacher, {}) for name, teacher in VARIANTS.items()}
    try:
        results = trials.run_trials(variants, functools.partial(trial, config.output), config.seeds, config.output / "study.json", console)
    except ValueError as error:
        raise CourseError(str(error)) from None
    write_atomically(config.output / "LEARNING.md", page(config, results).encode())
    draw(config, results, variants)
    console.print((config.output / "LEARNING.md").read_text(), highlight=False)
    console.print(f"Page and plot: {config.output / 'LEARNING.md'}, {config.output / 'learning.png'}", highlight=False)


@functools.cache
def start_of(settings: str) -> Any:
    from chapters import checked_run
    from chapters.checked_tasks import tasks_of

    config = CheckedConfig(**json.loads(settings))
    with tasks_of(config.task, config.digits, config.seed) as tasks:
        return checked_run.start_of(config, tasks, lambda line: None)


def trial(output: Path, settings: dict[str, Any], seed: int) -> dict[str, float | None]:
    """Train in one way, and keep the curve beside the figures."""
    from chapters import checked_run
    from chapters.checked_tasks import tasks_of
    from shared.output_files import write_atomically

    config = CheckedConfig(**{name: value for name, value in settings.items() if name != "taught by"}, seed=seed)
    start = start_of(json.dumps({name: getattr(config, name) for name in (*START, "seed")}))
    with tasks_of(config.task, config.digits, seed) as tasks:
        began = time.process_time()
        match settings["taught by"]:
            case "nothing":
                model, rollouts = start, []
            case "imitation":
                model, rollouts = imitation(start, config, tasks), []
            case teacher:
                coin = random.Random(seed)
                reward = None if teacher == "verifier" else lambda samples: [float(coin.random() < 0.5) for _ in samples]
                for _, model, curve in checked_run.learn(start, config, tasks, every=config.steps, reward=reward):
                    rollouts = curve.rollouts
        seconds = time.process_time() - began
        write_atomically(curve_file(output, settings, seed), json.dumps(rollouts).encode())
        last = rollouts[-SMOOTHED:]
        alike = sum(each["zero_variance"] for each in last) / len(last) if last else None
        return measured(model, start, tasks, seed) | {"groups of equal rewards": alike, "seconds": seconds}


def imitation(start: Any, config: CheckedConfig, tasks: Any) -> Any:
    """Go on with the fine-tuning on right answers, as many to a step as GRPO has answers."""
    from chapters import checked_run
    from chapters.checked_tasks import training_tasks
    from shared.loop import train
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig
    from shared.optim.updater import Update

    model = copy.deepcopy(start).train()
    drawn = iter(functools.partial(random.Random(config.seed).choice, training_tasks(tasks)), None)
    data = checked_run.demonstrations(tasks, drawn, config.prompts * config.answers)
    optimizer = build_optimizer(model, OptimizerConfig("adamw", lr=config.start_rate))
    for _ in train(model, optimizer, data, packed_next_token_objective, steps=config.steps, updater=Update(1.0)):
        pass
    return model.eval()


def measured(model: Any, start: Any, tasks: Any, seed: int) -> dict[str, float]:
    """pass@k of drawn answers to held-out tasks, the likeliest answers, and how far from the start the answers lie."""
    import torch

    from chapters import checked_run
    from shared.preference.rollout import AnswerRows
    from shared.preference.value_head import token_scores
    from shared.rl.examination import mean_pass_at_k

    most = TRIES[-1]
    samples, right = checked_run.samples_of(model, tasks, tasks.held_out[:ASKED], most, seed)
    rows = AnswerRows(samples, 64, 1)
    with torch.no_grad():
        own, first = (rows.take(token_scores(each, rows.batch)[0]) for each in (model, start))
    return {f"pass@{k}": mean_pass_at_k(right, most, k) for k in TRIES} | {
        GREEDY: checked_run.accuracy(model, tasks, tasks.held_out),
        KL: (own - first).sum(dim=1).mean().item(),
        ENTROPY: -(own.sum() / rows.lengths.sum()).item(),
        LENGTH: rows.lengths.double().mean().item(),
    }


def curve_file(output: Path, settings: dict[str, Any], seed: int) -> Path:
    named = "-".join(str(value) for name, value in sorted(settings.items()))
    return output / f"curve-{named}-seed{seed}.json"


# What is shown.


def page(config: StudyConfig, results: dict[str, list[dict[str, float | None]]]) -> str:
    """The page of results, whose sentences say what the figures do and no more."""
    from chapters.trials import text_of

    def rows(columns: dict[str, str]) -> str:
        lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        return "\n".join([*lines, *(f"| {name} | " + " | ".join(text_of(found, each).replace("  ", " ") for each in columns.values()) + " |"
                                    for name, found in results.items())])  # fmt: skip

    tries = rows({name: name for name in (GREEDY, *(f"pass@{k}" for k in TRIES))})
    others = rows({name: name for name in (KL, ENTROPY, LENGTH, "groups of equal rewards", "seconds")})
    gains = {name: [100 * (one["pass@1"] - before["pass@1"]) for one, before in zip(found, results["the start"], strict=True)]
             for name, found in results.items()}  # fmt: skip
    said = "\n".join(f"- {name}: {sum(some) / len(some):+.1f} points ({', '.join(f'{each:+.1f}' for each in some)})"
                     for name, some in gains.items() if name != "the start")  # fmt: skip
    what, one = WORDS[config.task]
    likely = "drawn" if config.start_drawn else "likeliest"
    return f"""# What GRPO learns from a verifier: {config.task}

`python chapters/12_grpo/grpo_study.py` writes this page. A model of {config.layers} layers of width {config.width} is fine-tuned
on right {what.format(digits=config.digits)}, until {config.start_accuracy:.0%} of
its {likely} answers to held-out ones are right, and is then trained in several ways for {config.steps} steps of
{config.prompts * config.answers} answers each.

- GRPO draws {config.answers} answers to each of {config.prompts} {config.task} at temperature 1, and takes {config.passes} steps with
  them, with AdamW at a learning rate of {config.learning_rate:g}. Nothing holds it near the start. A right answer is worth 1 and any
  other 0.
- With the random reward a coin decides what an answer is worth, for {config.coin_steps} steps.
- Imitation goes on with the fine-tuning at its rate of {config.start_rate:g}. It sees a right answer to each {one}, which GRPO never does.

Figures of {config.seeds} seed(s), mean and range, from {TRIES[-1]} drawn answers to each of {ASKED} held-out {config.task}.

## Held-out {config.task} that are right

{tries}

Change of pass@1 from the start, mean and each seed:

{said}

## What else moved

KL is to the start, and per answer; entropy per token, both of drawn answers to held-out {config.task}. Groups of equal rewards teach
nothing: their share is the mean of the last {SMOOTHED} rollouts. Seconds are the processor's, of the training alone and on one thread;
the sandbox's are not in them.

{others}
"""


def draw(config: StudyConfig, results: dict[str, list[dict[str, float | None]]], variants: dict[str, dict[str, Any]]) -> None:
    """Reward, KL and entropy over the rollouts, and pass@k after training."""
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    drawing = Figure(figsize=(10, 6.4))
    (reward, kl), (entropy, tries) = drawing.subplots(2, 2)
    colors = dict(zip(results, (figures.REFERENCE, figures.HELD_OUT, figures.WRONG, figures.COMPUTE), strict=True))
    for name, settings in variants.items():
        for seed in range(config.seeds):
            rollouts = json.loads(curve_file(config.output, settings, seed).read_text())
            for axes, metric in ((reward, "reward"), (kl, "kl_to_reference"), (entropy, "entropy")):
                if rollouts:
                    points = [each[metric] for each in rollouts]
                    axes.plot(range(1, len(points) + 1), points, color=colors[name], alpha=0.6, label=name if seed == 0 else None)
        means = [sum(each[f"pass@{k}"] for each in results[name]) / config.seeds for k in TRIES]
        tries.plot(TRIES, means, "o-", color=colors[name], label=name)
    for axes, said in ((reward, "reward of a rollout"), (kl, "KL to the start, nats"), (entropy, "entropy, nats per token")):
        axes.set(xlabel="rollout", ylabel=said)
        axes.legend()
    tries.set_xscale("log", base=2)
    tries.set(xlabel="k", ylabel="pass@k, held out", ylim=(0, 1), xticks=TRIES, xticklabels=TRIES)
    tries.legend()
    drawing.savefig(config.output / "learning.png")


if __name__ == "__main__":
    launch(run, StudyConfig, Path(__file__).with_name("grpo_study.yaml"))
