"""Chapter 10. Frozen quantized linear layers, under any layout: what QLoRA's base is made of, and its files, read slice by slice.

    forward     y = x W^T       W is dequantized for the product, in the dtype of x, and then freed
    backward    dx = dy W       W is dequantized again

Autograd would keep a dequantized matrix for the backward pass, and with it all that four bits save; so the product is a function of its
own, which keeps what is stored. Only x gets a gradient. What is stored are parameters without a gradient: engines that shard weights cut
and gather parameters, and leave buffers alone.

Of a folder whose layers are quantized already, each rank reads the codes and scales that it holds; nothing is dequantized on the way.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.model.context import to_compute_dtype
from shared.model.hf.files import PretrainedError, TensorFolder
from shared.model.hf.format import only
from shared.model.hf.pretrained import names_in_files, open_pretrained, read_folder
from shared.model.sharding import Range, cut_parameter
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator

AT_ONCE = 2**22  # numbers that are dequantized at a time: a whole weight is never in memory in float32


class FrozenProduct(torch.autograd.Function):
    """x W^T, where dequantize(dtype, *stored) makes W [out, in]. x may have any leading dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dequantize: Callable[..., Tensor], *stored: Tensor) -> Tensor:
        ctx.dequantize = dequantize
        ctx.save_for_backward(*stored)
        return F.linear(x, dequantize(x.dtype, *stored))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        stored = ctx.saved_tensors  # read once: under activation checkpointing a second read fails
        return upstream @ ctx.dequantize(upstream.dtype, *stored), None, *(None for _ in stored)


class FrozenLinear(nn.Module):
    """A linear layer whose weight [out, in] is stored in another form and never trained. A format says what it stores, and what of that
    belongs to a slice of the weight.

    Args:
        out_features, in_features: of the whole weight.
        bias: frozen here; None for a layer without.

    Attributes:
        combine: what adds up the ranks' products where the weight is cut by input features; None where it is not. What is added to the
            product (LoRA) is added before that, the bias after it.
        cuts: how the weight is cut: the dimension (-2: output features, -1: input features), every rank's range, and the ranks.
        offsets: where this rank's slice begins in the whole weight: (row, column).
        copies: the ranks that hold a copy of this rank's slice; None where tensor parallelism makes none.
        unit: the weight can be cut by input features at multiples of this.
        stored: the names of the parameters that the weight is made of. Those of `per_column` have a column for so many of the weight's,
            and are cut with it; the others are whole on every rank.
    """

    knows_tensor_parallelism = needs_course_backend = True
    unit = 1
    stored: tuple[str, ...]
    per_column: dict[str, int]

    def __init__(self, out_features: int, in_features: int, bias: nn.Parameter | None):
        super().__init__()
        self.weight_shape = self.out_features, self.in_features = out_features, in_features
        self.register_parameter("bias", None if bias is None else bias.requires_grad_(False))
        self.combine: Callable[[Tensor], Tensor] | None = None
        self.cuts: list[tuple[int, Sequence[Range], Communicator]] = []
        self.offsets = (0, 0)
        self.copies: Communicator | None = None

    def dequantize(self, dtype: torch.dtype, *stored: Tensor) -> Tensor:
        """The weight, or this rank's slice of it, in `dtype`: of what is stored, in the order of the names."""
        raise NotImplementedError(f"{type(self).__name__} must define dequantize(dtype, *stored).")

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, or this rank's slice of it, without gradient: what adapters are merged into."""
        return self.dequantize(dtype, *(getattr(self, name).detach() for name in self.stored))

    def base_product(self, x: Tensor) -> Tensor:
        """x W^T with what this rank has of W, without `combine` and bias: [..., in] -> [..., out]."""
        return FrozenProduct.apply(to_compute_dtype(x), self.dequantize, *(getattr(self, name) for name in self.stored))

    def finish(self, product: Tensor) -> Tensor:
        """Sum the ranks' products, and add the bias."""
        y = product if self.combine is None else self.combine(product)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.base_product(x))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenLinear":
        """Move to a device; `model.to(dtype)` leaves what is stored as it is, which rounded would stand for other weights."""
        stored = {id(getattr(self, name)) for name in self.stored}

        def apply(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return tensor.to(made.device) if id(tensor) in stored and made.dtype != tensor.dtype else made

        return super()._apply(apply, recurse)

    # Tensor parallelism (`shared.parallel.tensor.axis`).

    def cut_weight(self, dimension: int, ranges: Sequence[Range], group: Communicator) -> None:
        """Keep this rank's shard along a dimension of the weight, -2 or -1, as `cut_parameter` does."""
        by_column = dimension == -1
        if by_column and any(end % self.unit for each in ranges for end in each):
            raise SettingError(
                f"parallel.tensor_parallel {group.size} would cut {self.in_features} input features at {[end for _, end in ranges[:-1]]}, "
                f"and blocks of {self.unit} quantized weights stay whole: set tensor_parallel to 1, or leave the base unquantized."
            )
        for name, width in self.per_column.items():
            of_name = [(start // width, stop // width) for start, stop in ranges] if by_column else ranges
            cut_parameter(self, name, int(by_column), of_name, group)
        start, _ = ranges[group.rank]
        self.offsets = (self.offsets[0], start) if by_column else (start, self.offsets[1])
        self.cuts.append((dimension, ranges, group))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class FrozenFolder(TensorFolder):
    """The tensors of a folder with quantized layers: a quantized weight has its own name and shape [out, in], its stored tensors are not
    listed.

    quantized: the names of these weights.
    """

    settings = ("quantization_config",)
    quantized: Collection[str] = ()

    def layer(self, name: str, bias: nn.Parameter | None) -> FrozenLinear:
        """The frozen layer of a weight on the meta device, whose parameters have functions `stored` that read slices of theirs."""
        raise NotImplementedError(f"{type(self).__name__} must define layer(name, bias).")


def open_frozen(files: FrozenFolder, dtype: torch.dtype = torch.float32) -> TransformerModel:
    """Open a folder with quantized layers as a model on the meta device, as `open_pretrained` opens others. `materialize` reads it
    whole, and `apply_parallel` what each rank holds.

    Args:
        files: of the folder.
        dtype: of what is not quantized.
    """
    return with_frozen_layers(open_pretrained(files.folder, dtype=dtype, files=files), files)


def with_frozen_layers(model: TransformerModel, files: FrozenFolder) -> TransformerModel:
    """Replace linear layers of a model on the meta device that are quantized in its files by frozen ones, in place."""
    known, config, _ = read_folder(files.folder, files.settings)
    stored = known.tensors_of(model.config, files.shapes)
    for name, full in names_in_files(known, stored, files, config).items():
        if name not in files.quantized:
            continue
        module, _, attribute = stored[full].ours[0].rpartition(".")
        linear, (parent, _, own) = model.get_submodule(module), module.rpartition(".")
        if type(linear) is not nn.Linear or attribute != "weight" or stored[full].pack is not only or len(stored[full].ours) > 1:
            raise PretrainedError(
                f"{files.folder}: {name} is quantized and is not the weight of one linear layer as it is: load a model of LLaMA's family."
            )
        setattr(model.get_submodule(parent), own, files.layer(name, linear.bias))
    return model
