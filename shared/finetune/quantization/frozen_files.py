"""Chapter 10. Folders whose linear layers are quantized already, as a base for adapters: read slice by slice, in any layout.

Opened, a model is on the meta device, and what its frozen layers store is read slice by slice, so each rank of a layout reads what it
holds. Nothing is dequantized on the way: codes and scales stay as the files have them.
"""

from collections.abc import Collection

import torch
from torch import nn

from shared.finetune.quantization.frozen import FrozenLinear
from shared.model.hf.files import PretrainedError, TensorFolder
from shared.model.hf.format import only
from shared.model.hf.pretrained import names_in_files, open_pretrained, read_folder
from shared.model.transformer import TransformerModel


class FrozenFolder(TensorFolder):
    """The tensors of such a folder: a quantized weight has its own name and shape [out, in], and what it is made of is not listed.

    quantized: the names of these weights.
    """

    settings = ("quantization_config",)
    quantized: Collection[str] = ()

    def layer(self, name: str, bias: nn.Parameter | None) -> FrozenLinear:
        """The frozen layer of a weight on the meta device, whose parameters have functions `stored` that read slices of theirs."""
        raise NotImplementedError(f"{type(self).__name__} must define layer(name, bias).")


def open_frozen(files: FrozenFolder, dtype: torch.dtype = torch.float32) -> TransformerModel:
    """The model in such a folder on the meta device, with its frozen layers, as `open_pretrained` opens others. `materialize` reads it
    whole, and `apply_parallel` what each rank holds.

    Args:
        files: of the folder.
        dtype: of what is not quantized.
    """
    return with_frozen_layers(open_pretrained(files.folder, dtype=dtype, files=files), files)


def with_frozen_layers(model: TransformerModel, files: FrozenFolder) -> TransformerModel:
    """A model on the meta device, opened with these files, whose linear layers that are quantized there become frozen ones, in place."""
    known, config, _ = read_folder(files.folder, files.settings)
    stored = {entry.name: entry for entry in known.tensors(model.config)}
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
