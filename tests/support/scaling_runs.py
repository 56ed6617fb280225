"""Runs that follow a scaling law exactly, around the best size of each budget."""

from collections.abc import Sequence

from shared.trainer.planner.scaling_law import Point, ScalingLaw

EQUAL = ScalingLaw(1.8, 400.0, 400.0, 0.35, 0.35)  # equal exponents: profiles are symmetric, and the best loss is E + c / C^(0.35 / 2)
NEAR = (0.6, 0.8, 1.0, 1.25, 1.6)  # shares of the best size


def around_optima(law: ScalingLaw, budgets: Sequence[float], shares: Sequence[float] = NEAR) -> list[tuple[float, Point]]:
    """(budget in FLOPs, run) of a size for each share."""
    sizes = [(flops, share * law.optimum(flops)[0]) for flops in budgets for share in shares]
    return [(flops, Point(size, flops / 6 / size, law.loss(size, flops / 6 / size))) for flops, size in sizes]
