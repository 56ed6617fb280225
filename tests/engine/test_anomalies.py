"""A step that would spoil the weights is stopped before it does, its batch is kept, and replaying it shows the same losses."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from runs import MODEL, Loader, make_engine, printed

from shared.course.errors import CourseError
from shared.engine.debug.anomalies import BrokenStep, CatchAnomalies, load_batch, microbatch_losses, read_anomaly, replay
from shared.loss import next_token_objective
from shared.model.transformer import TransformerModel
from shared.totals import Totals

DROPOUT = replace(MODEL, hidden_dropout=0.2)


class Spoilt(Loader):
    """Micro-batch 1 of one step carries a factor for its loss, or a square root of 0, whose gradient is not finite while its loss is."""

    def __init__(self, step: int, factor: float = 1.0, kink: bool = False):
        super().__init__()
        self.spoilt, self.factor, self.kink = step, factor, kink

    def __iter__(self):
        for microbatches in super().__iter__():
            hit = self.step == self.spoilt
            for index, one in enumerate(microbatches):
                one["factor"] = torch.tensor(self.factor if hit and index == 1 else 1.0)
                one["alias"] = one["input_ids"]  # two names for one tensor, as a collator may give them
                one["kink"] = torch.tensor(float(self.kink and hit and index == 1))
            yield microbatches


def objective(model, batch):
    loss_sum, count, metrics = next_token_objective(model, batch)
    loss_sum = loss_sum * batch["factor"]
    if batch["kink"]:
        loss_sum = loss_sum + (model.embedding.tokens.weight.sum() * 0).sqrt()
    return Totals(loss_sum, count, metrics)


def engine_of(folder, callbacks, config=DROPOUT, **options):
    torch.manual_seed(0)
    return make_engine(folder, callbacks, model=TransformerModel(config), objective=objective, log_every=100, **options)


def weights(engine):
    return torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()])


@pytest.mark.parametrize(
    ("spoilt", "said", "losses"),
    [
        (Spoilt(4, factor=math.nan), r"train/loss is nan \(micro-batch 1 of 0 to 1\)", [True, False]),
        (Spoilt(4, factor=math.inf), r"train/loss is inf \(micro-batch 1 of 0 to 1\)", [True, False]),
        (Spoilt(4, kink=True), r"norm/gradient is nan \(every micro-batch's loss is finite\)", [True, True]),
    ],
    ids=["a loss of NaN", "an infinite loss", "a gradient of NaN"],
)
def test_a_step_that_is_not_finite_is_stopped_before_the_weights_change(tmp_path, spoilt, said, losses):
    good = weights(engine_of(tmp_path / "good", []).fit(Spoilt(0), steps=3))
    engine = engine_of(tmp_path / "caught", [CatchAnomalies()])
    with pytest.raises(BrokenStep, match=rf"Step 4 was stopped before it reached the weights: {said}.*step-00000004.*replay\("):
        engine.fit(spoilt, steps=6)
    assert torch.equal(weights(engine), good) and engine.step == 3
    spoilt.step = 0
    control = engine_of(tmp_path / "control", []).fit(spoilt, steps=6)
    assert not weights(control).isfinite().all(), "the negative control"

    folder = tmp_path / "caught" / "anomalies" / "step-00000004"
    record = read_anomaly(folder)
    assert record["step"] == 4 and [math.isfinite(loss) for loss in record["losses"]] == losses
    saved, there = load_batch(folder), list(engine.microbatches)
    assert [set(one) for one in saved] == [set(one) for one in there]
    pairs = [(a[name], b[name]) for a, b in zip(saved, there, strict=True) for name in b]
    assert all(torch.equal(a, b) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)

    stranger = TransformerModel(DROPOUT, seed=5)
    own = replay(folder, stranger, objective, saved_weights=False)
    again = replay(folder, stranger, objective)
    assert again == pytest.approx(record["losses"], rel=0, abs=0, nan_ok=True) and own[0] != again[0]
    assert all(torch.equal(a, b) for a, b in zip(stranger.parameters(), engine.model.parameters(), strict=True))


def test_a_folder_or_a_model_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(CourseError, match="holds no saved anomaly"):
        replay(tmp_path, TransformerModel(MODEL), objective)
    with pytest.raises(BrokenStep):
        engine_of(tmp_path, [CatchAnomalies()]).fit(Spoilt(1, factor=math.nan), steps=2)
    folder = tmp_path / "anomalies" / "step-00000001"
    for other in (replace(MODEL, num_hidden_layers=1), replace(MODEL, intermediate_size=48)):
        with pytest.raises(CourseError, match="another model's: stack"):
            replay(folder, TransformerModel(other), objective)


def test_a_loss_spike_is_saved_and_changes_nothing_in_the_run(tmp_path):
    """With dropout: looking at the batch must draw no random numbers."""
    plain = engine_of(tmp_path / "plain", [], lr=1e-3).fit(Spoilt(14, factor=30.0), steps=18)
    watched = engine_of(tmp_path / "watched", [CatchAnomalies(window=16)], lr=1e-3).fit(Spoilt(14, factor=30.0), steps=18)
    assert torch.equal(weights(plain), weights(watched)) and watched.step == 18
    [folder] = (tmp_path / "watched" / "anomalies").iterdir()
    record = read_anomaly(folder)
    assert folder.name == "step-00000014" and record["metrics"]["train/loss"] > record["metrics"]["limit"] > record["losses"][0]
    assert not (folder / "weights.safetensors").exists() and len(replay(folder, TransformerModel(DROPOUT), objective)) == 2
    told = [line for line in printed(watched).splitlines() if "spike" in line]
    assert len(told) == 1 and told[0].startswith("Step 14: loss spike, ") and told[0].endswith(f"Its batch is in {folder}.")


def test_a_run_may_continue_past_non_finite_losses(tmp_path):
    """As under dynamic loss scaling, whose updater skips the step; only `keep` batches are saved, every one is told."""

    def skip(model, optimizer, token_count):
        optimizer.zero_grad()

    class Often(Spoilt):
        def __iter__(self):
            for microbatches in super().__iter__():
                self.spoilt = self.step + 1
                yield microbatches

    catch = CatchAnomalies(stop_on_nonfinite=False, keep=2)
    engine = engine_of(tmp_path, [catch], updater=skip).fit(Often(1, factor=math.inf), steps=4)
    assert engine.step == 4 and printed(engine).count("train/loss is inf") == 4
    assert sorted(path.name for path in (tmp_path / "anomalies").iterdir()) == ["step-00000001", "step-00000002"]
    assert not catch.recent, "what is not finite is no measure for later losses"


def test_under_a_dynamic_loss_scale_gradients_may_overflow_and_losses_may_not(tmp_path):
    def skip(model, optimizer, token_count):
        optimizer.zero_grad()

    scaled = engine_of(tmp_path / "gradient", [CatchAnomalies(loss_scaled=True)], updater=skip).fit(Spoilt(2, kink=True), steps=3)
    assert scaled.step == 3 and not (tmp_path / "gradient" / "anomalies").exists()
    with pytest.raises(BrokenStep, match="Step 2 was stopped before it reached the weights: train/loss is nan"):
        engine_of(tmp_path / "loss", [CatchAnomalies(loss_scaled=True)], updater=skip).fit(Spoilt(2, factor=math.nan), steps=3)


def test_the_limit_is_the_median_and_its_absolute_deviations():
    catch = CatchAnomalies(window=32, spike_deviations=10.0)
    catch.recent.extend([1, 9, 2, 8, 3, 7, 4])
    assert catch.limit() == math.inf, "seven losses are too few"
    catch.recent.extend([6, 5])
    assert catch.limit() == pytest.approx(5 + 10 * 1.4826 * 2)  # 1 to 9: median 5, absolute deviations 0 1 1 2 2 3 3 4 4
    catch.recent.append(1e6)
    assert catch.limit() < 100, "one spike moves it little"
    flat = CatchAnomalies(spike_deviations=10.0)
    flat.recent.extend([2.0] * 20)
    assert flat.limit() == pytest.approx(2.2), "a loss that stands still is no reason to call rounding a spike"
    silent = CatchAnomalies(spike_deviations=0)
    silent.recent.extend([2.0] * 20)
    assert silent.limit() == math.inf


def test_what_it_has_seen_survives_a_resume():
    catch, fresh = CatchAnomalies(window=16), CatchAnomalies(window=16)
    catch.recent.extend(float(index) for index in range(20))
    catch.saved = 3
    fresh.load_state_dict(json.loads(json.dumps(catch.state_dict())))
    assert fresh.recent == catch.recent and fresh.limit() == catch.limit() and fresh.saved == 3


def test_ranks_write_beside_each_other(tmp_path):
    engines = [SimpleNamespace(step=6, output=tmp_path, strategy=SimpleNamespace(rank=rank)) for rank in (0, 3)]
    assert [CatchAnomalies().folder(engine).name for engine in engines] == ["step-00000007", "step-00000007-rank-3"]


def test_a_micro_batch_without_a_counted_token_has_no_loss():
    ids = torch.zeros(1, 5, dtype=torch.int64)
    [loss] = microbatch_losses(TransformerModel(MODEL), [{"input_ids": ids, "targets": ids - 100}], next_token_objective)
    assert loss == 0


def test_a_step_in_which_no_token_counts_is_the_updaters_to_refuse(tmp_path):
    class Empty(Loader):
        def __iter__(self):
            for microbatches in super().__iter__():
                yield [one | {"targets": torch.full_like(one["targets"], -100)} for one in microbatches]

    with pytest.raises(ValueError, match="No target counted in this step"):
        make_engine(tmp_path, [CatchAnomalies()]).fit(Empty(), steps=1)
    assert not (tmp_path / "anomalies").exists()
