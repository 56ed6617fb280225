"""Chapter 10. QLoRA's base: a model's linear layers in NF4 with double quantization, frozen, for adapters on top (Dettmers et al. 2023).

    codes         [out, in / 2]     two codes a byte
    scale_codes   [out, in / 64]    with double quantization; without, scales [out, in / 64] in float32
    scale_mean    [1]               and scale_scales [out in / 64 / 256]: statistics of the whole matrix, which every rank has whole

Blocks of 64 lie in rows, so rows and columns of both tables can be cut as the weight's: a rank's codes equal the whole matrix's.
A model on the meta device is quantized as it is read: a rank reads what it will hold (and, for the statistics, the matrix once more), one
matrix at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor, nn

from shared.finetune.quantization.frozen import AT_ONCE, FrozenLinear
from shared.finetune.quantization.nf4 import (
    BLOCK,
    SCALE_BLOCK,
    ScaleBlocks,
    decode_scales,
    dequantize_nf4,
    encode_scales,
    quantize_nf4,
    scale_blocks,
    values_on,
)
from shared.model.sharding import Box
from shared.moe.experts import ExpertLinear

ALL = ("*",)
ROWS = 1024  # of a matrix that are quantized at a time
WIDTHS = {"codes": 2, "scales": BLOCK, "scale_codes": BLOCK}  # columns of a weight for a column of a table
BYTES = ("codes", "scale_codes")  # tables of uint8; the others are float32

Read = Callable[[Sequence[int], Sequence[int]], Tensor]  # (offsets, sizes) of a slice of a matrix -> its numbers
Tables = dict[str, tuple[tuple[int, ...], Read]]  # name -> shape, and what makes a slice


class Nf4Linear(FrozenLinear):
    """A frozen linear layer in NF4.

    Args:
        shape: [out, in] of the weight.
        tables: what the layer keeps: by name the shape of each table, and what makes a slice of it.
        bias: kept, and frozen.
        on_meta: whether the tables are made later, as the model gets its memory.
    """

    unit = BLOCK

    def __init__(self, shape: Sequence[int], tables: Tables, bias: nn.Parameter | None, on_meta: bool = False):
        super().__init__(*shape, bias)
        for kind, (size, make) in tables.items():
            dtype = torch.uint8 if kind in BYTES else torch.float32
            made = torch.empty(size, dtype=dtype, device="meta") if on_meta else make((0,) * len(size), size)
            parameter = nn.Parameter(made, requires_grad=False)
            parameter.full_precision = True  # engines that gather weights in 16 bits leave scales as they are
            if on_meta:
                parameter.stored = make
            self.register_parameter(kind, parameter)
        self.stored = tuple(tables)
        self.per_column = {kind: width for kind, width in WIDTHS.items() if kind in self.stored}

    @classmethod
    def of(cls, name: str, weight: nn.Parameter, bias: nn.Parameter | None, double: bool = True) -> "Nf4Linear":
        """The layer with the numbers of a weight [out, in], or, on the meta device, with those that it can read (`stored`).

        Args:
            name: of the weight, for messages.
            weight: with `in` a multiple of 64.
            double: whether the scales are quantized as well.

        Raises:
            ValueError: a weight that cannot be cut into blocks, or without numbers.
        """
        if weight.shape[1] % BLOCK:
            raise ValueError(
                f"{name} has {weight.shape[1]} input features, and NF4 takes blocks of {BLOCK} from a row: leave this layer out of the "
                "layers that are quantized."
            )
        read = getattr(weight, "stored", None)
        if read is None and weight.is_meta:
            raise ValueError(f"{name} has no numbers on the meta device, nor a file to read them from: quantize a model that has weights.")
        source = Quantized(name, read or (lambda offsets, sizes: Box(tuple(offsets), tuple(sizes)).of(weight.detach())), weight.shape)
        return cls(weight.shape, source.tables(double), bias, weight.is_meta)

    def dequantize(self, dtype: torch.dtype, codes: Tensor, scales: Tensor, *statistics: Tensor) -> Tensor:
        if statistics:
            numbers = block_numbers(self.offsets, scales.shape, self.in_features, scales.device)
            scales = decode_scales(scales, numbers, ScaleBlocks(*statistics))
        weight = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
        rows = max(1, AT_ONCE // weight.shape[1])
        for part, some, of_some in zip(weight.split(rows), codes.split(rows), scales.split(rows), strict=True):
            part.copy_(dequantize_nf4(some.reshape(-1), of_some.reshape(-1), values_on(codes.device), BLOCK, part.shape, dtype))
        return weight


def table_shapes(shape: Sequence[int], double: bool) -> dict[str, tuple[int, ...]]:
    """The tables of a weight [out, in] in the order in which `Nf4Linear.dequantize` takes them."""
    rows, columns = shape
    shapes: dict[str, tuple[int, ...]] = {"codes": (rows, columns // 2)}
    if not double:
        return shapes | {"scales": (rows, columns // BLOCK)}
    blocks = -(-rows * columns // BLOCK // SCALE_BLOCK)
    return shapes | {"scale_codes": (rows, columns // BLOCK), "scale_mean": (1,), "scale_scales": (blocks,)}


def block_numbers(offsets: Sequence[int], shape: Sequence[int], columns: int, device: torch.device | None = None) -> Tensor:
    """The numbers that blocks of a slice of a matrix have in the whole, row by row: int64 [rows, blocks in a row] of `shape`.

    Args:
        offsets: the slice's first row and first column in the weight.
        columns: of the whole weight.
    """
    rows = torch.arange(offsets[0], offsets[0] + shape[0], device=device) * (columns // BLOCK)
    return rows.unsqueeze(1) + torch.arange(offsets[1] // BLOCK, offsets[1] // BLOCK + shape[1], device=device)


class Quantized:
    """The tables of a weight, made slice by slice. read: what reads a slice of the weight. shape: [out, in]."""

    def __init__(self, name: str, read: Read, shape: Sequence[int]):
        self.name, self.read, self.shape = name, read, tuple(shape)

    def tables(self, double: bool) -> Tables:
        shapes = table_shapes(self.shape, double)
        makers = {"codes": self.codes, "scales": self.scales, "scale_codes": self.scale_codes}
        makers |= {"scale_mean": lambda offsets, sizes: self.blocks.mean, "scale_scales": lambda offsets, sizes: self.blocks.scales}
        return {kind: (shape, makers[kind]) for kind, shape in shapes.items()}

    def parts(self, width: int, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Codes and scales of a slice, some rows at a time. offsets, sizes: of a table with a column for `width` of the weight's."""
        (first, column), (rows, columns) = offsets, sizes
        for row in range(first, first + rows, ROWS):
            some = min(ROWS, first + rows - row)
            numbers = self.read((row, column * width), (some, columns * width))
            codes, scales = quantize_nf4(numbers, values_on(numbers.device), BLOCK)
            if not scales.isfinite().all():
                raise ValueError(f"{self.name} holds numbers that are not finite, which no scale can hold: look for the file's fault.")
            yield codes.view(some, -1), scales.view(some, -1)

    def codes(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return torch.cat([codes for codes, _ in self.parts(WIDTHS["codes"], offsets, sizes)])

    def scales(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return torch.cat([scales for _, scales in self.parts(BLOCK, offsets, sizes)])

    def scale_codes(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        scales = self.scales(offsets, sizes)
        numbers = block_numbers((offsets[0], offsets[1] * BLOCK), scales.shape, self.shape[1], scales.device)
        return encode_scales(scales, numbers, self.blocks)

    @cached_property
    def blocks(self) -> ScaleBlocks:
        """Statistics of all scales."""
        return scale_blocks(self.scales((0, 0), (self.shape[0], self.shape[1] // BLOCK)).view(-1))


def quantize_base(model: nn.Module, targets: Sequence[str] = ALL, double: bool = True) -> list[str]:
    """Replace linear layers of a model's blocks by frozen ones in NF4, in place, one at a time. Embeddings, norms and head stay, and so do
    routers and stacks of experts (`kept_in_float`).

    Args:
        model: a plain `TransformerModel`, before it is parallelized; with weights, or from `open_pretrained`.
        targets: patterns of the ends of layers' names, like q_proj or feed_forward.*; all linear layers of blocks by default.
        double: whether scales are quantized as well: 4.127 bits a weight in place of 4.5.

    Returns:
        The names of the layers.
    """
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and ".blocks." in name]
    found = [name for name in linears if matches(name, targets)]
    if not found and (stacks := [name for name in kept_in_float(model) if matches(name, targets)]):
        raise ValueError(
            f"Only stacks of experts match {', '.join(targets)} ({stacks[0]}), and these stay in float: give names like q_proj."
        )
    if not found:
        raise ValueError(f"No linear layer of the model's blocks has a name like {', '.join(targets)}: give names like q_proj.")
    for name in found:
        parent, _, attribute = name.rpartition(".")
        linear = model.get_submodule(name)
        setattr(model.get_submodule(parent), attribute, Nf4Linear.of(name, linear.weight, linear.bias, double))
    return found


def kept_in_float(model: nn.Module) -> list[str]:
    """The stacks of experts in a model's blocks, by name: a frozen linear layer has one matrix, so these are not quantized."""
    return [name for name, module in model.named_modules() if isinstance(module, ExpertLinear) and ".blocks." in name]


def matches(name: str, targets: Sequence[str]) -> bool:
    """Whether a layer's name is like a pattern, or ends in one."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in targets)
