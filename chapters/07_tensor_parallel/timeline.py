"""Tensor parallelism compared with data parallelism on two cards, simulated: where TP2 loses to DP2, and from which width on it wins.

python chapters/07_tensor_parallel/timeline.py                 NVLink and PCIe without peer access
python chapters/07_tensor_parallel/timeline.py --pcie 10       with another rate of the second, in GB/s

A dry run of each layout records what a card computes and communicates in a step (chapter 06's `simulation.py`), on tensors that have shapes
and no numbers, so that a model of any width takes a second. The replay times it: products at 40 % of a card's peak, in bfloat16, and
operations by the ring's formula over a link.

Left out on purpose: that narrow products reach less of the peak, which hurts tensor parallelism; the optimizer's step, which takes it half
as long; and sums that slow down what is computed at the time, which hurts data parallelism.
"""

import argparse
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from shared.engine.metrics.flops import PEAKS  # noqa: E402
from shared.loop import accumulate_gradients  # noqa: E402
from shared.model.chunked_loss import chunked_loss  # noqa: E402
from shared.model.config import ModelConfig  # noqa: E402
from shared.model.counting import parameter_counts  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.optim.config import OptimizerConfig  # noqa: E402
from shared.optim.precision import autocast_objective  # noqa: E402
from shared.parallel.config import parse_layout  # noqa: E402
from shared.parallel.data.ddp import DataParallel  # noqa: E402
from shared.parallel.data.fsdp import FullySharded  # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.planning.costs import Link  # noqa: E402
from shared.parallel.planning.memory import StepSizes, estimate_memory  # noqa: E402
from shared.parallel.tensor.axis import TensorParallel  # noqa: E402

simulation = import_module("chapters.06_data_parallel.simulation")

SPEED = 0.4 * PEAKS["NVIDIA GeForce RTX 3090"].half  # FLOP/s that a card is taken to reach
# GB/s in each direction over a 3090's four links: NVIDIA, "Ampere GA102 GPU Architecture", section "Third-generation NVLink"
NVLINK = 56.25
PCIE = 6.0  # GB/s, an assumption: eight lanes for each card, and every byte through the host's memory. Measure yours with nccl-tests
LATENCY = 1e-5  # seconds for a message
MEMORY = 24e9 - 1.5e9  # bytes of a card, less what CUDA and its libraries take
LAYERS, SEQ, VOCABULARY = 12, 1024, 50304
LAYOUTS = ("dp2", "fsdp2", "tp2")
ADAMW = OptimizerConfig("adamw", lr=1e-3)


def config_of(width: int, attention: str = "sdpa") -> ModelConfig:
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_attention_heads": width // 64}
    return ModelConfig(hidden_size=width, tie_word_embeddings=True, attention=attention, **sizes)


class OperationCounter(TorchDispatchMode):
    """Adds up the floating-point operations of matrix products."""

    flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        out = function(*arguments, **(options or {}))
        count = flop_registry.get(function._overloadpacket)
        self.flops += count(*arguments, **(options or {}), out_val=out) if count else 0
        return out


@cache
def program(layout: str, width: int, rows: int) -> list:
    """What rank 0 of two does in a step of one micro-batch, of `rows` on each card. Under tensor parallelism both cards have all of
    them."""
    counter = OperationCounter()
    world = simulation.dry_run(2, clock=lambda: counter.flops / SPEED)
    mesh = Mesh(parse_layout(layout), world)
    with torch.device("meta"):
        model = TransformerModel(config_of(width, attention="eager"))  # the kernel's operations are not counted on a CPU
    objective = from_ids
    if layout == "tp2":
        TensorParallel().shape(model, mesh)
        objective, model.embedding = partial(from_looked_up, model.embedding.tokens.combine), None
    with FakeTensorMode(), counter:
        make_fake(model)
        runner, finish = exchange_of(layout, model, mesh)
        world.take_actions()
        ids = torch.zeros(rows * (2 if layout == "tp2" else 1), SEQ, dtype=torch.int64)
        runner(accumulate_gradients)(model, [{"ids": ids, "targets": ids}], autocast_objective(objective, "bfloat16"))
        finish()
        return world.take_actions()


def exchange_of(layout: str, model: TransformerModel, mesh: Mesh) -> tuple[Callable, Callable]:
    """The data engine's runner, and what completes its exchange."""
    if layout == "tp2":
        return lambda runner: runner, lambda: None
    engine = DataParallel(model, mesh.world) if layout == "dp2" else FullySharded(model, mesh, torch.bfloat16)
    return engine.runner, engine.finish


