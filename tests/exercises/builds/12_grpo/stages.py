"""The stages of build 12: what GRPO from generation to a reward that rises does, against each answer alone without a cache."""

from .common import stages
from .drawing import DRAW, SAMPLE
from .generating import CACHE, GREEDY, REFILL
from .judging import ADVANTAGES, REWARD, SCORE
from .losing import LOSS
from .refusals import BAD_INPUT
from .resuming import RESUME
from .running import TRAIN
from .stepping import UPDATE

STAGES = stages(
    "12.build",
    cache=(("prefill", "append"), CACHE),
    greedy=(("greedy",), GREEDY),
    draw=(("draw",), DRAW),
    sample=(("sample",), SAMPLE),
    refill=(("serve",), REFILL),
    score=(("score",), SCORE),
    reward=(("verify",), REWARD),
    advantages=(("advantages",), ADVANTAGES),
    loss=(("token_losses", "token_weights"), LOSS),
    update=(("update",), UPDATE),
    train=(("start", "advance"), TRAIN),
    resume=(("save", "resume"), RESUME),
    bad_input=(("check_settings",), BAD_INPUT),
)
