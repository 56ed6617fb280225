"""The mixture-of-experts layer beside transformers' Mixtral, and a training step with experts beside a dense one of equal active FLOPs.

    OMP_NUM_THREADS=1 python tests/benchmarks/mixture_speed.py --what layer      forward and backward, beside each way that transformers has
    OMP_NUM_THREADS=1 python tests/benchmarks/mixture_speed.py --what step       a whole step, beside a dense model
    OMP_NUM_THREADS=1 python tests/benchmarks/mixture_speed.py --what profile    where the layer's time goes, ours and theirs

The shape is that of `step_speed.py`: width 384, 8 sequences of 256 tokens, 8 experts of 512, of which a token takes 2, so as many active
weights as its dense layer of 1,024. Both layers have the same weights and inputs, in processes of one thread that keep freed memory;
the results of the first round are compared. CPU time is printed beside clock time, because other work on the machine hardly changes it.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from side_by_side import Comparison, Contender, Round, compare
from step_speed import BATCH, HIDDEN, PEERS, SEQ, TOKENS, batches, casting
from torch import Tensor

from shared.devices import keep_freed_memory
from shared.loop import accumulate_gradients, apply_update, keep_totals, train_step
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.context import AttentionContext
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.moe.layer import MixtureLayer

EXPERTS = MixtureConfig(8, 512, num_experts_per_tok=2)
DENSE = PEERS["llama"]
SPARSE = replace(MixtureModelConfig(**vars(DENSE)), experts=EXPERTS)
THEIRS = ("eager", "grouped_mm")  # batched_mm copies the matrices of every choice: 6.4 GB for gate and up at this shape
DTYPES = ("float32", "bfloat16")


def measured(work: Callable[[], Any]) -> Round:
    """Rounds of `work` in clock seconds and in CPU seconds; `check` is a number that both contenders must agree on."""

    def one_round() -> dict[str, float]:
        began, computed = time.perf_counter(), time.process_time()
        check = work()
        return {"cpu": time.process_time() - computed, "seconds": time.perf_counter() - began, "check": float(check)}

    return one_round


def inputs() -> tuple[Tensor, ...]:
    """x and the gradient of the output, [batch, seq, D]; then the router's, gate, up and down matrices."""
    generator = torch.Generator().manual_seed(0)
    E, D, width = EXPERTS.num_experts, HIDDEN, EXPERTS.moe_intermediate_size
    shapes = ((BATCH, SEQ, D), (BATCH, SEQ, D), (E, D), (E, width, D), (E, width, D), (E, D, width))
    x, upstream, *weights = (torch.randn(*shape, generator=generator) for shape in shapes)
    return x.requires_grad_(), upstream, *(0.02 * weight for weight in weights)


def forward_backward(layer: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, upstream: Tensor, dtype: str) -> Callable:
    def work() -> Tensor:
        for tensor in (x, *parameters):
            tensor.grad = None
        with casting("cpu", dtype):
            out = layer(x)
        out.backward(upstream.to(out.dtype))
        return x.grad.norm()

    return work


def our_layer(dtype: str, implementation: str = "grouped") -> Callable:
    keep_freed_memory()
    torch.set_num_threads(1)
    x, upstream, *weights = inputs()
    experts = replace(EXPERTS, implementation=implementation, balance_coefficient=0.0)  # theirs has no losses in the layer
    layer = MixtureLayer(replace(SPARSE, experts=experts).resolved(), MIXTURE, 0)
    with torch.no_grad():
        owners = (layer.router, layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj)
        for owner, weight in zip(owners, weights, strict=True):
            owner.weight.copy_(weight)
    context = AttentionContext({})
    return forward_backward(lambda x: layer(x, context), list(layer.parameters()), x, upstream, dtype)


def their_layer(dtype: str, implementation: str) -> Callable:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    keep_freed_memory()
    torch.set_num_threads(1)
    x, upstream, router, gate, up, down = inputs()
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=EXPERTS.moe_intermediate_size, num_local_experts=EXPERTS.num_experts,
        num_experts_per_tok=EXPERTS.num_experts_per_tok, experts_implementation=implementation,
    )  # fmt: skip
    layer = MixtralSparseMoeBlock(config).train()
    with torch.no_grad():
        layer.gate.weight.copy_(router)
        layer.experts.gate_up_proj.copy_(torch.cat([gate, up], dim=1))
        layer.experts.down_proj.copy_(down)
    return forward_backward(layer, list(layer.parameters()), x, upstream, dtype)


