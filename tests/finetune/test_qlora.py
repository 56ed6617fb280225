"""QLoRA: adapters over a base in four bits, on every layout, against plain layers, and against bitsandbytes and peft."""

from functools import cache, partial

import pytest
import torch
from frozen_runs import SMALL, quantized, require_same, train, with_plain_base
from tensor_runs import batches

from shared.finetune.adapters import attach_adapter
from shared.finetune.config import AdapterConfig
from shared.finetune.quantization.nf4_linear import quantize_base
from shared.model.transformer import TransformerModel
from shared.optim.config import OptimizerConfig

QLORA = AdapterConfig(rank=4, targets=("all-linear",), base="nf4")
LAYOUTS = ["one", "tp2", "fsdp2", "dp2_zero1", "tp2_fsdp2"]
SLOW = ["tp2_sp", "pp2", "tp2_pp2", "dp2_zero2"]


def adapted(prepare, model: TransformerModel, config: AdapterConfig = QLORA) -> TransformerModel:
    """With adapters in the model's dtype; over codes they are float32."""
    return attach_adapter(prepare(model), config).to(model.embedding.tokens.weight.dtype)


@cache
def alone(config: AdapterConfig = QLORA):
    """Three steps in one process, with adapters on plain linear layers that hold the dequantized base."""
    return train("one", partial(adapted, with_plain_base, config=config), batches=batches)[0]


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_adapters_over_four_bits_train_as_over_the_dequantized_base_in_one_process(layout):
    require_same(train(layout, partial(adapted, quantized), batches=batches), alone())


def test_every_adapter_moves_and_nothing_else_is_trained():
    found = train("tp2_fsdp2", partial(adapted, quantized), batches=batches)
    for rank in found:
        first = rank.gradients[0]
        trained = {name for name, gradient in first.items() if gradient is not None}
        assert trained and all(name.rpartition(".")[2] in ("lora_A", "lora_B") for name in trained)
        assert all(not rank.gradients[0][name].any() for name in trained if name.endswith("lora_A"))  # B is zero in the first step
        assert all(rank.gradients[1][name].any() for name in trained if name.endswith("lora_A"))
        assert all(rank.weights[name].any() for name in trained if name.endswith("lora_B"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_doras_norms_are_those_of_the_dequantized_base(layout):
    config = AdapterConfig(rank=4, targets=("q_proj", "o_proj", "down_proj"), base="nf4", decomposed=True)
    prepare = partial(adapted, quantized, config=config)  # its first magnitudes are float32 norms
    one = train("one", prepare, batches=batches)[0]
    require_same([one], alone(config), 1e-6)
    require_same(train(layout, prepare, batches=batches), one)


def test_the_same_in_16_bits_within_their_rounding():
    """Under autocast every product rounds; the plain layers round their weights in another place, to the same numbers."""
    ids = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for prepare in (quantized, with_plain_base):
        model = adapted(prepare, TransformerModel(SMALL))
        randomize(model)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        logits.float().square().mean().backward()
        results.append((logits, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    (logits, mine), (expected, theirs) = results
    assert logits.equal(expected)
    assert all((mine[name] - theirs[name]).norm() < 0.02 * theirs[name].norm() for name in theirs)


def randomize(model: TransformerModel) -> None:
    """Give every B values, without which A has no gradient."""
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))


# Against bitsandbytes and peft.


def their_model(folder):
    """transformers' model of a folder, with bitsandbytes' four-bit layers, and peft's adapters with values."""
    import bitsandbytes
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            four = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, module.bias is not None, torch.float32, compress_statistics=False, quant_type="nf4"
            )
            four.weight = bitsandbytes.nn.Params4bit(module.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4")
            four.bias = module.bias
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, four.to("cpu"))
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", exclude_modules=["lm_head"])
    return peft.get_peft_model(model, config)


THEIR_NAMES = {"attention": "self_attn", "feed_forward": "mlp"}


def copied_from(model: TransformerModel, theirs) -> dict:
    """Copy peft's factors; our names to their parameters."""
    their_parameters, pairs = dict(theirs.named_parameters()), {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _, _, layer, sublayer, linear, _, _, factor = name.split(".")
            full = f"base_model.model.model.layers.{layer}.{THEIR_NAMES[sublayer]}.{linear}.{factor}.default.weight"
            parameter.data.copy_(their_parameters[full].data)
            pairs[name] = their_parameters[full]
    return pairs


def test_logits_and_gradients_are_those_of_bitsandbytes_and_peft(tmp_path):
    from shared.model.hf.pretrained import load_pretrained, save_pretrained

    save_pretrained(TransformerModel(SMALL, seed=1), tmp_path, model_type="qwen2")
    theirs = their_model(tmp_path)
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model = load_pretrained(tmp_path)
    quantize_base(model, double=False)
    attach_adapter(model, QLORA)
    pairs = copied_from(model, theirs)
    ids = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(0))
    mine, expected = model(ids), theirs(ids).logits
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)
    for logits in (mine, expected):
        logits.log_softmax(-1)[..., 3].mean().backward()
    assert len(pairs) == 28
    for name, parameter in model.named_parameters():
        if name in pairs:
            length = pairs[name].grad.norm()
            assert length > 0 and (parameter.grad - pairs[name].grad).norm() < 1e-5 * length, name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_over_four_bits_changes_no_gradient(recompute):
    """Selective recomputation gives back what was saved a single time."""
    layout = {"activation_checkpointing": recompute}
    require_same(train("one", partial(adapted, quantized), batches=batches, how=layout), alone())


def test_what_is_trained_is_all_that_the_optimizer_has():
    from shared.optim.routing import route

    model = adapted(quantized, TransformerModel(SMALL))
    routes = route(model, OptimizerConfig().name, no_decay=[], to_adamw=[])
    assert sorted(name for each in routes for name in each.names) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert all(".lora_" in name for each in routes for name in each.names)


@pytest.mark.slow
def test_three_merges_are_three_models_and_the_page_has_their_distances():
    import qlora_merges

    from shared.course.paths import CHECKOUT

    found = {name: far for name, (far, _) in qlora_merges.distances().items()}
    assert found["onto the dequantized base"] < 1e-5
    assert 0.01 < found["onto the float base"] < found["the float base"]
    assert 0.01 < found["quantized again"] < found["the float base"]
    page = (CHECKOUT / "chapters" / "10_finetuning" / "QLORA.md").read_text(encoding="utf-8")
    assert f"| onto the float base | {found['onto the float base']:.1e} |" in page
