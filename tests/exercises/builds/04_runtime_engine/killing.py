"""Stages 5 and 6 of build 04: kills at every file operation of a save, and power cuts."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared.course.checking import Case

from .disk import KILLED, Disk, Image, bytes_in, full_disk, hearing, in_child, killing_at, operations_of, somewhere, torn_at, write_image
from .pieces import NOTHING, WITHIN, Listener, Results, budget, momentum, none, state_of, words, world
from .saving import resumed, saved_at

MOST = 300  # file operations of a save that are tried


FINE = "as it should be"


def kinds_of(found: set[str]) -> list[str]:
    return sorted(found)


def outcome_of(adapters: Any, folder: Path, states: dict[int, Results], allowed: tuple[int, ...], **more: Any) -> str:
    """What a new run makes of a folder: a sound checkpoint of an allowed step, or what is wrong."""
    try:
        step, differs = resumed(adapters, folder, states, **more)
    except Exception as error:
        return f"resume raises {type(error).__name__}"
    if step not in allowed:
        return f"step {step} is resumed"
    return FINE if differs == NOTHING else f"step {step}: {differs}"


def kill_case(
    title: str, before: tuple[int, ...], step: int, keep: int, sizes: tuple[int, ...] = (), allowed: tuple[int, ...] = ()
) -> Case:
    """A save at `step`, after those `before`, killed before each of its file operations, or in the middle of a file."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            made, states = saved_at(adapters, folder, before, keep=keep)
            adapters.run(made.engine, step)
            states[step] = state_of(made)
            origin = folder.parent / "origin"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder, origin)
            work = lambda: adapters.save(made.engine)  # noqa: E731
            count = len(operations_of(work))
            one = bytes_in(folder) / len(adapters.saved(folder))
            kills = [torn_at(size, work) for size in sizes] or [killing_at(number, work) for number in range(min(count, MOST))]
            found, fewer, left, killed = set(), set(), set(), 0
            for kill in kills:
                restore(origin, folder)
                killed += in_child(kill) == KILLED
                found.add(outcome_of(adapters, folder, states, allowed or ((before[-1], step) if before else (0, step)), keep=keep))
                there = adapters.saved(folder)
                if len(there) < min(len(before), keep):
                    fewer.add(f"{there}")
                again = world(adapters, folder, dirty=2, keep=keep)
                adapters.resume(again.engine)
                adapters.run(again.engine, step + 1)
                adapters.save(again.engine)
                if bytes_in(folder) > one * len(adapters.saved(folder)) + 1000:
                    left.add("more than without a kill")
            all_killed = "all" if killed == len(kills) else f"{killed} of {len(kills)}"
            return {"resumed": kinds_of(found), "fewer checkpoints than before": kinds_of(fewer), "after the next save": kinds_of(left)} | (
                {} if sizes else {"killed": all_killed}
            )

    where = f"within the first {', '.join(map(str, sizes))} bytes of a file" if sizes else "each file operation"
    expected = {"resumed": [FINE], "fewer checkpoints than before": [], "after the next save": []}
    expected |= {} if sizes else {"killed": "all"}
    return words("property", title, 5, {"saved after": list(before), "then": step, "keep": keep, "killed": where}, expected, observe)


