"""The planner: hand-computed cases, FLOPs beside torch's counter, and what other chapters' simulations say of the shipped layouts."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shared.course.errors import SettingError
from shared.course.paths import CHECKOUT
from shared.finetune.config import AdapterConfig
from shared.loss import next_token_objective
from shared.model.counting import parameter_counts
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.optim.config import OptimizerConfig
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.planning.activations import whole_of
from shared.parallel.planning.costs import Link
from shared.trainer.config import DataConfig, TrainerConfig
from shared.trainer.models import with_adapter
from shared.trainer.planner.flops import Trained, muon_flops, part_flops
from shared.trainer.planner.hardware import DEVICES, Hardware, parse_hardware
from shared.trainer.planner.plan import Parameters, plan_run, trained_of
from shared.trainer.settings import parse_words

FOLDER = CHECKOUT / "chapters" / "12_grpo"
SMALL = MixtureModelConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192,
    max_position_embeddings=128,
).resolved()  # fmt: skip


def config_of(layout: str = "one", model: MixtureModelConfig = SMALL, **more) -> TrainerConfig:
    settings = {
        "model": model, "parallel": parse_layout(layout), "data": DataConfig(seq=64, batch_size=16, micro_batch_size=2),
        "optimizer": OptimizerConfig("adamw", lr=1e-3), "precision": "bfloat16", "steps": 1000,
    }  # fmt: skip
    return TrainerConfig(**settings | more)


def counted_flops(model: torch.nn.Module, rows: int, seq: int) -> int:
    ids = torch.randint(SMALL.vocab_size, (rows, seq))
    with FlopCounterMode(display=False) as counter:
        next_token_objective(model, {"input_ids": ids, "targets": ids}).loss_sum.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("targets", [(), ("all-linear",), ("q_proj", "v_proj"), ("k_proj",), ("o_proj", "gate_proj"), ("down_proj",)])
def test_flops_are_what_torch_counts(targets):
    """Of a model that is trained whole, and of one with low-rank updates over a frozen base."""
    model, trained = TransformerModel(replace(SMALL, attention="eager"), MIXTURE), Trained()  # whose operations are counted
    if targets:
        adapter = AdapterConfig(rank=4, targets=targets)
        model = with_adapter(model, adapter, seed=0)
        trained = trained_of(config_of(mode="sft", start_from=Path("base"), adapter=adapter))
    predicted = part_flops(SMALL, whole_of(SMALL), 32, trained, recompute=False)
    assert counted_flops(model, 2, 32) == 2 * 32 * predicted.needed


@pytest.mark.parametrize("experts", [None, MixtureConfig(num_experts=4, moe_intermediate_size=48)])
def test_muons_flops_are_those_of_every_matrix_of_the_blocks(experts):
    """An expert's matrix in a stack counts as one; the router's is AdamW's."""
    config = replace(SMALL, experts=experts)
    model, wanted = TransformerModel(config, MIXTURE), 0
    for name, weight in model.stack.blocks.named_parameters():
        if weight.dim() > 1 and "router" not in name:
            short, long = sorted(weight.shape[-2:])
            wanted += math.prod(weight.shape[:-2]) * 5 * (4 * short**2 * long + 2 * short**3)
    assert muon_flops(config, whole_of(config), 5) == wanted


def test_one_card_by_hand():
    """Products at 0.4 of 71 TFLOP/s; AdamW reads weights, gradients (twice) and two means, and writes weights and means."""
    plan = plan_run(config_of(), parse_hardware("3090"))
    numbers = sum(parameter_counts(SMALL).values())
    matrices = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192) + 64 * 512
    flops = 6 * matrices + 12 * 3 * 64 * 64
    assert plan.parameters == Parameters(numbers, numbers, numbers)
    assert plan.tokens == 16 * 64 and plan.flops == flops * 1024
    assert plan.seconds.products == pytest.approx(flops * 1024 / (0.4 * 71e12))
    assert plan.seconds.optimizer == pytest.approx(32 * numbers / 936e9)
    assert plan.seconds.bubble == plan.seconds.exchange == 0 and plan.traffic == ((),)
    assert plan.hours == pytest.approx(1000 * plan.seconds.total / 3600)
    assert plan.mfu == pytest.approx(0.4 * plan.seconds.products / plan.seconds.total)
    held = plan.held
    assert (held.weights, held.gradients, held.optimizer) == (4 * numbers, 4 * numbers, 8 * numbers) and held.batch == 16 * 64 * 16


