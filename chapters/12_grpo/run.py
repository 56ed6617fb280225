"""Teach a small model to add by GRPO: it starts with about one sum in five right, and learns from a verifier and its own answers alone.

python chapters/12_grpo/run.py                              sums of numbers of up to three digits, four minutes
python chapters/12_grpo/run.py --digits 2 --steps 100       smaller ones, within a minute
python chapters/12_grpo/run.py --kl_coefficient 0.04        kept close to its start
python chapters/12_grpo/run.py --impl mine                  with your own exercises
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from chapters.checked_run import CheckedConfig
from shared.course.launch import launch

TRIES, ASKED = (1, 2, 4, 8, 16), 200  # k of pass@k, and how many held-out tasks are answered so often
START = ("task", "digits", "start_accuracy", "start_drawn", "start_rate", "most_start_steps", "width", "layers", "seed")


@dataclass
class RunConfig(CheckedConfig):
    """Fine-tune a model on right answers until it solves a part of the tasks, and let it learn the rest by GRPO.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        output: folder for the start, the figures and the plot.
    """

    impl: Literal["reference", "mine", "mixed"] = "reference"
    output: Path = Path("runs/12_grpo")


def run(config: RunConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    import torch
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    from chapters import checked_run
    from chapters.checked_tasks import tasks_of
    from shared.course import binding
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable, write_atomically

    require_writable(config.output)
    keep_freed_memory()
    torch.set_num_threads(1)
    console = Console(markup=False, emoji=False)
    with tasks_of(config.task, config.digits, config.seed) as tasks:
        start = kept_start(config, tasks, console)
        before = accuracies(start, tasks, config)
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[shown]}"))
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("GRPO", total=config.steps, shown="")
            for step, model, curve in checked_run.learn(start, config, tasks):
                shown = f"reward {curve.rollouts[-1]['reward']:.2f}, held out {curve.held_out[-1][1]:.0%}"
                bar.update(task, completed=step, shown=shown)
        after = accuracies(model, tasks, config)
    figures = {"settings": {name: asdict(config)[name] for name in sorted(each.name for each in fields(CheckedConfig))}}
    figures |= {"before": before, "after": after, "held_out": curve.held_out, "rollouts": curve.rollouts}
    write_atomically(config.output / "figures.json", json.dumps(figures, indent=1).encode())
    draw(figures, config.output / "figures.png")
    console.print(table(figures))
    console.print(binding.summary(), highlight=False)
    console.print(f"Figures: {config.output / 'figures.json'}, plot: {config.output / 'figures.png'}", highlight=False)


def kept_start(config: RunConfig, tasks: Any, console: Any) -> Any:
    """The model that GRPO starts from: read where an earlier run left it, or else trained."""
    from safetensors.torch import load, save

    from chapters import checked_run
    from shared.model.config import ModelConfig
    from shared.model.transformer import TransformerModel
    from shared.output_files import write_atomically

    say = lambda line: console.print(line, highlight=False)
    key = json.dumps([getattr(config, name) for name in START])
    kept = config.output / f"start-{hashlib.sha256(key.encode()).hexdigest()[:12]}.safetensors"
    if kept.exists():
        model = TransformerModel(ModelConfig(**checked_run.model_settings(config, tasks)))
        model.load_state_dict(load(kept.read_bytes()))
        say(f"Start: {checked_run.accuracy(model, tasks, tasks.held_out):.0%} of held-out {config.task} right, from {kept}.")
        return model.eval()
    model = checked_run.start_of(config, tasks, say)
    write_atomically(kept, save({name: tensor.contiguous() for name, tensor in model.state_dict().items()}))
    return model


def accuracies(model: Any, tasks: Any, config: RunConfig) -> dict[str, float]:
    """Greedy accuracy and pass@k of a model on held-out tasks."""
    from chapters import checked_run
    from shared.rl.examination import mean_pass_at_k

    _, right = checked_run.samples_of(model, tasks, tasks.held_out[:ASKED], TRIES[-1], config.seed)
    found = {"greedy": checked_run.accuracy(model, tasks, tasks.held_out)}
    return found | {f"pass@{k}": mean_pass_at_k(right, TRIES[-1], k) for k in TRIES}


def table(figures: dict[str, Any]) -> Any:
    from rich.table import Table

    found = Table(title=f"Held-out {figures['settings']['task']} that are right")
    for column in ("", "before", "after"):
        found.add_column(column, justify="right")
    for name, share in figures["before"].items():
        found.add_row(name, f"{share:.1%}", f"{figures['after'][name]:.1%}")
    return found


def draw(figures: dict[str, Any], path: Path) -> None:
    """Reward and held-out accuracy; entropy and distance to the start; groups that teach nothing; pass@k before and after."""
    from matplotlib.figure import Figure

    from shared.course import figures as style

    style.use_style()
    drawing = Figure(figsize=(10, 6.4))
    (reward, policy), (groups, tries) = drawing.subplots(2, 2)
    rollouts, steps = figures["rollouts"], figures["settings"]["passes"]
    across = [steps * (1 + number) for number in range(len(rollouts))]
    column = lambda name: [each[name] for each in rollouts]
    reward.plot(across, column("reward"), color=style.TRAINING, label="reward of a rollout")
    reward.plot(*zip(*figures["held_out"], strict=True), "o-", color=style.HELD_OUT, label="held out, greedy")
    policy.plot(across, column("entropy"), color=style.TRAINING, label="entropy, nats per token")
    policy.plot(across, column("kl_to_reference"), color=style.COMPUTE, label="KL to the start, nats per answer")
    groups.plot(across, column("zero_variance"), color=style.WRONG, label="groups of equal rewards")
    for axes, name in ((reward, "share that is right"), (policy, "nats"), (groups, "share of groups")):
        axes.set(xlabel="step", ylabel=name, ylim=(0, None))
        axes.legend()
    for when, color in (("before", style.REFERENCE), ("after", style.HELD_OUT)):
        tries.plot(TRIES, [figures[when][f"pass@{k}"] for k in TRIES], "o-", color=color, label=when)
    tries.set_xscale("log", base=2)
    tries.set(xlabel="k", ylabel="pass@k", ylim=(0, 1), xticks=TRIES, xticklabels=TRIES)
    tries.legend()
    drawing.savefig(path)


if __name__ == "__main__":
    launch(run, RunConfig, Path(__file__).with_name("run.yaml"))
