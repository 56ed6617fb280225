"""Quantization compared on a small LLaMA that is trained on the embedded corpus, from several seeds: a table and what it allows to be said.

    python chapters/10_finetuning/quantization_table.py --experiment quality    every method at groups of 32, 64 and 128
    python chapters/10_finetuning/quantization_table.py --experiment outliers   the same models with a few large input channels

A model of each seed is trained once and kept. Interrupt the command and start it again: it continues. With --steps 20 --seeds 1 and
--windows 16 it ends within minutes and shows nothing but that it runs. The tables are also written as quality.md and outliers.md.
"""

import copy
import math
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from chapters.experiment_run import ExperimentConfig, compare, prepare
from shared.course.launch import launch

LOSS = "held-out bits per byte"
MODEL = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 384,
    "max_position_embeddings": 128, "initializer_range": 0.08,
}  # fmt: skip
LARGE, TIMES = 4, 30.0  # channels of each norm that `outliers` makes larger, and by how much


def methods(bits: int, group: int) -> dict[str, dict[str, Any]]:
    common = {"bits": bits, "group": group, "symmetric": False}
    name = f"INT{bits} by {group}"
    return {
        f"{name}, to nearest": common | {"method": "nearest"},
        f"{name}, AWQ": common | {"method": "awq"},
        f"{name}, GPTQ": common | {"method": "gptq"},
        f"{name}, GPTQ, act order": common | {"method": "gptq", "act_order": True},
    }


QUALITY = {
    "float32": {"method": "none"},
    "bfloat16": {"method": "bfloat16"},
    "INT8 by row": {"method": "nearest", "bits": 8, "group": None, "symmetric": True},
    "INT8 by row, activations too": {"method": "nearest", "bits": 8, "group": None, "symmetric": True, "dynamic": True},
    "NF4 by 64": {"method": "nf4"},
    **methods(4, 32),
    **methods(4, 64),
    **methods(4, 128),
    **methods(3, 128),
}
OUTLIERS = {"float32": {"method": "none"}} | methods(4, 128)
OUTLIERS["INT4 by 128, AWQ without clipping"] = OUTLIERS["INT4 by 128, AWQ"] | {"clip": False}
EXPERIMENTS = {"quality": QUALITY, "outliers": OUTLIERS}


@dataclass
class QuantizationTableConfig(ExperimentConfig):
    """Compare ways to quantize a small model, each with several seeds.

    Args:
        seq: bytes that each window of text predicts; at most 128.
        calibration: windows of the training text that layers are calibrated with.
    """

    experiment: Literal["quality", "outliers"]
    steps: int = 600
    seq: int = 128
    batch_size: int = 16
    windows: int = 128
    calibration: int = 32
    output: Path = Path("runs/10_quantization")


