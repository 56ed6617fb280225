"""Machines that come and go: agents of torchrun on this machine, each with ranks of its own, and the store in which they meet."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import psutil
from ports import reserved_port

from shared.course.paths import CHECKOUT
from shared.trainer.records.history import events_of

SCRIPT = Path(__file__).with_name("elastic_script.py")
SOON = "is_host=0,last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=4"
STORE = "import sys; from shared.trainer.launch.elastic import hold_rendezvous; hold_rendezvous('127.0.0.1', int(sys.argv[1]))"


class ElasticRun:
    """A run over agents that a test starts and kills. Use it in a `with` block, after which no process of it is left.

    Args:
        output: the run's folder, which holds what is printed as well.
        words: of the trainer.
        ranks: of each agent.
        agents: at most.
    """

    def __init__(self, output: Path, words: list[str], ranks: int = 1, agents: int = 2):
        self.output, self.ranks = output, ranks
        self.reserved = ExitStack()
        self.port = self.reserved.enter_context(reserved_port())
        places = ["--nnodes", f"1:{agents}", "--nproc-per-node", str(ranks), "--max-restarts", "1000", "--monitor-interval", "0.1"]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "elastic", "--rdzv-conf", SOON]
        self.command = [sys.executable, "-m", "torch.distributed.run", *places, *meeting, "--local-addr", "127.0.0.1", str(SCRIPT)]
        self.command += [*words, f"engine.output={output}", "elastic=true"]
        self.started: list[subprocess.Popen] = []
        path = os.pathsep.join([str(CHECKOUT), str(SCRIPT.parent)])
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def __enter__(self) -> "ElasticRun":
        self.output.mkdir(parents=True)
        self.printed = (self.output / "printed.txt").open("w+")
        self.start([sys.executable, "-c", STORE, str(self.port)])
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for agent in self.started:
            self.kill(agent)
        self.reserved.close()
        self.printed.close()

    def start(self, command: list[str] | None = None) -> subprocess.Popen:
        agent = subprocess.Popen(command or self.command, stdout=self.printed, stderr=self.printed, env=self.environment)
        self.started.append(agent)
        return agent

    def ranks_of(self, agent: subprocess.Popen) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [child for child in psutil.Process(agent.pid).children() if str(SCRIPT) in child.cmdline()]
        return []

    def agent_of_rank(self, rank: int, agents: list[subprocess.Popen]) -> subprocess.Popen:
        """The agent of a rank that runs."""
        while True:
            for agent in agents:
                with suppress(psutil.NoSuchProcess):  # ranks may be starting again
                    if any(each.environ().get("RANK") == str(rank) for each in self.ranks_of(agent)):
                        return agent
            time.sleep(0.05)

    def kill(self, agent: subprocess.Popen) -> None:
        """As a machine ends that loses its power: the agent with its ranks, without a word to anybody."""
        ranks = self.ranks_of(agent)
        for process in (agent, *ranks):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        agent.wait()

    def wait_for(self, wanted: Callable[[list[dict]], bool], seconds: float = 300.0) -> list[dict]:
        """The run's history, once it is as wanted."""
        until = time.monotonic() + seconds
        while not wanted(events := events_of(self.output)):
            assert time.monotonic() < until, f"{events}\n{self.said()[-8000:]}"
            time.sleep(0.05)
        return events

    def wait_at(self, step: int, seconds: float = 300.0) -> None:
        """Until a rank waits at the gate of this step."""
        until = time.monotonic() + seconds
        while not (self.output / f"at-{step}").exists():
            assert time.monotonic() < until, self.said()[-8000:]
            time.sleep(0.02)

    def said(self) -> str:
        self.printed.flush()
        return (self.output / "printed.txt").read_text(errors="replace")


def starts(events: list[dict]) -> list[int]:
    """With how many ranks the run was started, each time."""
    return [event["ranks"] for event in events if event["event"] == "start"]
