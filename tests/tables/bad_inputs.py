"""Bad inputs to every mode and command (`bad_inputs.toml`), in one process: each is refused in a sentence that has the expected word.

`python tests/tables/bad_inputs.py [PLACE ...]`, such as `words.grpo records`; all unless given. An input fails the table where it is
accepted, ends in a traceback, takes over ten seconds of processor time, or is refused without the expected word.
"""

import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from preferring_runs import preferring_file  # noqa: E402
from rich.console import Console  # noqa: E402
from trainer_runs import settings_file  # noqa: E402
from tuned_runs import SIZES, tuned_file  # noqa: E402

from shared.course.cli import cli  # noqa: E402
from shared.course.errors import CourseError  # noqa: E402
from shared.course.launch import parse  # noqa: E402
from shared.course.paths import CHECKOUT  # noqa: E402
from shared.trainer.config import TrainerConfig  # noqa: E402
from shared.trainer.launch.start import TRAIN, command_of  # noqa: E402
from shared.trainer.pipeline import chain, stages  # noqa: E402
from shared.trainer.run import train_model  # noqa: E402
from shared.trainer.settings import parse_words  # noqa: E402

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LEGAL = TABLE.pop("legal")
SECONDS, PATIENCE = 10, 600  # of the processor, and by the clock for what waits for something that never comes
LONGEST = 1500  # characters of a refusal
QUIET = Console(quiet=True)
SHORT = {"steps": 1, "schedule": {"warmup_steps": 0, "decay_steps": 0}, "report": {"completions": 0, "prompts": [], "export": False}}
QUANTIZE = CHECKOUT / "chapters" / "10_finetuning" / "quantize.py"
REWARDS = """
import sys
def two(prompt, answer): return 1.0
def raises(prompt, answer, expected): raise KeyError(answer)
def text(prompt, answer, expected): return "good"
def nan(prompt, answer, expected): return float("nan")
def large(prompt, answer, expected): return 1e39
def leaves(prompt, answer, expected): sys.exit(0)
def dies(prompt, answer, expected): __import__("os")._exit(0)
def several(prompt, answer, expected): return [1.0, 2.0]
def complex_one(prompt, answer, expected): return 1j
def hangs(prompt, answer, expected):
    while True: pass
async def asynchronous(prompt, answer, expected): return 1.0
def deep(prompt, answer, expected): return deep(prompt, answer, expected)
"""


@dataclass(frozen=True)
class Verdict:
    """What came of an input. fault: why it fails the table; empty where it does not."""

    given: str
    fault: str
    said: str


class TimeIsUp(BaseException):
    """No library that catches every error catches this one."""


class Accepted(Exception):
    """A pipeline's first stage would start."""


def conversations(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"What is {number} plus one?"}, {"role": "assistant", "content": f"{number + 1}"}]}


GOOD = {  # by mode: the record of a number, and what names a file of them
    "sft": (conversations, "chats.sources=[{{path: {}}}]"),
    "dpo": (
        lambda number: {"prompt": f"Say {number}.", "chosen": f"{number}", "rejected": f"no {number}"},
        "preferences.sources=[{{path: {}}}]",
    ),
    "grpo": (lambda number: {"prompt": f"What is {number} + 1?", "answer": f"{number + 1}"}, "grpo.tasks.sources=[{{path: {}}}]"),
}  # fmt: skip
GOOD["reward"] = GOOD["dpo"]


