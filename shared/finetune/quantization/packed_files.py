"""Chapter 10. Load quantized models from the GPTQ and AWQ layouts (`shared.finetune.quantization.saved`), whole or slice by slice.

A layer is quantized where the files have a qweight of it: other tools may leave some of the blocks' linear layers as they are.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shared.finetune.quantization.frozen import FrozenFolder, open_frozen
from shared.finetune.quantization.packed import QuantizedLinear
from shared.finetune.quantization.rounding import WORD, pack
from shared.finetune.quantization.saved import AWQ_ORDER, KEYS, read_settings, reordered, unpack_rows, zero_offset
from shared.model.hf.files import PretrainedError, read_json
from shared.model.hf.pretrained import listed
from shared.model.init import forget_files, materialize
from shared.model.transformer import TransformerModel

EIGHT = len(AWQ_ORDER)  # outputs in a word of AWQ's
BACK = [AWQ_ORDER.index(place) for place in range(EIGHT)]


class PackedFolder(FrozenFolder):
    """The tensors of such a folder.

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
        for stem in stems:
            shape = self.shape_of(stem)
            self.require_neighbours(stem, shape[1])
            for key in self.keys:
                del self.shapes[stem + key]
            self.shapes[f"{stem}weight"] = shape
        self.quantized = {f"{stem}weight" for stem in stems}

    @property
    def is_awq(self) -> bool:
        return self.told["quant_method"] == "awq"

    @property
    def keys(self) -> tuple[str, ...]:
        """The ends of the names of a layer's tensors."""
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
        return (self.outputs(f"{stem}qzeros", (group, group + groups), first, rows) + zero_offset(self.told)).t()

    def outputs(self, name: str, ranges: tuple[int, int], first: int, count: int) -> Tensor:
        """Some outputs of codes that are packed along them: uint8 [n, count]. 32 of them begin with a word, of any number of bits."""
        bits, start = self.rounding.bits, first // WORD
        words = self.read(name, [ranges, (start * bits, -(-(first + count) // WORD) * bits)])
        codes = unpack_rows(words, bits)
        return (reordered(codes, BACK) if self.is_awq else codes)[:, first - start * WORD :][:, :count]


def load_quantized(folder: Path | str, *, dtype: torch.dtype = torch.float32) -> TransformerModel:
    """The model in such a folder, ours or another tool's. Its quantized layers are frozen. It is in training mode.

    Args:
        dtype: of what is not quantized.
    """
    model = open_frozen(PackedFolder(Path(folder)), dtype)
    materialize(model, "cpu", seed=0)
    forget_files(model)
    return model
