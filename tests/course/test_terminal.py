"""The command under a pseudo-terminal: colours where they are wanted, width, and `course watch`."""

import os
import pty
import re
import termios
import threading
import time

import pytest
from workspace import Learner

from shared.course import catalogue, hints, stubs
from shared.course.report import Line

FIRST = "01.cross_entropy"
TOTAL = len(catalogue.all_exercises())
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process of the command under a pseudo-terminal, what it has written so far, and a keyboard."""

    def __init__(self, learner: Learner, *arguments: str, columns: int = 100, **environment: str):
        self.keyboard, inside = pty.openpty()
        termios.tcsetwinsize(inside, (50, columns))
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
        variables = inherited | {"TERM": "xterm-256color"} | environment
        streams = {"stdin": inside, "stdout": inside, "stderr": inside, "text": False}
        self.process = learner.start(*arguments, env=variables, start_new_session=True, **streams)
        os.close(inside)
        self.written, self.lock = "", threading.Lock()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        try:
            while part := os.read(self.keyboard, 65536):
                with self.lock:
                    self.written += part.decode(errors="replace")
        except OSError:  # how Linux says that the other side is closed
            return

    @property
    def text(self) -> str:
        return ESCAPE.sub("", self.written).replace("\r\n", "\n")

    def expect(self, wanted: str, seconds: float = 240.0) -> None:
        """Wait for `wanted` after what was expected before; it is then behind us."""
        deadline = time.monotonic() + seconds
        while wanted not in self.text:
            waiting = time.monotonic() < deadline and (self.process.poll() is None or self.reader.is_alive())
            assert waiting, f"no {wanted!r} in:\n{self.text}"
            time.sleep(0.02)

    def forget(self) -> None:
        with self.lock:
            self.written = ""

    def type(self, line: str) -> None:
        os.write(self.keyboard, f"{line}\n".encode())

    def end(self) -> int:
        code = self.process.wait(240)
        self.reader.join(120)
        return code


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


@pytest.mark.parametrize(
    ("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=["terminal", "NO_COLOR", "dumb"]
)
def test_colours_are_for_terminals_that_want_them(learner, variables, coloured):
    terminal = Terminal(learner, "read", "loss", **variables)
    assert terminal.end() == 0
    assert bool(COLOUR.search(terminal.written)) == coloured and "def cross_entropy" in terminal.text


def test_a_pipe_gets_plain_text(learner):
    process = learner.start("read", "loss")
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0 and "\x1b" not in output and "def cross_entropy" in output


def test_nothing_is_wider_than_a_narrow_terminal(learner):
    for arguments in (["status"], ["next"], ["map", "01"], ["hint", FIRST]):
        terminal = Terminal(learner, *arguments, columns=44)
        assert terminal.end() == 0
        assert max(map(len, terminal.text.split("\n"))) <= 44, terminal.text


def test_functions_stand_beside_each_other_where_there_is_room(learner):
    learner.write("cross_entropy")
    wide = Terminal(learner, "check", FIRST, columns=hints.SIDE_BY_SIDE)
    assert wide.end() == 0 and re.search(r"yours +the course's", wide.text)
    narrow = Terminal(learner, "check", FIRST, columns=80)
    assert narrow.end() == 0 and "  the course's:\n" in narrow.text


def test_watch_follows_the_file_and_the_keyboard(learner):
    terminal = Terminal(learner, "watch")
    terminal.expect(f"Watching chapters/01_training_loop/exercises.py for {FIRST}.")
    assert f"[{'-' * 30}] 0 of {TOTAL}" in terminal.text and f"{FIRST}  NOT ATTEMPTED" in terminal.text
    stub = learner.text
    learner.path.write_text(stub.replace("def cross_entropy(", "def cross_entropy(("), encoding="utf-8")
    terminal.expect("Python cannot read this file")
    terminal.type("h")
    terminal.expect("hint 1 of 3")
    terminal.type("n")
    terminal.expect("for 01.accumulate_gradients.")
    terminal.forget()
    terminal.type("?")
    terminal.expect("'?' is none of the keys")
    learner.path.write_text(stub, encoding="utf-8")
    terminal.expect("01.accumulate_gradients  NOT ATTEMPTED")
    terminal.type("s")
    terminal.expect(f"0 of {TOTAL} exercises are yours")
    terminal.type("q")
    assert terminal.end() == 0 and "Traceback" not in terminal.text


def test_watch_moves_on_after_a_pass_and_leaves_at_control_c(learner):
    terminal = Terminal(learner, "watch")
    terminal.expect("q quit")
    terminal.forget()
    learner.write("cross_entropy")
    terminal.expect("for 01.accumulate_gradients.")
    terminal.expect("q quit")
    assert "\x1b[2J" in terminal.written, "the screen is cleared for a new exercise"
    assert f"{FIRST}  PASS" in terminal.text and f"-] 1 of {TOTAL}" in terminal.text
    terminal.process.send_signal(2)
    assert terminal.end() == 0 and f"1 of {TOTAL} exercises are yours" in terminal.text and "Traceback" not in terminal.text


def test_long_lines_go_on_below_their_value_and_code_stays_whole():
    assert Line("  given     x = [1, 2]", hang=10).wrapped(20) == ["  given     x = [1,", " " * 10 + "2]"]
    assert Line("x" * 30, hang=None).wrapped(10) == ["x" * 30]
    assert Line("an --impl option").wrapped(8) == ["an", "--impl", "option"]


def test_the_answer_is_shown_without_the_contracts_docstring(learner):
    exercise = learner.chapter.exercises[0]
    learner.write("cross_entropy", "return None")
    file = stubs.BodyFile.read(learner.path)
    signature = "def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:"
    assert hints.answer_text(exercise, file) == f"{signature}\n    return None"
