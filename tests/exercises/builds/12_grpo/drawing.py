"""Stages 3 and 4 of build 12: drawing a token, and whole answers with seeds of their own."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    case,
    distribution,
    likeliest,
    made,
    next_logits,
    randn,
)

LOOP = "a loop over tokens, in float64"

# Stage 3: draw


def by_loop(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> Results:
    tokens, log_probs = [], []
    for row, place in zip(logits, uniform.tolist(), strict=True):
        probabilities = distribution(row, temperature, top_p)
        kept = [token for token, probability in enumerate(probabilities) if probability > 0]
        reached = itertools.accumulate(probabilities[token] for token in kept)
        tokens.append(next((token for token, each in zip(kept, reached, strict=True) if each > place), kept[-1]))
        log_probs.append(math.log(probabilities[tokens[-1]]))
    return {"tokens": torch.tensor(tokens), "log-probabilities": torch.tensor(log_probs, dtype=torch.float64)}


def draw_case(title: str, logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_p: float = 1.0, **more: Any) -> Case:
    def observe(adapters: Any) -> Results:
        given = logits.clone()
        tokens, log_probs = adapters.draw(given, uniform.clone(), temperature, top_p)
        return {"tokens": tokens, "log-probabilities": log_probs, "logits": "as they were" if torch.equal(given, logits) else "changed"}

    expected = lambda: by_loop(logits, uniform, temperature, top_p) | {"logits": "as they were"}  # noqa: E731
    given = {"logits": logits, "uniform": uniform, "temperature": temperature, "top_p": top_p}
    return case(title, given, expected, observe, LOOP, **more)


def uniforms(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_probabilities(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


LAST = 1 - 2**-53  # the largest number below 1
EASY = of_probabilities(*[[0.5, 0.3, 0.2]] * 4)
PLACES = torch.tensor([0.0, 0.49, 0.51, 0.81], dtype=torch.float64)
HOLES = randn(6, 9, seed=3).masked_fill(torch.arange(9) % 3 == 0, -torch.inf)

DRAW = (
    draw_case("three tokens", EASY, PLACES, rung="worked example"),
    draw_case("two of them are kept", EASY, PLACES, top_p=0.7, rung="worked example"),
    draw_case("many rows", 2 * randn(40, 9), uniforms(40)),
    draw_case("a temperature below 1", 2 * randn(40, 9), uniforms(40), 0.5),
    draw_case("a temperature above 1", 2 * randn(40, 9), uniforms(40), 1.7),
    draw_case("top-p", 2 * randn(40, 9), uniforms(40), top_p=0.8),
    draw_case("top-p of what the temperature has made", 2 * randn(40, 9), uniforms(40), 1.6, 0.75),
    draw_case("top-p keeps one token at least", 2 * randn(20, 9), uniforms(20), top_p=0.01),
    draw_case("equally likely tokens", torch.zeros(5, 7, dtype=torch.float64), uniforms(5), top_p=0.5),
    draw_case("the likeliest, and of equal ones the first", torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), uniforms(2), 0.0),
    draw_case("tokens that may not be drawn", HOLES, uniforms(6), 0.9, 0.95),
    draw_case("both ends", HOLES.repeat(2, 1), torch.tensor([0.0, LAST] * 6, dtype=torch.float64)),
    draw_case("a large logit, a small temperature", 1e4 * randn(6, 9), uniforms(6), 1e-3),
    draw_case("logits in float32", (3 * randn(30, 9)).float(), uniforms(30), 0.7, 0.9),
    draw_case("logits in bfloat16", (3 * randn(30, 9)).bfloat16(), uniforms(30), 1.2),
    draw_case("shifted logits", 2 * randn(20, 9) + 3000, uniforms(20), 0.5),
)  # fmt: skip

# Stage 4: sample

SAMPLED = {"end": 2, "limit": 7, "temperature": 1.3, "top_p": 0.9}
EIGHT = [PROMPTS[number % 5] for number in range(8)]


def recorded_case(title: str, make: Callable[[], Recorded], prompts: list[list[int]], **changes: Any) -> Case:
    """The log-probabilities of what was drawn, each computed again from the beginning, and where answers end."""
    settings = SAMPLED | changes
    seeds = [11 * number + 3 for number in range(len(prompts))]

    def observe(adapters: Any) -> Results:
        model, found, ends = make(), {}, True
        for number, (ids, log_probs) in enumerate(adapters.sample(model, [list(each) for each in prompts], seeds, *settings.values())):
            wanted = []
            for place, token in enumerate(ids):
                row = distribution(next_logits(model, prompts[number] + list(ids[:place])), settings["temperature"], settings["top_p"])
                wanted.append(math.log(row[token]) if row[token] > 0 else -math.inf)
            far = max((abs(a - b) for a, b in zip(log_probs, wanted, strict=True)), default=math.inf)
            found[f"log-probabilities of answer {number}"] = "as they should be" if far < 1e-9 else f"off by {far:.3g}"
            ends &= settings["end"] not in ids[:-1] and (ids[-1] == settings["end"] or len(ids) == settings["limit"])
        return found | {"answers end where they should": ends}

    def expected() -> Results:
        names = [f"log-probabilities of answer {number}" for number in range(len(prompts))]
        return dict.fromkeys(names, "as they should be") | {"answers end where they should": True}

    return case(title, {"model": type(make()).__name__, "prompts": prompts, **settings}, expected, observe, ALONE)


def neighbours_case() -> Case:
    """The same prompts and seeds: alone, in another order, and with other states of the global generators, which stay as they were."""
    seeds = [70, 71, 72, 5, 2**60, 0, 8, 9]

    def observe(adapters: Any) -> Results:
        model = made(Attention)
        ids = lambda some, own: [list(each) for each, _ in adapters.sample(model, some, own, *SAMPLED.values())]  # noqa: E731
        whole = ids(EIGHT, seeds)
        torch.manual_seed(1)
        random.seed(1)
        states = torch.get_rng_state(), random.getstate()
        backwards = ids(EIGHT[::-1], seeds[::-1])[::-1]
        kept = torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
        one_by_one = [ids([prompt], [seed])[0] for prompt, seed in zip(EIGHT, seeds, strict=True)]
        others = ids(EIGHT, [seed + 1000 for seed in seeds])
        return {
            "in another order": backwards == whole, "each alone": one_by_one == whole, "of other seeds": others == whole,
            "global generators are as they were": kept,
        }  # fmt: skip

    expected = lambda: {  # noqa: E731
        "in another order": True, "each alone": True, "of other seeds": False, "global generators are as they were": True,
    }  # fmt: skip
    return case("an answer follows from its seed", {"prompts": EIGHT, "seeds": seeds, **SAMPLED}, expected, observe, 4, rung="property")


SMALL = {"end": 0, "limit": 3, "temperature": 0.8, "top_p": 0.9}


def small() -> Table:
    return Table(randn(3, 3, seed=6))


def enumerated() -> dict[str, float]:
    """All answers of the small model, with their probabilities."""
    found, open_ = {}, {(): 1.0}
    for _ in range(SMALL["limit"]):
        longer = {}
        for ids, reached in open_.items():
            for token, each in enumerate(distribution(next_logits(small(), [1, *ids]), SMALL["temperature"], SMALL["top_p"])):
                whole = token == SMALL["end"] or len(ids) + 1 == SMALL["limit"]
                (found if whole else longer)[(*ids, token)] = reached * each
        open_ = longer
    return {str(list(ids)): each for ids, each in found.items() if each > 0}


def frequencies_case(title: str, neighbours: bool, count: int = 1500) -> Case:
    """How often answers, or pairs of answers whose seeds are neighbours, are drawn: within five deviations of what was to be expected."""

    def observe(adapters: Any) -> Results:
        drawn = [str(list(ids)) for ids, _ in adapters.sample(small(), [[1]] * count, list(range(count)), *SMALL.values())]
        singles = enumerated()
        wanted = {f"{a}, then {b}": singles[a] * singles[b] for a in singles for b in singles} if neighbours else singles
        drawn = [f"{a}, then {b}" for a, b in zip(drawn[::2], drawn[1::2], strict=True)] if neighbours else drawn
        off = {name: abs(drawn.count(name) - len(drawn) * p) / math.sqrt(len(drawn) * p * (1 - p)) for name, p in wanted.items()}
        far = [f"{name}: {drawn.count(name)} of {len(drawn)}, where {len(drawn) * wanted[name]:.0f} were to be expected"
               for name in wanted if off[name] > 5 and abs(drawn.count(name) - len(drawn) * wanted[name]) > 5]  # fmt: skip
        return {"how often": (far or ["as was to be expected"])[0], "others": len(set(drawn) - set(wanted))}

    expected = lambda: {"how often": "as was to be expected", "others": 0}  # noqa: E731
    given = {"model": "3 tokens", "prompt": [1], "seeds": f"0 to {count - 1}", **SMALL}
    return case(title, given, expected, observe, "enumeration: all answers of a model with three tokens", rung="property")


def without_chance_case() -> Case:
    def observe(adapters: Any) -> Results:
        answers = adapters.sample(made(Rotary), PROMPTS, [1] * 5, 3, 6, 0.0, 1.0)
        return {"answers": [list(map(int, ids)) for ids, _ in answers], "log-probabilities": sum(sum(each) for _, each in answers)}

    expected = lambda: {"answers": [likeliest(made(Rotary), prompt, 3, 6) for prompt in PROMPTS], "log-probabilities": 0.0}  # noqa: E731
    return case("temperature 0", {"prompts": PROMPTS, "end": 3, "limit": 6}, expected, observe, ALONE)


def calls_case() -> Case:
    def observe(adapters: Any) -> Results:
        model = made(Attention)
        answers = adapters.sample(model, EIGHT, list(range(8)), *SAMPLED.values())
        lengths = [len(ids) for ids, _ in answers]
        rows = [[8, 5], *([sum(length > step for length in lengths), 1] for step in range(1, max(lengths)))]
        fine = [list(call.ids.shape) for call in model.calls] == rows
        return {"rows and columns of the calls": "as for `greedy`" if fine else [list(call.ids.shape) for call in model.calls],
                "gradients were recorded": any(call.gradients for call in model.calls)}  # fmt: skip

    expected = lambda: {"rows and columns of the calls": "as for `greedy`", "gradients were recorded": False}  # noqa: E731
    return case("the same calls", {"prompts": EIGHT, **SAMPLED}, expected, observe, 4, rung="budget")


SAMPLE = (
    recorded_case("one answer", lambda: made(Attention), PROMPTS[:1], top_p=1.0, temperature=1.0),
    recorded_case("a temperature", lambda: made(Attention), EIGHT, top_p=1.0),
    recorded_case("a temperature and top-p", lambda: made(Attention), EIGHT),
    recorded_case("with rotated queries and keys", lambda: made(Rotary), EIGHT, temperature=0.7),
    recorded_case("a limit of one token", lambda: Table(randn(VOCABULARY, VOCABULARY, seed=8)), EIGHT, end=1, limit=1),
    without_chance_case(),
    neighbours_case(),
    frequencies_case("how often each answer comes", neighbours=False),
    frequencies_case("how often two answers come one after the other", neighbours=True),
    calls_case(),
)
