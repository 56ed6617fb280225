"""Chapter 12. Configuration to plan: a dry run before its model and data exist, in its own layout or another.

The architecture is that of the model in `start_from`, or, before that exists, of the published model of its name. The vocabulary is the
tokenizer's where there is one, and else as large as `data.prepare.vocab_size` asks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.course.errors import CourseError, SettingError
from shared.course.typed import configured, with_words
from shared.data.prepare import PrepareConfig
from shared.data.tokenizer import TextTokenizer
from shared.finetune.gguf.packaged import is_gguf
from shared.finetune.gguf.unpack import shape_of
from shared.model.config import ModelConfig
from shared.model.families import PRESETS, preset
from shared.model.hf.files import PretrainedError
from shared.moe.config import MixtureModelConfig
from shared.parallel.config import AXES, VIEWS, parse_layout
from shared.trainer.config import TrainerConfig
from shared.trainer.model_section import model_section
from shared.trainer.planner.memory import reward_model_setting
from shared.trainer.settings import from_settings, read_settings
from shared.trainer.weights import InitialWeights, find_initial_weights


def open_planned(file: Path, words: Sequence[str] = (), layout: str | None = None, model: str | None = None) -> TrainerConfig:
    """Read a configuration to plan it.

    Args:
        words: overrides, key=value.
        layout: replaces the file's degrees, such as dp2_tp2.
        model: a folder, or the name of a published model; replaces start_from and the section model.

    Raises:
        CourseError: the trainer would refuse it; with the same message.
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


def start_shape(settings: Mapping[str, Any], file: Path) -> MixtureModelConfig:
    """The architecture of the model in start_from. Where that is not there yet: of the configuration beside `file` that trains it, or of
    the published model (`shared.model.families.PRESETS`) with whose name the folder's begins, as models/llama-3.1-8b-instruct does.

    Raises:
        CourseError: nothing says it.
    """
    start = Path(settings["start_from"]).expanduser()
    if is_gguf(start):
        return gguf_model(start, "start_from")
    if start.exists():
        return find_initial_weights(start).model
    for beside in sorted(file.parent.glob("*.yaml")):
        trained = read_settings(beside)
        if beside != file and (trained.get("engine") or {}).get("output") == str(start):
            if trained.get("start_from"):
                return start_shape(trained, beside)
            model = configured(MixtureModelConfig, trained.get("model") or {}, "model")
            return replace(model, vocab_size=((trained.get("data") or {}).get("prepare") or {}).get("vocab_size", PrepareConfig.vocab_size))
    known = [name for name in PRESETS if start.name.lower().startswith(name)]
    if not known:
        raise CourseError(
            f"start_from is {start}, which is not there, no file beside {file.name} trains it, and its name begins with none of "
            f"{', '.join(PRESETS)}: download it, or begin the folder's name with one of these."
        )
    return MixtureModelConfig(**PRESETS[max(known, key=len)])


def gguf_model(path: Path, setting: str) -> MixtureModelConfig:
    """The model in a GGUF file, of which no weight is read."""
    try:
        return MixtureModelConfig(**vars(shape_of(path)))
    except PretrainedError as error:
        raise SettingError(f"{setting}: {error}") from None


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
    if is_gguf(model):
        return gguf_model(Path(model), "--model")
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
