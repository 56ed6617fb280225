"""The sandbox's parts: values as JSON, the filter's program, the pool's workers, on honest programs; hostile ones have a file of their own."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.rl.code_reward import CodeReward, CodeTask, program_of
from shared.rl.sandbox import pool as pools
from shared.rl.sandbox.filter import ALLOWED, FILES, seccomp_program
from shared.rl.sandbox.isolation import Limits
from shared.rl.sandbox.pool import Call, Outcome, Pool, outcome_of
from shared.rl.sandbox.values import decode, encode, same
from shared.rl.sandbox.worker import MODULES

BOTH = pytest.mark.parametrize("pool", [True, False], ids=["namespaces", "filter"], indirect=True)
ADD = CodeTask("add", (((2, 3), 5), ((-1, 1), 0), ((10**30, 1), 10**30 + 1)))
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def pool(request):
    """A pool with namespaces, where this machine has them, or without."""
    with closing(Pool(Limits(cpu_seconds=1, wall_seconds=5), workers=1, namespaces=request.param)) as pool:
        yield pool


def random_value(draw: random.Random, depth: int = 3, hashable: bool = False):
    scalars = [None, True, draw.randint(-5, 5), draw.choice([-1, 1]) << draw.randint(60, 20_000), draw.gauss(0, 1), "é\ud800\n", b"\0\xff"]
    kinds = ["scalar"] + (["tuple"] if hashable else ["tuple", "list", "set", "dict"]) * (depth > 0)
    kind, size = draw.choice(kinds), draw.randint(0, 3)
    if kind == "scalar":
        return draw.choice(scalars)
    if kind == "dict":
        return {random_value(draw, depth - 1, True): random_value(draw, depth - 1) for _ in range(size)}
    items = [random_value(draw, depth - 1, hashable or kind == "set") for _ in range(size)]
    return {"tuple": tuple, "list": list, "set": set}[kind](items)


def test_values_come_back_as_they_were():
    draw = random.Random(0)
    for _ in range(500):
        value = random_value(draw)
        back = decode(json.loads(json.dumps(encode(value))))
        assert back == value and repr(type(back)) == repr(type(value))
        assert same(encode(value), json.loads(json.dumps(encode(value))))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_that_are_no_json_have_a_form(value):
    form = json.loads(json.dumps(encode([value]), allow_nan=False))
    assert same(form, encode([value])) and repr(decode(form)) == repr([value])


class Text(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


@pytest.mark.parametrize("value", [Text("a"), iter([]), print, object, 1j, [Text("a")], {1: {2}.__iter__()}], ids=repr)
def test_values_without_a_form_are_refused(value):
    with pytest.raises(TypeError, match="has no form"):
        encode(value)


@pytest.mark.parametrize(
    ("expected", "found", "equal"),
    [
        (3, 3.0, True), (3.0, 3, True), (1, True, False), (True, 1, False), (0.1 + 0.2, 0.3, True), (0.3, 0.3001, False), (0, None, False),
        ([1, 2], (1, 2), False), ((1, 2), [1, 2], False), ({1, 2}, {2, 1}, True), ({1: "a", 2: "b"}, {2: "b", 1: "a"}, True), ("1", 1, False),
        ({1: "a"}, {1: "b"}, False), (1.5, 10**4000, False), (10**400, 10**400, True), (-0.0, 0.0, True), ("", [], False), ([], {}, False),
        ([[1], [2]], [[1], [3]], False), ([1], [1, 1], False), (math.nan, math.nan, True), (1, 1.0000000001, False), (b"a", "a", False),
    ],
)  # fmt: skip
def test_equality_of_results(expected, found, equal):
    assert same(encode(expected), encode(found)) is equal
    if expected != expected or type(expected) is float or bool in (type(expected), type(found)):
        return
    assert (expected == found) is equal  # elsewhere it is Python's


def bpf(program, number: int, *arguments: int, architecture: int) -> int:
    """What a filter decides on a call: an interpreter of the four instructions that it is made of."""
    data = number.to_bytes(4, "little") + architecture.to_bytes(4, "little") + bytes(8)
    data += b"".join(argument.to_bytes(8, "little") for argument in (*arguments, *[0] * (6 - len(arguments))))
    place, loaded = 0, None
    while True:
        step = program.instructions[place]
        place += 1
        if step.code == 0x20:
            loaded = int.from_bytes(data[step.value : step.value + 4], "little")
        elif step.code == 0x06:
            return step.value
        else:
            place += step.true if {0x15: loaded == step.value, 0x35: loaded >= step.value}[step.code] else step.false


KILLED, REFUSED, ALLOWED_CALL = 0x80000000, 0x00050001, 0x7FFF0000


@pytest.mark.parametrize(("machine", "column", "audit"), [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)])
@pytest.mark.parametrize("files", [True, False])
def test_the_filter_decides_on_every_call(machine, column, audit, files):
    """Against the table, for all numbers there are, and on its one rule with an argument."""
    program = seccomp_program(files, machine)
    allowed = {numbers[column] for numbers in [*ALLOWED.values(), *(FILES.values() if files else ())]} - {None}
    fcntl = (72, 25)[column]
    for number in range(600):
        if number != fcntl:
            assert bpf(program, number, architecture=audit) == (ALLOWED_CALL if number in allowed else REFUSED)
    assert [bpf(program, fcntl, 3, command, architecture=audit) == ALLOWED_CALL for command in range(17)] == [True] * 4 + [False] * 13
    assert bpf(program, fcntl, 3, 1 << 32, architecture=audit) == ALLOWED_CALL  # the command is an int: its upper half is not looked at
    if machine == "x86_64":
        assert bpf(program, 0x40000000, architecture=audit) == KILLED
    assert bpf(program, 1, architecture=0x40000003) == KILLED  # i386, whose number 1 is exit and 2 fork


def test_the_numbers_are_the_kernels():
    """Against the kernel's own headers, where this machine has them, and against calls whose effect shows their number."""
    found = subprocess.run(["cc", "-E", "-dM", "-include", "sys/syscall.h", "-x", "c", os.devnull], capture_output=True, text=True, check=True)
    numbers = {}
    for line in found.stdout.splitlines():
        _, name, value = (line.split(maxsplit=2) + ["", ""])[:3]
        if name.startswith("__NR_") and value.isdigit():
            numbers[name.removeprefix("__NR_")] = int(value)
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    for name, listed in (ALLOWED | FILES).items():
        assert listed[column] == numbers.get(name), name
    assert len(numbers) > 250


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
    "an exception that it handles": "def add(a, b):\n    try:\n        assert not a, 'no'\n    except AssertionError:\n        pass\n    return a + b\n",
    "decimal": "from decimal import Decimal, getcontext\ngetcontext().prec = 60\ndef add(a, b):\n    return int(Decimal(a) + Decimal(b))\n",
    "hashes and compression": "import hashlib, zlib, base64, json\ndef add(a, b):\n    zlib.decompress(zlib.compress(b'x')); hashlib.sha256(b'')\n"
                              "    return json.loads(json.dumps(a + b))\n",
    "threads that it can do without": "import threading\nlock = threading.Lock()\ndef add(a, b):\n    with lock:\n        return a + b\n",
    "time": "import time\ndef add(a, b):\n    time.sleep(0.001); time.perf_counter()\n    return a + b\n",
    "async": "async def inner(a, b):\n    return a + b\ndef add(a, b):\n    try:\n        inner(a, b).send(None)\n    except StopIteration as e:\n"
             "        return e.value\n",
}  # fmt: skip


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
def test_a_program_finds_nothing_of_an_earlier_one(pool):
    leave = "import builtins, json\nbuiltins.left = json.left = 1\ntry:\n    open('/tmp/left', 'w').write('x')\nexcept OSError:\n    pass\ndef f(): 0"
    look = "import builtins, json, os\ndef f():\n    try:\n        here = os.listdir('/tmp')\n    except OSError:\n        here = []\n"
    look += "    return [hasattr(builtins, 'left'), hasattr(json, 'left'), here]"
    look_for_text = "import gc\ndef f():\n    return [t for t in gc.get_objects() if isinstance(t, dict) and 'zq' + 'zq' in str(t)[:99999]] != []"
    pool.run([Call(leave + "  # zqzq", "f", [()])])
    assert pool.run([Call(look, "f", [()])])[0].results == (("value", encode([False, False, []])),)
    assert pool.run([Call(look_for_text, "f", [()])])[0].results == (("value", False),)


