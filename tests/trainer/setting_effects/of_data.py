"""Settings of text: the documents of a source, what cleaning leaves, what is prepared, the rows of the first steps."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console

from setting_effects.effects import Differs, Effects
from shared.corpus import Document
from shared.course.extensions import Extension
from shared.data import hub
from shared.data.cleaning import cleaner
from shared.data.cleaning.cleaner import Cleaner, CleaningConfig
from shared.data.cleaning.report import CleaningReport
from shared.data.cleaning.stages import Measured, Verdict
from shared.data.fim import FillInMiddle, FimConfig
from shared.data.prepare import PrepareConfig, PreparedText, prepare
from shared.data.source import Source
from shared.data.sources import open_source
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.datasets import ChatSource
from shared.finetune.chat.prepare import PreparedChats
from shared.optim.config import ScheduleConfig
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.trainer.config import TrainerConfig
from shared.trainer.modes.pretrain import Pretraining, loaders
from shared.trainer.sections import DataConfig

CODE = {f"f{n}.py": f"def function_{n}(value):\n    return {' + '.join(str(n * k % 97) for k in range(20 + n))}\n" for n in range(24)}
LINES = "".join(f"    the_{{}}th_name_of_line_{n} = function_of_{n}(value)\n" for n in range(16))
CODE |= {f"long{n}.py": f"def long_function_{n}(value):\n{LINES.replace('{}', str(n))}" for n in range(6)}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@cache
def tokenizer(size: int = 400) -> TextTokenizer:
    return TextTokenizer.train(CODE.values(), size, 3)


def chat(number: int) -> dict[str, str]:
    return {"prompt": f"What is {number}?", "completion": f"It is {number}. " * (1 + number % 3)}


@contextmanager
def text_folder() -> Iterator[Path]:
    """A new folder with files of text and of conversations, which is the current one."""
    with (
        TemporaryDirectory() as name, chdir(name), patch.object(CleaningReport, "plot", lambda self, path: path.touch()),
        patch("os.fsync"),  # of files that are gone at once
    ):  # fmt: skip
        for folder in ("code", "more", "tokens", "others", "talks"):
            Path(folder).mkdir()
        for file, text in CODE.items():
            Path("code", file).write_text(text)
        Path("code", "notes.md").write_text("# Notes\n\nEnough words for a document of its own, and then some more of them.\n" * 2)
        for number in range(9):
            Path("more", f"{number}.py").write_text(f"class Other{number}:\n    value = {number}\n" * 9)
        lines = [json.dumps({"text": f"The text of record {n}. " * 5, "body": f"A body {n}. " * 8}) for n in range(30)]
        Path("rows.jsonl").write_text("\n".join(lines))
        Path("rows.data").write_text("\n".join(lines))
        pairs = [chat(n) for n in range(40)]
        for file in ("chats.jsonl", "talks/a.jsonl", "talks/b.json"):
            Path(file).write_text("".join(json.dumps(each) + "\n" for each in pairs[: 40 if "chats" in file else len(file)]))
        compared = [{"prompt": each["prompt"], "chosen": each["completion"], "rejected": "No."} for each in pairs]
        Path("pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in compared))
        Path("mine.jinja").write_text(CHATML.replace("\\n", " "))
        Path("mine.jsonl").write_text("mine")
        tokenizer().save_pretrained(Path("tokens"), 64)
        tokenizer(380).save_pretrained(Path("others"), 64)
        yield Path(name)


def inside(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def observe(config: Any) -> Any:
        with text_folder():
            return work(config)

    return observe


def documents_of(source: Source) -> list:
    return [(document.name, document.content) for document in open_source(source, lambda *_: None)]


def asked(source: Source | ChatSource) -> list:
    """What the hub is asked for."""
    found: list = []
    library = SimpleNamespace(
        config=SimpleNamespace(HF_HUB_OFFLINE=True), load_dataset=lambda *words, **options: found.append([words, options])
    )
    with patch.dict(sys.modules, {"datasets": library}), patch.object(hub, "ask", lambda source: None):
        hub.open_hub(source)
    return found


HUB = {"path": "some/data", "kind": "hub"}
ASKED_FOR = {
    "split": Differs("train", "test", by=asked, beside=HUB),
    "config": Differs(None, "python", by=asked, beside=HUB),
    "revision": Differs(None, "v1.2", by=asked, beside=HUB),
    "streaming": Differs(True, False, by=asked, beside=HUB),
}


def weighed(source: Source) -> list:
    """The first rows of a mixture of this source and another one."""
    sources = (replace(source, path="code"), Source("more", weight=1.0))
    with text_folder():
        return steps_of(prepare(replace(SMALL, sources=sources), Path.cwd() / "out"), DataConfig(replace(SMALL, sources=sources), **SIZES))


SOURCE = Effects(Source, observe=inside(documents_of), base={"path": "rows.jsonl"}, rows=ASKED_FOR | {
    "path": Differs("code", "more"),
    "kind": Differs("auto", "jsonl", beside={"path": "rows.data"}),
    "text_field": Differs("text", "body"),
    "suffixes": Differs((), (".md",), beside={"path": "code"}),
    "limit": Differs(None, 2),
    "weight": Differs(1.0, 3.0, by=weighed),
})  # fmt: skip

# Cleaning.

TEXTS = [
    *CODE.values(), "x = 1\n" * 3, "caf\u00c3\u00a9 = 1\n" * 9, "word " * 90, *[text.replace("value", "other") for text in CODE.values()],
    "".join(f"The {n}th sentence of a longer text stands here, and it has some words. " for n in range(12)),
]  # fmt: skip


class Refusing:
    """A stage of cleaning by import path."""

    name, remembers = "refusing", False

    def measure(self, text: str) -> Any:
        return Measured(text, None)

    def decide(self, value: Any) -> Any:
        return Verdict("refused")


def cleaned(config: CleaningConfig) -> list:
    return [document.content for document in Cleaner(config).clean(Document(str(n), text.encode()) for n, text in enumerate(TEXTS))]


def built(config: CleaningConfig, kind: str = "Language") -> list:
    return [(type(stage).__name__, sorted(vars(stage).items(), key=str)) for stage in config.build() if type(stage).__name__ == kind]


LANGUAGE = {"stages": ("length", "language"), "languages": ("en",)}

CLEANING = Effects(CleaningConfig, observe=cleaned, rows={
    "stages": Differs(("repair", "length"), (Extension(f"{__file__}:Refusing"),)),
    "text": Differs("code", "prose"),
    "stop_words": Differs(("en",), ("de",), beside={"text": "prose"}, by=lambda config: built(config, "ProseQuality")),
    "min_bytes": Differs(64, 200),
    "max_bytes": Differs(2_000_000, 150),
    "languages": Differs(("en",), ("de",), by=built, beside=LANGUAGE),
    "min_probability": Differs(0.5, 0.9, by=built, beside=LANGUAGE),
    "similarity": Differs(0.8, 0.01),
})  # fmt: skip


# Preparing.

SMALL = PrepareConfig(
    sources=(Source("code", suffixes=(".py",)),), cleaning=CleaningConfig(stages=("length",)), vocab_size=400, sentinels=3,
    held_out_share=0.3,
)  # fmt: skip


def stored(text: PreparedText | PreparedChats) -> list:
    sides = (text.training, text.held_out)
    documents = [[(store.document(n).tolist(), store.trained(n)) for n in range(len(store))] for store in sides]
    return [documents, [len(store.shards) for store in sides], text.tokenizer.to_json()]


def prepared(config: PrepareConfig) -> list:
    return stored(prepare(config, Path.cwd() / "out"))


def workers_of(config: PrepareConfig) -> list[int]:
    """How many processes clean. They are none here: the work is done at once."""
    found: list[int] = []

    class Pool:
        def __init__(self, workers: int, context: Any):
            found.append(workers)

        def __enter__(self) -> Any:
            return SimpleNamespace(submit=lambda work, *given: SimpleNamespace(result=lambda: work(*given)), shutdown=lambda **_: None)

        def __exit__(self, *raised: object) -> None:
            pass

    with patch.object(cleaner, "ProcessPoolExecutor", Pool):
        prepare(config, Path.cwd() / "out")
    return found


PREPARE = Effects(PrepareConfig, observe=inside(prepared), base=vars(SMALL), rows={
    "sources": Differs(SMALL.sources, (Source("more"), Source("code"))),
    "cleaning": Differs(SMALL.cleaning, CleaningConfig(stages=("length",), min_bytes=200)),
    "held_out_share": Differs(0.3, 0.6),
    "tokenizer": Differs(None, Path("others/tokenizer.json")),
    "vocab_size": Differs(400, 350),
    "sentinels": Differs(3, 5),
    "tokenizer_bytes": Differs(2**25, 300),
    "part_bytes": Differs(2**25, 500),
    "workers": Differs(0, 2, by=inside(workers_of)),
})  # fmt: skip


# Rows.

CONSTANT = ScheduleConfig("constant", warmup_steps=0)
SIZES = {"seq": 40, "batch_size": 4, "micro_batch_size": 2, "held_out_rows": 3}
WORLD = SingleRankCommunicator()


@cache
def text() -> PreparedText:
    """Prepared once; its folder is gone, and its files are still mapped."""
    with text_folder():
        return prepare(SMALL, Path.cwd() / "out")


def steps_of(text: PreparedText, config: DataConfig) -> list:
    training, held_out = loaders(TrainerConfig(data=config, steps=2, schedule=CONSTANT), text, Mesh(ParallelConfig(), WORLD))
    return [list(islice(training, 12)), list(held_out)]


def run_of(config: DataConfig) -> list:
    with text_folder():
        mode = Pretraining(TrainerConfig(data=config), None, WORLD, Console(file=io.StringIO()))
        return [stored(mode.text), mode.text.folder.parent.name]


DATA = Effects(DataConfig, observe=lambda config: steps_of(text(), config), base=SIZES | {"prepare": SMALL}, rows={
    "prepare": Differs(SMALL, replace(SMALL, vocab_size=390), by=run_of),
    "prepared": Differs(Path("one"), Path("other"), by=run_of),
    "seq": Differs(40, 48),
    "batch_size": Differs(4, 6),
    "micro_batch_size": Differs(2, 4),
    "fim": Differs(FimConfig(), FimConfig(rate=0.0)),
    "strategy": Differs("best_fit", "sequential", beside={"fim": FimConfig(rate=0.0)}),
    "epochs": Differs(None, 1, beside={"batch_size": 8}),
    "held_out_rows": Differs(3, 4),
})  # fmt: skip


def moved(config: FimConfig) -> list:
    made, draws = tokenizer(), np.random.default_rng(1)
    move = FillInMiddle(config, made.encode, made.decode, made.fim_tokens)
    return [move(np.array([*made.encode(each), made.end_id]), draws).tolist() for each in CODE.values()]


FIM = Effects(FimConfig, observe=moved, rows={
    "rate": Differs(0.5, 0.9), "spm_share": Differs(0.5, 0.9), "split": Differs("character", "line"),
})  # fmt: skip


ALL = [SOURCE, CLEANING, PREPARE, DATA, FIM]
