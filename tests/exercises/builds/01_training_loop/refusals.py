"""Stage 9 of build 01: what cannot be right is refused, and nothing has changed then."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shared.course.checking import Case

from .pieces import IGNORED, TEXT, Averages, Recorded, Results, Table, generator, made, modes_of, randn, text_of, weights_of
from .running import SIZE

SAYS = TEXT.format(9)


def wanted_of(said: tuple[str, ...]) -> str:
    words = " and ".join(word.replace("|", " or ") for word in said)
    return f"ValueError that says {words}" if said else "ValueError"


def refusal(said: tuple[str, ...], act: Callable[[], Any]) -> str:
    """What `act` does, which is to raise a ValueError that says each of `said`, or one of those with | between them."""
    try:
        act()
    except ValueError as error:
        missing = [word for word in said if not any(each in str(error) for each in word.split("|"))]
        return f"ValueError, which does not say {missing[0].replace('|', ' or ')}: {error}" if missing else wanted_of(said)
    return "accepted"


def simple_case(title: str, given: Results, said: tuple[str, ...], act: Callable[[Any], Any]) -> Case:
    observe = lambda adapters, **_: {"result": refusal(said, lambda: act(adapters))}  # noqa: E731
    return Case("property", title, lambda: given, lambda **_: {"result": wanted_of(said)}, SAYS, observe)


def windows_case(title: str, size: int, length: int) -> Case:
    act = lambda adapters: adapters.windows(text_of(size), 2, length, generator(0))  # noqa: E731
    return simple_case(title, {"bytes": size, "length": length}, (str(size),), act)


def evaluate_case(title: str, said: str, size: int, length: int = 8, rows: int = 2) -> Case:
    act = lambda adapters: adapters.evaluate(made(), text_of(size), length, rows)  # noqa: E731
    return simple_case(title, {"bytes": size, "length": length, "rows": rows}, (said,), act)


def sample_case(title: str, name: str, **changes: Any) -> Case:
    """Refused before the model is called."""
    given = {"count": 3, "temperature": 1.0, "top_k": None, "context": 4} | changes

    def observe(adapters: Any, **_: Any) -> Results:
        model = made().train()
        before = modes_of(model)
        act = lambda: adapters.sample(model, b"ab", given["count"], given["temperature"], given["top_k"], 0, given["context"])  # noqa: E731
        return {"result": refusal((name,), act), "calls": len(model.calls), "modes": modes_of(model) == before}

    expected = {"result": wanted_of((name,)), "calls": 0, "modes": True}
    return Case("property", title, lambda: given, lambda **_: expected, SAYS, observe)


def taken_case(title: str, **changes: Any) -> Case:
    """What is unusual and right is not refused."""
    given = {"prompt": b"ab", "count": 3, "temperature": 1.0, "top_k": None, "context": 4} | changes

    def observe(adapters: Any, **_: Any) -> Results:
        arguments = (given["prompt"], given["count"], given["temperature"], given["top_k"], 0, given["context"])
        return {"bytes": len(adapters.sample(made(), *arguments))}

    shown = given | {"prompt": list(given["prompt"])}
    return Case("property", title, lambda: shown, lambda **_: {"bytes": given["count"]}, SAYS, observe)


def step_case(title: str, said: str, batches: list[tuple[torch.Tensor, torch.Tensor]], kind: Callable[[], Recorded]) -> Case:
    """The optimizer has made a step before, so it has momentum that would move the weights. Nothing of it moves."""

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(kind) if kind is Averages else kind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        good = torch.tensor([[1, 2]]), torch.tensor([[2, 1]])
        adapters.step(model, optimizer, [good])
        before, averages = weights_of(model), [state["exp_avg"].clone() for state in optimizer.state.values()]
        result = refusal((said,) if said else (), lambda: adapters.step(model, optimizer, batches))
        moved = [name for name, weight in weights_of(model).items() if not torch.allclose(weight, before[name], 0.0, 0.0, equal_nan=True)]
        now = [state["exp_avg"] for state in optimizer.state.values()]
        same = all(torch.allclose(*pair, 0.0, 0.0, equal_nan=True) for pair in zip(averages, now, strict=True))
        steps = sorted({int(state["step"]) for state in optimizer.state.values()})
        return {"result": result, "parameters that moved": moved, "the optimizer's state is as it was": same, "its steps": steps}

    expected = {"result": wanted_of((said,) if said else ()), "parameters that moved": [], "the optimizer's state is as it was": True}
    return Case("property", title, lambda: {"micro-batches": len(batches)}, lambda **_: expected | {"its steps": [1]}, SAYS, observe)


def poisoned(value: float) -> Recorded:
    """A table in which one byte, 7, has a logit that spoils its row."""
    rows = randn(256, 256, seed=2)
    rows[7, 8] = value
    return Table(rows)


def batch(inputs: list[int], targets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([inputs]), torch.tensor([targets])


def resume_case(title: str, said: str, saved: bool, other: bool) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a_run"
            if saved:
                run = adapters.start(text_of(SIZE, seed=1), 7)
                adapters.advance(run, 1)
                adapters.save(run, path)
            return {"result": refusal((said,) if said else (), lambda: adapters.resume(text_of(SIZE, seed=2 if other else 1), path))}

    expected = {"result": wanted_of((said,) if said else ())}
    return Case("property", title, lambda: {"saved": saved, "another text": other}, lambda **_: expected, SAYS, observe)


BAD, GOOD = batch([7], [8]), batch([1, 3], [2, 4])
NAN, INF = (lambda: poisoned(math.nan)), (lambda: poisoned(-math.inf))

BAD_INPUT = (
    simple_case("every document held out", {"one_in": 1}, ("1",), lambda adapters: adapters.split([b"a", b"b"], 1)),
    simple_case("one in none", {"one_in": 0}, ("0",), lambda adapters: adapters.split([b"a", b"b"], 0)),
    windows_case("a text that is one byte too short", 16, 16),
    windows_case("an empty text", 0, 4),
    evaluate_case("a text of one byte", "1", 1),
    evaluate_case("a text of none", "0", 0),
    evaluate_case("windows of none", "length", 30, length=0),
    evaluate_case("no rows", "rows", 30, rows=0),
    sample_case("a negative temperature", "temperature", temperature=-0.5),
    sample_case("an infinite temperature", "temperature", temperature=math.inf),
    sample_case("a temperature that is no number", "temperature", temperature=math.nan),
    sample_case("top-k of none", "top_k", top_k=0),
    sample_case("top-k of none at temperature 0", "top_k", top_k=0, temperature=0.0),
    sample_case("a negative top-k", "top_k", top_k=-5),
    sample_case("a context of none", "context", context=0),
    sample_case("fewer than no bytes", "count", count=-1),
    sample_case("a wrong temperature for no bytes", "temperature", count=0, temperature=-1.0),
    taken_case("an integer as temperature", temperature=1),
    taken_case("a large top-k and a context of one", top_k=256, context=1),
    taken_case("an empty prompt", prompt=b""),
    step_case("no micro-batch", "", [], Averages),
    step_case("no target counts", "", [batch([1, 2], [IGNORED] * 2)] * 2, Averages),
    step_case("a loss that is no number", "nan|finite|NaN", [BAD], NAN),
    step_case("it comes last", "nan|finite|NaN", [GOOD, BAD], NAN),
    step_case("it comes first", "nan|finite|NaN", [BAD, GOOD], NAN),
    step_case("an infinite loss", "inf|finite|nan|NaN", [GOOD, BAD], INF),
    simple_case("a run on a text of ten bytes", {"bytes": 10}, ("10",), lambda adapters: adapters.start(text_of(10), 0)),
    simple_case("a run on an empty text", {"bytes": 0}, ("0",), lambda adapters: adapters.start(text_of(0), 0)),
    resume_case("no run was saved", "a_run", saved=False, other=False),
    resume_case("a run on another text", "", saved=True, other=True),
)
