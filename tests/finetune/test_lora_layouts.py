"""LoRA in every layout: loss, every gradient, norms and weights of three steps equal one process's, in float64, to 1e-9."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lora_runs import DENSE, alone, layout_of, make, on_ranks
from mixture_runs import observed, require_same

from shared.course.errors import SettingError
from shared.finetune import adapter_axis
from shared.finetune.adapters import adapted_layers, attach_adapter
from shared.finetune.config import AdapterConfig
from shared.finetune.lora import AdaptedLinear, LowRankUpdate
from shared.finetune.lora_parallel import FactorPlan, lora_sharding
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.precision import autocast_objective
from shared.parallel.comm.threads import run_threads
from shared.parallel.health.replicas import ReplicasDiffer
from shared.parallel.processes.launch import run_processes

CASES = [
    ("tp2", "dense", "adamw", {}),
    ("tp4", "dense", "muon", {}),
    ("tp2_sp", "tied", "adamw", {}),
    ("tp2_sp", "decomposed", "muon", {}),
    ("fsdp2", "dense", "muon", {"recompute": "full"}),
    ("dp2_zero1", "decomposed", "adamw", {}),
    ("dp2_zero2", "dense", "muon", {"recompute": "selective"}),
    ("pp2", "tied", "muon", {}),
    ("pp2", "dense", "adamw", {"pipeline_schedule": "zero_bubble"}),
    ("cp2", "dense", "adamw", {}),
    ("fsdp2_tp2", "dense", "adamw", {}),
    ("dp2_ep2", "experts", "muon", {}),
    ("tp2", "experts", "adamw", {}),
    ("fsdp2", "experts", "adamw", {}),
    ("fsdp2", "attention", "adamw", {"recompute": "full"}),
    ("fsdp2", "attention", "adamw", {"recompute": "selective"}),
    ("pp2", "last", "muon", {}),
    ("pp2", "last", "adamw", {"pipeline_schedule": "zero_bubble", "recompute": "full"}),
    pytest.param("pp2_fsdp2", "last", "adamw", {}, marks=pytest.mark.slow),
    pytest.param("pp2_dp2_zero1", "last", "muon", {}, marks=pytest.mark.slow),
    pytest.param("tp4_sp", "decomposed", "adamw", {}, marks=pytest.mark.slow),
    pytest.param("cp2_tp2", "tied", "muon", {}, marks=pytest.mark.slow),
    pytest.param("pp2_tp2", "tied", "adamw", {"pipeline_chunks": 2, "pipeline_schedule": "interleaved"}, marks=pytest.mark.slow),
    pytest.param("dp2_tp2_zero1", "dense", "adamw", {}, marks=pytest.mark.slow),
    pytest.param("fsdp2_tp2_ep2", "experts", "muon", {"recompute": "full"}, marks=pytest.mark.slow),
    pytest.param("pp2_dp2_ep2", "experts", "adamw", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("word", "model", "optimizer", "more"), CASES)
def test_training_equals_one_process(word, model, optimizer, more):
    require_same(on_ranks(layout_of(word, **more), model, optimizer), alone(model, optimizer))


@pytest.mark.parametrize("model", ["dense", "tied", "decomposed", "experts"])
def test_every_b_moves_in_the_first_step_and_every_a_in_the_second(model):
    first, second, _ = alone(model)["gradients"]
    assert first.keys() == second.keys() and all(".adapters." in name for name in first)
    for name in first:
        starts_at_zero = name.endswith("lora_A" if name.startswith("embedding") else "lora_B")
        is_decomposed = name.endswith("magnitude")
        assert (first[name].norm() > 0) == (starts_at_zero or is_decomposed), name
        assert torch.isfinite(second[name]).all() and second[name].norm() > 0, name


@pytest.mark.parametrize(("word", "model"), [("fsdp2", "attention"), ("fsdp2", "last"), ("pp2_fsdp2", "last")])
def test_micro_batches_in_16_bits_follow_one_another(word, model):
    """A block over frozen weights needs no gradient of its input, so no hook says when FSDP may put its weights back into shards; still
    gathered in 16 bits, they were refused as master weights by the next micro-batch."""
    settings = {"objective": autocast_objective(packed_next_token_objective, "bfloat16"), "computed_in": torch.bfloat16}
    for rank in on_ranks(layout_of(word), model, **settings):
        torch.testing.assert_close(rank["losses"], alone(model)["losses"], rtol=0.01, atol=0)


def a_not_summed(monkeypatch):
    plan = lora_sharding(0)
    wrong = lambda cut: (FactorPlan(None, False), plan[1]) if cut == 0 else lora_sharding(cut)  # noqa: E731
    monkeypatch.setattr(adapter_axis, "lora_sharding", wrong)


def b_not_summed(monkeypatch):
    plan = lora_sharding(1)
    wrong = lambda cut: (plan[0], FactorPlan(None, False)) if cut == 1 else lora_sharding(cut)  # noqa: E731
    monkeypatch.setattr(adapter_axis, "lora_sharding", wrong)


def added_after_the_sum(monkeypatch):
    def forward(self, x):
        base, part = F.linear(x, self.weight), sum(update(x) for update in self.updates)
        return (base if self.combine is None else self.combine(base)) + part + (0 if self.bias is None else self.bias)

    monkeypatch.setattr(AdaptedLinear, "forward", forward)


def bias_on_every_rank(monkeypatch):
    monkeypatch.setattr(AdaptedLinear, "forward", lambda self, x: (self.combine or (lambda y: y))(self.product(x, self.bias)))


def copies_not_summed(monkeypatch):
    right = adapter_axis.cuts_of
    monkeypatch.setattr(adapter_axis, "cuts_of", lambda *layer: (right(*layer)[0], None, right(*layer)[2]))


def scaled_by_alpha(monkeypatch):
    monkeypatch.setattr(AdapterConfig, "scaling", property(lambda self: self.alpha))


def norms_of_a_part(monkeypatch):
    monkeypatch.setattr(LowRankUpdate, "group", property(lambda self: None, lambda self, group: None), raising=False)


def experts_added_everywhere(monkeypatch):
    right = adapter_axis.cuts_of
    monkeypatch.setattr(adapter_axis, "cuts_of", lambda *layer: (*right(*layer)[:2], None))


BUGS = [
    (a_not_summed, "tp2", "dense"),
    (b_not_summed, "tp2", "dense"),
    (added_after_the_sum, "tp2", "dense"),
    (bias_on_every_rank, "tp2", "dense"),
    (copies_not_summed, "tp4", "dense"),
    (scaled_by_alpha, "fsdp2", "dense"),
    (norms_of_a_part, "tp2", "decomposed"),
    (experts_added_everywhere, "dp2_ep2", "experts"),
]


@pytest.mark.parametrize(("plant", "word", "model"), BUGS, ids=[plant.__name__ for plant, *_ in BUGS])
def test_a_planted_bug_is_found(plant, word, model, monkeypatch):
    one = alone(model)
    plant(monkeypatch)
    with pytest.raises((AssertionError, ReplicasDiffer)):
        require_same(on_ranks(layout_of(word), model), one)


def test_ranks_with_inputs_of_their_own_draw_masks_of_their_own():
    adapter = AdapterConfig(targets=("all-linear", "embedding.tokens", "head.linear"), dropout=0.5)

    def masks(world):
        plain = make(world, layout_of("tp2"), "dense", adapter=adapter).plain
        return {name.rpartition(".")[2]: layer.own_masks for name, layer in adapted_layers(plain)}

    expected = dict.fromkeys(("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "linear"))
    for rank, found in enumerate(run_threads(masks, 2)):
        assert found == expected | {"o_proj": rank, "down_proj": rank, "tokens": rank}


def test_masks_of_ranks_differ_and_their_generators_agree_afterwards():
    layer = attach_adapter(TransformerModel(DENSE), AdapterConfig(dropout=0.5), seed=1).stack.blocks["0"].attention.q_proj
    layer.adapters["default"].lora_B.data.fill_(1.0)
    x, found = torch.randn(4, 16), []
    for layer.own_masks in (None, None, 0, 1):
        torch.manual_seed(3)
        found.append((layer(x), torch.rand(1)))
    (one, _), (same, _), (first, after_first), (second, after_second) = found
    assert torch.equal(one, same) and not torch.equal(first, second) and torch.equal(after_first, after_second)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def over_torch(world, word: str, model: str, optimizer: str):
    return observed(make(world, replace(layout_of(word), backend="torch"), model, optimizer))


TORCH = [("fsdp2", "decomposed", "muon"), ("dp2_zero1", "tied", "muon"), ("pp2", "last", "adamw"), ("dp2_ep2", "experts", "adamw")]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "model", "optimizer"), TORCH)
def test_training_on_pytorchs_engines_equals_one_process(word, model, optimizer):
    found = run_processes(partial(over_torch, word=word, model=model, optimizer=optimizer), 2, timeout=300)
    require_same(found, alone(model, optimizer))


def test_torchs_tensor_parallelism_is_refused_by_name():
    from shared.parallel.tensor.on_torch import parallelize_by_torch

    model = attach_adapter(TransformerModel(DENSE), AdapterConfig())
    with pytest.raises(SettingError, match=r"cannot cut stack.blocks.0.attention.q_proj, a AdaptedLinear"):
        parallelize_by_torch(model, None)
