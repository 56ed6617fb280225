"""Elastic runs whose ranks are killed at random moments, on four "machines" of one rank each, and the table of what followed.

`python tests/tables/elastic_kills.py [--kills 15] [--of-each-run 5] [--seed 0] [--backend course torch]`. A rank alone is killed, which
torchrun starts again, or a machine is, its agent with its rank; another one comes a while later. The weights after 20 steps are compared
with an undisturbed run of one process.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from elastic_runs import ElasticRun, starts  # noqa: E402
from layout_runs import largest_difference  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trainer_runs import settings_file, train  # noqa: E402

from shared.trainer.records import history  # noqa: E402
from shared.trainer.records.history import events_of  # noqa: E402

STEPS, MACHINES, PAUSE, PATIENCE = 20, 4, 0.4, 1800.0  # patience for a machine that does other work as well
SETTINGS = {
    "model": {"hidden_dropout": 0.0}, "steps": STEPS, "data": {"batch_size": 7, "micro_batch_size": 1},
    "optimizer": {"name": "adamw", "lr": 0.001}, "report": {"completions": 0, "prompts": [], "export": True},
    "engine": {"evaluate_every": 0, "checkpoint": {"every": 2}},
}  # fmt: skip
COLUMNS = ("backend", "layout of four ranks", "ranks killed", "machines killed", "during a start", "ranks of each start",
           "steps made twice", "weights differ by")  # fmt: skip
LAYOUTS = ("data_parallel", "fully_sharded", "zero1")  # of the runs, in turn


@dataclass
class Found:
    """What was seen of one run.

    kills: what was killed -> how often. starting: kills that came before all ranks trained. ranks: of each start. lost: steps that were
    made twice. said: lines of the report that name ranks. difference: of any weight to the undisturbed run's, relative to its tensor.
    """

    kills: Counter = field(default_factory=Counter)
    starting: int = 0
    ranks: list[int] = field(default_factory=list)
    lost: int = 0
    said: int = 0
    difference: float = float("nan")
    seconds: float = 0.0


def undisturbed(folder: Path) -> Path:
    """The run of one process; it prepares the text, too."""
    file = settings_file(folder / "whole", folder / "prepared", **SETTINGS)
    done = train(file, "parallel.data_parallel=1")
    assert done.returncode == 0, done.stderr
    return folder / "whole" / "run"


def words_of(folder: Path, backend: str, layout: str) -> list[str]:
    degree = "parallel.data_parallel=4" if layout == "zero1" else f"parallel.{layout}=4"
    zero = ["parallel.zero=1"] if layout == "zero1" else []
    settings = settings_file(folder / f"{backend}-{layout}", folder / "prepared", **SETTINGS)
    return [str(settings), degree, *zero, f"parallel.backend={backend}", "parallel.heartbeat_timeout=6"]


def killed(folder: Path, words: list[str], kills: int, generator: random.Random) -> Found:
    """A run that is killed so often, or until it ends."""
    found, began = Found(), time.monotonic()
    with ElasticRun(folder, words, agents=MACHINES) as run:
        run.environment |= {"ELASTIC_PAUSE": str(PAUSE)}
        agents = [run.start() for _ in range(MACHINES)]
        seen = 0
        while found.kills.total() < kills:
            if generator.random() < 0.2:  # in the middle of a start, mostly
                time.sleep(generator.uniform(0, 6))
            else:
                run.wait_for(lambda events, seen=seen: len(starts(events)) > seen or history.has_ended(folder), PATIENCE)
                time.sleep(generator.uniform(0, 8 * PAUSE))
            if history.has_ended(folder):
                break
            now = len(starts(events_of(folder)))
            if kill_one(run, agents, found, generator):
                found.starting += now == seen
                seen = now
            if len(agents) < MACHINES:
                if generator.random() < 0.6:  # the others train without it
                    run.wait_for(lambda events, seen=seen: len(starts(events)) > seen or history.has_ended(folder), PATIENCE)
                time.sleep(generator.uniform(0, 8 * PAUSE))
                agents.append(run.start())
        run.wait_for(lambda events: events and events[-1]["event"] == "end", PATIENCE)
        found.ranks = starts(events_of(folder))
    eras = history.eras(folder)
    found.lost, found.seconds = sum(era.lost for era in eras), time.monotonic() - began
    page = (folder / "report.html").read_text(encoding="utf-8")
    found.said = page.count("1 rank of") + page.count("ranks of")
    return found


def kill_one(run: ElasticRun, agents: list, found: Found, generator: random.Random) -> bool:
    """Whether something was there to be killed: a rank, or a machine while two others are left."""
    machine = len(agents) > 2 and generator.random() < 0.5
    chosen = generator.choice(agents)
    ranks = run.ranks_of(chosen)
    if not ranks:
        return False
    if machine:
        agents.remove(chosen)
        run.kill(chosen)
    else:
        with suppress(psutil.NoSuchProcess):
            ranks[0].kill()
    found.kills["machine" if machine else "rank"] += 1
    return True


def rows(kills: int, of_each: int, seed: int, backends: list[str], folder: Path) -> Iterator[tuple[str, str, Found]]:
    whole = load_file(undisturbed(folder) / "model" / "model.safetensors")
    for backend in backends:
        left, number = kills, 0
        while left > 0:
            layout = LAYOUTS[number % len(LAYOUTS)]
            place = folder / f"{backend}-{number}"
            found = killed(place, words_of(folder, backend, layout), min(of_each, left), random.Random(f"{seed} {backend} {number}"))
            found.difference = largest_difference(load_file(place / "model" / "model.safetensors"), whole)
            left, number = left - found.kills.total(), number + 1
            yield backend, layout, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=15, help="on each backend")
    parser.add_argument("--of-each-run", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", nargs="+", default=["course", "torch"])
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for backend, layout, found in rows(asked.kills, asked.of_each_run, asked.seed, asked.backend, Path(folder)):
            name = {"data_parallel": "dp4", "fully_sharded": "fsdp4", "zero1": "dp4_zero1"}[layout]
            print(f"| {backend} | {name} | {found.kills['rank']} | {found.kills['machine']} | {found.starting} | "
                  f"{' '.join(map(str, found.ranks))} | {found.lost} | {found.difference:.1e} |", flush=True)  # fmt: skip
            print(f"{found.seconds:.0f} s, {found.said} lines of the report name ranks", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
