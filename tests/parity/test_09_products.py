"""Products of layouts: a covering set of the table in chapter 09's PARITY.md is equal to one process, every refusal is a sentence before
any work, and each planted bug is caught."""

import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from planted import RULES, caught
from products import IN_16_BITS, LIMIT, MODELS, PRECISIONS, RANKS, Cell, allowed_triples, by_processes, case_of, cells, differences
from products import expected, in_16_bits, make, on_ranks, refusal, triples, worst

from shared.parallel.comm.communicator import SingleRankCommunicator

COVERING = """
one dense none adamw
dp2_ep2 experts none adamw
dp2_ep2_zero1 experts full muon
tp2_sp experts selective muon
fsdp2_ep2 experts selective adamw
dp2_zero2 dense selective muon
cp2 dense full muon
pp2 experts full adamw
dp2_zero1 dense none muon
dp2_tp2_ep2_zero2_sp experts none adamw
dp2_tp2_zero1_sp dense full adamw
pp2_fsdp2 dense none muon
dp2_cp2_ep2_zero1 experts none adamw
fsdp2_tp2_ep2_sp experts full muon
cp2_tp2_sp dense selective adamw
pp2_dp2_ep2_zero1 experts selective muon
pp2_tp2_sp dense none muon
dp2_cp2_zero2 experts none muon
dp2_fsdp2 dense full adamw
fsdp2_cp2_ep2 experts none muon
dp2_tp2_zero2 dense full adamw
dp2_cp2_ep2_zero2 experts full adamw
dp2_tp2_ep2_zero2 experts selective muon
dp2_tp2_zero2_sp dense full muon
dp2_tp2_zero2_sp dense selective adamw
dp2_tp2_zero1 dense none adamw
dp2_cp2_zero2 dense selective adamw
pp2_cp2 dense none adamw
pp2_dp2_cp2_zero1 dense selective adamw
dp2_cp2_tp2_ep2_zero1_sp experts selective muon
pp2_fsdp2_tp2_ep2 experts none adamw
dp2_fsdp2_tp2_sp dense selective muon
pp2_dp2_tp2_ep2_sp experts full adamw
pp2_fsdp2_cp2 dense full muon
dp2_cp2_tp2_zero2_sp dense none muon
pp2_fsdp2_tp2_sp experts selective adamw
dp2_fsdp2_cp2_ep2 experts none adamw
pp2_dp2_tp2_zero1_sp experts none adamw
pp2_cp2_tp2_sp experts full adamw
fsdp2_cp2_tp2 dense selective adamw
pp2_dp2_cp2_ep2_zero1 experts full adamw
fsdp2_cp2_tp2_sp dense none adamw
pp2_dp2_fsdp2 dense none adamw
""".split("\n")[1:-1]  # `python tests/parity/products_table.py --covering` makes another one
PROCESSES = {2: [Cell("dp2_ep2", "experts", "full")], 4: [Cell("pp2_tp2"), Cell("fsdp2_tp2"), Cell("pp2_fsdp2_ep2", "experts")]}
REFUSED = [  # what each refusal says; none may be another, and each must be of some product
    "parallel.zero beside fully_sharded: full sharding already cuts gradients and state",
    "parallel.zero 2 with pipeline_parallel: gradients would be exchanged after every micro-batch",
    "and the model has no experts: leave it out, or give it some",
    "parallel.zero 2 with backend torch: PyTorch has no such engine",
    "parallel.context_parallel with backend torch is not built",
    "with parallel.backend torch, fully_sharded and data_parallel: replicas exchange too early",
    "with parallel.backend torch, zero and a tied embedding: its ends are cut differently over the replicas",
    "model.experts with parallel.backend torch and tensor_parallel: parallelize_module has no style for a stack of experts",
    "parallel.expert_parallel with backend torch and fully_sharded: fully_shard adds every gradient",
    "and num_key_value_heads 4: PyTorch's ColwiseParallel would cut within a head",
]


@pytest.mark.parametrize("line", COVERING)
def test_a_product_does_what_one_process_does(line):
    cell, optimizer = case_of(line)
    assert worst(on_ranks(partial(differences, one=expected(cell, optimizer)), cell, optimizer)) < LIMIT


def test_these_products_hold_every_three_facts_that_are_allowed_together():
    allowed = allowed_triples()
    assert {case_of(line) for line in COVERING} <= allowed.keys()
    assert set().union(*allowed.values()) == set().union(*(triples(case_of(line)) for line in COVERING))


def test_every_refused_product_is_refused_in_a_sentence_before_any_work():
    found = {refusal(cell) for ranks in RANKS for cell in cells(ranks, recomputed=("none",))} - {None}
    reasons = [[reason for reason in REFUSED if reason in sentence] for sentence in found]
    assert all(len(of_one) == 1 for of_one in reasons), [sentence for sentence in found if not any(r in sentence for r in REFUSED)]
    assert {reason for of_one in reasons for reason in of_one} == set(REFUSED)


EXPERT, BIAS = (f"stack.blocks.2.feed_forward.{name}" for name in ("experts.down_proj.weight", "router.bias"))
OTHERS = {  # what one process has, made wrong by a little
    "loss": lambda one: one["losses"][2].mul_(1 + 1e-6),
    "norm": lambda one: one["norms"][1].mul_(1 + 1e-6),
    "gradient of one expert": lambda one: one["gradients"][1][EXPERT][7].mul_(1 + 1e-3),
    "gradient that no rank has": lambda one: one["gradients"][0].update({BIAS: torch.ones(8)}),
    "weight of one expert": lambda one: one["weights"][EXPERT][0].mul_(1 + 1e-3),
    "weight that no rank has": lambda one: one["weights"].update(another=torch.ones(1)),
    "load of one block": lambda one: one["loads"][0][1].add_(torch.tensor([1, -1, 0, 0, 0, 0, 0, 0])),
    "not a number": lambda one: one["losses"][0].fill_(math.nan),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_comparison_notices_every_part_that_is_another(other):
    cell, one = Cell("dp2_ep2", "experts"), deepcopy(expected(Cell("one", "experts"), "adamw"))
    OTHERS[other](one)
    assert worst(on_ranks(partial(differences, one=one), cell)) > 10 * LIMIT


def test_one_process_has_what_is_compared():
    for model in MODELS:
        one, run = expected(Cell("one", model), "adamw"), make(SingleRankCommunicator(), Cell("one", model))
        trained = {name for name, parameter in run.plain.named_parameters() if parameter.requires_grad}
        assert all(gradients.keys() == trained for gradients in one["gradients"])
        assert all(len(loads) == (2 if model == "experts" else 0) for loads in one["loads"])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_products_in_processes_do_what_one_does(ranks):
    assert max(by_processes(PROCESSES[ranks])) < LIMIT


@pytest.mark.parametrize("rule", RULES)
def test_a_planted_bug_is_caught(rule):
    assert RULES[rule].caught_by in COVERING
    assert caught(RULES[rule], RULES[rule].caught_by) > 1000 * LIMIT


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", [*IN_16_BITS[:3], *(pytest.param(layout, marks=pytest.mark.slow) for layout in IN_16_BITS[3:])])
def test_in_16_bits_no_product_is_farther_from_one_process_than_that_is_from_float32(layout, precision):
    found, rounding = in_16_bits(layout, precision), in_16_bits("float32", precision)
    assert found["loss"] < 1e-3
    assert all(found[what] < 1.5 * rounding[what] for what in ("norm", "gradients")), (found, rounding)
