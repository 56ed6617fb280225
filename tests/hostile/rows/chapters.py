"""Settings that cannot be, through the chapters' run scripts and in Python."""

from hostile import Row, call, chapter

from shared.engine.trackers import TRACKERS

CHAPTERS = [
    Row(f"chapter {number}: {name}", chapter(number, *words), says, code=code)
    for number in ("01", "02", "03", "04", "05", "06")
    for name, words, says, code in [
        ("a word for a number", ("--steps", "many"), "steps is 'many': give a whole number", 2),
        ("an unknown option", ("--stepz", "3"), ("no setting stepz.", "Did you mean 'steps'?"), 2),
        ("no value", ("--steps",), "--steps has no value", 2),
        ("a lone word", ("faster",), "'faster' is not an option", 2),
        ("an empty output", ("--model", "3"), "model is 3: it is a section", 2),
        ("no such file", ("--config", "none.yaml"), "none.yaml", 2),
        ("whose implementation", ("--impl", "theirs"), "impl is 'theirs'", 2),
    ]
] + [
    Row("chapter 01: no steps", chapter("01", "--steps", "0"), "steps is 0", code=1),
    Row("chapter 01: a rate that is no number", chapter("01", "--learning_rate", ".nan"), "learning_rate is nan"),
    Row("chapter 01: no such text", chapter("01", "--data", "nowhere.txt"), "nowhere.txt does not exist", code=1),
    Row("chapter 01: an empty text", chapter("01", "--data", ""), "data is ''"),
    Row("chapter 02: a renamed value", chapter("02", "--model.attention", "naive"), "model.attention naive is an older name: write eager."),
    Row("chapter 03: a renamed key", chapter("03", "--prepare.cleaning.shortest", "3"), "write prepare.cleaning.min_bytes."),
    Row("chapter 04: an unknown tracker", chapter("04", "--engine.trackers", "[tensorbord]"), "Did you mean 'tensorboard'?"),
    Row("chapter 05: an infinite rate", chapter("05", "--optimizer.lr", ".inf"), "optimizer.lr is inf"),
    Row("chapter 06: a renamed key", chapter("06", "--parallel.recompute", "blocks"), "write parallel.activation_checkpointing"),
    Row("chapter 06: a renamed time-out", chapter("06", "--parallel.timeout", "3"), "write parallel.heartbeat_timeout."),
    Row("chapter 06: no such layout", chapter("06", "--layout", "dp0"), "data_parallel is 0", code=1),
]


def rate_that_is_no_number():
    from shared.optim.config import OptimizerConfig

    OptimizerConfig(lr=float("nan"))


def scale_of_zero():
    from shared.model.config import ModelConfig

    ModelConfig(attention_scale=0.0)


def infinite_range():
    from shared.model.config import ModelConfig

    ModelConfig(initializer_range=float("inf"))


def trackers_of_the_configuration():
    from typing import get_args

    from shared.engine.config import Tracker

    assert list(get_args(Tracker)) == list(TRACKERS)


LIBRARY = [
    Row("a rate of NaN in Python", call(rate_that_is_no_number), "lr is nan", code=1),
    Row("a scale of 0 in Python", call(scale_of_zero), "attention_scale is 0.0", code=1),
    Row("an infinite range in Python", call(infinite_range), "initializer_range is inf", code=1),
    Row("the trackers that a configuration names are those that there are", call(trackers_of_the_configuration), code=0),
]

ROWS = [*CHAPTERS, *LIBRARY]
