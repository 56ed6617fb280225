"""Stage 4 of build 04: what a checkpoint holds, how it is found, and torn files."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from shared.course.checking import Case

from .disk import somewhere
from .memory import memory_case
from .pieces import NOTHING, Listener, Net, Results, World, apart, momentum, none, state_of, words, world


def saved_at(adapters: Any, folder: Path, steps: tuple[int, ...], **more: Any) -> tuple[World, dict[int, Results]]:
    """A run that was saved at these steps, and its states then."""
    made, states = world(adapters, folder, **more), {0: Results()}
    for step in steps:
        adapters.run(made.engine, step)
        adapters.save(made.engine)
        states[step] = state_of(made)
    return made, states


def model_of(state: Results) -> Results:
    return {name: value for name, value in state.items() if name.startswith("model")}


def resumed(adapters: Any, folder: Path, states: dict[int, Results], part: Callable = model_of, **more: Any) -> tuple[int, str]:
    """What a new run finds: its step, and what differs from the state that was saved at that step."""
    made = world(adapters, folder, dirty=1, **more)
    before = state_of(made)
    step = adapters.resume(made.engine)
    wanted = states.get(step) or before
    return step, apart(part(wanted), part(state_of(made)))


def model_case(title: str, model: Callable[[], nn.Module], **more: Any) -> Case:
    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            made, states = saved_at(adapters, folder, (2,), model=model, **more)
            went_on = apart(states[2], state_of(made))
            found = world(adapters, folder, model=model, dirty=1, **more)
            held = {name: tensor.data_ptr() for name, tensor in found.model.state_dict(keep_vars=True).items()}
            step = adapters.resume(found.engine)
            same = all(tensor.data_ptr() == held[name] for name, tensor in found.model.state_dict(keep_vars=True).items())
            kept = "as before" if same else "others"
            different = apart(model_of(states[2]), model_of(state_of(found)))
            return {
                "resumed": step,
                "model": different,
                "its tensors": kept,
                "saved": adapters.saved(folder),
                "the run that saved": went_on,
            }

    expected = {"resumed": 2, "model": NOTHING, "its tensors": "as before", "saved": [2], "the run that saved": NOTHING}
    return words("property", title, 4, {"model": model.__name__, "saved after": 2}, expected, observe)


def empty_case() -> Case:
    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            made = world(adapters, folder, dirty=3)
            before = state_of(made)
            found = {"saved": adapters.saved(folder), "resumed": adapters.resume(made.engine), "run": apart(before, state_of(made))}
            found["folders"] = "none" if not folder.exists() else "made"
            folder.mkdir(parents=True, exist_ok=True)
            return found | {"in an empty folder": [adapters.saved(folder), adapters.resume(made.engine)]}

    expected = {"saved": [], "resumed": 0, "run": NOTHING, "folders": "none", "in an empty folder": [[], 0]}
    return words("property", "no checkpoint", 4, {"folder": "does not exist"}, expected, observe)


def many_case() -> Case:
    """Steps of one digit and of two."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            _, states = saved_at(adapters, folder, (2, 9, 10), keep=5)
            return {"saved": adapters.saved(folder), "resumed": list(resumed(adapters, folder, states, keep=5))}

    expected = {"saved": [2, 9, 10], "resumed": [10, NOTHING]}
    return words("property", "the newest of three", 4, {"saved after": [2, 9, 10], "keep": 5}, expected, observe)


def every_case() -> Case:
    """When `run` saves, and that the checkpoint is there when callbacks hear of it."""

    def observe(adapters: Any) -> Results:
        found: list[str] = []

        class Looking(Listener):
            def on_save(self, step: int) -> None:
                super().on_save(step)
                found.append(f"step {step}: {adapters.saved(folder)}")

        with somewhere() as folder:
            made = world(adapters, folder, save_every=2, log_every=2, callbacks=lambda made: [Looking(made)])
            adapters.run(made.engine, 5)
            journal = [line for line in made.journal if line != "data"]
        return {"heard": journal, "saved when on_save was called": found}

    heard = ["step 1", "step 2", "log 2", "save 2", "step 3", "step 4", "log 4", "save 4", "step 5"]
    expected = {"heard": heard, "saved when on_save was called": ["step 2: [2]", "step 4: [2, 4]"]}
    return words("property", "saves of a run", 4, {"save_every": 2, "log_every": 2, "steps": 5}, expected, observe)


