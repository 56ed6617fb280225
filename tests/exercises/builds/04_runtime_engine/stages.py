"""The stages of build 04: what a training engine does, and what is left of it when it is killed."""

from .ending import SIGNAL
from .evaluating import EVALUATE
from .killing import KILL, POWER
from .logging_figures import METRICS
from .pieces import stage
from .refusals import BAD_INPUT
from .resuming import RESUME
from .saving import SAVE
from .stepping import STEPS

STAGES = {
    check.exercise.rsplit(".", 1)[1]: check
    for check in (
        stage("steps", ("make_engine", "run"), *STEPS),
        stage("metrics", ("make_engine", "run"), *METRICS),
        stage("evaluate", ("evaluate",), *EVALUATE),
        stage("save", ("save", "saved", "resume"), *SAVE),
        stage("kill", ("save", "saved", "resume"), *KILL),
        stage("power", ("save", "saved", "resume"), *POWER),
        stage("resume", ("save", "resume"), *RESUME),
        stage("signal", ("run", "save"), *SIGNAL),
        stage("bad_input", ("check_settings",), *BAD_INPUT),
    )
}
