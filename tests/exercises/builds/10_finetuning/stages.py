"""The stages of build 10: what adapters on any model do, against a model with one dense weight W + s B A for each adapted layer."""

from .files import LOAD, SAVE
from .injecting import INJECT, START, TARGETS
from .limits import BUDGETS, FOUR_BITS
from .merging import MERGE, SEVERAL
from .pieces import stage
from .ranks import RANKS
from .refusals import BAD_INPUT
from .training import TRAIN

STAGES = {
    check.exercise.rsplit(".", 1)[1]: check
    for check in (
        stage("targets", ("targets",), *TARGETS),
        stage("inject", ("attach", "factors", "run", "weights"), *INJECT),
        stage("start", ("initial",), *START),
        stage("train", ("step",), *TRAIN),
        stage("merge", ("merge", "unmerge"), *MERGE),
        stage("several", ("add", "use"), *SEVERAL),
        stage("save", ("save",), *SAVE),
        stage("load", ("load",), *LOAD),
        stage("ranks", ("cut", "run_cut", "cut_gradients"), *RANKS),
        stage("four_bits", ("frozen_linear",), *FOUR_BITS),
        stage("budgets", ("count_trained",), *BUDGETS),
        stage("bad_input", ("check_config",), *BAD_INPUT),
    )
}
