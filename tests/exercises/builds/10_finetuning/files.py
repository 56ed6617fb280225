"""Stages 7 and 8 of build 10: peft's two files. What peft 0.21 writes is stored here; tests/parity/test_10_build.py asks peft itself."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.course.checking import Case

from .merging import LAYERS, both
from .pieces import (
    DENSE,
    EXACT,
    NEAR,
    TEXT,
    Config,
    Dense,
    Net,
    Results,
    Twice,
    answer,
    as_it_was,
    config_of,
    made,
    put,
    randn,
    sequence,
    state_of,
    trained_leaves,
    values_of,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What peft 0.21.2 writes beside the five keys of a config, and what it takes where a file lacks one of the five.
PEFT = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": {"base_model_class": "Net", "parent_library": "models"}, "base_model_name_or_path": None, "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2",
    "qalora_group_size": 16, "rank_pattern": {}, "revision": None, "target_parameters": None, "task_type": None,
    "trainable_token_indices": None, "use_bdlora": None, "use_dora": False, "use_qalora": False, "velora_config": None,
}  # fmt: skip
SAYS = "files as peft 0.21 writes them"
DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False}
MEANINGLESS = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type", "megatron_core"}
LISTED = ["embed", "layers.0.q_proj", "layers.1.q_proj"]


def key_of(name: str) -> str:
    return f"base_model.model.{name}.weight"


@contextmanager
def own_folder() -> Iterator[Path]:
    """An empty folder of this process, always the same one: errors that name it can be compared."""
    folder = Path(tempfile.gettempdir()) / f"course_build_10_{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Stage 7: save


def written(folder: Path) -> Results:
    """What a reader finds in a folder: the five keys, by peft's defaults where they lack, and what else changes what is computed."""
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        return {"missing files": missing}
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    found: Results = {name: config.get(name, default) for name, default in (DEFAULTS | {"peft_type": None, "target_modules": None}).items()}
    if isinstance(found["target_modules"], list):
        found["target_modules"] = sorted(found["target_modules"])
    found |= {name: float(found[name]) for name in ("lora_alpha", "lora_dropout")}
    with safe_open(folder / WEIGHTS, "pt") as file:
        found |= {name: file.get_tensor(name) for name in file.keys()}
    strange = [name for name in config if name not in PEFT | DEFAULTS | {"target_modules": None}]
    other = [name for name in PEFT if name not in MEANINGLESS and config.get(name, PEFT[name]) != PEFT[name]]
    return found | {"keys that peft does not know": strange, "options with another value than was trained": other}


def wanted(config: Config, values: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Results:
    targets = config["target_modules"] if isinstance(config["target_modules"], str) else sorted(config["target_modules"])
    found: Results = config | {"target_modules": targets, "peft_type": "LORA"}
    found |= {name: float(config[name]) for name in ("lora_alpha", "lora_dropout")}
    found |= {key_of(name): value.to(dtype) for name, value in values.items()}
    return found | {"keys that peft does not know": [], "options with another value than was trained": []}


def save_case(title: str, kind: Callable[[], nn.Module], config: Config, layers: list[str], dtype: torch.dtype = torch.float64) -> Case:
    values = {name: value.float().to(dtype) for name, value in values_of(made(kind), layers, config).items()}

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(kind, torch.float64 if dtype == torch.float64 else torch.bfloat16), "default", dict(config), 0)
        put(adapters, adapted, "default", values)
        with own_folder() as folder:
            adapters.save(adapted, "default", folder / "not" / "there")
            return written(folder / "not" / "there")

    given = {"model": kind.__name__, "dtype of the factors": str(dtype), **config}
    return Case("property", title, lambda: given, lambda **_: wanted(config, values, dtype), SAYS, observe, **EXACT)


