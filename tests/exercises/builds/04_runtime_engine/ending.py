"""Stage 8 of build 04: signals end a run after its step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shared.course.checking import Case

from .disk import somewhere
from .pieces import NOTHING, Listener, Results, World, apart, state_of, totals, words, world
from .resuming import logs_of

BOTH = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def own_handlers(heard: list[str]) -> Iterator[dict[int, Any]]:
    """Signals are not fatal to the check, whatever an engine does; and what they were handled by before is known."""
    own = {number: (lambda number, _frame: heard.append(signal.Signals(number).name)) for number in BOTH}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    try:
        yield own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ran(adapters: Any, engine: object, steps: int) -> int | str:
    """What `run` returns, or how it ends: a handler that raises SystemExit must not end the check with its process."""
    try:
        return adapters.run(engine, steps)
    except (SystemExit, KeyboardInterrupt) as error:
        return f"run raises {type(error).__name__}"


def sent(number: int) -> str:
    """Send this process a signal. Says what it would do where nobody handles it, and does not do it: the check would end as well."""
    if signal.getsignal(number) == signal.SIG_DFL:
        return f"{signal.Signals(number).name} ends the process"
    os.kill(os.getpid(), number)
    return ""


class Sending(Listener):
    """Sends signals to its own process at one place of a run."""

    def __init__(self, made: World, place: str, numbers: tuple[int, ...]):
        super().__init__(made)
        self.place, self.numbers = place, numbers

    def at(self, place: str) -> None:
        if place == self.place:
            for number in self.numbers:
                if ended := sent(number):
                    raise SystemExit(ended)

    def on_step(self, step: int) -> None:
        super().on_step(step)
        self.at(f"on_step {step}")

    def on_log(self, step: int, figures: Results) -> None:
        super().on_log(step, figures)
        self.at(f"on_log {step}")

    def on_save(self, step: int) -> None:
        super().on_save(step)
        self.at(f"on_save {step}")


def sent_case(title: str, place: str, numbers: tuple[int, ...], ends: int, save_every: int = 0) -> Case:
    """A signal at a place of a run to 7; then the run is continued, and another resumes from what was saved."""

    def observe(adapters: Any) -> Results:
        unheard: list[str] = []
        with somewhere() as folder, own_handlers(unheard) as own:
            whole = world(adapters, folder / "never used")
            adapters.run(whole.engine, 7)

            def objective(model: nn.Module, batch: Results) -> Any:
                if place == f"objective {sum(line == 'data' for line in made.journal)}":
                    sender.at(place)
                    sender.place = ""
                return totals(model, batch)

            made = world(
                adapters, folder, objective=objective, save_every=save_every, callbacks=lambda made: [Sending(made, place, numbers)]
            )
            sender = Sending(made, place, numbers)
            returned = ran(adapters, made.engine, 7)
            journal, there = [line for line in made.journal if line != "data"], adapters.saved(folder)
            put_back = all(signal.getsignal(number) == own[number] for number in BOTH)
            other = world(adapters, folder, dirty=1)
            resumed = adapters.resume(other.engine)
            adapters.run(other.engine, 7)
            later = {name: text for name, text in logs_of(whole).items() if int(name.split()[-1]) > resumed}
            differs = apart(state_of(whole) | later, state_of(other) | logs_of(other))
        return {"returned": returned, "heard": journal, "saved": there, "handlers": "as before" if put_back else "others",
                "handled by those before": unheard, "the run that resumes, at its end": differs}  # fmt: skip

    heard = []
    for step in range(1, ends + 1):
        heard += [f"step {step}"] + ([f"log {step}"] if step % 3 == 0 else [])
        heard += [f"save {step}"] if step == ends or (save_every and step % save_every == 0) else []
    saves = [int(line.split()[1]) for line in heard if line.startswith("save")]
    expected = {"returned": ends, "heard": heard, "saved": saves[-2:], "handlers": "as before", "handled by those before": []}
    given = {
        "signal": ", ".join(signal.Signals(number).name for number in numbers),
        "sent in": place,
        "save_every": save_every,
        "log_every": 3,
    }
    return words("property", title, 8, given, expected | {"the run that resumes, at its end": NOTHING}, observe)


def handlers_case() -> Case:
    """Handlers before, in and after runs that end well, by an exception, or have nothing to do; and a signal between two runs."""

    def observe(adapters: Any) -> Results:
        found: Results = {}
        unheard: list[str] = []
        with somewhere() as folder, own_handlers(unheard) as own:
            as_before = lambda: "as before" if all(signal.getsignal(number) == own[number] for number in BOTH) else "others"  # noqa: E731

            def objective(model: nn.Module, batch: Results) -> Any:
                if sum(line == "data" for line in made.journal) == 4:
                    raise RuntimeError("a bad file")
                return totals(model, batch)

            made = world(adapters, folder, objective=objective)
            found["after make_engine"] = as_before()
            adapters.run(made.engine, 2)
            found["after a run"] = as_before()
            adapters.run(made.engine, 1)
            found["after a run without steps"] = as_before()
            found["a signal between two runs"] = sent(signal.SIGTERM) or list(unheard)
            found["the run after it"] = adapters.run(made.engine, 3)
            try:
                adapters.run(made.engine, 5)
            except RuntimeError:
                pass
            found["after an exception"] = as_before()
            found["saved"] = adapters.saved(folder)
        return found

    expected = {"after make_engine": "as before", "after a run": "as before", "after a run without steps": "as before"}
    expected |= {"a signal between two runs": ["SIGTERM"], "the run after it": 3, "after an exception": "as before", "saved": []}
    return words("property", "how signals are handled before and after", 8, {"run to": [2, 1, 3, 5], "step 4": "raises"}, expected, observe)


def continued_case() -> Case:
    def observe(adapters: Any) -> Results:
        with somewhere() as folder, own_handlers([]):
            whole = world(adapters, folder / "never used")
            adapters.run(whole.engine, 7)
            made = world(adapters, folder, callbacks=lambda made: [Sending(made, "on_step 2", (signal.SIGTERM,))])
            returned = [ran(adapters, made.engine, 7), ran(adapters, made.engine, 7)]
            saved = adapters.saved(folder)
            differs = apart(state_of(whole) | logs_of(whole), state_of(made) | logs_of(made))
        return {"returned": returned, "at the end": differs, "saved": saved}

    expected = {"returned": [2, 7], "at the end": NOTHING, "saved": [2]}
    return words("property", "run is called again", 8, {"SIGTERM in": "on_step 2", "run to": [7, 7]}, expected, observe)


def ignored_case() -> Case:
    """A signal that was ignored before is ignored again, and handled while a run goes on."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder, own_handlers([]):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            made = world(adapters, folder, callbacks=lambda made: [Sending(made, "on_step 2", (signal.SIGINT,))])
            returned = ran(adapters, made.engine, 4)
            return {"returned": returned, "afterwards": "ignored" if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else "handled"}

    return words("property", "SIGINT was ignored before", 8, {"SIGINT in": "on_step 2"}, {"returned": 2, "afterwards": "ignored"}, observe)


SIGNAL = (
    sent_case("SIGTERM in a step", "objective 4", (signal.SIGTERM,), 4),
    sent_case("SIGINT in a step", "objective 2", (signal.SIGINT,), 2),
    sent_case("in a callback, before a log", "on_step 3", (signal.SIGTERM,), 3),
    sent_case("a step that is saved anyway", "objective 4", (signal.SIGTERM,), 4, save_every=2),
    sent_case("after the save", "on_save 4", (signal.SIGINT,), 4, save_every=2),
    sent_case("two signals at once", "on_log 3", (signal.SIGTERM, signal.SIGINT), 3, save_every=2),
    sent_case("in the last step", "objective 7", (signal.SIGTERM,), 7),
    handlers_case(),
    ignored_case(),
    continued_case(),
)
