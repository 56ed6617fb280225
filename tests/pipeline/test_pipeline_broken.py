"""Pipelines that are wrong on purpose: the comparison with one process, or the count of what is kept, must see each."""

import pytest
from pipeline_runs import MICROBATCHES, expected, observed, on_ranks, require_same, runner_of

from shared.course.errors import CourseError
from shared.parallel.comm.communicator import CommunicationError
from shared.parallel.pipeline.axis import PipelineParallel
from shared.parallel.pipeline.runner import PipelineRunner
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.pipeline.simulate import validate
from shared.parallel.pipeline.stages import Links
from shared.totals import Totals


class DividedTwice(PipelineRunner):
    def forward(self, action, batch, objective):
        super().forward(action, batch, lambda model, batch: scaled(objective(model, batch), 1 / MICROBATCHES))


def scaled(totals: Totals, factor: float) -> Totals:
    return totals._replace(loss_sum=totals.loss_sum * factor)


class OneEnd(PipelineParallel):
    def shape(self, model, mesh):
        super().shape(model, mesh)
        for parameter in model.parameters():
            vars(parameter).pop("partial_over", None)


def test_a_loss_divided_twice_is_seen(monkeypatch):
    monkeypatch.setattr("shared.parallel.pipeline.axis.PipelineRunner", DividedTwice)
    with pytest.raises(AssertionError):
        require_same(on_ranks(observed, "pp2", "llama"), expected("llama"))


def test_a_tied_gradient_that_is_not_summed_is_seen():
    with pytest.raises((AssertionError, CourseError, ValueError)):
        require_same(on_ranks(observed, "pp2", "gpt2", axis=OneEnd()), expected("gpt2"))


def test_activations_of_gpipe_under_1f1b_are_seen():
    def work(run):
        runner_of(run).use(make_schedule("gpipe", 4, MICROBATCHES), MICROBATCHES)
        return observed(run), runner_of(run).most

    found = on_ranks(work, "pp4", "llama")
    require_same([each for each, _ in found], expected("llama"))  # the numbers are right, only the memory is not
    assert [most for _, most in found] != validate(make_schedule("1f1b", 4, MICROBATCHES), MICROBATCHES)


def test_two_ranks_that_both_send_first_and_wait_deadlock(monkeypatch):
    """The runner's sends return at once. With sends that wait, its neighbours in 1F1B wait for each other, as validation says."""
    send = Links.send

    def waiting(links, tensor, message):
        send(links, tensor, message)
        links.wait()

    monkeypatch.setattr(Links, "send", waiting)
    with pytest.raises(CommunicationError, match="deadlock: rank 0 waits in send"):
        on_ranks(observed, "pp2", "llama")


def test_gradients_of_weights_apart_are_waited_for(monkeypatch):
    """Without part W the matrices get nothing."""
    monkeypatch.setattr("shared.parallel.pipeline.runner.add_weight_gradients", lambda taken: None)
    with pytest.raises((AssertionError, AttributeError)):
        require_same(on_ranks(observed, "pp2", "llama", "sgd", "zero_bubble"), expected("llama"))
