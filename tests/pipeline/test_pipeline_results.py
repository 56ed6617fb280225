"""What a pipeline's last stage hands to the others: totals with names and dtypes, and results of any shape; the rest is refused."""

import pytest
import torch
from pipeline_runs import on_ranks

from shared.course.errors import SettingError
from shared.model.chunked_loss import packed_next_token_objective
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.pipeline.axis import PipelineParallel
from shared.parallel.pipeline.stages import from_last
from shared.totals import Totals


def result():
    totals = Totals(
        torch.tensor(1.5, dtype=torch.float64),
        torch.tensor(7),
        {"seen": torch.tensor(3)},
    )
    return {
        "logits": torch.arange(6.0).view(2, 3).T,
        "more": (torch.tensor([True]), totals),
    }


def require_result(found) -> None:
    expected = result()
    assert list(found) == list(expected) and type(found["more"]) is tuple
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=0)
    flag, totals = found["more"]
    assert flag.dtype == torch.bool and flag.item() and isinstance(totals, Totals)
    assert (totals.loss_sum.dtype, totals.token_count.dtype) == (
        torch.float64,
        torch.int64,
    )
    assert (
        totals.loss_sum == 1.5
        and totals.token_count == 7
        and totals.metrics["seen"] == 3
    )


def test_every_rank_has_the_last_ones_result_in_its_own_shape():
    for found in run_threads(
        lambda group: from_last(
            group, result() if group.rank == 2 else None, torch.device("cpu")
        ),
        3,
    ):
        require_result(found)


def test_a_result_that_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match="cannot send a str from its last stage"):
        run_threads(
            lambda group: from_last(
                group, "text" if group.rank == 1 else None, torch.device("cpu")
            ),
            2,
        )


def with_metrics(model, batch):
    totals = packed_next_token_objective(model, batch)
    return totals._replace(
        metrics={
            "rows": torch.tensor(batch["input_ids"].shape[0]),
            "half": totals.loss_sum.detach() / 2,
        }
    )


def test_metrics_of_all_micro_batches_reach_every_rank_with_their_dtypes():
    (one,) = on_ranks(lambda run: run.train(1).totals, "one", objective=with_metrics)
    for totals in on_ranks(
        lambda run: run.train(1).totals, "pp2", objective=with_metrics
    ):
        assert (
            totals.metrics.keys() == one.metrics.keys()
            and totals.token_count == one.token_count
        )
        assert (
            totals.token_count.dtype == one.token_count.dtype
            and totals.loss_sum.dtype == one.loss_sum.dtype
        )
        for name, value in one.metrics.items():
            assert totals.metrics[name].dtype == value.dtype
            torch.testing.assert_close(totals.metrics[name], value, rtol=1e-9, atol=0)


def test_totals_that_change_their_names_are_refused():
    calls = []

    def changing(model, batch):
        totals = packed_next_token_objective(model, batch)
        calls.append(1)
        return totals._replace(
            metrics={"first" if len(calls) <= 4 else "later": torch.tensor(1)}
        )

    with pytest.raises(
        ValueError,
        match="had .*'metric first'.* and have .*'metric later'.* now: keep their names",
    ):
        on_ranks(lambda run: run.train(2), "pp2", objective=changing)


def test_an_objective_that_does_not_call_the_model_is_refused():
    with pytest.raises(ValueError, match="it has not called the model"):
        on_ranks(
            lambda run: run.train(1),
            "pp2",
            objective=lambda model, batch: Totals(
                torch.ones((), requires_grad=True), torch.tensor(1), {}
            ),
        )


def test_another_kind_of_model_is_refused():
    def shape(world):
        PipelineParallel().shape(
            torch.nn.Linear(2, 2), Mesh(ParallelConfig(pipeline_parallel=2), world)
        )

    with pytest.raises(
        SettingError,
        match="Pipeline parallelism is for a TransformerModel, not a Linear",
    ):
        run_threads(shape, 2)


def test_a_stage_that_has_been_evaluated_keeps_no_graph():
    def logits(run):
        run.parallel.model.eval()
        return run.parallel.model(torch.zeros(1, 4, dtype=torch.int64))

    assert not any(each.requires_grad for each in on_ranks(logits, "pp2"))
