"""Stages 6 to 8 of build 12: log-probabilities by a training pass, a verifier, and advantages of a group."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case

from .pieces import (
    ALONE,
    PROMPTS,
    VOCABULARY,
    WITHIN,
    Attention,
    Recorded,
    Results,
    Rotary,
    Table,
    alone,
    budget,
    case,
    gradients_of,
    made,
    randn,
)

# Stage 6: score

ANSWERS = [[4, 0], [2, 7, 7, 1], [9], [0, 0, 0], [5, 3, 10, 8, 6]]


def score_case(title: str, make: Callable[[], Recorded], rows: list[int], temperature: float, **more: Any) -> Case:
    """rows: of PROMPTS and ANSWERS. The log-probabilities, and the gradients of a sum in which each counts differently."""
    prompts, answers = [PROMPTS[row] for row in rows], [ANSWERS[row] for row in rows]

    def results(model: Recorded, found: list[Tensor]) -> Results:
        sum((randn(len(each), seed=number).to(each.dtype) * each).sum() for number, each in enumerate(found)).backward()
        return {f"answer {number}": each.detach().clone() for number, each in enumerate(found)} | gradients_of(model)

    def expected() -> Results:
        model = make()
        return results(model, [alone(model, prompt, ids, temperature) for prompt, ids in zip(prompts, answers, strict=True)])

    def observe(adapters: Any) -> Results:
        model = make()
        return results(model, list(adapters.score(model, [list(p) for p in prompts], [list(a) for a in answers], temperature)))

    given = {"model": type(make()).__name__, "prompts": prompts, "answers": answers, "temperature": temperature}
    return case(title, given, expected, observe, ALONE, **more)


def worked_case() -> Case:
    """After every token the next one is 0, 1, 2 or 3 with probability 1/2, 1/4, 1/8 and 1/8: at temperature 1/2 squares of these."""
    rows = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 4, dtype=torch.float64).log()
    total = sum(each * each for each in (0.5, 0.25, 0.125, 0.125))

    def observe(adapters: Any) -> Results:
        model, found = Table(rows.clone()), {}
        for temperature in (1.0, 0.5):
            for number, each in enumerate(adapters.score(model, [[3], [1, 2]], [[0, 1, 2], [3]], temperature)):
                found[f"answer {number} at {temperature}"] = each.detach().exp()
        return found

    def expected() -> Results:
        found = {"answer 0 at 1.0": [0.5, 0.25, 0.125], "answer 1 at 1.0": [0.125]}
        found |= {"answer 0 at 0.5": [0.25 / total, 0.0625 / total, 0.015625 / total], "answer 1 at 0.5": [0.015625 / total]}
        return {name: torch.tensor(each, dtype=torch.float64) for name, each in found.items()}

    given = {"probabilities of tokens 0 to 3": [0.5, 0.25, 0.125, 0.125], "prompts": [[3], [1, 2]], "answers": [[0, 1, 2], [3]]}
    return case("probabilities", given, expected, observe, 6, rung="worked example")


NAN_AFTER, NOTHING_AFTER = 9, 10


class Poisoned(Table):
    """After two tokens of prompts the logits are NaN and -inf, but not where they predict an answer's token."""

    def __init__(self) -> None:
        rows = randn(VOCABULARY, VOCABULARY, seed=3)
        rows[NAN_AFTER], rows[NOTHING_AFTER] = float("nan"), float("-inf")
        super().__init__(rows)


def poisoned_case() -> Case:
    prompts, answers = [[NAN_AFTER, 8, NOTHING_AFTER, 1], [4], [NOTHING_AFTER, 2]], [[2, 6], [3, 3, 3, NAN_AFTER], [7]]

    def results(model: Recorded, found: list[Tensor]) -> Results:
        sum(each.sum() for each in found).backward()
        return {f"answer {number}": each.detach().clone() for number, each in enumerate(found)} | gradients_of(model)

    def expected() -> Results:
        """By the rows that are asked for alone."""
        model, found = Poisoned(), []
        for prompt, ids in zip(prompts, answers, strict=True):
            found.append(model.rows[[prompt[-1], *ids[:-1]]].log_softmax(-1)[range(len(ids)), ids])
        return results(model, found)

    observe = lambda adapters: results(model := Poisoned(), list(adapters.score(model, prompts, answers, 1.0)))  # noqa: E731
    given = {"prompts": prompts, "answers": answers, "NaN after": NAN_AFTER, "-inf after": NOTHING_AFTER}
    return case("logits that are NaN or -inf where nothing is scored", given, expected, observe, ALONE)


