"""A pipeline of two cards compared with replicas and tensor parallelism, simulated: over NVLink, and over PCIe without peer access.

python chapters/08_pipeline_parallel/timeline.py
python chapters/08_pipeline_parallel/timeline.py --pcie 10       with another rate of the second, in GB/s

Models, card and links come from chapter 07's `timeline.py`, whose replays time DP2 and TP2. The pipeline's step is the
simulation of its schedule: a stage computes its blocks and the last one the head, at the same speed, and a message takes its bytes over the
link. Replicas exchange gradients in their last micro-batch; tensor-parallel ranks exchange activations in each.

Left out on purpose: the optimizer's step, and that kernels of a smaller micro-batch reach less of a card's peak.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from shared.engine.metrics.flops import flops_per_token  # noqa: E402
from shared.parallel.config import ParallelConfig  # noqa: E402
from shared.parallel.pipeline.axis import stage_blocks  # noqa: E402
from shared.parallel.pipeline.schedules import make_schedule  # noqa: E402
from shared.parallel.pipeline.simulate import Times, make_timeline # noqa: E402
from shared.parallel.planning.costs import Link, total_cost  # noqa: E402
from shared.parallel.planning.memory import StepSizes  # noqa: E402
from shared.parallel.planning.pipeline_costs import hidden_bytes, pipeline_exchanges # noqa: E402

two_cards = import_module("chapters.07_tensor_parallel.timeline")

WIDTHS, MICROBATCHES, ROWS = (768, 2048, 4096), (4, 16, 64), 4  # rows in a micro-batch
SCHEDULES = ("1f1b", "zero_bubble")
PP2 = ParallelConfig(pipeline_parallel=2)


def stage_seconds(width: int, rows: int) -> tuple[float, float]:
    """What a card computes of a micro-batch, forward and backward: in a block, and in the head."""
    config = two_cards.config_of(width)
    whole = flops_per_token(config, two_cards.SEQ)
    head = 6 * config.vocab_size * config.hidden_size
    per_flop = rows * two_cards.SEQ / two_cards.SPEED
    return (whole - head) / two_cards.LAYERS * per_flop, head * per_flop


def pipeline_seconds(width: int, rows: int, microbatches: int, schedule: str, blocks: Sequence[int], link: Link) -> float:
    """A step of two stages with so many blocks each."""
    block, head = stage_seconds(width, rows)
    factors = (blocks[0] * block, blocks[1] * block + head)
    config, step = two_cards.config_of(width), StepSizes(rows, two_cards.SEQ, microbatches, "bfloat16")
    transfer = link.latency + hidden_bytes(config, PP2, step) / link.bandwidth
    times = Times(1 / 3, 1 / 3, 1 / 3, transfer, factors)
    once = [each for each in pipeline_exchanges(config, PP2, step) if each.part != "hidden states"]
    return make_timeline(make_schedule(schedule, 2, microbatches), microbatches, 1, times).seconds + total_cost(once).seconds(link)


def splits(width: int) -> dict[str, tuple[int, int]]:
    """As many blocks on each card, and as the trainer balances them by default."""
    half = two_cards.LAYERS // 2
    return {"even": (half, half), "balanced": tuple(map(len, stage_blocks(two_cards.config_of(width), PP2)))}


def others(width: int, rows: int, microbatches: int, link: Link) -> dict[str, float]:
    """DP2, whose cards have half of the micro-batches each, and TP2, whose cards have each of them together."""
    last, tensor = two_cards.simulated("dp2", width, rows, link), two_cards.simulated("tp2", width, rows // 2, link)
    return {"dp2": (microbatches // 2 - 1) * last.total("compute") + last.seconds, "tp2": microbatches * tensor.seconds}


def table(link: Link, widths: Sequence[int] = WIDTHS, rows: int = ROWS, steps: Sequence[int] = MICROBATCHES) -> list[str]:
    heads = " | ".join(f"pp2, {name}, {schedule}" for name in ("even", "balanced") for schedule in SCHEDULES)
    lines = [f"| width | micro-batches | computing, ms | dp2 | tp2 | {heads} |", "|---|---|---|---|---|" + "---|" * 4]
    for width in widths:
        block, head = stage_seconds(width, rows)
        for microbatches in steps:
            computing = microbatches * (two_cards.LAYERS * block + head) / 2
            found = list(others(width, rows, microbatches, link).values())
            for blocks in splits(width).values():
                found += [pipeline_seconds(width, rows, microbatches, schedule, blocks, link) for schedule in SCHEDULES]
            cells = " | ".join(f"{each / computing:.2f}" for each in found)
            lines.append(f"| {width:,} | {microbatches} | {computing * 1e3:,.0f} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pcie", type=float, default=two_cards.PCIE, help="GB/s in each direction between two cards without peer access")
    bandwidths = {"NVLink": two_cards.NVLINK, "PCIe without peer access": parser.parse_args().pcie}
    blocks = (f"{width:,}: {' and '.join(map(str, splits(width)['balanced']))}" for width in WIDTHS)
    print("Blocks of the two stages when balanced:", ", ".join(blocks))
    for name, gigabytes in bandwidths.items():
        link = Link(two_cards.LATENCY, gigabytes * 1e9)
        print(f"\n{name}, {gigabytes:g} GB/s:\n", *table(link), "\ntwo_3090s.yaml:\n", *table(link, (768,), 16, (16,)), sep="\n")


if __name__ == "__main__":
    main()
