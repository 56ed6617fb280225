"""Chapter 10. GPTQ and AWQ layouts of quantized models (`quantization_config`, qweight, qzeros, scales, g_idx): write, read slice by slice.

    GPTQ   qweight [in * bits / 32, out] packed along the inputs, qzeros [groups, out * bits / 32] along the outputs, g_idx [in]: groups
    AWQ    qweight [in, out / 8], qzeros [groups, out / 8]: four bits, packed along the outputs, of eight in the order 0 2 4 6 1 3 5 7

Scales are [groups, out] in both, in float16. GPTQ's older files ("gptq") hold zero points minus 1, which a zero point of 0 does not
survive; they are written where the zero point is the middle of the codes, and the newer ones ("gptq_v2") where it is not. A layer is
quantized where the files have a qweight of it: other tools may leave some of the blocks' linear layers as they are.

Left out on purpose: groups of columns that are not neighbours, which GPTQ makes with act order and without static groups.
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.finetune.quantization.frozen import FrozenFolder, open_frozen
from shared.finetune.quantization.packed import QuantizedLinear
from shared.finetune.quantization.packed_settings import KEYS, file_settings, read_settings, zero_offset
from shared.finetune.quantization.rounding import WORD, QuantizedWeight, Rounding, pack, unpack
from shared.model.hf.files import PretrainedError, TokenIds, every_id, plan_files, read_json, write_generation, write_json, write_tensors
from shared.model.hf.format import FileTensor, only
from shared.model.hf.pretrained import listed
from shared.model.hf.registry import write_config
from shared.model.init import forget_files, materialize
from shared.model.transformer import TransformerModel

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each place of a word holds, of eight
EIGHT = len(AWQ_ORDER)  # outputs in a word of AWQ's
BACK = [AWQ_ORDER.index(place) for place in range(EIGHT)]


def save_quantized(
    model: TransformerModel, folder: Path | str, *, layout: str, token_ids: TokenIds | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write a model whose blocks' linear layers are quantized into a folder.

    Args:
        layout: "gptq", or "awq" for four bits.
        token_ids, max_shard_bytes: as `save_pretrained` takes them.
    """
    folder, (known, raw) = Path(folder), write_config(model.config)
    settings = file_settings(require_one_rounding(model), layout)
    require_outputs(model, settings["bits"])
    like = {model.logical_name(name): value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    tensors: dict[str, Tensor] = {}
    for entry in known.tensors(model.config):
        layer = quantized_layer(model, entry)
        if layer is None:
            tensors[entry.name] = entry.pack(entry.views(like))
        else:
            made = to_file(layer.quantized_weight(), layer.rounding, settings)
            tensors |= {entry.name.removesuffix("weight") + key: made[key] for key in KEYS[layout]}
    ids = every_id(model.token_ids if token_ids is None else token_ids, model.config)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    plan = plan_files({name: tensor.nbytes for name, tensor in tensors.items()}, max_shard_bytes)
    write_tensors(folder, plan, tensors, tensors.__getitem__)
    write_generation(folder, ids, model.config)
    write_json(folder / "config.json", raw | ids | {"dtype": "float16", "quantization_config": settings})


def quantized_layers(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def quantized_layer(model: TransformerModel, entry: FileTensor) -> QuantizedLinear | None:
    """The quantized layer whose weight a tensor of the plain format holds; None where it holds anything else."""
    found = [model.get_submodule(name.rpartition(".")[0]) for name in entry.ours if name.endswith(".weight")]
    layers = [module for module in found if isinstance(module, QuantizedLinear)]
    if not layers:
        return None
    if entry.pack is not only or len(entry.ours) > 1:
        raise ValueError(f"{entry.name} holds several layers, or one transposed, and these layouts cannot: take a model of LLaMA's family.")
    return layers[0]


def require_one_rounding(model: nn.Module) -> Rounding:
    roundings = {layer.rounding for layer in quantized_layers(model)}
    if len(roundings) != 1:
        raise ValueError("The model is not quantized, or its layers differ in bits and groups: quantize all of them in the same way.")
    return roundings.pop()


def require_outputs(model: TransformerModel, bits: int) -> None:
    """Refuse a layer whose outputs' codes do not fill words, by its name; before it is quantized as well."""
    for name, module in model.stack.blocks.named_modules(prefix="stack.blocks"):
        if getattr(module, "out_features", 0) * bits % WORD:
            raise ValueError(
                f"{name} has {module.out_features} outputs, which codes of {bits} bits do not pack into words of {WORD}: take other bits."
            )


def to_file(weight: QuantizedWeight, rounding: Rounding, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a layer in the layout that `settings` name."""
    zeros, scales = weight.zeros.t().to(torch.int32), weight.scales.t().to(torch.float16)
    if settings["quant_method"] == "awq":
        packed = (pack_rows(reordered(each, AWQ_ORDER), 4) for each in (weight.codes.t(), zeros))
        return dict(zip(KEYS["awq"], (*packed, scales), strict=True))
    codes = pack_rows(weight.codes, rounding.bits).t()
    zeros = pack_rows((zeros - zero_offset(settings)) & rounding.last, rounding.bits)
    group_of = torch.arange(weight.codes.shape[1], dtype=torch.int32) // rounding.columns(weight.codes.shape[1])
    return dict(zip(KEYS["gptq"], (codes, zeros, scales, group_of), strict=True))


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """[m, n] -> [m, n * bits / 32] int32. `pack` takes 32 codes at a time, so rows are filled up, and the words of that are cut off."""
    return pack(F.pad(codes, (0, -codes.shape[1] % WORD)), bits).flatten(1)[:, : codes.shape[1] * bits // WORD]


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """The codes of `pack_rows`."""
    columns = words.shape[1] * WORD // bits
    return unpack(F.pad(words, (0, -words.shape[1] % bits)).unflatten(1, (-1, bits)), bits)[:, :columns]


def reordered(codes: Tensor, order: tuple[int, ...] | list[int]) -> Tensor:
    """[m, n] with the columns of each eight in another order."""
    return codes.unflatten(1, (-1, len(order)))[..., list(order)].flatten(1)


class PackedFolder(FrozenFolder):
    """The tensors of a folder in GPTQ's or AWQ's layout.

    told: its `quantization_config`. rounding: bits and groups.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        try:
            self.told, self.rounding = read_settings(read_json(folder / "config.json").get("quantization_config"))
            stems = [name.removesuffix("qweight") for name in self.shapes if name.endswith(".qweight")]
            self.require_fit({name: shape for stem in stems for name, shape in self.wanted(stem).items()})
        except ValueError as error:
            raise error if isinstance(error, PretrainedError) else PretrainedError(f"{folder / 'config.json'}: {error}") from None
        if not stems:
            raise PretrainedError(f"{folder} has no quantized weights (no tensor ends in qweight): copy its files again.")
        if self.rounding.symmetric and not self.is_awq:
            self.settle_version(stems[0])
        for stem in stems:
            shape = self.shape_of(stem)
            self.require_neighbours(stem, shape[1])
            for key in self.keys:
                del self.shapes[stem + key]
            self.shapes[f"{stem}weight"] = shape
        self.quantized = {f"{stem}weight" for stem in stems}

    def settle_version(self, stem: str) -> None:
        """Read the files in version 2 where they are, though they say version 1: symmetric codes have their zero point in the middle, and
        the versions store it differently."""
        words = self.read(f"{stem}qzeros", [(0, size) for size in self.shapes[f"{stem}qzeros"]])
        stored = unpack_rows(words, self.rounding.bits)
        versions = [name for name, offset in (("gptq", 1), ("gptq_v2", 0)) if ((stored + offset) == self.middle).all()]
        said = "gptq" if zero_offset(self.told) else "gptq_v2"
        if versions and said not in versions:
            what = f"{self.folder} says checkpoint_format {said}, and its zero points are those of {versions[0]}: read so."
            warnings.warn(what, stacklevel=2)
            self.told = self.told | {"checkpoint_format": versions[0]}

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return 2 ** (self.rounding.bits - 1)

    @property
    def is_awq(self) -> bool:
        return self.told["quant_method"] == "awq"

    @property
    def keys(self) -> tuple[str, ...]:
        """Endings of the names of a layer's tensors."""
        return KEYS[self.told["quant_method"]]

    def shape_of(self, stem: str) -> tuple[int, int]:
        """[out, in] of a layer's weight; `in` by AWQ's codes, and by GPTQ's groups, whose number does not depend on the bits."""
        rows, columns = self.shapes[f"{stem}qweight"]
        if self.is_awq:
            return columns * EIGHT, rows
        return columns, self.shapes.get(f"{stem}g_idx", (rows * WORD // self.rounding.bits,))[0]

    def wanted(self, stem: str) -> dict[str, tuple[int, ...]]:
        """The tensors that files must hold for a layer, with their shapes.

        Raises:
            ValueError: a size that these groups do not divide.
        """
        out, inputs = self.shape_of(stem)
        with torch.device("meta"):
            groups = QuantizedLinear(out, inputs, None, self.rounding).scales.shape[1]
        codes = (inputs, out // EIGHT) if self.is_awq else (inputs * self.rounding.bits // WORD, out)
        zeros = groups, out * self.rounding.bits // WORD
        return {stem + key: shape for key, shape in zip(self.keys, (codes, zeros, (groups, out), (inputs,)), strict=False)}

    def require_fit(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        problems = {
            "missing": [name for name in wanted if name not in self.shapes],
            "misshapen": [f"{name} is {list(self.shapes[name])}, not {list(shape)}" for name, shape in wanted.items()
                          if self.shapes.get(name, shape) != shape],
        }  # fmt: skip
        if found := "; ".join(f"{title}: {listed(names)}" for title, names in problems.items() if names):
            raise PretrainedError(
                f"The tensors in {self.folder} do not match its config.json; look at bits and group_size in quantization_config. {found}."
            )

    def require_neighbours(self, stem: str, inputs: int) -> None:
        """Refuse a layer whose groups are not neighbouring columns."""
        width = self.rounding.columns(inputs)
        if not self.is_awq and not torch.equal(self.read(f"{stem}g_idx", [(0, inputs)]).long(), torch.arange(inputs) // width):
            raise PretrainedError(
                f"{stem}g_idx is not that of groups of {width} neighbouring columns: quantize the model with static groups."
            )

    def layer(self, name: str, bias: nn.Parameter | None) -> QuantizedLinear:
        with torch.device("meta"):
            made = QuantizedLinear(*self.shapes[name], bias, self.rounding)
        read = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros}
        for kind in made.stored:
            getattr(made, kind).stored = partial(read[kind], name.removesuffix("weight"))
        return made

    def codes(self, stem: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A slice of what `pack` makes of a layer's codes, [out, in / 32, bits]."""
        (first, word, bit), (rows, words, bits), every = offsets, sizes, self.rounding.bits
        if self.is_awq:
            inputs = word * WORD, (word + words) * WORD
            whole = pack(self.outputs(f"{stem}qweight", inputs, first, rows).t(), every)
        else:  # the same words, the other way round
            both = (word * every, (word + words) * every), (first, first + rows)
            whole = self.read(f"{stem}qweight", both).t().unflatten(1, (-1, every))
        return whole[..., bit : bit + bits]

    def scales(self, stem: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        (first, group), (rows, groups) = offsets, sizes
        return self.read(f"{stem}scales", [(group, group + groups), (first, first + rows)]).t()

    def zeros(self, stem: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        (first, group), (rows, groups) = offsets, sizes
        found = self.outputs(f"{stem}qzeros", (group, group + groups), first, rows) + zero_offset(self.told)
        if self.rounding.symmetric and not self.is_awq and (found != self.middle).any():
            raise PretrainedError(
                f"{self.folder / 'config.json'} says that codes are symmetric (sym), and the zero points of {stem.rstrip('.')} are not "
                f"{self.middle}: set sym to false in quantization_config, or checkpoint_format to what wrote the files."
            )
        return found.t()

    def outputs(self, name: str, ranges: tuple[int, int], first: int, count: int) -> Tensor:
        """Some outputs of codes that are packed along them: uint8 [n, count]. 32 of them begin with a word, of any number of bits."""
        bits, start = self.rounding.bits, first // WORD
        words = self.read(name, [ranges, (start * bits, -(-(first + count) // WORD) * bits)])
        codes = unpack_rows(words, bits)
        return (reordered(codes, BACK) if self.is_awq else codes)[:, first - start * WORD :][:, :count]


def load_quantized(folder: Path | str, *, dtype: torch.dtype = torch.float32) -> TransformerModel:
    """Load a model in GPTQ's or AWQ's layout, written here or by another tool. Its quantized layers are frozen. It is in training mode.

    Args:
        dtype: of what is not quantized.
    """
    model = open_frozen(PackedFolder(Path(folder)), dtype)
    materialize(model, "cpu", seed=0)
    forget_files(model)
    return model
