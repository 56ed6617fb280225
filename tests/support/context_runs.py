"""Small runs under context parallelism for the tests: rows of unevenly many targets, packed or not, on a layout and in one process."""

from dataclasses import replace
from functools import cache, partial

import tensor_runs
import torch
from layout_runs import LayoutRun
from sharded_runs import ADAMW, MUON, ROWS
from tensor_runs import FAMILIES, SGD, SMALL

from shared.data.objectives import masked_language_objective
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig, RopeScaling
from shared.parallel.config import parse_layout
from shared.parallel.context.axis import ContextParallel
from shared.parallel.context.ring import ring_attention
from shared.parallel.parallelize import AXES
from shared.parallel.tensor.axis import TensorParallel

SEQ = 16
MORE = {  # what depends on the whole sequence's length, on the layer, and on the kernel
    "dynamic": {"rope_scaling": RopeScaling("dynamic", factor=4.0), "max_position_embeddings": 6},
    "alternating": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5},
    "eager": {"attention": "eager", "num_key_value_heads": 2},
}
SHARED_OUT = [*(family for family in FAMILIES if family != "t5"), *MORE]
DOCUMENTS = [(16,), (3, 13), (5, 1, 2, 8), (4, 4, 4, 4), (9, 7), (1, 14, 1)]  # lengths in a row: they end within chunks and between them


def config_of(family: str) -> ModelConfig:
    config = ModelConfig(**SMALL | (FAMILIES | MORE)[family])
    longest = SEQ if config.position == "learned" else 0
    return replace(config, max_position_embeddings=max(longest, config.max_position_embeddings))


def batches(step: int, microbatch: int, config: ModelConfig):
    """Unevenly many targets: the first rows have none, and in others the first half, as in prompts, so that some ranks have none."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    ids = torch.randint(config.vocab_size, (ROWS, SEQ + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < torch.linspace(0.1, 0.8, ROWS)[:, None]] = -100
    targets[:2] = -100
    targets[2:7, : SEQ // 2] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "targets": targets}


def packed_batches(step: int, microbatch: int, config: ModelConfig):
    batch = batches(step, microbatch, config)
    lengths = [torch.tensor(DOCUMENTS[row % len(DOCUMENTS)]) for row in range(ROWS)]
    batch["documents"] = torch.stack([torch.arange(len(each)).repeat_interleave(each) for each in lengths])
    batch["positions"] = torch.stack([torch.cat([torch.arange(length) for length in each]) for each in lengths])
    return batch


def make(
    world, layout: str, family: str, optimizer=SGD, packed=False, attend=ring_attention, objective=None, scaler=None, seed: int = 0,
    **settings,
) -> LayoutRun:  # fmt: skip
    config = replace(parse_layout(layout), **settings)
    objective = objective or (masked_language_objective if family == "bert" else packed_next_token_objective)
    axes = (*AXES, ContextParallel(attend), TensorParallel())
    made = packed_batches if packed else batches
    return LayoutRun(
        world, config, config=config_of(family), optimizer=optimizer, objective=objective, batches=made, axes=axes, seed=seed,
        scaler=scaler and scaler(),
    )  # fmt: skip


run = partial(tensor_runs.run, make=make)


@cache
def expected(family: str, optimizer: str = "sgd", packed: bool = False) -> dict:
    return run("one", family, {"sgd": SGD, "adamw": ADAMW, "muon": MUON}[optimizer], packed)[0]
