"""Batches on their way to a device. No GPU is needed: what would be asked of PyTorch is noted."""

import torch

from shared.devices import on_device


def test_a_batch_travels_to_a_gpu_through_pinned_memory_without_waiting(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append("pin") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **options: asked.append((device.type, options)) or tensor)
    on_device({"input_ids": torch.zeros(2), "targets": torch.zeros(2)}, torch.device("cuda"))
    assert asked == ["pin"] * 2 + [("cuda", {"non_blocking": True})] * 2
    asked.clear()
    on_device({"input_ids": torch.zeros(2)}, torch.device("cpu"))
    assert asked == [("cpu", {"non_blocking": True})]


def test_a_batch_that_is_there_stays_there():
    batch = {"input_ids": torch.arange(4)}
    assert on_device(batch, torch.device("cpu"))["input_ids"] is batch["input_ids"]
