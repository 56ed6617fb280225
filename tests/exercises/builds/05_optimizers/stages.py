"""The stages of build 05: what AdamW and Muon as one optimizer do, against torch.optim's own."""

from .clipping import CLIP
from .grouping import GROUPS
from .limits import BUDGETS
from .moving import ADAMW_STEPS, MUON_STEPS, NEWTON_SCHULZ
from .pieces import stage
from .precise import PRECISION
from .refusals import BAD_INPUT
from .resuming import RESUME
from .routing import ROUTE

STAGES = {
    check.exercise.rsplit(".", 1)[1]: check
    for check in (
        stage("route", ("route",), *ROUTE),
        stage("adamw", ("make",), *ADAMW_STEPS),
        stage("newton_schulz", ("newton_schulz",), *NEWTON_SCHULZ),
        stage("muon", ("make",), *MUON_STEPS),
        stage("groups", ("make",), *GROUPS),
        stage("clip", ("clip",), *CLIP),
        stage("resume", ("state", "load"), *RESUME),
        stage("precision", ("loss_scale", "scale_of", "update"), *PRECISION),
        stage("budgets", ("make",), *BUDGETS),
        stage("bad_input", ("make", "load"), *BAD_INPUT),
    )
}
