"""Chapter 12. Measures of an evaluation, each with its standard error: bits per byte, acc and acc_norm, exact match, pass@k.

    bits_per_byte   nats / (ln 2 * bytes of UTF-8): the unit is the byte, so models with other tokenizers compare
    acc             the choice with the largest log-likelihood is the right one
    acc_norm        the same, each divided by the characters of its choice, without the delimiter; acc_bytes: by its bytes
    exact_match     the likeliest answer passes the task's check
    pass@k          at least one of k drawn answers does (`shared.rl.examination`)

The standard error of a mean, of bits per byte, or of the paired difference of two models:

    mean       sum v / sum w                      v: what an item adds, w: what it weighs (1, or its bytes)
    error^2    n / (n - 1) * sum (v - mean * w)^2 / (sum w)^2

With w = 1 it is the sample deviation over sqrt(n), as lm-eval has it. Documents are drawn, not bytes: a ratio's error is that of its
linearization (the delta method; Cochran 1977, section 2.11). Two models answer the same items, so their difference is computed by item:
what is hard for both cancels out (Miller 2024, "Adding Error Bars to Evals", section 4.2).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shared.course.errors import CourseError
from shared.data.tokenizer import TextTokenizer
from shared.devices import pick_device
from shared.finetune.chat.encoding import ChatEncoder
from shared.finetune.chat.template import ChatTemplate, spelt
from shared.finetune.instructions import Task
from shared.model.hf.files import read_json
from shared.model.transformer import TransformerModel
from shared.rl.examination import GREEDY, Advance, Check, Examination, generated, silent
from shared.rl.generation import Drawing
from shared.trainer.evaluation.likelihood import LikelihoodScorer, Pair
from shared.trainer.evaluation.tasks import EvalTask, Item, Loaded
from shared.trainer.talk.chat import AnswerSettings, open_talk

NORMAL = 1.959964  # standard errors on each side of a 95 % interval


@dataclass(frozen=True)
class Subject:
    """A model that is evaluated.

    path: as it was named. template: None for one without. stops: ids that end an answer.
    """

    path: Path
    model: TransformerModel
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    stops: frozenset[int]
    scorer: LikelihoodScorer

    def encode(self, text: str) -> list[int]:
        """The ids of a text, after the tokenizer's beginning-of-text token, if it adds one."""
        return self.tokenizer.tokenizer.encode(text, add_special_tokens=True).ids

    def chat_prompt(self, shots: Sequence[tuple[str, str]], prompt: str) -> list[int]:
        """The ids of a user's turn after earlier turns, up to where the answer begins. Prompts are stripped."""
        turns = [turn for asked, answer in shots for turn in (("user", asked), ("assistant", answer))]
        messages = [{"role": role, "content": text.strip()} for role, text in [*turns, ("user", prompt)]]
        return ChatEncoder(self.tokenizer).prompt(self.template, messages)


def open_subject(path: Path, batch_tokens: int = 4096, device: str = "auto", precision: str = "float32") -> Subject:
    """The model of a run, a checkpoint or a folder.

    Args:
        batch_tokens: positions that are computed at a time.
        device: auto, cpu, cuda or mps.
        precision: of the weights: float32, or bfloat16, which takes half of the memory.
    """
    talk = open_talk(path, AnswerSettings(), None)
    model, tokenizer = talk.model, talk.tokenizer
    if model.config.architecture != "decoder":
        raise CourseError(f"{path} is an {model.config.architecture}: likelihoods of text are those of a decoder. Give another model.")
    model.to(device=pick_device(device), dtype=getattr(torch, precision))
    return Subject(
        path, model, tokenizer, talk.template, frozenset(talk.stops),
        LikelihoodScorer(model, tokenizer, prefix_of(path, tokenizer), batch_tokens),
    )  # fmt: skip


def prefix_of(path: Path, tokenizer: TextTokenizer) -> int:
    """The token before a text's first: the tokenizer's beginning of a text, else its end."""
    for folder in (path, path / "model", path / "tokenizer", path / "adapter"):
        if (folder / "tokenizer_config.json").is_file():
            name = spelt(read_json(folder / "tokenizer_config.json").get("bos_token"))
            return tokenizer.special_ids.get(name, tokenizer.end_id)
    return tokenizer.end_id


@dataclass(frozen=True)
class Measured:
    """A figure and the items that it is a mean of. weights: of the items; None for 1 each."""

    values: Sequence[float]
    weights: Sequence[float] | None = None

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / math.fsum(self.weighed)

    @property
    def weighed(self) -> Sequence[float]:
        return self.weights or [1.0] * len(self.values)

    @property
    def error(self) -> float:
        """The standard error; NaN for a single item."""
        count, mean = len(self.values), self.mean
        if count < 2:
            return math.nan
        squares = math.fsum((value - mean * weight) ** 2 for value, weight in zip(self.values, self.weighed, strict=True))
        return math.sqrt(count / (count - 1) * squares) / math.fsum(self.weighed)

    def minus(self, other: "Measured") -> "Measured":
        """The paired difference."""
        if len(self.values) != len(other.values) or list(self.weighed) != list(other.weighed):
            raise CourseError("Two models are compared on the same items only: evaluate both with the same tasks and the same limit.")
        return Measured([mine - theirs for mine, theirs in zip(self.values, other.values, strict=True)], self.weights)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval, by the normal approximation."""
        return self.mean - NORMAL * self.error, self.mean + NORMAL * self.error


@dataclass(frozen=True)
class TaskResult:
    """The figures of a model in a task. answers: what it generated, if anything."""

    loaded: Loaded
    metrics: dict[str, Measured]
    answers: list[dict[str, Any]] = field(default_factory=list)


def measure(subject: Subject, loaded: Loaded, check: Check, advance: Advance = silent) -> TaskResult:
    """A model's figures in one task. advance: called with how many more requests are done, of `requests_of`."""
    if loaded.task.kind == "text":
        return measure_text(subject, loaded, advance)
    if loaded.task.kind == "choice":
        return measure_choice(subject, loaded, advance)
    return measure_generate(subject, loaded, check, advance)


