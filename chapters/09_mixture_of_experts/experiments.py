"""Four experiments with mixtures of experts on the embedded corpus, one command each: a table, a plot, and what the seeds allow to be said.

    python chapters/09_mixture_of_experts/experiments.py --experiment balance   loads over time, without balancing and with it
    python chapters/09_mixture_of_experts/experiments.py --experiment quality   experts beside dense models of equal active FLOPs
    python chapters/09_mixture_of_experts/experiments.py --experiment dropping  capacities beside no limit
    python chapters/09_mixture_of_experts/experiments.py --experiment tokens    which bytes each expert takes after a short training

Interrupt one and start it again: it continues. With --steps 10 each ends within a minute and shows nothing but that it runs.
"""

import json
import math
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from chapters.experiment_run import ExperimentConfig, compare, prepare
from shared.course.launch import launch

LOSS = "held-out bits per byte"
LOOK = 5  # steps that a column of a heat map adds up
MODEL = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
    "initializer_range": 0.1, "intermediate_size": 192,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 96, "num_experts_per_tok": 2}  # 2 of 96 are as wide as the dense layer of 192
BALANCED = EXPERTS | {"balance_coefficient": 0.01}
ALONE = EXPERTS | {"balance_coefficient": 0.0}
BALANCE = {
    "none": {"experts": ALONE},
    "none, noisy top-k": {"experts": ALONE, "noisy": True},
    "z-loss, 0.001": {"experts": ALONE | {"z_coefficient": 0.001}},
    "bias update, 0.01": {"experts": ALONE | {"bias_update_rate": 0.01}},
    "balance loss, 0.01": {"experts": BALANCED},
}
QUALITY = {
    "dense, 192": {"experts": None},
    "8 experts of 96, 2 active": {"experts": BALANCED},
    "16 experts of 48, 4 active": {"experts": BALANCED | {"num_experts": 16, "moe_intermediate_size": 48, "num_experts_per_tok": 4}},
    "7 experts of 96, 1 active, 1 shared": {"experts": BALANCED | {"num_experts": 7, "num_experts_per_tok": 1, "num_shared_experts": 1}},
    "dense, 768: as many weights as 8 experts": {"experts": None, "intermediate_size": 768},
}
DROPPING = {
    "no limit": {"experts": BALANCED},
    **{f"capacity {factor:g}": {"experts": BALANCED | {"capacity_factor": factor}} for factor in (2.0, 1.25, 1.0, 0.5)},
    "no limit, no balancing": {"experts": ALONE},
    "capacity 1.25, no balancing": {"experts": ALONE | {"capacity_factor": 1.25}},
}
EXPERIMENTS = {"balance": BALANCE, "quality": QUALITY, "dropping": DROPPING, "tokens": {"balance loss, 0.01": {"experts": BALANCED}}}


@dataclass
class MixtureExperimentConfig(ExperimentConfig):
    """Compare balancing, quality, dropping or specialisation of mixtures of experts, each from several seeds.

    Args:
        seq: bytes that each window of text predicts; at most 64.
    """

    experiment: Literal["balance", "quality", "dropping", "tokens"]
    steps: int = 300
    batch_size: int = 16
    output: Path = Path("runs/09_experiments")


def settings_of(config: MixtureExperimentConfig, variant: dict[str, Any]) -> dict[str, Any]:
    """Everything that a trial's figures depend on, but the seed."""
    common = config.settings("experiment", "steps", "seq", "batch_size", "learning_rate", "windows")
    return {"noisy": False, "intermediate_size": 192} | variant | common


def run(config: MixtureExperimentConfig) -> None:
    # The core is imported here, after `launch` has chosen whose exercises it runs with.
    from chapters import trials

    texts, device, console = prepare(config, MODEL["max_position_embeddings"], least_steps=4)  # for warm-up and decay
    variants = {name: settings_of(config, variant) for name, variant in EXPERIMENTS[config.experiment].items()}

    def trial_of(settings: dict[str, Any], seed: int) -> dict[str, float | None]:
        figures, record = trial(settings, seed, texts, device)
        name = next(name for name, other in variants.items() if other == settings)
        record_path(config, name, seed).write_text(json.dumps(record), encoding="utf-8")
        return figures

    results = compare(config, variants, trial_of, console, seeds=1 if config.experiment == "tokens" else None)
    plot = config.output / f"{config.experiment}.png"
    if config.experiment == "tokens":
        show_tokens(console, json.loads(record_path(config, next(iter(variants)), 0).read_text(encoding="utf-8"))["bytes"], plot)
    else:
        console.print(trials.verdict(results, LOSS), highlight=False)
        trials.plot_results(results, LOSS, plot)
    if config.experiment == "balance":
        records = {name: json.loads(record_path(config, name, 0).read_text(encoding="utf-8")) for name in variants}
        draw_loads({name: record["loads"] for name, record in records.items()}, plot.with_name("loads.png"))
        console.print(f"The loads over time, as heat maps: {plot.with_name('loads.png')}", highlight=False)
    console.print(f"Plot: {plot}   the figures of every run beside it.", highlight=False)


