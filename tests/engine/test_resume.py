"""Going on exactly: the generators' states, the optimizer's state by name, and both together with the weights, bit for bit."""

import copy
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shared.engine.checkpoint.optimizer_state import load_optimizer_state, name_optimizer_state
from shared.engine.checkpoint.snapshot import RandomState, get_random_state, restore, set_random_state, take_snapshot, weights_of
from shared.engine.metrics.accumulator import MetricAccumulator
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.totals import Totals

TINY = ModelConfig(vocab_size=13, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, hidden_dropout=0.2, tie_word_embeddings=True)
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, learning rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=1e-1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
by_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def model_of(seed: int) -> TransformerModel:
    return TransformerModel(TINY, seed=seed).train()


def take_steps(count: int, model, optimizer, start: int = 0) -> None:
    """Steps `start` to `start + count` on batches that depend on the step's number; dropout draws from torch's generator."""
    for step in range(start, start + count):
        ids = torch.randint(13, (3, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()


def differing(one, other) -> list[str]:
    return [name for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True) if not torch.equal(a, b)]


# The generators.


def draws() -> list:
    python = [random.random(), random.gauss(0, 1), random.randrange(2**40)]
    return [torch.rand(3).tolist(), torch.randn(1).item(), *python, np.random.rand(3).tolist(), np.random.standard_normal()]


def move_generators(seed: int) -> None:
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)


def test_all_generators_draw_the_same_numbers_again():
    move_generators(7)
    draws()  # Gaussian numbers come in pairs: one of each is now held back
    state = get_random_state()
    first = draws()
    move_generators(8)
    assert draws() != first
    set_random_state(state)
    assert draws() == first


def test_a_state_is_a_copy_that_later_draws_leave_alone():
    state = get_random_state()
    kept = copy.deepcopy(state)
    draws()
    assert torch.equal(state.torch["cpu"], kept.torch["cpu"]) and state.python == kept.python and state.numpy == kept.numpy


def test_a_state_survives_json():
    move_generators(7)
    draws()
    state = get_random_state()
    first = draws()
    set_random_state(RandomState(state.torch, json.loads(json.dumps(state.python)), json.loads(json.dumps(state.numpy))))
    assert draws() == first


def test_a_gpu_that_this_machine_does_not_have_is_left_out():
    state = get_random_state()
    state.torch["cuda:7"] = state.torch["cpu"].clone()
    set_random_state(state)
    assert torch.equal(get_random_state().torch["cpu"], state.torch["cpu"])


# The optimizer's state, by name.


def stepped(seed: int, make_optimizer=OPTIMIZERS["AdamW"]):
    torch.manual_seed(seed)
    model = model_of(seed)
    optimizer = make_optimizer(model.parameters())
    take_steps(2, model, optimizer)
    return model, optimizer


def test_every_entry_has_its_parameters_name_and_shape():
    model, optimizer = stepped(0)
    state = name_optimizer_state(model, optimizer)
    parameters = dict(model.named_parameters())
    assert state.tensors.keys() == parameters.keys() == set(state.groups[0]["names"])
    for name, parameter in parameters.items():
        assert state.tensors[name]["exp_avg"] is optimizer.state[parameter]["exp_avg"]
        assert state.tensors[name]["exp_avg"].shape == parameter.shape


def test_another_order_and_another_grouping_get_each_parameter_its_own_state():
    model, optimizer = stepped(0)
    state = copy.deepcopy(name_optimizer_state(model, optimizer))
    parameters = list(model.parameters())[::-1]
    other = torch.optim.AdamW([{"params": parameters[1::2]}, {"params": parameters[::2]}], lr=0.5)
    load_optimizer_state(model, other, state)
    for parameter in parameters:
        assert torch.equal(other.state[parameter]["exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])
    assert [group["lr"] for group in other.param_groups] == [1e-2, 1e-2]
    assert [len(group["params"]) for group in other.param_groups] == [len(parameters) // 2, len(parameters) - len(parameters) // 2]


def test_numbering_by_order_would_mix_the_states_up():
    """The negative control: torch's own way, for the same other order, gives parameters the averages of others."""
    model, optimizer = stepped(0)
    other = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    shapes = [(other.state[p]["exp_avg"].shape, p.shape) for p in model.parameters()]
    assert any(kept != own for kept, own in shapes)


def test_groups_made_from_names_keep_their_own_names():
    """`param_names` says which parameters a group has, so it is no setting that another grouping could take over."""
    model, optimizer = stepped(0)
    state = copy.deepcopy(name_optimizer_state(model, optimizer))
    named = list(model.named_parameters())
    other = torch.optim.AdamW([{"params": named[:3]}, {"params": named[3:]}])
    load_optimizer_state(model, other, state)
    assert [group["param_names"] for group in other.param_groups] == [[name for name, _ in part] for part in (named[:3], named[3:])]
    whole = torch.optim.AdamW(model.parameters())
    load_optimizer_state(model, whole, name_optimizer_state(model, other))
    assert "param_names" not in whole.param_groups[0]


def test_a_parameter_that_is_not_the_models_is_refused():
    model = model_of(0)
    optimizer = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.zeros(3, 5))])
    with pytest.raises(ValueError, match=r"holds 1 parameters that are not the model's, of shapes \[\(3, 5\)\]"):
        name_optimizer_state(model, optimizer)


def test_an_optimizer_over_other_parameters_is_refused_and_left_alone():
    model, optimizer = stepped(0)
    some = torch.optim.AdamW(model.stack.parameters(), lr=0.5)
    with pytest.raises(ValueError, match=r"differ in the parameters embedding\.tokens\.weight: resume"):
        load_optimizer_state(model, some, name_optimizer_state(model, optimizer))
    assert not some.state and some.param_groups[0]["lr"] == 0.5


