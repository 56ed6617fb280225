"""What a resume of the library takes from the checkpoint, and what it refuses: nothing that it was given is ignored without a word."""

import pytest
import torch
from runs import MODEL, Loader, make_engine, printed, weights

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback
from shared.engine.checkpoint.soundness import CheckpointError
from shared.loss import next_token_objective
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig, ScheduleConfig
from shared.optim.schedules import ScheduleLearningRate


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 2e-2}, ["lr"]),
        ({"betas": (0.8, 0.99), "eps": 1e-6}, ["betas", "eps"]),
        ({"parts": 2, "decay": (0.1, 0.0)}, ["weight_decay"]),
    ],
)
def test_settings_that_are_named_are_this_runs_and_the_rest_is_the_checkpoints(tmp_path, settings, words):
    first = engine_of(tmp_path).fit(Loader(), steps=3)
    engine = engine_of(tmp_path, **settings)
    given = [{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} for group in engine.optimizer.param_groups]
    engine.fit(Loader(), steps=3, retune=words)
    for mine, group in zip(given, engine.optimizer.param_groups, strict=True):
        assert {key: tuple(group[key]) if key == "betas" else group[key] for key in mine} == mine
    kept = {id(parameter): state for parameter, state in engine.optimizer.state.items()}
    for mine, theirs in zip(engine.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(mine, theirs) and torch.equal(kept[id(mine)]["exp_avg"], first.optimizer.state[theirs]["exp_avg"])
    assert all(f"The optimizer's {word} is " in printed(engine) for word in words)
    with pytest.raises(CheckpointError, match=rf"retune=\['{sorted(words)[-1]}'\]"):
        engine_of(tmp_path, **settings).fit(Loader(), steps=5, retune=sorted(words)[:-1])


def test_a_rate_that_was_changed_is_the_rate_of_the_next_steps_and_of_the_next_checkpoint(tmp_path):
    """Beside PyTorch's own loop: three steps at one rate, then two at another, with one state."""
    engine_of(tmp_path).fit(Loader(), steps=3)
    engine = engine_of(tmp_path, lr=2e-2).fit(Loader(), steps=5, retune=["lr"])
    alone = engine_of(tmp_path / "alone")
    for step, microbatches in zip(range(5), Loader(), strict=False):
        for group in alone.optimizer.param_groups:
            group["lr"] = 1e-2 if step < 3 else 2e-2
        totals = [next_token_objective(alone.model, each) for each in microbatches]
        alone.optimizer.zero_grad()
        (sum(each.loss_sum for each in totals) / sum(each.token_count for each in totals)).backward()
        alone.optimizer.step()
    for name, weight in weights(engine).items():
        torch.testing.assert_close(weight, weights(alone)[name], rtol=1e-4, atol=1e-6)
    assert engine_of(tmp_path, lr=2e-2).fit(Loader(), steps=6).step == 6, "and nothing differs from now on"


def test_another_optimizer_begins_with_an_empty_state_where_that_is_asked_for(tmp_path):
    before = weights(engine_of(tmp_path).fit(Loader(), steps=3))
    with pytest.raises(CheckpointError, match=r"retune=\['optimizer'\], which empties the state of the optimizer"):
        engine_of(tmp_path, ours, name="lion", lr=1e-3).fit(Loader(), steps=5)
    engine = engine_of(tmp_path, ours, name="lion", lr=1e-3).fit(Loader(), steps=3, retune=["optimizer"])
    assert not engine.optimizer.state and {group["rule"] for group in engine.optimizer.param_groups} == {"lion"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items()) and "begins empty" in printed(engine)
    assert engine.fit(Loader(), steps=5).step == 5


def test_a_setting_that_needs_more_state_is_not_taken_without_it(tmp_path):
    engine_of(tmp_path).fit(Loader(), steps=3)
    with pytest.raises(CheckpointError, match=r"amsgrad .* retune=\['optimizer'\]"):
        engine_of(tmp_path, amsgrad=True).fit(Loader(), steps=5, retune=["amsgrad"])
    assert engine_of(tmp_path, amsgrad=True).fit(Loader(), steps=5, retune=["optimizer"]).step == 5


def test_what_is_no_setting_is_refused(tmp_path):
    engine_of(tmp_path).fit(Loader(), steps=3)
    with pytest.raises(CourseError, match="retune names 'learning_rate': give amsgrad, .*loader.*lr"):
        engine_of(tmp_path).fit(Loader(), steps=5, retune=["learning_rate"])


class Other(Loader):
    """Other data than `Loader`'s, which refuses its position."""

    def load_state_dict(self, state):
        raise CourseError("The data is other data.")


def test_other_data_begins_at_its_start_where_that_is_asked_for(tmp_path):
    engine_of(tmp_path).fit(Loader(), steps=3)
    with pytest.raises(CourseError, match="other data"):
        engine_of(tmp_path).fit(Other(), steps=5)
    engine, loader = engine_of(tmp_path), Other()
    engine.fit(loader, steps=5, retune=["loader"])
    assert loader.step == 2 and "The loader begins at its start" in printed(engine)
    mine = Loader()
    engine_of(tmp_path).fit(mine, steps=6, retune=["loader"])
    assert mine.step == 3, "a loader that takes its position keeps it"


def test_more_steps_extend_a_run_bit_for_bit_where_the_rate_is_constant(tmp_path):
    whole = engine_of(tmp_path / "whole").fit(Loader(), steps=8)
    engine_of(tmp_path / "parts").fit(Loader(), steps=4)
    extended = engine_of(tmp_path / "parts").fit(Loader(), steps=8)
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(extended).items())
