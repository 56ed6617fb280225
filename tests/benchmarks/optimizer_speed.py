"""One step of our optimizers beside PyTorch's and lion_pytorch's, on the tensors of a 12M-parameter LLaMA.

    python tests/benchmarks/optimizer_speed.py                 every comparison
    python tests/benchmarks/optimizer_speed.py --only muon     those whose name begins so
    python tests/benchmarks/optimizer_speed.py --device cuda

Gradients are random and stay the same; a round is one step. Both sides compute the same update (tests/parity/test_05_optimizers.py).
"""

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from side_by_side import Contender, Round, compare
from torch import nn

from shared.model.config import ModelConfig
from shared.model.roles import parameters_by_role
from shared.model.transformer import TransformerModel
from shared.optim.optimizer import GroupedOptimizer

MODEL = ModelConfig(
    vocab_size=4096, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1024,
    max_position_embeddings=256, tie_word_embeddings=True,
)  # fmt: skip
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
MUON = {"lr": 1e-4, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
COMPARISONS = {  # name: (ours, theirs)
    "adamw: our function / torch, plain loop": ("adamw", "torch adamw plain"),
    "adamw: our function / torch, foreach": ("adamw", "torch adamw foreach"),
    "adamw: fused / torch, fused": ("adamw fused", "torch adamw fused"),
    "adamw: our function / torch, fused": ("adamw", "torch adamw fused"),
    "lion: our function / lion_pytorch": ("lion", "lion_pytorch"),
    "muon: bfloat16 / torch, bfloat16": ("muon bfloat16", "torch muon"),
    "muon: float32 / torch, bfloat16": ("muon float32", "torch muon"),
}


def parameters_of(device: str, matrices_only: bool) -> list[nn.Parameter]:
    model = TransformerModel(MODEL, seed=0).to(device)
    held = list(parameters_by_role(model)["matrix"].values()) if matrices_only else list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    for parameter in held:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
    return held


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    match name.split():
        case ["adamw", *fused]:
            return GroupedOptimizer([{"params": parameters, "rule": "adamw", "fused": bool(fused), **ADAMW}])
        case ["lion"]:
            return GroupedOptimizer([{"params": parameters, "rule": "lion", **LION}])
        case ["muon", dtype]:
            return GroupedOptimizer([{"params": parameters, "rule": "muon", "scaling": "original", "steps": 5, "dtype": dtype, **MUON}])
        case ["torch", "adamw", kind]:
            how = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[kind]
            return torch.optim.AdamW(parameters, **ADAMW, **how)
        case ["torch", "muon"]:
            return torch.optim.Muon(parameters, **MUON)
    import lion_pytorch

    return lion_pytorch.Lion(parameters, **LION)


def prepare(name: str, device: str) -> Round:
    optimizer = optimizer_of(name, parameters_of(device, matrices_only="muon" in name))

    def one_round() -> dict[str, float]:
        began = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - began}

    return one_round


def main(contender: Callable[..., Contender] = Contender) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="comparisons whose name begins so")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    console = Console(width=150)
    table = Table(title=f"one step, {options.pairs} pairs, {options.device}, {torch.get_num_threads()} threads")
    for column in ("ours / theirs", "ours, ms", "theirs, ms", "ratio (95 %)"):
        table.add_column(column, justify="left" if column.startswith("ours /") else "right")
    for title, (ours, theirs) in COMPARISONS.items():
        if not title.startswith(options.only):
            continue
        sides = [contender(prepare, name=name, device=options.device) for name in (ours, theirs)]
        found = compare(*sides, pairs=options.pairs, warmup=2)
        [side.close() for side in sides]
        low, high = found.interval
        milliseconds = [f"{found.median(who) * 1e3:.1f}" for who in ("ours", "theirs")]
        table.add_row(title, *milliseconds, f"{found.ratio:.2f} ({low:.2f} to {high:.2f})")
        console.print(f"{title}: {found.ratio:.2f} ({low:.2f} to {high:.2f})", highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