def run(config: QuantizationTableConfig) -> None:
    # The core is imported here, after `launch` has chosen whose exercises it runs with.
    from chapters import trials

    texts, device, console = prepare(config, MODEL["max_position_embeddings"], least_steps=4)  # for warm-up and decay
    common = config.settings("steps", "seq", "batch_size", "learning_rate", "windows", "calibration") | {"experiment": config.experiment}
    variants = {name: variant | common for name, variant in EXPERIMENTS[config.experiment].items()}
    references = lru_cache(maxsize=1)(lambda seed: reference_of(config, seed, texts, device))
    results = compare(config, variants, lambda settings, seed: trial(config, settings, seed, texts, references(seed)), console)
    lines = table_of(results)
    (config.output / f"{config.experiment}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    trials.plot_results(results, "loss added, bits per byte", config.output / f"{config.experiment}.png")
    for name, verdict in verdicts(results).items():
        console.print(f"{name}: {verdict}", highlight=False)
    console.print(f"Plot and table: {config.output / config.experiment}.png, .md", highlight=False)


def table_of(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A Markdown table: the mean and the range over the seeds of what varies."""
    from chapters.trials import Spread

    columns = list(next(iter(results.values()))[0])
    lines = ["| weights | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    digits = {"size, MB": ".2f", "tokens per second": ",.0f", LOSS: ".4f", "perplexity of a byte": ".3f", "seconds": ".1f"}
    for name, seeds in results.items():
        cells = []
        for column in columns:
            if seeds[0][column] is None:
                cells.append("-")
                continue
            spread, form = Spread.of([each[column] for each in seeds]), digits.get(column, ".5f")
            ranged = column in ("loss added, bits per byte", "KL to float32, nats")
            cells.append(f"{spread.mean:{form}}" + (f" ({spread.low:{form}} to {spread.high:{form}})" if ranged else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def verdicts(results: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Each method beside rounding to nearest with the same bits and groups: the added loss as a share of rounding's, seed by seed."""
    said = {}
    for name, seeds in results.items():
        nearest = (other for other in results if other.endswith("to nearest"))
        plain = next((other for other in nearest if name.startswith(other.removesuffix("to nearest"))), name)
        if plain != name:
            for figure in ("loss added, bits per byte", "KL to float32, nats"):
                pairs = zip(seeds, results[plain], strict=True)
                shares = [our[figure] / their[figure] for our, their in pairs]
                said[f"{name}, {figure}, of rounding's"] = ", ".join(f"{share:.0%}" for share in shares)
    return said


def reference_of(config: QuantizationTableConfig, seed: int, texts: Any, device: Any) -> tuple[Any, float]:
    """A seed's model, and its held-out bits per byte."""
    model = trained_model(config, seed, texts, device).eval()
    if config.experiment == "outliers":
        enlarge_channels(model, seed)
    return model, held_out_bits(model, texts, config)


def held_out_bits(model: Any, texts: Any, config: QuantizationTableConfig) -> float:
    from chapters.text_run import evaluate_text
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.totals import bits_per_byte

    totals, count = evaluate_text(model, texts.held_out, config.seq, packed_next_token_objective, config.windows)
    return bits_per_byte(totals.loss_sum, count)


def trial(
    config: QuantizationTableConfig, settings: dict[str, Any], seed: int, texts: Any, reference_and_bits: tuple[Any, float]
) -> dict[str, float | None]:
    """Quantize one seed's model in one way, and measure it."""
    import torch

    from shared.batches import sequential_batches
    from shared.finetune.quantization.methods import quantize_model
    from shared.finetune.quantization.nf4_linear import quantize_base
    from shared.finetune.quantization.packed import dynamic_kernel, fused_kernel, use_kernels

    reference, plain = reference_and_bits
    model, began, errors = copy.deepcopy(reference), time.perf_counter(), []
    if settings["method"] == "bfloat16":
        model.to(torch.bfloat16)
    elif settings["method"] == "nf4":
        quantize_base(model, double=True)
    elif settings["method"] != "none":
        text = calibration_text(texts.training, config.seq, config.calibration, seed)
        errors = [report.error for report in quantize_model(model, text, method_of(settings))]
    seconds = time.perf_counter() - began
    if settings.get("dynamic"):
        use_kernels(model, dynamic_kernel)
    loss = held_out_bits(model, texts, config)
    batches = list(sequential_batches(texts.held_out, 16, config.seq, 32))
    divergence = kl_of(reference, model, batches)
    if not settings.get("dynamic") and settings["method"] in ("nearest", "gptq", "awq"):
        use_kernels(model, fused_kernel)
    return {
        LOSS: loss if math.isfinite(loss) else math.inf,
        "perplexity of a byte": 2**loss,
        "loss added, bits per byte": loss - plain,
        "KL to float32, nats": divergence,
        "error of a layer": sum(errors) / len(errors) if errors else None,
        "size, MB": sum(parameter.nbytes for parameter in model.parameters()) / 1e6,
        "tokens per second": speed_of(model, batches[0]["input_ids"]),
        "seconds": seconds,
    }


def method_of(settings: dict[str, Any]) -> Any:
    from shared.finetune.quantization.awq import AWQ
    from shared.finetune.quantization.gptq import GPTQ
    from shared.finetune.quantization.rounding import Rounding

    rounding = Rounding(settings["bits"], settings["group"], settings["symmetric"])
    if settings["method"] == "gptq":
        return GPTQ(rounding, act_order=settings.get("act_order", False))
    return AWQ(rounding, clip=settings.get("clip", True)) if settings["method"] == "awq" else rounding


def trained_model(config: QuantizationTableConfig, seed: int, texts: Any, device: Any) -> Any:
    """The seed's model: trained now, or kept by an earlier trial with the same settings."""
    import torch
    from safetensors.torch import load_model, save_model

    from shared.batches import random_batches
    from shared.loop import train
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.model.config import ModelConfig
    from shared.model.transformer import TransformerModel
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig, ScheduleConfig
    from shared.optim.schedules import attach_schedule
    from shared.optim.updater import Update

    model = TransformerModel(ModelConfig(**MODEL), seed=seed).to(device)
    kept = config.output / f"model-{seed}-{config.steps}-{config.batch_size}-{config.seq}-{config.learning_rate}.safetensors"
    if kept.exists():
        load_model(model, kept)
        return model
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=config.learning_rate))
    attach_schedule(ScheduleConfig("cosine", config.steps, round(0.07 * config.steps)), optimizer)
    batches = random_batches(texts.training, config.batch_size, config.seq, torch.Generator().manual_seed(seed))
    data, updater = ([batch] for batch in batches), Update(max_norm=1.0)
    for _ in train(model, optimizer, data, packed_next_token_objective, steps=config.steps, updater=updater):
        pass
    save_model(model, kept)
    return model


