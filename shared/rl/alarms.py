"""Chapter 12. Alarms of a GRPO run: what the metrics of a rollout say when nothing can be learned from it, or when a policy collapses."""

from collections.abc import Callable
from typing import NamedTuple

from shared.engine.callbacks import Metrics


class Alarm(NamedTuple):
    """metric: of a rollout. rings: whether its value is a cause for alarm. sentence: about it, with `value` in it."""

    metric: str
    rings: Callable[[float], bool]
    sentence: str


ALARMS = (
    Alarm(
        "zero_variance", lambda value: value > 0.9,
        "In {value:.0%} of the groups all answers have the same score and teach nothing: tasks are too hard or too easy for the policy, "
        "or groups too small. Change tasks, grpo.answers or grpo.rounds.",
    ),
    Alarm(
        "ended", lambda value: value < 0.5,
        "Only {value:.0%} of the answers ended by themselves, the others were cut off: raise grpo.new_tokens, or punish length "
        "(grpo.overlong_penalty).",
    ),
    Alarm(
        "entropy", lambda value: value < 0.02,
        "The entropy is {value:.3f} nats a token: the policy gives almost the same answer each time, with nothing left to compare. Lower "
        "optimizer.lr, or raise grpo.clip_high or grpo.kl_coefficient.",
    ),
)  # fmt: skip


def alarms(metrics: Metrics) -> dict[str, str]:
    """Metric -> a sentence about it, for each cause for alarm in the metrics of a rollout."""
    present = [(each, metrics[each.metric]) for each in ALARMS if each.metric in metrics]
    return {each.metric: each.sentence.format(value=value) for each, value in present if each.rings(value)}
