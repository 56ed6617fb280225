"""The stages of build 07: what the adapters of a tensor-parallel model do, against the same model in one process."""

from .cases import CASES
from .common import stages

STAGES = stages(
    "07.build",
    weights=(("make_model", "state", "layout"), CASES["weights"]),
    feed_forward=(("feed_forward",), CASES["feed_forward"]),
    attention=(("attention",), CASES["attention"]),
    vocabulary=(("embed", "head_loss"), CASES["vocabulary"]),
    model=(("loss_and_gradients", "logits"), CASES["model"]),
    four_ranks=((), CASES["four_ranks"]),
    sequence_parallel=((), CASES["sequence_parallel"]),
    budgets=((), CASES["budgets"]),
    bad_input=((), CASES["bad_input"]),
)