def recorded_case(title: str, kind: Callable[[], Recorded], temperature: float) -> Case:
    """What was recorded while answers were drawn is what a training pass says: the ratio of both is 1."""
    prompts = [PROMPTS[number % 5] for number in range(10)]

    def observe(adapters: Any) -> Results:
        model = made(kind)
        answers = adapters.sample(model, prompts, list(range(10)), 2, 6, temperature, 1.0)
        found = adapters.score(model, prompts, [list(ids) for ids, _ in answers], temperature)
        recorded = [torch.tensor(log_probs, dtype=torch.float64) for _, log_probs in answers]
        far = max((now.detach() - then).abs().max().item() for now, then in zip(found, recorded, strict=True))
        return {"largest log-ratio": WITHIN if far < 1e-9 else far}

    given = {"model": kind.__name__, "answers": 10, "temperature": temperature}
    return case(title, given, lambda: {"largest log-ratio": WITHIN}, observe, 6, rung="property")


def one_call_case() -> Case:
    def observe(adapters: Any) -> Results:
        model = made(Attention)
        adapters.score(model, PROMPTS, ANSWERS, 1.0)
        numbers = max(len(prompt) + len(ids) for prompt, ids in zip(PROMPTS, ANSWERS, strict=True)) * len(PROMPTS)
        found = {"calls": budget(len(model.calls), 1, "calls"), "numbers": budget(model.calls[0].ids.numel(), numbers, "numbers")}
        return found | {"gradients were recorded": model.calls[0].gradients}

    expected = lambda: {"calls": WITHIN, "numbers": WITHIN, "gradients were recorded": True}  # noqa: E731
    return case("one call", {"prompts": PROMPTS, "answers": ANSWERS}, expected, observe, 6, rung="budget")


SCORE = (
    worked_case(),
    score_case("one answer", lambda: made(Attention), [1], 1.0),
    score_case("answers of several lengths", lambda: made(Attention), [0, 1, 2, 3, 4], 1.0),
    score_case("a temperature", lambda: made(Attention), [4, 2, 0], 0.6),
    score_case("with rotated queries and keys", lambda: made(Rotary), [3, 1, 4], 1.7),
    score_case("a model in float32", lambda: made(Attention).float(), [0, 1, 2, 3, 4], 0.8, rtol=1e-4, atol=1e-5),
    poisoned_case(),
    recorded_case("what was recorded", Attention, 1.0),
    recorded_case("what was recorded, at a temperature", Rotary, 0.6),
    one_call_case(),
)

# Stage 7: reward

SIMPLE = {
    "It is <answer>12</answer>": 1.0,
    "<answer> 12 </answer>.": 1.0,
    "<answer>012</answer>": 1.0,
    "<answer>13</answer>": 0.1,
    "<answer>twelve</answer>": 0.1,
    "<answer></answer>": 0.1,
    "12": 0.0,
    "": 0.0,
    "<answer>12": 0.0,
    "</answer>12<answer>": 0.0,
}
HOSTILE = {
    "<answer>11</answer><answer>12</answer>": 0.0,
    "<answer>12</answer><answer>11</answer>": 0.0,
    "<answer><answer>12</answer></answer>": 0.0,
    "<answer>12</answer></answer>": 0.0,
    "</answer><answer>12</answer>": 0.0,
    "<answer>12<answer>": 0.0,
    "<ANSWER>12</ANSWER>": 0.0,
    "<answer>11 12</answer>": 0.1,
    "<answer>1 2</answer>": 0.1,
    "<answer>12 or 13</answer>": 0.1,
    "<answer>12.0</answer>": 0.1,
    "<answer>1_2</answer>": 0.1,
    "<answer>+12</answer>": 0.1,
    "<answer>- 12</answer>": 0.1,
    "<answer>--12</answer>": 0.1,
    "<answer>12\n</answer>": 0.1,
    "<answer>\t12</answer>": 0.1,
    "<answer>\u00a012</answer>": 0.1,
    "<answer>\u0661\u0662</answer>": 0.1,  # digits, but not ASCII ones
    "<answer>1\u00b2</answer>": 0.1,
    "<answer>6+6</answer>": 0.1,
    "<answer>__import__('os')._exit(0)</answer>": 0.1,
    f"<answer>{'0' * 18}12</answer>": 1.0,
    f"<answer>{'0' * 19}12</answer>": 0.1,
    f"<answer>{'9' * 5000}</answer>": 0.1,  # Python refuses to read so many digits
    f"<answer>{' ' * 3000}12{' ' * 3000}</answer>": 1.0,
    "<answer>" * 20000: 0.0,
    "\x00<answer>12</answer>\ud800": 1.0,
    "<answer>\x0012</answer>": 0.1,
}


