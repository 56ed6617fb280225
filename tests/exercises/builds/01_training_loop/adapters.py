"""The build of chapter 01: a language model and its training loop, yours from an empty file. About three and a half hours.

    course check 01.build                all stages; course check 01.build.batches: one
    course hint 01.build.batches         three hints for each stage
    course reset 01.build                this file as it was; your text is kept

At the end a model that you designed, trained by a loop that you wrote, predicts Python files that it never saw better than the table of
pairs does, and writes text.

You design the rest: classes or functions, in this file, as you like. The checks see nothing but the functions below, which stay thin: a few
lines each that call what you wrote. Each stage has functions of its own, and is NOT ATTEMPTED while one of them still raises
NotImplementedError, so you can work from the first stage to the last and stop after any of them.

You may use all of PyTorch, and copy from your exercises of this chapter. The modules of the course (`shared`, `chapters`) may not be
imported. Everything runs on the CPU.

A text is a tensor [bytes] of uint8. Ids are bytes as int64, 0 to 255.

A model is any causal nn.Module that is called as `model(ids)` with ids [rows, columns] and returns logits [rows, columns, vocabulary]: the
logits at a place predict the id after it and depend on the ids of the same row up to that place alone. The checks hand over models of their
own from the stage `step` on: they may have dropout, modules in different modes, frozen parameters, another floating dtype than float32, and
(in `step` alone) another vocabulary than the 256 bytes.

The stages
    1 batches    documents split into training and held-out text, and windows of text as inputs and targets
    2 model      a byte model: any design that is causal and small
    3 loss       cross-entropy as a sum and a count
    4 step       one training step over micro-batches of any sizes that equals one over all of them at once
    5 evaluate   bits per byte of a held-out text; the model is left as it was found
    6 sample     text from a model: temperature, top-k, a seed, a prompt of any length
    7 train      a run that learns, the same from the same seed, and beats the table of pairs in half a minute
    8 resume     a run that is saved and continued equals one that was not, bit for bit
    9 bad_input  what cannot be right is refused with a ValueError that says what; nothing has changed then
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Generator, Tensor, nn


def split(documents: Sequence[bytes], one_in: int) -> tuple[Tensor, Tensor]:
    """The training text and the held-out text: whole documents, in the order in which they were given, each followed by the byte 0.

    About one document in `one_in` is held out. Whether a document is depends on its content alone: the same document goes to the same side
    in every call and in every process, whatever other documents there are. A side may be empty.

    Raises:
        ValueError: one_in is below 2 (stage 9); the message has the number.
    """
    raise NotImplementedError("01.build: split is not written yet")


def windows(text: Tensor, rows: int, length: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Random windows of a text: inputs and targets, [rows, length] int64 each.

    A row of the inputs is `length` bytes that follow one another in the text; its targets are the byte after each of them. All places where
    `length` + 1 bytes fit are equally likely, the first and the last too, and rows are drawn independently. The draws come from
    `generator` alone. The text is left as it is, and is never copied or converted as a whole: it may be large.

    Raises:
        ValueError: the text has fewer than `length` + 1 bytes (stage 9); the message has the text's number of bytes.
    """
    raise NotImplementedError("01.build: windows is not written yet")


