"""Five comparisons on the embedded corpus, one command each: a table, a plot, and what the spread over seeds allows to be said.

    python chapters/02_transformer/experiments.py --experiment positions
    python chapters/02_transformer/experiments.py --experiment activations
    python chapters/02_transformer/experiments.py --experiment norms
    python chapters/02_transformer/experiments.py --experiment attention
    python chapters/02_transformer/experiments.py --experiment scale

Interrupt one and start it again: it continues. With --steps 20 each ends within a minute and shows nothing but that it runs.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chapters.experiment_run import ExperimentConfig, compare, prepare
from shared.course.launch import launch

LOSS = "held-out bits per byte"
TWICE = "at twice the length"
CACHE = "cache bytes per token"
Changes = dict[str, Any]  # fields of ModelConfig, and `learning_rate` where a variant has its own

GELU = {"hidden_act": "gelu", "gated": False}
LAYER_NORM = {"norm": "layer_norm"}
POST = {"norm_position": "post"}
EXPERIMENTS: dict[str, dict[str, Changes]] = {
    "positions": {
        "none": {"position": "none"},
        "learned": {"position": "learned"},
        "rope": {},
        "alibi": {"position": "alibi"},
        "relative": {"position": "relative"},
    },
    "activations": {
        "relu": {"hidden_act": "relu", "gated": False, "intermediate_size": 384},
        "gelu": GELU | {"intermediate_size": 384},
        "silu": {"hidden_act": "silu", "gated": False, "intermediate_size": 384},
        "SwiGLU": {"hidden_act": "silu", "gated": True, "intermediate_size": 256},
        "GeGLU": {"hidden_act": "gelu", "gated": True, "intermediate_size": 256},
    },
    "norms": {
        "pre, RMSNorm": {},
        "pre, LayerNorm": LAYER_NORM,
        "post, RMSNorm": POST,
        "post, LayerNorm": POST | LAYER_NORM,
        "pre, RMSNorm, 5 x the rate": {"learning_rate": 0.01},
        "post, RMSNorm, 5 x the rate": POST | {"learning_rate": 0.01},
    },
    "attention": {
        "8 key-value heads (MHA)": {"num_key_value_heads": 8},
        "2 key-value heads (GQA)": {"num_key_value_heads": 2},
        "1 key-value head (MQA)": {"num_key_value_heads": 1},
        "window of 16": {"num_key_value_heads": 8, "sliding_window": 16},
        "QK-norm": {"num_key_value_heads": 8, "qk_norm": True},
    },
    "scale": {
        **{f"{layers} layers": {"num_hidden_layers": layers} for layers in (1, 2, 4, 8)},
        **{f"width {width}": {"hidden_size": width, "intermediate_size": None} for width in (32, 64, 128, 192)},
        **{f"{heads} heads": {"num_attention_heads": heads, "num_key_value_heads": heads} for heads in (1, 2, 4, 12)},
    },
}
BASE: Changes = {
    "vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 256, "max_position_embeddings": 128, "initializer_range": 0.08,
}  # fmt: skip


@dataclass
class ModelExperimentConfig(ExperimentConfig):
    """Compare variants of a small transformer, each trained from several seeds.

    Args:
        seq: bytes that each window of text predicts; at most 128.
        learning_rate: of AdamW, constant.
    """

    experiment: Literal["positions", "activations", "norms", "attention", "scale"]
    steps: int = 400
    seq: int = 128
    learning_rate: float = 0.002
    windows: int = 256
    output: Path = Path("runs/02_experiments")


def settings_of(config: ModelExperimentConfig, changes: Changes) -> dict[str, Any]:
    """Everything that a trial's figures depend on, but the seed and the text."""
    model = {name: value for name, value in (BASE | changes).items() if name != "learning_rate"}
    rate = changes.get("learning_rate", config.learning_rate)
    return {"model": model, "learning_rate": rate, **config.settings("steps", "seq", "batch_size", "windows", "experiment")}


def run(config: ModelExperimentConfig) -> None:
    # The core is imported here, after `launch` has chosen whose exercises it runs with.
    from chapters import trials

    texts, device, console = prepare(config, BASE["max_position_embeddings"], window=2 * config.seq)
    variants = {name: settings_of(config, changes) for name, changes in EXPERIMENTS[config.experiment].items()}
    results = compare(config, variants, lambda settings, seed: trial(settings, seed, texts, device), console)
    console.print(trials.verdict(results, LOSS), highlight=False)
    if config.experiment == "positions":
        console.print(trials.verdict(results, TWICE), highlight=False)
    plot = config.output / f"{config.experiment}.png"
    if config.experiment == "scale":
        groups = {kind: [name for name in results if kind in name] for kind in ("layers", "width", "heads")}
        trials.plot_against(results, groups, "parameters", LOSS, plot)
    else:
        trials.plot_results(results, LOSS, plot)
    console.print(f"Plot: {plot}   the figures of every run: {plot.with_suffix('.json')}", highlight=False)


def trial(settings: dict[str, Any], seed: int, texts: Any, device: Any) -> dict[str, float | None]:
    """Train one model from one seed and measure it on held-out text."""
    import torch

    from shared.batches import random_batches
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.loop import train
    from shared.model.config import ModelConfig
    from shared.model.transformer import TransformerModel

    model = TransformerModel(ModelConfig(**settings["model"]), seed=seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    order = torch.Generator().manual_seed(seed)
    batches = random_batches(texts.training, settings["batch_size"], settings["seq"], order)
    began = time.perf_counter()
    for _ in train(model, optimizer, ([batch] for batch in batches), packed_next_token_objective, steps=settings["steps"]):
        pass
    seconds = time.perf_counter() - began
    measured = {LOSS: held_out_bits(model, texts, settings["seq"], settings["windows"])}
    if settings["experiment"] == "positions":
        measured[TWICE] = None
        if model.config.position != "learned":  # which has no embedding for what lies behind its end
            measured[TWICE] = held_out_bits(model, texts, 2 * settings["seq"], settings["windows"] // 2)
    if settings["experiment"] == "attention":
        measured[CACHE] = cache_bytes(model.config)
    return measured | {"parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds}


def held_out_bits(model: Any, texts: Any, seq: int, windows: int) -> float:
    from chapters.text_run import bits, evaluate_text
    from shared.model.chunked_loss import packed_next_token_objective

    found, _ = bits(*evaluate_text(model, texts.held_out, seq, packed_next_token_objective, max(windows, 1)))
    return found if math.isfinite(found) else math.inf


def cache_bytes(config: Any) -> int:
    """Keys and values of one more token in all layers, in 16-bit numbers, as generation keeps them. A window keeps only its own."""
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


if __name__ == "__main__":
    launch(run, ModelExperimentConfig, Path(__file__).with_name("experiments.yaml"))
