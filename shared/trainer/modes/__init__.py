"""Chapter 12. Training modes: pretraining, fine-tuning, and learning from preferences or rewards."""

from shared.trainer.mode import Mode
from shared.trainer.modes.grpo import TaskPolicyOptimization
from shared.trainer.modes.pairs import PreferenceTuning, RewardModelling
from shared.trainer.modes.ppo import PolicyOptimization
from shared.trainer.modes.pretrain import Pretraining
from shared.trainer.modes.sft import FineTuning

MODES: dict[str, type[Mode]] = {
    "pretrain": Pretraining,
    "sft": FineTuning,
    "reward": RewardModelling,
    "dpo": PreferenceTuning,
    "ppo": PolicyOptimization,
    "grpo": TaskPolicyOptimization,
}
