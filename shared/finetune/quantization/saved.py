"""Chapter 10. Save quantized models in the GPTQ and AWQ layouts (`quantization_config`, qweight, qzeros, scales, g_idx).

    GPTQ   qweight [in * bits / 32, out] packed along the inputs, qzeros [groups, out * bits / 32] along the outputs, g_idx [in]: groups
    AWQ    qweight [in, out / 8], qzeros [groups, out / 8]: four bits, packed along the outputs, of eight in the order 0 2 4 6 1 3 5 7

Scales are [groups, out] in both, in float16. GPTQ's older files ("gptq") hold zero points minus 1, which a zero point of 0 does not
survive; they are written where the zero point is the middle of the codes, and the newer ones ("gptq_v2") where it is not.

Left out on purpose: groups of columns that are not neighbours, which GPTQ makes with act order and without static groups.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.finetune.quantization.packed import QuantizedLinear
from shared.finetune.quantization.rounding import WORD, QuantizedWeight, Rounding, pack, unpack
from shared.model.hf.files import TokenIds, every_id, plan_files, write_generation, write_json, write_tensors
from shared.model.hf.format import FileTensor, only
from shared.model.hf.registry import write_config
from shared.model.transformer import TransformerModel

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each place of a word holds, of eight
KEYS = {"gptq": ("qweight", "qzeros", "scales", "g_idx"), "awq": ("qweight", "qzeros", "scales")}


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


def file_settings(rounding: Rounding, layout: str) -> dict[str, Any]:
    """`quantization_config`, in the words of the two tools."""
    if layout not in KEYS:
        raise ValueError(f"layout is {layout!r}: give one of {', '.join(KEYS)}.")
    if layout == "awq" and rounding.bits != 4:
        raise ValueError(f"AWQ's layout has 4 bits and these weights have {rounding.bits}: save them in GPTQ's layout.")
    common = {"quant_method": layout, "bits": rounding.bits, "group_size": rounding.group or -1}
    if layout == "awq":
        return common | {"zero_point": not rounding.symmetric, "version": "gemm"}
    version = "gptq" if rounding.symmetric else "gptq_v2"
    return common | {"sym": rounding.symmetric, "desc_act": False, "damp_percent": 0.01, "lm_head": False, "checkpoint_format": version}


def read_settings(settings: Any) -> tuple[dict[str, Any], Rounding]:
    """A file's `quantization_config`, and its bits and groups.

    Raises:
        ValueError: one that is not understood here.
    """
    if not isinstance(settings, dict) or settings.get("quant_method") not in KEYS:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise ValueError(f"quantization_config has the method {method!r}: those that are read here are {', '.join(KEYS)}.")
    bits, group = settings.get("bits"), settings.get("group_size")
    if not isinstance(bits, int) or not isinstance(group, int):
        raise ValueError(f"bits is {bits!r} and group_size {group!r} in quantization_config: both must be whole numbers.")
    gptq = settings["quant_method"] == "gptq"
    expected = (("lm_head", (False, None)), ("checkpoint_format", ("gptq", "gptq_v2", None))) if gptq else (("version", ("gemm", None)),)
    for key, understood in (*expected, ("modules_to_not_convert", (None, []))):
        if settings.get(key) not in understood:
            raise ValueError(f"{key} is {settings[key]!r} in quantization_config, which is not understood here: only {understood[0]!r} is.")
    symmetric = settings.get("sym", True) if gptq else not settings.get("zero_point", True)
    return settings, Rounding(bits, None if group == -1 else group, symmetric)


def zero_offset(settings: dict[str, Any]) -> int:
    """What is subtracted from zero points before they are packed."""
    return int(settings["quant_method"] == "gptq" and settings.get("checkpoint_format") != "gptq_v2")


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