def requests_of(loaded: Loaded) -> int:
    """The number of requests of a task, for a progress bar; a document counts as one."""
    each = {"text": lambda item: 1, "choice": lambda item: len(item.choices), "generate": lambda item: 1 + loaded.task.samples}
    return sum(each[loaded.task.kind](item) for item in loaded.items)


def measure_text(subject: Subject, loaded: Loaded, advance: Advance) -> TaskResult:
    subject.tokenizer.require_lossless()
    texts = [item.prompt for item in loaded.items]
    sums = subject.scorer.rolling([subject.tokenizer.encode(text) for text in texts], loaded.task.overlap)
    advance(len(texts))
    sizes = [float(len(text.encode())) for text in texts]
    return TaskResult(loaded, {"bits_per_byte": Measured([-each / math.log(2) for each in sums], sizes)})


def measure_choice(subject: Subject, loaded: Loaded, advance: Advance) -> TaskResult:
    pairs = [pair for item in loaded.items for pair in pairs_of(subject, loaded.task, item)]
    scored = iter(subject.scorer.score(pairs, advance))
    right: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    for item in loaded.items:
        sums = [next(scored).log_likelihood for _ in item.choices]
        for name, sizes in (("acc", None), ("acc_norm", [*map(len, item.choices)]), ("acc_bytes", [len(c.encode()) for c in item.choices])):
            shares = [value / size for value, size in zip(sums, sizes, strict=True)] if sizes else sums
            right[name].append(float(shares.index(max(shares)) == item.answer))
    return TaskResult(loaded, {name: Measured(values) for name, values in right.items()})


def pairs_of(subject: Subject, task: EvalTask, item: Item) -> list[Pair]:
    """The tokens of a question after its few-shot examples, with those of each choice."""
    if task.chat and subject.template:
        prompt = subject.chat_prompt(item.shots, item.prompt)
        return [(prompt, subject.tokenizer.encode(choice)) for choice in item.choices]
    prompt = plain_prompt(task, item)
    return [subject.scorer.split(prompt, task.delimiter + choice) for choice in item.choices]


def plain_prompt(task: EvalTask, item: Item) -> str:
    shots = (f"{prompt}{task.delimiter}{answer}{task.shots_delimiter}" for prompt, answer in item.shots)
    return "".join(shots) + item.prompt


def measure_generate(subject: Subject, loaded: Loaded, check: Check, advance: Advance) -> TaskResult:
    task, items = loaded.task, loaded.items
    is_chat = task.chat and subject.template is not None
    prompts = [
        subject.chat_prompt(item.shots, item.prompt) if is_chat else subject.encode(plain_prompt(task, item)) for item in items
    ]
    examination = Examination(
        [Task("evaluation", item.prompt, item.right, item.check) for item in items], with_room(subject, prompts, task.new_tokens), check,
        subject.tokenizer.decode, task.new_tokens, limits_of(subject), task.samples, Drawing(task.temperature), loaded.name, task.seed,
        task.stop,
    )  # fmt: skip
    answers = examination.answers(subject.model, advance)
    metrics = {"exact_match": Measured([float(each.score == 1) for each in answers])}
    metrics |= {f"pass@{k}": Measured(found) for k, found in examination.pass_at_k(subject.model, advance).items()}
    shown = [{"prompt": each.prompt, "answer": each.text, "expected": each.wanted, "right": each.score == 1} for each in answers]
    return TaskResult(loaded, metrics, shown)


def with_room(subject: Subject, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Truncate prompts on the left so that an answer fits; at most half of the context is kept free for it."""
    room = max(1, subject.scorer.context - min(new_tokens, subject.scorer.context // 2))
    return [(prompt or [subject.scorer.prefix_id])[-room:] for prompt in prompts]


def limits_of(subject: Subject) -> dict[str, Any]:
    return {"stops": subject.stops, "context": len(subject.scorer.before) + subject.scorer.context}


def generate(
    subject: Subject, prompts: Sequence[list[int]], new_tokens: int, stop: Collection[str] = (), drawing: Drawing = GREEDY,
    seeds: Sequence[int] | None = None,
) -> list[str]:  # fmt: skip
    """The answer of a model to each prompt, given as ids."""
    settings = {"stop": stop, "drawing": drawing, "seeds": seeds} | limits_of(subject)
    found = generated(subject.model, with_room(subject, prompts, new_tokens), new_tokens, subject.tokenizer.decode, **settings)
    return [text for text, _ in found]
