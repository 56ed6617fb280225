"""PPO from a fine-tuned start: what it gains, what it breaks. A table of several seeds, and gold against proxy reward over the KL distance.

    python chapters/11_preferences/ppo_study.py                       seven runs from each of three seeds
    python chapters/11_preferences/ppo_study.py --seeds 1 --rollouts 3          ends within a minute and shows only that it runs

The task is to put four letters in order: `dbca>` wants `abcd.`, with nothing after it. A small model is fine-tuned on demonstrations, and
most of them hold a mistake. The gold reward of an answer, which no reward model sees, is the share of letters at their places, less a
tenth for each letter too many. Reward models learn from pairs of the fine-tuned model's answers. Interrupt it and start it again: it
continues.
"""

import copy
import functools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chapters.letters_task import END, NEW_TOKENS, SEQ, VOCAB_SIZE
from chapters.letters_task import demonstration, gold_of, gold_reward, letters_right, long_of, prompt_of, written
from shared.course.launch import launch

MODEL = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 32, "initializer_range": 0.08,
}  # fmt: skip
GOLD, PROXY, KL, LENGTH, RIGHT = "gold reward", "proxy reward", "KL to the start, nats", "tokens of an answer", "letters right, %"
VARIANTS: dict[str, dict[str, Any]] = {
    "gold reward": {"reward": "gold"},
    "gold reward, values stay 0": {"reward": "gold", "value_coefficient": 0.0},
    "gold reward, values stay random": {"reward": "gold", "value_coefficient": 0.0, "value_spread": 0.3},
    "reward model, 2000 pairs": {"reward": "model", "pairs": 2000},
    "reward model, 100 pairs": {"reward": "model", "pairs": 100},
    "reward model, 100 pairs, KL 0.1": {"reward": "model", "pairs": 100, "kl_coefficient": 0.1},
    "a judge that likes length": {"reward": "long"},
}


@dataclass
class StudyConfig:
    """Train one fine-tuned policy with PPO towards several rewards.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        seeds: runs of each kind; a seed sets weights, demonstrations, pairs and answers.
        sft_steps: of the fine-tuning, of 64 demonstrations each.
        reward_steps: of a reward model, of up to 64 pairs each.
        rollouts: of each PPO run, of 64 answers and four updates each.
        learning_rate: AdamW's, of PPO.
        output: folder for results and plots.
    """

    impl: Literal["reference", "mine", "mixed"] = "reference"
    seeds: int = 3
    sft_steps: int = 300
    reward_steps: int = 200
    rollouts: int = 50
    learning_rate: float = 0.001
    output: Path = Path("runs/11_ppo_study")


