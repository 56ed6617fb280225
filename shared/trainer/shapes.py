"""Chapter 12. Shape of a pretrained model (its architecture and sizes) that need not be there: for what is planned before a download."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.course.errors import CourseError
from shared.course.typed import configured
from shared.data.prepare import PrepareConfig
from shared.model.families import PRESETS
from shared.moe.config import MixtureModelConfig
from shared.trainer.settings import read_settings
from shared.trainer.weights import find_initial_weights


def start_shape(settings: Mapping[str, Any], file: Path) -> MixtureModelConfig:
    """The architecture of the model in start_from. Where that is not there yet: of the configuration beside `file` that trains it, or of
    the published model (`shared.model.families.PRESETS`) with whose name the folder's begins, as models/llama-3.1-8b-instruct does.

    Raises:
        CourseError: nothing says it.
    """
    start = Path(settings["start_from"]).expanduser()
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
