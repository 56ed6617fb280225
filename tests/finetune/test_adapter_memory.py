"""Memory of adapters over a frozen base: formulas against what ranks hold, and the tables of MEMORY.md."""

from dataclasses import replace
from pathlib import Path

import pytest
from adapter_memory import (
    BASES,
    CARD,
    EVERY,
    LONG,
    PEAKS,
    PUBLISHED,
    SMALL,
    STEP,
    WAYS,
    WIDER,
    by_kind,
    fits_table,
    kinds_table,
    peak_of_step,
    predicted,
)
from memory_table import ADAMW

from shared.course.paths import CHECKOUT
from shared.finetune.config import AdapterConfig
from shared.finetune.memory_costs import NF4_BITS, FrozenBase, estimate_adapted
from shared.model.counting import parameter_counts
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.planning.memory import StepSizes
from shared.trainer.config import DataConfig, TrainerConfig
from shared.trainer.planner.memory import memory_needed

WITHIN = 0.05


def page() -> str:
    return (CHECKOUT / "chapters" / "10_finetuning" / "MEMORY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("word", "name", "precision", "how", "targets"),
    [
        ("one", "QLoRA", "float32", "none", EVERY), ("one", "QLoRA", "bfloat16", "full", ("q_proj", "v_proj")),
        ("one", "LoRA, float32", "bfloat16", "none", ("q_proj", "down_proj")), ("tp2", "QLoRA", "bfloat16", "none", EVERY),
        ("tp2_sp", "QLoRA", "float32", "full", ("q_proj", "o_proj")),
        ("fsdp2", "LoRA, bfloat16", "bfloat16", "none", ("v_proj", "up_proj")),
        ("dp2_zero1", "QLoRA", "bfloat16", "none", ("q_proj", "v_proj")),
    ],
)  # fmt: skip
def test_each_rank_holds_what_is_predicted(word, name, precision, how, targets):
    for kind, (expected, measured) in by_kind(word, FrozenBase(4, targets, BASES[name]), precision, how=how).items():
        assert abs(measured - expected) <= WITHIN * expected, f"{kind}: {measured} bytes measured, {expected:.0f} predicted"


@pytest.mark.slow
def test_the_table_of_what_ranks_hold_is_on_the_page():
    assert "\n".join(kinds_table()) in page()


def test_the_table_of_what_fits_is_on_the_page():
    assert "\n".join(fits_table()) in page()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("name", [name for name in WAYS if name != "full fine-tuning"])
def test_the_peak_of_a_step_is_what_the_formula_says_but_for_short_lived_buffers(name, how):
    base, layout = WAYS[name], ParallelConfig(activation_checkpointing=how)
    assert abs(peak_of_step(base, PEAKS, how=how) / predicted(base, PEAKS, WIDER, layout).total - 1) < 0.07


def test_four_bits_take_less_at_the_peak_than_a_float_base_and_that_less_than_full_fine_tuning():
    step, shallow = StepSizes(1, 32, 1, "bfloat16"), replace(SMALL, num_hidden_layers=2, vocab_size=64)
    peaks = [peak_of_step(base, step, shallow, "full") for name, base in WAYS.items() if name != "LoRA, bfloat16"]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.25 * peaks[0]


def test_published_shapes_have_the_weights_that_their_names_say():
    for name, model in PUBLISHED.items():
        said = float(name.rpartition("-")[2].removesuffix("B"))
        assert abs(sum(parameter_counts(model).values()) / 1e9 / said - 1) < 0.25


def test_what_does_not_fit_on_two_cards_may_with_shorter_rows():
    layout = replace(parse_layout("tp2_sp"), activation_checkpointing="full")
    model, base = PUBLISHED["Llama-2-70B"], WAYS["QLoRA"]
    needs = {seq: estimate_adapted(model, layout, ADAMW, replace(LONG, seq=seq), base).total for seq in (512, 2048)}
    assert needs[512] < 0.9 * CARD < needs[2048]
    assert f"With rows of 512 tokens it is {needs[512] / 1e9:.1f} GB" in page()


def test_layouts_without_a_formula_are_refused():
    base = FrozenBase(4, EVERY, NF4_BITS[True])
    for layout in (parse_layout("pp2"), parse_layout("cp2"), ParallelConfig(activation_checkpointing="selective")):
        with pytest.raises(ValueError, match="There is no formula for adapters"):
            estimate_adapted(SMALL, layout, ADAMW, LONG, base)


# What a run asks for before it begins.


def run_of(model: MixtureModelConfig, adapter: AdapterConfig, **layout) -> TrainerConfig:
    data = DataConfig(seq=STEP.seq, batch_size=STEP.rows, micro_batch_size=STEP.rows)
    settings = {"mode": "sft", "start_from": Path("base"), "precision": "float32", "optimizer": ADAMW}
    return TrainerConfig(model=model, adapter=adapter, parallel=ParallelConfig(**layout), data=data, **settings)


@pytest.mark.parametrize("kept", ["float", "nf4"])
@pytest.mark.parametrize("targets", [("all-linear",), ("*.q_proj", "down_*")])
def test_a_run_is_estimated_at_what_a_step_holds(kept, targets):
    config = run_of(MixtureModelConfig(**vars(SMALL)), AdapterConfig(rank=4, targets=targets, base=kept))
    named = EVERY if targets == ("all-linear",) else ("q_proj", "down_proj")
    peak = peak_of_step(FrozenBase(4, named, BASES["QLoRA"] if kept == "nf4" else 32), STEP, SMALL)
    assert abs(memory_needed(config) / peak - 1) < WITHIN


@pytest.mark.parametrize("layout", [{"pipeline_parallel": 2}, {"context_parallel": 2}, {"activation_checkpointing": "selective"}])
@pytest.mark.parametrize("bits", ["float", "nf4"])
def test_only_the_weights_count_where_there_is_no_formula(layout, bits):
    config = run_of(MixtureModelConfig(**vars(SMALL)), AdapterConfig(rank=4, targets=("all-linear",), base=bits), **layout)
    share = 2 if "pipeline_parallel" in layout else 1
    weights = sum(parameter_counts(SMALL).values()) * (NF4_BITS[True] if bits == "nf4" else 32) / 8 / share
    assert memory_needed(config) == weights + STEP.rows * STEP.seq * 16


def test_only_the_weights_count_over_experts():
    model = MixtureModelConfig(**vars(SMALL) | {"experts": MixtureConfig(num_experts=4, moe_intermediate_size=64)})
    config = run_of(model, AdapterConfig(rank=4, targets=("q_proj",)))
    assert memory_needed(config) == 4 * sum(parameter_counts(model).values()) + STEP.rows * STEP.seq * 16
