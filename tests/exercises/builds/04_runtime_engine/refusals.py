"""Stage 9 of build 04: what cannot be right is refused, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared.course.checking import Case

from .disk import somewhere
from .pieces import NOTHING, Net, Results, adamw, apart, none, settings_of, state_of, words, world
from .stepping import Line, given_engine, rows, summed


def refusal(said: tuple[str, ...], act: Callable[[], Any]) -> str:
    """What `act` does, which is to raise a ValueError that says all of `said`."""
    try:
        act()
        return "accepted"
    except ValueError as error:
        missing = [word for word in said if not any(each.lower() in str(error).lower() for each in word.split("|"))]
        return wanted_of(said) if not missing else f"ValueError, which does not say {missing[0].replace('|', ' or ')}"
    except Exception as error:
        return f"{type(error).__name__}"


def wanted_of(said: tuple[str, ...]) -> str:
    return f"ValueError that says {' and '.join(word.replace('|', ' or ') for word in said)}"


def settings_case(title: str, *said: str, without: str = "", **changes: Any) -> Case:
    """Refused by check_settings, and by make_engine."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            settings = {key: value for key, value in (settings_of(folder) | changes).items() if key != without}
            model = Line()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            engine = lambda: adapters.make_engine(model, optimizer, None, None, summed, dict(settings), [])  # noqa: E731
            return {"check_settings": refusal(said, lambda: adapters.check_settings(dict(settings))), "make_engine": refusal(said, engine)}

    given = {"without": without} if without else changes
    return words("property", title, 9, given, dict.fromkeys(("check_settings", "make_engine"), wanted_of(said)), observe)


def folder_case() -> Case:
    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            folder.parent.mkdir()
            folder.write_text("a file")
            return {
                name: refusal(("folder", str(path)), lambda path=path: adapters.check_settings(settings_of(path)))
                for name, path in (("a file", folder), ("below a file", folder / "a" / "b"))
            } | {"a text": refusal(("folder",), lambda: adapters.check_settings(settings_of(str(folder.parent))))}

    said = "ValueError that says folder and "

    def hidden(adapters: Any) -> Results:  # the path has a random name
        return {name: f"{said}its path" if value.startswith(said) else value for name, value in observe(adapters).items()}

    expected = {"a file": f"{said}its path", "below a file": f"{said}its path", "a text": "ValueError that says folder"}
    return words("property", "the folder is a file", 9, {"folder": "a file, one below a file, a str"}, expected, hidden)


def sound_settings_case() -> Case:
    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            return {"check_settings": adapters.check_settings(settings_of(folder, log_every=1, keep=1)), "folder": folder.parent.exists()}

    return words(
        "property",
        "settings that are right",
        9,
        {"log_every": 1, "save_every": 0, "keep": 1},
        {"check_settings": None, "folder": False},
        observe,
    )


def optimizer_case() -> Case:
    """The second group has a parameter of another model."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            model, other = Line(), Line()
            groups = [{"params": [model.weight]}, {"params": [other.weight]}]
            optimizer = torch.optim.SGD(groups, lr=1.0)
            act = lambda: adapters.make_engine(model, optimizer, None, None, summed, settings_of(folder), [])  # noqa: E731
            return {"make_engine": refusal(("1",), act)}

    return words(
        "property", "a parameter of another model", 9, {"groups": "0 its own, 1 another's"}, {"make_engine": wanted_of(("1",))}, observe
    )


def steps_case(steps: Any) -> Case:
    def observe(adapters: Any) -> Results:
        made = given_engine(adapters, Line(), [[rows(1.0)]] * 9, summed)
        said = refusal((str(steps),), lambda: adapters.run(made.engine, steps))
        return {"run": said, "weight": made.model.weight.item(), "steps of data": made.journal.count("data")}

    return words(
        "property", f"run to {steps!r}", 9, {"steps": steps}, {"run": wanted_of((str(steps),)), "weight": 1.0, "steps of data": 0}, observe
    )


def tokens_case(title: str, batches: list[Any]) -> Case:
    """Step 3 has no tokens. AdamW would decay the weight even if the gradient were 0."""

    def observe(adapters: Any) -> Results:
        model = Line()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        made = given_engine(adapters, model, [[rows(1.0)], [rows(2.0)], batches], summed, optimizer)
        adapters.run(made.engine, 2)
        before = model.weight.item()
        said = refusal(("3",), lambda: adapters.run(made.engine, 3))
        return {"run": said, "weight": "as it was" if model.weight.item() == before else "changed", "heard": made.journal.count("step 3")}

    expected = {"run": wanted_of(("3",)), "weight": "as it was", "heard": 0}
    return words("property", title, 9, {"steps": [[[1.0]], [[2.0]], [batch.tolist() for batch in batches]]}, expected, observe)


def evaluate_case() -> Case:
    def observe(adapters: Any) -> Results:
        made = given_engine(adapters, Line(), [[rows(1.0)]], summed)
        made.model.train()
        found = {
            name: refusal((), lambda given=given: adapters.evaluate(made.engine, given))
            for name, given in (("none", []), ("empty", [rows()]))
        }
        return found | {"training mode": made.model.training}

    expected = {"none": wanted_of(()), "empty": wanted_of(()), "training mode": True}
    return words("property", "an evaluation without tokens", 9, {"micro-batches": "none, and one without tokens"}, expected, observe)


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other, self.scale = self.scale, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Widened(Net):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(2, 4), requires_grad=False)


class Broadcast(Net):
    """What was saved can be copied into it without an error: [3] into [5, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))


