"""Floor 9: what ranks exchange for experts in a step is what the formulas say, to the call and to the byte, however uneven the load is."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from expert_cost_table import MODELS, by_rank, counted, measured_imbalance, memory_and_exchanges, time_table
from memory_table import ADAMW, ROWS

from shared.course.paths import CHECKOUT
from shared.engine.metrics.flops import model_flops_per_token
from shared.parallel.config import parse_layout
from shared.parallel.planning.costs import Link, total_cost
from shared.parallel.planning.expert_costs import expert_exchanges, imbalance, step_time
from shared.parallel.planning.memory import StepSizes
from shared.parallel.planning.pipeline_costs import held_parts
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.layout import predicted_traffic
from shared.trainer.settings import parse_words

BUSY = partial(pytest.param, marks=pytest.mark.slow)  # the same in more layouts
LAYOUTS = [
    ("dp4_ep2", "full", "bfloat16"), ("dp4_ep2_zero1", "none", "float32"), ("fsdp4_ep2", "none", "bfloat16"),
    ("pp2_fsdp4_ep2_keep", "none", "float32"), ("dp2_cp2_ep2", "full", "float32"), BUSY("dp2_ep2", "none", "float32"),
    BUSY("dp4_ep2_zero2", "none", "float32"), BUSY("dp2_fsdp2_ep2", "full", "float32"), BUSY("dp2_tp2_ep2", "none", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("word, recompute, precision", LAYOUTS)
def test_every_call_and_every_byte_is_predicted(word, recompute, precision):
    layout = replace(parse_layout(word.removesuffix("_keep")), reshard_after_forward=not word.endswith("_keep"))
    layout, config = replace(layout, activation_checkpointing=recompute), MODELS["deepseek"]
    step = StepSizes(ROWS, 48, 3, precision)
    for rank, found in enumerate(by_rank(config, layout, ADAMW, step)):
        part = held_parts(config, layout)[rank * layout.pipeline_parallel // layout.ranks]
        known = replace(step, imbalance=measured_imbalance(found, layout, step, config))
        expected = counted(expert_exchanges(config, layout, known, part))
        traced = {key: calls for key, calls in found.trace.calls().items() if key[1] in ("ep", "edp") or key == ("all_reduce", "cp")}
        assert traced == {key: calls for key, (calls, _) in expected.items()}, rank
        for key, (_, size) in expected.items():
            assert found.trace.bytes()[key] == pytest.approx(size, rel=1e-12), (rank, key)


def test_loads_are_uneven_where_this_is_measured():
    """The control: an equal load is another prediction."""
    layout, step = parse_layout("dp2_ep2"), StepSizes(ROWS, 48)
    found = by_rank(MODELS["deepseek"], layout, ADAMW, step)
    shares = [measured_imbalance(each, layout, step, MODELS["deepseek"]) for each in found]
    assert sum(shares) == pytest.approx(2) and max(shares) > 1.01


def test_as_many_bytes_as_tensor_parallelism_for_two_choices():
    """8 (t - 1) / t D numbers a token and layer go over a ring in tensor parallelism; 4 k (ep - 1) / ep D in an exchange of rows."""
    config, step, link = MODELS["mixtral"], StepSizes(2, 64), Link(0, 1)
    rows = [each for each in expert_exchanges(config, parse_layout("dp4_ep4"), step) if each.part != "numbers of rows"]
    layers, tokens, size = 4, 2 * 64, 64
    assert total_cost(rows).seconds(link) == layers * tokens * size * 4 * 8 * 3 / 4


def test_without_expert_parallelism_nothing_is_exchanged_for_experts():
    assert expert_exchanges(MODELS["mixtral"], parse_layout("dp4"), StepSizes(1, 8)) == []
    assert expert_exchanges(replace(MODELS["mixtral"], experts=None), parse_layout("dp2"), StepSizes(1, 8)) == []
    dense_first = replace(MODELS["deepseek"], experts=replace(MODELS["deepseek"].experts, first_k_dense=3))
    one_layer = expert_exchanges(dense_first, parse_layout("dp2_ep2"), StepSizes(1, 8))
    assert [each.calls for each in one_layer] == [1] * 5, "one layer, one micro-batch, and no other rank with the same experts"


def test_the_fullest_rank_is_compared_with_the_mean():
    assert imbalance([1, 1, 1, 1], 2) == imbalance([3, 1, 4], 1) == 1
    assert imbalance([4, 0, 0, 0], 4) == 4
    assert imbalance([0, 0, 0, 0], 2) == 1, "before the first token"
    assert imbalance(torch.tensor([4, 2, 1, 1]).tolist(), 2) == 1.5


def test_an_uneven_load_costs_the_time_of_the_fullest_ranks_rows():
    """All wait for it in every layer: with twice the rows the experts' products take twice as long, and the rest as long as before."""
    config, layout, link = MODELS["mixtral"], parse_layout("dp2_ep2"), Link(0, 1e9)
    even = step_time(config, layout, StepSizes(2, 64, 3), link, 1e9)
    full = step_time(config, layout, StepSizes(2, 64, 3, imbalance=2), link, 1e9)
    tokens, of_experts = 2 * 64 * 3, 6 * 2 * 3 * 64 * 48 * 4  # two experts of three matrices in each of four layers
    assert even.products == full.products == pytest.approx(model_flops_per_token(config, 64) * tokens / 1e9)
    assert even.waiting == 0 and full.waiting == pytest.approx(of_experts * tokens / 1e9)
    assert even.exchange < full.exchange < 1.5 * even.exchange + 1e-9


def test_the_report_says_what_experts_should_send(tmp_path):
    settings = {
        "steps": 100, "data": {"seq": 64, "batch_size": 4, "micro_batch_size": 2},
        "model": {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
                  "experts": {"num_experts": 4, "moe_intermediate_size": 16}},
        "parallel": {"data_parallel": 2, "expert_parallel": 2},
    }  # fmt: skip
    (tmp_path / "ep2.yaml").write_text(yaml.safe_dump(settings))
    config = parse_words(TrainerConfig, [str(tmp_path / "ep2.yaml")])
    sent = 4 * (2 * 64 * 2 * 32 * 4) + 8 * 4  # of each layer: four exchanges of all choices' rows, and their numbers
    assert predicted_traffic(config) == {"all_to_all over ep, by formula": f"15 calls, {3 * sent / 1e6:.2f} MB"}


@pytest.mark.slow
def test_the_tables_on_the_chapters_page_are_what_the_command_prints():
    page = (CHECKOUT / "chapters" / "09_mixture_of_experts" / "MEMORY.md").read_text(encoding="utf-8")
    for table in "\n".join([*memory_and_exchanges(), "", *time_table()]).split("\n\n"):
        assert table in page
