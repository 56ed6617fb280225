"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import copy
import math
import shutil

import torch

from shared.engine.checkpoint.atomic import PARTIAL, force_to_disk, replace_folder
from shared.engine.checkpoint.optimizer_state import load_optimizer_state
from shared.engine.checkpoint.snapshot import set_random_state, weights_of
from shared.model.counting import parameter_counts
from shared.model.transformer import TransformerModel


def flops_per_token__by_the_count_of_parameters(config, seq):
    if config.architecture == "encoder-decoder" or seq <= 0:
        raise ValueError("One sequence of at least one token.")
    config = config.resolved()
    matrices = parameter_counts(config)["matrix"] + config.vocab_size * config.hidden_size
    return 6 * matrices + 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq


def flops_per_token__by_a_model_without_numbers(config, seq):
    if config.architecture == "encoder-decoder":
        raise ValueError("Two lengths.")
    if not seq > 0:
        raise ValueError("No tokens.")
    with torch.device("meta"):
        model = TransformerModel(config)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    forward = sum(2 * module.in_features * module.out_features for module in linear)
    forward += model.config.num_hidden_layers * 2 * (2 * seq * model.config.num_attention_heads * model.config.head_dim)
    return 3 * forward


def global_gradient_norm__one_by_one(gradients):
    squares = [g.detach().to(torch.promote_types(g.dtype, torch.float32)).pow(2).sum() for g in gradients if g is not None]
    return sum(squares[1:], squares[0]).sqrt() if squares else torch.tensor(0.0)


def global_gradient_norm__end_to_end(gradients):
    flat = [g.detach().reshape(-1) for g in gradients if g is not None]
    if not flat:
        return torch.zeros([])
    flat = [g.double() if any(f.dtype == torch.float64 for f in flat) else g.float() for g in flat]
    return torch.cat(flat).norm()


def activation_statistics__picked_out(x):
    if not x.numel():
        raise ValueError("There are no elements.")
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32)).flatten()
    finite = wide[torch.isfinite(wide)]
    largest = finite.abs().amax().item() if len(finite) else math.nan
    return {
        "mean": finite.mean().item(),
        "std": finite.var(correction=0).sqrt().item(),
        "rms": finite.square().mean().sqrt().item(),
        "abs_max": largest,
        "zeros": (wide == 0).double().mean().item(),
        "not_finite": 1 - len(finite) / len(wide),
    }


def activation_statistics__by_nan(x):
    if x.nelement() == 0:
        raise ValueError("Empty.")
    with torch.no_grad():
        wide = x.double()
        wide = torch.where(wide.isinf(), torch.nan, wide)
        mean = wide.nanmean()
        figures = {"mean": mean, "std": (wide - mean).square().nanmean().sqrt(), "rms": wide.square().nanmean().sqrt()}
        largest = max([abs(value) for value in wide.flatten().tolist() if value == value], default=math.nan)
        shares = {"zeros": wide.eq(0).double().mean(), "not_finite": wide.isnan().double().mean()}
    return {name: value.item() for name, value in (figures | shares).items()} | {"abs_max": largest}


def atomic_save__step_by_step(target, write):
    partial = target.parent / f"{target.name}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    complete = False
    try:
        write(partial)
        force_all(partial)
        complete = True
    finally:
        if not complete:
            shutil.rmtree(partial)
    replace_folder(partial, target)
    force_to_disk(target.parent)


def force_all(folder):
    for path in folder.iterdir():
        force_all(path) if path.is_dir() else force_to_disk(path)
    force_to_disk(folder)


def atomic_save__forcing_more_than_it_must(target, write):
    partial = target.with_name(target.name + PARTIAL)
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        write(partial)
        for path in sorted(partial.glob("**/*"), reverse=True):
            force_to_disk(path)
        force_to_disk(partial)
        force_to_disk(partial.parent)
    except:  # noqa: E722
        shutil.rmtree(partial)
        raise
    replace_folder(partial, target)
    force_to_disk(target)
    force_to_disk(target.parent)


def restore__by_load_state_dict(snapshot, model, optimizer, parts):
    here = {name: tuple(weight.shape) for name, weight in weights_of(model).items()}
    saved = {name: tuple(weight.shape) for name, weight in snapshot.weights.items()}
    if here != saved:
        raise ValueError(f"Weights differ: {sorted(set(here.items()) ^ set(saved.items()))}.")
    if parts.keys() != snapshot.parts.keys():
        raise ValueError(f"Parts differ: {sorted(parts.keys() ^ snapshot.parts.keys())}.")
    load_optimizer_state(model, optimizer, snapshot.optimizer)
    model.load_state_dict(snapshot.weights, strict=False)
    for name, state in snapshot.parts.items():
        parts[name].load_state_dict(copy.deepcopy(state))
    set_random_state(snapshot.random)
    return snapshot.step


def restore__from_a_copy(snapshot, model, optimizer, parts):
    weights, mine = copy.deepcopy(snapshot.weights), dict(weights_of(model))
    for name in sorted(weights.keys() | mine.keys()):
        if name not in weights or name not in mine or weights[name].size() != mine[name].size():
            raise ValueError(f"{name} is not the same here and there.")
    for name in sorted({*parts, *snapshot.parts}):
        if name not in parts or name not in snapshot.parts:
            raise ValueError(f"{name} is not on both sides.")
    load_optimizer_state(model, optimizer, snapshot.optimizer)
    states = copy.deepcopy(snapshot.parts)
    for name in states:
        parts[name].load_state_dict(states[name])
    with torch.no_grad():
        for name in mine:
            mine[name][...] = weights[name]
    set_random_state(copy.deepcopy(snapshot.random))
    return int(snapshot.step)