class Retyped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.zeros(3, dtype=torch.float32))


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("extra", torch.zeros(2))


def all_in_one(model: nn.Module, backwards: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def others(model: nn.Module, backwards: bool = False) -> torch.optim.Optimizer:
    """Two groups, with the scalar in the other one."""
    optimizer = adamw(model)
    first, second = optimizer.param_groups
    first["params"].append(model.scale)
    second["params"] = [each for each in second["params"] if each is not model.scale]
    return optimizer


def fewer(model: nn.Module, backwards: bool = False) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    second = optimizer.param_groups[1]
    second["params"] = [each for each in second["params"] if each is not model.scale]
    return optimizer


def resume_case(title: str, *said: str, first: Results | None = None, **more: Any) -> Case:
    """What was saved does not fit. The run that is to resume stays as it is: weights, optimizer, data, generators, and steps."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            saved = world(adapters, folder, **(first or {}))
            adapters.run(saved.engine, 2)
            adapters.save(saved.engine)
            made = world(adapters, folder, **more)
            with torch.no_grad():
                made.model.first.weight.fill_(0.5)
            before = state_of(made)
            found = {"resume": refusal(said, lambda: adapters.resume(made.engine)), "the run": apart(before, state_of(made))}
            return found | {"saved": adapters.saved(folder)}

    given = {name: value.__name__ for name, value in ({f"saved {key}": value for key, value in (first or {}).items()} | more).items()}
    return words("property", title, 9, given, {"resume": wanted_of(said), "the run": NOTHING, "saved": [2]}, observe)


BAD_INPUT = (
    sound_settings_case(),
    settings_case("a key is missing", "keep", without="keep"),
    settings_case("an unknown key", "save_evry", save_evry=10),
    settings_case("keep is 0", "keep", "0", keep=0),
    settings_case("log_every is 0", "log_every", "0", log_every=0),
    settings_case("save_every is below 0", "save_every", "-1", save_every=-1),
    settings_case("save_every is a bool", "save_every", "True", save_every=True),
    settings_case("log_every is a float", "log_every", "2.0", log_every=2.0),
    settings_case("keep is None", "keep", "None", keep=None),
    folder_case(),
    optimizer_case(),
    steps_case(-1),
    steps_case(2.5),
    steps_case(True),
    tokens_case("a step without tokens", [rows(), rows()]),
    tokens_case("a step without micro-batches", []),
    evaluate_case(),
    resume_case("a weight has another shape", "frozen", model=Widened),
    resume_case("a weight that could be broadcast", "short", model=Broadcast),
    resume_case("a weight has another dtype", "short", model=Retyped),
    resume_case("a weight has another name", "scale|other", model=Renamed, optimizer=adamw),
    resume_case("a buffer more", "extra", model=Buffered),
    resume_case("a buffer less", "extra", first={"model": Buffered}),
    resume_case("no schedule here", "schedule", schedule=none),
    resume_case("no schedule there", "schedule", first={"schedule": none}),
    resume_case("one group in place of two", "groups", optimizer=all_in_one),
    resume_case("a parameter in another group", "scale", optimizer=others),
    resume_case("a parameter that is not trained", "scale", optimizer=fewer),
)
