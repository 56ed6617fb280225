"""Three steps of GRPO on a small policy with a reference beside it, on a layout, in float64."""

from functools import cache

from lora_runs import layout_of, with_biases
from ppo_runs import NEW_TOKENS, PPORun, watched

from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.rl.grpo import GRPOAdvantages, GRPOConfig, GRPOObjective, GroupLoader

SIZES = {"prompts": 4, "answers": 2, "new_tokens": NEW_TOKENS, "passes": 2, "minibatches": 1, "temperature": 0.8}
GRPO = GRPOConfig(**SIZES, kl_coefficient=0.3, kl_times_ratio=True, mask_truncated=True, importance_limit=3.0)
VARIANTS = {
    "token": GRPO,
    "sequence": GRPOConfig(  # with a KL term, because the loss without one is 0 but for rounding
        **SIZES, aggregation="sequence", level="sequence", scale="batch", clip_low=0.01, clip_high=0.02, kl_coefficient=0.1,
        kl_estimator="k2", importance_limit=3.0,
    ),
    "constant": GRPOConfig(
        **SIZES, aggregation="constant", scale="none", kl_coefficient=0.3, kl_estimator="k1", kl_in="reward", overlong_tokens=3,
        overlong_penalty=0.5, rounds=2, importance_limit=3.0,
    ),
}  # fmt: skip


class GRPORun(PPORun):
    """One rank of a run."""

    kinds = GRPOObjective, GRPOAdvantages, GroupLoader
    prepare = staticmethod(with_biases)

    def __init__(self, world, layout, model: str = "dense", optimizer: str = "adamw", sampler=None, grpo: GRPOConfig = GRPO, **settings):
        super().__init__(world, layout, model, optimizer, sampler, grpo, **settings)


def on_ranks(word: str, model: str = "dense", variant: str = "token", sampler=None, **more) -> list[dict]:
    layout = layout_of(word, **more)
    work = lambda world: watched(GRPORun(world, layout, model, sampler=sampler, grpo=VARIANTS[variant]))  # noqa: E731
    return [work(SingleRankCommunicator())] if layout.ranks == 1 else run_threads(work, layout.ranks)


@cache
def alone(model: str = "dense", variant: str = "token", sampler=None) -> dict:
    return on_ranks("one", model, variant, sampler)[0]
