"""What the experts of a run did: the load of each expert in each step, the share of rows that travelled, all-to-alls beside the formula.

The core is imported within the functions, after a script's `launch` has chosen whose exercises it runs with.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from shared.model.config import ModelConfig
    from shared.parallel.config import ParallelConfig
    from shared.parallel.planning.memory import StepSizes

Loads = dict[str, list[list[int]]]


class ExpertWatch:
    """Collects the load of one rank's experts.

    Args:
        module: the model, or a stage of it, as the rank trains it.
        model: without experts there is nothing to collect.
    """

    def __init__(self, module: "nn.Module", model: "ModelConfig"):
        self.module, self.model, self.loads = module, model, {}

    def note(self) -> None:
        """Take the load of the step that has ended. Nothing is sent: `report` adds the ranks' loads after the run."""
        if self.model.experts is None:
            return
        from shared.moe.balancing import take_loads

        for block, load in take_loads(self.module, lambda own: own).items():
            self.loads.setdefault(str(block), []).append(load.tolist())


def exchanging_ranks(layout: "ParallelConfig", num_experts: int) -> list[int]:
    """The ranks with which rank 0 exchanges rows."""
    from shared.moe.parallel.groups import gradient_ranks

    degrees = layout.pipeline_parallel, layout.data_ranks, layout.context_parallel, layout.tensor_parallel
    return gradient_ranks(*degrees, layout.expert_parallel, num_experts)[0].exchange


def added(ranks: Sequence[Loads]) -> Loads:
    """The loads of ranks that saw different tokens, added, in the order of the blocks."""
    import torch

    found: dict[str, Any] = {}
    for loads in ranks:
        for block, steps in loads.items():
            found[block] = found.get(block, 0) + torch.tensor(steps)
    return {block: found[block].tolist() for block in sorted(found, key=int)}


def report(
    ranks: Sequence[dict[str, Any]], alone: Loads, model: "ModelConfig", layout: "ParallelConfig", step: "StepSizes", path: Path
) -> tuple[list[Any], dict[str, Any]]:
    """What to print of a run's experts, and its figures; the loads over time are drawn into a file.

    Args:
        ranks: of each rank of the world, its `loads`, and its `traffic`.
        alone: the loads of one process.
        step: of one rank; its imbalance is measured here.
        path: of the figure.

    Returns:
        Lines and tables, and for JSON: loads by block and step, whether one process has the same; with expert parallelism the all-to-alls
        of rank 0 by formula and counted, and in rank 0's group, over all steps, the rows of the fullest rank over the mean and the share
        of rows that left their rank.
    """
    from dataclasses import replace

    import torch
    from rich.table import Table

    from shared.parallel.planning.expert_costs import expert_exchanges, imbalance
    from shared.parallel.planning.pipeline_costs import held_parts

    experts, size = model.experts.num_experts, layout.expert_parallel
    loads = added([rank["loads"] for number, rank in enumerate(ranks) if number % layout.tensor_parallel == 0])
    table = Table("load of expert", *map(str, range(experts)), caption="in shares of an equal load, over all steps")
    for block, of_steps in loads.items():
        total = torch.tensor(of_steps, dtype=torch.float64).sum(dim=0)
        table.add_row(f"block {block}", *(f"{share:.2f}" for share in (total / total.mean()).tolist()))
    told = {"loads": loads, "loads of one process are the same": loads == alone}
    said = [table, f"Choices of each expert in each step: {'the same' if loads == alone else 'NOT the same'} in one process."]
    if size > 1 and ranks[0]["loads"]:
        steps, group = len(of_steps), exchanging_ranks(layout, experts)
        sent = torch.stack([torch.tensor(list(ranks[rank]["loads"].values())).sum(dim=(0, 1)) for rank in group])  # [rank, expert]
        by_rank = sent.view(size, size, -1).sum(dim=-1)  # rows from each rank to each rank
        rows, arrived, stayed = (number.item() for number in (by_rank.sum(), by_rank.sum(dim=0)[0], by_rank.diagonal().sum()))
        fullest, travelled = imbalance(sent.sum(dim=0).tolist(), size), 1 - stayed / rows
        exchanges = expert_exchanges(model, layout, replace(step, imbalance=arrived * size / rows), held_parts(model.resolved(), layout)[0])
        of_step = [each for each in exchanges if each.axis == "ep"]
        calls, megabytes = steps * sum(each.calls for each in of_step), steps * sum(each.calls * each.bytes for each in of_step) / 1e6
        counted = ranks[0]["traffic"]["all_to_all ep"]
        told["all-to-alls of rank 0"] = {"formula": {"calls": calls, "megabytes": megabytes}, "counted": counted}
        told |= {"rows of the fullest rank over the mean": fullest, "rows that travelled": travelled}
        said += [
            f"All-to-alls of rank 0: {counted['calls']:,} calls and {counted['megabytes']:,.3f} MB; by formula {calls:,} calls and "
            f"{megabytes:,.3f} MB.",
            f"{travelled:.1%} of the rows travelled to another rank; {1 - 1 / size:.1%} would under an equal load.",
            f"The fullest of the {size} ranks that exchange rows computed {fullest:.2f} times as many of them as the mean.",
        ]
    draw(loads, path)
    return said, told


def draw(loads: Loads, path: Path) -> None:
    """A heat map for each block: experts above one another, steps to the right, 1 for an equal share of the choices."""
    import torch
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    drawing = Figure(figsize=(10.0, 0.6 + 1.7 * len(loads)))
    grid = drawing.subplots(len(loads), 1, squeeze=False)[:, 0]
    for axes, (block, of_steps) in zip(grid, loads.items(), strict=True):
        counts = torch.tensor(of_steps, dtype=torch.float64)
        picture = figures.draw_load(axes, (counts / counts.mean(dim=1, keepdim=True)).numpy())
        axes.set_title(f"block {block}", fontsize=9)
        axes.set_xlabel("training step" if axes is grid[-1] else "")
    drawing.colorbar(picture, ax=grid, label="load, in shares of an equal one")
    drawing.savefig(path)
