"""Chapter 12. A worker of the sandbox: a small Python with the standard library loaded, which forks one process for each program.

    worker      waits for a request and forks a keeper. It never sees a program or a result, so nothing of one can reach the next
    keeper      reads the request, forks the program, reads what it writes, ends it, and answers
    program     gives up its rights, then runs the model's text in the same interpreter

A program may change whatever it finds in its process, this module included. It does not gain by that: the process holds the inputs and
no expected value, and what comes out of it counts as a claim of what the function returned. Judging happens in the trainer.
"""

import gc
import importlib
import json
import os
import random
import select
import signal
import sys
import time
import types

from shared.rl.sandbox.filter import Program, seccomp_program
from shared.rl.sandbox.isolation import Limits, become_nobody, confine, end_with_parent, enter_namespaces, enter_own_folder, hide
from shared.rl.sandbox.values import decode, encode

# What a program can import: later no file can be read. Those that look dangerous are no danger: the kernel refuses, not Python.
MODULES = """
    abc array ast base64 binascii bisect builtins calendar cmath codecs collections.abc concurrent.futures.thread contextlib copy csv
    ctypes dataclasses datetime decimal difflib enum errno fcntl fractions functools gc graphlib hashlib heapq hmac html inspect io
    itertools json keyword linecache locale logging math mmap numbers operator os.path pickle pprint queue random re
    resource secrets select shutil signal socket statistics string struct subprocess tempfile textwrap threading time timeit token
    tokenize traceback types typing unicodedata uuid warnings weakref zlib _strptime encodings.ascii encodings.cp1252
    encodings.hex_codec encodings.idna encodings.latin_1 encodings.punycode encodings.raw_unicode_escape encodings.rot_13
    encodings.unicode_escape encodings.utf_16 encodings.utf_16_be encodings.utf_16_le encodings.utf_32 encodings.utf_8_sig
""".split()
RESULTS = 3  # the file descriptor that a program's results go to; 0, 1 and 2 are /dev/null
TICK = 0.02  # seconds between two looks at a program's clock
LONGEST = 200  # characters of an error


def read_exactly(source: int, size: int) -> bytes:
    """`size` bytes of a pipe.

    Raises:
        EOFError: the other side has ended.
    """
    found = bytearray()
    while len(found) < size:
        piece = os.read(source, size - len(found))
        if not piece:
            raise EOFError("the other side of the pipe has ended")
        found += piece
    return bytes(found)


def read_message(source: int) -> bytes:
    return read_exactly(source, int.from_bytes(read_exactly(source, 4), "little"))


def write_all(target: int, rest: bytes) -> None:
    while rest:
        rest = rest[os.write(target, rest) :]


def write_message(target: int, message: bytes) -> None:
    write_all(target, len(message).to_bytes(4, "little") + message)


def run_program(request: dict, results: int) -> None:
    """Call the program's function on each case's inputs and write a JSON line for each: ["value", form] or ["raised", words].

    A program that fails as a whole writes one line, ["failed", words].
    """

    def write(*line: object) -> None:
        write_all(results, json.dumps(line).encode() + b"\n")

    def words(error: BaseException) -> str:
        return f"{type(error).__name__}: {error}"[:LONGEST]

    module = types.ModuleType("program")
    sys.modules["program"] = module
    random.seed(0)  # the same program has the same reward every time
    try:
        exec(compile(request["program"], "program", "exec"), module.__dict__)
    except BaseException as error:
        return write("failed", words(error))
    function = module.__dict__.get(request["function"])
    if not callable(function):
        return write("failed", f"there is no function {request['function']}")
    for inputs in request["inputs"]:
        try:
            line = "value", encode(function(*map(decode, inputs)))
        except BaseException as error:
            line = "raised", words(error)
        write(*line)


def watch(program: int, results: int, limits: Limits) -> tuple[str, bytes]:
    """Read a program's results until it ends or passes a limit, and end it: how it ended, and its results."""
    clock = ~program << 3 | 2  # the CPU clock of another process: CPUCLOCK_SCHED
    deadline, output, ended = time.monotonic() + limits.wall_seconds, bytearray(), "finished"
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            ended = "wall time"
        elif time.clock_gettime(clock) > limits.cpu_seconds:
            ended = "CPU time"
        elif len(output) > limits.output_kib << 10:
            ended = "output"
        elif select.select([results], [], [], min(left, TICK))[0]:
            piece = os.read(results, 1 << 16)
            output += piece
            if piece:
                continue
        else:
            continue
        break
    os.kill(program, signal.SIGKILL)  # its process is a child that nobody has waited for, so the number is still its own
    status = os.waitpid(program, 0)[1]
    if ended == "finished" and os.WIFSIGNALED(status):
        ended = "killed by " + signal.Signals(os.WTERMSIG(status)).name
    return ended, bytes(output)


def keep(requests: int, answers: int, limits: Limits, namespaces: bool, filter: Program) -> None:
    """Run one program and answer with how it ended, a newline, and its results."""
    end_with_parent()
    request = json.loads(read_message(requests))
    if namespaces:
        enter_own_folder(limits.folder_mib)
    results, into = os.pipe()
    program = os.fork()
    if program == 0:
        try:
            os.dup2(into, RESULTS)
            os.closerange(RESULTS + 1, 1024)
            os.environ.clear()
            confine(limits, filter)
            run_program(request, RESULTS)
        finally:
            os._exit(0)
    os.close(into)
    ended, output = watch(program, results, limits)
    write_message(answers, ended.encode() + b"\n" + output)


def main() -> None:
    """Read the settings from the arguments, say what isolation holds, then serve requests until the trainer closes the pipe."""
    settings = json.loads(sys.argv[1])
    limits = Limits(**settings["limits"])
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by a parent, it would be ignored here, and no child could be waited for
    for name in MODULES:
        importlib.import_module(name)
    sys.path.clear()
    said = {}
    try:
        filter = seccomp_program(files=False)
        become_nobody()
        try:
            if settings["namespaces"]:
                enter_namespaces()
                filter = seccomp_program(files=True)
        except OSError as error:
            settings["namespaces"], said["refused"] = False, str(error.args[-1])
        hide()
    except OSError as error:
        said["error"] = str(error)
    write_message(answers, json.dumps(said | {"namespaces": settings["namespaces"], "user": os.geteuid()}).encode())
    os.dup2(nothing, 2)
    gc.freeze()  # a collection in a child would copy every page of these modules
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while poll.poll()[0][1] & select.POLLIN:
        keeper = os.fork()
        if keeper == 0:
            try:
                keep(requests, answers, limits, settings["namespaces"], filter)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(keeper, 0)[1]:
            return  # an answer may be cut: the pool starts another worker
