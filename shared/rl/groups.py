"""Chapter 12. Dynamic sampling: sample answers to further prompts while too few groups have differing rewards (Yu et al. 2025).

Answers that are all right, or all wrong, have no advantage over one another: a rollout of them costs as much as any, and teaches nothing.
"""

import torch

from shared.course.errors import CourseError
from shared.preference.rollout import OpenRollout, Sample
from shared.preference.rollouts import RolloutLoader
from shared.rl.grpo import GRPOConfig, differing


class GroupLoader(RolloutLoader):
    """The loader of a `GRPOConfig`'s rollouts: up to `rounds` times it samples answers to as many prompts as a rollout has.

    Groups whose scores differ are kept, in the order of their prompts; surplus groups are discarded. If there are too few in the end,
    groups of the last round fill the rollout. The position holds which prompts come next, so a resumed run continues as any other.

    Metrics in addition to the rollout's: `rounds`, and `zero_variance`, of all groups that were drawn.
    """

    config: GRPOConfig

    def answered(self, device: torch.device) -> list[Sample]:
        size, wanted, kept, drawn = self.config.answers, self.config.prompts, [], 0
        for number in range(self.config.rounds):
            if number:
                self.position += wanted
            try:
                samples = super().answered(device)
            except CourseError:
                self.position -= number * wanted  # a resumed run samples this rollout again, from its first prompts
                raise
            groups = [samples[first : first + size] for first in range(0, len(samples), size)]
            differ = differing(torch.tensor([sample.score for sample in samples], dtype=torch.float64), size).tolist()
            drawn += sum(differ)
            kept += [group for group, varied in zip(groups, differ, strict=True) if varied]
            if len(kept) >= wanted:
                break
        kept = [*kept, *(group for group, varied in zip(groups, differ, strict=True) if not varied)][:wanted]
        self.rounds = {"rounds": number + 1, "zero_variance": 1 - drawn / (wanted * (number + 1))}
        return [sample for group in kept for sample in group]

    def roll_out(self) -> OpenRollout:
        opened = super().roll_out()
        opened.metrics |= self.rounds
        if self.reference is None:
            del opened.metrics["kl_to_reference"]  # 0, and not measured
        return opened
