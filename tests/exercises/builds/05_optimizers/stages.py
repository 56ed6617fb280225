"""The stages of build 05: what AdamW and Muon as one optimizer do, against torch.optim's own."""

from .clipping import CLIP
from .common import stages
from .grouping import GROUPS
from .limits import BUDGETS
from .moving import ADAMW_STEPS, MUON_STEPS, NEWTON_SCHULZ
from .pieces import guarded
from .precise import PRECISION
from .refusals import BAD_INPUT
from .resuming import RESUME
from .routing import ROUTE

STAGES = stages(
    "05.build",
    route=(("route",), guarded(ROUTE)),
    adamw=(("make",), guarded(ADAMW_STEPS)),
    newton_schulz=(("newton_schulz",), guarded(NEWTON_SCHULZ)),
    muon=(("make",), guarded(MUON_STEPS)),
    groups=(("make",), guarded(GROUPS)),
    clip=(("clip",), guarded(CLIP)),
    resume=(("state", "load"), guarded(RESUME)),
    precision=(("loss_scale", "scale_of", "update"), guarded(PRECISION)),
    budgets=(("make",), guarded(BUDGETS)),
    bad_input=(("make", "load"), guarded(BAD_INPUT)),
)
