"""The frozen linear layer in NF4: what it computes and keeps, on every layout, and made from files slice by slice."""

import copy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from frozen_runs import SMALL, as_linear, quantized, require_same, train, with_plain_base
from layout_runs import LayoutRun
from sharded_runs import ADAMW
from storage_peak import StoragePeak
from tensor_runs import batches
from torch import nn

from shared.course.errors import SettingError
from shared.finetune.quantization.nf4_linear import Nf4Linear, kept_in_float, quantize_base
from shared.model.hf.pretrained import open_pretrained, save_pretrained
from shared.model.init import materialize
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.parallel.processes.launch import run_processes
from shared.trainer.models import RUN_AXES


def linear_of(out_features: int, in_features: int, bias: bool = True, double: bool = True) -> Nf4Linear:
    torch.manual_seed(0)
    plain = nn.Linear(in_features, out_features, bias)
    return Nf4Linear.of("a_layer", plain.weight, plain.bias, double)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_computes_what_a_plain_layer_with_the_dequantized_weight_computes(dtype, double):
    frozen = linear_of(192, 128, double=double)
    x = torch.randn(3, 5, 128, dtype=dtype, requires_grad=True)
    frozen = frozen.to(dtype)
    plain = as_linear(frozen, dtype)
    upstream = torch.randn(3, 5, 192, dtype=dtype)
    y, expected = frozen(x), plain(x)
    (mine,), (theirs,) = (torch.autograd.grad(each, x, upstream) for each in (y, expected))
    # in 16 bits the bias is added after rounding
    tolerance = {"rtol": 0, "atol": {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 0.04}[dtype]}
    torch.testing.assert_close(y, expected, **tolerance)
    torch.testing.assert_close(mine, theirs, **tolerance)


def test_rounding_a_model_to_16_bits_leaves_what_is_stored_as_it_is():
    frozen = linear_of(128, 128)
    before = frozen.dequantized()
    frozen.to(torch.bfloat16)
    assert frozen.dequantized().equal(before) and frozen.bias.dtype == torch.bfloat16


def test_the_bits_of_a_weight_are_those_of_the_formula():
    def bits(frozen: Nf4Linear) -> float:
        return 8 * sum(getattr(frozen, name).nbytes for name in frozen.stored) / (frozen.in_features * frozen.out_features)

    assert bits(linear_of(512, 1024, bias=False, double=False)) == 4.5
    assert bits(linear_of(512, 1024, bias=False)) == 4 + 8 / 64 + 32 / 64 / 256 + 32 / 512 / 1024
    assert round(bits(linear_of(512, 1024, bias=False)), 3) == 4.127


def test_nothing_of_the_dequantized_weight_is_kept_for_the_backward_pass():
    frozen = linear_of(512, 512, bias=False)
    stored = sum(getattr(frozen, name).nbytes for name in frozen.stored)
    x = torch.randn(4, 512, requires_grad=True)
    with StoragePeak() as memory:
        y = frozen(x)
        kept = memory.now
        peak = memory.peak
        y.sum().backward()
    assert kept <= stored + x.nbytes + y.nbytes + 5_000  # the tables of values
    assert peak > 512 * 512 * 4 and memory.peak > 512 * 512 * 4
    assert all(getattr(frozen, name).grad is None for name in frozen.stored)


