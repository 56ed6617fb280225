"""The stages of build 01: what a training loop and a byte model do, against PyTorch's own losses on one row at a time."""

from .drawing import SAMPLE
from .judging import EVALUATE
from .models import MODEL
from .pieces import stage
from .refusals import BAD_INPUT
from .running import RESUME, TRAIN
from .steps import LOSS, STEP
from .texts import BATCHES

STAGES = {
    check.exercise.rsplit(".", 1)[1]: check
    for check in (
        stage("batches", ("split", "windows"), *BATCHES),
        stage("model", ("new_model",), *MODEL),
        stage("loss", ("loss",), *LOSS),
        stage("step", ("step",), *STEP),
        stage("evaluate", ("evaluate",), *EVALUATE),
        stage("sample", ("sample",), *SAMPLE),
        stage("train", ("start", "advance", "model_of"), *TRAIN),
        stage("resume", ("save", "resume"), *RESUME),
        stage("bad_input", ("split", "windows", "step", "evaluate", "sample", "start", "resume"), *BAD_INPUT),
    )
}
