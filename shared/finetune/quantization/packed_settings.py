"""Chapter 10. `quantization_config` of GPTQ and AWQ folders: what it says, and which of its values are understood.

GPTQ's older files ("gptq") hold zero points minus 1, the newer ones ("gptq_v2") as they are. A key that would change the weights and is not
understood is refused by name; one that is not known at all is named in a warning.
"""

import warnings

from typing import Any

from shared.finetune.quantization.rounding import Rounding

KEYS = {"gptq": ("qweight", "qzeros", "scales", "g_idx"), "awq": ("qweight", "qzeros", "scales")}
GPTQ_KEYS = (  # what else a file may say, with the values that are understood
    ("lm_head", (False, None)), ("checkpoint_format", ("gptq", "gptq_v2", None)), ("dynamic", (None, {})),
    ("is_marlin_format", (False, None)), ("pack_dtype", ("int32", None)), ("adapter", (None,)),
)  # fmt: skip
AWQ_KEYS = ("version", ("gemm", None)), ("format", ("gemm", None)), ("checkpoint_format", ("gemm", None))
READ = ("quant_method", "bits", "group_size", "sym", "zero_point", "format", "modules_to_not_convert")
UNUSED = (  # how the codes were found, which the tensors show (order of columns), and what runs them elsewhere
    "tokenizer", "dataset", "damp_percent", "damp_auto_increment", "desc_act", "act_group_aware", "static_groups", "true_sequential", "mse",
    "meta", "quantizer", "backend", "model_seqlen", "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs",
    "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "model_name_or_path",
    "model_file_base_name", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "do_fuse", "fuse_max_seq_len",
    "modules_to_fuse", "version", "offload_to_disk", "offload_to_disk_path", "pack_impl", "fail_safe",
)  # fmt: skip


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
    if gptq and settings.get("checkpoint_format") is None and settings.get("format") is not None:  # gptqmodel's key of earlier releases
        settings = settings | {"checkpoint_format": settings["format"]}
    expected = GPTQ_KEYS if gptq else AWQ_KEYS
    known = {*READ, *UNUSED, *(key for key, _ in expected)}
    if strange := sorted(key for key, value in settings.items() if key not in known and value is not None):
        what = f"quantization_config has {', '.join(strange)}, which is not known here, and the folder is read without."
        warnings.warn(what, stacklevel=2)
    for key, understood in (*expected, ("modules_to_not_convert", (None, [], ["lm_head"]))):
        if settings.get(key) not in understood:
            raise ValueError(f"{key} is {settings[key]!r} in quantization_config, which is not understood here: only {understood[0]!r} is.")
    symmetric = settings.get("sym", True) if gptq else not settings.get("zero_point", True)
    return settings, Rounding(bits, None if group == -1 else group, symmetric)


def zero_offset(settings: dict[str, Any]) -> int:
    """What is subtracted from zero points before they are packed."""
    return int(settings["quant_method"] == "gptq" and settings.get("checkpoint_format") != "gptq_v2")
