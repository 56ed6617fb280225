"""The stages of build 02: a LLaMA that loads a Hugging Face folder, against transformers' LlamaForCausalLM."""

from .answering import HALF, LOGITS, PACKED, ROPE
from .learning import GRADIENTS
from .limits import BUDGETS
from .making import CREATE, LOAD
from .pieces import stage
from .reading import CONFIG, TENSORS
from .refusals import BAD_INPUT
from .saving import SAVE

STAGES = {
    check.exercise.rsplit(".", 1)[1]: check
    for check in (
        stage("config", ("settings",), *CONFIG),
        stage("tensors", ("tensors",), *TENSORS),
        stage("create", ("create", "state"), *CREATE),
        stage("load", ("load",), *LOAD),
        stage("logits", ("logits",), *LOGITS),
        stage("rope", ("frequencies",), *ROPE),
        stage("packed", ("packed_logits",), *PACKED),
        stage("gradients", ("loss", "gradients"), *GRADIENTS),
        stage("half", (), *HALF),
        stage("save", ("save",), *SAVE),
        stage("budgets", (), *BUDGETS),
        stage("bad_input", (), *BAD_INPUT),
    )
}
