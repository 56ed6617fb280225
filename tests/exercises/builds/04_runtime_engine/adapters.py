"""The build of chapter 04: a training engine that survives a kill at any file operation, yours from an empty file. About four hours.

    course check 04.build                all stages; course check 04.build.steps: one
    course hint 04.build.steps           three hints for each stage
    course reset 04.build                this file as it was; your text is kept

You design the rest: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay thin:
a few lines each that call what you wrote. Each stage has functions of its own, and is NOT ATTEMPTED while one of them still raises
NotImplementedError, so you can work from the first stage to the last and stop after any of them.

You may use everything of chapters 01 to 03. You need nothing of this chapter's exercises, and may copy from them. The modules of
`shared.engine` may not be imported. Everything is on the CPU, in one process, and the main thread calls.

What an engine is made of:
    model       any nn.Module. It may have buffers, several dtypes, frozen parameters, one parameter under two names
    optimizer   of torch.optim, over parameters of the model, in one group or several
    schedule    None, or a scheduler of torch.optim.lr_scheduler for this optimizer
    data        next(data) is the list of a step's micro-batches. It never ends. It has state_dict() and load_state_dict(state)
    objective   objective(model, micro_batch) -> (loss_sum, tokens, sums): a scalar tensor with a graph; an int of at least 0; a dictionary
                of scalar tensors, which are sums over the same tokens. All micro-batches of a run have the same names in `sums`
    settings    a dictionary with the four keys below
    callbacks   a list of objects, called in this order. Each has any of the methods below; one that it lacks is not called

The state dictionaries of data and schedule are what JSON can hold: dictionaries with texts as keys, lists, numbers, texts, booleans, None.

Settings
    folder      a Path: all checkpoints of this run, and nothing else. It and those above it need not exist
    log_every   a log after each step whose number it divides; an int of at least 1. The first step has number 1
    save_every  a save after each step whose number it divides; 0: none by itself. An int of at least 0
    keep        how many checkpoints stay, the newest; an int of at least 1

Methods of a callback
    on_step(step)          after a step: optimizer and schedule have stepped
    on_log(step, figures)  after a log, which comes after the on_step of its step
    on_save(step)          once the checkpoint cannot be lost any more. A save comes after the log of its step

Files. A file operation is: a file is created or written, a file or folder is renamed or removed, a folder is made. You write inside of
settings["folder"] alone. A *kill* ends the process before any file operation, or anywhere within the writing of a file; no `finally` runs.
A *power cut* comes at any moment, and what the disk then has is the following. Of a file: what it held when `os.fsync` was last
called for it, and nothing where it never was. Of a folder: the names that it had at the last `os.fsync` of that folder, and of the changes
since then (names that were added, removed, or renamed within it) none, all, or any of them. Where settings["folder"] itself is found is
safe. `os.fsync`, called by this name, is all that counts: no other way of forcing is seen. Chapter 04 explains why.
A *torn* file is shorter or longer than it was, is missing, or has other bytes somewhere.
A checkpoint is *sound* if all of it is there as it was written. Nothing is written with pickle, also not by torch.save or NumPy.

The stages
    1 steps      steps over micro-batches, callbacks in their order, one graph at a time
    2 metrics    means over all tokens since the last log, each read once; nothing keeps graphs alive
    3 evaluate   the same figures of other batches, and nothing of the training changes
    4 save       a checkpoint holds the model bit for bit, and a torn file is noticed: the one before it is taken. See `save` for memory
    5 kill       killed at any file operation of a save, a run resumes from this checkpoint or the one before. At most `keep` stay
    6 power      the same for a power cut, with few calls of os.fsync
    7 resume     a run that was killed and resumed ends bit for bit like one that was not
    8 signal     SIGTERM and SIGINT end a run after its step, in good order
    9 bad_input  what cannot be right is refused with a ValueError that says what; nothing has changed
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Objective = Callable[[nn.Module, Any], tuple[Tensor, int, dict[str, Tensor]]]
Settings = dict[str, Any]


def make_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler | None,
    data: Iterator[list[Any]],
    objective: Objective,
    settings: Settings,
    callbacks: Sequence[object] = (),
) -> object:
    """An engine before its first step, whatever you make it. Nothing is read or written, and no random number is drawn.

    Raises:
        ValueError: see `check_settings`; or the optimizer has a parameter that is none of the model's (stage 9). The message has the
            number of its group, from 0.
    """
    raise NotImplementedError("04.build: make_engine is not written yet")


def run(engine: object, steps: int) -> int:
    """Train until the run has `steps` steps in all, those before a resume included; none where it has them already.

    A step: next(data), once. The gradient of the sum of the losses over all micro-batches, divided by the number of all their tokens, is in
    each parameter's grad when the optimizer steps; gradients from before do not count. The optimizer steps once, and then the schedule.
    When the objective is called, no graph of an earlier micro-batch has its saved tensors any more. Graphs of earlier steps are not kept.

    A log has the mean over all tokens since the last log: "loss", and each name of `sums`; "tokens", how many they were, an int; and
    "learning_rate", that of the optimizer's first group in this step. Means and rates are floats. Sums are added in float64. Numbers are
    fetched from tensors (item, float, bool, int) once for each mean of a log, and not in the steps between: a GPU would wait for each.

    SIGTERM or SIGINT (stage 8): the step is finished with all that belongs to it, and the run ends. It is saved, also where `save_every`
    does not ask for it, and only once. Afterwards, also after an exception, both signals are handled as they were before. A run may be
    continued by another call of `run`. Before and after `run`, signals are not the engine's.

    An exception of model, objective, data or a callback goes on to the caller.

    Returns:
        How many steps the run has now.

    Raises:
        ValueError: steps is no int or below 0; a step has no tokens (stage 9). The message has steps, or the step's number. No weight
            is changed by this step.
    """
    raise NotImplementedError("04.build: run is not written yet")


def evaluate(engine: object, micro_batches: Sequence[Any]) -> dict[str, float]:
    """The figures of a log without "learning_rate", over the micro-batches given, in evaluation mode and without a graph.

    Of the training nothing changes, also where the model or the objective raises: each module has the mode that it had, gradients are as
    they were, the generators (see `resume`) are where they were, and the next log is not touched. It may be called from a callback.

    Raises:
        ValueError: there are no tokens (stage 9).
    """
    raise NotImplementedError("04.build: evaluate is not written yet")


def save(engine: object) -> None:
    """A checkpoint of the run as it is between two steps, into settings["folder"]. Another one of this step, sound or not, is replaced.
    Once it is safe, the callbacks hear of it (on_save), from wherever `save` was called.

    The `keep` sound checkpoints of the highest steps stay; older and torn ones are removed. One is removed only once the new
    one is safe: at no moment are fewer sound ones there than were before, or than `keep`, and at no moment is there more on the disk than
    keep + 1. What a killed save left is removed by the next save. A checkpoint has at most 64 KiB more than the tensors of the model and
    of the optimizer's state.

    At no time does a save hold more than a quarter of what it writes, as copies in memory; no tensor of the models in the check is as
    large as that. It calls `os.fsync` 12 times at most, whatever the number of tensors (stage 6).

    A save that raises, because the disk is full, say, leaves the checkpoints that there were, and the run can be continued and saved.
    """
    raise NotImplementedError("04.build: save is not written yet")


def saved(folder: Path) -> list[int]:
    """The steps of the sound checkpoints in a folder, from old to new. None where there is no folder."""
    raise NotImplementedError("04.build: saved is not written yet")


def resume(engine: object) -> int:
    """Put a new engine where the newest sound checkpoint of its folder was taken.

    The engine was made like the saved one, with the same settings, of objects in any state. Its optimizer has as many groups with the same
    parameters in each, but they may stand in another order within a group. Everything that a later step depends on is put back, into the
    tensors that the model has: weights and buffers, the optimizer's state and the options of its groups, schedule and data by their
    load_state_dict, what the next log has of the steps before, and the generators: PyTorch's global one, Python's `random`, NumPy's
    global one (numpy.random.get_state). load_state_dict may draw random numbers. Whether gradients are there does not matter.

    Returns:
        How many steps are done: the number of the checkpoint, or 0 and nothing changed where no sound one is there.

    Raises:
        ValueError: weights or buffers have other names, shapes or dtypes than in the checkpoint; a schedule is here and not there, or the
            other way round; or the optimizer has another number of groups, or another parameter in a group (stage 9). Nothing is changed.
            The message has the name of a tensor that differs, or the word schedule, or for the number of groups the word groups.
    """
    raise NotImplementedError("04.build: resume is not written yet")


def check_settings(settings: Settings) -> None:
    """Refuse settings that cannot be right.

    Raises:
        ValueError: a key is unknown or missing, or a value is not what the text above asks of it: the key, and the value if there is one.
            A bool is no int. The folder's path, or one above it, is a file: the folder, and its path.
    """
    raise NotImplementedError("04.build: check_settings is not written yet")
