"""Preference losses in every layout: loss, gradients, norms, metrics and weights of three steps equal one process's, in float64, to 1e-9.

The reference is computed in the layout as well: by a frozen model beside the policy, or by the policy with its adapter switched off.
"""

import pytest
import torch
from lora_runs import DENSE
from mixture_runs import observed, require_same
from preference_runs import PreferenceRun, alone, batches, layout_of, moved, on_ranks, require_same_metrics
from sharded_runs import build, share

from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.preference import reference
from shared.preference.baseline import BaselinedLoader
from shared.preference.log_probs import score_answers
from shared.preference.objective import PreferenceObjective
from shared.preference.reference import scorer
from shared.trainer.models import RUN_AXES

CASES = [
    ("dp2", "adamw", "dense", "dpo", {}),
    ("tp2", "muon", "dense", "ipo", {}),
    ("tp2_sp", "adamw", "lora", "dpo", {}),
    ("fsdp2", "muon", "tied", "orpo", {"recompute": "full"}),
    ("fsdp2", "adamw", "lora", "cdpo", {}),
    ("dp2_zero1", "adamw", "dense", "simpo", {}),
    ("pp2", "adamw", "dense", "dpo", {}),
    ("pp2", "muon", "lora", "kto", {}),
    ("dp2_ep2", "muon", "experts", "dpo", {}),
    ("fsdp2_tp2", "adamw", "dense", "kto", {}),
    pytest.param("dp2_ep2", "adamw", "lora experts", "robust", {}, marks=pytest.mark.slow),
    pytest.param("dp2_zero2", "muon", "lora", "hinge", {"recompute": "selective"}, marks=pytest.mark.slow),
    pytest.param("pp2", "adamw", "dense", "dpo", {"pipeline_schedule": "zero_bubble"}, marks=pytest.mark.slow),
    pytest.param("pp2_dp2_zero1", "muon", "tied", "kto", {}, marks=pytest.mark.slow),
    pytest.param("pp2_tp2_sp", "adamw", "dense", "ipo", {}, marks=pytest.mark.slow),
    pytest.param("pp2_fsdp2", "muon", "lora experts", "dpo", {}, marks=pytest.mark.slow),
    pytest.param("fsdp2_tp2_ep2", "adamw", "experts", "kto", {"recompute": "full"}, marks=pytest.mark.slow),
    pytest.param("dp2_tp2_zero1", "muon", "lora", "dpo", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("word", "optimizer", "model", "loss", "more"), CASES)
def test_training_equals_one_process(word, optimizer, model, loss, more):
    one = alone(optimizer, model, loss)
    found = on_ranks(layout_of(word, **more), optimizer, model, loss)
    require_same(found, one)
    require_same_metrics(found, one)


def mean_of_each_micro_batch(monkeypatch):
    right = PreferenceObjective.of_pairs

    def of_pairs(self, *arguments, **more):
        totals = right(self, *arguments, **more)
        return totals._replace(loss_sum=totals.loss_sum / totals.token_count.clamp(min=1), token_count=totals.token_count.clamp(max=1))

    monkeypatch.setattr(PreferenceObjective, "of_pairs", of_pairs)


def baseline_of_each_rank(monkeypatch):
    right = BaselinedLoader.__init__

    def without_data(self, loader, score, policy, data):
        right(self, loader, score, policy, SingleRankCommunicator())

    monkeypatch.setattr(BaselinedLoader, "__init__", without_data)


def baseline_of_each_micro_batch(monkeypatch):
    right = BaselinedLoader.baselined
    monkeypatch.setattr(BaselinedLoader, "baselined", lambda self, step: [right(self, [batch])[0] for batch in step])


def reference_with_the_adapter(monkeypatch):
    monkeypatch.setattr(reference, "base_model", lambda model: torch.no_grad())


BUGS = [
    (mean_of_each_micro_batch, "dp2", "dense", "dpo"),
    (baseline_of_each_rank, "dp2", "dense", "kto"),
    (baseline_of_each_micro_batch, "dp2", "dense", "kto"),
    (reference_with_the_adapter, "dp2", "lora", "dpo"),
]


@pytest.mark.parametrize(("plant", "word", "model", "loss"), BUGS, ids=[plant.__name__ for plant, *_ in BUGS])
def test_a_planted_bug_is_found(plant, word, model, loss, monkeypatch):
    one = alone("adamw", model, loss)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        require_same(on_ranks(layout_of(word), "adamw", model, loss), one)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_micro_batches_of_one_row_equal_the_whole_batch(loss):
    """In other micro-batches the rows of a step are the same, so is KTO's baseline."""

    class ByRow(PreferenceRun):
        def shares(self):
            rows = [super(PreferenceRun, self).shares()]
            rows = [{name: value[row : row + 1] for name, value in batch.items()} for batch in rows[0] for row in range(8)]
            return next(iter(self.wrap([rows])))

    run = ByRow(SingleRankCommunicator(), ParallelConfig(), "adamw", "dense", loss)
    require_same([observed(run)], alone("adamw", "dense", loss))
    require_same_metrics([{"metrics": run.metrics}], alone("adamw", "dense", loss))


def test_scores_of_every_layout_are_one_process_s():
    batch = batches(0, 0, DENSE)
    expected = score_answers(moved(build(DENSE)), batch)

    def scores(world, word):
        mesh = Mesh(layout_of(word), world)
        score = scorer(apply_parallel(moved(build(DENSE)), mesh, axes=RUN_AXES).model)
        return score(share(batch, mesh.data.rank, mesh.data.size)), mesh.data.rank, mesh.data.size

    for word in ("tp2_sp", "fsdp2", "pp2"):
        for found, rank, ranks in run_threads(lambda world, word=word: scores(world, word), 2):
            torch.testing.assert_close(found, expected.chunk(ranks)[rank], rtol=1e-12, atol=1e-12)
