"""The stages of build 04: what a training engine does, and what is left of it when it is killed."""

from .common import stages
from .ending import SIGNAL
from .evaluating import EVALUATE
from .killing import KILL, POWER
from .logging_figures import METRICS
from .pieces import remembering
from .refusals import BAD_INPUT
from .resuming import RESUME
from .saving import SAVE
from .stepping import STEPS

STAGES = stages(
    "04.build",
    steps=(("make_engine", "run"), remembering("steps", STEPS)),
    metrics=(("make_engine", "run"), remembering("metrics", METRICS)),
    evaluate=(("evaluate",), remembering("evaluate", EVALUATE)),
    save=(("save", "saved", "resume"), remembering("save", SAVE)),
    kill=(("save", "saved", "resume"), remembering("kill", KILL)),
    power=(("save", "saved", "resume"), remembering("power", POWER)),
    resume=(("save", "resume"), remembering("resume", RESUME)),
    signal=(("run", "save"), remembering("signal", SIGNAL)),
    bad_input=(("check_settings",), remembering("bad_input", BAD_INPUT)),
)
