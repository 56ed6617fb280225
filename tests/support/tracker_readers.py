"""What TensorBoard, W&B and MLflow hold of a run, read back with their own readers: step -> metrics, as `metrics.jsonl` has it."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shared.engine.callbacks import Metrics
from shared.engine.trackers.jsonl import from_json

Steps = dict[int, Metrics]


def in_32_bits(steps: Steps) -> Steps:
    """As TensorBoard's files hold them."""
    with np.errstate(over="ignore"):
        return {step: {name: float(np.float32(value)) for name, value in metrics.items()} for step, metrics in steps.items()}


def tensorboard_metrics(folder: Path) -> tuple[Steps, Any]:
    """Of the run in `folder`, and the reader."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator  # the one behind its page
    from tensorboard.util.tensor_util import make_ndarray

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    reader.Reload()
    found: Steps = {}
    for name in reader.Tags()["tensors"]:
        if name != "settings/text_summary":
            for event in reader.Tensors(name):
                assert name not in found.setdefault(event.step, {}), f"step {event.step} of {name} stands twice"
                found[event.step][name] = float(make_ndarray(event.tensor_proto))
    return found, reader


def mlflow_metrics(folder: Path) -> tuple[Steps, Any]:
    """Of the one run in the store of `folder`, and that run."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    [stored] = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    found: Steps = {}
    for name in stored.data.metrics:
        for metric in client.get_metric_history(stored.info.run_id, name):
            assert name not in found.setdefault(metric.step, {}), f"step {metric.step} of {name} stands twice"
            found[metric.step][name] = metric.value
    return found, stored


def wandb_parts(folder: Path) -> list[tuple[str | None, Steps]]:
    """What each part of an offline run holds, in the order of the parts: (run id, steps), by W&B's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    parts = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        run_id, steps = None, {}
        for record in map(Record.FromString, wandb_payloads(path.read_bytes())):
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
            elif record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                steps[record.history.step.num] = from_json({name: value for name, value in items.items() if not name.startswith("_")})
        parts.append((run_id, steps))
    return parts


def wandb_payloads(content: bytes) -> Iterator[bytes]:
    """The records in a `.wandb` file: seven bytes of header, then LevelDB's log format, which cuts a record at each 32 KiB."""
    assert content[:4] == b":W&B"
    block, position, record = 2**15, 7, b""
    while position + 7 <= len(content):
        if block - position % block < 7:  # too little is left of the block for a part's head: it is padding
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""
