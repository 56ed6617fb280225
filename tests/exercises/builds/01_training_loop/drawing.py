"""Stage 6 of build 01: text drawn from a model."""

import math

from typing import Any

import torch

from shared.course.checking import Case

from .pieces import TEXT, Averages, Recorded, Results, Table, gradients_of, made, modes_of, weights_of

SAYS = TEXT.format(6)
DRAWS = 250


def same_row(logits: dict[int, float]) -> Recorded:
    """A table in which every byte is followed by the same few, with these logits, the others by none."""
    row = torch.full((256,), float("-inf"), dtype=torch.float64)
    for byte, value in logits.items():
        row[byte] = value
    return Table(row.repeat(256, 1))


def share_case(title: str, logits: dict[int, float], temperature: float, top_k: int | None, shares: dict[int, float]) -> Case:
    """250 bytes: each share within six standard deviations of the right one. A share of 0 or 1 must be met."""

    def observe(adapters: Any, **_: Any) -> Results:
        drawn = adapters.sample(same_row(logits), b"a", DRAWS, temperature, top_k, 11, 4)
        found = {}
        for byte, share in shares.items():
            about, got = f"about {share:.2f}", drawn.count(byte) / max(1, len(drawn))
            near = abs(got - share) <= 6 * math.sqrt(share * (1 - share) / DRAWS) + 1e-9
            found[f"share of byte {byte}"] = about if near else f"{got:.2f}"
        return {"bytes": len(drawn)} | found

    expected = {"bytes": DRAWS} | {f"share of byte {byte}": f"about {share:.2f}" for byte, share in shares.items()}
    given = {"logits by byte": logits, "temperature": temperature, "top_k": top_k, "bytes drawn": DRAWS}
    return Case("worked example", title, lambda: given, lambda **_: expected, "arithmetic", observe)


def kinds_case(title: str, logits: dict[int, float], temperature: float, top_k: int | None, kinds: int) -> Case:
    """How many different bytes are drawn: where several are equally likely, any of them."""

    def observe(adapters: Any, **_: Any) -> Results:
        return {"different bytes": len(set(adapters.sample(same_row(logits), b"a", 60, temperature, top_k, 5, 4)))}

    given = {"logits by byte": logits, "temperature": temperature, "top_k": top_k, "bytes drawn": 60}
    return Case("property", title, lambda: given, lambda **_: {"different bytes": kinds}, SAYS, observe)


def greedy_case(title: str, prompt: bytes, count: int, context: int) -> Case:
    """At temperature 0, against the model asked again and again. The model sees all of its context."""

    def expected(**_: Any) -> Results:
        model, ids = made(Averages).eval(), list(prompt) or [0]
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids[-context:]]))[0, -1].argmax()))
        return {"bytes": ids[-count:] if count else []}

    observe = lambda adapters, **_: {"bytes": list(adapters.sample(made(Averages), prompt, count, 0.0, None, 0, context))}  # noqa: E731
    given = {"prompt": list(prompt), "count": count, "context": context}
    return Case("oracle", title, lambda: given, expected, "the model's likeliest byte, one at a time", observe)


def shown_case(title: str, prompt: bytes, context: int, lengths: list[int]) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Averages)
        drawn = adapters.sample(model, prompt, len(lengths), 1.0, None, 3, context)
        found = {"ids of each call": [list(call.ids.shape) for call in model.calls], "is bytes": type(drawn) is bytes}
        text = (list(prompt) or [0]) + list(drawn)
        begun = len(text) - len(lengths)
        shown = [call.ids[0].tolist() == text[max(0, begun + n - context) : begun + n] for n, call in enumerate(model.calls)]
        return found | {"each shows the last bytes": shown}

    expected = {"ids of each call": [[1, length] for length in lengths], "is bytes": True}
    expected |= {"each shows the last bytes": [True] * len(lengths)}
    given = {"prompt": list(prompt), "context": context, "count": len(lengths)}
    return Case("property", title, lambda: given, lambda **_: expected, SAYS, observe)


def seeds_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        def draw(seed: int, other: int) -> bytes:
            torch.manual_seed(other)
            return adapters.sample(made(Averages), b"de", 12, 1.0, 200, seed, 8)

        first = draw(4, 1)
        found, model = {"the same seed again": first == draw(4, 2), "another seed": first == draw(5, 1)}, made(Averages)
        state = torch.get_rng_state()
        adapters.sample(model, b"de", 3, 1.0, None, 6, 8)
        return found | {"the global generator is as it was": bool(torch.equal(state, torch.get_rng_state()))}

    expected = {"the same seed again": True, "another seed": False, "the global generator is as it was": True}
    return Case("property", "seeds", lambda: {"seeds": [4, 4, 5]}, lambda **_: expected, SAYS, observe)


