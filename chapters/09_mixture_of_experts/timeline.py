"""Expert parallelism's all-to-all beside what is computed meanwhile, simulated: what shared experts hide of the rows' way back.

python chapters/09_mixture_of_experts/timeline.py                      NVLink and PCIe without peer access
python chapters/09_mixture_of_experts/timeline.py --figure step.png    the timelines, too

A dry run of one block on rank 0 of four records what it computes and exchanges, forward and backward (chapter 06's `simulation.py`); card
and links are chapter 07's. Numbers travel in bfloat16. The same actions are replayed twice: as they are, and with every operation waited
for at once, as it would be without overlap.

Left out on purpose: the exchange of gradients, which chapter 06 overlaps; unequal loads; and that four cards share PCIe.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

from shared.course import figures  # noqa: E402
from shared.model.chunked_loss import packed_next_token_objective  # noqa: E402
from shared.model.transformer import TransformerModel  # noqa: E402
from shared.moe.builders import MIXTURE  # noqa: E402
from shared.moe.config import MixtureConfig, MixtureModelConfig  # noqa: E402
from shared.moe.parallel.axis import ExpertParallel  # noqa: E402
from shared.parallel.config import parse_layout  # noqa: E402
from shared.parallel.mesh import Mesh  # noqa: E402
from shared.parallel.planning.costs import Link  # noqa: E402

simulation = import_module("chapters.06_data_parallel.simulation")
two_cards = import_module("chapters.07_tensor_parallel.timeline")

LINKS = {
    "NVLink": Link(two_cards.LATENCY, two_cards.NVLINK * 1e9),
    "PCIe without peer access": Link(two_cards.LATENCY, two_cards.PCIE * 1e9),
}
LAYOUT, ROWS, SEQ, EXPERTS, WIDTH = "dp4_ep4", 2, 256, 8, 1408
# Rows take as long as products do at any hidden size, so a small one will do.
SIZES = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": SEQ}


@cache
def program(shared_experts: int, k: int = 2) -> list:
    """What rank 0 of four does in the forward and the backward pass of a block with so many shared experts."""
    experts = MixtureConfig(EXPERTS, WIDTH, k, num_shared_experts=shared_experts, balance_coefficient=0.0, implementation="loop")
    counter = two_cards.OperationCounter()
    world = simulation.dry_run(4, clock=lambda: counter.flops / two_cards.SPEED)
    model = TransformerModel(MixtureModelConfig(**SIZES, experts=experts), MIXTURE)
    ExpertParallel().shape(model, Mesh(parse_layout(LAYOUT), world))
    ids = torch.randint(SIZES["vocab_size"], (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    world.take_actions()
    with counter:
        world.trace.phase = "forward"
        with torch.autocast("cpu", torch.bfloat16):
            loss = packed_next_token_objective(model, {"input_ids": ids, "targets": ids}).loss_sum
        world.trace.phase = "backward"
        loss.backward()
    return world.take_actions()


def waited_for_at_once(actions: Sequence[Any]) -> list:
    """The same actions without overlap."""
    begun, found = 0, []
    for action in actions:
        if not isinstance(action, simulation.Wait):
            found.append(action)
        if isinstance(action, simulation.Begin):
            found.append(simulation.Wait(begun))
            begun += 1
    return found


def timelines(shared_experts: int, link: Link) -> dict[str, Any]:
    actions = program(shared_experts)
    found = {"waited for at once": waited_for_at_once(actions), "beside shared experts": actions}
    return {name: simulation.replay([each] * 4, link) for name, each in found.items()}


def table() -> list[str]:
    lines = ["| link | shared experts | computing, ms | exposed, ms | beside shared experts, ms | step shorter by |", "|---" * 6 + "|"]
    for name, link in LINKS.items():
        for shared in (0, 1, 2):
            before, after = timelines(shared, link).values()
            seconds = before.total("compute"), before.total("idle"), after.total("idle")
            cells = " | ".join(f"{each * 1e3:.2f}" for each in seconds)
            lines.append(f"| {name} | {shared} | {cells} | {1 - after.seconds / before.seconds:.0%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where to draw the step with one shared expert over PCIe")
    asked = parser.parse_args()
    print(*table(), sep="\n")
    if asked.figure:
        figures.use_style()
        simulation.draw(timelines(1, LINKS["PCIe without peer access"])).savefig(asked.figure)


if __name__ == "__main__":
    main()