def test_a_pipelines_bubble_is_the_known_fraction_where_messages_take_no_time():
    """(p - 1) / m of the work, of GPipe and 1F1B with equal stages (Narayanan et al. 2021, section 2.2)."""
    device = replace(DEVICES["H100"], link=Link(0.0, 1e30))
    layout = {"pipeline_parallel": 4, "pipeline_layers": (1, 1, 1, 1)}
    model = replace(SMALL, num_hidden_layers=4, vocab_size=1, layer_types=None)
    for schedule in ("gpipe", "1f1b"):
        for micro in (2, 8):
            data = DataConfig(seq=64, batch_size=64, micro_batch_size=micro)
            config = config_of(model=model, parallel=ParallelConfig(pipeline_schedule=schedule, **layout), data=data)
            seconds = plan_run(config, Hardware("4xH100", device, 1, 4)).seconds
            assert seconds.bubble == pytest.approx(3 / (64 / micro) * seconds.products, rel=0.01)  # the head of one token is the rest


def test_recomputed_blocks_cost_a_forward_pass_and_no_utilisation_of_their_own():
    plain, again = (
        plan_run(config_of(parallel=ParallelConfig(activation_checkpointing=how)), parse_hardware("3090")) for how in ("none", "full")
    )
    assert again.flops == plain.flops and again.mfu < plain.mfu and again.held.activations < plain.held.activations
    head = 6 * 512 * 64 * plain.tokens
    assert again.seconds.again == pytest.approx((plain.flops - head) / 3 / (0.4 * 71e12))


def test_what_travels_beside_products_costs_what_is_longer_than_these():
    words = {"model": replace(SMALL, hidden_size=512, head_dim=64, num_attention_heads=8, intermediate_size=2048)}
    fast, slow = (plan_run(config_of("dp2", **words), parse_hardware(f"2x{name}")).seconds for name in ("3090-nvlink", "3090"))
    assert slow.exchange + slow.hidden > fast.exchange + fast.hidden
    assert slow.exchange > fast.exchange > 0 and slow.products == fast.products


def test_links_within_a_machine_and_between_machines():
    hardware = parse_hardware("2x8xH100")
    assert (hardware.machines, hardware.cards, hardware.ranks) == (2, 8, 16)
    assert hardware.link(1, 8).bandwidth == 450e9 and hardware.link(2, 4).bandwidth == 450e9
    assert hardware.link(8, 2).bandwidth == 50e9  # each card's ring has one of a machine's eight links
    assert hardware.link(1, 16).bandwidth == 400e9  # a ring through all cards has all of them


@pytest.mark.parametrize("word", ["2x3080", "0x3090", "H1000", "x", "3x"])
def test_hardware_that_is_not_in_the_table_is_refused(word):
    with pytest.raises(SettingError, match="There is no hardware '" + word):
        parse_hardware(word)


def test_more_ranks_than_cards_are_refused():
    with pytest.raises(SettingError, match="The layout has 4 ranks and 2x3090 has 2 cards"):
        plan_run(config_of("dp4"), parse_hardware("2x3090"))


shipped = partial(parse_words, TrainerConfig)


def test_two_3090s_take_what_the_file_says():
    """And the layouts compare as chapters 07 and 08 have simulated them: TP2 loses over PCIe, PP2 loses a tenth."""
    config = shipped([str(FOLDER / "two_3090s.yaml")])
    config = replace(config, model=replace(config.model, vocab_size=config.data.prepare.vocab_size))
    plans = {
        word: plan_run(replace(config, parallel=parse_layout(word, config.parallel)), parse_hardware("2x3090"))
        for word in ("dp2", "fsdp2", "tp2_sp", "pp2")
    }
    assert 8.5e9 < plans["dp2"].held.peak < 9.5e9 and 8.5 < plans["dp2"].hours < 10 and all(plan.fits for plan in plans.values())
    products = plans["dp2"].seconds.products
    assert plans["tp2_sp"].seconds.total / products == pytest.approx(1.9, abs=0.1)
    assert plans["pp2"].seconds.products + plans["pp2"].seconds.bubble == pytest.approx(1.10 * products, rel=0.02)
