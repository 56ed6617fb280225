"""Measure every layout on both backends against one process, and print the tables of chapter 06's page: float64, over all features.

python tests/parity/layout_table.py            two ranks, then four
python tests/parity/layout_table.py 2          two ranks
python tests/parity/layout_table.py bfloat16   in bfloat16 instead; float16 in that
python tests/parity/layout_table.py 07         chapter 07's tables instead: tensor, sequence and context parallelism by family, and in
                                               bfloat16
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parents[2], Path(__file__).parents[1] / "support", Path(__file__).parent)]

import context_runs  # noqa: E402
import tensor_runs  # noqa: E402
import test_07_tensor  # noqa: E402
import torch  # noqa: E402
from layout_runs import LayoutRun, largest_difference  # noqa: E402
from layouts import EXACT, FOUR, TWO, Difference, cases_of, difference, matrix, references, rounding  # noqa: E402
from sharded_runs import ADAMW  # noqa: E402
from step_records import RunRecord  # noqa: E402
from tensor_runs import FAMILIES  # noqa: E402

from shared.model.chunked_loss import packed_next_token_objective  # noqa: E402
from shared.optim.precision import autocast_objective  # noqa: E402
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.config import parse_layout  # noqa: E402
from shared.parallel.processes.launch import run_processes  # noqa: E402
from shared.trainer.models import RUN_AXES  # noqa: E402

QUANTITIES = ("loss", "norm", "gradients", "weights")
OF_CHAPTER_07 = {  # layouts of up to 8 ranks on threads; `_sp` is sequence parallelism
    "course": ("tp2", "tp2_sp", "tp4", "tp4_sp", "cp2", "cp4", "dp2_tp2", "dp2_tp2_zero1_sp", "fsdp2_tp2", "fsdp2_tp2_sp", "dp2_cp2",
               "fsdp2_cp2", "cp2_tp2", "cp2_tp2_sp", "dp2_fsdp2_tp2_sp", "fsdp2_cp2_tp2_sp", "cp8"),
    "torch": ("tp2", "tp2_sp"),
}  # fmt: skip


def table(asked: list[int], features: list[str]) -> str:
    """The largest relative difference of any tensor, on any rank."""
    lines = ["| layout | backend | loss | gradient norm | every gradient | weights after three steps |", "|---|---|---|---|---|---|"]
    expected = references(features)
    if features[0] not in EXACT:
        lines.append(line("one process, to itself in float32", "", rounding(features[0])))
    for ranks, layouts in ((2, TWO), (4, FOUR)):
        results = run_processes(matrix, ranks, cases_of(layouts, features), expected, timeout=900) if ranks in asked else []
        for layout in layouts["course"] if results else ():
            for backend in (backend for backend, names in layouts.items() if layout in names):
                found = [of_rank[backend, layout, feature] for of_rank in results for feature in features]
                lines.append(line(layout, backend, {name: max(each[name] for each in found) for name in QUANTITIES}))
    return "\n".join(lines)


def line(layout: str, backend: str, worst: Difference) -> str:
    return f"| {layout} | {backend} | {' | '.join(f'{worst[name]:.0e}' for name in QUANTITIES)} |"


def families_table() -> Iterator[str]:
    """By layout and family, the largest relative difference to one process of any loss, norm, gradient or weight, on any rank."""
    yield f"| layout | backend | {' | '.join(FAMILIES)} |"
    yield "|" + "---|" * (2 + len(FAMILIES))
    for layout in OF_CHAPTER_07["course"]:
        yield families_line(layout, "course", {family: by_threads(layout, family) for family in FAMILIES})
    for layout in OF_CHAPTER_07["torch"]:
        cases = [(layout, family, "sgd", "none") for family in test_07_tensor.CUT]
        expected = {(family, "sgd"): test_07_tensor.alone(family, "sgd") for family in test_07_tensor.CUT}
        ranks = run_processes(test_07_tensor.trained, 2, cases, expected, timeout=900)
        worst = {case[1]: max(difference for found in ranks for difference in found[case].values()) for case in cases}
        yield families_line(layout, "torch", worst)


def bfloat16_table() -> Iterator[str]:
    """One family with products in bfloat16: each layout to one process, and that to itself in float32."""
    yield "| layout | loss | gradient norm | every gradient | weights after three steps |"
    yield "|---|---|---|---|---|"
    one = in_precision(SingleRankCommunicator(), "one", "bfloat16")
    wide = difference(one, in_precision(SingleRankCommunicator(), "one", "float32"))
    yield f"| one process, to itself in float32 | {' | '.join(f'{wide[name]:.0e}' for name in QUANTITIES)} |"
    for layout in ("tp2", "tp2_sp", "tp4", "tp4_sp", "cp2", "cp4"):
        ranks = run_threads(in_precision, parse_layout(layout).ranks, layout, "bfloat16")
        found = [difference(each, one) for each in ranks]
        yield f"| {layout} | {' | '.join(f'{max(each[name] for each in found):.0e}' for name in QUANTITIES)} |"


def in_precision(world: Communicator, layout: str, precision: str) -> RunRecord:
    objective = autocast_objective(packed_next_token_objective, precision)
    computed_in = torch.bfloat16 if precision == "bfloat16" else None
    made = {"config": context_runs.config_of("llama"), "batches": context_runs.batches, "axes": RUN_AXES, "dtype": torch.float32}
    return LayoutRun(world, parse_layout(layout), optimizer=ADAMW, objective=objective, computed_in=computed_in, **made).record()


def by_threads(layout: str, family: str) -> float | None:
    """None where the layout refuses the family."""
    if "cp" in layout and family not in context_runs.SHARED_OUT:
        return None
    runs = context_runs if family in context_runs.SHARED_OUT else tensor_runs
    one = runs.expected(family)
    return max(far_apart(found, one) for found in runs.run(layout, family))


def far_apart(found: dict, one: dict) -> float:
    numbers = lambda each: {f"{what} {step}": value for what in ("loss", "norm") for step, value in enumerate(each[what])}  # noqa: E731
    tensors = lambda each, what: tensor_runs.without_noise(each[what])  # noqa: E731
    of_tensors = (largest_difference(tensors(found, what), tensors(one, what)) for what in ("gradients", "weights"))
    return max(largest_difference(numbers(found), numbers(one)), *of_tensors)


def families_line(layout: str, backend: str, worst: dict[str, float | None]) -> str:
    cells = (worst.get(family) for family in FAMILIES)
    return f"| {layout} | {backend} | {' | '.join('refused' if each is None else f'{each:.0e}' for each in cells)} |"


if __name__ == "__main__":
    if sys.argv[1:] == ["07"]:
        for each in (*families_table(), "", *bfloat16_table()):
            print(each, flush=True)
        sys.exit()
    ranks, others = ([word for word in sys.argv[1:] if word.isdigit() == digits] for digits in (True, False))
    print(table([int(word) for word in ranks] or [2, 4], others or EXACT))
