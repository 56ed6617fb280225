"""Checkpoints from any product of layouts to any other, with experts: two steps on one, three more on another, as if nobody had stopped;
and the export that each layout makes of the same checkpoint."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from mixture_runs import MixtureRun
from products import MODELS, Cell, on_ranks
from torch import Tensor

from shared.model.hf.pretrained import save_pretrained
from shared.model.sharding import sharding_of

LAYOUTS = ("one", "dp2_ep2", "tp2_sp", "cp2", "pp2", "dp2_tp2_zero1", "fsdp2_tp2_ep2", "pp2_fsdp2_ep2", "dp4_ep2_zero2", "pp2_fsdp2_tp2")
CONFIG = replace(MODELS["experts"], experts=replace(MODELS["experts"].experts, capacity_factor=None))  # for cp
BEFORE, AFTER = 2, 3


def run_on(work, layout: str, optimizer: str, **settings) -> list:
    return on_ranks(work, Cell(layout, "experts"), optimizer, config=CONFIG, **settings)


@cache
def uninterrupted(optimizer: str) -> dict[str, Tensor]:
    return run_on(lambda run: run.train(BEFORE + AFTER).weights(), "one", optimizer)[0]


def write(layout: str, optimizer: str, folder: Path) -> None:
    run_on(lambda run: run.train(BEFORE).save(folder, asynchronous=False), layout, optimizer)


def resume(layout: str, optimizer: str, folder: Path) -> float:
    """How far a run that reads the checkpoint ends from one that was not interrupted; at first its weights are others. The loader's
    position is saved with the rest: batches differ by step."""
    return max(run_on(partial(went_on, folder=folder, whole=uninterrupted(optimizer)), layout, optimizer, seed=9))


def went_on(run: MixtureRun, folder: Path, whole: dict[str, Tensor]) -> float:
    if run.restore(folder).step != BEFORE:
        return float("inf")
    here = run.train(AFTER).parallel.state.state_dict(keep_vars=True)
    there = {name: sharding_of(tensor).local(whole[name]) if sharding_of(tensor) else whole[name] for name, tensor in here.items()}
    return max(float((tensor.detach() - there[name]).norm() / whole[name].norm()) for name, tensor in here.items())


def exported(layout: str, optimizer: str, folder: Path, to: Path) -> dict[str, bytes]:
    """The files that a layout writes for transformers, of the checkpoint in a folder."""

    def work(run: MixtureRun) -> None:
        run.restore(folder)
        save_pretrained(run.plain, to, weights=run.parallel.weights())

    run_on(work, layout, optimizer, seed=9)
    return {path.name: path.read_bytes() for path in sorted(to.iterdir())}
