"""Several machines on one: Linux namespaces (network, mounts, hostname, processes), joined by a switch; torchrun on each of them.

    with Machines(tmp_path, shared=False) as (a, b):                two machines, named a and b
        jobs = torchrun([a, b], ["script.py", str(a.folder)])       the same command on each, as a user types it
        jobs[0].wait_for("step 3", 60)
        b.cut()                                                     its packets are lost, without a word
        codes = [job.wait(60) for job in jobs]

Each machine has a hostname, a boot id, an /etc/hosts, an address (10.77.0.1, 10.77.0.2, ...; also IPv6), a copy of the project under the
project's own path, and a folder `folder`, which is its own or shared by all. It sees its own processes only.

Nothing is left over, whatever happens: namespaces have no names, so all of them, with their mounts, devices and processes, end with the
first process of each, which ends when the pipe to this process breaks. Where the system allows no namespaces, the test is skipped.
"""

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from namespaces import ROOT, Job, Namespaces, Unsupported

from shared.course.paths import CHECKOUT

OTHERS = re.compile("MASTER_|RANK|LOCAL_|WORLD_|GROUP_|GLOO_|NCCL_|TORCH")  # variables that a test must not inherit
SETUP = """set -e
ip link set lo up
hostname "$NAME"
mkdir -p "$SCRATCH/upper-$NAME"
mount -t tmpfs none "$SCRATCH/upper-$NAME"
mkdir "$SCRATCH/upper-$NAME/changed" "$SCRATCH/upper-$NAME/work"
mount -t overlay none -o "lowerdir=$PROJECT,upperdir=$SCRATCH/upper-$NAME/changed,workdir=$SCRATCH/upper-$NAME/work" "$PROJECT"
mount --bind "$SCRATCH/$NAME" "$SCRATCH/run"
mount --bind "$SCRATCH/hosts-$NAME" /etc/hosts
mount --bind "$SCRATCH/boot-$NAME" /proc/sys/kernel/random/boot_id
mount --bind /dev/null /etc/resolv.conf
echo ready
exec cat
"""
SWITCH = """set -e
ip link set lo up
ip link add switch type bridge stp_state 0 mcast_snooping 0
ip link set switch up
echo ready
exec cat
"""
# What machines know about names: Debian's default, without and with a network that knows the other ones; nothing; all of them.
HOSTS = {"debian": "127.0.1.1 {own}\n", "debian with DNS": "127.0.1.1 {own}\n{others}", "nowhere": "", "right": "{own address}{others}"}