def record_path(config: MixtureExperimentConfig, variant: str, seed: int) -> Path:
    return config.output / f"{config.experiment}-{''.join(c if c.isalnum() else '_' for c in variant)}-{seed}.json"


def trial(settings: dict[str, Any], seed: int, texts: Any, device: Any) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Train one model from one seed. Returns its figures, and its loads [column][layer][expert] and bytes [layer][expert][byte]."""
    import torch

    from chapters.text_run import bits, evaluate_text
    from shared.batches import batch_at
    from shared.loop import train
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.model.counting import active_feed_forward_size, parameter_counts
    from shared.model.transformer import TransformerModel
    from shared.moe.balancing import take_loads, update_bias
    from shared.moe.builders import MIXTURE
    from shared.moe.config import MixtureConfig, MixtureModelConfig
    from shared.moe.layer import mixture_layers
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig, ScheduleConfig
    from shared.optim.schedules import attach_schedule
    from shared.optim.updater import Update

    experts = settings["experts"] and MixtureConfig(**settings["experts"])
    model_config = MixtureModelConfig(**MODEL | {"intermediate_size": settings["intermediate_size"]}, experts=experts)
    model = TransformerModel(model_config, MIXTURE, seed=seed).to(device)
    torch.manual_seed(seed)
    if settings["noisy"]:
        import_module("chapters.09_mixture_of_experts.routers").use_noisy_routers(model, model_config)
    layers, dropped = mixture_layers(model), []
    for layer in layers:
        layer.router.register_forward_hook(lambda module, _, routing: dropped.append(share_dropped(module, routing.experts)))
    steps, seq, batch_size = settings["steps"], settings["seq"], settings["batch_size"]
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=settings["learning_rate"]))
    attach_schedule(ScheduleConfig("cosine", steps, round(0.07 * steps)), optimizer)
    starts = torch.randint(len(texts.training) - seq, (steps, batch_size), generator=torch.Generator().manual_seed(seed))
    data = ([batch_at(texts.training, chunk, seq)] for chunk in starts)
    began, loads = time.perf_counter(), []
    for step, _ in train(model, optimizer, data, packed_next_token_objective, steps=steps, updater=Update(max_norm=1.0)):
        of_step = take_loads(model, lambda counts: counts)
        for layer in layers:
            update_bias(layer, of_step[layer.layer])
        if of_step:
            counted = torch.stack(list(of_step.values())).cpu()
            loads = [*loads[:-1], loads[-1] + counted] if (step - 1) % LOOK else [*loads, counted]
    seconds = time.perf_counter() - began
    model.eval()
    loss, _ = bits(*evaluate_text(model, texts.held_out, seq, packed_next_token_objective, settings["windows"]))
    active = sum(active_feed_forward_size(model_config.resolved(), layer) for layer in range(model_config.num_hidden_layers))
    figures = {LOSS: loss if math.isfinite(loss) else math.inf}
    if layers:
        last = torch.stack(loads[-max(1, 50 // LOOK) :]).sum(dim=0).double()
        shares = last / last.sum(dim=1, keepdim=True) * experts.num_experts
        figures |= {"fullest expert": shares.max().item(), "idle experts": int((shares < 0.1).sum())}
        figures |= {"dropped": float(torch.tensor(dropped[-50 * len(layers) :]).mean())} if experts.capacity_factor else {}
    if settings["experiment"] == "quality":
        figures = {LOSS: figures[LOSS], "feed-forward weights, active": active, "all weights": sum(parameter_counts(model_config).values())}
    record = {"loads": [load.tolist() for load in loads], "bytes": bytes_by_expert(model, texts.held_out, settings) if layers else []}
    return figures | {"steps": steps, "seconds": seconds}, record


def share_dropped(router: Any, experts: Any) -> float:
    """Of a batch's choices, those beyond the capacity; 0 in evaluation and without a limit."""
    from shared.moe.dispatch import drop_beyond_capacity, expert_capacity

    settings = router.experts
    if settings.capacity_factor is None or not router.training:
        return 0.0
    capacity = expert_capacity(settings.capacity_factor, experts.shape[1], settings.num_experts_per_tok, settings.num_experts)
    return (drop_beyond_capacity(experts, settings.num_experts, capacity) == settings.num_experts).double().mean().item()