def as_found_case(title: str, fails: int | None = None) -> Case:
    def prepared() -> Recorded:
        model = made(lambda: Averages(dropout=0.5, fails=fails)).train()
        model.head.eval()
        model.bend.weight.grad = torch.ones_like(model.bend.weight)
        return model

    def observe(adapters: Any, **_: Any) -> Results:
        model, raised = prepared(), "nothing"
        try:
            adapters.sample(model, b"def", 3, 1.0, None, 0, 8)
        except RuntimeError as error:
            raised = str(error)
        calls = {(call.training, call.gradients) for call in model.calls}
        found = {"modes of its calls, and gradients recorded": sorted(calls) == [(False, False)], "raised": raised}
        return found | {"gradients are recorded": torch.is_grad_enabled()} | modes_of(model) | gradients_of(model) | weights_of(model)

    def expected(**_: Any) -> Results:
        model = prepared()
        found = {"modes of its calls, and gradients recorded": True, "raised": "the model fails" if fails else "nothing"}
        return found | {"gradients are recorded": True} | modes_of(model) | gradients_of(model) | weights_of(model)

    given = {"model": "with dropout, in training mode; its head in evaluation mode"}
    return Case("property", title, lambda: given, expected, SAYS, observe)


def half_case() -> Case:
    """Half-precision logits at a small temperature: 60 / 0.0005 is more than a float16 holds."""
    logits = {65: 60.0, 66: 59.0, 67: 40.0}

    def observe(adapters: Any, **_: Any) -> Results:
        model = same_row(logits).to(torch.float16)
        return {"different bytes": sorted(set(adapters.sample(model, b"a", 20, 0.0005, None, 1, 4)))}

    given = {"logits by byte": logits, "dtype": "float16", "temperature": 0.0005}
    return Case("property", "half precision, and a small temperature", lambda: given, lambda **_: {"different bytes": [65]}, SAYS, observe)


THREE = math.log(3)

SAMPLE = (
    greedy_case("the likeliest bytes", b"abc", 6, 8),
    greedy_case("a prompt longer than the context", bytes(range(40, 60)), 5, 4),
    greedy_case("an empty prompt", b"", 4, 8),
    greedy_case("bytes that are no text", bytes([0, 255, 200]), 4, 3),
    greedy_case("nothing to draw", b"abc", 0, 8),
    shown_case("what the model sees", b"abcde", 3, [3, 3, 3, 3]),
    shown_case("a context that fills up", b"ab", 4, [2, 3, 4, 4]),
    shown_case("an empty prompt is a byte 0", b"", 2, [1, 2, 2]),
    share_case("temperature 1", {65: 0.0, 66: THREE}, 1.0, None, {65: 0.25, 66: 0.75}),
    share_case("temperature 0.5 squares the odds", {65: 0.0, 66: 2 * THREE}, 0.5, None, {65: 1 / 82, 66: 81 / 82}),
    share_case("temperature 2 takes their root", {65: 0.0, 66: 4 * THREE}, 2.0, None, {65: 0.1, 66: 0.9}),
    share_case("the likeliest two, in their odds", {0: 1.0, 65: 1.0 + 2 * THREE, 66: -1.0}, 1.0, 2, {0: 0.1, 65: 0.9, 66: 0.0}),
    share_case("top-k of one", {65: 0.1, 66: 0.0, 200: 0.2}, 5.0, 1, {200: 1.0}),
    share_case("top-k above the vocabulary", {65: 0.0, 66: 0.0}, 1.0, 1000, {65: 0.5, 66: 0.5}),
    share_case("top-k at temperature 0", {65: 0.0, 66: 0.5}, 0.0, 2, {66: 1.0}),
    share_case("a tiny temperature", {65: 300.0, 66: 299.0}, 1e-9, None, {65: 1.0}),
    share_case("a temperature that is smaller still", {65: 300.0, 66: 299.0}, 1e-310, 2, {65: 1.0}),
    kinds_case("two of four that are equal", {65: 1.0, 66: 1.0, 67: 1.0, 68: 1.0}, 1.0, 2, 2),
    half_case(),
    seeds_case(),
    as_found_case("the model is left as it was found"),
    as_found_case("also where it raises", fails=1),
)
