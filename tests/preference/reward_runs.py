"""Three steps of a small reward model on a layout, in float64, on packed pairs with margins, each against one process."""

from dataclasses import replace
from functools import cache

import torch
from lora_runs import DENSE, EVERYTHING, layout_of, with_biases
from mixture_runs import MODEL as MIXTURE_MODEL
from mixture_runs import MixtureRun, observed
from sharded_runs import ROWS

from shared.finetune.adapters import attach_adapter
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.preference.reward_model import RewardConfig, RewardObjective, as_reward_model

SEQ = 16
OBJECTIVE = RewardObjective(RewardConfig(centering=0.05, margin_scale=0.5))
LENGTHS = [(), (7, 9), (3, 5, 2, 4), (1, 2, 4, 4, 3, 2), (), (6, 2)]  # of a row's sequences, in pairs; the rest is padding
LORA = replace(EVERYTHING, targets=("all-linear", "embedding.tokens"))


def rewarding(model):
    return as_reward_model(with_biases(model), seed=5)


def adapted(model, adapter=LORA, prepare=with_biases):
    """With a head that is trained: the adapter freezes what is there before."""
    model = attach_adapter(prepare(model), adapter, seed=5)
    return as_reward_model(model, seed=5).to(model.embedding.tokens.weight.dtype)


MODELS = {
    "dense": (DENSE, rewarding),
    "tied": (replace(DENSE, tie_word_embeddings=True), rewarding),
    "learned": (replace(DENSE, position="learned", norm="layer_norm", gated=False), rewarding),
    "experts": (MIXTURE_MODEL, rewarding),
    "lora": (DENSE, adapted),
}


def pairs(step: int, microbatch: int, config) -> dict:
    """Packed pairs, unevenly many in a row, some rows without one; what stands at padding is not looked at."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    batch = {"input_ids": torch.randint(config.vocab_size, (ROWS, SEQ), generator=generator)}
    lengths = [LENGTHS[row % len(LENGTHS)] for row in range(ROWS)]
    documents, positions = torch.full((ROWS, SEQ), -1), torch.zeros(ROWS, SEQ, dtype=torch.int64)
    for row, each in enumerate(lengths):
        numbers = torch.arange(len(each)).repeat_interleave(torch.tensor(each, dtype=torch.int64))
        documents[row, : len(numbers)] = numbers
        if each:
            positions[row, : len(numbers)] = torch.cat([torch.arange(length) for length in each])
    margins = torch.rand(ROWS, SEQ, generator=generator, dtype=torch.float64).masked_fill(torch.arange(SEQ) > 3, torch.nan)
    return batch | {"documents": documents, "positions": positions, "margins": margins, "targets": torch.full((ROWS, SEQ), -100)}


def make(world: Communicator, layout: ParallelConfig, model: str, optimizer: str = "adamw", **settings) -> MixtureRun:
    config, prepare = MODELS[model]
    return MixtureRun(world, layout, optimizer, config, **{"prepare": prepare, "objective": OBJECTIVE, "batches": pairs} | settings)


def on_ranks(word: str, model: str, optimizer: str = "adamw", settings: dict | None = None, **more) -> list[dict]:
    layout = layout_of(word, **more)
    return run_threads(lambda world: observed(make(world, layout, model, optimizer, **settings or {})), layout.ranks)


@cache
def alone(model: str, optimizer: str = "adamw") -> dict:
    return observed(make(SingleRankCommunicator(), ParallelConfig(), model, optimizer))
