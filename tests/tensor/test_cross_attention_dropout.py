"""Dropout of every attention of a cut encoder-decoder: tensor-parallel ranks have other heads, so each draws masks of its own."""

from dataclasses import replace

import torch
from tensor_runs import config_of

from shared.model.masks import AttentionMask
from shared.model.transformer import TransformerModel
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.processes.launch import run_processes
from shared.parallel.tensor.axis import TensorParallel


def attended(world):
    """(backend, attention) -> what its dropout leaves of ones; and random numbers that are drawn afterwards."""
    found = {}
    for backend in ("course", "torch"):
        model = TransformerModel(replace(config_of("t5"), attention_dropout=0.5))
        TensorParallel().shape(model, Mesh(ParallelConfig(tensor_parallel=2, backend=backend), world))
        encoder, decoder = model.encoder.blocks["0"], model.stack.blocks["0"]
        attentions = {"encoder": encoder.attention, "decoder": decoder.attention, "cross": decoder.cross_attention}
        torch.manual_seed(1)
        ones = torch.ones(1, 2, 20, 4)
        for name, attention in attentions.items():
            found[backend, name] = attention.attend(ones, ones, ones, AttentionMask(), 1.0, 0.5)
    return found, torch.rand(3)


def test_each_attention_of_an_encoder_decoder_draws_masks_of_its_own_on_each_rank():
    (first, after), (second, after_too) = run_processes(attended, 2, timeout=300)  # threads share one generator
    assert [pair for pair in first if torch.equal(first[pair], second[pair])] == [] and len(first) == 6
    assert torch.equal(after, after_too)
