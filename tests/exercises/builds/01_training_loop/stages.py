"""The stages of build 01: what a training loop and a byte model do, against PyTorch's own losses on one row at a time."""

from .common import stages
from .drawing import SAMPLE
from .judging import EVALUATE
from .models import MODEL
from .refusals import BAD_INPUT
from .running import RESUME, TRAIN
from .steps import LOSS, STEP
from .texts import BATCHES

STAGES = stages(
    "01.build",
    batches=(("split", "windows"), BATCHES),
    model=(("new_model",), MODEL),
    loss=(("loss",), LOSS),
    step=(("step",), STEP),
    evaluate=(("evaluate",), EVALUATE),
    sample=(("sample",), SAMPLE),
    train=(("start", "advance", "model_of"), TRAIN),
    resume=(("save", "resume"), RESUME),
    bad_input=(("split", "windows", "step", "evaluate", "sample", "start", "resume"), BAD_INPUT),
)
