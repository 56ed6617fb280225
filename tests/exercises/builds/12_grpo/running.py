"""Stage 11 of build 12: rollouts and updates, and what the model learns by them."""

import random
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from shared.course.checking import Case

from .pieces import (
    ALONE,
    PROMPTS,
    VOCABULARY,
    Attention,
    Recorded,
    Results,
    Rotary,
    Table,
    alone,
    case,
    likeliest,
    made,
    randn,
    settings_of,
    weights_of,
)
from .stepping import OPTIMIZERS, by_hand

SEVEN = [*PROMPTS, [6, 6], [9, 1, 1]]

Rollout = list[tuple[int, list[int]]]


class Noted(torch.optim.SGD):
    """An optimizer that notes its steps in the model's journal."""

    def __init__(self, model: Recorded, lr: float = 0.1):
        super().__init__(model.parameters(), lr=lr)
        self.journal = model.journal

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.journal.append("step")


def judge(number: int, ids: list[int]) -> float:
    """A reward of no meaning, with many values; all answers to prompt 1 have the same."""
    return 0.1 if number == 1 else (7 * sum(ids) + 3 * len(ids) + number) % 11 / 4


def noting(model: Recorded, reward: Callable[[int, list[int]], float] = judge) -> Callable[[int, list[int]], float]:
    """A reward that is noted in the model's journal, as (number, ids)."""

    def noted(number: int, ids: list[int]) -> float:
        model.journal.append((int(number), list(map(int, ids))))
        return reward(number, ids)

    return noted


def rollouts_in(journal: list[Any]) -> list[tuple[Rollout, int]]:
    """The answers of each rollout, and how many steps it had."""
    found: list[tuple[Rollout, int]] = []
    for noted in journal:
        if isinstance(noted, tuple):
            if not found or found[-1][1]:
                found.append(([], 0))
            found[-1][0].append(noted)
        elif noted == "step" and found:
            found[-1] = found[-1][0], found[-1][1] + 1
    return found


def rolled(
    adapters: Any, steps: tuple[int, ...], seed: int = 0, noise: int = 0, lr: float = 0.1, count: int = 7, **changes: Any
) -> list[tuple[Rollout, int]]:
    model = Table(randn(VOCABULARY, VOCABULARY, seed=1))
    torch.manual_seed(noise)
    random.seed(noise)
    run = adapters.start(model, Noted(model, lr), [list(each) for each in SEVEN[:count]], noting(model), settings_of(**changes), seed)
    for each in steps:
        adapters.advance(run, each)
    return rollouts_in(model.journal)


# Stage 11: train


