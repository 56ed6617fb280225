"""The sandbox on honest programs, and its pool of workers when one is lost; hostile programs have a file of their own."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.rl.code_reward import CodeReward, CodeTask
from shared.rl.sandbox import pool as pools
from shared.rl.sandbox.isolation import Limits
from shared.rl.sandbox.pool import Call, Outcome, Pool
from shared.rl.sandbox.values import encode
from shared.rl.sandbox.worker import MODULES

BOTH = pytest.mark.parametrize("pool", [True, False], ids=["namespaces", "filter"], indirect=True)
ADD = CodeTask("add", (((2, 3), 5), ((-1, 1), 0), ((10**30, 1), 10**30 + 1)))
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def pool(request):
    """A pool with namespaces, where this machine has them, or without."""
    with closing(Pool(Limits(cpu_seconds=1, wall_seconds=60), workers=1, namespaces=request.param)) as pool:
        yield pool


HONEST = {
    "imports": "import math, re, collections, itertools, functools, heapq, bisect, string, statistics, fractions, decimal\n" + RIGHT,
    "a dataclass": "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int\n"
    "def add(a, b):\n    return (P(a).x + P(b).x)\n",
    "recursion": "import sys\nsys.setrecursionlimit(9000)\ndef add(a, b, n=5000):\n    return a + b if n == 0 else add(a, b, n - 1)\n",
    "a cache": "from functools import lru_cache\n@lru_cache(None)\ndef add(a, b):\n    return sum([a, b])\n",
    "dates": "import datetime\ndef add(a, b):\n    datetime.datetime.strptime('2024-02-29', '%Y-%m-%d').strftime('%A')\n    return a + b\n",
    "random numbers": "import random, secrets, uuid\ndef add(a, b):\n    random.shuffle([1, 2]); uuid.uuid4()\n    return a + b\n",
    "printing": "def add(a, b):\n    print('a' * 10_000)\n    return a + b\n",
    "texts": "def add(a, b):\n    'ä'.encode('latin-1'); 'ä'.encode('utf-16'); 'ä'.encode('idna')\n    return a + b\n",
    "types": "from typing import *\nfrom collections import defaultdict\ndef add(a: int, b: Optional[int]) -> int:\n    return a + b\n",
    "a guard": RIGHT + "if __name__ == '__main__':\n    print(add(*map(int, input().split())))\n",
    "an exception that it handles": "def add(a, b):\n    try:\n        assert not a\n    except AssertionError:\n        return a + b\n",
    "decimal": "from decimal import Decimal, getcontext\ngetcontext().prec = 60\ndef add(a, b):\n    return int(Decimal(a) + Decimal(b))\n",
    "hashes and compression": "import hashlib, zlib, json\ndef add(a, b):\n    zlib.compress(b'x'); hashlib.sha256(b'')\n"
    "    return json.loads(json.dumps(a + b))\n",
    "threads that it can do without": "import threading\nlock = threading.Lock()\ndef add(a, b):\n    with lock:\n        return a + b\n",
    "time": "import time\ndef add(a, b):\n    time.sleep(0.001); time.perf_counter()\n    return a + b\n",
    "async": "async def inner(a, b):\n    return a + b\ndef add(a, b):\n    try:\n        inner(a, b).send(None)\n"
    "    except StopIteration as e:\n        return e.value\n",
}


@BOTH
@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_run_as_in_any_python(name, pool):
    call = Call(HONEST[name], ADD.function, [inputs for inputs, _ in ADD.cases])
    assert pool.run([call]) == [Outcome("finished", tuple(("value", encode(expected)) for _, expected in ADD.cases))]


@BOTH
def test_a_run_says_what_holds(pool):
    line = pool.describe()
    assert "\n" not in line and "1 s of CPU" in line and f"as user {65534 if os.geteuid() == 0 else os.geteuid()}" in line
    said = pool.workers[0].said
    assert ("network" in line and "its own /tmp" in line) is said["namespaces"]
    assert ("without namespaces" in line) is not said["namespaces"] and ("refuses" in line) is ("refused" in said)


@BOTH
def test_the_namespaces_that_are_said_to_hold_do(pool):
    """The filter hides them from the table of hostile programs, which would be refused without them too."""
    number = pool.run([Call("import os\ndef f(): return os.getpid()", "f", [()])])[0].results[0][1]
    assert (number == 1) is pool.workers[0].said["namespaces"]
    if os.geteuid() == 0:  # only root may look
        places = [f"/proc/{process}/ns/" for process in (os.getpid(), pool.workers[0].process.pid)]
        for kind in ("user", "mnt", "net", "ipc", "uts"):
            here, there = (os.readlink(place + kind) for place in places)
            assert (here != there) is pool.workers[0].said["namespaces"], kind


@BOTH
def test_a_program_has_a_folder_of_its_own_where_namespaces_hold(pool):
    program = "import tempfile\ndef f(size):\n    with tempfile.TemporaryFile() as file:\n        return file.write(bytes(size))\n"
    results = pool.run([Call(program, "f", [(10**6,), (pool.limits.folder_mib << 21,)])])[0].results
    assert results[1][0] == "raised"  # twice what fits
    if pool.workers[0].said["namespaces"]:
        assert results[0] == ("value", 10**6)
    else:
        assert results[0][0] == "raised" and "No usable temporary directory" in results[0][1]


@BOTH
def test_a_program_finds_nothing_of_an_earlier_one(pool):
    leave = "import builtins, json\nbuiltins.left = json.left = 1\n"
    leave += "try:\n    open('/tmp/left', 'w').write('x')\nexcept OSError:\n    pass\ndef f(): 0"
    look = "import builtins, json, os\ndef f():\n    try:\n        here = os.listdir('/tmp')\n    except OSError:\n        here = []\n"
    look += "    return [hasattr(builtins, 'left'), hasattr(json, 'left'), here]"
    look_for_text = (
        "import gc\ndef f():\n    return [t for t in gc.get_objects() if isinstance(t, dict) and 'zq' + 'zq' in str(t)[:99999]] != []"
    )
    pool.run([Call(leave + "  # zqzq", "f", [()])])
    assert pool.run([Call(look, "f", [()])])[0].results == (("value", encode([False, False, []])),)
    assert pool.run([Call(look_for_text, "f", [()])])[0].results == (("value", False),)


@BOTH
def test_results_are_the_same_every_time(pool):
    """A set's order and random numbers would otherwise change a reward from one run to the next."""
    call = Call("import random\ndef f():\n    return [list({'a', 'b', 'c', 'd', 'e'}), random.random()]", "f", [()])
    with closing(Pool(workers=1, namespaces=pool.namespaces)) as other:
        assert pool.run([call]) == other.run([call]) == other.run([call])


