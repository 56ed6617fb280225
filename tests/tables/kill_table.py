"""Runs that are killed at random moments and resumed until they end, and the table of what followed.

`python tests/tables/kill_table.py [--kills 24] [--torchrun-kills 17] [--seed 0] [ROW ...]`, with rows such as fsdp2/course. Each run is
compared, bit for bit, with one of the same layout and as many steps that nobody killed.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing import forkserver
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"
sys.path[:0] = [str(SUPPORT)]

from kill_run import train  # noqa: E402
from shared.course.running import PRELOADED  # noqa: E402
from shared.parallel.comm.communicator import CommunicationError  # noqa: E402
from shared.parallel.config import ParallelConfig, parse_layout  # noqa: E402
from shared.parallel.processes.launch import run_processes  # noqa: E402

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--monitor-interval", "0.1"]
RANKS_OF = {"one": 1, "dp2": 2, "fsdp2": 2, "dp2_zero1": 2, "dp2_fsdp2": 4}
ROWS = [f"{layout}/{backend}" for layout in RANKS_OF for backend in ("course", "torch")[: RANKS_OF[layout]]]
RESTARTED = ["dp2/course", "fsdp2/course", "dp2_zero1/torch", "fsdp2/torch"]  # these rows under torchrun too
IMPORTS = ["torch.distributed.fsdp", "torch.distributed.optim", "torch.nn.parallel", "safetensors.torch", "rich.console", "rich.progress"]


@dataclass
class Found:
    """What was seen of one run. kills: signal -> how many landed. in_save: after how many a save lay there half done. resumed: the starts
    that began after step 0. strange: what nobody expected."""

    kills: dict[str, int] = field(default_factory=dict)
    in_save: int = 0
    resumed: int = 0
    step: int = 0
    same: bool = False
    seconds: float = 0.0
    strange: list[str] = field(default_factory=list)

    @property
    def landed(self) -> int:
        return sum(self.kills.values())


class Killer:
    """Sends signals to a run's ranks, at random moments after its training has begun."""

    def __init__(self, folder: Path, ranks: int, generator: random.Random, found: Found, one_rank: bool):
        self.folder, self.ranks, self.generator, self.found, self.one_rank = folder, ranks, generator, found, one_rank
        self.killed: set[int] = set()
        self.ended: Callable[[], bool] = lambda: False  # whether what starts the ranks has ended

    def training(self) -> list[int]:
        """The processes of ranks that train, once all do; empty where they do not in two minutes."""
        began = time.monotonic()
        while time.monotonic() < began + 120 and not self.ended():
            with suppress(OSError, ValueError):
                found = [int((self.folder / "signs" / str(rank)).read_text()) for rank in range(self.ranks)]
                if not self.killed & set(found):
                    return found
            time.sleep(0.005)
        return []

    def saving(self) -> bool:
        return any(self.folder.glob("checkpoints/*.partial")) or any(self.folder.glob("checkpoints/*.ranks"))

    def kill_once(self) -> None:
        ranks = self.training()
        if not ranks:
            self.found.strange.append("it did not begin to train")
            return
        time.sleep(self.generator.uniform(0, 0.8))
        if self.generator.random() < 0.4:  # in the middle of a save
            until = time.monotonic() + 2
            while not self.saving() and time.monotonic() < until:
                pass
            time.sleep(self.generator.uniform(0, 0.004))
        number = self.generator.choice([signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGINT])
        everybody = not self.one_rank and (number == signal.SIGINT or self.generator.random() < 0.5)  # Ctrl-C reaches all of a terminal
        chosen = ranks if everybody else [self.generator.choice(ranks)]
        self.killed |= set(ranks)
        try:
            for process in chosen:
                os.kill(process, number)
        except ProcessLookupError:
            self.found.strange.append("it had ended before it was killed")
            return
        self.found.in_save += number == signal.SIGKILL and self.saving()
        name = signal.Signals(number).name
        self.found.kills[name] = self.found.kills.get(name, 0) + 1


def in_processes(folder: Path, row: str, kills: int, generator: random.Random) -> Found:
    """A run over new processes of this machine, started again after each kill."""
    layout, backend = row.split("/")
    ranks, found = RANKS_OF[layout], Found()
    killer = Killer(folder, ranks, generator, found, one_rank=False)
    for attempt in range(kills + 1):
        shutil.rmtree(folder / "signs", ignore_errors=True)  # of an attempt that was not killed, they would stand for this one
        if attempt == kills:
            enough_after(folder)
        helper = threading.Thread(target=killer.kill_once) if attempt < kills else None
        with redirect_stdout(StringIO()) as output:
            if helper:
                helper.start()
            try:
                left = run_processes(train, ranks, folder, layout, backend, timeout=300.0)
                if attempt < kills and not set(left) & {"SIGTERM", "SIGINT"}:
                    found.strange.append(f"it ended with {left}")
            except CommunicationError as error:
                if attempt == kills or not ("signal" in str(error) or "rank" in str(error)):
                    found.strange.append(str(error))
            except Exception as error:
                if not says_that_a_peer_is_gone(str(error)):
                    found.strange.append(f"{type(error).__name__}: {error}")
            if helper:
                helper.join()
        read_output(found, output.getvalue(), attempts=1)
    return found