def run(config: StudyConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from chapters import trials
    from shared.course.errors import CourseError
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable

    for name in ("seeds", "sft_steps", "reward_steps", "rollouts"):
        if getattr(config, name) < 1:
            raise CourseError(f"{name} is {getattr(config, name)}: give at least 1.")
    require_writable(config.output)
    keep_freed_memory()
    console = Console(markup=False, emoji=False)
    common = {name: getattr(config, name) for name in ("sft_steps", "reward_steps", "rollouts", "learning_rate")}
    variants = {name: variant | common for name, variant in VARIANTS.items()}
    try:
        results = trials.run_trials(variants, functools.partial(trial, config.output), config.seeds, config.output / "study.json", console)
    except ValueError as error:
        raise CourseError(str(error)) from None
    trials.print_results(console, f"PPO: {config.rollouts} rollouts, {config.seeds} seeds", results)
    draw_curves(config.output, variants, config.seeds)
    console.print(f"Plots: {config.output / 'overoptimisation.png'}, {config.output / 'rewards.png'}", highlight=False)


# What PPO starts from.


def fit(model: Any, data: Any, objective: Any, steps: int, rate: float) -> None:
    from shared.loop import train
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig
    from shared.optim.updater import Update

    for _ in train(model, build_optimizer(model, OptimizerConfig("adamw", lr=rate)), data, objective, steps=steps, updater=Update(1.0)):
        pass
    model.eval()


@functools.cache
def fine_tuned(steps: int, seed: int) -> Any:
    """The policy that imitates demonstrations."""
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.model.config import ModelConfig
    from shared.model.transformer import TransformerModel
    from shared.preference.rollout import AnswerRows, Sample
    from shared.preference.sampler import Completion

    draw = random.Random(seed)
    model = TransformerModel(ModelConfig(**MODEL), seed=seed)

    def batches():
        while True:
            prompts = [prompt_of(draw) for _ in range(64)]
            answers = [Completion(demonstration(draw, prompt), [], True) for prompt in prompts]
            yield [AnswerRows([Sample(0, *each) for each in zip(prompts, answers, strict=True)], 2 * SEQ, 1).batch]

    fit(model, batches(), packed_next_token_objective, steps, 0.003)
    return model


def answers_of(policy: Any, prompts: Sequence[list[int]], seed: int) -> list[Any]:
    from shared.model.init import stream_seed
    from shared.preference.sampler import PlainSampler

    seeds = [stream_seed(f"sample {number}", seed) for number in range(len(prompts))]
    return PlainSampler(NEW_TOKENS, {END}, rows=256)(policy, prompts, seeds, bool)


@functools.cache
def reward_model(pairs: int, steps: int, sft_steps: int, seed: int) -> tuple[Any, float, float]:
    """A reward model that has learned from pairs of the fine-tuned policy's answers, labelled by the gold reward; and the mean and the
    deviation of its rewards over such answers."""
    import torch

    from shared.data.packing import pack_documents
    from shared.data.rows import stack_rows
    from shared.preference.reward_model import RewardObjective, as_reward_model, score

    policy, draw = fine_tuned(sft_steps, seed), random.Random(1000 + seed)
    model = as_reward_model(copy.deepcopy(policy), seed=seed)
    model.train()
    prompts = [prompt_of(draw) for _ in range(pairs)]
    first, second = (answers_of(policy, prompts, 2 * seed + number + 1) for number in range(2))
    labelled = []
    for prompt, *answers in zip(prompts, first, second, strict=True):
        worse, better = sorted(answers, key=lambda answer: gold_reward(prompt, written(answer)))
        if gold_reward(prompt, written(better)) > gold_reward(prompt, written(worse)):
            labelled.append((prompt + better.ids, prompt + worse.ids))

    def batches():
        while True:
            chosen = draw.sample(labelled, min(64, len(labelled)))
            whole = [[torch.tensor([*sequence, 0]) for sequence in pair] for pair in chosen]  # so that each last token is an input as well
            yield [stack_rows([pack_documents(pair, 2 * SEQ) for pair in whole])]

    fit(model, batches(), RewardObjective(), steps, 0.001)
    fresh = [prompt_of(draw) for _ in range(512)]
    rewards = torch.tensor(score(model, [p + a.ids for p, a in zip(fresh, answers_of(policy, fresh, 99 + seed), strict=True)], 256))
    return model, rewards.mean().item(), rewards.std().item()


# PPO.


def trial(output: Path, settings: dict[str, Any], seed: int) -> dict[str, float | None]:
    """Train with PPO, and keep the curves beside the figures."""
    import torch

    from shared.loop import train
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig
    from shared.optim.updater import Update
    from shared.output_files import write_atomically
    from shared.parallel.comm.communicator import SingleRankCommunicator
    from shared.parallel.config import ParallelConfig
    from shared.parallel.mesh import Mesh
    from shared.parallel.parallelize import apply_parallel
    from shared.preference.ppo import PPOAdvantages, PPOConfig, PPOObjective
    from shared.preference.reward_model import score
    from shared.preference.rollouts import RolloutLoader
    from shared.preference.sampler import PlainSampler
    from shared.preference.value_head import token_scores, with_value_head

    start = fine_tuned(settings["sft_steps"], seed)
    mine = {name: settings[name] for name in ("value_coefficient", "kl_coefficient") if name in settings}
    ppo = PPOConfig(prompts=64, new_tokens=NEW_TOKENS, passes=2, minibatches=2, **{"kl_coefficient": 0.0, "value_coefficient": 0.5} | mine)
    if settings["reward"] == "model":
        model, mean, deviation = reward_model(settings["pairs"], settings["reward_steps"], settings["sft_steps"], seed)

        def reward(samples: Sequence[Any]) -> list[float]:
            found = score(model, [[*each.prompt_ids, *each.completion.ids] for each in samples], 256)
            return [(each - mean) / deviation for each in found]
    else:
        reward = {"gold": gold_of, "long": long_of}[settings["reward"]]
    curve: list[dict[str, float]] = []

    def watched(samples: Sequence[Any]) -> list[float]:
        gold = gold_of(samples)
        right = [letters_right(each.prompt_ids, written(each.completion)) for each in samples]
        curve.append({GOLD: sum(gold) / len(gold), RIGHT: 100 * sum(right) / len(right)})
        return reward(samples)

    draw = random.Random(2000 + seed)
    optimizer = OptimizerConfig("adamw", lr=settings["learning_rate"])
    policy = with_value_head(copy.deepcopy(start))
    if "value_spread" in settings:
        torch.nn.init.normal_(policy.head.value.weight, 0.0, settings["value_spread"], torch.Generator().manual_seed(seed))
    strategy = apply_parallel(policy, Mesh(ParallelConfig(), SingleRankCommunicator()), optimizer)
    loader = RolloutLoader(
        strategy, [prompt_of(draw) for _ in range(4096)], sampler=PlainSampler(NEW_TOKENS, {END}), reward=watched, config=ppo,
        advantages=PPOAdvantages(ppo), seq=2 * SEQ, micro_batch_size=64, seed=seed, reference=lambda batch: token_scores(start, batch)[0],
    )  # fmt: skip
    steps, began = settings["rollouts"] * ppo.passes * ppo.minibatches, time.perf_counter()
    made = build_optimizer(strategy.optim_params, optimizer, strategy.routes)
    for step, _ in train(strategy.model, made, loader, PPOObjective(ppo), steps=steps, updater=Update(1.0)):
        if (step - 1) % (ppo.passes * ppo.minibatches) == 0:
            names = {"reward": PROXY, "kl_to_reference": KL, "answer_tokens": LENGTH}
            curve[-1] |= {named: loader.metrics[name] for name, named in names.items()}
    write_atomically(curve_file(output, settings, seed), json.dumps(curve).encode())
    last = curve[-10:]
    mean_of = lambda name, points=last: sum(point[name] for point in points) / len(points)
    smooth = [mean_of(GOLD, curve[first : first + 5]) for first in range(max(1, len(curve) - 4))]
    return {
        f"{GOLD} before": curve[0][GOLD],
        f"{GOLD}, best": max(smooth),
        f"{GOLD} after": mean_of(GOLD),
        RIGHT: mean_of(RIGHT),
        LENGTH: mean_of(LENGTH),
        KL: mean_of(KL),
        "seconds": time.perf_counter() - began,
    }


def curve_file(output: Path, settings: dict[str, Any], seed: int) -> Path:
    named = "-".join(str(value) for name, value in sorted(settings.items()))
    return output / f"curve-{named}-seed{seed}.json"


def draw_curves(output: Path, variants: dict[str, dict[str, Any]], seeds: int) -> None:
    """Gold and proxy over the root of the KL distance, and the gold reward over rollouts."""
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    curves = {
        name: [json.loads(curve_file(output, settings, seed).read_text()) for seed in range(seeds)] for name, settings in variants.items()
    }
    drawing = Figure(figsize=(10, 3.4))
    models = [name for name in variants if name.startswith("reward model")]
    for axes, name in zip(drawing.subplots(1, len(models), sharey=True), models, strict=True):
        for number, curve in enumerate(curves[name]):
            across = [max(0.0, point[KL]) ** 0.5 for point in curve]
            for what, color in ((PROXY, figures.WRONG), (GOLD, figures.TRAINING)):
                axes.plot(across, [point[what] for point in curve], ".", color=color, alpha=0.5, label=what if number == 0 else None)
        axes.set(title=name, xlabel="root of the KL distance")
    drawing.axes[0].legend()
    drawing.savefig(output / "overoptimisation.png")
    drawing = Figure(figsize=(9, 3.6))
    axes = drawing.subplots()
    for (name, some), color in zip(curves.items(), figures.sequence_colors(len(curves)), strict=True):
        means = [sum(curve[place][GOLD] for curve in some) / len(some) for place in range(len(some[0]))]
        axes.plot(means, color=color, label=name)
    axes.set(xlabel="rollout", ylabel=GOLD)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawing.savefig(output / "rewards.png")


if __name__ == "__main__":
    launch(run, StudyConfig, Path(__file__).with_name("ppo_study.yaml"))
