"""Stage 7 of build 04: a run that was killed and resumed, and one that nobody interrupted."""

import os
from typing import Any

from shared.course.checking import Case

from .disk import KILLED, in_child, somewhere
from .pieces import NOTHING, Listener, Results, World, apart, cosine, momentum, none, state_of, words, world
from .saving import torn_case


def logs_of(made: World) -> Results:
    return {f"logs: {step}": repr(sorted(figures.items())) for step, figures in made.logs.items()}


def resume_case(title: str, steps: tuple[int, ...], last: int, **more: Any) -> Case:
    """Saved and resumed after each of `steps`, each time by a new run of objects in any state."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            whole = world(adapters, folder / "never used", **more)
            adapters.run(whole.engine, last)
            made, first, told, logs = world(adapters, folder, **more), "", [], {}
            for number, step in enumerate(steps, 1):
                adapters.run(made.engine, step)
                logs |= logs_of(made)
                adapters.save(made.engine)
                before = state_of(made)
                if number == len(steps):
                    adapters.run(made.engine, last)
                    first = apart(state_of(whole) | logs_of(whole), state_of(made) | logs | logs_of(made))
                made = world(adapters, folder, dirty=number, **more)
                told.append(adapters.resume(made.engine))
                put_back = apart(before, state_of(made))
            told.append(adapters.run(made.engine, told[-1]))
            told.append(adapters.run(made.engine, last))
            after = apart(state_of(whole) | logs_of(whole), state_of(made) | logs | logs_of(made))
        return {"put back": put_back, "the resumed run at its end": after, "the saved run at its end": first, "steps": told}

    expected = {"put back": NOTHING, "the resumed run at its end": NOTHING, "the saved run at its end": NOTHING}
    given = {"saved and resumed after": list(steps), "run to": last} | {
        name: value.__name__ for name, value in more.items() if callable(value)
    }
    return words(
        "property", title, 7, given, expected | {"steps": [*steps, steps[-1], last]}, observe, source="a run that nobody interrupted"
    )


def killed_case(at: int) -> Case:
    """A run in a process of its own ends in the middle of a step."""

    def observe(adapters: Any) -> Results:
        class Ending(Listener):
            def on_step(self, step: int) -> None:
                super().on_step(step)
                if step == at:
                    os._exit(KILLED)

        with somewhere() as folder:
            whole = world(adapters, folder / "never used", save_every=0)
            adapters.run(whole.engine, 9)

            def work() -> None:
                made = world(adapters, folder, save_every=2, callbacks=lambda made: [Ending(made)])
                adapters.run(made.engine, 9)

            code = in_child(work)
            made = world(adapters, folder, save_every=2, dirty=4)
            step = adapters.resume(made.engine)
            adapters.run(made.engine, 9)
            later = {name: text for name, text in logs_of(whole).items() if int(name.split()[-1]) > step}
            differs = apart(state_of(whole) | later, state_of(made) | logs_of(made))
            return {"killed": code == KILLED, "resumed": step, "at the end": differs, "saved": adapters.saved(folder)}

    expected = {"killed": True, "resumed": at - 1, "at the end": NOTHING, "saved": [6, 8]}
    return words("property", "killed in a step", 7, {"save_every": 2, "killed after step": at, "run to": 9}, expected, observe,
                 source="a run that nobody interrupted")  # fmt: skip


def before_case() -> Case:
    """Saved before the first step: the optimizer has no state, and the checkpoint has the number 0."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            whole = world(adapters, folder)
            adapters.save(whole.engine)
            adapters.run(whole.engine, 3)
            made = world(adapters, folder, dirty=5)
            step = adapters.resume(made.engine)
            adapters.run(made.engine, 3)
            differs = apart(state_of(whole) | logs_of(whole), state_of(made) | logs_of(made))
            return {"saved": adapters.saved(folder), "resumed": step, "at the end": differs}

    expected = {"saved": [0], "resumed": 0, "at the end": NOTHING}
    return words("property", "saved before the first step", 7, {"saved after": [0], "run to": 3}, expected, observe)


RESUME = (
    resume_case("momentum without a schedule, between two logs", (3,), 6, optimizer=momentum, schedule=none),
    resume_case("momentum and a warm-up", (3,), 6, optimizer=momentum),
    resume_case("AdamW in two groups", (3,), 6, schedule=none),
    resume_case("AdamW with a warm-up, in the middle of a log", (4,), 7),
    resume_case("a schedule that multiplies the rate", (2,), 6, schedule=cosine),
    resume_case("resumed three times", (1, 2, 5), 9),
    before_case(),
    torn_case("a file has another byte", ("other bytes",), lambda state: state, 7),
    killed_case(5),
)
