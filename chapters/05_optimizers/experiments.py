"""Four comparisons on the embedded corpus, one command each: a table, a plot, and what the spread over seeds allows to be said.

    python chapters/05_optimizers/experiments.py --experiment optimizer
    python chapters/05_optimizers/experiments.py --experiment schedule
    python chapters/05_optimizers/experiments.py --experiment batch
    python chapters/05_optimizers/experiments.py --experiment order

`optimizer` first tries four learning rates for each of four optimizers. Then it lets each run at its best one and notes when it is at the
loss where AdamW ended; Muon also in shorter runs with schedules of their own. Interrupt one and start it again: it continues. With
--steps 10 each ends within a minute and shows nothing but that it runs.
"""

import math
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from chapters.experiment_run import ExperimentConfig, compare, prepare
from shared.course.launch import launch

LOSS = "held-out bits per byte"
REACHED = "steps to AdamW's loss"
LOOK = 10  # steps between two looks at the held-out loss in a race
RATES = {
    "adamw": (0.002, 0.004, 0.008, 0.016),
    "lion": (0.0005, 0.001, 0.002, 0.004),
    "muon": (0.004, 0.008, 0.016, 0.032),
    "sgd": (0.03, 0.1, 0.3, 0.9),
}
TITLES = {"adamw": "AdamW", "lion": "Lion", "muon": "Muon", "sgd": "SGD with momentum"}
MODEL = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
    "initializer_range": 0.1,
}  # fmt: skip
SCHEDULES = {
    "constant": {"name": "constant"},
    "constant, no warm-up": {"name": "constant", "warmup": 0.0},
    "linear": {"name": "linear"},
    "cosine": {"name": "cosine"},
    "wsd": {"name": "wsd"},
    "cosine, 8 x the rate": {"name": "cosine", "times": 8.0},
    "cosine, 8 x the rate, no warm-up": {"name": "cosine", "times": 8.0, "warmup": 0.0},
}
BATCHES = {
    f"{size} windows" + (", the same rate" if times is None else ""): {"batch_size": size, "times": times}
    for size in (2, 4, 8, 16, 32)
    for times in (None, (size / 8) ** 0.5)
    if not (size == 8 and times is None)
}
ORDERS = {"shuffled": "shuffled", "as in the corpus": "corpus", "easy first": "easy", "hard first": "hard", "half of it, twice": "twice"}


@dataclass
class OptimizerExperimentConfig(ExperimentConfig):
    """Compare optimizers, schedules, batch sizes or orders of the data, each from several seeds.

    Args:
        seq: bytes that each window of text predicts; at most 64.
        learning_rate: AdamW's peak, where the optimizer is not what is compared.
    """

    experiment: Literal["optimizer", "schedule", "batch", "order"]
    learning_rate: float = 0.008
    output: Path = Path("runs/05_experiments")


def settings_of(config: OptimizerExperimentConfig, **changes: Any) -> dict[str, Any]:
    """Everything that a trial's figures depend on, but the seed and the text. `warmup` is a part of the steps."""
    base = {
        "optimizer": {"name": "adamw", "lr": config.learning_rate}, "schedule": "cosine", "warmup": 0.07, "order": "shuffled",
        "target": None, **config.settings("steps", "seq", "batch_size", "windows"),
    }  # fmt: skip
    return base | changes


def sweep(config: OptimizerExperimentConfig) -> dict[str, dict[str, Any]]:
    rates = {f"{TITLES[name]}, {rate:g}": {"name": name, "lr": rate} for name, rates in RATES.items() for rate in rates}
    return {title: settings_of(config, optimizer=optimizer) for title, optimizer in rates.items()}


def schedules(config: OptimizerExperimentConfig) -> dict[str, dict[str, Any]]:
    variants = {}
    for title, changes in SCHEDULES.items():
        optimizer = {"name": "adamw", "lr": config.learning_rate * changes.get("times", 1.0)}
        variants[title] = settings_of(config, optimizer=optimizer, schedule=changes["name"], warmup=changes.get("warmup", 0.07))
    return variants