class Inputs:
    """Places where an input can be given, each a method of the input that returns where it is accepted.

    Args:
        folder: a new one.
    """

    def __init__(self, folder: Path):
        self.folder, self.number, self.trained = folder, 0, False
        folder.joinpath("empty_folder").mkdir(parents=True)
        good = {mode: "".join(json.dumps(record(number)) + "\n" for number in range(60)) for mode, (record, _) in GOOD.items()}
        written = {
            "text.txt": "def answer(question):\n    return 42\n" * 60, "more.txt": "One more text.\n" * 60,
            "empty.txt": "", "empty.jsonl": "",
            "chats.jsonl": good["sft"], "tasks.jsonl": good["grpo"], "mine.py": REWARDS, "broken.py": "def reward(:\n",
        }  # fmt: skip
        for name, text in written.items():
            (folder / name).write_text(text)
        (folder / "binary.bin").write_bytes(bytes(range(256)) * 40)
        self.good = good
        self.files = {"pretrain": settings_file(folder / "base", folder / "prepared", model=SIZES, **SHORT)}
        shutil.copy(self.files["pretrain"], folder / "pretrain.yaml")

    def file(self, mode: str) -> Path:
        """The settings of a mode; those that fine-tune need a model, which is trained first."""
        if mode not in self.files:
            self.train_base()
            place, base = self.folder / mode, self.folder / "base" / "run"
            short = SHORT | ({"instructions": {"examples": 60, "tasks": 2}} if mode == "sft" else {})
            self.files[mode] = tuned_file(place, base, **short) if mode == "sft" else preferring_file(place, base, mode, **short)
        return self.files[mode]

    def train_base(self) -> None:
        if not self.trained:
            self.trained = True
            train_model(parse_words(TrainerConfig, [str(self.files["pretrain"]), "report.export=true"]), QUIET)

    def new(self) -> Path:
        self.number += 1
        place = self.folder / "out" / str(self.number)
        place.mkdir(parents=True)
        return place

    def words(self, mode: str, words: str, file: Path | None = None) -> None:
        given = [word for word in re.split(r" (?=[a-z][\w.]*=)", words) if word]  # values may have spaces
        output = [] if "engine.output" in words or file and "output" in file.read_text() else [f"engine.output={self.new() / 'run'}"]
        train_model(parse_words(TrainerConfig, [str(file or self.file(mode)), *output, *given]), QUIET)

    def elastic(self, mode: str, words: str) -> None:
        self.words("pretrain", words)

    def yaml(self, mode: str, text: str) -> None:
        file = self.new() / "settings.yaml"
        file.write_text(text)
        self.words(mode, "", file)

    def records(self, mode: str, record: str) -> None:
        self.given(mode, (self.good[mode] + record.replace("LONG", "word " * 500) + "\n").encode())

    def bytes(self, mode: str, content: str) -> None:
        self.given(mode, bytes.fromhex(content))

    def given(self, mode: str, content: bytes) -> None:
        file = self.new() / "given.jsonl"
        file.write_bytes(content)
        self.words(mode, GOOD[mode][1].format(file))

    def folders(self, mode: str, change: str) -> None:
        self.file(mode)
        place = self.new() / "model"
        shutil.copytree(self.folder / "base" / "run" / "model", place)
        damage(place, *change.split(" ", 2))
        self.words(mode, f"start_from={place}")

    def course(self, mode: str, words: str) -> None:
        self.train_base()
        with patch.object(sys, "stdin", io.StringIO("")):
            cli.main(shlex.split(words), prog_name="course")

    def quantize(self, mode: str, words: str) -> None:
        self.train_base()
        spec = importlib.util.spec_from_file_location("quantize_of_bad_inputs", QUANTIZE)
        sys.modules[spec.name] = script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        usual = ["--model", f"{self.folder}/base/run/model", "--data", f"{self.folder}/text.txt", "--output", str(self.new())]
        small = "--rows 8 --seq 32 --held_out_rows 8 --group 32".split()
        script.run(parse(script.QuantizeConfig, QUANTIZE.with_suffix(".yaml"), [*usual, *small, *shlex.split(words)]))

    def pipeline(self, mode: str, text: str) -> None:
        file = self.new() / "pipeline.yaml"
        file.write_text(text)
        with patch.object(chain, "run_stage", side_effect=Accepted):
            try:
                chain.run_pipeline(stages.read_pipeline(file), QUIET)
            except Accepted:
                pass

    def layout(self, mode: str, words: str) -> None:
        layout, *others = words.split(" ")
        command, _ = command_of(layout, [str(self.file("pretrain")), f"engine.output={self.new()}", *others])
        parse_words(TrainerConfig, command[command.index(str(TRAIN)) + 1 :])


def damage(folder: Path, what: str, name: str = "", value: str = "") -> None:
    """What a line of `folders` says, done to a model's folder."""
    path = folder / name
    if what == "set":
        config = json.loads((folder / "config.json").read_text())
        try:
            config[name] = json.loads(value)
        except ValueError:
            config[name] = value
        (folder / "config.json").write_text(json.dumps(config))
    elif what == "write":
        path.write_text(value)
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif what in ("remove", "folder"):
        path.unlink()
        if what == "folder":
            path.mkdir()
    elif what == "nan":
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


@contextmanager
def limited() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise TimeIsUp

    before = [signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


def verdict(given: str, expected: str, attempt: Callable[[], None], folder: Path) -> Verdict:
    """The verdict on one input.

    Args:
        expected: a word of its refusal, not the end of another word; where it is legal, nothing.
        folder: where everything lies, whose path names no reason.
    """
    printed = io.StringIO()
    try:
        with limited(), redirect_stdout(printed), redirect_stderr(printed):
            attempt()
    except SystemExit as error:
        refused, said = bool(error.code), f"{printed.getvalue()}{error.code if isinstance(error.code, str) else ''}"
    except CourseError as error:
        refused, said = True, str(error)
    except TimeIsUp:
        return Verdict(given, "HANGS", "")
    except BaseException:
        return Verdict(given, "TRACEBACK", traceback.format_exc()[-1500:])
    else:
        refused, said = False, ""
    if not expected:
        return Verdict(given, "REFUSED, and it is legal" if refused else "", said)
    if not refused:
        return Verdict(given, "ACCEPTED", said)
    if "Traceback" in said or len(said) > LONGEST:
        return Verdict(given, "NO SENTENCE", said[:3000])
    clear = re.search(rf"(?<![a-z]){re.escape(expected)}", said.replace(str(folder), ""), re.IGNORECASE)
    return Verdict(given, "" if clear else f"UNCLEAR, without {expected}", said)


def verdicts(folder: Path, places: Sequence[str] = ()) -> Iterator[Verdict]:
    """Of all inputs of some places, such as words.grpo, or records for all modes; every place unless given."""
    inputs = Inputs(folder)
    for place, modes in TABLE.items():
        for mode, rows in modes.items():
            if places and not {place, f"{place}.{mode}"} & {*places}:
                continue
            if place in ("words", "records", "bytes", "folders"):
                inputs.file(mode)  # not within an input's time
            elif place in ("course", "quantize"):
                inputs.train_base()
            for text, expected in rows:
                given = text.replace("$", str(folder))
                expected = "" if f"{place}.{mode} {text}" in LEGAL else expected
                yield verdict(f"{place}.{mode} {text}", expected, lambda: getattr(inputs, place)(mode, given), folder)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as scratch:
        count = faults = 0
        for found in verdicts(Path(scratch), sys.argv[1:]):
            count, faults = count + 1, faults + bool(found.fault)
            if found.fault:
                print(f"{found.fault}: {found.given}\n    {found.said.strip()}", flush=True)
    print(f"{count} inputs, {faults} faults.")
