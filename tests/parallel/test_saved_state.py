"""What ranks compare before a save: all that they have in common, each number of the optimizer's state, and not what is a rank's own."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_agreement import said

from shared.engine.checkpoint.soundness import CheckpointError
from shared.model.sharding import make_shard, split_dimension
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.health.replicas import LOSS_SCALE, checksum, fingerprints
from shared.parallel.mesh import Mesh
from shared.parallel.strategy import ParallelStrategy


class Part:
    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state


def first_state(optimizer):
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


def exchange(first, second):
    """The same change in two tensors of one parameter's state, in opposite directions."""

    def change(parts, notes, optimizer):
        state = first_state(optimizer)
        state[first], state[second] = state[second], state[first]

    return change


DIFFERENCES = {  # on rank 1 alone -> what is said; nothing where ranks may differ
    "loss scale": (lambda parts, notes, optimizer: parts[LOSS_SCALE].state.update(scale=2.0), "saved.callback.KeepLossScale.scale is 1.0"),
    "seconds": (lambda parts, notes, optimizer: parts["callback.Seconds"].state.update(seconds=2.0), ""),
    "note": (lambda parts, notes, optimizer: notes.update(validation_loss=2.0), "notes.validation_loss is 1.0 on rank 0"),
    "value": (
        lambda parts, notes, optimizer: first_state(optimizer).update(k=4),
        "the optimizer states of rank 1 differ from the optimizer states of rank 0",
    ),
    "exchanged": (exchange("exp_avg", "exp_avg_sq"), "the optimizer states of rank 1 differ from the optimizer states of rank 0"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_what_ranks_have_in_common_is_compared_before_a_save(what, tmp_path):
    change, words = DIFFERENCES[what]

    def work(world):
        strategy = ParallelStrategy(torch.nn.utils.skip_init(torch.nn.Linear, 3, 2), Mesh(parse_layout("dp2"), world), [])
        optimizer = torch.optim.AdamW(strategy.optim_params.parameters(), lr=0.1)
        for parameter in strategy.optim_params.parameters():
            parameter.data.fill_(1.0)
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        first_state(optimizer)["k"] = 3
        parts, notes = {LOSS_SCALE: Part(scale=1.0), "callback.Seconds": Part(seconds=1.0)}, {"validation_loss": 1.0}
        if world.rank:
            change(parts, notes, optimizer)
        saver = strategy.saver(tmp_path, asynchronous=False)
        told = said(lambda: saver.save(1, optimizer, parts, notes))
        saver.close()
        return told

    first, second = run_threads(work, 2)
    assert first == second and words in first and bool(words) == bool(first)


class Other(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("kind, refusal, words", [
    (torch.optim.AdamW, None, ""), (Other, None, "optimizer.class is AdamW on rank 0"), (torch.optim.AdamW, "no disk", "no disk"),
])  # fmt: skip
def test_before_the_first_step_all_ranks_say_what_one_has_otherwise(kind, refusal, words):
    def work(world):
        strategy = ParallelStrategy(torch.nn.Linear(3, 2), Mesh(parse_layout("dp2"), world), [])
        optimizer = (kind if world.rank else torch.optim.AdamW)(strategy.optim_params.parameters(), lr=0.1)
        saver = SimpleNamespace(begin=partial(begun, refusal if world.rank else None))
        engine = SimpleNamespace(optimizer=optimizer, saver=saver, steps=3, config=SimpleNamespace(output=world.rank))
        return said(lambda: strategy.begin(engine))

    first, second = run_threads(work, 2)
    assert first == second and words in first and bool(words) == bool(first)


def test_ranks_that_hold_too_little_of_a_parameter_are_refused_before_they_train():
    """Both ranks take the first half for theirs."""

    def work(world):
        model = torch.nn.Linear(3, 4)
        first = split_dimension(model.weight, 0, [(0, 2), (2, 4)], SimpleNamespace(rank=0, size=2))
        model.weight = make_shard(first.local(model.weight.detach()), first, model.weight)
        with pytest.raises(ValueError, match="The ranks hold 6 of the 12 numbers of weight"):
            ParallelStrategy(model, Mesh(parse_layout("dp2"), world), [])

    run_threads(work, 2)


def begun(refusal):
    if refusal:
        raise CheckpointError(refusal)


def test_a_checksum_sees_each_bit_rows_that_change_places_and_pieces_at_any_offset():
    x = torch.arange(24, dtype=torch.float32).view(6, 4)
    assert len({checksum(each).item() for each in (x, x[[1, 0, 2, 3, 4, 5]], x[[5, 1, 2, 3, 4, 0]])}) == 3
    for place in range(24):
        changed = x.clone()
        changed.view(torch.int32).view(-1)[place] ^= 1
        assert checksum(changed) != checksum(x)
    flat = torch.arange(25, dtype=torch.float32)
    assert checksum(flat[1:].view(6, 4)) == checksum(flat[1:].clone().view(6, 4))
    assert checksum(torch.empty(0)) == 0


def test_a_models_fingerprint_has_its_dtypes_shapes_and_what_is_frozen():
    def of(change):
        model = torch.nn.Linear(2, 2).requires_grad_(False)
        for parameter in model.parameters():
            parameter.fill_(0.0)
        return fingerprints(change(model))["weight"]

    same, wide, trained, empty = lambda model: model, torch.nn.Module.double, torch.nn.Module.requires_grad_, lambda model: model.to("meta")
    assert [of(change) for change in (same, wide, trained, empty)] == [
        "torch.float32 [2, 2] frozen 0", "torch.float64 [2, 2] frozen 0", "torch.float32 [2, 2] 0", "torch.float32 [2, 2] frozen meta",
    ]  # fmt: skip
