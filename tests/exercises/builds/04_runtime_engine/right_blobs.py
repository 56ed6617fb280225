"""Another right build: tensors in a file that is named by its checksum, and for each step a record of JSON that names it."""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import signal
import tempfile

import numpy
import torch


class Sums:
    def __init__(self, tokens=0, values=None):
        self.tokens, self.values = tokens, dict(values or {})

    def __iadd__(self, other):
        self.tokens += other.tokens
        for name, value in other.values.items():
            self.values[name] = self.values[name] + value if name in self.values else value
        return self

    def plain(self):
        return {name: float(value) for name, value in self.values.items()}

    def figures(self):
        if not self.tokens:
            raise ValueError("no tokens")
        return {"tokens": self.tokens} | {name: value / self.tokens for name, value in self.plain().items()}


class Streams:
    """The three generators as something that JSON holds."""

    @staticmethod
    def state():
        kind, keys, place, has, cached = numpy.random.get_state()
        return [torch.random.get_rng_state().tolist(), random.getstate(), [kind, keys.tolist(), place, has, cached]]

    @staticmethod
    def load(state):
        noise, (version, words, gauss), legacy = state
        torch.random.set_rng_state(torch.tensor(noise, dtype=torch.uint8))
        random.setstate((version, tuple(words), gauss))
        numpy.random.set_state(legacy)