def prepare_layer(whose: str, **options: str) -> Round:
    return measured({"ours": our_layer, "theirs": their_layer}[whose](**options))


def prepare_step(kind: str, dtype: str) -> Round:
    """One training step: forward, backward, fused AdamW."""
    keep_freed_memory()
    torch.set_num_threads(1)
    model = TransformerModel(SPARSE, MIXTURE) if kind == "experts" else TransformerModel(DENSE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = batches("cpu")

    def objective(model, microbatch):
        with casting("cpu", dtype):
            return packed_next_token_objective(model, microbatch)

    def step() -> Tensor:
        return train_step(model, optimizer, [next(data)], objective, accumulate_gradients, keep_totals, apply_update).mean_loss

    return measured(step)


def contest(ours: Callable[[], Round], theirs: Callable[[], Round], pairs: int) -> tuple[Comparison, Comparison]:
    """By the clock and by CPU time."""
    contenders = Contender(ours), Contender(theirs)
    clock = compare(*contenders, pairs, warmup=2)
    for contender in contenders:
        contender.close()
    by_cpu = lambda rounds: [figures | {"seconds": figures["cpu"]} for figures in rounds]  # noqa: E731
    return clock, Comparison(by_cpu(clock.ours), by_cpu(clock.theirs))


def ratio(comparison: Comparison) -> str:
    low, high = comparison.interval
    return f"{comparison.ratio:.2f} ({low:.2f} to {high:.2f})"


def layer_rows(table: Table, dtypes: list[str], pairs: int) -> None:
    for dtype in dtypes:
        for implementation in THEIRS:
            prepare = partial(prepare_layer, dtype=dtype)
            clock, cpu = contest(partial(prepare, "ours"), partial(prepare, "theirs", implementation=implementation), pairs)
            ours, theirs = clock.ours[0]["check"], clock.theirs[0]["check"]
            if abs(ours - theirs) > (2e-2 if dtype == "bfloat16" else 1e-5) * theirs:
                raise RuntimeError(f"The gradients of x have norms {ours} and {theirs}: the two do not compute the same thing.")
            figures = (f"{cpu.median(who) * 1e3:.0f}" for who in ("ours", "theirs"))
            table.add_row(dtype, implementation, *figures, ratio(cpu), ratio(clock))


def step_rows(table: Table, dtypes: list[str], pairs: int) -> None:
    for dtype in dtypes:
        clock, cpu = contest(partial(prepare_step, "experts", dtype), partial(prepare_step, "dense", dtype), pairs)
        figures = (f"{TOKENS / cpu.median(who):,.0f}" for who in ("ours", "theirs"))
        table.add_row(dtype, *figures, ratio(cpu), ratio(clock))


def print_profiles(dtypes: list[str]) -> None:
    for dtype in dtypes:
        for name, work in (("ours", our_layer(dtype)), ("transformers, grouped_mm", their_layer(dtype, "grouped_mm"))):
            for _ in range(3):
                work()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                for _ in range(5):
                    work()
            shown = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=40)
            print(name, dtype, shown, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=("layer", "step", "profile"), default="layer")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--pairs", type=int, default=21)
    arguments = parser.parse_args()
    if arguments.what == "profile":
        return print_profiles(arguments.dtypes)
    columns = {
        "layer": ("dtype", "theirs", "ours, CPU ms", "theirs, CPU ms", "ratio of CPU time (95 %)", "ratio by the clock (95 %)"),
        "step": ("dtype", "experts, tokens/CPU s", "dense, tokens/CPU s", "ratio of CPU time (95 %)", "ratio by the clock (95 %)"),
    }[arguments.what]
    table = Table(*columns, title=f"{arguments.what}, {arguments.pairs} pairs, one thread, torch {torch.__version__}")
    {"layer": layer_rows, "step": step_rows}[arguments.what](table, arguments.dtypes, arguments.pairs)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
