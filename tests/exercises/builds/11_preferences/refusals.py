"""Stage 13 of build 11: what cannot be right is refused, and model and optimizer stay as they were."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shared.course.checking import Case

from .pieces import (
    SIZES,
    TEXT,
    VOCABULARY,
    WIDTH,
    Attention,
    Examples,
    Recorded,
    Results,
    Table,
    example,
    made,
    pairs_of,
    randn,
    refused,
    settings_of,
    weights_of,
)
from .reading import HI, MARKS, letters, pair


def refusal(said: tuple[str, ...], act: Callable[[], Any]) -> str:
    """What `act` does, which is to raise a ValueError that says all of `said`."""
    wanted = wanted_of(said)
    try:
        value = act()
        return f"accepted: {value.item():.4g}" if isinstance(value, torch.Tensor) and value.numel() == 1 else "accepted"
    except ValueError as error:
        return refused(error, said, wanted)


def wanted_of(said: tuple[str, ...]) -> str:
    return f"ValueError that says {' and '.join(word.replace('|', ' or ') for word in said)}"


def adamw(model: Recorded) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def as_they_were(model: Recorded, before: Results, optimizer: torch.optim.Optimizer) -> str:
    changed = [name for name, weight in weights_of(model).items() if not torch.equal(weight, before[name])]
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    return f"{len(changed)} have changed, and the optimizer made {steps} steps" if changed or steps else "as they were"


def settings_case(title: str, *said: str, without: str = "", **changes: Any) -> Case:
    """The same settings are refused by check_settings, and by start, which calls no model."""
    settings = {key: value for key, value in (settings_of() | changes).items() if key != without}

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Attention)
        start = lambda: adapters.start(model, adamw(model), pairs_of(SIZES), WIDTH, dict(settings), 3, 2, 0)  # noqa: E731
        found = {"check_settings": refusal(said, lambda: adapters.check_settings(dict(settings))), "start": refusal(said, start)}
        return found | {"calls of the model": len(model.calls)}

    expected = lambda **_: dict.fromkeys(("check_settings", "start"), wanted_of(said)) | {"calls of the model": 0}  # noqa: E731
    return Case("property", title, lambda: settings, expected, TEXT.format(13), observe)


def right_case(title: str, settings: Results) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        try:
            adapters.check_settings(dict(settings))
        except ValueError as error:
            return {"result": f"ValueError: {error}"}
        return {"result": "accepted"}

    return Case("property", title, lambda: settings, lambda **_: {"result": "accepted"}, TEXT.format(13), observe)


def simple_case(title: str, given: Results, said: tuple[str, ...], act: Callable[[Any], Any]) -> Case:
    observe = lambda adapters, **_: {"result": refusal(said, lambda: act(adapters))}  # noqa: E731
    return Case("property", title, lambda: given, lambda **_: {"result": wanted_of(said)}, TEXT.format(13), observe)


def encode_case(title: str, answers: tuple[str, str], width: int) -> Case:
    """The prompt with the mark behind it has five tokens."""
    given = {"pair": pair([HI], *answers), "width": width, "tokens of the prompt": 5}
    act = lambda adapters: adapters.encode(pair([dict(HI)], *answers), letters, dict(MARKS), width)  # noqa: E731
    return simple_case(title, given, (str(width),), act)


LONG = (example([1], list(range(WIDTH + 1))), example([1], [2]))


def start_case(title: str, said: str, examples: Examples, batch_size: int = 3, micro_size: int = 2) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Attention)
        act = lambda: adapters.start(model, adamw(model), examples, WIDTH, settings_of(), batch_size, micro_size, 0)  # noqa: E731
        return {"result": refusal((said,), act), "calls of the model": len(model.calls)}

    given = {"pairs": len(examples), "batch_size": batch_size, "micro_size": micro_size}
    expected = lambda **_: {"result": wanted_of((said,)), "calls of the model": 0}  # noqa: E731
    return Case("property", title, lambda: given, expected, TEXT.format(13), observe)


def no_pairs_case(title: str, micro_batches: list[Any]) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Attention)
        optimizer, before = adamw(model), weights_of(model)
        result = refusal(("0|no pair",), lambda: adapters.step(model, optimizer, micro_batches, WIDTH, settings_of()))
        return {"result": result, "weights": as_they_were(model, before, optimizer)}

    expected = lambda **_: {"result": wanted_of(("0|no pair",)), "weights": "as they were"}  # noqa: E731
    return Case("property", title, lambda: {"micro-batches": len(micro_batches)}, expected, TEXT.format(13), observe)


def impossible_case(title: str, poison: float, word: str, bad: int) -> Case:
    """One token of one answer is impossible, or no number, for the model. bad: the micro-batch that has it."""
    said = (word,)

    def observe(adapters: Any, **_: Any) -> Results:
        rows = randn(VOCABULARY, VOCABULARY, seed=2)
        rows[7, 8] = poison
        model = Table(rows)
        optimizer, before, zeros = adamw(model), weights_of(model), torch.zeros(1, 2, dtype=torch.float64)
        parts: list[Any] = [([(example([1, 2], [3, 4]), example([1, 2], [5]))], zeros)] * 2
        parts[bad] = [(example([1, 2], [7, 8]), example([1, 2], [5]))], zeros
        result = refusal(said, lambda: adapters.step(model, optimizer, parts, WIDTH, settings_of()))
        return {"result": result, "weights": as_they_were(model, before, optimizer)}

    given = {"log-probability of one answer": poison, "in micro-batch": bad}
    expected = lambda **_: {"result": wanted_of(said), "weights": "as they were"}  # noqa: E731
    return Case("property", title, lambda: given, expected, TEXT.format(13), observe)


def resume_case(title: str, said: str, saved: bool = True, **changes: Any) -> Case:
    """A folder without a run, or with a run that was started with something else. Nothing of it is loaded."""
    own = {"examples": pairs_of(SIZES), "width": WIDTH, "settings": settings_of(), "batch_size": 3, "micro_size": 2, "seed": 0}

    def observe(adapters: Any, **_: Any) -> Results:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a_run"
            path.mkdir()
            if saved:
                first = made(Attention)
                run = adapters.start(first, adamw(first), *own.values())
                adapters.advance(run, 2)
                adapters.save(run, path)
            model = made(Attention, seed=8)
            optimizer, before = adamw(model), weights_of(model)
            result = refusal((said,), lambda: adapters.resume(model, optimizer, *(own | changes).values(), path))
            return {"result": result, "weights": as_they_were(model, before, optimizer)}

    expected = lambda **_: {"result": wanted_of((said,)), "weights": "as they were"}  # noqa: E731
    return Case("property", title, lambda: {"saved run": saved, "resumed with others": list(changes)}, expected, TEXT.format(13), observe)


def reversed_pairs() -> Examples:
    return [(rejected, chosen) for chosen, rejected in pairs_of(SIZES)]


BAD_INPUT = (
    settings_case("a loss that there is not", "loss", "dpo", loss="dpo"),
    settings_case("no loss", "loss", "None", loss=None),
    settings_case("beta 0", "beta", "0", beta=0),
    settings_case("a negative beta", "beta", "-0.1", beta=-0.1),
    settings_case("an infinite beta", "beta", "inf", beta=float("inf")),
    settings_case("a beta that is no number", "beta", "nan", beta=float("nan")),
    settings_case("a beta that is True", "beta", "True", beta=True),
    settings_case("a beta in words", "beta", "a tenth", beta="a tenth"),
    settings_case("half of the labels are wrong", "label_smoothing", "0.5", label_smoothing=0.5),
    settings_case("negative smoothing", "label_smoothing", "-0.1", label_smoothing=-0.1),
    settings_case("smoothing that is no number", "label_smoothing", "nan", label_smoothing=float("nan")),
    settings_case("smoothing with another loss", "label_smoothing", "0.1", loss="ipo", label_smoothing=0.1),
    settings_case("a negative margin", "gamma", "-1", loss="simpo", gamma=-1),
    settings_case("an infinite margin", "gamma", "inf", loss="simpo", gamma=float("inf")),
    settings_case("a margin with another loss", "gamma", "0.5", gamma=0.5),
    settings_case("a margin of None", "gamma", "None", gamma=None),
    settings_case("a key that there is not", "learning_rate", learning_rate=0.1),
    settings_case("a key that is missing", "gamma", without="gamma"),
    right_case("the least", settings_of("hinge", beta=1e-6)),
    right_case("the most", settings_of("sigmoid", beta=1000, label_smoothing=0.499)),
    right_case("integers, and a margin", settings_of("simpo", beta=2, label_smoothing=0, gamma=1)),
    right_case("ORPO", settings_of("orpo", beta=1)),
    encode_case("the prompt fills the row", ("Yo", "No"), 4),
    encode_case("a prompt that is longer than the row", ("Yo", "No"), 2),
    encode_case("answers that differ behind the cut alone", ("Yes", "Yet"), 6),
    encode_case("answers of which one end is cut off", ("Ye", "Yes"), 6),
    simple_case("an example that is too long", {"tokens": WIDTH + 2, "width": WIDTH}, (str(WIDTH + 2),),
                lambda adapters: adapters.rows([LONG], WIDTH)),
    simple_case("a pair that alone is too much", {"tokens of each pair": [[4, 4], [13, 8]], "tokens": 10, "width": WIDTH}, ("1",),
                lambda adapters: adapters.micro_batches(pairs_of([(2, 2, 2), (5, 8, 3)]), WIDTH, 10)),
    no_pairs_case("a step of no micro-batches", []),
    no_pairs_case("a step of micro-batches without pairs", [([], torch.zeros(0, 2))]),
    impossible_case("an impossible answer", float("-inf"), "inf|nan|finite", 0),
    impossible_case("an impossible answer comes last", float("-inf"), "inf|nan|finite", 1),
    start_case("no pairs", "0|no pair|no example", []),
    start_case("batches of 0", "batch_size", pairs_of(SIZES), batch_size=0),
    start_case("micro-batches of -1", "micro_size", pairs_of(SIZES), micro_size=-1),
    resume_case("no run in the folder", "a_run", saved=False),
    resume_case("a run of other pairs", "", examples=reversed_pairs()),
    resume_case("a run of fewer pairs", "", examples=pairs_of(SIZES)[:4]),
    resume_case("a run with another beta", "", settings=settings_of(beta=0.4)),
    resume_case("a run with another loss", "", settings=settings_of("hinge")),
)  # fmt: skip
