"""The stages of build 10: what adapters on any model do, against a model with one dense weight W + s B A for each adapted layer."""

from .common import stages
from .files import LOAD, SAVE
from .injecting import INJECT, START, TARGETS
from .limits import BUDGETS, FOUR_BITS
from .merging import MERGE, SEVERAL
from .ranks import RANKS
from .refusals import BAD_INPUT
from .training import TRAIN

STAGES = stages(
    "10.build",
    targets=(("targets",), TARGETS),
    inject=(("attach", "factors", "run", "weights"), INJECT),
    start=(("initial",), START),
    train=(("step",), TRAIN),
    merge=(("merge", "unmerge"), MERGE),
    several=(("add", "use"), SEVERAL),
    save=(("save",), SAVE),
    load=(("load",), LOAD),
    ranks=(("cut", "run_cut", "cut_gradients"), RANKS),
    four_bits=(("frozen_linear",), FOUR_BITS),
    budgets=(("count_trained",), BUDGETS),
    bad_input=(("check_config",), BAD_INPUT),
)
