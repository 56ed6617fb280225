"""The stages of build 02: a LLaMA that loads a Hugging Face folder, against transformers' LlamaForCausalLM."""

from .answering import HALF, LOGITS, PACKED, ROPE
from .common import stages
from .learning import GRADIENTS
from .limits import BUDGETS
from .making import CREATE, LOAD
from .reading import CONFIG, TENSORS
from .refusals import BAD_INPUT
from .saving import SAVE

STAGES = stages(
    "02.build",
    config=(("settings",), CONFIG),
    tensors=(("tensors",), TENSORS),
    create=(("create", "state"), CREATE),
    load=(("load",), LOAD),
    logits=(("logits",), LOGITS),
    rope=(("frequencies",), ROPE),
    packed=(("packed_logits",), PACKED),
    gradients=(("loss", "gradients"), GRADIENTS),
    half=((), HALF),
    save=(("save",), SAVE),
    budgets=((), BUDGETS),
    bad_input=((), BAD_INPUT),
)