def both_case(title: str, name: str, merged: bool) -> Case:
    """`first` is in use."""
    from .merging import CONFIGS

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(Net), "first", dict(CONFIGS["first"]), 0) if merged else None
        if merged:
            put(adapters, adapted, "first", values_of(made(Net), LAYERS["first"], CONFIGS["first"]))
            adapters.merge(adapted)
        else:
            adapted, _ = both(adapters)
        with own_folder() as folder:
            adapters.save(adapted, name, folder)
            return written(folder)

    expected = lambda **_: wanted(  # noqa: E731
        CONFIGS[name], values_of(made(Net), LAYERS[name], CONFIGS[name], seed=5 if merged else 30 * list(LAYERS).index(name))
    )
    given = {"adapter that is saved": name, "merged": merged}
    return Case("property", title, lambda: given, expected, SAYS, observe, **EXACT)


SAVE = (
    save_case("two files", sequence, config_of(["2"]), ["2"]),
    save_case("dropout and another scaling", Net, config_of(["embed", "q_proj"], r=3, alpha=5, dropout=0.25, rslora=True), LISTED),
    save_case("an expression stays an expression", Net, config_of(r"layers\.\d\.q_proj"), LISTED[1:]),
    save_case("a block at two places", Twice, config_of(["q_proj"]), ["first.q_proj"]),
    save_case("factors in float32", sequence, config_of(["0", "2"], alpha=2.5), ["0", "2"], torch.float32),
    both_case("one of two adapters, in use", "first", merged=False),
    both_case("one of two adapters, which waits", "second", merged=False),
    both_case("a merged adapter", "first", merged=True),
)

# Stage 8: load