def test_rewards_of_code():
    half = "def add(a, b):\n    return a + b if a > 0 else 1"
    answers = [
        RIGHT,
        half,
        "no program",
        f"I think:\n```python\n{RIGHT}```\nDone.",
        f"```\nx\n```\n```py\n{RIGHT}",
        "def add(a, b):\n  1/0",
        "",
    ]
    with closing(CodeReward()) as whole:
        assert whole.judge(answers, [ADD] * 7) == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
        assert whole.judge(answers[:3], [ADD] * 3, share=True) == [1.0, 2 / 3, 0.0]
        assert whole(RIGHT, '{"function": "add", "cases": [[[2, 3], 5], [["a", "b"], "ab"]]}') == 1.0


def test_a_lost_worker_is_replaced_and_its_program_run_again():
    call = Call(RIGHT, "add", [(1, 2)])
    with closing(Pool(workers=1)) as pool:
        pool.run([call])
        first = pool.workers[0].process.pid
        os.kill(first, signal.SIGKILL)
        assert pool.run([call])[0].ended == "finished" and pool.workers[0].process.pid != first


def test_a_program_that_loses_its_worker_twice_is_given_up(monkeypatch):
    """And the others are judged. No program of the table of hostile ones manages that, so the loss is made here."""
    lost = []

    def kill(worker):
        if worker.calls == 2:
            lost.append(worker.process.pid)
            raise pools.WorkerLost
        return receive(worker)

    receive = pools.Worker.receive
    monkeypatch.setattr(pools.Worker, "receive", kill)
    with closing(Pool(workers=1)) as pool:
        ended = pool.run([Call(RIGHT, "add", [(1, 2)] * calls) for calls in (1, 2, 3)])
        assert [outcome.ended for outcome in ended] == ["finished", "worker lost", "finished"]
    assert len(lost) == len(set(lost)) == 2


def test_a_sandbox_that_does_not_hold_is_not_used(monkeypatch):
    """The trial at each worker's start: here it finds that something is possible which must not be."""
    monkeypatch.setattr(pools, "ATTEMPTS", pools.ATTEMPTS.replace('"start a process": os.fork', '"read the clock": os.times'))
    with pytest.raises(CourseError, match=r"does not hold.*read the clock"), closing(Pool()) as pool:
        pool.describe()


