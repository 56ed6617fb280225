"""Stages 3 and 4 of build 02: new models, and models from their folders."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.course.comparing import form

from .pieces import (
    BIASED,
    EXACT,
    GROUPED,
    NAMED,
    PLAIN,
    TEXT,
    THEIRS,
    TIED,
    WIDE,
    Config,
    Results,
    copy_of,
    edited,
    folder_of,
    generator_state,
    said,
    their_state,
    theirs,
    without,
)


def numbers_of(model: Any) -> Results:
    """Numbers that an optimizer would train, and the memory that they take."""
    weights = list(model.parameters())
    memory = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    trained = all(weight.requires_grad and weight.is_leaf for weight in weights)
    bytes_of_each = weights[0].element_size() if weights else 1
    return {"numbers": sum(weight.numel() for weight in weights), "held": sum(memory.values()) // bytes_of_each, "trainable": trained}


def shapes_case(title: str, config: Config) -> Case:
    """Names, shapes and numbers are those of LlamaForCausalLM."""

    def expected(**_: Any) -> Results:
        numbers = theirs(config).num_parameters()
        shapes = {name: form(weight) for name, weight in their_state(config).items()}
        return {"weights": shapes, "parameters": {"numbers": numbers, "held": numbers, "trainable": True}, "config": "as it was"}

    def observe(adapters: Any, **_: Any) -> Results:
        given = json.loads(json.dumps(config))
        model = adapters.create(given, 0)
        shapes = {name: form(weight) for name, weight in adapters.state(model).items()}
        return {"weights": shapes, "parameters": numbers_of(model), "config": "as it was" if given == config else "changed"}

    return Case("oracle", title, lambda: said(config), expected, THEIRS, observe)


BIG = PLAIN | {"vocab_size": 400, "hidden_size": 96, "intermediate_size": 150, "attention_bias": True, "mlp_bias": True}


def drawn_case(title: str, config: Config) -> Case:
    """Each matrix has a mean near 0, the standard deviation asked for, the share of large numbers of a normal distribution; norms and
    biases are exact. Tolerances: five times the deviation of the estimate, of the smallest matrix."""
    wanted = config["initializer_range"]

    def kind(name: str, weight: Tensor) -> str:
        if weight.dim() < 2:
            value = weight.unique().tolist()
            return f"all {value[0]:g}" if len(value) == 1 else "different numbers"
        count = weight.numel()
        deviation, mean = weight.std().item(), weight.mean().item()
        far = (weight.abs() > 2 * wanted).double().mean().item()  # 4.55 % of a normal distribution
        right = abs(deviation / wanted - 1) < 5 / (2 * count) ** 0.5 and abs(mean) < 5 * wanted / count**0.5
        right = right and abs(far - 0.0455) < 5 * (0.0455 * 0.9545 / count) ** 0.5
        return "as asked" if right else f"mean {mean:.4f}, deviation {deviation:.4f}, {100 * far:.2f} % beyond two of {wanted}"

    def expected(**_: Any) -> Results:
        return {name: "as asked" if weight.dim() > 1 else f"all {float('norm' in name):g}" for name, weight in their_state(config).items()}

    def observe(adapters: Any, **_: Any) -> Results:
        return {name: kind(name, weight.detach()) for name, weight in adapters.state(adapters.create(dict(config), 3)).items()}

    return Case("property", title, lambda: said(config), expected, TEXT.format(3), observe)


def seeds_case(title: str, config: Config = GROUPED) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        torch.manual_seed(5)
        first, generator = generator_state(lambda: adapters.state(adapters.create(dict(config), 3)))
        torch.manual_seed(6)
        again, other = (adapters.state(adapters.create(dict(config), seed)) for seed in (3, 4))
        matrices = [name for name, weight in first.items() if weight.dim() > 1]
        flat = torch.cat([first[name].flatten() for name in matrices])
        return {
            "same seed": "same" if all(torch.equal(first[name], again[name]) for name in first) else "different",
            "another seed": "different" if not any(torch.equal(first[name], other[name]) for name in matrices) else "same in some weights",
            "numbers that are there twice": "few" if flat.unique().numel() > 0.98 * flat.numel() else flat.numel() - flat.unique().numel(),
            "global generator": generator,
            "a graph": any(weight.requires_grad for weight in first.values()),
        }

    expected = {"same seed": "same", "another seed": "different", "numbers that are there twice": "few"}
    wanted = expected | {"global generator": "as it was", "a graph": False}
    return Case("property", title, lambda: {"seeds": [3, 3, 4]} | said(config), lambda **_: wanted, TEXT.format(3), observe)


CREATE = (
    *(shapes_case(title, config) for title, config in NAMED.items()),
    shapes_case("an older configuration", without(PLAIN, "rope_parameters", "num_key_value_heads", "head_dim") | {"rope_theta": 50.0}),
    drawn_case("initial values", BIG),
    drawn_case("initial values of another deviation", BIG | {"initializer_range": 0.3}),
    seeds_case("seeds"),
    seeds_case("seeds of a tied model", TIED),
)

# Stage 4: load


def load_case(title: str, config: Config, folder: Callable[[], Path] | None = None, dtype: torch.dtype = torch.float32) -> Case:
    where = folder or (lambda: folder_of(config, dtype=dtype))

    def expected(**_: Any) -> Results:
        numbers = theirs(config).num_parameters()
        weights = {name: weight.to(dtype) for name, weight in their_state(config).items()}
        return {"parameters": {"numbers": numbers, "held": numbers, "trainable": True}, "weights": weights, "global generator": "as it was"}

    def observe(adapters: Any, **_: Any) -> Results:
        folder = where()  # it is made when it is first asked for, which draws numbers
        model, generator = generator_state(lambda: adapters.load(folder))
        weights = {name: weight.detach().clone() for name, weight in adapters.state(model).items()}
        return {"parameters": numbers_of(model), "weights": weights, "global generator": generator}

    return Case("oracle", title, lambda: said(config) | {"dtype": str(dtype)}, expected, THEIRS, observe, **EXACT)


@functools.cache
def older() -> Path:
    more = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(3) for layer in range(2)}
    return edited(folder_of(PLAIN), lambda found: found.update(more))


@functools.cache
def tied_twice() -> Path:
    """Older files of tied models have the head as well; here it even differs, and does not count."""
    return edited(folder_of(TIED), lambda found: found.update({"lm_head.weight": torch.ones(37, 24)}))


@functools.cache
def old_keys() -> Path:
    return copy_of(folder_of(GROUPED), rope_parameters=None, rope_theta=10000.0, rope_scaling=None)


LOAD = (
    load_case("one layer", NAMED["one layer, one head"]),
    load_case("six heads share two", GROUPED),
    load_case("heads of another size", WIDE),
    load_case("biases", BIASED),
    load_case("tied", TIED),
    load_case("many files", GROUPED, lambda: folder_of(GROUPED, shards="5KB")),
    load_case("bfloat16", PLAIN, dtype=torch.bfloat16),
    load_case("float16", TIED, dtype=torch.float16),
    load_case("an older configuration", GROUPED, old_keys),
    load_case("frequencies among the weights, as older files have them", PLAIN, older),
    load_case("a tied model whose files have a head", TIED, tied_twice),
)
