"""The solution of build 04: an engine whose checkpoint is one file, so that one renaming makes it whole.

The file has the SHA-256 of what follows; the length of its header in 8 bytes; the header in JSON, with everything that is no tensor; and
the tensors' bytes, one after another. It is written under another name, forced to the disk and renamed, and then the folder is forced.
"""

import hashlib
import json
import os
import random
import signal
from itertools import chain
from pathlib import Path

import numpy
import torch

SUFFIX, PARTIAL, CHECKSUM = ".checkpoint", ".partial", hashlib.sha256().digest_size


class Means:
    """Sums over tokens since the last log. They stay tensors, in float64, until someone asks for the means."""

    def __init__(self):
        self.sums, self.tokens = {}, 0

    def add(self, sums, tokens):
        self.tokens += tokens
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().double()

    def figures(self):
        return {name: value.item() / self.tokens for name, value in self.sums.items()} | {"tokens": self.tokens}


class Engine:
    def __init__(self, model, optimizer, schedule, data, objective, settings, callbacks):
        self.model, self.optimizer, self.schedule, self.data, self.objective = model, optimizer, schedule, data, objective
        self.settings, self.callbacks, self.step, self.means = dict(settings), list(callbacks), 0, Means()
        self.names = {parameter: name for name, parameter in model.named_parameters()}

    def tell(self, event, *values):
        for callback in self.callbacks:
            getattr(callback, event, lambda *_: None)(*values)

    def forward_backward(self, micro_batch, means):
        """In a function of its own: whatever hangs on the graph ends with it, before the next micro-batch begins."""
        loss, tokens, sums = self.objective(self.model, micro_batch)
        if torch.is_grad_enabled():
            loss.backward()
        means.add({"loss": loss} | sums, tokens)

    def train_step(self):
        self.model.zero_grad(set_to_none=True)
        of_step = Means()
        for micro_batch in next(self.data):
            self.forward_backward(micro_batch, of_step)
        if of_step.tokens == 0:
            raise ValueError(f"Step {self.step + 1} has no tokens: there is nothing to divide its gradient by.")
        for gradient in [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]:
            gradient /= of_step.tokens
        rate = float(self.optimizer.param_groups[0]["lr"])  # before the schedule sets that of the next step
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.step += 1
        self.means.add(of_step.sums, of_step.tokens)
        self.tell("on_step", self.step)
        if self.step % self.settings["log_every"] == 0:
            figures, self.means = self.means.figures() | {"learning_rate": rate}, Means()
            self.tell("on_log", self.step, figures)

    def tensors(self):
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    def described(self):
        """Of each tensor its shape, dtype, and the number of its group in the optimizer: what a checkpoint must have in common."""
        numbers = {each: number for number, group in enumerate(self.optimizer.param_groups) for each in group["params"]}
        return {name: [list(tensor.shape), str(tensor.dtype), numbers.get(tensor)] for name, tensor in self.tensors().items()}

    def state(self):
        """Everything that a later step depends on: tensors by paths of names, and the rest for JSON. The optimizer's state by names."""
        noise, python, legacy = generator_states()
        moments = {(self.names[each], key): value for each, state in self.optimizer.state.items() for key, value in state.items()}
        numbers = [(*path, value) for path, value in moments.items() if not isinstance(value, torch.Tensor)]
        tensors = {("model", name): tensor for name, tensor in self.tensors().items()} | {("generator",): noise}
        tensors |= {("optimizer", *path): value for path, value in moments.items() if isinstance(value, torch.Tensor)}
        rest = {"step": self.step, "numbers": numbers, "data": self.data.state_dict(), "python": python, "numpy": legacy}
        rest |= {"schedule": self.schedule and self.schedule.state_dict(), "described": self.described(), "tokens": self.means.tokens}
        rest["options"] = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        return tensors, rest | {"sums": {name: value.item() for name, value in self.means.sums.items()}}

    def require_fitting(self, rest):
        """Refuse, before anything is changed, what cannot be put back."""
        here, there = self.described(), rest["described"]
        if len(self.optimizer.param_groups) != len(rest["options"]):
            raise ValueError(f"The optimizer has {len(self.optimizer.param_groups)} groups, and the checkpoint {len(rest['options'])}.")
        if (self.schedule is None) != (rest["schedule"] is None):
            raise ValueError("This run or the checkpoint has a schedule, and the other one has none.")
        for name in here | there:
            if here.get(name) != there.get(name):
                raise ValueError(f"{name} is {here.get(name)} in this run and {there.get(name)} in the checkpoint (shape, dtype, group).")

    def put_back(self, tensors, rest):
        self.require_fitting(rest)
        parameters = {name: parameter for parameter, name in self.names.items()}
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(tensors["model", name])  # into this tensor: the optimizer and tied layers hold on to it
        self.optimizer.state.clear()
        for name, key, value in [(*path[1:], tensor) for path, tensor in tensors.items() if path[0] == "optimizer"] + rest["numbers"]:
            self.optimizer.state[parameters[name]][key] = value
        self.data.load_state_dict(rest["data"])
        if self.schedule is not None:
            self.schedule.load_state_dict(rest["schedule"])
        for group, options in zip(self.optimizer.param_groups, rest["options"]):  # a schedule does not put back the rates
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
        self.step, self.means = rest["step"], Means()
        self.means.add({name: torch.tensor(value, dtype=torch.float64) for name, value in rest["sums"].items()}, rest["tokens"])
        set_generator_states(tensors["generator",], rest["python"], rest["numpy"])  # last: what was loaded may have drawn


