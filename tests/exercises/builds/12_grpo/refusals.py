"""Stage 13 of build 12: what cannot be right is refused, and model and optimizer stay as they were."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shared.course.checking import Case

from .pieces import PROMPTS, Attention, Recorded, Results, case, made, refused, settings_of, weights_of
from .resuming import adamw
from .running import SEVEN, judge
from .stepping import experiences_of


def wanted_of(said: tuple[str, ...]) -> str:
    return f"ValueError that says {' and '.join(word.replace('|', ' or ') for word in said)}" if any(said) else "ValueError"


def refusal(said: tuple[str, ...], act: Callable[[], Any]) -> str:
    """What `act` does, which is to raise a ValueError that says all of `said`."""
    try:
        act()
    except ValueError as error:
        return refused(error, said, wanted_of(said))
    return "accepted"


def as_they_were(model: Recorded, before: Results, optimizer: torch.optim.Optimizer) -> str:
    changed = [name for name, weight in weights_of(model).items() if not torch.equal(weight, before[name])]
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    return f"{len(changed)} have changed, and the optimizer made {steps} steps" if changed or steps else "as they were"


def simple_case(title: str, given: Results, said: tuple[str, ...], act: Callable[[Any], Any]) -> Case:
    observe = lambda adapters: {"result": refusal(said, lambda: act(adapters))}  # noqa: E731
    return case(title, given, lambda: {"result": wanted_of(said)}, observe, 13, rung="property")


def settings_case(title: str, *said: str, without: str = "", **changes: Any) -> Case:
    """The same settings are refused by check_settings, and by start, which calls no model."""
    settings = {key: value for key, value in settings_of(**changes).items() if key != without}

    def observe(adapters: Any) -> Results:
        model = made(Attention)
        start = lambda: adapters.start(model, adamw(model), SEVEN, judge, dict(settings), 0)  # noqa: E731
        found = {"check_settings": refusal(said, lambda: adapters.check_settings(dict(settings))), "start": refusal(said, start)}
        return found | {"calls of the model": len(model.calls)}

    expected = lambda: dict.fromkeys(("check_settings", "start"), wanted_of(said)) | {"calls of the model": 0}  # noqa: E731
    return case(title, settings, expected, observe, 13, rung="property")


def right_case(title: str, **changes: Any) -> Case:
    settings = settings_of(**changes)

    def observe(adapters: Any) -> Results:
        try:
            adapters.check_settings(dict(settings))
        except ValueError as error:
            return {"result": f"ValueError: {error}"}
        return {"result": "accepted"}

    return case(title, settings, lambda: {"result": "accepted"}, observe, 13, rung="property")


def full_case(places: int, tokens: int) -> Case:
    """The longest prompt has five tokens."""

    def act(adapters: Any) -> None:
        model = made(Attention)
        cache, _ = adapters.prefill(model, PROMPTS, places)
        for _ in range(tokens):
            adapters.append(model, cache, torch.zeros(5, dtype=torch.int64))

    given = {"prompts": PROMPTS, "places": places, "tokens": tokens}
    return simple_case("a token without a place" if tokens else "a prompt without a place", given, (str(places if tokens else 5),), act)


def drawing_case(title: str, said: str, **changes: Any) -> Case:
    given = {"prompts": PROMPTS, "seeds": [1, 2, 3, 4, 5], "end": 0, "limit": 3, "temperature": 1.0, "top_p": 1.0, "rows": 2} | changes

    def observe(adapters: Any) -> Results:
        model, most = made(Attention), len(given) if "rows" in changes else len(given) - 1
        functions = (adapters.serve,) if "rows" in changes else (adapters.sample, lambda *some: adapters.serve(*some, 2))
        found = [refusal((said,), lambda: each(model, *list(given.values())[:most])) for each in functions]  # noqa: B023
        return {"result": ", ".join(sorted(set(found))), "calls of the model": len(model.calls)}

    expected = lambda: {"result": wanted_of((said,)), "calls of the model": 0}  # noqa: E731
    return case(title, given, expected, observe, 13, rung="property")


def update_case(title: str, said: str, change: Callable[[list], list]) -> Case:
    """In micro-batches of 2: what is wrong may come last."""

    def observe(adapters: Any) -> Results:
        model = made(Attention)
        optimizer, before = adamw(model), weights_of(model)
        experiences = change(experiences_of(5, 0.8, made(Attention)))
        result = refusal((said,), lambda: adapters.update(model, optimizer, experiences, settings_of(micro_size=2)))
        return {"result": result, "weights": as_they_were(model, before, optimizer)}

    expected = lambda: {"result": wanted_of((said,)), "weights": "as they were"}  # noqa: E731
    return case(title, {"experiences": 5, "micro_size": 2}, expected, observe, 13, rung="property")


def last_with(place: int, value: Any) -> Callable[[list], list]:
    return lambda experiences: [*experiences[:-1], (*experiences[-1][:place], value, *experiences[-1][place + 1 :])]


def reward_case(title: str, value: Any, said: str) -> Case:
    """All answers have a reward of 1, but one to prompt 3."""

    def observe(adapters: Any) -> Results:
        model = made(Attention)
        optimizer, before, seen = adamw(model), weights_of(model), []

        def reward(number: int, ids: list[int]) -> Any:
            seen.append(number)
            return value if number == 3 and seen.count(3) == 2 else 1.0

        run = adapters.start(model, optimizer, SEVEN, reward, settings_of(prompts=7), 0)
        result = refusal(("3", said), lambda: adapters.advance(run, 1))
        return {"result": result, "weights": as_they_were(model, before, optimizer)}

    expected = lambda: {"result": wanted_of(("3", said)), "weights": "as they were"}  # noqa: E731
    return case(title, {"prompts": SEVEN, "reward of an answer to prompt 3": value}, expected, observe, 13, rung="property")


def raising_case() -> Case:
    """What the reward raises comes through, and the run continues from where it was."""

    def observe(adapters: Any) -> Results:
        model, broken = made(Attention), [True]
        optimizer, before = adamw(model), weights_of(model)

        def reward(number: int, ids: list[int]) -> float:
            if broken and number == 2:
                raise KeyError("no test of this name")
            return judge(number, ids)

        run = adapters.start(model, optimizer, SEVEN, reward, settings_of(prompts=7), 0)
        try:
            adapters.advance(run, 1)
            came = "nothing"
        except KeyError as error:
            came = f"KeyError: {error}"
        found = {"what came": came, "weights": as_they_were(model, before, optimizer)}
        broken.clear()
        return found | {"steps afterwards": len(adapters.advance(run, 2))}

    expected = lambda: {"what came": "KeyError: 'no test of this name'", "weights": "as they were", "steps afterwards": 2}  # noqa: E731
    return case("a reward that raises", {"prompts": SEVEN}, expected, observe, 13, rung="property")


def resume_case(title: str, said: str, saved: bool = True, **changes: Any) -> Case:
    def observe(adapters: Any) -> Results:
        own = {"prompts": SEVEN, "reward": judge, "settings": settings_of(), "seed": 4}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a_run"
            if saved:
                model = made(Attention)
                run = adapters.start(model, adamw(model), *own.values())
                adapters.advance(run, 1)
                adapters.save(run, path)
            model = made(Attention, seed=8)
            optimizer, before = adamw(model), weights_of(model)
            result = refusal((said,), lambda: adapters.resume(model, optimizer, *(own | changes).values(), path))
            return {"result": result, "weights": as_they_were(model, before, optimizer)}

    expected = lambda: {"result": wanted_of((said,)), "weights": "as they were"}  # noqa: E731
    return case(title, {"saved run": saved, "resumed with others": list(changes)}, expected, observe, 13, rung="property")


def start_case(title: str, said: str, given: list[list[int]], **changes: Any) -> Case:
    act = lambda adapters: adapters.start(model := made(Attention), adamw(model), given, judge, settings_of(**changes), 0)  # noqa: E731
    return simple_case(title, {"given": given, **changes}, (said,), act)


INF, NAN = float("inf"), float("nan")

BAD_INPUT = (
    settings_case("a limit of 0", "limit", "0", limit=0),
    settings_case("a limit that is a float", "limit", "4.0", limit=4.0),
    settings_case("a negative end token", "end", "-1", end=-1),
    settings_case("a temperature of 0", "temperature", "0", temperature=0),
    settings_case("a temperature that is no number", "temperature", "nan", temperature=NAN),
    settings_case("an infinite temperature", "temperature", "inf", temperature=INF),
    settings_case("a temperature of True", "temperature", "True", temperature=True),
    settings_case("a group of one", "group", "1", group=1),
    settings_case("no prompts in a rollout", "prompts", "0", prompts=0),
    settings_case("no updates", "updates", "0", updates=0),
    settings_case("updates of True", "updates", "True", updates=True),
    settings_case("micro-batches of -1", "micro_size", "-1", micro_size=-1),
    settings_case("a scale that there is not", "scale", "std", scale="std"),
    settings_case("no level", "level", "None", level=None),
    settings_case("an aggregation in a list", "aggregation", "token", aggregation=["token"]),
    settings_case("clip_low of 1", "clip_low", "1", clip_low=1),
    settings_case("clip_high of 0", "clip_high", "0", clip_high=0),
    settings_case("clip_high in words", "clip_high", "a fifth", clip_high="a fifth"),
    settings_case("a key that there is not", "beta", beta=0.1),
    settings_case("a key that is missing", "clip_high", without="clip_high"),
    right_case("the least", end=0, limit=1, temperature=1e-6, prompts=1, group=2, updates=1, micro_size=1, clip_low=1e-6, clip_high=1e-6),
    right_case("the most", end=10**6, temperature=1000, clip_low=0.999, clip_high=100),
    right_case("the other words", scale="none", level="sequence", aggregation="constant"),
    simple_case("an empty prompt", {"prompts": [[1], []]}, ("0",), lambda adapters: adapters.prefill(made(Attention), [[1], []], 4)),
    full_case(4, 0),
    full_case(7, 3),
    drawing_case("answers of no tokens", "limit", limit=0),
    drawing_case("fewer seeds than prompts", "seeds", seeds=[1, 2, 3, 4]),
    drawing_case("more seeds than prompts", "seeds", seeds=[1, 2, 3, 4, 5, 6]),
    drawing_case("no rows", "rows", rows=0),
    update_case("no experiences", "0|no experience", lambda experiences: []),
    update_case("an advantage that is no number", "nan|finite", last_with(3, NAN)),
    update_case("an infinite advantage", "inf|nan|finite", last_with(3, INF)),
    update_case("recorded log-probabilities that are no numbers", "nan|finite", last_with(2, [NAN] * 4)),
    start_case("fewer prompts than a rollout has", "2", PROMPTS[:2], prompts=3),
    start_case("an empty prompt among others", "empty|0|1", [*PROMPTS, []]),
    reward_case("a reward that is NaN", NAN, "nan"),
    reward_case("a reward that is infinite", -INF, "inf"),
    reward_case("a reward of nothing", None, "None"),
    reward_case("a reward in words", "right", "right"),
    raising_case(),
    resume_case("no run in the folder", "a_run", saved=False),
    resume_case("a run of other prompts", "", prompts=SEVEN[::-1]),
    resume_case("a run with another temperature", "", settings=settings_of(temperature=0.9)),
    resume_case("a run with another seed", "", seed=5),
)