def bytes_by_expert(model: Any, stream: Any, settings: dict[str, Any]) -> list[list[list[int]]]:
    """How often each expert was chosen for each byte of held-out text: [layer][expert][byte]."""
    import torch

    from shared.batches import sequential_batches
    from shared.moe.layer import mixture_layers

    layers, seen = mixture_layers(model), []
    hooks = [layer.router.register_forward_hook(lambda _, __, routing: seen.append(routing.experts)) for layer in layers]
    counts = torch.zeros(len(layers), settings["experts"]["num_experts"], 256, dtype=torch.int64)
    with torch.no_grad():
        for batch in sequential_batches(stream, 64, settings["seq"], 4 * settings["windows"]):
            seen.clear()
            model(batch["input_ids"])
            for layer, experts in enumerate(seen):
                ids = batch["input_ids"].unsqueeze(-1).expand_as(experts)
                pairs = torch.bincount((experts * 256 + ids).flatten().cpu(), minlength=counts[layer].numel())
                counts[layer] += pairs.view_as(counts[layer])
    for hook in hooks:
        hook.remove()
    return counts.tolist()


def typical_bytes(counts: Any, number: int = 10) -> list[list[int]]:
    """For each expert the bytes that it takes most above their share of the text, of those that are 1 in 500 or more: counts [E, 256]."""
    share = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    overall = counts.sum(dim=0) / counts.sum()
    lift = share / overall.clamp(min=1e-12)
    lift[:, overall < 1 / 500] = 0
    return [[byte for byte in row.argsort(descending=True)[:number].tolist() if row[byte] > 1] for row in lift]


def show_tokens(console: Any, counts: list[list[list[int]]], path: Path) -> None:
    """A table of each expert's typical bytes, and how often each expert of the first layer is chosen for the commonest bytes."""
    import torch
    from matplotlib.figure import Figure
    from rich.table import Table

    from shared.course import figures

    table = Table("layer", "expert", "share of the choices", "takes above all")
    by_layer = torch.tensor(counts, dtype=torch.float64)
    for layer, of_layer in enumerate(by_layer):
        for expert, typical in enumerate(typical_bytes(of_layer)):
            share = of_layer[expert].sum() / of_layer.sum()
            table.add_row(str(layer), str(expert), f"{share:.0%}", "  ".join(shown(byte) for byte in typical))
    console.print(table)
    figures.use_style()
    common = by_layer[0].sum(dim=0).argsort(descending=True)[:40]
    drawing = Figure(figsize=(9.0, 4.6))
    for axes, (layer, of_layer) in zip(drawing.subplots(len(by_layer), 1, squeeze=False)[:, 0], enumerate(by_layer), strict=True):
        picture = axes.imshow((of_layer[:, common] / of_layer[:, common].sum(dim=0).clamp(min=1)).numpy(), aspect="auto", vmin=0)
        axes.set_xticks(range(len(common)), [shown(byte) for byte in common.tolist()], fontsize=7)
        axes.set(ylabel=f"expert, layer {layer}")
        axes.grid(False)
        drawing.colorbar(picture, ax=axes, label="share of the byte's choices")
    axes.set_xlabel("byte, the commonest first")
    drawing.savefig(path)


def shown(byte: int) -> str:
    return {32: "space", 10: "newline", 0: "end"}.get(byte, chr(byte) if 32 < byte < 127 else f"{byte:02x}")


def draw_loads(loads: dict[str, list[list[list[int]]]], path: Path) -> None:
    """A heat map for each variant and layer: experts above one another, time to the right, 1 for an equal share of the choices."""
    import torch
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    drawing = Figure(figsize=(9.0, 1.7 * len(loads)))
    grid = drawing.subplots(len(loads), MODEL["num_hidden_layers"], squeeze=False)
    for row, (name, of_variant) in zip(grid, loads.items(), strict=True):
        counts = torch.tensor(of_variant, dtype=torch.float64)  # [column, layer, expert]
        for layer, axes in enumerate(row):
            shares = counts[:, layer] / counts[:, layer].mean(dim=1, keepdim=True)
            picture = figures.draw_load(axes, shares.repeat_interleave(LOOK, dim=0).numpy())
            axes.set_title(f"{name}: layer {layer}", fontsize=9)
            axes.set_xlabel("training step" if row is grid[-1] else "")
    drawing.colorbar(picture, ax=grid, label="load, in shares of an equal one")
    drawing.savefig(path)


if __name__ == "__main__":
    launch(run, MixtureExperimentConfig, Path(__file__).with_name("experiments.yaml"))
