"""Another right build: functions over one namespace; a checkpoint is a folder of safetensors and JSON with a manifest of checksums."""

import hashlib
import json
import os
import random
import shutil
import signal
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FILES = ("model.safetensors", "optimizer.safetensors", "run.json")


# The disk


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def self_signed(found):
    """A manifest that has its own checksum."""
    return found | {"own": hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()}


def manifest_of(folder):
    try:
        found = json.loads((folder / "manifest.json").read_text(encoding="ascii"))
        own = found.pop("own")
        if self_signed(found)["own"] != own or any(digest(folder / name) != found["files"][name] for name in FILES):
            return None
        return found
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def sound_folders(folder):
    """(step, attempt, path), from old to new."""
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else []:
        manifest = None if path.name.endswith("-partial") else manifest_of(path)
        if manifest:
            found.append((manifest["step"], manifest["attempt"], path))
    return sorted(found)


# The run


def set_optimizer(run, tensors, groups):
    run.optimizer.state.clear()
    by_name = {name: parameter for parameter, name in run.names.items()}
    states = defaultdict(dict)
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        states[name][entry] = tensor
    for name, state in states.items():
        run.optimizer.state[by_name[name]] = state
    for group, saved in zip(run.optimizer.param_groups, groups, strict=True):
        for key, value in saved["options"].items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def tensors_by_name(model):
    """Of tied tensors the first name alone, which is what safetensors wants."""
    found, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            found[name] = tensor.detach()
            seen.add(id(tensor))
    return found


def groups_of(run):
    return [
        {"names": sorted(run.names[each] for each in group["params"]), "options": {k: v for k, v in group.items() if k != "params"}}
        for group in run.optimizer.param_groups
    ]


def generators():
    return {"python": random.getstate(), "numpy": [x.tolist() if isinstance(x, np.ndarray) else x for x in np.random.get_state()],
            "torch": torch.get_rng_state().numpy().tobytes().hex()}  # fmt: skip


def set_generators(state):
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    random.setstate((state["python"][0], tuple(state["python"][1]), state["python"][2]))
    np.random.set_state(tuple(state["numpy"]))


def require(condition, sentence):
    if not condition:
        raise ValueError(sentence)


def call(run, name, *values):
    for callback in run.callbacks:
        method = getattr(callback, name, None)
        if method is not None:
            method(*values)


def gathered(run, batches, backward):
    """Totals of micro-batches; a sum stays a tensor."""
    count, sums = 0, {}

    def one(batch):
        loss, tokens, own = run.objective(run.model, batch)
        if backward:
            loss.backward()
        return tokens, {"loss": loss.detach(), **{name: value.detach() for name, value in own.items()}}

    for batch in batches:
        tokens, own = one(batch)
        count += tokens
        for name, value in own.items():
            sums[name] = value.to(torch.float64) + sums.get(name, 0.0)
    return count, sums


def means(count, sums):
    return {name: float(value) / count for name, value in sums.items()} | {"tokens": count}


def one_step(run):
    for parameter in run.model.parameters():
        parameter.grad = None
    batches = next(run.data)
    count, sums = gathered(run, batches, backward=True)
    require(count > 0, f"step {run.step + 1} has no tokens")
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / count)
    rate = run.optimizer.param_groups[0]["lr"]
    run.optimizer.step()
    if run.schedule:
        run.schedule.step()
    run.step += 1
    run.count += count
    for name, value in sums.items():
        run.sums[name] = run.sums.get(name, 0.0) + value
    call(run, "on_step", run.step)
    if not run.step % run.settings["log_every"]:
        figures = means(run.count, run.sums) | {"learning_rate": float(rate)}
        run.count, run.sums = 0, {}
        call(run, "on_log", run.step, figures)


# The adapters


def make_engine(model, optimizer, schedule, data, objective, settings, callbacks=()):
    check_settings(settings)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        require(all(each in names for each in group["params"]), f"group {number} has a parameter of another model")
    return SimpleNamespace(model=model, optimizer=optimizer, schedule=schedule, data=data, objective=objective, settings=settings,
                           callbacks=callbacks, names=names, step=0, count=0, sums={})  # fmt: skip


def run(engine, steps):
    require(isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0, f"{steps} steps")
    received = SimpleNamespace(any=False)
    saved_at, old = None, {}

    def handler(number, frame):
        received.any = True

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.getsignal(number)
            signal.signal(number, handler)
        while engine.step < steps:
            one_step(engine)
            if engine.settings["save_every"] and engine.step % engine.settings["save_every"] == 0:
                saved_at = engine.step
                save(engine)
            if received.any:
                break
        if received.any and saved_at != engine.step:
            save(engine)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return engine.step