REFUSING = """
import ctypes, os, signal
from shared.rl.sandbox.filter import ALLOW, JUMP_EQUAL, LOAD, REFUSE, RETURN, Instruction, Program
from shared.rl.sandbox.isolation import libc
from shared.rl.sandbox.pool import Call, Pool
number = {"x86_64": NUMBERS[0], "aarch64": NUMBERS[1]}[os.uname().machine]
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
lines = [(LOAD, 0, 0, 0), (JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
program = Program(len(lines), (Instruction * len(lines))(*(Instruction(*line) for line in lines)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
pool = Pool(workers=1)
print(pool.describe())
print(pool.run([Call("def f(a):\\n    return a", "f", [(7,)])]))
pool.close()
"""


@pytest.mark.parametrize(
    ("call", "numbers"), [("unshare", (272, 97)), ("mount /", (165, 40)), ("pivot_root", (155, 41)), ("umount", (166, 39))]
)
def test_where_namespaces_are_forbidden_the_filter_stands_alone(call, numbers):
    """As in a container: a process, with all its children, whose kernel refuses a call. It also ignores that its children end."""
    script = REFUSING.replace("NUMBERS[0]", str(numbers[0])).replace("NUMBERS[1]", str(numbers[1]))
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True)
    described, outcome = done.stdout.splitlines()
    assert f"without namespaces, since this machine refuses ({call}: Permission denied); no file at all" in described
    assert outcome == str([Outcome("finished", (("value", 7),))])


def test_a_forked_process_has_workers_of_its_own():
    """Two processes at the pipes of one worker would read each other's results."""
    call = Call(RIGHT, "add", [(1, 2)])
    with closing(Pool(workers=1)) as pool:
        pool.run([call])
        first = pool.workers[0].process.pid
        child = os.fork()
        if child == 0:
            try:
                pool.close()
                own = pool.run([call])[0].ended == "finished" and pool.workers[0].process.pid != first
                pool.close()
                os._exit(0 if own else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.run([call])[0].ended == "finished" and pool.workers[0].process.pid == first


@pytest.mark.parametrize(
    ("elsewhere", "words"),
    [
        (
            "import platform; platform.system = lambda: 'Darwin'",
            "needs Linux on x86_64 or aarch64.*no filter for Darwin on .*tasks without code",
        ),
        ("import platform; platform.machine = lambda: 'riscv64'", "no filter for Linux on riscv64"),
        (
            "import ctypes; ctypes.CDLL(None).prctl(22, 1, 0, 0, 0)",
            "does not start",
        ),  # the old, strict filter: not even a file can be opened
    ],
    ids=["macOS", "another processor", "a strict container"],
)
def test_a_machine_without_the_sandbox_is_refused_in_a_sentence(elsewhere, words, monkeypatch):
    monkeypatch.setattr(pools, "COMMAND", [elsewhere + "; " + word if word == pools.START else word for word in pools.COMMAND])
    with pytest.raises(CourseError, match=words), closing(Pool()) as pool:
        pool.describe()
    assert not pool.workers


def test_an_interrupted_run_leaves_no_answer_behind(monkeypatch):
    with closing(Pool(workers=1)) as pool:
        pool.run([Call(RIGHT, "add", [(1, 2)])])
        monkeypatch.setattr(pool, "answering", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.run([Call(RIGHT, "add", [(1, 2)])])
        monkeypatch.undo()
        assert pool.run([Call(RIGHT, "add", [(5, 5)])])[0].results == (("value", 10),)


def test_nothing_outlives_a_pool():
    """Neither one that is closed while a program runs, nor one whose trainer is killed."""
    script = "import os, signal, sys; from shared.rl.sandbox.pool import *; p = Pool(workers=1); p.describe()\n"
    script += (
        "print(p.workers[0].process.pid, flush=True); p.workers[0].send(0, Call('import time\\ndef f(): time.sleep(99)', 'f', [()]))\n"
    )
    script += "os.kill(os.getpid(), signal.SIGKILL)"
    with closing(Pool(workers=1)) as pool:
        pool.run([Call(RIGHT, "add", [(1, 2)])])
        closed = pool.workers[0].process.pid
        pool.workers[0].send(0, Call("import time\ndef f(): time.sleep(99)", "f", [()]))
        while not (below := psutil.Process(closed).children(recursive=True))[1:]:
            time.sleep(0.01)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(closed) or any(process.is_running() for process in below):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    worker, deadline = int(done.stdout), time.monotonic() + 60
    while psutil.pid_exists(worker):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_programs_can_import_is_there():
    assert not [name for name in MODULES if name.partition(".")[0] not in sys.stdlib_module_names]
