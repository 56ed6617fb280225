"""Quantization to four bits on a real model: rounding, GPTQ and AWQ, calibrated on one kind of text and measured on three.

    python chapters/10_finetuning/pretrained_quantization.py

Kinds of text: code (the embedded corpus), prose (English paragraphs of its docstrings) and chats (this chapter's generated instructions in
the model's own template). A seed chooses the calibration windows; the held-out windows are the same for all. QUANTIZATION.md has the table.
Interrupt the command and start it again: it continues.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.course.launch import launch

if TYPE_CHECKING:
    from torch import Tensor

    from shared.model.transformer import TransformerModel

KINDS = ("code", "prose", "chats")
BATCH = 4  # windows that run at once
SHORTEST, LETTERS = 120, 0.93  # characters of a paragraph of prose, and the share of them that are letters or spaces


@dataclass
class StudyConfig:
    """Quantize a pretrained model in several ways, and measure each on held-out code, prose and chats.

    Args:
        model: a model's folder, a GGUF file, or the name of a packaged model.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        seeds: choices of the calibration windows.
        seq: tokens of a window.
        rows: calibration windows.
        awq_rows: of AWQ, which runs each block some twenty times.
        held_out_rows: windows of each kind that are measured.
        output: folder of results and table.
    """

    model: Path = Path("smollm2")
    impl: Literal["reference", "mine", "mixed"] = "reference"
    seeds: int = 3
    seq: int = 256
    rows: int = 16
    awq_rows: int = 2
    held_out_rows: int = 4
    output: Path = Path("runs/10_pretrained_quantization")


def variants(config: StudyConfig) -> list[tuple[dict[str, dict[str, Any]], int]]:
    """Name -> settings, and how many seeds."""
    common = {"model": str(config.model), "seq": config.seq, "held_out_rows": config.held_out_rows}

    def variant(method: str, group: int = 64, on: str | None = None, rows: int | None = config.rows, **more: Any) -> dict[str, Any]:
        return common | {"method": method, "group": group, "on": on, "rows": rows, "act_order": False, "symmetric": True} | more

    rounded = {f"rounding, by {group}": variant("nearest", group, rows=None) for group in (64, 32)}
    drawn = {f"GPTQ, by 64, {kind}": variant("gptq", on=kind) for kind in KINDS[:2]}
    drawn |= {"AWQ, by 64, code": variant("awq", on="code", rows=config.awq_rows)}
    ordered = {"GPTQ with act order, by 64, code": variant("gptq", on="code", act_order=True)}
    return [(rounded, 1), (drawn, config.seeds), (ordered, 1)]


def run(config: StudyConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from chapters import trials
    from shared.course.errors import CourseError
    from shared.devices import keep_freed_memory
    from shared.finetune.gguf.packaged import is_gguf
    from shared.finetune.gguf.unpack import unpacked
    from shared.output_files import require_writable, write_atomically

    for name in ("seeds", "seq", "rows", "awq_rows", "held_out_rows"):
        if getattr(config, name) < 1:
            raise CourseError(f"{name} is {getattr(config, name)}: give at least 1.")
    require_writable(config.output)
    keep_freed_memory()
    console = Console(markup=False, emoji=False)
    measured = Measured(unpacked(config.model) if is_gguf(config.model) else config.model, config)
    results: dict[str, list[dict[str, Any]]] = {}
    for some, seeds in variants(config):
        try:
            results |= trials.run_trials(some, measured.trial, seeds, config.output / "results.json", console)
        except ValueError as error:
            raise CourseError(str(error)) from None
        write_atomically(config.output / "table.md", ("\n".join(table_of(results)) + "\n").encode())
    console.print((config.output / "table.md").read_text(encoding="utf-8"), highlight=False)


class Measured:
    """A model, texts of three kinds in its tokens, and its own log-probabilities on their held-out windows."""

    def __init__(self, folder: Path, config: StudyConfig):
        self.folder, self.config = folder, config
        self.streams = {(kind, side): stream_of(folder, kind, side) for kind in KINDS for side in ("training", "held out")}

    def model(self) -> "TransformerModel":
        from shared.model.hf.pretrained import load_pretrained

        return load_pretrained(self.folder).eval()

    def held_out(self, kind: str) -> dict[str, "Tensor"]:
        from shared.batches import sequential_batches

        rows = self.config.held_out_rows
        return next(sequential_batches(self.streams[kind, "held out"], rows, self.config.seq, rows))

    def log_probabilities(self, model: "TransformerModel", kind: str) -> "Tensor":
        """[tokens, vocabulary]."""
        import torch

        with torch.no_grad():
            return model(self.held_out(kind)["input_ids"]).flatten(0, 1).log_softmax(dim=-1)

    @lru_cache(maxsize=len(KINDS))  # noqa: B019 (one object, as long as the process)
    def reference(self, kind: str) -> "Tensor":
        return self.log_probabilities(self.model(), kind)

    def calibration(self, settings: dict[str, Any], seed: int) -> Iterator[dict[str, "Tensor"]]:
        import torch

        from shared.batches import batch_at

        stream = self.streams[settings["on"] or "code", "training"]
        rows = settings["rows"] or 1  # rounding looks at none, but reports each layer's error on some text
        starts = torch.randint(len(stream) - self.config.seq, (rows,), generator=torch.Generator().manual_seed(1000 + seed))
        return (batch_at(stream, chunk, self.config.seq) for chunk in starts.split(BATCH))

    def trial(self, settings: dict[str, Any], seed: int) -> dict[str, float]:
        """Quantize the model in one way, and compare it with the model as it was, on the same tokens."""
        from shared.finetune.quantization.methods import quantize_model

        model, began = self.model(), time.process_time()
        for _ in quantize_model(model, self.calibration(settings, seed), method_of(settings)):
            pass
        figures = {"seconds": time.process_time() - began}
        for kind in KINDS:
            plain, found = self.reference(kind), self.log_probabilities(model, kind)
            targets = self.held_out(kind)["targets"].flatten()
            added = (plain - found).gather(1, targets[:, None]).squeeze(1)
            figures[f"{kind}: loss before"] = -plain.gather(1, targets[:, None]).mean().item()
            figures[f"{kind}: added"] = added.mean().item()
            figures[f"{kind}: standard error"] = (added.std() / len(added) ** 0.5).item()
            figures[f"{kind}: KL"] = (plain.exp() * (plain - found)).sum(dim=1).mean().item()
        return figures


def method_of(settings: dict[str, Any]) -> Any:
    from shared.finetune.quantization.awq import AWQ
    from shared.finetune.quantization.gptq import GPTQ
    from shared.finetune.quantization.rounding import Rounding

    rounding = Rounding(4, settings["group"], settings["symmetric"])
    if settings["method"] == "gptq":
        return GPTQ(rounding, act_order=settings["act_order"], block=32)  # the same weights as with 128, sooner on a CPU
    return AWQ(rounding) if settings["method"] == "awq" else rounding


def stream_of(folder: Path, kind: str, side: str) -> "Tensor":
    """Token ids of a kind of text, one piece after the other: [tokens] int64."""
    import torch

    from shared.data.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.load(folder)
    if kind != "chats":
        return torch.tensor(tokenizer.encode("\n\n".join(texts(kind, side))))
    from shared.finetune.chat.encoding import ChatEncoder
    from shared.finetune.chat.template import ChatTemplate

    encoder, template = ChatEncoder(tokenizer), ChatTemplate.load(folder)
    return torch.tensor(encoder.encode(["".join(template.render(messages) for messages in chats(side))])[0].ids)


def chats(side: str, count: int = 800) -> Iterator[list[dict[str, str]]]:
    from itertools import islice

    from shared.finetune.instructions import conversation, draw_tasks

    return (conversation(task)["messages"] for task in islice(draw_tasks(0, side == "held out"), count if side == "training" else 120))


def texts(kind: str, side: str) -> Iterable[str]:
    """Every tenth file to train on, and every fourth held-out one: enough, and read quickly."""
    from chapters.prose import prose_of
    from shared.corpus import embedded_corpus

    corpus = embedded_corpus()
    documents = corpus.training[::10] if side == "training" else corpus.held_out[::4]
    if kind == "code":
        return [document.content.decode(errors="replace") for document in documents]
    documents = corpus.training[::3] if side == "training" else corpus.held_out
    return [paragraph for text in prose_of(documents) for paragraph in text.split("\n\n") if is_prose(paragraph)]


def is_prose(paragraph: str) -> bool:
    """English sentences, and no examples, formulas or lists."""
    plain = sum(character.isalpha() or character.isspace() for character in paragraph) >= LETTERS * len(paragraph)
    return len(paragraph) >= SHORTEST and plain and paragraph[0].isupper() and paragraph.rstrip().endswith(".")


def table_of(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A Markdown table: for each kind of held-out text the loss added and its share of rounding's, mean and range over the seeds."""
    columns = [f"{kind}: loss added, nats | share of rounding's | KL" for kind in KINDS]
    lines = [f"| weights in 4 bits, calibration text | {' | '.join(columns)} |", "|---" * (1 + 3 * len(KINDS)) + "|"]
    for name, seeds in results.items():
        plain = results[rounded_like(name)][0]
        cells = []
        for kind in KINDS:
            added = [each[f"{kind}: added"] for each in seeds]
            shares = [each / plain[f"{kind}: added"] for each in added]
            cells += [ranged(added, ".3f"), "" if name.startswith("rounding") else ranged(shares, ".0%")]
            cells += [ranged([each[f"{kind}: KL"] for each in seeds], ".3f")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def rounded_like(name: str) -> str:
    """The name of rounding to nearest with the same groups."""
    return "rounding, by 32" if "by 32" in name else "rounding, by 64"


def ranged(values: list[float], form: str) -> str:
    mean = f"{sum(values) / len(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    launch(run, StudyConfig, Path(__file__).with_name("pretrained_quantization.yaml"))
