"""The stages of build 12: what GRPO from generation to a reward that rises does, against each answer alone without a cache."""

from .drawing import DRAW, SAMPLE
from .generating import CACHE, GREEDY, REFILL
from .judging import ADVANTAGES, REWARD, SCORE
from .losing import LOSS
from .pieces import stage
from .refusals import BAD_INPUT
from .resuming import RESUME
from .running import TRAIN
from .stepping import UPDATE

STAGES = {
    check.exercise.rsplit(".", 1)[1]: check
    for check in (
        stage("cache", ("prefill", "append"), *CACHE),
        stage("greedy", ("greedy",), *GREEDY),
        stage("draw", ("draw",), *DRAW),
        stage("sample", ("sample",), *SAMPLE),
        stage("refill", ("serve",), *REFILL),
        stage("score", ("score",), *SCORE),
        stage("reward", ("verify",), *REWARD),
        stage("advantages", ("advantages",), *ADVANTAGES),
        stage("loss", ("token_losses", "token_weights"), *LOSS),
        stage("update", ("update",), *UPDATE),
        stage("train", ("start", "advance"), *TRAIN),
        stage("resume", ("save", "resume"), *RESUME),
        stage("bad_input", ("check_settings",), *BAD_INPUT),
    )
}
