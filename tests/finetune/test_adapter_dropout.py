"""Dropout of adapters over experts, in training: it zeroes what the updates read, and never what the frozen experts read."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from lora_runs import MIXTURE_MODEL, OF_EXPERTS

from shared.finetune.adapters import attach_adapter
from shared.finetune.lora import AdaptedExperts
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE


def test_the_updates_of_experts_read_rows_with_dropout_and_the_experts_read_all():
    model = attach_adapter(TransformerModel(MIXTURE_MODEL, MIXTURE).double(), replace(OF_EXPERTS, dropout=0.5), seed=0)
    layer = next(module for module in model.modules() if isinstance(module, AdaptedExperts))
    generator = torch.Generator().manual_seed(1)
    for update in layer.updates:
        torch.nn.init.normal_(update.lora_B, generator=generator)
    experts, _, width = layer.weight.shape
    rows, counts = torch.randn(5 * experts, width, generator=generator, dtype=torch.float64), torch.full((experts,), 5)
    torch.manual_seed(2)
    found = layer(rows, counts)
    torch.manual_seed(2)
    dropped = F.dropout(rows, 0.5)
    base, whole = (torch.stack([each @ weight.mT for each, weight in zip(rows.view(experts, 5, width), weights, strict=True)])
                   for weights in (layer.weight, layer.weight + sum(u.scaling * u.lora_B @ u.lora_A for u in layer.updates)))  # fmt: skip
    of_updates = layer.eval()(dropped, counts) - layer.product(dropped, layer.weight, counts)
    torch.testing.assert_close(found, base.flatten(0, 1) + of_updates)
    torch.testing.assert_close(layer(rows, counts), whole.flatten(0, 1))  # and nothing is dropped where the model is used
    assert not torch.allclose(found, whole.flatten(0, 1))
