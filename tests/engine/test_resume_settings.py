"""What a resume of the library takes from the checkpoint, and what it refuses: nothing that it was given is ignored without a word."""

import pytest
import torch
from runs import MODEL, Loader, make_engine, weights

from shared.engine.callbacks import Callback
from shared.engine.checkpoint.soundness import CheckpointError
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.callbacks import ScheduleLearningRate
from shared.optim.config import OptimizerConfig, ScheduleConfig


def adamw(model, lr=1e-2, parts=1, decay=(0.1, 0.1), **settings):
    parameters = list(model.parameters())
    groups = [{"params": parameters[part::parts], "weight_decay": decay[part]} for part in range(parts)]
    return torch.optim.AdamW(groups, lr=lr, **settings)


def engine_of(folder, make=adamw, callbacks=(), dtype=torch.float32, **settings):
    model = TransformerModel(MODEL).to(dtype)
    return make_engine(folder, callbacks, model=model, optimizer=make(model, **settings))


def ours(model, **settings):
    return build_optimizer(model, OptimizerConfig(**settings))


OTHER = {
    "another rate": ({"lr": 2e-2}, "lr for .* is 0.02 here and 0.01 in the saved run"),
    "other betas": ({"betas": (0.8, 0.99)}, r"betas for .* is \[0.8, 0.99\] here and \[0.9, 0.999\] in the saved run"),
    "another weight decay": ({"decay": (0.2,)}, "weight_decay for .* is 0.2 here and 0.1 in the saved run"),
    "a group with another decay": ({"parts": 2, "decay": (0.1, 0.0)}, "weight_decay for .* is 0.0 here and 0.1 in the saved run"),
    "another epsilon": ({"eps": 1e-6}, "eps for .* is 1e-06 here and 1e-08 in the saved run"),
    "amsgrad": ({"amsgrad": True}, "amsgrad for .* is True here and False in the saved run"),
    "another optimizer": ({"make": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2)}, "dampening for .* is 0 here and None"),
    "an optimizer of ours": ({"make": ours, "lr": 1e-2}, "betas for .* is .* here and"),
    "another dtype": ({"dtype": torch.float64}, "is float64 here and float32 in the saved run: resume in that dtype"),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_setting_is_refused_by_key_with_both_values(tmp_path, what):
    settings, sentence = OTHER[what]
    before = weights(engine_of(tmp_path).fit(Loader(), steps=3))
    with pytest.raises(CheckpointError, match=f"step-00000003 does not fit this run. The (optimizer's|weight) .*{sentence}"):
        engine_of(tmp_path, **settings).fit(Loader(), steps=5)
    again = engine_of(tmp_path).fit(Loader(), steps=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(again).items())


@pytest.mark.parametrize("changed", [{"lr": 2e-2}, {"weight_decay": 0.2}, {"betas": (0.8, 0.9)}, {"name": "lion"}, {"no_decay": ["*"]}])
def test_another_setting_of_our_optimizer_is_refused(tmp_path, changed):
    engine_of(tmp_path, ours, lr=1e-2).fit(Loader(), steps=3)
    with pytest.raises(CheckpointError, match="does not fit this run. The optimizer's"):
        engine_of(tmp_path, ours, **{"lr": 1e-2} | changed).fit(Loader(), steps=5)


def test_the_same_settings_in_other_groups_and_another_way_to_compute_the_step_are_taken(tmp_path):
    engine_of(tmp_path).fit(Loader(), steps=3)
    assert engine_of(tmp_path, parts=2, foreach=True).fit(Loader(), steps=5).step == 5


class Halve(Callback):
    """Somebody's own schedule: it sets the rate and keeps no other."""

    def before_optimizer(self, engine):
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 / (engine.step + 1)


class Pytorchs(Callback):
    """PyTorch's own schedule, as its users write it: made over the optimizer, stepped after each step."""

    def __init__(self, make):
        self.make = make

    def on_start(self, engine):
        self.schedule = self.make(engine.optimizer)

    def on_step(self, engine):
        self.schedule.step()


SCHEDULES = {
    "ours": lambda: ScheduleLearningRate(ScheduleConfig("cosine", 10, 2)),
    "somebody's own": Halve,
    "PyTorch's": lambda: Pytorchs(lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)),
    "PyTorch's, of rate and momentum": lambda: Pytorchs(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=99)
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_schedule_drives_is_no_difference(tmp_path, schedule):
    engine_of(tmp_path, callbacks=[SCHEDULES[schedule]()]).fit(Loader(), steps=3)
    if schedule != "PyTorch's, of rate and momentum":  # which gives the rate itself
        with pytest.raises(CheckpointError, match="lr for .* is 0.5 here and 0.01 in the saved run"):
            engine_of(tmp_path, callbacks=[SCHEDULES[schedule]()], lr=0.5).fit(Loader(), steps=5)
    assert engine_of(tmp_path, callbacks=[SCHEDULES[schedule]()]).fit(Loader(), steps=5).step == 5


class Raise(Callback):
    def on_start(self, engine):
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.25


def test_the_way_to_change_a_setting_on_purpose_that_the_refusal_names_works(tmp_path):
    engine_of(tmp_path).fit(Loader(), steps=3)
    engine = engine_of(tmp_path, callbacks=[Raise()]).fit(Loader(), steps=4)
    assert engine.optimizer.param_groups[0]["lr"] == 0.25 and engine_of(tmp_path).fit(Loader(), steps=5).step == 5
