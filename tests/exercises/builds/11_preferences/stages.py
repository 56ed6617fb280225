"""The stages of build 11: what DPO from text to step does, against each answer alone in a row, in float64."""

from .common import stages
from .limits import BUDGETS
from .losing import LOSS, RELATIVES
from .reading import ENCODE, READ
from .refusals import BAD_INPUT
from .resuming import RESUME
from .running import TRAIN
from .scoring import LOG_PROBS, REFERENCE, ROWS
from .stepping import METRICS, STEP

STAGES = stages(
    "11.build",
    read=(("split_pair", "read_pairs"), READ),
    encode=(("encode",), ENCODE),
    rows=(("rows", "predictions"), ROWS),
    log_probs=(("log_probs",), LOG_PROBS),
    reference=(("score",), REFERENCE),
    loss=(("dpo",), LOSS),
    relatives=(("losses",), RELATIVES),
    step=(("step",), STEP),
    metrics=(("evaluate",), METRICS),
    train=(("start", "advance"), TRAIN),
    resume=(("save", "resume"), RESUME),
    budgets=(("micro_batches",), BUDGETS),
    bad_input=(("check_settings",), BAD_INPUT),
)