class Store:
    """A folder of blobs and records. A record without its blob, or with another checksum, does not exist."""

    def __init__(self, folder):
        self.folder = folder

    def paths(self, pattern):
        return sorted(self.folder.glob(pattern)) if self.folder.is_dir() else []

    def put(self, chunks, name):
        """A file that appears under its name whole, or not at all. name: of its checksum."""
        checksum = hashlib.blake2b()
        descriptor, partial = tempfile.mkstemp(suffix=".tmp", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for chunk in chunks:
                    view = memoryview(chunk)
                    checksum.update(view)
                    while len(view):
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
            target = self.folder / name(checksum.hexdigest())
            os.replace(partial, target)
        except BaseException:
            os.unlink(partial)
            raise
        self.force()
        return target

    def force(self):
        descriptor = os.open(self.folder, os.O_DIRECTORY)
        os.fsync(descriptor)
        os.close(descriptor)

    def record(self, path):
        """A record that is sound, with its blob; else None."""
        try:
            line, checksum = path.read_bytes().split(b"\n")
            if hashlib.blake2b(line).hexdigest().encode() != checksum:
                return None
            found = json.loads(line)
            blob = hashlib.blake2b()
            with open(self.folder / found["blob"], "rb") as file:
                while chunk := file.read(1 << 18):
                    blob.update(chunk)
            return found if found["blob"] == f"{blob.hexdigest()}.blob" else None
        except (OSError, ValueError):
            return None

    def sound(self):
        found = {path: self.record(path) for path in self.paths("*.json")}
        return {path: record for path, record in found.items() if record is not None}

    def write(self, record, tensors, keep):
        self.folder.mkdir(exist_ok=True, parents=True)
        for left in self.paths("*.tmp"):
            left.unlink()
        self.prune(None)
        blob = self.put((bytes_of(tensor) for tensor in tensors), lambda checksum: f"{checksum}.blob")
        text = json.dumps(record | {"blob": blob.name}).encode()
        self.put([text + b"\n" + hashlib.blake2b(text).hexdigest().encode()], lambda _: f"{record['step']:09}.json")
        self.prune(keep)

    def prune(self, keep):
        """Leave the newest records, and the blobs that records name."""
        sound = self.sound()
        stay = list(sound)[-keep:] if keep else list(sound)
        for path in self.paths("*.json"):
            if path not in stay:
                path.unlink()
        for path in self.paths("*.blob"):
            if path.name not in {sound[record]["blob"] for record in stay}:
                path.unlink()


def bytes_of(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()


class Trainer:
    def __init__(self, model, optimizer, schedule, data, objective, settings, callbacks):
        check_settings(settings)
        self.model, self.optimizer, self.schedule, self.data, self.objective = model, optimizer, schedule, data, objective
        self.settings, self.callbacks, self.store = settings, callbacks, Store(settings["folder"])
        self.done, self.window = 0, Sums()
        self.parameters = dict(model.named_parameters())
        self.name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        for number, group in enumerate(optimizer.param_groups):
            if not all(id(parameter) in self.name_of for parameter in group["params"]):
                raise ValueError(f"optimizer group {number}: a parameter that the model does not have")

    def emit(self, name, *values):
        for callback in self.callbacks:
            getattr(callback, name, lambda *_: None)(*values)

    def measured(self, batch, training):
        loss, tokens, sums = self.objective(self.model, batch)
        if training:
            loss.backward()
        wide = {name: value.detach().to(torch.float64).clone() for name, value in sums.items()}
        return Sums(tokens, {"loss": loss.detach().to(torch.float64)} | wide)

    def step(self):
        self.model.zero_grad()
        total = Sums()
        for batch in next(self.data):
            total += self.measured(batch, True)
        if total.tokens == 0:
            raise ValueError(f"no tokens in step {self.done + 1}")
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        torch._foreach_div_(gradients, float(total.tokens))
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.schedule is None or self.schedule.step()
        self.done += 1
        self.window += total
        self.emit("on_step", self.done)
        if self.done % self.settings["log_every"] == 0:
            figures = self.window.figures()
            self.window = Sums()
            self.emit("on_log", self.done, {**figures, "learning_rate": rate})

    def fit(self, steps):
        if type(steps) is not int or steps < 0:
            raise ValueError(f"steps: {steps}")
        stop, last_saved = set(), None
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, lambda number, _: stop.add(number)))
            while self.done < steps:
                self.step()
                every = self.settings["save_every"]
                if stop or (every and self.done % every == 0):
                    self.save()
                    last_saved = self.done
                if stop:
                    break
            if stop and last_saved != self.done:
                self.save()
        return self.done

    def measure(self, batches):
        modules = [(module, module.training) for module in self.model.modules()]
        total = Sums()
        with torch.no_grad(), contextlib.ExitStack() as stack:
            stack.callback(Streams.load, Streams.state())
            for module, mode in modules:
                stack.callback(setattr, module, "training", mode)
            self.model.eval()
            for batch in batches:
                total += self.measured(batch, False)
        return total.figures()

    def described(self):
        groups = [[sorted(self.name_of[id(p)] for p in group["params"]), {k: v for k, v in group.items() if k != "params"}]
                  for group in self.optimizer.param_groups]  # fmt: skip
        shapes = {
            name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in (self.parameters | dict(self.model.named_buffers())).items()
        }
        return {"groups": groups, "shapes": shapes, "has_schedule": self.schedule is not None}

    def save(self):
        moments, tensors = [], list((self.parameters | dict(self.model.named_buffers())).values())
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                is_tensor = torch.is_tensor(value)
                tensors += [value] if is_tensor else []
                form = [list(value.shape), str(value.dtype)] if is_tensor else value
                moments.append([self.name_of[id(parameter)], key, is_tensor, form])
        record = self.described() | {"step": self.done, "moments": moments, "data": self.data.state_dict(), "streams": Streams.state()}
        record |= {"schedule": self.schedule and self.schedule.state_dict(), "window": [self.window.tokens, self.window.plain()]}
        self.store.write(record, tensors, self.settings["keep"])
        self.emit("on_save", self.done)

    def compare(self, record):
        here = self.described()
        for name in {**here["shapes"], **record["shapes"]}:
            if here["shapes"].get(name) != record["shapes"].get(name):
                raise ValueError(f"{name} does not fit")
        if here["has_schedule"] != record["has_schedule"]:
            raise ValueError("there is a schedule on one side only")
        if len(here["groups"]) != len(record["groups"]):
            raise ValueError("the numbers of groups differ")
        for (mine, _), (theirs, _) in zip(here["groups"], record["groups"], strict=True):
            if mine != theirs:
                raise ValueError(f"a group differs in {set(mine) ^ set(theirs)}")

    def resume(self):
        sound = self.store.sound()
        if not sound:
            return 0
        record = list(sound.values())[-1]
        self.compare(record)
        with open(self.settings["folder"] / record["blob"], "rb") as file, torch.no_grad():

            def next_tensor(shape, dtype):
                tensor = torch.zeros(shape, dtype=getattr(torch, dtype.split(".")[1]))
                file.readinto(bytes_of(tensor))
                return tensor

            for name, (shape, dtype) in record["shapes"].items():
                (self.parameters | dict(self.model.named_buffers()))[name].copy_(next_tensor(shape, dtype))
            self.optimizer.state.clear()
            for name, key, is_tensor, form in record["moments"]:
                self.optimizer.state[self.parameters[name]][key] = next_tensor(*form) if is_tensor else form
        if self.schedule is not None:
            self.schedule.load_state_dict(record["schedule"])
        for group, (_, options) in zip(self.optimizer.param_groups, record["groups"], strict=True):
            group |= options
        self.data.load_state_dict(record["data"])
        self.done, self.window = record["step"], Sums(*record["window"])
        Streams.load(record["streams"])
        return self.done


def make_engine(model, optimizer, schedule, data, objective, settings, callbacks=()):
    return Trainer(model, optimizer, schedule, data, objective, settings, callbacks)


def run(engine, steps):
    return engine.fit(steps)


def evaluate(engine, micro_batches):
    return engine.measure(micro_batches)


def save(engine):
    engine.save()


def saved(folder):
    return [record["step"] for record in Store(folder).sound().values()]


def resume(engine):
    return engine.resume()


def check_settings(settings):
    for key in {"folder", "log_every", "save_every", "keep"}.symmetric_difference(settings):
        raise ValueError(f"{key}: missing or unknown")
    for key, least in (("log_every", 1), ("save_every", 0), ("keep", 1)):
        if type(settings[key]) is not int or settings[key] < least:
            raise ValueError(f"{key} = {settings[key]}")
    if not isinstance(settings["folder"], pathlib.Path):
        raise ValueError(f"folder = {settings['folder']}: no Path")
    for path in [settings["folder"], *settings["folder"].parents]:
        if path.is_file():
            raise ValueError(f"folder = {settings['folder']}: {path} is a file")
