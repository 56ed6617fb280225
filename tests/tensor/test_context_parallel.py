"""Context parallelism: every family of model, with packed documents and next to every other axis, does what one process does."""

import pytest
from context_runs import SHARED_OUT, expected, run
from sharded_runs import ADAMW, MUON
from tensor_runs import require_same

from shared.loss import next_token_objective
from shared.parallel.context.ring import gathered_attention

BUSY = pytest.mark.slow  # the same on more ranks and in more pairs


@pytest.mark.parametrize("family", sorted({*SHARED_OUT} - {"llama", "mqa", "eager"}))  # those with the others, below
def test_each_family_trains_as_in_one_process(family):
    require_same(run("cp2", family, packed=True), expected(family, packed=True))


@pytest.mark.parametrize("family", ["mistral", "bert"])
def test_four_ranks_train_as_one_process(family):
    require_same(run("cp4", family), expected(family))


@BUSY
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("layout", ["cp2", "cp4", "cp8"])
@pytest.mark.parametrize("family", SHARED_OUT)
def test_each_family_on_more_ranks_trains_as_in_one_process(family, layout, packed):
    require_same(run(layout, family, packed=packed), expected(family, packed=packed))


@BUSY
@pytest.mark.parametrize("layout", ["cp2", "cp4"])
@pytest.mark.parametrize("family", ["gqa", "mistral", "bloom", "bert"])
def test_the_all_gather_of_keys_trains_as_in_one_process(family, layout):
    require_same(run(layout, family, packed=True, attend=gathered_attention), expected(family, packed=True))


BESIDE = {
    "cp2_tp2": {}, "cp2_tp2_sp": {"activation_checkpointing": "full"}, "dp2_cp2": {"activation_checkpointing": "selective"},
    "dp2_cp2_zero1": {"activation_checkpointing": "full"}, "dp2_cp2_zero2": {}, "fsdp2_cp2": {"activation_checkpointing": "full"},
    "fsdp2_cp2_tp2_sp": {"activation_checkpointing": "selective"}, "dp2_fsdp2_cp2": {}, "cp2": {"activation_checkpointing": "selective"},
}  # fmt: skip


@pytest.mark.parametrize("layout, family, optimizer", [
    ("cp2_tp2", "bloom", ADAMW), ("cp2_tp2_sp", "gqa", MUON), ("dp2_cp2", "gpt2", ADAMW), ("dp2_cp2_zero1", "qwen3", MUON),
    ("fsdp2_cp2", "qwen3", MUON),
])  # fmt: skip
def test_beside_another_axis(layout, family, optimizer):
    require_same(run(layout, family, optimizer, packed=True, **BESIDE[layout]), expected(family, optimizer.name, packed=True))


@BUSY
@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "bloom"])
@pytest.mark.parametrize("layout", BESIDE)
def test_beside_other_axes_and_activation_checkpointing(layout, family, optimizer):
    require_same(run(layout, family, optimizer, packed=True, **BESIDE[layout]), expected(family, optimizer.name, packed=True))


@pytest.mark.parametrize("layout, family", [("cp2", "bert"), ("cp2_tp2", "llama")])
def test_an_objective_that_takes_whole_logits(layout, family):
    require_same(run(layout, family, objective=next_token_objective), expected(family))
