"""Chapter 12. Model configuration of a run that starts from pretrained weights: theirs, with the few settings that may differ."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

from shared.course.errors import SettingError
from shared.course.typed import configured, typed
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.trainer import provenance
from shared.trainer.weights import InitialWeights

MAY_DIFFER = ("attention", "hidden_dropout", "attention_dropout", "initializer_range")
OF_ROPE = ("max_position_embeddings", "rope_theta", "rope_scaling")  # may differ where positions are rope's: a longer context
OF_EXPERTS = ("balance_coefficient", "balance_convention", "z_coefficient", "capacity_factor", "implementation")
NONE_MEANS_NONE = ("experts", "rope_scaling", "sliding_window")  # elsewhere null stands for a default, and contradicts nothing


def model_section(given: Any, start: InitialWeights) -> dict[str, Any]:
    """The section `model` of a run that starts from these weights: theirs, with what was given where that may differ.

    Args:
        given: the settings of the section, as YAML gave them.

    Raises:
        SettingError: a setting contradicts the weights. Names it, and both values.
    """
    hints, model = get_type_hints(MixtureModelConfig), start.model
    known = {field.name for field in fields(MixtureModelConfig)}
    free = MAY_DIFFER + (OF_ROPE if model.position == "rope" else ())
    changes: dict[str, Any] = {name: value for name, value in given.items() if name not in known}  # refused later, with the nearest name
    for name in known & given.keys() - {"vocab_size"}:
        value, there, key = given[name], getattr(model, name), f"model.{name}"
        if value is None and name not in NONE_MEANS_NONE:
            continue
        if name == "experts" and isinstance(value, Mapping) and there is not None:
            value = configured(MixtureConfig, value, key, there)
            back = {each: getattr(there, each) for each in OF_EXPERTS}
            contradicts = replace(value, **back) != there
        else:
            value = typed(hints[name], value, key)
            contradicts = value != there and name not in free
        if contradicts:
            raise SettingError(
                f"{key} is {shortened(value)}, and the model in start_from, {start.folder}, has {shortened(there)}: leave it out "
                "(model=null leaves out the file's whole section, and chapters/12_grpo/pretrained_domain.yaml has none), or give "
                "another start_from."
            )
        changes[name] = provenance.plain(value)
    return provenance.plain(model) | changes


def shortened(value: Any) -> str:
    said = str(provenance.plain(value))
    return said if len(said) < 80 else f"{said[:80]} ..."
