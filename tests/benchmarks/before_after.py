"""What a training step of the engine costs in two checkouts of this repository, in turn: one process, DDP, FSDP.

    git worktree add ../before 4f743e9
    python tests/benchmarks/before_after.py ../before                             this checkout beside that one, a small model
    python tests/benchmarks/before_after.py ../before --model large --steps 2     the LLaMA of step_speed.py
    python tests/benchmarks/before_after.py . --rows one                          the control: 1.00

A contender is the trainer as its own checkout builds it: `RuntimeEngine` with its default callbacks, packed rows, clipping, fused AdamW,
a log every 10 steps. Its ranks are processes of one thread each that import from their checkout alone. With the small model, what
surrounds the products (norms, callbacks, waits of the host) is a large part of a step. CPU time is of all threads of the busiest rank,
steadier than the clock where other work runs too.
"""

import argparse
import email
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

ROWS = ("one", "dp2", "fsdp2")
SEQ = {"small": 64, "large": 256}
MODELS = {"small": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 352}, "large": {}}
WARMUP = 2


class Checkout:
    """A contender for `side_by_side.compare`: the ranks of one checkout, each a process that does its round when asked."""

    def __init__(self, checkout: Path, row: str, model: str, steps: int):
        self.folder = tempfile.TemporaryDirectory()
        ranks = 2 if row.endswith("2") else 1
        paths = {"PYTHONPATH": f"{checkout}:{checkout / 'tests' / 'benchmarks'}", "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-P", __file__, str(checkout), "--serve", self.folder.name, str(rank), row, model, str(steps)],
                cwd=checkout, env=os.environ | paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self.answers()

    def round(self) -> dict[str, float]:
        for rank in self.ranks:
            print("round", file=rank.stdin, flush=True)
        answers = self.answers()
        return {figure: max(answer[figure] for answer in answers) for figure in answers[0]}

    def answers(self) -> list[dict[str, float]]:
        lines = [rank.stdout.readline() for rank in self.ranks]
        if not all(lines):
            raise RuntimeError("A contender failed: see above.")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self.folder.cleanup()


def serve(folder: Path, rank: int, row: str, model: str, steps: int) -> None:
    """One rank's rounds, asked for on standard input. Runs with the checkout's own modules."""
    from rich.console import Console
    from shared.data.prepare import PrepareConfig
    from shared.data.source import Source
    from trainer_speed import FOREVER, settings

    answers, sys.stdout = sys.stdout, sys.stderr
    world = None if row == "one" else joined(folder, rank)
    config = settings(folder, "cpu", "float32")
    text = PrepareConfig(sources=(Source(path=str(Path(email.__file__).parent), suffixes=(".py",)),), vocab_size=1024, held_out_share=0.2)
    config = replace(config, model=replace(config.model, **MODELS[model]), data=replace(config.data, prepare=text, seq=SEQ[model]))
    if row != "one":
        parse_layout = found("parse_layout", "shared.parallel.config")
        config = replace(config, parallel=parse_layout(row), data=replace(config.data, micro_batch_size=config.data.batch_size // 2))
    run = found("build", "shared.trainer.run", "shared.trainer.modes.pretrain")(config, Console(quiet=True), world)
    mesh = run.mesh if hasattr(run, "mesh") else run.strategy.mesh
    engine, (loader, _) = run.engine, found("loaders", "shared.trainer.modes.pretrain", "shared.trainer.mode")(run.config, run.text, mesh)
    engine.steps, engine.val_loader = FOREVER, None
    engine.lock = SimpleNamespace(require_held=lambda: None)  # `fit` takes the folder's
    engine.stateful = engine.stateful_parts(loader)
    engine.callbacks.tell("on_start", engine)
    trained = engine.trained(loader)
    print("{}", file=answers, flush=True)
    for _ in sys.stdin:
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            next(trained)
            engine.after_step()
        figures = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - busy}
        print(json.dumps({name: figure / steps for name, figure in figures.items()}), file=answers, flush=True)


def joined(folder: Path, rank: int):
    """Rank `rank` of two."""
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = found("loopback", "shared.parallel.processes.launch", "shared.parallel.launch")()
    join_world = found("join_world", "shared.parallel.processes.torchrun", "shared.parallel.processes")
    timeouts = found("Timeouts Patience", "shared.parallel.health.heartbeat", "shared.parallel.heartbeat")()
    return join_world(rank, 2, f"file://{folder}/meeting", torch.device("cpu"), timeouts)


def found(names: str, *modules: str):
    """The first of these names in the first of these modules that the checkout has: both have changed since."""
    for module in modules:
        try:
            there = import_module(module)
        except ModuleNotFoundError:
            continue
        return next(getattr(there, name) for name in names.split() if hasattr(there, name))
    raise ModuleNotFoundError(f"{names} in none of {modules}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="in a round")
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        folder, rank, row, model, steps = options.serve
        return serve(Path(folder), int(rank), row, model, int(steps))

    from parallel_speed import cells_of, of_figure
    from side_by_side import compare

    print("row: ms a step here, before, ratio (95 %); CPU ms of a rank here, before, ratio (95 %)")
    for row in options.rows:
        here, before = (
            Checkout(path.resolve(), row, options.model, options.steps) for path in (Path(__file__).parents[2], options.before)
        )
        pairs = compare(here, before, options.pairs, WARMUP)
        here.close(), before.close()
        print(f"{row}:", *cells_of(pairs), *cells_of(of_figure(pairs, "cpu")), flush=True)


if __name__ == "__main__":
    main()