@BOTH
def test_results_are_the_same_every_time(pool):
    """A set's order and random numbers would otherwise change a reward from one run to the next."""
    call = Call("import random\ndef f():\n    return [list({'a', 'b', 'c', 'd', 'e'}), random.random()]", "f", [()])
    with closing(Pool(workers=1, namespaces=pool.namespaces)) as other:
        assert pool.run([call]) == other.run([call]) == other.run([call])


OUTPUTS = [
    (b"", "quit", 0), (b'["value", 1]\n', "quit", 1), (b'["value", 1]\n["value", 2]\n', "finished", 2), (b'["value", 1]\n["val', "quit", 1),
    (b'["value", 1]\n' * 3, "malformed", 0), (b"\xff\n", "malformed", 0), (b"[" * 200_000 + b"\n", "malformed", 0), (b"{}\n", "malformed", 0),
    (b'["value", {"a": 1}]\n', "malformed", 0), (b'["value", NaN]\n', "malformed", 0), (b'["value"]\n', "malformed", 0), (b"3\n", "malformed", 0),
    (b'[["value"], 1]\n', "malformed", 0), (b'["passed", 1]\n', "malformed", 0), (b'["failed", 1]\n["value", 1]\n', "malformed", 0),
    (b'["value", ' + b"9" * 5000 + b"]\n", "malformed", 0), (b"\n\n", "malformed", 0), (b'"value"\n', "malformed", 0),
    (b'["failed", "a\\nb\\u001b[31m\\ud800"]\n', "failed", 0), (b'["raised", ["x"]]\n["raised", null]\n', "finished", 2),
]  # fmt: skip


