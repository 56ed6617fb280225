"""What the ranks of a pipeline keep and send: activations in flight by the schedule's marks, messages by formula."""

import pytest
from pipeline_runs import MICROBATCHES, on_ranks, runner_of
from tensor_runs import batches
from torch.autograd.graph import saved_tensors_hooks

from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.pipeline.simulate import validate
from shared.parallel.pipeline.stages import Links


class Meter:
    """The bytes that autograd keeps for backward passes on this thread, weights apart."""

    def __init__(self, model):
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.now = self.most = 0

    def count(self, change: int) -> None:
        self.now += change
        self.most = max(self.most, self.now)

    def pack(self, tensor):
        return Kept(self, tensor)

    def watched(self):
        return saved_tensors_hooks(self.pack, lambda kept: kept.tensor)


class Kept:
    def __init__(self, meter: Meter, tensor):
        self.meter, self.tensor = meter, tensor
        self.bytes = 0 if tensor.untyped_storage().data_ptr() in meter.weights else tensor.nbytes
        meter.count(self.bytes)

    def __del__(self):
        self.meter.count(-self.bytes)


@pytest.mark.parametrize("name, ranks", [("gpipe", 4), ("1f1b", 4), ("interleaved", 2), ("zero_bubble", 4)])
def test_what_ranks_keep_is_what_the_schedule_says(name, ranks):
    """In graphs on every rank; in bytes on those between the ends, where every micro-batch keeps as much."""
    microbatches = 8

    def work(run):
        run.batches = batches  # of which none has a mask
        meter = Meter(run.plain)
        with meter.watched():
            run.train(1)
        most, alone = runner_of(run).most, Meter(run.plain)
        if name != "interleaved":
            run.microbatches = 1
            with alone.watched():
                run.train(1)
        return most, meter.most, alone.most

    found, chunks = on_ranks(work, f"pp{ranks}", "llama", "sgd", name, microbatches=microbatches), 2 if name == "interleaved" else 1
    marks = validate(make_schedule(name, ranks, microbatches, chunks), microbatches, chunks)
    assert [most for most, *_ in found] == marks
    if name in ("gpipe", "1f1b"):
        for (_, most, of_one), mark in list(zip(found, marks, strict=True))[1:-1]:
            assert most == mark * of_one


def test_what_was_sent_is_freed_when_it_has_arrived(monkeypatch):
    """A rank keeps what it sends until a later message shows that it was received: not all of a step's."""
    most, send = [0] * 3, Links.send

    def counting(links, tensor, message):
        send(links, tensor, message)
        most[message.source] = max(most[message.source], len(links.under_way))

    monkeypatch.setattr(Links, "send", counting)
    on_ranks(lambda run: run.train(1), "pp3", "llama", "sgd", "1f1b", microbatches=12)
    assert max(most) <= 6  # of 12 or 24 that a rank sends


def test_messages_are_counted_and_of_the_formula():
    """Each micro-batch crosses each border between stages twice: [rows, seq, D] forward, and its gradient back."""

    def work(run):
        run.train(1)
        before = len(run.world.trace.entries)
        run.train(1)
        entries = list(run.world.trace.entries)[before:]
        return [(entry.operation, entry.bytes) for entry in entries if entry.operation in ("send", "receive")]

    size = 12 * 12 * 16 * 8  # rows, positions, hidden size, bytes
    first, middle, last = on_ranks(work, "pp3", "llama", "sgd")
    for found, sends in ((first, 1), (middle, 2), (last, 1)):
        assert sorted(found) == [("receive", size)] * sends * MICROBATCHES + [("send", size)] * sends * MICROBATCHES