def calibration_text(stream: Any, seq: int, windows: int, seed: int) -> list[dict[str, Any]]:
    import torch

    from shared.batches import batch_at

    starts = torch.randint(len(stream) - seq, (windows,), generator=torch.Generator().manual_seed(1000 + seed))
    return [batch_at(stream, chunk, seq) for chunk in starts.split(16)]


def enlarge_channels(model: Any, seed: int) -> None:
    """Make a few input channels of each layer behind a norm larger, and the weights that they meet smaller by as much: the model computes
    what it did, with inputs as large models have them (Dettmers et al. 2022, section 4)."""
    import torch

    from shared.finetune.quantization.awq import fold_scales
    from shared.finetune.quantization.calibration import shared_inputs

    generator = torch.Generator().manual_seed(seed)
    for name, block in model.stack.blocks.items():
        for group in shared_inputs(block, name):
            if group.before is not None and group.before.endswith("norm"):
                scales = torch.ones(block.get_submodule(group.layers[0]).in_features)
                scales[torch.randperm(len(scales), generator=generator)[:LARGE]] = 1 / TIMES
                fold_scales(block, group, scales)


def kl_of(reference: Any, model: Any, batches: list[dict[str, Any]]) -> float:
    """The mean Kullback-Leibler divergence of a model's next-token distributions from the reference's, in nats."""
    import torch

    total = count = 0
    with torch.no_grad():
        for batch in batches:
            wanted, found = (each(batch["input_ids"]).double().log_softmax(dim=-1) for each in (reference, model))
            total += (wanted.exp() * (wanted - found)).sum().item()
            count += batch["input_ids"].numel()
    return total / count


def speed_of(model: Any, ids: Any, rounds: int = 5) -> float:
    """Tokens per second of a forward pass, by the fastest round."""
    import torch

    times = []
    with torch.no_grad():
        for _ in range(rounds):
            began = time.perf_counter()
            model(ids)
            times.append(time.perf_counter() - began)
    return ids.numel() / min(times)


if __name__ == "__main__":
    launch(run, QuantizationTableConfig, Path(__file__).with_name("quantization_table.yaml"))