@pytest.mark.parametrize(("output", "ended", "results"), OUTPUTS, ids=range(len(OUTPUTS)))
def test_whatever_a_program_writes_is_read_or_refused(output, ended, results):
    outcome = outcome_of("finished", output, calls=2)
    assert (outcome.ended, len(outcome.results)) == (ended, results)
    assert outcome.words.isascii() and outcome.words.isprintable()
    json.dumps(outcome.results, allow_nan=False)


def test_rewards_of_code():
    half = "def add(a, b):\n    return a + b if a > 0 else 1"
    answers = [RIGHT, half, "no program", f"I think:\n```python\n{RIGHT}```\nDone.", f"```\nx\n```\n```py\n{RIGHT}", "def add(a, b):\n  1/0", ""]
    with closing(CodeReward()) as whole, closing(CodeReward(share=True)) as share:
        assert whole.judge(answers, [ADD] * 7) == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
        assert share.judge(answers[:3], [ADD] * 3) == [1.0, 2 / 3, 0.0]
        assert whole(RIGHT, '{"function": "add", "cases": [[[2, 3], 5], [["a", "b"], "ab"]]}') == 1.0


@pytest.mark.parametrize(
    ("answer", "program"),
    [("x = 1", "x = 1"), ("```python\nx\n```", "x\n"), ("a\n```\ny\n```\nb\n```py\nz\n```", "z\n"), ("```python\nx\ny", "x\ny"),
     ("  ```Python\nx\n  ```", "x\n"), ("use `x`", "use `x`"), ("```python\nprint('```')\n```", "print('```')\n"), ("", "")],
)  # fmt: skip
def test_the_program_in_an_answer(answer, program):
    assert program_of(answer) == program


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no JSON"), ("[" * 100_000, "no JSON"), ("[]", "is written"), ('{"function": "f"}', "is written"), ('{"function": "f", "cases": []}', "no cases"),
     ('{"function": "f()", "cases": [[[1], 1]]}', "name of a Python function"), ('{"function": "f", "cases": [[1, 1]]}', "list of arguments"),
     ('{"function": "f", "cases": [[[1], 1, 1]]}', "arguments, expected"), ('{"function": 3, "cases": [[[1], 1]]}', "name of a Python")],
    ids=range(9),
)  # fmt: skip
def test_a_task_that_is_none_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        CodeTask.parse(text)


