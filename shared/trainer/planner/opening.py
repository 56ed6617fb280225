"""Chapter 12. A configuration as the planner takes it: nothing is downloaded, and a layout may replace its own.

The model of `start_from` is that folder's, or, before it is there, the one of its name (`shared.trainer.shapes`). The vocabulary is the
tokenizer's where there is one, and else as large as `data.prepare.vocab_size` asks.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.course.errors import CourseError, SettingError
from shared.course.typed import with_words
from shared.data.tokenizer import TextTokenizer
from shared.model.config import ModelConfig
from shared.model.families import PRESETS, preset
from shared.moe.config import MixtureModelConfig
from shared.parallel.config import AXES, VIEWS, parse_layout
from shared.trainer.config import TrainerConfig
from shared.trainer.model_section import model_section
from shared.trainer.planner.memory import reward_model_setting
from shared.trainer.settings import from_settings, read_settings
from shared.trainer.shapes import start_shape
from shared.trainer.weights import InitialWeights, find_initial_weights


def open_planned(file: Path, words: Sequence[str] = (), layout: str | None = None, model: str | None = None) -> TrainerConfig:
    """Read a configuration to plan it.

    Args:
        words: key=value, over the file's.
        layout: in place of the file's degrees, such as dp2_tp2.
        model: a folder, or the name of a published model, in place of what start_from or the section model says.

    Raises:
        CourseError: the file cannot be read, or the trainer would refuse it; its own sentence.
    """
    if bad := [word for word in words if "=" not in word]:
        raise SettingError(f"{bad[0]!r} is not a setting: write key=value.")
    settings = with_words(TrainerConfig, read_settings(file, TrainerConfig), dict(word.removeprefix("--").split("=", 1) for word in words))
    if layout is not None:
        settings["parallel"] = with_degrees(settings.get("parallel") or {}, layout)
    start = settings.get("start_from")
    if model is not None:
        shape, given = named_shape(model), {}
    elif isinstance(start, str):
        shape, given = start_shape(settings, file), settings.get("model") or {}
    else:
        return with_vocabulary(from_settings(TrainerConfig, settings))
    weights = InitialWeights(Path(start or model), shape.resolved(), None)
    return from_settings(TrainerConfig, settings | {"model": model_section(given, weights)}, complete=False)


def with_degrees(parallel: dict[str, Any], layout: str) -> dict[str, Any]:
    """The section with a layout's degrees; sequence parallelism stays where the layout has tensor parallelism."""
    try:
        asked = parse_layout(layout)
    except ValueError as error:
        raise SettingError(str(error)) from None
    cut = asked.sequence_parallel or (parallel.get("sequence_parallel") is True and asked.tensor_parallel > 1)
    degrees = {name: getattr(asked, name) for name in (*AXES.values(), *VIEWS.values(), "zero")}
    return parallel | degrees | {"sequence_parallel": cut}


def named_shape(model: str) -> MixtureModelConfig:
    """A folder's model, or a published one.

    Raises:
        SettingError: it is neither.
    """
    if Path(model).exists():
        return find_initial_weights(Path(model), "--model").model
    if model not in PRESETS:
        raise SettingError(f"--model is {model}: give a folder with a model, or one of {', '.join(PRESETS)}.")
    return MixtureModelConfig(**vars(preset(model)))


def with_vocabulary(config: TrainerConfig) -> TrainerConfig:
    prepare = config.data.prepare
    size = prepare.vocab_size
    if prepare.tokenizer is not None:
        try:
            size = TextTokenizer.load(prepare.tokenizer).vocab_size
        except (CourseError, OSError):
            size = config.model.vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))


def reward_shape(config: TrainerConfig) -> ModelConfig | None:
    """The shape of a reward model that is not there yet, which begins as the policy does; None where it is there, or none is asked."""
    setting = reward_model_setting(config)
    return config.model if setting and not Path(setting[0]).exists() else None
