"""Settings of a layout: the operations that each rank starts in a step, in order, how often a block computes, and what surrounds a step."""

import os
import runpy
import signal
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from layout_runs import LayoutRun
from sharded_runs import ADAMW

from setting_effects.effects import Differs, Effects
from shared.course import binding
from shared.course.paths import CHECKOUT
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.model.chunked_loss import packed_next_token_objective
from shared.parallel import parallelize
from shared.parallel.processes import torchrun as processes
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.strategy import ParallelStrategy
from shared.trainer import settings
from shared.trainer.models import RUN_AXES
from shared.trainer.config import TrainerConfig

MODEL = MixtureModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=24)
EXPERTS = replace(MODEL, num_hidden_layers=2, experts=MixtureConfig(4, 8))


def batches(step: int, microbatch: int, config: MixtureModelConfig) -> dict:
    ids = torch.randint(config.vocab_size, (4, 9), generator=torch.Generator().manual_seed(microbatch))
    return {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def step(world: Communicator, config: ParallelConfig, model: MixtureModelConfig = MODEL) -> list:
    made = LayoutRun(
        world, config, model, ADAMW, packed_next_token_objective, microbatches=4, batches=batches, axes=RUN_AXES, builders=MIXTURE
    )
    computed: list = []
    for name, module in made.plain.named_modules():
        if name.endswith("attention"):
            module.register_forward_hook(lambda *_, name=name: computed.append(name))
    made.train(1)
    trace = [(entry.operation, entry.axis, entry.bytes, entry.peer) for entry in world.trace.entries]
    callbacks = [(type(each).__name__, getattr(each, "check_every", None)) for each in made.parallel.callbacks()]
    return [trace, computed, callbacks, [type(each).__name__ for each in made.parallel.around]]


def traced(config: ParallelConfig) -> list:
    if config.ranks == 1:
        return step(SingleRankCommunicator(), config)
    try:
        return run_threads(lambda world: step(world, config), config.ranks)
    except AttributeError as error:  # PyTorch's engines ask for a process group of PyTorch's, which threads have not
        return [str(error)]


def spread(config: ParallelConfig) -> list:
    return run_threads(lambda world: step(world, config, EXPERTS), config.ranks)


class Asked(Exception):
    """Ends the start of a run where its ranks would meet."""


def offloaded(config: ParallelConfig) -> list:
    """Whether a step's optimizer is moved, which on a CPU changes nothing."""
    moved: list = []

    def made(*arguments: Any, offload: str | None, **more: Any) -> ParallelStrategy:
        moved.append(offload)
        return ParallelStrategy(*arguments, offload=offload, **more)

    with patch.object(parallelize, "ParallelStrategy", made):
        return [traced(config), moved]


def waited(config: ParallelConfig) -> tuple:
    """What the trainer's script asks of the ranks' meeting."""

    def from_torchrun(*asked: Any) -> None:
        raise Asked(*asked)

    script = runpy.run_path(str(CHECKOUT / "chapters" / "12_grpo" / "train.py"))
    with (
        patch.object(processes, "from_torchrun", from_torchrun), patch.object(binding, "choose"),
        patch.object(settings, "parse_words", lambda *_: TrainerConfig(parallel=config)), patch.dict(os.environ, {"LOCAL_RANK": "0"}),
        patch.object(signal, "signal"),
    ):  # fmt: skip
        try:
            script["main"]([])
        except Asked as asked:
            return asked.args
    raise AssertionError("the ranks did not meet")


DP2, FSDP2, TP2, PP2 = {"data_parallel": 2}, {"fully_sharded": 2}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}
CHUNKED = PP2 | {"pipeline_schedule": "interleaved"}

PARALLEL = Effects(ParallelConfig, observe=traced, rows={
    "backend": Differs("course", "torch", beside=DP2),
    "pipeline_parallel": Differs(1, 2),
    "pipeline_schedule": Differs("1f1b", "gpipe", beside=PP2),
    "pipeline_chunks": Differs(3, 2, beside=CHUNKED | {"pipeline_layers": "memory"}),
    "pipeline_layers": Differs("flops", (2, 4), beside=PP2),
    "data_parallel": Differs(1, 2),
    "fully_sharded": Differs(1, 2),
    "context_parallel": Differs(1, 2),
    "tensor_parallel": Differs(1, 2),
    "sequence_parallel": Differs(False, True, beside=TP2),
    "expert_parallel": Differs(1, 2, by=spread, beside=DP2),
    "zero": Differs(0, 1, beside=DP2),
    "activation_checkpointing": Differs("none", "full"),
    "reshard_after_forward": Differs(True, False, beside=FSDP2),
    "prefetch": Differs(1, 2, beside=FSDP2),
    "bucket_megabytes": Differs(25.0, 0.005, beside=DP2),
    "offload_optimizer": Differs(False, True, by=offloaded),
    "heartbeat_timeout": Differs(30.0, 31.0, by=waited),
    "collective_timeout": Differs(1800.0, 1801.0, by=waited),
    "init_timeout": Differs(300.0, 301.0, by=waited),
    "check_every": Differs(100, 50, beside=DP2),
})  # fmt: skip

ALL = [PARALLEL]