def batches(config: OptimizerExperimentConfig) -> dict[str, dict[str, Any]]:
    """Every variant sees the same number of windows, in fewer steps where more of them make one."""
    variants = {}
    for title, changes in BATCHES.items():
        steps = max(config.steps * config.batch_size // changes["batch_size"], 2)
        optimizer = {"name": "adamw", "lr": config.learning_rate * (changes["times"] or 1.0)}
        variants[title] = settings_of(config, optimizer=optimizer, batch_size=changes["batch_size"], steps=steps)
    return variants


def orders(config: OptimizerExperimentConfig) -> dict[str, dict[str, Any]]:
    return {title: settings_of(config, order=order) for title, order in ORDERS.items()}


def run(config: OptimizerExperimentConfig) -> None:
    # The core is imported here, after `launch` has chosen whose exercises it runs with.
    from chapters import trials

    texts, device, console = prepare(config, MODEL["max_position_embeddings"], least_steps=4)  # for warm-up and decay
    trial_of = lambda settings, seed: trial(settings, seed, texts, device)  # noqa: E731
    if config.experiment == "optimizer":
        rates = compare(config, sweep(config), trial_of, console, title="learning rates", kept="rates")
        best = {name: best_rate(rates, name) for name in RATES}
        console.print("Best rate of each: " + ", ".join(f"{TITLES[name]} {rate:g}" for name, rate in best.items()), highlight=False)
        adamw = trials.spread_of(rates[f"{TITLES['adamw']}, {best['adamw']:g}"], LOSS).mean
        runners = {TITLES[name]: settings_of(config, optimizer={"name": name, "lr": rate}, target=adamw) for name, rate in best.items()}
        for steps in (config.steps * 4 // 5, config.steps * 2 // 3):
            shorter = settings_of(config, optimizer={"name": "muon", "lr": best["muon"]}, target=adamw, steps=max(steps, 2))
            runners[f"Muon, a run of {shorter['steps']} steps"] = shorter
        results = compare(config, runners, trial_of, console, title=f"each at its best rate; AdamW's loss is {adamw:.3f} bits")
        plot_rates(rates, config.output / "rates.png")
    else:
        variants = {"schedule": schedules, "batch": batches, "order": orders}[config.experiment](config)
        results = compare(config, variants, trial_of, console)
    console.print(trials.verdict(results, LOSS), highlight=False)
    plot = config.output / f"{config.experiment}.png"
    trials.plot_results(results, LOSS, plot)
    console.print(f"Plot: {plot}   the figures of every run beside it.", highlight=False)


def best_rate(results: dict[str, list], name: str) -> float:
    from chapters.trials import spread_of

    return min(RATES[name], key=lambda rate: spread_of(results[f"{TITLES[name]}, {rate:g}"], LOSS).mean)


def trial(settings: dict[str, Any], seed: int, texts: Any, device: Any) -> dict[str, float | None]:
    """Train one model from one seed and measure it on held-out text."""
    import torch

    from shared.batches import batch_at
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.loop import train
    from shared.model.config import ModelConfig
    from shared.model.transformer import TransformerModel
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig, ScheduleConfig
    from shared.optim.schedules import attach_schedule
    from shared.optim.updater import Update

    model = TransformerModel(ModelConfig(**MODEL), seed=seed).to(device)
    precision = {"newton_schulz_dtype": "float32"} if device.type == "cpu" else {}  # bfloat16 products are slow on most CPUs
    optimizer = build_optimizer(model, OptimizerConfig(**settings["optimizer"], **precision))
    steps = settings["steps"]
    attach_schedule(ScheduleConfig(settings["schedule"], steps, round(settings["warmup"] * steps), decay_steps=steps // 5), optimizer)
    starts = windows_of(texts.training, settings, torch.Generator().manual_seed(seed))
    data = ([batch_at(texts.training, chunk, settings["seq"])] for chunk in starts.split(settings["batch_size"]))
    found: dict[str, float | None] = {LOSS: math.inf}
    if settings["target"] is not None:
        found[REACHED] = None
    began = time.perf_counter()
    for step, _ in train(model, optimizer, data, packed_next_token_objective, steps=steps, updater=Update(max_norm=1.0)):
        if settings["target"] is not None and found[REACHED] is None and step % LOOK == 0:
            found[REACHED] = float(step) if held_out_bits(model, texts, settings) <= settings["target"] else None
    return found | {LOSS: held_out_bits(model, texts, settings), "steps": steps, "seconds": time.perf_counter() - began}


def windows_of(stream: Any, settings: dict[str, Any], generator: Any) -> Any:
    """Where the windows of a run begin, in the order in which it sees them: [steps * batch] int64. All orders have the same windows,
    but for `twice`, which has half of them two times."""
    import torch

    count, seq = settings["steps"] * settings["batch_size"], settings["seq"]
    starts = torch.randint(len(stream) - seq, (count,), generator=generator)
    match settings["order"]:
        case "corpus":
            return starts.sort().values
        case "twice":
            half = starts[: (count + 1) // 2]
            return torch.cat([half, half[torch.randperm(len(half), generator=generator)]])[:count]
        case "easy" | "hard":
            sizes = [len(zlib.compress(bytes(stream[start : start + seq].tolist()))) for start in starts.tolist()]
            return starts[torch.tensor(sizes).argsort(stable=True, descending=settings["order"] == "hard")]
    return starts


def held_out_bits(model: Any, texts: Any, settings: dict[str, Any]) -> float:
    from chapters.text_run import bits, evaluate_text
    from shared.model.chunked_loss import packed_next_token_objective

    found, _ = bits(*evaluate_text(model, texts.held_out, settings["seq"], packed_next_token_objective, settings["windows"]))
    return found if math.isfinite(found) else math.inf


def plot_rates(results: dict[str, list], path: Path) -> None:
    """The loss against the learning rate, a line for each optimizer: tuned means at the bottom of its own valley."""
    from matplotlib.figure import Figure

    from shared.course import figures
    from chapters.trials import spread_of

    figures.use_style()
    drawing = Figure()
    axes = drawing.subplots()
    for (name, rates), color in zip(RATES.items(), (figures.TRAINING, figures.HELD_OUT, figures.COMPUTE, figures.WRONG), strict=True):
        spreads = [asdict(spread_of(results[f"{TITLES[name]}, {rate:g}"], LOSS)) for rate in rates]
        means = [spread["mean"] for spread in spreads]
        axes.plot(rates, means, marker="o", color=color, label=TITLES[name])
        axes.fill_between(rates, [spread["low"] for spread in spreads], [spread["high"] for spread in spreads], color=color, alpha=0.2)
    axes.set_xscale("log")
    axes.set(xlabel="peak learning rate", ylabel=LOSS)
    axes.legend()
    drawing.savefig(path)


if __name__ == "__main__":
    launch(run, OptimizerExperimentConfig, Path(__file__).with_name("experiments.yaml"))
