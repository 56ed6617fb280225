"""Chapter 10. Save and load a 4-bit model in bitsandbytes' format (`quantization_config`, NF4 `quant_state`), which transformers loads.

    weight [out in / 2, 1] uint8        weight.absmax [out in / 64]: scales, or with double quantization their codes (uint8)
    weight.quant_map [16]               weight.nested_absmax, weight.nested_quant_map [256]: double quantization's scales and values
    weight.quant_state.bitsandbytes__nf4: JSON as bytes: shape, block sizes, the mean of the scales

Two other writings are read: codes viewed as another dtype (`bnb_4bit_quant_storage`, for FSDP), and scales [in / 64, out], which
bitsandbytes leaves transposed after a forward pass on a CPU with AVX512-BF16.

A run (`start_from`) reads such a folder through `Nf4Folder` and `with_frozen_layers`. Scripts call `save_nf4` and `open_nf4`: a run writes
its adapter and the merged model instead.

Left out on purpose: FP4, other block sizes, and formats that keep several layers in one tensor or transposed, such as GPT-2's.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shared.finetune.quantization.frozen import FrozenFolder, open_frozen
from shared.finetune.quantization.nf4 import BLOCK, SCALE_BLOCK, dynamic_values, nf4_values
from shared.finetune.quantization.nf4_linear import Nf4Linear, Tables, table_shapes
from shared.model.hf.files import PretrainedError, every_id, plan_files, write_generation, write_json, write_tensors
from shared.model.hf.format import FileTensor, only
from shared.model.hf.pretrained import Weights, packed_like, whole_weights
from shared.model.hf.registry import write_config
from shared.model.sharding import Box
from shared.model.transformer import TransformerModel
from shared.tensor_files import ordered

STATE, FP4_STATE = "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"
PARTS = {"codes": "", "scales": ".absmax", "scale_codes": ".absmax", "scale_scales": ".nested_absmax"}  # a table's tensor, after the weight
MAPS = {".quant_map": nf4_values, ".nested_quant_map": dynamic_values}
SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
NUMBERS = {"quant_type": "nf4", "blocksize": BLOCK, "nested_blocksize": SCALE_BLOCK}  # all that a state may say of these


def save_nf4(model: TransformerModel, folder: Path | str, *, max_shard_bytes: int = 5 * 10**9, weights: Weights | None = None) -> None:
    """Write a model with a base in NF4 (`quantize_base`) into a folder, as `save_pretrained` does.

    Args:
        model: without adapters.
        max_shard_bytes, weights: as `save_pretrained` takes them; every process calls it where there are `weights`.
    """
    folder, (known, raw) = Path(folder), write_config(model.config)
    weights, layers = weights or whole_weights(model), {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, Nf4Linear)}
    if not layers or any(".adapters." in name for name in weights.like):
        raise ValueError(
            "Only a model whose base is in NF4 is saved here, without adapters: quantize_base makes one, save_adapter saves those."
        )
    tensors: dict[str, tuple[Tensor, Callable[[], Tensor | None]]] = {}
    for entry in known.tensors(model.config):
        (ours, *more) = entry.ours
        if ours not in layers:
            tensors[entry.name] = packed_like(entry, weights.like), partial(collect, entry, weights)
        elif entry.pack is not only or more:
            raise ValueError(
                f"{entry.name} holds several layers, or one transposed, so its blocks are others: save a model of LLaMA's family."
            )
        else:
            tensors |= {entry.name + part: made for part, made in parts_of(ours, layers[ours], weights).items()}
    like = {name: tensor for name, (tensor, _) in tensors.items()}
    plan = plan_files({name: tensor.nbytes for name, tensor in like.items()}, max_shard_bytes)
    if not weights.writes:
        for names in plan.values():
            for name in ordered({name: like[name] for name in names}):
                tensors[name][1]()
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, plan, like, lambda name: tensors[name][1]())
    ids = every_id(model.token_ids, model.config)
    write_generation(folder, ids, model.config)
    plain = [entry.name.removesuffix(".weight") for entry in known.tensors(model.config) if is_plain_linear(model, entry)]
    double = any("scale_codes" in layer.stored for layer in layers.values())
    settings = SETTINGS | {"bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": "float32", "llm_int8_skip_modules": plain}
    write_json(folder / "config.json", raw | ids | {"dtype": "float32", "quantization_config": settings})


def is_plain_linear(model: TransformerModel, entry: FileTensor) -> bool:
    """Whether a tensor is the weight of a linear layer that is not quantized."""
    module, _, attribute = entry.ours[0].rpartition(".")
    return attribute == "weight" and isinstance(model.get_submodule(module), nn.Linear)


def collect(entry: FileTensor, weights: Weights) -> Tensor | None:
    """A tensor of the plain format, in the process that writes."""
    collected = {ours: weights.collect(ours) for ours in entry.ours}
    return entry.pack(entry.views(collected)) if weights.writes else None


def parts_of(ours: str, layer: Nf4Linear, weights: Weights) -> dict[str, tuple[Tensor, Callable[[], Tensor | None]]]:
    """The file tensors of a layer by the ending of their names: one of the same shape, and a function that makes it."""
    name, parts = ours.removesuffix("weight"), {}
    for kind, shape in table_shapes(layer.weight_shape, "scale_codes" in layer.stored).items():
        if kind in PARTS:
            flat = (math.prod(shape), 1) if kind == "codes" else (math.prod(shape),)
            made = torch.empty(flat, dtype=weights.like[name + kind].dtype, device="meta")
            parts[PARTS[kind]] = made, partial(collect_flat, name + kind, flat, weights)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": list(layer.weight_shape)}
    maps = [".quant_map"]
    if "scale_codes" in layer.stored:
        mean = weights.collect(name + "scale_mean")
        state |= {"nested_blocksize": SCALE_BLOCK, "nested_dtype": "float32", "nested_offset": 0.0 if mean is None else mean.item()}
        maps.append(".nested_quant_map")
    tables = {each: MAPS[each]() for each in maps} | {f".{STATE}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}
    return parts | {part: (tensor, lambda tensor=tensor: tensor) for part, tensor in tables.items()}


def collect_flat(name: str, shape: Sequence[int], weights: Weights) -> Tensor | None:
    collected = weights.collect(name)
    return None if collected is None else collected.reshape(shape)


class Nf4Folder(FrozenFolder):
    """The tensors of a folder in bitsandbytes' format.

    states: name of a four-bit weight -> its state.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.states: dict[str, dict[str, Any]] = {}
        everything = self.shapes
        ends = {*PARTS.values(), *MAPS, f".{STATE}"} - {""}
        self.shapes = {name: shape for name, shape in everything.items() if not any(name.endswith(f".weight{end}") for end in ends)}
        for name in [name.removesuffix(f".{STATE}") for name in everything if name.endswith(f".weight.{STATE}")]:
            self.states[name] = state = self.read_state(name)
            for kind, shape in table_shapes(state["shape"], "nested_offset" in state).items():
                if kind in PARTS and not self.fits(name + PARTS[kind], everything.get(name + PARTS[kind]), kind, shape):
                    raise PretrainedError(
                        f"{folder}: {name}{PARTS[kind]} does not fit the shape {state['shape']} of its weight: copy it again."
                    )
            self.shapes[name] = tuple(state["shape"])
        if fp4 := [name for name in everything if name.endswith(FP4_STATE)]:
            raise PretrainedError(
                f"{folder} holds weights in FP4 ({fp4[0]}), bitsandbytes' default for load_in_4bit, and NF4 is what is read here: give the "
                "model that it was made from, or save that again with bnb_4bit_quant_type nf4."
            )
        if not self.states:
            raise PretrainedError(f"{folder} has no weights in NF4 (no tensor {STATE}): open it with open_pretrained.")
        self.quantized = self.states

    def fits(self, name: str, there: tuple[int, ...] | None, kind: str, shape: Sequence[int]) -> bool:
        """Whether a tensor of the files, of shape `there`, holds a table."""
        if there is None or is_transposed(there, kind, shape):
            return there is not None
        with safe_open(self.file_of[name], "pt") as file:
            per_number = file.get_slice(name)[:0].itemsize if kind == "codes" else 1
        numbers, rest = divmod(math.prod(shape), per_number)
        return not rest and there in ((numbers,), (numbers, 1))

    def whole(self, name: str) -> Tensor:
        with safe_open(self.file_of[name], "pt") as file:
            return file.get_tensor(name)

    def read_state(self, name: str) -> dict[str, Any]:
        """The quantization state of a weight."""
        try:
            state = json.loads(bytes(self.whole(f"{name}.{STATE}").tolist()))
            wrong = [key for key, value in NUMBERS.items() if state.get(key, value) != value]
            rows, columns = state["shape"]
            maps = {part: make for part, make in MAPS.items() if part == ".quant_map" or "nested_offset" in state}
            wrong += [part[1:] for part, make in maps.items() if not torch.equal(self.whole(name + part).float(), make())]
            float(state.get("nested_offset", 0.0))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PretrainedError(f"{self.folder}: {name}.{STATE} cannot be read ({error!r}): copy the files again.") from None
        if wrong or columns % BLOCK:
            raise PretrainedError(
                f"{self.folder}: {name} is kept with another {wrong[0] if wrong else 'shape'} than NF4 in blocks of {BLOCK} is here: save "
                "it again with bnb_4bit_quant_type nf4 and its defaults."
            )
        return state

    def layer(self, name: str, bias: nn.Parameter | None) -> Nf4Linear:
        return Nf4Linear(self.shapes[name], self.tables(name), bias, on_meta=True)

    def tables(self, name: str) -> Tables:
        """Readers of a layer's tables."""
        state = self.states[name]
        read: Tables = {}
        for kind, shape in table_shapes(state["shape"], "nested_offset" in state).items():
            if kind == "scale_mean":
                read[kind] = shape, lambda offsets, sizes: torch.tensor([state["nested_offset"]], dtype=torch.float32)
            else:
                read[kind] = shape, partial(self.read_table, name + PARTS[kind], kind, shape)
        return read

    def read_table(self, name: str, kind: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A slice of a table, which the file holds flattened: whole rows are read."""
        with safe_open(self.file_of[name], "pt") as file:
            stored = file.get_slice(name)
            if is_transposed(stored.get_shape(), kind, shape):
                return stored[offsets[1] : offsets[1] + sizes[1], offsets[0] : offsets[0] + sizes[0]].T
            width = stored.get_shape()[0] // shape[0]  # rows of a weight have multiples of 32 bytes, whatever dtype they are viewed as
            rows = stored[offsets[0] * width : (offsets[0] + sizes[0]) * width]
        rows = rows.view(torch.uint8) if kind == "codes" else rows
        return Box((0, *offsets[1:]), tuple(sizes)).of(rows.reshape(sizes[0], *shape[1:]))


def is_transposed(there: Sequence[int], kind: str, shape: Sequence[int]) -> bool:
    """Whether scales [out, in / 64] stand in a file of shape `there` the other way round; all others have one dimension there."""
    return kind == "scales" and list(there) == [*reversed(shape)]


def open_nf4(folder: Path | str, *, dtype: torch.dtype = torch.float32) -> TransformerModel:
    """Open a folder in bitsandbytes' format as a model on the meta device, with its base in NF4 (`open_frozen`).

    Args:
        dtype: of what is not in four bits.
    """
    return open_frozen(Nf4Folder(Path(folder)), dtype)