def under_torchrun(folder: Path, row: str, kills: int, generator: random.Random) -> Found:
    """A run that torchrun starts once, and restarts after each kill of one of its ranks."""
    layout, backend = row.split("/")
    found = Found()
    killer = Killer(folder, RANKS_OF[layout], generator, found, one_rank=True)
    places = ["--nproc-per-node", str(RANKS_OF[layout]), "--max-restarts", str(kills + 2)]
    command = [*TORCHRUN, *places, str(SUPPORT / "kill_run.py"), str(folder), layout, backend]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT.parents[1]), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        killer.ended = lambda: started.poll() is not None
        try:
            for _ in range(kills):
                if not killer.ended():
                    killer.kill_once()
            killer.training()
            enough_after(folder)
            if code := started.wait(timeout=120):
                found.strange.append(f"torchrun ended with {code}")
        finally:
            started.terminate()
            started.wait()
        output.seek(0)
        said = output.read()
        if found.strange:
            found.strange.append(said[:2000] + said[-2000:])
        read_output(found, said, attempts=kills + 1)
    return found


def says_that_a_peer_is_gone(output: str) -> bool:
    """As gloo says it to PyTorch's own engine, or our communicator to a rank."""
    return any(words in output for words in ("Connection reset", "Connection closed", "RankStopped"))


def enough_after(folder: Path) -> None:
    """Let the run end, soon after it has begun to train again."""
    threading.Timer(0.3, (folder / "enough").touch).start()


def read_output(found: Found, output: str, attempts: int) -> None:
    found.resumed += min(attempts, output.count("Going on from step"))
    for sign in ("is damaged", "could not be written", "Traceback"):
        if sign in output and not (sign == "Traceback" and says_that_a_peer_is_gone(output)):
            found.strange.append(output[max(0, output.index(sign) - 200) :][:1000])


def compared(row: str, kills: int, seed: int, torchrun: bool, scratch: Path) -> Found:
    """The run with its kills, beside one without."""
    layout, backend = row.split("/")
    folder, whole = scratch / "killed", scratch / "whole"
    for each in (folder, whole):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir()
    began = time.monotonic()
    found = (under_torchrun if torchrun else in_processes)(folder, row, kills, random.Random(f"{seed} {row} {torchrun}"))
    found.seconds = time.monotonic() - began
    if (folder / "digest.json").exists():
        ended = json.loads((folder / "digest.json").read_text())
        found.step = ended["step"]
        with redirect_stdout(StringIO()):
            run_processes(train, RANKS_OF[layout], whole, layout, backend, found.step, timeout=600.0)
        found.same = json.loads((whole / "digest.json").read_text()) == ended
    return found


def line(row: str, torchrun: bool, found: Found) -> str:
    by_signal = ", ".join(f"{count} {name}" for name, count in sorted(found.kills.items()))
    layout, backend = row.split("/")
    how = "torchrun" if torchrun else "processes"
    weights = "the same" if found.same else "OTHER"
    cells = (layout, backend, how, f"{found.landed} ({by_signal})", found.in_save, found.resumed, found.step, weights)
    return "| " + " | ".join(map(str, cells)) + " |" + "".join(f"\n  STRANGE: {each}" for each in found.strange)


COLUMNS = "layout | backend | started as | kills | of these during a save | starts that resumed | steps of each run | weights"
HEAD = f"| {COLUMNS} |\n" + "|---" * 8 + "|"


def start_server() -> None:
    """The fork server, with what the run imports besides the core."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *IMPORTS])
    forkserver.ensure_running()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=ROWS, help=", ".join(ROWS))
    parser.add_argument("--kills", type=int, default=15, help="of each run over processes")
    parser.add_argument("--torchrun-kills", type=int, default=17, help="of each run under torchrun")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_server()
    total = 0
    print(HEAD)
    with tempfile.TemporaryDirectory() as scratch:
        for row in options.rows:
            assert parse_layout(row.split("/")[0], ParallelConfig()).ranks == RANKS_OF[row.split("/")[0]]
            for torchrun in (False, True) if row in RESTARTED else (False,):
                kills = options.torchrun_kills if torchrun else options.kills
                if kills:
                    found = compared(row, kills, options.seed, torchrun, Path(scratch))
                    total += found.landed
                    print(line(row, torchrun, found), flush=True)
    print(f"{total} kills.")