def evaluate(engine, micro_batches):
    state, training = generators(), [each.training for each in engine.model.modules()]
    engine.model.train(False)
    try:
        with torch.no_grad():
            count, sums = gathered(engine, micro_batches, backward=False)
    finally:
        for module, mode in zip(engine.model.modules(), training, strict=True):
            module.training = mode
        set_generators(state)
    require(count > 0, "no tokens")
    return means(count, sums)


def save(engine):
    folder = engine.settings["folder"]
    os.makedirs(folder, exist_ok=True)
    before = sound_folders(folder)
    sound = {path for _, _, path in before}
    for path in folder.iterdir():
        if path not in sound:
            shutil.rmtree(path)
    attempt = 1 + max((number for step, number, _ in before if step == engine.step), default=0)
    partial = folder / f"step-{engine.step}-{attempt}-partial"
    os.mkdir(partial)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors_by_name(engine.model).items()}, partial / FILES[0])
        states = engine.optimizer.state.items()
        optimizer = {f"{engine.names[p]}/{key}": value.contiguous() for p, own in states for key, value in own.items() if value is not None}
        save_file(optimizer, partial / FILES[1])
        rest = {"groups": groups_of(engine), "data": engine.data.state_dict(), "count": engine.count, "generators": generators()}
        rest |= {
            "schedule": engine.schedule.state_dict() if engine.schedule else None,
            "sums": {k: float(v) for k, v in engine.sums.items()},
        }
        (partial / FILES[2]).write_text(json.dumps(rest))
        checksums = {name: digest(partial / name) for name in FILES}
        manifest = self_signed({"step": engine.step, "attempt": attempt, "files": checksums})
        (partial / "manifest.json").write_text(json.dumps(manifest), encoding="ascii")
        for path in (*partial.iterdir(), partial):
            sync(path)
        os.rename(partial, folder / f"step-{engine.step}-{attempt}")
    except BaseException:
        shutil.rmtree(partial)
        raise
    sync(folder)
    newest = {step: path for step, _, path in sound_folders(folder)}  # of each step the last attempt
    stay = {newest[step] for step in sorted(newest)[-engine.settings["keep"] :]}
    for path in folder.iterdir():
        if path not in stay:
            shutil.rmtree(path)
    call(engine, "on_save", engine.step)


def saved(folder):
    return sorted({step for step, _, _ in sound_folders(folder)})


def resume(engine):
    found = sound_folders(engine.settings["folder"])
    if not found:
        return 0
    step, _, path = found[-1]
    model, optimizer = load_file(path / FILES[0]), load_file(path / FILES[1])
    rest, here = json.loads((path / FILES[2]).read_text()), tensors_by_name(engine.model)
    for name in sorted(model.keys() | here.keys()):
        require(name in model and name in here, f"{name} is missing in the checkpoint or here")
        require((model[name].shape, model[name].dtype) == (here[name].shape, here[name].dtype), f"{name} has another shape or dtype")
    require(bool(engine.schedule) == bool(rest["schedule"]), "a schedule is here or there, not both")
    groups = groups_of(engine)
    require(len(groups) == len(rest["groups"]), "another number of groups")
    for own, other in zip(groups, rest["groups"], strict=True):
        require(own["names"] == other["names"], f"other parameters in a group: {set(own['names']) ^ set(other['names'])}")
    engine.model.load_state_dict(model, strict=False)
    set_optimizer(engine, optimizer, rest["groups"])
    engine.data.load_state_dict(rest["data"])
    if engine.schedule:
        engine.schedule.load_state_dict(rest["schedule"])
        set_optimizer(engine, optimizer, rest["groups"])
    engine.step, engine.count, engine.sums = step, rest["count"], rest["sums"]
    set_generators(rest["generators"])
    return step


def check_settings(settings):
    require(
        set(settings) == {"folder", "log_every", "save_every", "keep"},
        f"missing or unknown: {set(settings) ^ {'folder', 'log_every', 'save_every', 'keep'}}",
    )
    for key, least in {"log_every": 1, "save_every": 0, "keep": 1}.items():
        value = settings[key]
        require(not isinstance(value, bool) and isinstance(value, int) and value >= least, f"{key}: {value}")
    folder = settings["folder"]
    require(isinstance(folder, Path), f"folder: {folder}")
    above = folder
    while not above.exists():
        above = above.parent
    require(above.is_dir(), f"folder: {folder} is, or lies in, a file")
