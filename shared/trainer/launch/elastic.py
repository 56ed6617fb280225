"""Chapter 12. Elastic training: a run that loses ranks or a machine continues with those that are left, and takes new ones in.

torchrun with `--nnodes MIN:MAX` notices who leaves and who comes, and starts all ranks again. What is decided here, at each start:

    layout    the data axes shrink and grow; tensor, pipeline and context parallelism stay, and so do the global batch and its order
    idle      ranks that no layout can use wait until others come, or until the run has ended
    history   `shared.trainer.records.history`: who was there from which step on, and why that ended

A run resumes from its newest checkpoint, which ranks of any layout can load. So a rank that is lost costs the steps since then
(`engine.checkpoint.every`). One that joins costs none: torchrun asks the others to leave, and they save first.

Left out on purpose: copies of the state in other ranks' memory, which would save those steps; and dropout's draws, which each layout makes
in its own way: without dropout the weights are those of an undisturbed run, but for rounding.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch.distributed import TCPStore

from shared.course.errors import CourseError
from shared.engine.checkpoint.folder import Checkpoints
from shared.parallel.config import ParallelConfig, layout_name
from shared.parallel.health.heartbeat import EXIT_CODE
from shared.parallel.processes.torchrun import whole_number
from shared.trainer.config import TrainerConfig
from shared.trainer.records.history import has_ended
from shared.trainer.sections import ROLLING

ASKED = (0, *(128 + number for number in (signal.SIGINT, signal.SIGTERM)))  # exit codes of a run that ended, or was asked to
LOOK = 1.0  # seconds between two looks of a rank that waits


def fitted(config: TrainerConfig, ranks: int) -> TrainerConfig | None:
    """The configuration with its layout for the ranks that are there: the one that uses most of them, of those that the settings allow.

    The degrees of pipeline, context and tensor parallelism are the configured ones. Where `parallel.fully_sharded` alone is more than 1, it
    takes all data ranks; beside `data_parallel` it stays as near to what it was as it can. Experts stay spread as they are where two
    ranks or more are left for them.

    Returns:
        None where so few ranks hold no replica.
    """
    parallel = config.parallel
    most = min(ranks * parallel.data_ranks // parallel.ranks, config.data.batch_size)
    for experts in dict.fromkeys((parallel.expert_parallel, 1)):
        for data in range(most, 0, -1):
            for sharded in sharding_degrees(parallel, data):
                replicas = data // sharded
                degrees = {"data_parallel": replicas, "fully_sharded": sharded, "expert_parallel": experts}
                with suppress(ValueError):  # the settings refuse this layout
                    fit = replace(config, parallel=replace(parallel, **degrees, zero=parallel.zero if replicas > 1 else 0))
                    require_shared_rollouts(fit)
                    return fit
    return None


def sharding_degrees(parallel: ParallelConfig, data: int) -> list[int]:
    """Degrees of full sharding for so many data ranks, best first: those that need more memory come last."""
    if parallel.fully_sharded == 1:
        return [1]
    if parallel.data_parallel == 1:
        return [data]
    degrees = [degree for degree in range(1, data + 1) if data % degree == 0]
    return sorted(degrees, key=lambda degree: (degree < parallel.fully_sharded, abs(degree - parallel.fully_sharded)))


def require_shared_rollouts(config: TrainerConfig) -> None:
    if config.mode in ROLLING:
        rollout = getattr(config, config.mode)
        if rollout.prompts * rollout.answers % config.parallel.data_ranks:
            raise ValueError("The answers of a rollout cannot be shared equally.")


def layout_for_those_there(config: TrainerConfig) -> TrainerConfig:
    """The configuration for the ranks that torchrun has started. An idle rank waits, and never returns."""
    rank, ranks = whole_number("RANK", "0"), whole_number("WORLD_SIZE", "1")
    if "LOCAL_RANK" in os.environ:  # torchrun's own variable
        threading.Thread(target=end_with_agent, args=(os.getppid(),), daemon=True).start()
    fit = fitted(config, ranks)
    if fit is not None and rank < fit.parallel.ranks:
        os.environ["WORLD_SIZE"] = str(fit.parallel.ranks)  # of the ranks that meet
        return fit
    if rank == 0:
        print(f"Layout {layout_name(config.parallel)} has no replica on {ranks} ranks: waiting for more.", flush=True)
    while fit is None or not has_ended(config.engine.output):
        time.sleep(LOOK)  # torchrun ends this process when the ranks change
    raise SystemExit(0)


def end_with_agent(agent: int) -> None:
    """End this process when torchrun's own is gone: nobody else would end it, and it would train beside the others' next start."""
    while os.getppid() == agent:
        time.sleep(LOOK)
    os._exit(EXIT_CODE)


# One machine.


def keep_running(config: TrainerConfig, start: Callable[[int], int]) -> int:
    """Run on one machine until the run has ended, with fewer ranks where it fails twice without a new checkpoint, or where a GPU is gone.

    Args:
        start: start(ranks) runs so many, and returns the exit code of the first that failed.

    Returns:
        The exit code of the last start.
    """
    ranks, before = config.parallel.ranks, None
    checkpoints = Checkpoints(config.engine.output / "checkpoints")
    while True:
        code = start(ranks)
        there = ranks if config.engine.device == "cpu" or not torch.cuda.is_available() else min(ranks, torch.cuda.device_count())
        if code in ASKED or (code < 3 and there == ranks):  # an error of the program or of the settings would follow again
            return code
        saved = checkpoints.steps()
        fit = fitted(config, there - (saved == before))
        if fit is None:
            return code
        print(f"A rank ended with exit code {code}: starting again, on {fit.parallel.ranks} of {ranks} ranks.", flush=True)
        ranks, before = fit.parallel.ranks, saved


# History.


# Several machines.


def hold_rendezvous(address: str, port: int) -> None:
    """Hold the store in which torchrun's machines find each other, until the process is ended. The machine on which a store is must not go.

    Raises:
        CourseError: the address is not this machine's, or the port is taken.
    """
    try:
        listening = socket.create_server((address, port))  # torch alone would listen on every network
    except OSError as error:
        raise CourseError(f"{address}:{port} cannot be listened on ({error.strerror}): give another --address or --port.") from None
    _store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    signal.pause()
