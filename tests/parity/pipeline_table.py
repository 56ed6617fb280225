"""Pipelines against one process in every family, layout and schedule, in float64: prints the tables of chapter 08's page.

python tests/parity/pipeline_table.py
"""

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parents[2], Path(__file__).parents[1] / "support", Path(__file__).parent)]

import torch  # noqa: E402
from layout_table import far_apart  # noqa: E402
from pipeline_runs import expected, make, observed, on_ranks  # noqa: E402
from tensor_runs import FAMILIES  # noqa: E402

from shared.course.errors import SettingError  # noqa: E402
from shared.parallel.comm.communicator import Communicator  # noqa: E402
from shared.parallel.processes.launch import run_processes  # noqa: E402

Case = tuple[str, str, int]  # layout, schedule, layers
COURSE: list[Case] = [
    *(("pp2", schedule, 4) for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")),
    *(("pp4", schedule, 4) for schedule in ("gpipe", "1f1b", "zero_bubble")),
    ("pp4", "interleaved", 8), ("pp8", "1f1b", 8), ("pp8", "zero_bubble", 8),
    ("pp2_dp2", "1f1b", 4), ("pp2_dp2", "zero_bubble", 4), ("pp2_dp2_zero1", "interleaved", 4),
    ("pp2_fsdp2", "gpipe", 4), ("pp2_fsdp2", "1f1b", 4), ("pp2_fsdp2", "interleaved", 4),
    ("pp2_tp2", "1f1b", 4), ("pp2_tp2", "interleaved", 4), ("pp2_tp2", "zero_bubble", 4), ("pp2_tp2_sp", "1f1b", 4),
    ("pp2_cp2", "1f1b", 4), ("pp4_dp2", "1f1b", 4), ("pp4_tp2", "1f1b", 4), ("pp2_dp2_tp2_sp", "1f1b", 4), ("pp2_fsdp2_tp2", "1f1b", 4),
    ("pp2_dp2_fsdp2", "1f1b", 4),
]  # fmt: skip
TORCH: list[Case] = [("pp2", schedule, 4) for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")]


def table(backend: str, cases: list[Case]) -> Iterator[str]:
    """The largest relative difference to one process of any loss, norm, gradient or weight, on any rank, in any of three steps."""
    yield f"| layout | schedule | layers | backend | {' | '.join(FAMILIES)} |"
    yield "|" + "---|" * (4 + len(FAMILIES))
    torch_runs = by_processes() if backend == "torch" else {}
    for layout, schedule, layers in cases:
        case = lambda family: (layout, schedule, layers, family)  # noqa: B023, E731
        worst = [torch_runs[case(family)] if torch_runs else by_threads(*case(family)) for family in FAMILIES]
        cells = " | ".join("refused" if each is None else f"{each:.0e}" for each in worst)
        yield f"| {layout} | {schedule} | {layers} | {backend} | {cells} |"


def by_threads(layout: str, schedule: str, layers: int, family: str) -> float | None:
    """None where the layout refuses the family."""
    try:
        found = on_ranks(observed, layout, family, "sgd", schedule, layers=layers)
    except SettingError:
        return None
    return max(from_one(each, expected(family, layers=layers)) for each in found)


def from_one(found: dict, one: dict) -> float:
    """Of a rank that holds a part of the weights."""
    parts = {what: {name: one[what][name] for name in found[what]} for what in ("gradients", "weights")}
    return far_apart(found, one | parts)


def by_processes() -> dict[tuple, float | None]:
    """PyTorch's engine, in two processes over gloo."""
    cases = [(*case, family) for case in TORCH for family in FAMILIES]
    one = {(layers, family): expected(family, layers=layers) for _, _, layers, family in cases if family != "t5"}
    ranks = run_processes(trained_by_torch, 2, cases, one, timeout=1800)
    return {case: None if None in (worst := [found[case] for found in ranks]) else max(worst) for case in cases}


def trained_by_torch(world: Communicator, cases: list[tuple], one: dict) -> dict[tuple, float | None]:
    found = {}
    for layout, schedule, layers, family in cases:
        try:
            run = observed(make(world, layout, family, "sgd", schedule, layers=layers, backend="torch"))
        except SettingError:
            found[layout, schedule, layers, family] = None
        else:
            found[layout, schedule, layers, family] = from_one(run, one[layers, family])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in chain(table("course", COURSE), [""], table("torch", TORCH)):
        print(line, flush=True)
