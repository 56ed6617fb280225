"""Stage 12 of build 02: what cannot be right is refused, by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case

from .pieces import GROUPED, LLAMA3, TEXT, TIED, Config, Results, copy_of, edited, folder_of, ids_of, refused, without
from .saving import new_folder


def wanted_of(words: tuple[str, ...]) -> str:
    return f"ValueError that says {' and '.join(word.replace('|', ' or ') for word in words)}"


def refusal(words: tuple[str, ...], act: Callable[[], Any]) -> str:
    """What `act` does, which is to raise a ValueError that says all of `words`."""
    try:
        act()
        return "accepted"
    except ValueError as error:
        return refused(error, words, wanted_of(words))
    except (OSError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError, IndexError) as error:
        if isinstance(error, NotImplementedError):
            raise
        return f"{type(error).__name__}, which is no ValueError: {error}"


def settings_case(title: str, config: Config, *words: str) -> Case:
    """The same is refused by settings, create and load."""

    def observe(adapters: Any, **_: Any) -> Results:
        folder = copy_of(folder_of(GROUPED))
        (folder / "config.json").write_text(json.dumps(config))
        acts = {
            "settings": lambda: adapters.settings(dict(config)),
            "create": lambda: adapters.create(dict(config), 0),
            "load": lambda: adapters.load(folder),
        }
        return {name: refusal(words, act).replace(str(folder), "FOLDER") for name, act in acts.items()}

    expected = lambda **_: dict.fromkeys(("settings", "create", "load"), wanted_of(words))  # noqa: E731
    return Case("property", title, lambda: {"config": config}, expected, TEXT.format(12), observe)


def fine_case(title: str, config: Config) -> Case:
    """What is right is not refused."""

    def observe(adapters: Any, **_: Any) -> Results:
        try:
            adapters.settings(dict(config))
        except ValueError as error:
            return {"result": f"ValueError: {error}"}
        return {"result": "accepted"}

    return Case("property", title, lambda: {"config": config}, lambda **_: {"result": "accepted"}, TEXT.format(12), observe)


def folder_case(title: str, make: Callable[[], Path], *words: str, tensors: bool = False) -> Case:
    """tensors: that function refuses it too."""

    def observe(adapters: Any, **_: Any) -> Results:
        folder = make()
        spoken = tuple(str(folder) if word == "FOLDER" else word for word in words)
        found = {"load": refusal(spoken, lambda: adapters.load(folder)).replace(str(folder), "FOLDER")}
        if tensors:
            found["tensors"] = refusal(spoken, lambda: adapters.tensors(folder)).replace(str(folder), "FOLDER")
        return found

    expected = lambda **_: dict.fromkeys(("load", "tensors")[: 1 + tensors], wanted_of(words))  # noqa: E731
    return Case("property", title, lambda: {"folder": title}, expected, TEXT.format(12), observe)


def model_case(title: str, given: Results, words: tuple[str, ...], act: Callable[[Any, Any], Any]) -> Case:
    observe = lambda adapters, **_: {"result": refusal(words, lambda: act(adapters, adapters.load(folder_of(GROUPED))))}  # noqa: E731
    return Case("property", title, lambda: given, lambda **_: {"result": wanted_of(words)}, TEXT.format(12), observe)


def save_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        folder, model = new_folder(), adapters.load(folder_of(GROUPED))
        result = refusal(("0",), lambda: adapters.save(model, folder, 0))
        return {"result": result, "folder": "there" if folder.exists() and any(folder.iterdir()) else "not there, or empty"}

    expected = lambda **_: {"result": wanted_of(("0",)), "folder": "not there, or empty"}  # noqa: E731
    return Case("property", "files of no bytes", lambda: {"most": 0}, expected, TEXT.format(12), observe)


# Folders that are broken


def cut(file: str, shards: str, keep: float) -> Callable[[], Path]:
    def make() -> Path:
        folder = copy_of(folder_of(GROUPED, shards=shards))
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(keep * len(data))])
        return folder

    return make


def gone(*files: str, shards: str = "1GB", more: dict[str, bytes] | None = None) -> Callable[[], Path]:
    def make() -> Path:
        folder = copy_of(folder_of(GROUPED, shards=shards))
        for file in files:
            (folder / file).unlink()
        for file, data in (more or {}).items():
            (folder / file).write_bytes(data)
        return folder

    return make


def changed(change: Callable[[dict[str, Tensor]], Any], config: Config = GROUPED, **changes: Any) -> Callable[[], Path]:
    return lambda: edited(folder_of(config), change, **changes)


def wrong_index() -> Path:
    """The index says that the norm is in the first file."""
    folder = copy_of(folder_of(GROUPED, shards="20KB"))
    path = folder / "model.safetensors.index.json"
    raw = json.loads(path.read_text())
    first = sorted(set(raw["weight_map"].values()))[0]
    moved = next(name for name, file in raw["weight_map"].items() if file != first)
    raw["weight_map"][moved] = first
    path.write_text(json.dumps(raw))
    return folder


def many() -> list[str]:
    return sorted(file.name for file in folder_of(GROUPED, shards="20KB").glob("*.safetensors"))


def swap(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda found: found.update({name: found[name].T.contiguous()})


Q, K, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"
FIRST = "model-00001-of-00003.safetensors"
YARN = {"rope_type": "yarn", "rope_theta": 10.0, "factor": 2.0}
OLD = without(GROUPED, "rope_parameters")
BAD_INPUT = (
    settings_case("another family", GROUPED | {"model_type": "mistral"}, "model_type", "mistral"),
    settings_case("no family", without(GROUPED, "model_type"), "model_type"),
    settings_case("another activation function", GROUPED | {"hidden_act": "gelu"}, "hidden_act", "gelu"),
    settings_case("RoPE of another type", GROUPED | {"rope_parameters": YARN}, "rope_type", "yarn"),
    settings_case("another type, in an older file", OLD | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type", "dynamic"),
    settings_case("an option of llama3 is missing", GROUPED | {"rope_parameters": without(LLAMA3, "low_freq_factor")}, "low_freq_factor"),
    settings_case("linear without a factor", GROUPED | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10.0}}, "factor"),
    settings_case("quantized weights", GROUPED | {"quantization_config": {"bits": 4}}, "quantization_config"),
    settings_case("a size is missing", without(GROUPED, "intermediate_size"), "intermediate_size"),
    settings_case("the number of heads is missing", without(GROUPED, "num_attention_heads"), "num_attention_heads"),
    settings_case("a size is null", GROUPED | {"vocab_size": None}, "vocab_size"),
    settings_case("no layers", GROUPED | {"num_hidden_layers": 0}, "num_hidden_layers"),
    settings_case("no heads", GROUPED | {"num_attention_heads": 0}, "num_attention_heads"),
    settings_case("no key-value heads", GROUPED | {"num_key_value_heads": 0}, "num_key_value_heads"),
    settings_case("a negative size", GROUPED | {"hidden_size": -24}, "hidden_size"),
    settings_case("a size that is a text", GROUPED | {"hidden_size": "24"}, "hidden_size"),
    settings_case("a size that is a fraction", GROUPED | {"intermediate_size": 44.0}, "intermediate_size"),
    settings_case("a size that is true", GROUPED | {"num_hidden_layers": True}, "num_hidden_layers"),
    settings_case("key-value heads that do not divide the heads", GROUPED | {"num_key_value_heads": 4}, "num_key_value_heads"),
    settings_case("an odd head", GROUPED | {"head_dim": 5}, "head_dim"),
    fine_case("no activation function is said", without(GROUPED, "hidden_act")),
    fine_case("an unquantized model that says so", GROUPED | {"quantization_config": None}),
    fine_case("a key that nobody knows", GROUPED | {"my_key": {"model_type": "mistral"}}),
    folder_case("no weights", gone("model.safetensors"), "FOLDER", tensors=True),
    folder_case("weights that can run code", gone("model.safetensors", more={"pytorch_model.bin": b"x"}), "FOLDER", tensors=True),
    folder_case("no config.json", gone("config.json"), "config.json"),
    folder_case("config.json is no JSON", gone(more={"config.json": b"{"}), "config.json"),
    folder_case("config.json is a list", gone(more={"config.json": b"[1]"}), "config.json"),
    folder_case("a file that is cut short", cut("model.safetensors", "1GB", 0.7), "model.safetensors", tensors=True),
    folder_case("a file that is cut in its header", cut("model.safetensors", "1GB", 0.02), "model.safetensors", tensors=True),
    folder_case("a file that is empty", cut("model.safetensors", "1GB", 0), "model.safetensors", tensors=True),
    folder_case("one of many files is cut short", lambda: cut(many()[1], "20KB", 0.5)(), many_name := "-00002-of-", tensors=True),
    folder_case("one of many files is missing", lambda: gone(many()[1], shards="20KB")(), many_name, tensors=True),
    folder_case("a tensor that is not where the index says", wrong_index, "-00001-of-", tensors=True),
    folder_case("a tensor is missing", changed(lambda found: found.pop(Q)), Q),
    folder_case("the head is missing", changed(lambda found: found.pop("lm_head.weight")), "lm_head.weight"),
    folder_case("a bias is missing", changed(lambda found: None, attention_bias=True), "bias"),
    folder_case("a tensor that belongs to nothing", changed(lambda found: found.update({"model.extra": torch.ones(1)})), "model.extra"),
    folder_case("a bias without a place", changed(lambda found: found.update({f"{Q[:-6]}bias": torch.ones(24)})), f"{Q[:-6]}bias"),
    folder_case("a layer too many", changed(lambda found: None, num_hidden_layers=1), "model.layers.1."),
    folder_case("a layer too few", changed(lambda found: None, num_hidden_layers=3), "model.layers.2."),
    folder_case("a matrix on its side", changed(swap(UP)), UP, "44", "24"),
    folder_case("one number for all", changed(lambda found: found.update({"model.norm.weight": torch.ones(1)})), "model.norm.weight", "24"),
    folder_case("a square matrix with two axes too many", changed(lambda found: found.update({Q: found[Q][None]})), Q),
    folder_case("another number of key-value heads", changed(lambda found: None, num_key_value_heads=3), "self_attn.", "12", "8"),
    folder_case("another vocabulary, tied", changed(lambda found: None, TIED, vocab_size=40), "model.embed_tokens.weight", "40", "37"),
    model_case("a token too large", {"ids": [[0, 37]]}, ("37",), lambda a, model: a.logits(model, torch.tensor([[0, 37]]))),
    model_case("a token below 0", {"ids": [[0, -1]]}, ("-1",), lambda a, model: a.logits(model, torch.tensor([[0, -1]]))),
    model_case("ids that are no integers", {"dtype": "float32"}, ("float32",), lambda a, model: a.logits(model, torch.ones(1, 2))),
    model_case("ids of one row without a dimension for it", {"ids": "[5]"}, ("5|1",), lambda a, model: a.logits(model, torch.arange(5))),
    model_case("documents of another shape", {"ids": [1, 4], "documents": [1, 3]}, ("4", "3"),
               lambda a, model: a.packed_logits(model, ids_of(1, 4), torch.zeros(1, 3, dtype=torch.int64))),
    model_case("documents that would fit any row", {"ids": [2, 4], "documents": [1, 4]}, ("2", "1"),
               lambda a, model: a.packed_logits(model, ids_of(2, 4), torch.zeros(1, 4, dtype=torch.int64))),
    model_case("documents of another shape, in the loss", {"ids": [2, 4], "documents": [2, 1]}, ("4", "1"),
               lambda a, model: a.loss(model, ids_of(2, 4), torch.zeros(2, 1, dtype=torch.int64))),
    save_case(),
)  # fmt: skip