def restore(origin: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(origin, folder)


def keep_case() -> Case:
    """What there is after each save, and the largest that the folder becomes while a save runs."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            made = world(adapters, folder, keep=2, model=Broad, optimizer=momentum, schedule=none, objective=broad)
            found, largest = [], 0

            def listener(event: str, descriptor: int) -> None:
                nonlocal largest
                largest = max(largest, bytes_in(folder))

            for step in range(1, 6):
                adapters.run(made.engine, step)
                with hearing(listener):
                    adapters.save(made.engine)
                found.append(adapters.saved(folder))
            one = 2 * 4 * (1 << 18) + (1 << 16)
            return {"saved": found, "on the disk afterwards": budget(bytes_in(folder), 2 * one, "bytes"),
                    "while a save runs": budget(largest, 3 * one, "bytes")}  # fmt: skip

    expected = {"saved": [[1], [1, 2], [2, 3], [3, 4], [4, 5]], "on the disk afterwards": WITHIN, "while a save runs": WITHIN}
    return words("budget", "how many stay", 5, {"keep": 2, "saved after": [1, 2, 3, 4, 5], "a checkpoint": "2 MiB"}, expected, observe)


class Broad(nn.Module):
    def __init__(self, count: int = 4, size: int = 1 << 16):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(size) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight[0] for weight in self.weights]).sum() * x.sum()

    def fill(self, seed: int) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(seed)


def broad(model: nn.Module, batch: Results) -> Any:
    return model(batch["x"]), 1, {}


def torn_kept_case() -> Case:
    """A torn checkpoint does not count among those that stay."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            made, _ = saved_at(adapters, folder, (1,), keep=2)
            before, one = set(folder.rglob("*")), bytes_in(folder)
            adapters.run(made.engine, 2)
            adapters.save(made.engine)
            for path in {path for path in folder.rglob("*") if path.is_file()} - before:
                path.write_bytes(path.read_bytes()[:-3])
            torn = adapters.saved(folder)
            made = world(adapters, folder, dirty=1, keep=2)
            adapters.resume(made.engine)
            adapters.run(made.engine, 3)
            adapters.save(made.engine)
            found = {"with a torn one": torn, "after the next save": adapters.saved(folder)}
            return found | {"on the disk then": budget(bytes_in(folder), 2 * one + 1000, "bytes")}

    given = {"saved after": [1, 2, 3], "keep": 2, "step 2": "torn before step 3 is saved"}
    expected = {"with a torn one": [1], "after the next save": [1, 3], "on the disk then": WITHIN}
    return words("property", "a torn checkpoint and keep", 5, given, expected, observe)


def full_case() -> Case:
    """The disk is full while a save runs: it raises, and later there is room again."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            made, states = saved_at(adapters, folder, (1,), keep=1)
            told = folder.parent / "told"

            def work() -> None:
                adapters.run(made.engine, 2)
                with full_disk(500):
                    try:
                        adapters.save(made.engine)
                        said = "returns"
                    except Exception:
                        said = "raises"
                there, heard = adapters.saved(folder), [line for line in made.journal if line.startswith("save")]
                adapters.run(made.engine, 3)
                adapters.save(made.engine)
                told.write_text(f"{said}; {there}; {heard}; {adapters.saved(folder)}")

            code = in_child(work)
            return {"the save; saved; heard; saved later": told.read_text() if code == 0 else f"ended with {code}"}

    expected = {"the save; saved; heard; saved later": "raises; [1]; ['save 1']; [3]"}
    return words(
        "property", "a full disk", 5, {"keep": 1, "saved after": [1, 2, 3], "in step 2": "files end at 500 bytes"}, expected, observe
    )


KILL = (
    torn_kept_case(),
    full_case(),
    kill_case("the first checkpoint", (), 1, 2),
    kill_case("the second, of which one stays", (1,), 2, 1),
    kill_case("the third, of which two stay", (1, 2), 3, 2),
    kill_case("a step that is saved again", (1, 2), 2, 2),
    kill_case("in the middle of a file", (1,), 2, 1, sizes=(0, 1, 40, 500, 5000)),
    kill_case("in the middle of a file that is saved again", (1, 2), 2, 2, sizes=(40, 5000)),
    keep_case(),
)


# Stage 6: power


def lacking(image: Image, folder: Path) -> str:
    """What the disk has not of the files that are there."""
    contents, found = dict(image), set()
    if any(not (folder / name).exists() for name in contents):
        found.add("a change of its name")
    for path in folder.rglob("*"):
        name, whole = str(path.relative_to(folder)), path.read_bytes() if path.is_file() else None
        if name not in contents:
            found.add("a name")
        elif whole and contents[name] != whole:
            own = contents[name] or b""
            found.add("all of a file" if not own else "the end of a file" if whole.startswith(own) else "bytes of a file")
    return f"the disk lacks {', '.join(sorted(found)) or 'nothing'}"


def power_case(title: str, before: tuple[int, ...], step: int, keep: int) -> Case:
    """A power cut at each moment of a save, and after it."""

    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            folder.mkdir(parents=True)
            disks: list[Disk] = []
            told: set[Any] = set()

            class Looking(Listener):
                def on_save(self, step: int) -> None:
                    told.update(*[disk.cut() for disk in disks])

            made, states = saved_at(adapters, folder, before, keep=keep, callbacks=lambda made: [Looking(made)])
            adapters.run(made.engine, step)
            states[step] = state_of(made)
            disk = Disk(folder)
            disks.append(disk)
            with hearing(disk.listener):
                adapters.save(made.engine)
            after = set(disk.cut())
            place = folder.parent / "after the cut"
            found = {"during the save": set(), "when on_save is called": set(), "after the save": set()}
            for image in disk.images:
                write_image(image, place)
                said = outcome_of(adapters, place, states, (before[-1] if before else 0, step), keep=keep)
                found["during the save"].add(said)
                for name, images in (("when on_save is called", told), ("after the save", after)):
                    if image in images:
                        said = outcome_of(adapters, place, states, (step,), keep=keep)
                        found[name].add(said if said == FINE else f"{said}: {lacking(image, folder)}")
            return {name: kinds_of(values) for name, values in found.items()}

    expected = dict.fromkeys(("during the save", "when on_save is called", "after the save"), [FINE])
    given = {
        "saved after": list(before),
        "then": step,
        "keep": keep,
        "power cut": "before each file operation and os.fsync, and at the end",
    }
    return words("property", title, 6, given, expected, observe)


def fsync_case(weights: int) -> Case:
    def observe(adapters: Any) -> Results:
        with somewhere() as folder:
            more = {"model": lambda: Broad(weights, 8), "optimizer": momentum, "schedule": none, "objective": broad}
            made, _ = saved_at(adapters, folder, (1, 2), **more)
            adapters.run(made.engine, 3)
            count = operations_of(lambda: adapters.save(made.engine)).count("os.fsync")
            return {"calls of os.fsync": budget(count, 12, "calls")}

    return words("budget", f"os.fsync with {weights} weights", 6, {"weights": weights, "keep": 2}, {"calls of os.fsync": WITHIN}, observe)


POWER = (
    power_case("the first checkpoint", (), 1, 2),
    power_case("the second, of which one stays", (1,), 2, 1),
    power_case("the fourth, of which two stay", (1, 2, 3), 4, 2),
    power_case("a step that is saved again", (1, 2), 2, 2),
    fsync_case(3),
    fsync_case(60),
)