def test_embeddings_norms_and_head_stay_as_they_are_and_targets_choose_layers():
    model = TransformerModel(SMALL)
    assert len(quantize_base(copy.deepcopy(model))) == 14
    assert quantize_base(model, ["q_proj", "feed_forward.*_proj"]) == [
        f"stack.blocks.{layer}.{name}" for layer in range(2)
        for name in ("attention.q_proj", "feed_forward.up_proj", "feed_forward.down_proj", "feed_forward.gate_proj")
    ]  # fmt: skip
    assert type(model.head.linear) is nn.Linear and type(model.stack.blocks["0"].attention.k_proj) is nn.Linear


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: quantize_base(model, ["c_attn"]), "No linear layer of the model's blocks has a name like c_attn: give names"),
        (lambda model: quantize_base(model.to("meta")), "stack.blocks.0.attention.q_proj has no numbers on the meta device"),
        (lambda model: quantize_base(TransformerModel(replace(SMALL, intermediate_size=100))), "100 input features"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused_in_a_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        change(TransformerModel(SMALL))


def test_experts_stay_in_float_by_name_and_are_refused_where_nothing_else_would_be_quantized():
    config = MixtureModelConfig(**vars(SMALL) | {"experts": MixtureConfig(4, 48)})
    model = TransformerModel(config, MIXTURE)
    names = quantize_base(model)
    stacks = kept_in_float(model)
    assert names and all("attention" in name for name in names)
    assert stacks and all(".experts." in name and model.get_submodule(name).weight.dtype == torch.float32 for name in stacks)
    with pytest.raises(ValueError, match=r"Only stacks of experts match up_proj \(stack.blocks.\d.feed_forward.experts.up_proj\)"):
        quantize_base(TransformerModel(config, MIXTURE), ["up_proj"])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(number):
    model = TransformerModel(SMALL)
    with torch.no_grad():
        model.stack.blocks["1"].attention.o_proj.weight[3, 70] = number
    with pytest.raises(ValueError, match=r"stack\.blocks\.1\.attention\.o_proj holds numbers that are not finite"):
        quantize_base(model)


def test_a_cut_within_a_block_is_refused_in_a_sentence():
    with pytest.raises(SettingError, match="would cut 128 input features at .32, 64, 96., and blocks of 64 quantized weights stay whole"):
        train("tp4")


def test_pytorchs_tensor_parallelism_refuses_quantized_layers():
    with pytest.raises(SettingError, match="backend torch cannot cut the quantized weight of stack.blocks.0"):
        train("tp2", how={"backend": "torch"})


# Layouts: loss, norm, every gradient and weight of three steps, against plain layers that hold the dequantized weights, in one process.


@cache
def alone(double: bool = True):
    return train("one", partial(with_plain_base, double=double), batches=batches)[0]


LAYOUTS = ["one", "tp2", "fsdp2", "dp2_zero1", "tp2_fsdp2", "tp2_sp", "pp2"]
SLOW = ["dp2_zero2", "tp2_pp2", "dp2_fsdp2", "dp2_zero1_tp2", "cp2", "fsdp2_pp2"]


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_every_layout_trains_as_one_process_over_the_dequantized_base(layout):
    require_same(train(layout, batches=batches), alone())


@pytest.mark.parametrize("how", [{"activation_checkpointing": "full"}, {"prefetch": 0}])
def test_gathered_codes_may_be_freed_before_the_backward_pass(how):
    require_same(train("fsdp2", batches=batches, how=how), alone())


def test_without_double_quantization_tensor_parallelism_cuts_scales_as_well():
    require_same(train("tp2_fsdp2", partial(quantized, double=False), batches=batches), alone(double=False))


# From files.

DEEP = replace(SMALL, num_hidden_layers=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_pretrained(TransformerModel(DEEP, seed=3), path, model_type="qwen2")
    return path


def test_a_model_on_the_meta_device_is_quantized_as_it_is_read(folder):
    model, whole = open_pretrained(folder), TransformerModel(DEEP, seed=3)
    quantize_base(model)
    quantize_base(whole)
    materialize(model, "cpu", seed=0)
    expected = dict(whole.named_parameters())
    assert all(parameter.equal(expected[name]) for name, parameter in model.named_parameters())
    assert len(expected) == len(dict(model.named_parameters()))


@pytest.mark.parametrize("layout", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("tp2", "fsdp2")), "tp2_fsdp2"])
def test_a_rank_quantizes_what_it_holds_and_never_has_the_whole_float_model(folder, layout):
    def work(world):
        model = open_pretrained(folder)
        quantize_base(model)
        with StoragePeak() as memory:
            parallel = apply_parallel(model, Mesh(parse_layout(layout), world), axes=RUN_AXES)
        return memory.peak, {name: tensor for name, tensor in parallel.whole_weights() if tensor is not None}

    whole = TransformerModel(DEEP, seed=3)
    floats = sum(parameter.nbytes for parameter in whole.stack.parameters())
    quantize_base(whole)
    expected = dict(whole.named_parameters())
    for peak, weights in run_threads(work, parse_layout(layout).ranks):
        assert weights.keys() == expected.keys()
        assert all(tensor.equal(expected[name]) for name, tensor in weights.items())
        assert peak < 0.5 * floats


def over_torch(world):
    layout = replace(parse_layout("fsdp2"), backend="torch")
    return LayoutRun(world, layout, config=SMALL, optimizer=ADAMW, axes=RUN_AXES, prepare=quantized, batches=batches).record()


@pytest.mark.slow
def test_pytorchs_fully_shard_cuts_codes_too():
    require_same(run_processes(over_torch, 2, timeout=300), alone())