@by_optimizer
def test_loaded_tensors_are_copies(make_optimizer):
    model, optimizer = stepped(0, make_optimizer)
    state = name_optimizer_state(model, optimizer)
    kept = copy.deepcopy(state)
    fresh = make_optimizer(model.parameters())
    load_optimizer_state(model, fresh, state)
    for group in fresh.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] *= 2
    take_steps(1, model, fresh)
    for name, entries in kept.tensors.items():
        assert all(torch.equal(tensor, state.tensors[name][key]) for key, tensor in entries.items())
    assert state.groups == kept.groups


def test_a_parameter_that_has_not_stepped_has_no_state():
    """One whose gradient was None so far: its averages begin when it steps first, not at a count that it never made."""
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters())
    model.embedding.tokens.weight.grad = torch.ones_like(model.embedding.tokens.weight)
    optimizer.step()
    fresh = torch.optim.AdamW(model.parameters())
    load_optimizer_state(model, fresh, name_optimizer_state(model, optimizer))
    assert [parameter is model.embedding.tokens.weight for parameter in fresh.state] == [True]


@pytest.mark.parametrize("saved", [True, False])
def test_optimizer_state_moves_between_fused_and_plain_steps(saved):
    """On a GPU the fused step keeps its count there; on the CPU both keep it alike."""
    model, optimizer = stepped(0, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=saved))
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=not saved)
    load_optimizer_state(model, fresh, name_optimizer_state(model, optimizer))
    take_steps(1, model, fresh, start=2)
    assert {state["step"].item() for state in fresh.state.values()} == {3.0}


@pytest.mark.parametrize("capturable", [True, False])
def test_the_state_lies_beside_its_parameter_and_the_count_of_steps_where_it_is_read(capturable):
    """The meta device stands for any other than the CPU. Where the step is computed on the device alone, so is its count."""
    model, optimizer = stepped(0)
    moved = copy.deepcopy(model).to("meta")
    moved.tie_weights()
    fresh = torch.optim.AdamW(moved.parameters(), lr=1e-2, capturable=capturable)
    load_optimizer_state(moved, fresh, name_optimizer_state(model, optimizer))
    assert {(state["exp_avg"].device.type, state["step"].device.type) for state in fresh.state.values()} == {
        ("meta", "meta" if capturable else "cpu")
    }


# Everything together.


class Counter:
    """A part of a run: how many samples it has given."""

    def __init__(self, sample: int = 0):
        self.sample = sample

    def state_dict(self) -> dict:
        return {"sample": self.sample}

    def load_state_dict(self, state: dict) -> None:
        self.sample = state["sample"]


def resumed(make_optimizer, forget=lambda snapshot: snapshot):
    """Two models: one that took 5 steps, and one that was put where the first was after 2 and took the other 3."""
    model, optimizer = stepped(0, make_optimizer)
    snapshot = copy.deepcopy(take_snapshot(2, model, optimizer, {"counter": Counter(6)}))
    take_steps(3, model, optimizer, start=2)
    other, part = model_of(1), Counter()
    other_optimizer = make_optimizer(other.parameters())
    move_generators(99)
    step = restore(forget(snapshot), other, other_optimizer, {"counter": part})
    assert (step, part.sample) == (2, 6)
    take_steps(3, other, other_optimizer, start=step)
    return model, other


@by_optimizer
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(make_optimizer):
    assert differing(*resumed(make_optimizer)) == []


def without_generators(snapshot):
    snapshot.random = get_random_state()
    return snapshot


def without_averages(snapshot):
    snapshot.optimizer.tensors = {}
    return snapshot


def with_a_bit_more(snapshot):
    snapshot.weights["embedding.tokens.weight"][0, 0] = torch.nextafter(
        snapshot.weights["embedding.tokens.weight"][0, 0], torch.tensor(torch.inf)
    )
    return snapshot


@pytest.mark.parametrize("forget", [without_generators, without_averages, with_a_bit_more])
def test_a_run_that_forgot_something_is_another_one(forget):
    """The negative control: generators, averages, or one bit of one weight."""
    assert differing(*resumed(OPTIMIZERS["AdamW"], forget))


def test_a_tied_weight_is_stored_once_in_a_checkpoint():
    model = model_of(0)
    names = weights_of(model).keys()
    assert "embedding.tokens.weight" in names and "head.linear.weight" not in names
    assert model.state_dict().keys() - names == {"head.linear.weight"}


def test_a_snapshot_of_one_precision_resumes_in_another():
    """Half precision does not come back exact, but it is no error: copying casts."""
    model, optimizer = stepped(0)
    snapshot = copy.deepcopy(take_snapshot(2, model, optimizer, {}))
    half = TransformerModel(TINY, seed=1).to(torch.bfloat16)
    restore(snapshot, half, torch.optim.AdamW(half.parameters()), {})
    assert half.embedding.tokens.weight.dtype == torch.bfloat16
    assert torch.equal(half.embedding.tokens.weight, model.embedding.tokens.weight.to(torch.bfloat16))


def test_losses_since_the_last_log_keep_their_precision():
    window, fresh = MetricAccumulator(), MetricAccumulator()
    window.add(Totals(torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(7), {"correct": torch.tensor(5)}))
    fresh.load_state_dict(json.loads(json.dumps(window.state_dict())))
    assert fresh.totals == window.totals and fresh.totals.loss_sum.dtype == torch.float64
    assert fresh.take() == window.take()
