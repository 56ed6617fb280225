"""Attention document by document in each layout that takes packed rows, against one process whose attention is written out with a mask."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from layout_runs import LayoutRun, largest_difference
from sharded_runs import ADAMW, SMALL

from shared.model import attention
from shared.model.chunked_loss import packed_next_token_objective
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.trainer.models import RUN_AXES

SEQ = 512
LENGTHS = [[200, 112, 100, 100], [5, 7, 300, 200]]
CONFIG = replace(SMALL, intermediate_size=28, num_hidden_layers=2, max_position_embeddings=SEQ)


def packed(step, microbatch, config):
    ids = torch.randint(config.vocab_size, (2, SEQ + 1), generator=torch.Generator().manual_seed(10 * step + microbatch))
    lengths = [torch.tensor(each) for each in LENGTHS]
    documents = torch.stack([torch.arange(len(each)).repeat_interleave(each) for each in lengths])
    positions = torch.stack([torch.cat([torch.arange(length) for length in each]) for each in lengths])
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "documents": documents, "positions": positions}


def record(layout, world, config=CONFIG):
    return LayoutRun(world, layout, config, ADAMW, packed_next_token_objective, batches=packed, axes=RUN_AXES).record()


@pytest.mark.parametrize("name, takes_documents", [*((name, True) for name in ("one", "dp2", "fsdp2", "tp2_sp", "pp2")), ("cp2", False)])
def test_a_layout_trains_what_attention_written_out_trains(name, takes_documents, monkeypatch):
    calls, attend = [], attention.attend_documents
    monkeypatch.setattr(attention, "attend_documents", lambda *inputs: calls.append(1) or attend(*inputs))
    layout = parse_layout(name, ParallelConfig())
    work = partial(record, layout)
    records = [work(SingleRankCommunicator())] if layout.ranks == 1 else run_threads(work, layout.ranks)
    assert bool(calls) == takes_documents
    one = record(ParallelConfig(), SingleRankCommunicator(), replace(CONFIG, attention="eager"))
    weights = {name: tensor for each in records for name, tensor in each.weights.items()}
    assert largest_difference(weights, one.weights) < 1e-9
    for each in records:
        torch.testing.assert_close(torch.stack(each.losses), torch.stack(one.losses), rtol=1e-9, atol=0)
        torch.testing.assert_close(torch.stack(each.norms), torch.stack(one.norms), rtol=1e-9, atol=0)
