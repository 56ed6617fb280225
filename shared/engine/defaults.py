"""Chapter 04. Default callbacks of an engine configuration, in the order in which they are called.

What measures comes before what shows, so that a tracker's metrics are complete; what may stop the run comes first of all.
"""

from collections.abc import Callable

import torch

from shared.course.errors import CourseError, SettingError
from shared.engine.debug.anomalies import CatchAnomalies
from shared.engine.callbacks import Callback
from shared.engine.config import EngineConfig
from shared.engine.debug.dump import ModelDump
from shared.engine.stopping import EarlyStopping
from shared.engine.metrics.throughput import Resources, Throughput
from shared.engine.metrics.gradient_norm import Norms
from shared.engine.metrics.flops import peak_flops
from shared.engine.metrics.profiling import Profile
from shared.engine.trackers import make_tracker
from shared.engine.trackers.services import Settings
from shared.model.config import ModelConfig


def default_callbacks(
    config: EngineConfig,
    device: torch.device,
    model_config: ModelConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    loss_scale: Callable[[], float] | None = None,
    settings: Settings | None = None,
) -> list[Callback]:
    """Anomalies, dumps, speed, norms, resources, early stopping, a profile, those by import path, and the trackers.

    Args:
        device: MFU is measured against its peak in `dtype`. Where that is unknown, MFU is left out.
        model_config: of a model whose arithmetic `flops_per_token` counts; None leaves MFU out.
        loss_scale: what gradients are multiplied by under dynamic loss scaling, where they overflow now and then by design.
        settings: what else than the engine's configuration the trackers keep.
    """
    caught = config.anomalies
    callbacks: list[Callback] = [
        CatchAnomalies(caught.stop_on_nonfinite, caught.spike_deviations, caught.window, loss_scaled=loss_scale is not None),
        ModelDump(config.dump.every, config.dump.on_anomaly, loss_scale=loss_scale),
        Throughput(known_peak(device, dtype) if counts(model_config) else None, model_config),
        Norms(loss_scale=loss_scale),
        Resources(),
    ]
    if config.early_stopping:
        callbacks.append(EarlyStopping(config.early_stopping))
    if config.profile.first_step:
        callbacks.append(Profile(config.profile.first_step, config.profile.steps))
    callbacks += own_callbacks(config)
    return callbacks + [make_tracker(name, **options_of(name, config, settings)) for name in config.trackers]


def own_callbacks(config: EngineConfig) -> list[Callback]:
    """The callbacks by import path."""
    made = [extension.bound("engine.callbacks")() for extension in config.callbacks]
    for callback, extension in zip(made, config.callbacks, strict=True):
        if not isinstance(callback, Callback):
            raise SettingError(f"engine.callbacks: {extension.name} is no callback: derive it from shared.engine.callbacks.Callback.")
    return made


def counts(model_config: ModelConfig | None) -> bool:
    return model_config is not None and model_config.architecture != "encoder-decoder"


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    try:
        return peak_flops(device, dtype)
    except CourseError:  # the sentence is for who asks for a peak by name
        return None


def options_of(name: str, config: EngineConfig, settings: Settings | None) -> dict:
    """What a tracker takes from the configuration."""
    options = {
        "wandb": {"project": config.project, "mode": config.wandb_mode, "settings": settings},
        "mlflow": {"experiment": config.project, "uri": config.mlflow_uri, "settings": settings},
        "tensorboard": {"settings": settings},
    }
    return options.get(name, {})
