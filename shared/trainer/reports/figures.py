"""Chapter 12. The HTML report of a run, and its figures: loss, learning rate, speed, metrics of its mode, and load of experts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from shared.course import figures as style
from shared.output_files import write_atomically
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.mode import Judged
from shared.trainer.records.history import Change, Era
from shared.trainer.reports.listing import format_value
from shared.trainer.reports.page import HELD_OUT, code_of, embedded, page, plot, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_PREFERENCES = {  # figure -> its lines by metric, and what they measure
    "ranked_right": ({"train/accuracy": "training", "validation/accuracy": HELD_OUT}, "share of pairs ranked right"),
    "margins": ({"train/margin": "training", "validation/margin": HELD_OUT}, "reward of the chosen minus the rejected"),
    "rewards": ({"train/chosen_reward": "chosen", "train/rejected_reward": "rejected"}, "reward"),
    "reward": ({"rollout/reward": "what is trained for", "rollout/gold_reward": "hidden preference"}, "mean reward of an answer"),
    "kl": ({"rollout/kl_to_reference": "KL"}, "KL to the first model, nats per answer"),
    "zero_variance": ({"rollout/zero_variance": "zero variance"}, "share of groups whose answers all have one reward"),
    "length": ({"rollout/answer_tokens": "length"}, "tokens of an answer"),
    "value_loss": ({"train/value_loss": "value loss"}, "value loss"),
    "clip_fraction": ({"train/clip_fraction": "clipped"}, "share of tokens whose ratio is clipped"),
    "entropy": ({"train/entropy": "entropy"}, "entropy, nats per token"),
}


@dataclass
class Results:
    """The content of the report. metrics: step -> name -> value, as logged. eras: the starts of an elastic run. changes: what the run was
    continued with."""

    metrics: dict[int, dict[str, float]]
    judged: Judged
    report: Path
    eras: list[Era] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


def write_report(config: TrainerConfig, results: Results) -> None:
    """Write the HTML file and, beside it in `figures`, each figure as a PNG."""
    judged, output = results.judged, config.engine.output
    content = page(
        Path(__file__).with_name("report.html"),
        title=output.name,
        summary=[(name, format_value(name, value)) for name, value in judged.summary.items()],
        pictures=embedded(drawn(results), output / "figures"),
        judged=judged,
        eras=results.eras,
        changes=results.changes,
        code=code_of(output),
        config=yaml.safe_dump(provenance.plain(config), sort_keys=False),
    )
    write_atomically(results.report, content)


def drawn(results: Results) -> dict[str, "Figure"]:
    """The report's figures by name, without those of which nothing was logged."""
    found = {
        "loss": curves(results, {"train/loss": "training", "validation/loss": HELD_OUT}, f"loss ({results.judged.unit})"),
        "bits_per_byte": curves(results, {"validation/bits_per_byte": HELD_OUT}, "bits per byte"),
        "throughput": curves(results, {"speed/tokens_per_second": "tokens per second"}, "tokens per second", zero=True),
        "utilisation": curves(results, {"speed/mfu": "model FLOPs utilisation"}, "share of the peak", zero=True),
        "norms": curves(results, {"norm/gradient": "gradient"}, "gradient norm", zero=True),
        "learning_rate": curves(results, named(results, "learning_rate"), "learning rate", zero=True),
        "expert_load": expert_load(results),
        **{name: curves(results, lines, label) for name, (lines, label) in OF_PREFERENCES.items()},
        "reward_parts": curves(results, named(results, "rollout/reward/"), "mean reward of an answer, without its weight"),
        "reward_over_kl": over_kl(results),
        **results.judged.figures,
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def named(results: Results, beginning: str) -> dict[str, str]:
    """The metrics with this prefix, each with the last part of its name."""
    names = sorted({name for row in results.metrics.values() for name in row if name.startswith(beginning)})
    return {name: name.rpartition("/")[2] for name in names}


def curves(results: Results, names: dict[str, str], label: str, zero: bool = False) -> "Figure | None":
    """Figures of the log against the step, each with its name."""
    present = {title: points for name, title in names.items() if (points := series(results.metrics, name))}
    if not present:
        return None
    figure = plot(present, label)
    [axes] = figure.axes
    for era in results.eras[1:]:
        axes.axvline(era.step, color="0.6", linestyle=":", linewidth=1)
    for change in results.changes:
        axes.axvline(change.step, color="0.4", linestyle="--", linewidth=1)
    if zero:
        axes.set_ylim(bottom=0)
    return figure


def over_kl(results: Results) -> "Figure | None":
    """The rewards of rollouts against how far the policy has moved: where the hidden preference's falls while the other rises, the reward
    model is over-optimized (Gao et al. 2023)."""
    kl, (titles, _) = "rollout/kl_to_reference", OF_PREFERENCES["reward"]
    lines = {title: points for name, title in titles.items() if (points := series(results.metrics, name, kl))}
    return plot(lines, "mean reward of an answer", "KL to the first model, nats per answer", linestyle="none") if lines else None


def expert_load(results: Results) -> "Figure | None":
    """The load of each expert over time as a heat map, with the blocks one above the other (`shared.moe.balancing`)."""
    name = "experts/load/"
    keys = {key for row in results.metrics.values() for key in row if key.startswith(name)}
    experts = sorted(tuple(map(int, key[len(name) :].split("."))) for key in keys)
    if not experts:
        return None
    rows = [dict(series(results.metrics, f"{name}{block}.{expert}")) for block, expert in experts]
    steps = sorted(rows[0])
    figure = style.new_figure(figsize=(7.0, 1.2 + 0.14 * len(rows)))
    axes = figure.subplots()
    drawn = axes.imshow([[row[step] for step in steps] for row in rows], aspect="auto", vmin=0, vmax=2, interpolation="nearest")
    marked = range(0, len(steps), max(1, len(steps) // 8))
    firsts = [place for place, (_, expert) in enumerate(experts) if expert == 0]
    axes.set_xticks(marked, [steps[place] for place in marked])
    axes.set_yticks(firsts, [f"block {experts[place][0]}" for place in firsts])
    axes.set(xlabel="training step", ylabel="expert")
    axes.grid(False)
    figure.colorbar(drawn, label="load (1 is equal)")
    return figure