def again_case() -> Case:
    """A step is saved a second time, with other weights."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            made, states = saved_at(adapters, folder, (1, 2))
            made.model.fill(9)
            adapters.save(made.engine)
            states[2] = state_of(made)
            return {"saved": adapters.saved(folder), "resumed": list(resumed(adapters, folder, states))}

    return words("property", "one step saved twice", 4, {"saved after": [1, 2, 2]}, {"saved": [1, 2], "resumed": [2, NOTHING]}, observe)


def is_pickled(content: bytes) -> bool:
    """What torch.save writes, or a pickle anywhere in a file: its protocol, and a frame with its length."""
    for found in re.finditer(rb"\x80[\x04\x05]\x95", content):
        if int.from_bytes(content[found.end() : found.end() + 8], "little") <= len(content) - found.end() - 8:
            return True
    return b"data.pkl" in content


def pickle_case() -> Case:
    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            saved_at(adapters, folder, (1,))
            contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        return {"pickled files": sum(map(is_pickled, contents))}

    return words("property", "nothing is pickled", 4, {"saved after": [1]}, {"pickled files": 0}, observe)


def changes_of(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Ways in which a file is torn."""
    yield "missing", None
    for part in (0.0, 0.5):
        yield "shorter", content[: int(len(content) * part)]
    yield "shorter", content[:-1]
    yield "longer", content + content[:7] + b"0"
    for place in sorted({round(i * (len(content) - 1) / 15) for i in range(16)}):
        yield "other bytes", content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def torn_case(title: str, kinds: tuple[str, ...], part: Callable = model_of, stage: int = 4) -> Case:
    """Each file that the second save made, torn in each way: what is resumed is one of the two, whole."""

    def observe(adapters: Any) -> Results:
        found, tried = {"resumed": set(), "state": set(), "saved and resumed": set()}, 0
        with somewhere() as folder:
            made, states = saved_at(adapters, folder, (1,))
            before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            adapters.run(made.engine, 2)
            adapters.save(made.engine)
            states[2] = state_of(made)
            new = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            for path, content in new.items():
                for kind, torn in changes_of(content) if content != before.get(path) else ():
                    if kind in kinds:
                        path.unlink() if torn is None else path.write_bytes(torn)
                        step, differs = resumed(adapters, folder, states, part)
                        own = step in (1, 2) and (step == 1 or kind == "other bytes")
                        found["resumed"].add("a sound one" if own else f"step {step}")
                        found["state"].add(differs)
                        agree = adapters.saved(folder)[-1:] == [step]
                        found["saved and resumed"].add("agree" if agree else f"{adapters.saved(folder)} and {step}")
                        path.write_bytes(content)
                        tried += 1
        return {name: sorted(values) for name, values in found.items()} | {"tried": tried > 0}

    expected = {"resumed": ["a sound one"], "state": [NOTHING], "saved and resumed": ["agree"], "tried": True}
    return words("property", title, stage, {"saved after": [1, 2], "each new file of step 2": ", ".join(kinds)}, expected, observe)


def all_torn_case() -> Case:
    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            saved_at(adapters, folder, (1,))
            for path in [path for path in folder.rglob("*") if path.is_file()]:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            step, differs = resumed(adapters, folder, {})
            return {"resumed": step, "run": differs, "saved": adapters.saved(folder)}

    return words(
        "property",
        "no sound checkpoint",
        4,
        {"saved after": [1], "each file": "half"},
        {"resumed": 0, "run": NOTHING, "saved": []},
        observe,
    )


def over_torn_case() -> Case:
    """The newest is torn; the run resumes from the one before, comes to the same step again and saves it."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            _, states = saved_at(adapters, folder, (1,))
            before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            made = world(adapters, folder)
            adapters.resume(made.engine)
            adapters.run(made.engine, 2)
            adapters.save(made.engine)
            for path in [path for path in folder.rglob("*") if path.is_file()]:
                if before.get(path) != path.read_bytes():
                    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            made = world(adapters, folder, dirty=1)
            first = adapters.resume(made.engine)
            adapters.run(made.engine, 2)
            adapters.save(made.engine)
            states[2] = state_of(made)
            return {"resumed": first, "and later": list(resumed(adapters, folder, states)), "saved": adapters.saved(folder)}

    expected = {"resumed": 1, "and later": [2, NOTHING], "saved": [1, 2]}
    return words(
        "property", "a torn checkpoint is saved again", 4, {"saved after": [1, 2, 2], "the first of step 2": "torn"}, expected, observe
    )


SAVE = (
    model_case("weights and buffers of every kind", Net),
    many_case(),
    model_case("without a schedule", Net, schedule=none, optimizer=momentum),
    empty_case(),
    every_case(),
    again_case(),
    pickle_case(),
    torn_case("a file is shorter or missing", ("shorter", "missing")),
    torn_case("a file is longer, or has another byte", ("longer", "other bytes")),
    all_torn_case(),
    over_torn_case(),
    memory_case(),
)
