"""LoRA over a base whose layers are rounded, or quantized by GPTQ or AWQ: on ranks as in one process, and as over the dequantized base."""

from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from frozen_runs import SMALL, as_linear, quantized, require_same, train
from tensor_runs import batches

from shared.course.errors import SettingError
from shared.finetune.adapters import attach_adapter
from shared.finetune.config import AdapterConfig
from shared.finetune.memory_costs import packed_bits
from shared.finetune.quantization.awq import AWQ
from shared.finetune.quantization.frozen import FrozenLinear, open_frozen
from shared.finetune.quantization.gptq import GPTQ
from shared.finetune.quantization.methods import quantize_model
from shared.finetune.quantization.packed import QuantizedLinear
from shared.finetune.quantization.packed_files import PackedFolder, load_quantized, save_quantized
from shared.finetune.quantization.rounding import Rounding
from shared.model.transformer import TransformerModel
from shared.parallel.comm.threads import run_threads
from shared.trainer.planner.memory import base_bits

METHODS = {
    "rounded": Rounding(8, 64),
    "gptq": GPTQ(Rounding(3, 32, symmetric=False)),
    "awq": AWQ(Rounding(4, 64, symmetric=False)),
}
LORA = AdapterConfig(rank=4, targets=("all-linear",))


@cache
def base_of(method: str) -> dict[str, QuantizedLinear]:
    """A small model's layers, quantized once: every rank's base is the same."""
    model = TransformerModel(SMALL, seed=0)
    ids = torch.randint(31, (2, 20), generator=torch.Generator().manual_seed(0))
    list(quantize_model(model, [{"input_ids": ids}], METHODS[method]))
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def adapted(model: TransformerModel, method: str, plain: bool) -> TransformerModel:
    """The model with these layers, or with plain ones that hold their dequantized weights, and adapters in the model's dtype."""
    dtype = model.embedding.tokens.weight.dtype
    for name, layer in base_of(method).items():
        bias = model.get_submodule(name).bias
        copy = QuantizedLinear.of(layer.quantized_weight(), bias, layer.rounding)
        model.set_submodule(name, as_linear(copy, dtype) if plain else copy)
    return attach_adapter(model, LORA).to(dtype)


@cache
def alone(method: str):
    """Three steps in one process over plain linear layers."""
    return train("one", partial(adapted, method=method, plain=True), batches=batches)[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["one", "tp2", "fsdp2"])
def test_adapters_train_as_over_the_dequantized_base_in_one_process(layout, method):
    require_same(train(layout, partial(adapted, method=method, plain=False), batches=batches), alone(method))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Method -> the folder of the quantized model, whose other weights are the runs' own."""
    made = {}
    for method in METHODS:
        made[method] = tmp_path_factory.mktemp(method)

        def save(model: TransformerModel, method: str = method) -> TransformerModel:
            for name, layer in base_of(method).items():
                model.set_submodule(name, QuantizedLinear.of(layer.quantized_weight(), model.get_submodule(name).bias, layer.rounding))
            save_quantized(model, made[method], layout="awq" if method == "awq" else "gptq")
            return attach_adapter(model, LORA)

        train("one", save, batches=batches)
    return made


def opened(model: TransformerModel, folder) -> TransformerModel:
    """On the meta device: each rank reads what it holds."""
    return attach_adapter(open_frozen(PackedFolder(folder), model.embedding.tokens.weight.dtype), LORA)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["one", "tp2", "fsdp2", "dp2_zero1", pytest.param("tp2_fsdp2", marks=pytest.mark.slow)])
def test_ranks_read_their_slices_of_a_folder_and_train_as_over_the_dequantized_base(layout, method, folders):
    found = train(layout, partial(opened, folder=folders[method]), batches=batches)
    require_same(found, alone(method))
    assert all(gradient.any() for name, gradient in found[0].gradients[1].items() if gradient is not None and "lora_" in name)


@pytest.mark.parametrize("method", METHODS)
def test_a_slice_may_begin_and_end_within_a_word_of_the_file(method, folders):
    """A word of 32 bits holds several outputs; a rank's first one may be any of them."""
    files = PackedFolder(folders[method])
    name = next(name for name in sorted(files.quantized) if name.endswith("up_proj.weight"))
    out, layer = files.shapes[name][0], files.layer(name, None)
    for kind in layer.stored:
        parameter = getattr(layer, kind)
        whole = parameter.stored((0,) * parameter.dim(), parameter.shape)
        for first, last in ((5, out), (out // 2 - 3, out // 2 + 2), (0, 1)):
            rows = parameter.stored((first, *(0,) * (parameter.dim() - 1)), (last - first, *parameter.shape[1:]))
            torch.testing.assert_close(rows, whole[first:last], rtol=0, atol=0)


def test_the_planner_takes_a_bases_bits_from_its_folder(folders):
    def bits(base, folder=None):
        return base_bits(SimpleNamespace(adapter=AdapterConfig(rank=4, targets=("all-linear",), base=base), start_from=folder))

    assert [bits("packed", folders[method]) for method in METHODS] == [8 + 24 / 64, 3 + 24 / 32, 4 + 24 / 64]
    assert bits("packed") == packed_bits(Rounding().bits, Rounding().group) and bits("float") == 32


def test_a_whole_row_with_one_scale_is_not_cut_between_ranks():
    base = QuantizedLinear(128, 128, None, Rounding(8, None))
    with pytest.raises(SettingError, match="would cut 128 input features at .64., and blocks of 128 quantized weights stay whole"):
        run_threads(lambda world: base.cut_weight(-1, [(0, 64), (64, 128)], world), 2)
    grouped = QuantizedLinear(64, 256, None, Rounding(4, 64))
    with pytest.raises(SettingError, match="would cut 256 input features at .128, 160., and blocks of 64"):
        run_threads(lambda world: grouped.cut_weight(-1, [(0, 128), (128, 160), (160, 256)], world), 3)


def loaded(model: TransformerModel, folder) -> TransformerModel:
    return attach_adapter(load_quantized(folder), LORA)


@pytest.mark.parametrize("kind", ["awq", "files", "nf4"])
def test_what_is_stored_is_gathered_in_its_own_dtype_where_products_are_in_16_bits(kind, tmp_path):
    prepare = quantized if kind == "nf4" else partial(adapted, method="awq", plain=False)
    if kind == "files":
        save_quantized(prepare(TransformerModel(SMALL)), tmp_path, layout="awq")
        prepare = partial(loaded, folder=tmp_path)
    seen = []

    def watched(model: TransformerModel) -> TransformerModel:
        model = prepare(model)
        for layer in (module for module in model.modules() if isinstance(module, FrozenLinear)):
            own = tuple(getattr(layer, name).dtype for name in layer.stored)
            layer.dequantize = partial(watch, layer.dequantize, own)
        return model

    def watch(dequantize, own, dtype, *stored):
        seen.append((own, tuple(tensor.dtype for tensor in stored)))
        return dequantize(dtype, *stored)

    train("fsdp2", watched, batches=batches, computed_in=torch.bfloat16)
    assert seen and all(own == gathered for own, gathered in seen)