def counts_case() -> Case:
    def observe(adapters: Any) -> Results:
        found = rolled(adapters, (14,), prompts=3, group=2)
        numbers, reached = [[number for number, _ in answers] for answers, _ in found], Counter()
        least = []
        for each in numbers:
            reached.update(each)
            least.append(min(reached[number] for number in range(7)) // 2)
        return {
            "answers of each rollout": [len(each) for each in numbers], "steps of each rollout": [steps for _, steps in found],
            "epochs that are done after each rollout": least, "answers to each prompt": [reached[number] for number in range(7)],
        }  # fmt: skip

    def expected() -> Results:
        found = {"answers of each rollout": [6] * 7, "steps of each rollout": [2] * 7}
        return found | {"epochs that are done after each rollout": [0, 0, 1, 1, 2, 2, 3], "answers to each prompt": [6] * 7}

    given = {"prompts": 7, "prompts of a rollout": 3, "group": 2, "updates": 2, "steps": 14}
    return case("every prompt in turn", given, expected, observe, 11, rung="property")


def order_case() -> Case:
    """The order follows from the seed and the epoch alone."""

    def order(adapters: Any, *steps: int, **more: Any) -> list[int]:
        return [answers[0][0] for answers, _ in rolled(adapters, steps, prompts=1, group=2, updates=1, **more)]

    def observe(adapters: Any) -> Results:
        first = order(adapters, 14, seed=5)
        return {
            "first epoch": sorted(first[:7]), "second epoch": sorted(first[7:]), "two orders": first[:7] != first[7:],
            "shuffled": first[:7] != list(range(7)),
            "the same in parts, at another learning rate": order(adapters, 3, 1, 10, seed=5, noise=9, lr=0.3) == first,
            "the same of seed 6": order(adapters, 14, seed=6) == first,
        }  # fmt: skip

    def expected() -> Results:
        same = {"the same in parts, at another learning rate": True, "the same of seed 6": False}
        return {"first epoch": [*range(7)], "second epoch": [*range(7)], "two orders": True, "shuffled": True} | same

    given = {"prompts": 7, "prompts of a rollout": 1, "updates": 1, "steps": 14, "seed": 5}
    return case("the order follows from the seed", given, expected, observe, 11, rung="property")


def answers_case() -> Case:
    """The weights stay as they are, so that answers differ by their seeds alone."""

    def observe(adapters: Any) -> Results:
        more = {"prompts": 7, "group": 4, "updates": 1, "lr": 0.0, "end": 99}
        first, again, other = (rolled(adapters, (3,), seed=seed, noise=seed, **more) for seed in (3, 3, 4))
        groups = [[ids for number, ids in answers if number == wanted] for answers, _ in first for wanted in range(7)]
        alike = sum(len(set(map(tuple, group))) == 1 for group in groups)
        sets = [sorted(map(str, answers)) for answers, _ in first]
        others = [sorted(map(str, answers)) for answers, _ in other]
        one = {str(answers) for answers, _ in rolled(adapters, (3,), count=1, **more | {"prompts": 1})}
        found = {"groups of equal answers": alike, "rollouts that are equal": 3 - len(set(map(str, sets)))}
        found |= {"the same seed draws the same": first == again, "another seed does": sets == others}
        return found | {"rollouts of one prompt that are equal": 3 - len(one)}

    def expected() -> Results:
        found = {"groups of equal answers": 0, "rollouts that are equal": 0, "rollouts of one prompt that are equal": 0}
        return found | {"the same seed draws the same": True, "another seed does": False}

    given = {"prompts": 7, "group": 4, "rollouts": 3, "learning rate": 0}
    return case("answers follow from the seed", given, expected, observe, 11, rung="property")


def rollout_by_hand(model: Recorded, optimizer: torch.optim.Optimizer, answers: Rollout, settings: Results) -> list[Results]:
    """All steps of a rollout whose answers are given. Log-probabilities are computed before the first."""
    groups = {number: [judge(number, ids) for other, ids in answers if other == number] for number, _ in answers}
    experiences, flat = [], 0
    for number, ids in answers:
        deviation = statistics.stdev(groups[number]) + 1e-4 if settings["scale"] == "group" else 1
        advantage = (judge(number, ids) - statistics.fmean(groups[number])) / deviation
        advantage *= len(set(groups[number])) > 1
        old = alone(model, SEVEN[number], ids, settings["temperature"]).tolist()
        experiences.append((SEVEN[number], ids, old, advantage))
    flat = sum(len(set(group)) == 1 for group in groups.values()) / len(groups)
    mean = statistics.fmean(judge(number, ids) for number, ids in answers)
    return [{"loss": by_hand(model, optimizer, experiences, settings), "reward": mean, "flat": flat} for _ in range(settings["updates"])]


def whole_case(title: str, steps: int, optimizer: str = "SGD", kind: Callable[[], Recorded] = Attention, **changes: Any) -> Case:
    """The answers that the reward saw, and from them everything else by hand."""
    settings = settings_of(prompts=4, **changes)

    def observe(adapters: Any) -> Results:
        model, other = made(kind), made(kind)
        own, theirs = (OPTIMIZERS[optimizer](list(each.parameters())) for each in (model, other))
        rollouts: list[Rollout] = []

        def reward(number: int, ids: list[int]) -> float:
            if not rollouts or len(rollouts[-1]) == 4 * settings["group"]:
                rollouts.append([])
            rollouts[-1].append((int(number), list(map(int, ids))))
            return judge(number, ids)

        found = adapters.advance(adapters.start(model, own, SEVEN[:4], reward, dict(settings), 2), steps)
        wanted = [step for answers in rollouts for step in rollout_by_hand(other, theirs, answers, settings)]
        far = {name: max(abs(float(a[name]) - b[name]) for a, b in zip(found, wanted, strict=True)) for name in ("loss", "reward", "flat")}
        far["weights"] = max((weight - weights_of(other)[name]).abs().max().item() for name, weight in weights_of(model).items())
        return {name: "as they should be" if each < 1e-9 else f"off by {each:.3g}" for name, each in far.items()}

    expected = lambda: dict.fromkeys(("loss", "reward", "flat", "weights"), "as they should be")  # noqa: E731
    given = {"model": kind.__name__, "prompts": SEVEN[:4], "steps": steps, "optimizer": optimizer} | settings
    return case(title, given, expected, observe, ALONE)


PAIRS = random.Random(3).sample([[a, b] for a in range(1, 8) for b in range(1, 8) if a != b], 42)


def points(prompt: list[int], ids: list[int]) -> float:
    """The right answer is the second token again, then the end: half of it for the token."""
    return 0.5 * (ids[:1] == prompt[1:]) + 0.5 * (ids == [prompt[1], 0])


def learner() -> Recorded:
    """Small weights, by which all tokens are nearly as likely."""
    model = made(lambda: Attention(features=24))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.2)
    return model


def learns_case(title: str, informed: bool) -> Case:
    """28 prompts, and 14 others that are never seen: the reward of their likeliest answers. The control's reward is a coin."""
    settings, steps = settings_of(prompts=14, group=12, micro_size=200, limit=3, temperature=1.0), 100 if informed else 50
    wanted = "from below 0.15 to above 0.45" if informed else "stays below 0.3"

    def observe(adapters: Any) -> Results:
        model, coin = learner(), random.Random(1)
        judged = lambda: statistics.fmean(points(prompt, likeliest(model, prompt, 0, 3)) for prompt in PAIRS[28:])  # noqa: E731
        reward = lambda number, ids: points(PAIRS[number], ids) if informed else float(coin.random() < 0.5)  # noqa: E731
        before, optimizer = judged(), torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
        adapters.advance(adapters.start(model, optimizer, PAIRS[:28], reward, settings, 0), steps)
        after = judged()
        fine = before < 0.15 and after > 0.45 if informed else after < 0.3
        return {"reward of prompts never seen": wanted if fine else f"from {before:.2f} to {after:.2f}"}

    given = {"prompts": "two tokens", "right": "the second one, then the end", "reward": "exact" if informed else "a coin", "steps": steps}
    return case(title, given, lambda: {"reward of prompts never seen": wanted}, observe, 11, rung="property")


TRAIN = (
    counts_case(),
    order_case(),
    answers_case(),
    whole_case("one rollout, one step", 1, updates=1),
    whole_case("two rollouts of two steps", 4),
    whole_case("old log-probabilities stay", 6, updates=3, group=2, clip_low=0.02, clip_high=0.03),
    whole_case("AdamW, with rotated queries and keys", 4, "AdamW", Rotary, temperature=1.3, micro_size=5),
    whole_case("no deviation and a constant", 4, scale="none", aggregation="constant"),
    whole_case("ratios of answers", 4, level="sequence", aggregation="sequence", clip_low=0.01, clip_high=0.02),
    learns_case("it learns", informed=True),
    learns_case("it learns nothing from a coin", informed=False),
)
