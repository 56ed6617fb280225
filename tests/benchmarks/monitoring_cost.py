"""What watching a run costs: the seconds inside the callbacks of a run of `step_speed.py`'s LLaMA, beside the seconds of its steps.

    python tests/benchmarks/monitoring_cost.py
    python tests/benchmarks/monitoring_cost.py --steps 60 --log-every 10

Both are taken from one run, so that a machine that changes its speed changes both. All metrics are on, and the trackers console, jsonl
and tensorboard. The first ten steps are left out: they fetch memory and import what is imported late.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from step_speed import PEERS, batches

from shared.devices import keep_freed_memory
from shared.model.chunked_loss import packed_next_token_objective
from shared.engine.callbacks import Callback
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.engine.debug.anomalies import CatchAnomalies
from shared.engine.debug.dump import ModelDump
from shared.engine.engine import RuntimeEngine
from shared.engine.metrics.gradient_norm import Norms
from shared.engine.metrics.flops import measure_peak
from shared.engine.metrics.throughput import Resources, Throughput
from shared.engine.trackers import make_tracker
from shared.model.transformer import TransformerModel

WARMUP = 10
HOOKS = ("on_batch", "before_optimizer", "on_step", "on_log", "measure")


class Stopwatch:
    """Adds up the seconds inside a callback's hooks, from step WARMUP on."""

    def __init__(self):
        self.spent: Counter[str] = Counter()

    def watch(self, callback: Callback) -> Callback:
        for hook in HOOKS:
            setattr(callback, hook, self.timed(type(callback).__name__, getattr(callback, hook)))
        return callback

    def timed(self, name, function):
        def call(engine, *rest):
            began = time.perf_counter()
            try:
                return function(engine, *rest)
            finally:
                if engine.step >= WARMUP:
                    self.spent[name] += time.perf_counter() - began

        return call


class StepSeconds(Callback):
    """From the first step after the warm-up to the last, logs included, as a reader with a watch would take them."""

    def on_step(self, engine):
        if engine.step == WARMUP:
            self.began = time.perf_counter()

    def on_log(self, engine, metrics):
        self.ended = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=10)
    arguments = parser.parse_args()
    keep_freed_memory()
    model = TransformerModel(PEERS["llama"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    stopwatch, seconds = Stopwatch(), StepSeconds()
    monitoring = [CatchAnomalies(), ModelDump(), Throughput(measure_peak(torch.float32)), Norms(), Resources()]
    trackers = [make_tracker(name) for name in ("console", "jsonl", "tensorboard")]
    callbacks = [stopwatch.watch(callback) for callback in [*monitoring, *trackers]] + [seconds]
    with tempfile.TemporaryDirectory() as folder:
        saving = CheckpointConfig(every=0, keep_best=False)
        config = EngineConfig(output=Path(folder), device="cpu", log_every=arguments.log_every, evaluate_every=0, checkpoint=saving)
        engine = RuntimeEngine(model, optimizer, config, objective=packed_next_token_objective, callbacks=callbacks)
        engine.fit(([batch] for batch in batches("cpu")), steps=arguments.steps)
    steps = arguments.steps - WARMUP
    total = seconds.ended - seconds.began
    machine = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    table = Table(title=f"{steps} steps of {total / steps * 1e3:.0f} ms, logged every {arguments.log_every}, {machine}")
    table.add_column("callback")
    table.add_column("ms a step", justify="right")
    table.add_column("share", justify="right")
    for name, spent in stopwatch.spent.most_common():
        table.add_row(name, f"{spent / steps * 1e3:.2f}", f"{spent / total:.2%}")
    everything = stopwatch.spent.total()
    table.add_row("together", f"{everything / steps * 1e3:.2f}", f"{everything / total:.2%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