def test_a_task_with_a_value_without_a_form_is_refused():
    with pytest.raises(ValueError, match="generator has no form"):
        CodeTask("f", (((1,), (x for x in "ab")),))


def test_limits_are_checked():
    for wrong in ({"cpu_seconds": 0}, {"memory_mib": -1}, {"wall_seconds": math.nan}, {"open_files": True}, {"output_kib": "9"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Limits(**wrong)
    with pytest.raises(ValueError, match="at least 1 worker"):
        Pool(workers=0)


def test_a_lost_worker_is_replaced_and_its_program_run_again():
    call = Call(RIGHT, "add", [(1, 2)])
    with closing(Pool(workers=1)) as pool:
        pool.run([call])
        first = pool.workers[0].process.pid
        os.kill(first, signal.SIGKILL)
        assert pool.run([call])[0].ended == "finished" and pool.workers[0].process.pid != first


def test_a_program_that_loses_its_worker_twice_is_given_up(monkeypatch):
    """And the others are judged. No program of the table of hostile ones manages that, so the loss is made here."""

    def kill(worker):
        if worker.calls == 2:
            raise pools.WorkerLost
        return receive(worker)

    receive = pools.Worker.receive
    monkeypatch.setattr(pools.Worker, "receive", kill)
    with closing(Pool(workers=1)) as pool:
        ended = pool.run([Call(RIGHT, "add", [(1, 2)] * calls) for calls in (1, 2, 3)])
        assert [outcome.ended for outcome in ended] == ["finished", "worker lost", "finished"]


def test_a_sandbox_that_does_not_hold_is_not_used(monkeypatch):
    """The trial at each worker's start: here it finds that something is possible which must not be."""
    monkeypatch.setattr(pools, "ATTEMPTS", pools.ATTEMPTS.replace('"start a process": os.fork', '"read the clock": os.times'))
    with pytest.raises(CourseError, match=r"does not hold.*read the clock"), closing(Pool()) as pool:
        pool.describe()


def test_an_interrupted_run_leaves_no_answer_behind(monkeypatch):
    with closing(Pool(workers=1)) as pool:
        pool.run([Call(RIGHT, "add", [(1, 2)])])
        monkeypatch.setattr(pool, "answering", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.run([Call(RIGHT, "add", [(1, 2)])])
        monkeypatch.undo()
        assert pool.run([Call(RIGHT, "add", [(5, 5)])])[0].results == (("value", 10),)


def test_nothing_outlives_a_pool():
    """Neither one that is closed nor one whose trainer is killed."""
    script = "import os, signal, sys; from shared.rl.sandbox.pool import *; p = Pool(Limits(wall_seconds=1), workers=1); p.describe()\n"
    script += "print(p.workers[0].process.pid, flush=True); p.workers[0].send(0, Call('import time\\ndef f(): time.sleep(99)', 'f', [()]))\n"
    script += "os.kill(os.getpid(), signal.SIGKILL)"
    with closing(Pool(workers=1)) as pool:
        pool.run([Call(RIGHT, "add", [(1, 2)])])
        closed = pool.workers[0].process.pid
    assert not psutil.pid_exists(closed)
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    worker, deadline = int(done.stdout), time.monotonic() + 60
    while psutil.pid_exists(worker):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_programs_can_import_is_there():
    assert not [name for name in MODULES if name.partition(".")[0] not in sys.stdlib_module_names]