def verify_case(title: str, texts: dict[str, float], expected: int, **more: Any) -> Case:
    short = lambda text: text if len(text) < 60 else f"{text[:20]}... ({len(text)} characters)"  # noqa: E731
    shown = {number: short(text) for number, text in enumerate(texts)}

    def observe(adapters: Any) -> Results:
        found = {}
        for number, text in enumerate(texts):
            try:
                found[f"{number}"] = float(adapters.verify(text, expected))
            except NotImplementedError:
                raise
            except Exception as error:
                found[f"{number}"] = f"{type(error).__name__}: {error}"
        return found

    given = {"expected": expected} | {f"text {number}": text for number, text in shown.items()}
    return case(title, given, lambda: {f"{number}": reward for number, reward in enumerate(texts.values())}, observe, 7, **more)


NEGATIVE = {f"<answer>{text}</answer>": reward for text, reward in {"-7": 1.0, "7": 0.1, "-07": 1.0, " -7": 1.0, "\u22127": 0.1}.items()}
ZERO = {f"<answer>{text}</answer>": reward for text, reward in {"0": 1.0, "-0": 1.0, "000": 1.0, "": 0.1, "-": 0.1, " ": 0.1}.items()}
LARGE = {f"<answer>{text}</answer>": reward for text, reward in {str(2**53 + 1): 1.0, str(2**53): 0.1, str(2**53 + 2): 0.1}.items()}

REWARD = (
    verify_case("texts that mean no harm", SIMPLE, 12, rung="worked example"),
    verify_case("texts that do", HOSTILE, 12, rung="property"),
    verify_case("negative numbers", NEGATIVE, -7, rung="property"),
    verify_case("zero", ZERO, 0, rung="property"),
    verify_case("a number that no float holds", LARGE, 2**53 + 1, rung="property"),
)

# Stage 8: advantages


def advantages_case(title: str, rewards: list[list[float]], scale: str, **more: Any) -> Case:
    def expected() -> Results:
        rows = []
        for group in rewards:
            deviation = statistics.stdev(group) + 1e-4 if scale == "group" else 1.0
            rows.append([0.0 if len(set(group)) == 1 else (each - statistics.fmean(group)) / deviation for each in group])
        return {"advantages": torch.tensor(rows, dtype=torch.float64), "rewards": "as they were"}

    def observe(adapters: Any) -> Results:
        given = torch.tensor(rewards, dtype=torch.float64)
        found = adapters.advantages(given, scale)
        kept = torch.equal(given, torch.tensor(rewards, dtype=torch.float64))
        return {"advantages": found, "rewards": "as they were" if kept else "changed"}

    given = {"rewards": rewards, "scale": scale}
    return case(title, given, expected, observe, "Python's statistics", **more)


def exactly_zero_case() -> Case:
    rewards = [[each] * 3 for each in (0.1, 0.7, 1e-3, -12.3, 0.0, 1e9)]

    def observe(adapters: Any) -> Results:
        found = {scale: adapters.advantages(torch.tensor(rewards, dtype=torch.float64), scale) for scale in ("group", "none")}
        return {f"largest, {scale}": each.abs().max().item() for scale, each in found.items()}

    expected = lambda: {"largest, group": 0.0, "largest, none": 0.0}  # noqa: E731
    return case("equal rewards", {"rewards": rewards}, expected, observe, 8, rung="property", rtol=0.0, atol=0.0)


LONG = randn(5, 8, seed=2).tolist()

ADVANTAGES = (
    advantages_case("two groups", [[1.0, 0.0], [4.0, 6.0]], "group", rung="worked example"),
    advantages_case("no deviation", [[1.0, 0.0], [4.0, 6.0]], "none", rung="worked example"),
    advantages_case("right and wrong", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 0.1, 0.1, 0.0]], "group"),
    advantages_case("many rewards", LONG, "group"),
    advantages_case("many rewards, no deviation", LONG, "none"),
    advantages_case("rewards that differ a little", [[1.0, 1.0001, 1.0], [5e-5, 0.0, 0.0]], "group"),
    exactly_zero_case(),
    advantages_case("a group that is equal beside one that is not", [[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]], "group"),
)