def new_model(seed: int) -> nn.Module:
    """An untrained byte model: ids [rows, columns] -> logits [rows, columns, 256], float32, for 1 to 256 columns and any number of rows.

    - Its parameters and buffers have at most 2,000,000 bytes together.
    - It is causal, and no row depends on another one. From the fourth place on, each logit's place depends on the last four ids at least.
      In evaluation mode the same ids give the same logits. All this holds for any values of its parameters, not only for the first ones.
    - It begins without an opinion: on any text it costs 7 to 9 bits per byte.
    - The same seed gives the same parameters, whatever was drawn from PyTorch's global generator before, and another seed gives others.
      The global generator is afterwards as it was.
    """
    raise NotImplementedError("01.build: new_model is not written yet")


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of predictions, summed, and how many targets it sums over.

    Args:
        logits: [..., vocabulary], any floating dtype, of any vocabulary. Half precision is computed in float32.
        targets: [...] int64. A target of -100 costs nothing, is not counted, and leaves no gradient.

    Returns:
        The sum: [] in nats, float32, for float64 logits float64, with the graph to the logits, also where no target counts (its value
        and the gradients are then 0). It is finite for logits of 10,000. The count: [] int64.
    """
    raise NotImplementedError("01.build: loss is not written yet")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """One training step on the mean loss over all targets that count in all micro-batches (inputs, targets), [rows, columns] each.

    The micro-batches may have different sizes, and different numbers of targets that count, also none. The step equals one with everything
    in one batch, for any optimizer of PyTorch. The model is in training mode. Gradients of earlier steps play no part; this step's stay in
    `grad` until the next one. A parameter that the loss does not depend on has no gradient (None) and is not changed.
    Each micro-batch costs one call of the model, and the graph of one micro-batch at a time is held.

    Returns:
        The mean loss in nats: [] without a graph.

    Raises:
        ValueError: no target counts, or the loss is not finite (stage 9). Parameters and the optimizer's state are then as they were.
    """
    raise NotImplementedError("01.build: step is not written yet")


def evaluate(model: nn.Module, text: Tensor, length: int, rows: int) -> float:
    """Bits per byte of a model on a text.

    The text is cut into windows of `length` inputs from its beginning; the last one may be shorter. A window is a row of its own, so a byte
    is predicted from those before it in its window. Every byte of the text but the first is predicted exactly once, and all count alike.
    At most `rows` windows are in one call of the model, of at most `length` columns, and there are at most one call more than
    that needs. Logits are not kept from one call to the next.

    The model is in evaluation mode, and no graph is recorded. Afterwards each of its modules is in the mode in which it was found, also if
    the model raised; gradients, and whether gradients are recorded, are as they were.

    Raises:
        ValueError: the text has fewer than 2 bytes (its number), or length or rows is below 1 (its name) (stage 9).
    """
    raise NotImplementedError("01.build: evaluate is not written yet")


def sample(
    model: nn.Module, prompt: bytes, count: int, temperature: float, top_k: int | None, seed: int, context: int
) -> bytes:
    """`count` bytes that continue a prompt, without the prompt, drawn one after another by a model of bytes.

    Each is drawn from softmax(logits / temperature) of the last place, among the `top_k` likeliest bytes (any of those that are equal).
    Temperature 0 takes a likeliest byte. top_k None, or above 256, means all bytes. The odds are right for any temperature above 0.
    The model sees the last `context` bytes of prompt and what was drawn so far, in one row. An empty prompt counts as the byte 0.

    The bytes follow from the arguments alone: PyTorch's global generator is neither used nor changed. Modes and gradients are as in
    `evaluate`.

    Raises:
        ValueError: temperature is below 0, infinite or NaN; top_k or context is below 1; count is below 0 (stage 9). The message has the
            name. The model is not called.
    """
    raise NotImplementedError("01.build: sample is not written yet")


def start(text: Tensor, seed: int) -> object:
    """A training run, whatever you make it, of a `new_model(seed)` on a text of 100,000 bytes or more.

    The recipe is yours: optimizer, learning rate, windows in a step and their length, which is 8 to 256. What the run does follows from
    the text and the seed, whatever else draws from PyTorch's global generator in between. Each step has windows of its own, drawn from
    the whole text.

    Raises:
        ValueError: the text is shorter than one of the run's windows and the byte after it (stage 9); the message has its number of bytes.
    """
    raise NotImplementedError("01.build: start is not written yet")


def advance(run: object, steps: int) -> list[float]:
    """The next steps of a run: the mean loss of each in nats. The model is called as `model(ids)`, and the targets are the bytes
    after those in the text.

    Advanced by 50 steps at a time on the training files of the embedded corpus, a run has less bits per byte on held-out files than the
    table of pairs (counted on the same training files) before it has used 30 seconds of processor time, on one thread.
    """
    raise NotImplementedError("01.build: advance is not written yet")


def model_of(run: object) -> nn.Module:
    """The model of a run, as trained so far. It is trained further when the run advances."""
    raise NotImplementedError("01.build: model_of is not written yet")


def save(run: object, path: Path) -> None:
    """Save a run between two steps in one file. The file has at most four times the bytes of the model, and 100,000: not the text. The run
    can be advanced afterwards as well."""
    raise NotImplementedError("01.build: save is not written yet")


def resume(text: Tensor, path: Path) -> object:
    """The run that was saved in a file, with the text that it was started with. It continues as it would have without the save.

    Raises:
        ValueError: there is no such file (its path), or the run was on another text (stage 9).
    """
    raise NotImplementedError("01.build: resume is not written yet")