class Machine:
    """One of the machines.

    Attributes:
        name: also its hostname. address: its IPv4 address. address6: its IPv6 address.
        folder: the path, on this machine, of the folder for runs. All machines have one path; whether it is one folder, `shared` says.
        kept: where this process finds that folder, also when the machine is gone.
        path_of: path on this machine -> path by which this process can read and write the file while the machine runs.
    """

    def __init__(self, network: "Machines", number: int, name: str):
        self.network, self.name, self.port = network, name, f"port{number}"
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number}"
        self.folder = network.scratch / "run"
        self.kept = self.folder if network.shared else network.scratch / name
        self.kept.mkdir(exist_ok=True)
        variables = {"NAME": name, "SCRATCH": str(network.scratch), "PROJECT": str(CHECKOUT)}
        script = SETUP.replace('mount --bind "$SCRATCH/$NAME" "$SCRATCH/run"\n', "") if network.shared else SETUP
        before = [] if ROOT else network.switch.enter("--net")
        self.space = Namespaces(script, before, **variables)
        network.switch.ip("link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", str(self.space.first))
        network.switch.ip("link", "set", self.port, "master", "switch", "up")
        for address in (f"{self.address}/24", f"{self.address6}/64"):
            self.space.ip("address", "add", address, "dev", "eth0", *(["nodad"] if ":" in address else []))
        self.space.ip("link", "set", "eth0", "up")

    def start(self, words: Sequence[object], **environment: str) -> Job:
        """Start a command in the copy of the project, with the project's Python path."""
        kept = {name: value for name, value in os.environ.items() if not OTHERS.match(name)}
        kept |= {"PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"} | environment
        job = Job(self, [str(word) for word in words], kept)
        self.network.jobs.append(job)
        return job

    def run(self, *words: object, timeout: float = 120, **environment: str) -> tuple[int, str]:
        """Run a command to its end. Returns its exit code and its output."""
        job = self.start(words, **environment)
        return job.wait(timeout), job.output

    def path_of(self, path: Path) -> Path:
        return Path(f"/proc/{self.space.first}/root{path}")

    def processes(self) -> list[psutil.Process]:
        """All that run here, but the first one, which only holds the machine."""
        own, found = os.readlink(f"/proc/{self.space.first}/ns/pid"), []
        for process in psutil.process_iter():
            try:
                if process.pid != self.space.first and os.readlink(f"/proc/{process.pid}/ns/pid") == own:
                    found.append(process)
            except OSError:  # ended meanwhile
                pass
        return found

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank that torchrun started here; of a rank's own children, none."""
        for process in self.processes():
            try:
                if process.environ().get("RANK") == str(rank) and "RANK" not in process.parent().environ():
                    return process
            except (psutil.Error, AttributeError):
                pass
        raise AssertionError(f"rank {rank} does not run on {self.name}")

    # What can happen to a machine.

    def cut(self) -> None:
        """From now on its packets are lost, in both directions; nobody is notified, as where a switch fails."""
        self.network.switch.ip("link", "set", self.port, "nomaster")

    def mend(self) -> None:
        self.network.switch.ip("link", "set", self.port, "master", "switch")

    def slow(self, rate: str = "10mbit") -> None:
        """Limit what it sends and what it receives, as `tc` writes a rate."""
        for space, device in ((self.network.switch, self.port), (self.space, "eth0")):
            space.ip(*f"qdisc replace dev {device} root tbf rate {rate} burst 32kbit latency 400ms".split(), tool="tc")

    def stop(self) -> None:
        """All of its processes hang (SIGSTOP); its kernel still acknowledges what it is sent."""
        for process in self.processes():
            process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        for process in [*self.processes(), *(job.process for job in self.network.jobs if job.machine is self)]:
            process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Its power is gone: its processes end, and the others hear nothing of it."""
        self.cut()
        self.space.end()


class Machines:
    """Machines on one switch; a context manager that gives them in order.

    Args:
        scratch: a folder for what they keep; machines that are made in it later find that again.
        shared: whether `folder` is one for all, as on a network file system, or one of each machine.
        hosts: what /etc/hosts says about names; a key of `HOSTS`.
    """

    def __init__(self, scratch: Path, names: Sequence[str] = ("a", "b"), shared: bool = True, hosts: str = "debian"):
        if reason := reason_against():
            pytest.skip(reason)
        self.scratch, self.shared, self.jobs, self.machines = scratch, shared, [], []
        (scratch / "run").mkdir(parents=True, exist_ok=True)
        lines = {name: f"10.77.0.{number} {name}\n" for number, name in enumerate(names, start=1)}
        for name in names:
            others = "".join(line for other, line in lines.items() if other != name)
            known = HOSTS[hosts].replace("{own address}", lines[name]).replace("{own}", name).replace("{others}", others)
            (scratch / f"boot-{name}").write_text(f"{uuid4()}\n")  # another one after a loss of power
            (scratch / f"hosts-{name}").write_text(f"127.0.0.1 localhost\n::1 localhost\n{known}")
        self.switch = Namespaces(SWITCH, before=[] if ROOT else ["unshare", "--user", "--map-root-user"])
        try:
            for number, name in enumerate(names, start=1):
                self.machines.append(Machine(self, number, name))
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> list[Machine]:
        return self.machines

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        for space in [*(machine.space for machine in self.machines), self.switch]:
            space.end()
        for job in self.jobs:
            job.process.kill()  # nsenter stops itself with a child that is stopped
            job.process.wait()
            job.reader.join()
            job.process.stdout.close()


@cache
def reason_against() -> str:
    """Why machines cannot be made here; empty where they can."""
    try:
        with tempfile.TemporaryDirectory(prefix="machines-") as scratch:
            switch = Namespaces(SWITCH, before=[] if ROOT else ["unshare", "--user", "--map-root-user"])
            try:
                for folder in ("run", "a"):
                    Path(scratch, folder).mkdir()
                for file in ("hosts-a", "boot-a"):
                    Path(scratch, file).touch()
                before = [] if ROOT else switch.enter("--net")
                Namespaces(SETUP, before, NAME="a", SCRATCH=scratch, PROJECT=str(CHECKOUT)).end()
            finally:
                switch.end()
    except (Unsupported, OSError) as error:
        return f"this system makes no namespaces that stand for machines: {error}"
    return ""


def torchrun(
    machines: Sequence[Machine],
    words: Sequence[object],
    rendezvous: str = "static",
    per_node: int = 1,
    options: Sequence[object] = (),
    master: str | None = None,
    addresses: bool = True,
    **environment: str,
) -> list[Job]:
    """The same command on each machine, under torchrun, which meets on the first one.

    Args:
        words: a script and its words.
        rendezvous: static (each has `--node-rank`) or c10d.
        per_node: ranks on each machine.
        options: of torchrun, such as `--max-restarts 1`.
        master: how the first machine is called (`--master-addr`, `--rdzv-endpoint`); its address, if not given.
        addresses: whether c10d is given what it takes from names otherwise: which machine is the first (`--rdzv-conf is_host=1`), and each
            one's own address (`--local-addr`).
    """
    return [
        machine.start([*command_of(machines, number, rendezvous, per_node, master, addresses), *options, *words], **environment)
        for number, machine in enumerate(machines)
    ]


def command_of(
    machines: Sequence[Machine], number: int, rendezvous: str, per_node: int = 1, master: str | None = None, addresses: bool = True
) -> Iterator[str]:
    """torchrun's own part of the command on machine `number`, counted from 0."""
    master = master or machines[0].address
    yield from (sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(machines)), "--nproc-per-node", str(per_node))
    if rendezvous == "static":
        yield from ("--node-rank", str(number), "--master-addr", master, "--master-port", "29400")
    else:
        yield from ("--rdzv-backend", "c10d", "--rdzv-id", "machines", "--rdzv-endpoint", f"{master}:29400")
        if addresses:
            yield from ("--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", machines[number].address)
