"""Chapter 12. Comparison of a distributed run with the same run in a single process: what differs should be rounding.

Loss curves that look alike prove nothing, so the weights are compared as well, tensor by tensor.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shared.course.errors import CourseError
from shared.engine.trackers.jsonl import read_damaged
from shared.parallel.config import layout_name
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.retuning import changes_of


def compare_with_single_process(config: TrainerConfig) -> dict[str, Any]:
    """How far losses and weights are from those of the same run in one process, where a finished one lies beside this run's folder.

    `make run LAYOUT=dp2` writes to `runs/laptop-dp2`, and looks for `runs/laptop`.
    """
    output, name = config.engine.output, layout_name(config.parallel)
    other = output.with_name(output.name.removesuffix(f"-{config.parallel.backend}").removesuffix(f"-{name}"))
    if config.parallel.ranks == 1 or other == output or not same_run(other, config):
        return {}
    (here, _), (there, _) = (read_damaged(folder / "metrics.jsonl") for folder in (output, other))  # what can be compared is
    found = {}
    for metric in ("train/loss", "validation/loss"):
        pairs = [(here[step][metric], there[step][metric]) for step in here if metric in here[step] and metric in there.get(step, {})]
        if pairs:
            found[f"largest difference in {metric} to {other}"] = largest(abs(mine - theirs) for mine, theirs in pairs)
    if config.report.export and (other / "model").is_dir():
        try:
            found[f"largest difference in weights to {other}, relative"] = largest_difference(output / "model", other / "model")
        except (OSError, SafetensorError):  # another run's damage is no reason to end this one without its report
            found["weights"] = f"not compared: the model in {other / 'model'} cannot be read"
    return found


def known_causes(config: TrainerConfig) -> dict[str, str]:
    """What else than rounding makes this run another one than that of a single process. Tensor-parallel ranks alone draw as it does, but
    for their own heads and their own positions."""
    parallel, model = config.parallel, config.model
    cut = parallel.ranks > parallel.tensor_parallel or parallel.sequence_parallel or model.attention_dropout
    if (model.hidden_dropout or model.attention_dropout) and parallel.ranks > 1 and cut:
        return {"dropout": "its draws differ by layout, so losses and weights do as well"}
    return {}


def same_run(folder: Path, config: TrainerConfig) -> bool:
    """Whether a folder holds a finished run of the same configuration, what changes nothing but rounding aside, and with the same history:
    one that was retuned on its way is another run."""
    if not ((folder / provenance.CONFIG).is_file() and (folder / "results.json").is_file()):
        return False
    try:
        before = provenance.read_record(folder / provenance.CONFIG) | {"start": provenance.saved_start(folder)}
        now = provenance.plain(config) | {"start": provenance.saved_start(config.engine.output)}
    except CourseError:
        return False
    mine, theirs = ([[change.step, change.settings] for change in changes_of(each)] for each in (config.engine.output, folder))
    return not provenance.differences(before, now) and mine == theirs


def largest_difference(mine: Path, theirs: Path) -> float:
    """Over the tensors of two exported models: |a - b| / |b|, by their lengths."""
    differences = []
    for path in sorted(mine.glob("*.safetensors")):
        with safe_open(path, "pt") as here, safe_open(theirs / path.name, "pt") as there:
            for name in here.keys():
                other = there.get_tensor(name).double()
                difference = (here.get_tensor(name).double() - other).norm()
                differences.append((difference / other.norm().clamp(min=torch.finfo(other.dtype).tiny)).item())
    return largest(differences)


def largest(values: Iterable[float]) -> float:
    """The largest number, or NaN where any is none: Python's `max` would pass over it."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()