def generator_states():
    name, keys, *rest = numpy.random.get_state()
    return torch.get_rng_state(), random.getstate(), [name, keys.tolist(), *rest]


def set_generator_states(noise, python, legacy):
    torch.set_rng_state(noise)
    random.setstate((python[0], tuple(python[1]), python[2]))
    numpy.random.set_state(tuple(legacy))


def data_of(tensor):
    """The bytes of a contiguous tensor, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def write(path, tensors, rest):
    described = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    header, checksum = json.dumps({"tensors": described, **rest}).encode(), hashlib.sha256()
    with open(path, "wb") as file:
        file.write(bytes(CHECKSUM))
        for part in chain((len(header).to_bytes(8, "little"), header), (data_of(tensor.contiguous()) for tensor in tensors.values())):
            file.write(part)
            checksum.update(part)
        file.seek(0)
        file.write(checksum.digest())
        file.flush()  # Python's own buffer; fsync forces what the operating system has
        os.fsync(file.fileno())


def read(path):
    with open(path, "rb") as file:
        file.seek(CHECKSUM)
        rest = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors = {tuple(name): torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in rest.pop("tensors")}
        for tensor in tensors.values():
            file.readinto(data_of(tensor))
    return tensors, rest


def is_sound(path):
    with open(path, "rb") as file:
        return file.read(CHECKSUM) == hashlib.file_digest(file, "sha256").digest()


def checkpoints(folder):
    return sorted(folder.glob(f"*{SUFFIX}"))


# The adapters


def make_engine(model, optimizer, schedule, data, objective, settings, callbacks=()):
    check_settings(settings)
    parameters = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        if not parameters.issuperset(group["params"]):
            raise ValueError(f"Group {number} of the optimizer has a parameter that is none of the model's: was the model replaced?")
    return Engine(model, optimizer, schedule, data, objective, settings, callbacks)


def run(engine, steps):
    if type(steps) is not int or steps < 0:
        raise ValueError(f"steps is {steps!r}: it is an int of at least 0, the steps of the whole run.")
    every, asked, is_saved = engine.settings["save_every"], [], False
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while engine.step < steps and not asked:
            engine.train_step()
            if is_saved := every > 0 and engine.step % every == 0:
                save(engine)
        if asked and not is_saved:  # asked here for the last time: a signal may have come anywhere above
            save(engine)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return engine.step


def evaluate(engine, micro_batches):
    means, generators = Means(), generator_states()
    modes = {module: module.training for module in engine.model.modules()}
    try:
        engine.model.eval()
        with torch.no_grad():  # not inference_mode: the model may keep a tensor for its training
            for micro_batch in micro_batches:
                engine.forward_backward(micro_batch, means)
    finally:
        for module, training in modes.items():
            module.training = training
        set_generator_states(*generators)
    if means.tokens == 0:
        raise ValueError("There are no tokens to evaluate.")
    return means.figures()


def save(engine):
    folder, keep = engine.settings["folder"], engine.settings["keep"]
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"*{PARTIAL}"):
        left.unlink()
    path, partial = (folder / f"{engine.step:012}{suffix}" for suffix in (SUFFIX, PARTIAL))
    try:
        write(partial, *engine.state())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)  # the new name is on the disk now, and the old ones can go
    os.close(descriptor)
    sound = [other for other in checkpoints(folder) if other == path or is_sound(other)]
    for other in set(checkpoints(folder)) - set(sound[-keep:]):
        other.unlink()
    engine.tell("on_save", engine.step)


def saved(folder):
    return [int(path.stem) for path in checkpoints(folder) if is_sound(path)]


def resume(engine):
    for path in reversed(checkpoints(engine.settings["folder"])):
        if is_sound(path):
            engine.put_back(*read(path))
            break
    return engine.step


def check_settings(settings):
    least, folder = {"log_every": 1, "save_every": 0, "keep": 1}, settings.get("folder")
    for key in settings.keys() ^ {"folder", *least}:
        raise ValueError(f"settings have an unknown key {key}" if key in settings else f"settings lack {key}")
    for key, smallest in least.items():
        if type(settings[key]) is not int or settings[key] < smallest:
            raise ValueError(f"{key} is {settings[key]!r}: it is an int of at least {smallest}.")
    if not isinstance(folder, Path) or any(path.is_file() for path in (folder, *folder.parents)):
        raise ValueError(f"folder is {folder!r}: it is a Path, and neither it nor one above it is a file.")
