"""Planted bugs for chapters/12_grpo/DEBUGGING.md: tiny runs that go wrong, started by a number that says nothing about why.

python tests/debugging/planted.py 3                   which has its own folder, runs/planted/3; under a minute if nothing else runs
python tests/debugging/planted.py 3 FOLDER            ... or this one
python tests/debugging/planted.py 10 engine.profile.first_step=4        ... with settings of yours

Find the cause with the page before you read on: each entry of PLANTED is one bug, a callback that spoils a run or a setting that cannot be
right. None of them is in the core: they are put into this process alone.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from trainer_runs import settings_file  # noqa: E402

from shared.course import binding  # noqa: E402
from shared.course.errors import CourseError  # noqa: E402

binding.choose("reference")

from shared.data.loader import StatefulLoader  # noqa: E402
from shared.engine.callbacks import Callback  # noqa: E402
from shared.parallel.processes.torchrun import ProcessCommunicator, from_torchrun  # noqa: E402
from shared.trainer import run  # noqa: E402
from shared.trainer.config import TrainerConfig  # noqa: E402
from shared.trainer.launch.start import torchrun  # noqa: E402
from shared.trainer.settings import parse_words  # noqa: E402


class Spoiler(Callback):
    """Calls `spoil(engine, ...)` at one hook of every step, before most other callbacks."""

    every_rank = True

    def __init__(self, hook: str, spoil: Callable[..., None]):
        setattr(self, hook, spoil)


class Planted(NamedTuple):
    """words: settings. hook, spoil: of the `Spoiler`, if there is one. patch: called before the run is built."""

    words: tuple[str, ...] = ()
    hook: str = ""
    spoil: Callable[..., None] | None = None
    patch: Callable[[], None] = lambda: None


def slow_rate(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 1e-5


def without_gradient(engine: Any, microbatches: Any) -> None:
    if engine.step == 0:
        for name, parameter in engine.model.named_parameters():
            if ".blocks." in name and parameter.dim() == 2:
                parameter.register_hook(torch.zeros_like)


def broken_gradient(engine: Any, microbatches: Any) -> None:
    if engine.step == 4:
        next(engine.model.parameters()).register_hook(lambda gradient: gradient / 0)


def odd_batch(engine: Any, microbatches: Any) -> None:
    if engine.step == 110:
        for batch in microbatches:
            batch["targets"].random_(0, 500, generator=torch.Generator().manual_seed(0))


def drift(engine: Any) -> None:
    if engine.strategy.rank == 1 and engine.step == 3:
        with torch.no_grad():
            next(engine.model.parameters()).view(-1)[0] += 1e-3


def late_data() -> None:
    rows = StatefulLoader.__iter__

    def slowly(loader: StatefulLoader) -> Iterator[Any]:
        for microbatches in rows(loader):
            time.sleep(0.3)
            yield microbatches

    StatefulLoader.__iter__ = slowly


def each_step(engine: Any, microbatches: Any) -> None:
    if engine.strategy.rank == 1 and engine.step == 3:
        time.sleep(3600)


def slow_link() -> None:
    wait_for = ProcessCommunicator.wait_for

    def later(*arguments: Any) -> None:
        time.sleep(0.1)
        wait_for(*arguments)

    ProcessCommunicator.wait_for = later


def hot_start(batches: Iterator[int], engine: Any, microbatches: Any) -> None:
    """The first start is interrupted in step 21; one that resumes goes on with another peak. batches: counts this start's."""
    begins = next(batches) == 0
    if engine.step == 20:
        os.kill(os.getpid(), signal.SIGINT)
    elif engine.step and begins:
        for group in engine.optimizer.param_groups:
            group["base_lr"] *= 40


ONE_FILE = str(Path(torch.__file__).parent / "_utils.py")
PLANTED: dict[int, Planted] = {
    1: Planted(("steps=30",), "on_batch", without_gradient),
    2: Planted(("steps=8", "parallel.data_parallel=2", "parallel.check_every=2"), "on_step", drift),
    3: Planted(("steps=120", "engine.log_every=20", "engine.evaluate_every=0"), "on_batch", odd_batch),
    4: Planted(("steps=12",), patch=late_data),
    5: Planted(("steps=12",), "on_batch", broken_gradient),
    6: Planted(("model.hidden_size=65536", "model.intermediate_size=262144", "model.num_hidden_layers=64")),
    7: Planted(("steps=30",), "before_optimizer", slow_rate),
    8: Planted(("steps=400", "engine.log_every=100", "engine.evaluate_every=100", "data.batch_size=2", "model.hidden_dropout=0.0",
                "model.hidden_size=64",
                "data.prepare.sources=[{path: %s, limit: 1}, {path: %s, limit: 2}]" % (ONE_FILE, ONE_FILE))),
    9: Planted(("steps=8", "parallel.data_parallel=2", "parallel.heartbeat_timeout=5", "parallel.collective_timeout=20"),
       "on_batch", each_step),
    10: Planted(("steps=12", "parallel.data_parallel=2"), patch=slow_link),
    11: Planted(("steps=40", "schedule.name=constant"), "on_batch", partial(hot_start, count())),
}  # fmt: skip


def main(number: int, folder: Path, asked: list[str]) -> None:
    planted = PLANTED[number]
    words = [str(settings_file(folder, folder.parent / "prepared")), *planted.words, *asked]
    config = parse_words(TrainerConfig, words)
    if config.parallel.ranks > 1 and "LOCAL_RANK" not in os.environ:
        ranks = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", str(config.parallel.ranks)]
        sys.exit(torchrun([*ranks, __file__, str(number), str(folder), *asked]))
    planted.patch()
    if planted.spoil:
        healthy, spoiler = run.callbacks_of, Spoiler(planted.hook, planted.spoil)
        run.callbacks_of = lambda *arguments: [*healthy(*arguments)[:1], spoiler, *healthy(*arguments)[1:]]
    parallel = config.parallel
    world, _ = from_torchrun(parallel.heartbeat_timeout, config.engine.device, parallel.collective_timeout, parallel.init_timeout)
    run.train_model(config, Console(markup=False, emoji=False), world)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].isdigit() or int(sys.argv[1]) not in PLANTED:
        sys.exit(f"Give a number from 1 to {len(PLANTED)}.")
    folders = [word for word in sys.argv[2:] if "=" not in word]
    if len(folders) > 1:
        sys.exit(f"Give one folder, not {len(folders)}: {', '.join(folders)}.")
    chosen = Path(folders[0]) if folders else Path("runs/planted") / sys.argv[1]
    chosen.mkdir(parents=True, exist_ok=True)
    try:
        main(int(sys.argv[1]), chosen, [word for word in sys.argv[2:] if "=" in word])
    except CourseError as error:
        told_by_another = error.on_all_ranks and os.environ.get("LOCAL_RANK", "0") != "0"
        sys.exit(1 if told_by_another else f"\n{error}")
