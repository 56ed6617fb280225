"""The stages of build 11: what DPO from text to step does, against each answer alone in a row, in float64."""

from .limits import BUDGETS
from .losing import LOSS, RELATIVES
from .pieces import stage
from .reading import ENCODE, READ
from .refusals import BAD_INPUT
from .resuming import RESUME
from .running import TRAIN
from .scoring import LOG_PROBS, REFERENCE, ROWS
from .stepping import METRICS, STEP

STAGES = {
    check.exercise.rsplit(".", 1)[1]: check
    for check in (
        stage("read", ("split_pair", "read_pairs"), *READ),
        stage("encode", ("encode",), *ENCODE),
        stage("rows", ("rows", "predictions"), *ROWS),
        stage("log_probs", ("log_probs",), *LOG_PROBS),
        stage("reference", ("score",), *REFERENCE),
        stage("loss", ("dpo",), *LOSS),
        stage("relatives", ("losses",), *RELATIVES),
        stage("step", ("step",), *STEP),
        stage("metrics", ("evaluate",), *METRICS),
        stage("train", ("start", "advance"), *TRAIN),
        stage("resume", ("save", "resume"), *RESUME),
        stage("budgets", ("micro_batches",), *BUDGETS),
        stage("bad_input", ("check_settings",), *BAD_INPUT),
    )
}
