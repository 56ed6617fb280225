"""Chapter 12. Configuration of GRPO on tasks: the rollouts and the loss, the tasks that are answered, and what rewards the answers.

    grpo: {tasks: {made: {kinds: [sum], digits: 2}}, rewards: [{name: task}]}                          made by code
    grpo: {tasks: {sources: [{path: tasks.jsonl}]}, rewards: [{name: my_rewards.py:brevity}]}          your own
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from shared.course.bounds import Bounds, PositiveFloat, checked
from shared.course.extensions import called
from shared.preference.rewards import is_finite
from shared.rl.grpo import GRPOConfig
from shared.rl.rewards import MODEL, RewardPart
from shared.rl.tasks import TasksConfig


@dataclass(frozen=True)
@checked
class TaskPolicyConfig(GRPOConfig):
    """GRPO: rollouts, losses, tasks and rewards. It has the fields of `shared.rl.grpo.GRPOConfig`, and these.

    Args:
        reference: keep the first model beside the trained one, or use the policy without its adapter, to measure how far the policy moves
            from it. It costs a pass over each rollout, and kl_coefficient needs it.
        tasks: what is answered.
        rewards: the rewards whose weighted sum an answer gets.
        reward_seconds: timeout for the reward of one answer, in seconds.
        reward_failed: what a reward counts as that raises, hangs or gives no finite number; null to end the run. A reward model
            that raises ends it in any case: that says nothing of single answers. A function that returns None has not failed: it is for
            other tasks, and is left out.
        held_out_answers: answers sampled for each held-out task before and after training, for pass@k; 0 for none.
    """

    reference: bool = True
    tasks: TasksConfig = field(default_factory=TasksConfig)
    rewards: tuple[RewardPart, ...] = (RewardPart(),)
    reward_seconds: PositiveFloat = 5.0
    reward_failed: float | None = None
    held_out_answers: Annotated[int, Bounds(ge=0, le=10_000)] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [
            (
                self.kl_coefficient > 0 and not self.reference,
                f"kl_coefficient is {self.kl_coefficient} and reference is false: give reference true, or kl_coefficient 0.",
            ),
            (not self.rewards, "rewards is empty: give at least one, such as [{name: task}]."),
            (len({called(part.name) for part in self.rewards}) < len(self.rewards), "rewards names one reward twice: give each once."),
            (
                self.reward_failed is not None and not is_finite(self.reward_failed),
                f"reward_failed is {self.reward_failed}: give a finite number (in float32), or null.",
            ),
        ]
        for is_wrong, reason in wrong:
            if is_wrong:
                raise ValueError(reason)

    @property
    def reward_model(self) -> Path | None:
        return next((part.folder for part in self.rewards if part.name == MODEL), None)
