"""Process groups of GPUs: NCCL's limit, its device, and its end. torch's functions are stand-ins, since they need GPUs."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from shared.course import launch
from shared.parallel.health.heartbeat import Timeouts
from shared.parallel.processes import torchrun
from shared.parallel.processes.torchrun import join_world, leave_world


class Group:
    """A process group that notes the limit which its backend of a device gets."""

    def __init__(self):
        self.limits = {}

    def rank(self):
        return 0

    def _get_backend(self, device):
        return SimpleNamespace(_set_default_timeout=lambda limit: self.limits.__setitem__(device.type, limit))


LIMITS = [("cuda", 86400, timedelta(minutes=30)), ("cuda", 100, timedelta(seconds=160)), ("cpu", 86400, None)]


@pytest.mark.parametrize("kind, seconds, limit", LIMITS)
def test_nccl_has_its_device_and_a_limit_of_minutes(kind, seconds, limit, monkeypatch):
    group, told, ended = Group(), {}, []
    heartbeat = SimpleNamespace(timeouts=Timeouts(30.0, seconds, 1.0, 5.0), start=lambda: None, close=ended.append)
    monkeypatch.setattr(torchrun, "Heartbeat", lambda *words: heartbeat)
    monkeypatch.setattr(torchrun, "rendezvous", lambda *words, **options: iter([(None, 0, 2)]))
    monkeypatch.setattr(torchrun, "fresh_store", lambda store, *words: store)
    monkeypatch.setattr(torchrun.dist, "init_process_group", lambda backend, **options: told.update(options, backend=backend))
    monkeypatch.setattr(torchrun.dist, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(torchrun.dist, "destroy_process_group", lambda: ended.append("destroyed"))
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    world = join_world(0, 2, "file:///nowhere", device, heartbeat.timeouts)
    assert told.get("device_id") == (device if kind == "cuda" else None)
    assert told["timeout"] >= timedelta(seconds=seconds) and group.limits == ({"cuda": limit} if limit else {})
    part = Group()
    monkeypatch.setattr(torchrun.dist, "new_group", lambda *words, **options: part)
    world.new_group("tp", (0, 1))
    assert part.limits == group.limits
    leave_world(world, "has finished")
    assert ended == ["has finished"]  # another rank may go on: in a machine that fails, nothing is destroyed
    leave_world(world, "has finished", whole=True)
    assert ended[2:] == (["destroyed"] if kind == "cuda" else [])


def test_the_allocator_grows_its_segments_unless_the_user_says_otherwise(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.setattr(launch.os, "environ", {name: "max_split_size_mb:64"})
        launch.let_segments_grow()
        assert launch.os.environ == {name: "max_split_size_mb:64"}
    monkeypatch.setattr(launch.os, "environ", {})
    launch.let_segments_grow()
    assert launch.os.environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
