"""What enters and leaves the sandbox: values as JSON, results of any bytes, tasks, and the filter of system calls as a program."""

import json
import math
import os
import random
import subprocess

import pytest

from shared.rl.code_reward import CodeTask, passed, program_of
from shared.rl.sandbox.filter import ALLOWED, FCNTL, FILES, seccomp_program
from shared.rl.sandbox.isolation import Limits
from shared.rl.sandbox.pool import Pool, outcome_of
from shared.rl.sandbox.values import decode, encode, same


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


NO_FORM = [Text("a"), iter([]), print, object, 1j, [Text("a")], {1: {2}.__iter__()}]


@pytest.mark.parametrize("value", NO_FORM, ids=lambda value: type(value).__name__)
def test_values_without_a_form_are_refused(value):
    with pytest.raises(TypeError, match="has no form"):
        encode(value)


@pytest.mark.parametrize(
    ("expected", "found", "equal"),
    [
        (3, 3.0, True),
        (3.0, 3, True),
        (1, True, False),
        (True, 1, False),
        (0.1 + 0.2, 0.3, True),
        (0.3, 0.3001, False),
        (0, None, False),
        ([1, 2], (1, 2), False),
        ((1, 2), [1, 2], False),
        ({1, 2}, {2, 1}, True),
        ({1: "a", 2: "b"}, {2: "b", 1: "a"}, True),
        ("1", 1, False),
        ({1: "a"}, {1: "b"}, False),
        (1.5, 10**4000, False),
        (10**400, 10**400, True),
        (-0.0, 0.0, True),
        ("", [], False),
        ([], {}, False),
        ([[1], [2]], [[1], [3]], False),
        ([1], [1, 1], False),
        (math.nan, math.nan, True),
        (1, 1.0000000001, False),
        (b"a", "a", False),
    ],
)
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


KILLED, REFUSED, ALLOWED_CALL = 0x80000000, 0x0005000D, 0x7FFF0000


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


HEADERS = {"aarch64": "asm-generic/unistd.h"} | ({"x86_64": "asm/unistd_64.h"} if os.uname().machine == "x86_64" else {})


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_the_kernels(machine):
    """Against the kernel's own headers, as the compiler reads them: the generic one is aarch64's."""
    wanted = ["-D__BITS_PER_LONG=64", "-D__ARCH_WANT_RENAMEAT", "-D__ARCH_WANT_NEW_STAT"]
    command = ["cc", "-E", "-dM", *wanted, "-include", HEADERS[machine], "-x", "c", os.devnull]
    lines = [line.split(maxsplit=2) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()]
    listed = {line[1]: line[2] for line in lines if line[1].startswith("__NR") and len(line) == 3}
    column = {"x86_64": 0, "aarch64": 1}[machine]
    for name, numbers in (ALLOWED | FILES | {"fcntl": FCNTL}).items():
        number = listed.get(f"__NR_{name}")
        assert numbers[column] == (number and int(listed.get(number, number))), name
    assert len(listed) > 250


OUTPUTS = [
    (b"", "quit", 0),
    (b'["value", 1]\n', "quit", 1),
    (b'["value", 1]\n["value", 2]\n', "finished", 2),
    (b'["value", 1]\n["val', "quit", 1),
    (b'["value", 1]\n' * 3, "malformed", 0),
    (b"\xff\n", "malformed", 0),
    (b"[" * 200_000 + b"\n", "malformed", 0),
    (b"{}\n", "malformed", 0),
    (b'["value", {"a": 1}]\n', "malformed", 0),
    (b'["value", NaN]\n', "malformed", 0),
    (b'["value"]\n', "malformed", 0),
    (b"3\n", "malformed", 0),
    (b'[["value"], 1]\n', "malformed", 0),
    (b'["passed", 1]\n', "malformed", 0),
    (b'["failed", 1]\n["value", 1]\n', "malformed", 0),
    (b'["value", ' + b"9" * 5000 + b"]\n", "malformed", 0),
    (b"\n\n", "malformed", 0),
    (b'"value"\n', "malformed", 0),
    (b'["failed", "a\\nb\\u001b[31m\\ud800"]\n', "failed", 0),
    (b'["raised", "x"]\n["raised", ""]\n', "finished", 2),
    (b'["raised", ["x"]]\n["raised", null]\n', "malformed", 0),
    (b'["failed", ["x"]]\n', "malformed", 0),
    (b'["raised", ' + b"[" * 900 + b"]" * 900 + b"]\n", "malformed", 0),
    (b'["value", 1e999]\n["value", -0]\n', "finished", 2),
]


@pytest.mark.parametrize(("output", "ended", "results"), OUTPUTS, ids=range(len(OUTPUTS)))
def test_whatever_a_program_writes_is_read_or_refused(output, ended, results):
    outcome = outcome_of("finished", output, calls=2)
    assert (outcome.ended, len(outcome.results)) == (ended, results)
    assert outcome.words.isascii() and outcome.words.isprintable()


def test_no_bytes_that_a_program_writes_stop_the_trainer():
    """Pieces of results in any order, with bytes changed: each is read, compared and shown, or refused, and nothing is raised."""
    draw, task = random.Random(0), CodeTask("f", (((1,), 2.5), ((2,), [1, {"a": (2,)}])))
    pieces = [
        b'["value", ', b'["raised", "', b'["failed", "', b'"]\n', b"]\n", b"[", b"1", b"2.5", b'["list", 1, ["dict", ["a", ["tuple", 2]]]]',
        b"null", b"1" * 400, b"1e400", b'"\\ud800"', b'{"a": 1}', b"\r", b"\xff", b"[" * 990, b", ",
    ]  # fmt: skip
    ended = set()
    for _ in range(5000):
        output = bytearray(b"".join(draw.choices(pieces, k=draw.randint(1, 8))))
        for _ in range(draw.randint(0, 2)):
            output[draw.randrange(len(output))] = draw.randrange(256)
        outcome = outcome_of(draw.choice(["finished", "CPU time"]), bytes(output), calls=2)
        passed(outcome, task)
        ended.add(outcome.ended)
        assert outcome.words.isprintable() and outcome.words.isascii()
    assert ended >= {"quit", "CPU time", "failed", "malformed"}


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx\n```", "x\n"),
        ("a\n```\ny\n```\nb\n```py\nz\n```", "z\n"),
        ("```python\nx\ny", "x\ny"),
        ("```python3\r\nx\r\n```", "x\r\n"),
        ("  ```Python\nx\n  ```", "x\n"),
        ("use `x`", "use `x`"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("", ""),
    ],
)
def test_the_program_in_an_answer(answer, program):
    assert program_of(answer) == program


@pytest.mark.parametrize("answer", ["```" + " " * 10**6 + "x", ("```" + " " * 1000 + "\n") * 1000, "\n" * 10**6, "```python\n" * 10**5])
def test_an_answer_cannot_hold_up_the_search_for_its_program(answer):
    """A pattern that backtracks would need hours for the first."""
    assert len(program_of(answer)) <= len(answer)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "is written"),
        ('{"function": "f"}', "is written"),
        ('{"function": "f", "cases": []}', "no cases"),
        ('{"function": "f()", "cases": [[[1], 1]]}', "name of a Python function"),
        ('{"function": "f", "cases": [[1, 1]]}', "list of arguments"),
        ('{"function": "f", "cases": [[[1], 1, 1]]}', "arguments, expected"),
        ('{"function": 3, "cases": [[[1], 1]]}', "name of a Python"),
    ],
    ids=range(9),
)
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
