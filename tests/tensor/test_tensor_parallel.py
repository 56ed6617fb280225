"""Tensor and sequence parallelism: every family of model, beside every data engine, does what one process does."""

import pytest
from sharded_runs import ADAMW, MUON
from tensor_runs import FAMILIES, config_of, expected, require_same, run

from shared.loss import next_token_objective
from shared.model.transformer import TransformerModel
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.tensor.axis import TensorParallel


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "tp4", "tp4_sp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_trains_as_in_one_process(family, layout):
    require_same(run(layout, family), expected(family))


BESIDE = {
    "dp2_tp2": {}, "dp2_tp2_sp": {"zero": 1}, "fsdp2_tp2": {}, "fsdp2_tp2_sp": {"activation_checkpointing": "full"},
    "dp2_tp2_zero2_sp": {"activation_checkpointing": "selective"}, "tp2_sp": {"activation_checkpointing": "full"},
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.parametrize("layout", BESIDE)
def test_beside_data_parallelism_and_activation_checkpointing(layout, family, optimizer):
    chosen = {"adamw": ADAMW, "muon": MUON}[optimizer]
    require_same(run(layout, family, chosen, **BESIDE[layout]), expected(family, optimizer))


@pytest.mark.parametrize("layout", ["tp2", "tp4_sp"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_an_objective_that_takes_whole_logits(layout, family):
    require_same(run(layout, family, objective=next_token_objective), expected(family))


def test_a_part_keeps_whether_it_is_trained_and_what_its_whole_is_marked_with():
    def work(world):
        model = TransformerModel(config_of("llama"))
        attention = model.stack.blocks["0"].attention
        whole = attention.q_proj.weight.requires_grad_(False)
        whole.role = "expert"
        TensorParallel().shape(model, Mesh(parse_layout("tp2"), world))
        part = attention.q_proj.weight
        assert part.numel() == whole.numel() / 2 and part.role == "expert" and not part.requires_grad

    run_threads(work, 2)
