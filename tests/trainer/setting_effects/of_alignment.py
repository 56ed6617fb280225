"""Settings of preferences, PPO and GRPO: losses and gradients of pairs, steps after rollouts, and what a mode passes on."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from pair_rows import pair_batch
from torch import nn

from setting_effects.effects import Differs, Effects, Shown
from shared.finetune.instructions import Task
from shared.loop import accumulate_gradients
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import ParallelConfig
from shared.moe.config import MixtureModelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.preference.config import DPOConfig
from shared.preference.objective import PreferenceObjective
from shared.preference.ppo import PPOAdvantages, PPOObjective
from shared.preference.reward_model import RewardConfig, RewardObjective, as_reward_model
from shared.preference.rollouts import RolloutLoader
from shared.preference.sampler import Completion
from shared.preference.value_head import token_scores, with_value_head
from shared.rl import examination, rewards
from shared.rl.config import TaskPolicyConfig
from shared.rl.grpo import GRPOAdvantages, GRPOObjective, GroupLoader
from shared.rl.rewards import RewardPart
from shared.rl.tasks import MadeTasks, TasksConfig, open_tasks
from shared.trainer.sections import PolicyConfig
from shared.trainer.config import TrainerConfig
from shared.trainer.modes.grpo import TaskPolicyOptimization
from shared.trainer.modes.rollouts import Rolling

SEQ = 24
SMALL = MixtureModelConfig(
    vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, initializer_range=0.3
)
PROMPTS = [[1 + (7 * number + place) % 20 for place in range(1 + number % 4)] for number in range(11)]
RUN = TrainerConfig(mode="grpo", start_from=Path("model"), precision="float32")


# Losses on pairs.


def of_pairs(model: TransformerModel, objective: Any) -> list:
    batch = pair_batch(1, [2, 1], SEQ, SMALL.vocab_size, torch.float32)
    batch["margins"] = torch.rand(batch["targets"].shape, generator=torch.Generator().manual_seed(5))
    totals = accumulate_gradients(model, [batch], objective)
    return [*totals, {name: parameter.grad for name, parameter in model.named_parameters()}]


def preferring(config: DPOConfig) -> list:
    return of_pairs(TransformerModel(SMALL, seed=1), PreferenceObjective(config))


KTO = {"loss": "kto", "reference": "beside"}

DPO = Effects(DPOConfig, observe=preferring, rows={
    "loss": Differs("dpo", "ipo"),
    "beta": Differs(0.1, 0.2),
    "label_smoothing": Differs(0.0, 0.2),
    "per_token": Differs(False, True),
    "target_margin": Differs(0.0, 0.5, beside={"loss": "simpo"}),
    "sft_weight": Differs(0.0, 0.5),
    "desirable_weight": Differs(1.0, 1.5, beside=KTO),
    "undesirable_weight": Differs(1.0, 1.5, beside=KTO),
    "reference": Shown("trainer/test_preference_wiring.py::test_the_reference_is_the_first_model_whatever_the_policy_has_learned"),
})  # fmt: skip


def rewarding(config: RewardConfig) -> list:
    return of_pairs(as_reward_model(TransformerModel(SMALL, seed=1), seed=5), RewardObjective(config))


REWARD = Effects(RewardConfig, observe=rewarding, rows={"centering": Differs(0.0, 0.1), "margin_scale": Differs(1.0, 0.5)})


# Steps after rollouts.


def rare(samples: list) -> list[float]:
    """1 for some answers: in many groups all have the same."""
    return [float(sum(sample.completion.ids) % 3 == 0) for sample in samples]


def scripted(model: nn.Module, prompts: list, seeds: list[int], anyone: Any, log_prob: float = -3.0) -> list[Completion]:
    """Answers that depend on the seed alone, of 1 to 6 tokens."""
    found = []
    for seed in seeds:
        ids = [1 + (seed >> 5 * place) % 20 for place in range(1 + seed % 6)]
        found.append(Completion(ids, [log_prob] * len(ids), len(ids) < 6))
    return found


def rolled(kinds: tuple, config: PolicyConfig | TaskPolicyConfig, sampler: Any = scripted) -> list:
    """What is read in four steps, and the loss and the gradients of the first, whose answers the policy has since moved away from."""
    objective, advantages, loader, shaped = kinds
    model = shaped(TransformerModel(SMALL, seed=1))
    reference = TransformerModel(SMALL, seed=2)
    opened = loader(
        apply_parallel(model, Mesh(ParallelConfig(), SingleRankCommunicator()), None), PROMPTS, sampler=sampler, reward=rare, config=config,
        advantages=advantages(config), seq=16, micro_batch_size=64, reference=lambda batch: token_scores(reference, batch)[0],
    )  # fmt: skip
    steps = [(microbatches, dict(opened.metrics), opened.once) for microbatches, _ in zip(opened, range(4), strict=False)]
    [batch] = steps[0][0]
    moved = torch.rand(batch["targets"].shape, generator=torch.Generator().manual_seed(6)) - 0.5
    batch = {name: value + moved if name in ("old_log_probs", "old_values") else value for name, value in batch.items()}
    return [steps, accumulate_gradients(model, [batch], objective(config)), [parameter.grad for parameter in model.parameters()]]


OF_PPO = PPOObjective, PPOAdvantages, RolloutLoader, with_value_head
OF_GRPO = GRPOObjective, GRPOAdvantages, GroupLoader, lambda model: model


def sampler_of(config: PolicyConfig | TaskPolicyConfig) -> Any:
    """What the trainer draws answers with."""
    mode = SimpleNamespace(stops={3}, measured=SimpleNamespace(), console=None)
    strategy = SimpleNamespace(mesh=Mesh(ParallelConfig(), SingleRankCommunicator()), module=nn.Linear(1, 1))
    return Rolling.rollouts(mode, lambda strategy, **parts: parts["sampler"], RUN, strategy, config, False)


ROLLOUT = {
    "prompts": Differs(8, 4),
    "answers": Differs(2, 4),
    "new_tokens": Differs(6, 4, by=sampler_of),
    "temperature": Differs(0.8, 1.0),
    "rows": Differs(64, 32, by=sampler_of),
    "passes": Differs(2, 1),
    "minibatches": Differs(1, 2),
    "gather": Differs("once", "block"),
}
JUDGED = "trainer/test_preference_modes.py::test_a_policy_is_rewarded_for_prompt_and_answer_as_transformers_scores_them_padded"

POLICY = Effects(
    PolicyConfig, observe=partial(rolled, OF_PPO),
    base={"prompts": 8, "new_tokens": 6, "minibatches": 1, "kl_coefficient": 0.3, "temperature": 0.8},
    rows=ROLLOUT | {
        "answers": Differs(1, 2),
        "clip": Differs(0.2, 0.001),
        "value_clip": Differs(0.2, 0.001),
        "value_coefficient": Differs(0.1, 0.5),
        "gamma": Differs(1.0, 0.9),
        "lam": Differs(0.95, 0.5),
        "kl_coefficient": Differs(0.3, 0.1),
        "target_kl": Differs(None, 1.0),
        "kl_horizon": Differs(10_000, 100, beside={"target_kl": 1.0}),
        "unended_penalty": Differs(0.0, 0.5),
        "whiten": Differs(True, False),
        "reward": Shown(JUDGED),
        "reward_model": Shown(JUDGED),
        "reward_config": Shown("trainer/test_preference_starts.py::test_what_a_run_starts_from_is_trained_first_where_it_is_not_there"),
    },
)  # fmt: skip


class Passed(TaskPolicyOptimization):
    """The mode grpo, which passes on what is observed here and rolls nothing out."""

    stops = frozenset()

    def __init__(self, tasks: list[Task]):
        self.training, self.tokenizer, self.code = tasks, SimpleNamespace(decode=str), None

    def rollouts(self, kind: type, config: TrainerConfig, strategy: Any, sizes: Any, reference: bool, **parts: Any) -> list:
        reward = parts["reward"]
        return [reference, reward.weights, reward.failed, reward.own.seconds, parts["prompts"]]

    def prompts_of(self, tasks: list[Task]) -> list[str]:
        return [task.prompt for task in tasks]

    def check(self, tasks: list[Task], answers: list[str]) -> list[float]:
        return [1.0] * len(tasks)


class Asked:
    """Stands for the process that computes rewards."""

    def __init__(self, functions: dict[str, Any], seconds: float):
        self.functions, self.seconds = functions, seconds


def passed_on(config: TaskPolicyConfig) -> list:
    strategy = SimpleNamespace(mesh=SimpleNamespace(world=SingleRankCommunicator()))
    with patch.object(rewards, "RewardProcess", Asked):
        mode = Passed(open_tasks(config.tasks)[0])
        return mode.loaders(replace(RUN, grpo=config), strategy)[0]


def examined(config: TaskPolicyConfig) -> dict[int, float]:
    """pass@k of the held-out tasks."""
    training, held_out = open_tasks(config.tasks)
    mode = Passed(training)
    mode.tasks = held_out
    with patch.object(examination, "generated", lambda model, prompts, *_, **settings: [("", True) for _ in prompts]):
        return mode.examination(replace(RUN, grpo=config)).mean_pass_at_k(nn.Linear(1, 1))


KL = {"kl_coefficient": 0.3}
SUMS = TasksConfig(made=MadeTasks(kinds=("sum",), training=5), held_out=4)

TASK_POLICY = Effects(
    TaskPolicyConfig, observe=partial(rolled, OF_GRPO),
    base={"prompts": 8, "answers": 2, "new_tokens": 6, "importance_limit": 9.0, "passes": 2, "minibatches": 1, "temperature": 0.8}
    | {"tasks": SUMS},
    rows=ROLLOUT | {
        "clip_low": Differs(0.2, 0.0001),
        "clip_high": Differs(0.28, 0.0001),
        "level": Differs("token", "sequence", beside={"clip_low": 0.001, "clip_high": 0.001}),
        "scale": Differs("group", "none"),
        "aggregation": Differs("token", "sequence"),
        "kl_coefficient": Differs(0.0, 0.3),
        "kl_estimator": Differs("k3", "k1", beside=KL),
        "kl_in": Differs("loss", "reward", beside=KL),
        "kl_times_ratio": Differs(False, True, beside=KL),
        "mask_truncated": Differs(False, True),
        "overlong_tokens": Differs(2, 3, beside={"overlong_penalty": 0.5}),
        "overlong_penalty": Differs(0.5, 0.6, beside={"overlong_tokens": 2}),
        "rounds": Differs(1, 3),
        "importance_limit": Differs(9.0, 1.1, by=partial(rolled, OF_GRPO, sampler=partial(scripted, log_prob=-9.0))),
        "top_k": Differs(None, 3, by=sampler_of),
        "top_p": Differs(None, 0.8, by=sampler_of),
        "min_p": Differs(None, 0.1, by=sampler_of),
        "repetition_penalty": Differs(1.0, 1.2, by=sampler_of),
        "reference": Differs(True, False, by=passed_on),
        "tasks": Differs(SUMS, replace(SUMS, made=MadeTasks(kinds=("sum",), training=6)), by=passed_on),
        "rewards": Differs((RewardPart(),), (RewardPart(weight=2.0),), by=passed_on),
        "reward_seconds": Differs(5.0, 6.0, by=passed_on),
        "reward_failed": Differs(None, -1.0, by=passed_on),
        "held_out_answers": Differs(8, 4, by=examined),
    },
)  # fmt: skip


ALL = [DPO, REWARD, POLICY, TASK_POLICY]