def make_fake(model: nn.Module) -> None:
    """Parameters with a shape and no numbers, tied ones still one."""
    made = {parameter: nn.Parameter(torch.empty(parameter.shape)) for parameter in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, made[parameter])


def from_ids(model: nn.Module, batch: dict) -> Any:
    return model(batch["ids"], head_fn=lambda head, x: chunked_loss(head, x, batch["targets"]))


def from_looked_up(combine: Callable, model: nn.Module, batch: dict) -> Any:
    """With rows that have been looked up: a vocabulary-parallel embedding reads its ids, which have no numbers here."""
    rows = torch.zeros(*batch["ids"].shape, model.config.hidden_size, requires_grad=True)
    return model(combine(rows), head_fn=lambda head, x: chunked_loss(head, x, batch["targets"]))


def simulated(layout: str, width: int, rows: int, link: Link) -> Any:
    return simulation.replay([program(layout, width, rows)] * 2, link)


def turning_width(link: Link, rows: int, step: int = 128, most: int = 8192) -> int | None:
    """The least width, in steps, from which on TP2's step is no longer than DP2's; None where that is more than `most`."""
    slower = lambda width: simulated("tp2", width, rows, link).seconds > simulated("dp2", width, rows, link).seconds  # noqa: E731
    if slower(most):
        return None
    low, high = 0, most // step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if slower(middle * step) else (low, middle)
    return high * step


def gigabytes(layout: str, width: int) -> float:
    chosen = parse_layout(layout)
    return estimate_memory(config_of(width), chosen, ADAMW, StepSizes(chosen.tensor_parallel, SEQ, 4, "bfloat16")).total / 1e9


# The tables.

MEMORY_LAYOUTS = (*LAYOUTS, "tp2_sp")
WIDTHS, ROWS = (512, 1024, 2048, 4096), (1, 2, 4, 16)  # rows on each card


def step_table(link: Link) -> list[str]:
    lines = ["| width | tokens a step | computing, ms | dp2, ms | fsdp2, ms | tp2, ms | tp2 / dp2 |", "|---|---|---|---|---|---|---|"]
    for width in WIDTHS:
        for rows in ROWS:
            steps = {layout: simulated(layout, width, rows, link) for layout in LAYOUTS}
            seconds, computing = {layout: step.seconds for layout, step in steps.items()}, steps["dp2"].total("compute")
            ratio = seconds["tp2"] / seconds["dp2"]
            cells = [f"{computing * 1e3:,.0f}", *(f"{each * 1e3:,.0f}" for each in seconds.values()), f"{ratio:.2f}"]
            lines.append(f"| {width:,} | {2 * rows * SEQ:,} | {' | '.join(cells)} |")
    return lines


def turning_table(links: dict[str, Link]) -> list[str]:
    lines = ["| tokens a step | " + " | ".join(links) + " |", "|---|" + "---|" * len(links)]
    for rows in ROWS:
        turns = [turning_width(link, rows) for link in links.values()]
        lines.append(f"| {2 * rows * SEQ:,} | " + " | ".join(f"{turn:,}" if turn else "above 8,192" for turn in turns) + " |")
    return lines


def memory_table() -> list[str]:
    lines = ["| width | parameters, millions | dp2, GB | fsdp2, GB | tp2, GB | tp2 and sequence, GB |", "|---|---|---|---|---|---|"]
    for width in WIDTHS:
        held = [gigabytes(layout, width) for layout in MEMORY_LAYOUTS]
        cells = [f"{each:.1f}" for each in held]
        lines.append(f"| {width:,} | {sum(parameter_counts(config_of(width)).values()) / 1e6:,.0f} | {' | '.join(cells)} |")
    widest = [max(width for width in range(128, 8192, 128) if gigabytes(layout, width) < MEMORY / 1e9) for layout in MEMORY_LAYOUTS]
    return [*lines, f"| the widest that fits | | {' | '.join(f'{width:,}' for width in widest)} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pcie", type=float, default=PCIE, help="GB/s in each direction between two cards without peer access")
    links = {"NVLink": Link(LATENCY, NVLINK * 1e9), "PCIe without peer access": Link(LATENCY, parser.parse_args().pcie * 1e9)}
    for name, link in links.items():
        print(f"{name}, {link.bandwidth / 1e9:g} GB/s:\n", *step_table(link), "", sep="\n")
    print("From this width on, TP2's step is no longer than DP2's:\n", *turning_table(links), "", sep="\n")
    print("Memory of a card with one row of its own, by formula:\n", *memory_table(), sep="\n")


if __name__ == "__main__":
    main()