def write(folder: Path, config: Config, values: dict[str, Tensor], **changes: Any) -> None:
    """Files of peft. changes: to the config; None leaves a key of the five out."""
    text = {name: value for name, value in (PEFT | config | changes).items() if not (name in DEFAULTS and value is None)}
    (folder / CONFIG).write_text(json.dumps(dict(sorted(text.items())), indent=2), encoding="utf-8")
    save_file({key_of(name): value.contiguous() for name, value in values.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def load_case(
    title: str, kind: Callable[[], nn.Module], config: Config, layers: list[str], dtype: torch.dtype = torch.float32, **changes: Any
) -> Case:
    """Outputs, factors and gradients of what was loaded. changes: to the file's config."""
    values = {name: value.to(dtype) for name, value in values_of(made(kind), layers, config).items()}
    x = randn(3, 5).requires_grad_()

    def expected(**_: Any) -> Results:
        oracle = Dense(made(kind), config, {name: value.double() for name, value in values.items()})
        y = oracle.run(x)
        reached = {"a backward pass reaches": sorted(["x", *oracle.factors])}
        return answer(y, {"x": x}, oracle.factors) | reached | {name: factor.detach() for name, factor in oracle.factors.items()}

    def observe(adapters: Any, **_: Any) -> Results:
        with own_folder() as folder:
            write(folder, config, values, **changes)
            adapted = adapters.load(made(kind), "loaded", folder)
        held = dict(adapters.factors(adapted, "loaded"))
        y = adapters.run(adapted, x)
        reached = {"a backward pass reaches": trained_leaves(y, held | {"x": x})}
        return answer(y, {"x": x}, held) | reached | {name: factor.detach().clone() for name, factor in held.items()}

    given = {"model": kind.__name__, "dtype of the file": str(dtype), **config}
    given |= {f"in the file: {name}": str(value) for name, value in changes.items()}
    return Case("oracle", title, lambda: given, expected, DENSE, observe, **NEAR)


def refused_case(title: str, said: str, spoil: Callable[[Path, Config, dict[str, Tensor]], None]) -> Case:
    """A ValueError that has `said`, and the model as it was. spoil: writes the files."""
    wanted = {"result": f"ValueError that says {said}", "the model": "as it was"}

    def observe(adapters: Any, **_: Any) -> Results:
        model, config = made(Net), config_of(["embed", "q_proj"], r=3)
        before, result = state_of(model), "accepted"
        with own_folder() as folder:
            spoil(folder, config, values_of(made(Net), LISTED, config))
            try:
                adapters.load(model, "loaded", folder)
            except ValueError as error:
                result = wanted["result"] if said in str(error) else f"ValueError, which does not say {said}: {error}"
        return {"result": result, "the model": as_it_was(model, before)}

    return Case("property", title, lambda: {"model": "Net"}, lambda **_: wanted, TEXT.format(8), observe)


def with_option(name: str, value: Any) -> Case:
    return refused_case(f"{name} is set", name, lambda folder, config, values: write(folder, config, values, **{name: value}))


def with_tensors(title: str, name: str, change: Callable[[dict[str, Tensor]], Any]) -> Case:
    """change(values): what else the file has; it may also take something out."""

    def spoil(folder: Path, config: Config, values: dict[str, Tensor]) -> None:
        write(folder, config, (change(values) or {}) | values)

    return refused_case(title, name, spoil)


def without(name: str) -> Case:
    def spoil(folder: Path, config: Config, values: dict[str, Tensor]) -> None:
        write(folder, config, values)
        if name == WEIGHTS:
            torch.save({key_of(key): value for key, value in values.items()}, folder / "adapter_model.bin")
        (folder / name).unlink()

    return refused_case(f"no {name}", name, spoil)


def another_model(folder: Path, config: Config, values: dict[str, Tensor]) -> None:
    write(folder, config_of(["v_proj"]), {"h.0.v_proj.lora_A": randn(2, 6), "h.0.v_proj.lora_B": randn(6, 2)})


LOAD = (
    load_case("one layer", sequence, config_of(["2"]), ["2"]),
    load_case("several layers, rank-stabilized", Net, config_of(["q_proj", "embed"], r=3, alpha=5, dropout=0.25, rslora=True), LISTED),
    load_case("an expression", Net, config_of(r"layers\.\d\.q_proj"), LISTED[1:]),
    load_case("a block at two places", Twice, config_of(["q_proj"]), ["first.q_proj"]),
    load_case("bfloat16 in the file", sequence, config_of(["0", "2"]), ["0", "2"], torch.bfloat16),
    load_case("peft's own defaults", sequence, config_of(["2"], r=8, alpha=8), ["2"], r=None, lora_alpha=None, lora_dropout=None,
              use_rslora=None),
    load_case("options that are not set", sequence, config_of(["2"]), ["2"], rank_pattern={}, alpha_pattern=None, modules_to_save=[],
              layers_to_transform=None, use_dora=False, task_type="CAUSAL_LM"),
    refused_case("for another model", "v_proj", another_model),
    with_tensors("a layer that this model lacks", "h.0.v_proj", lambda values: {"h.0.v_proj.lora_A": randn(3, 6)}),
    with_tensors("a layer that is not meant", "head", lambda values: {"head.lora_A": randn(3, 6), "head.lora_B": randn(4, 3)}),
    with_tensors("a factor is missing", "layers.1.q_proj.lora_B", lambda values: values.pop("layers.1.q_proj.lora_B").dim() and None),
    with_tensors("another width", "embed.lora_A", lambda values: values.update({"embed.lora_A": randn(3, 7)})),
    with_tensors("another rank", "layers.0.q_proj.lora_A", lambda values: values.update({"layers.0.q_proj.lora_A": randn(1, 6)})),
    refused_case("not LoRA", "peft_type", lambda folder, config, values: write(folder, config, values, peft_type="IA3")),
    with_option("use_dora", True),
    with_option("bias", "all"),
    with_option("rank_pattern", {"embed": 4}),
    with_option("modules_to_save", ["head"]),
    with_option("layers_to_transform", [0]),
    with_option("fan_in_fan_out", True),
    without(CONFIG),
    without(WEIGHTS),
)  # fmt: skip
