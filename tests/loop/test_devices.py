"""Batches on their way to a device. No GPU is needed: what would be asked of PyTorch is noted."""

import torch

from shared.devices import on_device, on_host


def test_a_batch_travels_to_a_gpu_through_pinned_memory_without_waiting(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append("pin") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **options: asked.append((device.type, options)) or tensor)
    batch = {"input_ids": torch.zeros(2), "targets": torch.zeros(2)}
    there = on_device(batch, torch.device("cuda"))
    assert asked == ["pin", ("cuda", {"non_blocking": True})] * 2
    assert there.keys() == {*batch, "targets_on_host"} and on_host(there, "targets") is batch["targets"]  # which the host reads
    asked.clear()
    on_device({"input_ids": torch.zeros(2)}, torch.device("cpu"))
    assert asked == [("cpu", {"non_blocking": True})]


def test_a_batch_that_is_there_stays_there():
    batch = {"input_ids": torch.arange(4)}
    assert on_device(batch, torch.device("cpu"))["input_ids"] is batch["input_ids"]
