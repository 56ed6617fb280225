"""The stages of build 08: what the adapters of a pipeline do, against the same model in one process."""

from .cases import CASES
from .common import stages

STAGES = stages(
    "08.build",
    cut=(("make_pipeline", "state"), CASES["cut"]),
    forward=(("losses",), CASES["forward"]),
    backward=(("step", "gradients"), CASES["backward"]),
    schedule=((), CASES["schedule"]),
    chunks=((), CASES["chunks"]),
    refuse=((), CASES["refuse"]),
    split=((), CASES["split"]),
    ends=(("gradient_norm",), CASES["ends"]),
    budgets=((), CASES["budgets"]),
    bad_input=((), CASES["bad_input"]),
)
