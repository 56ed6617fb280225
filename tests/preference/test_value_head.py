"""The value head: beside the language-model head, the same in every layout, and absent from what is exported."""

from functools import cache

import pytest
import torch
from lora_runs import DENSE, layout_of
from mixture_runs import MODEL as MIXTURE
from mixture_runs import MixtureRun, observed, require_same
from torch import Tensor

from shared.model.chunked_loss import apart, token_log_probs
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.preference.value_head import ScalarProjection, with_value_head
from shared.totals import Batch, Totals


def both_heads(model, batch: Batch) -> Totals:
    """A loss of log-probabilities and values, on which every weight depends."""

    def head_fn(head, hidden: Tensor) -> Totals:
        targets = batch["targets"]
        counted, values = targets >= 0, head.value(hidden)
        losses = (values - targets / 10).square() - token_log_probs(head, hidden, targets)
        return Totals(losses.where(counted, 0).sum(), counted.sum(), {"values": values.detach().where(counted, 0).sum()})

    return model(batch["input_ids"], head_fn=head_fn, valid=batch["targets"] >= 0, **apart(batch))


def with_values(model: TransformerModel) -> TransformerModel:
    generator = torch.Generator().manual_seed(4)
    with_value_head(model).head.value.weight.data.copy_(torch.randn(1, model.config.hidden_size, generator=generator) / 4)
    return model


def run(world, word: str, config, **more) -> dict:
    return observed(MixtureRun(world, layout_of(word, **more), "adamw", config, objective=both_heads, prepare=with_values))


@cache
def alone(config) -> dict:
    return run(SingleRankCommunicator(), "one", config)


LAYOUTS = ["tp2", "tp2_sp", "fsdp2", "pp2", "dp2_zero1", "dp2_ep2", "fsdp2_tp2"]


@pytest.mark.parametrize("word", LAYOUTS)
def test_training_with_a_value_head_equals_one_process(word):
    config, layout = MIXTURE if "ep" in word else DENSE, layout_of(word)
    require_same(run_threads(lambda world: run(world, word, config), layout.ranks), alone(config))


def test_without_its_share_the_gradient_under_tensor_parallelism_is_wrong(monkeypatch):
    monkeypatch.setattr(ScalarProjection, "over_ranks", lambda self, group, leave=None: None)
    with pytest.raises(AssertionError):
        require_same(run_threads(lambda world: run(world, "tp2", DENSE), 2), alone(DENSE))


def test_values_start_at_zero_and_leave_the_logits_alone():
    plain, ids = TransformerModel(DENSE), torch.arange(10)[None]
    logits = plain(ids)
    assert torch.equal(with_value_head(plain)(ids), logits)
    assert plain(ids, head_fn=lambda head, hidden: head.value(hidden)).eq(0).all()
    assert "head.value.weight" in plain.state_dict()


def test_values_are_float32_under_autocast():
    projection = ScalarProjection(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert projection(torch.randn(2, 3, 8, dtype=torch.bfloat16)).dtype == torch.float32
