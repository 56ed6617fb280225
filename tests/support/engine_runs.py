"""Small runs of the engine for its tests, and one that is killed: `python tests/support/engine_runs.py FOLDER STEPS [MODE]`."""

import sys
import time
from pathlib import Path

import torch

from chapters.byte_models import ByteModel
from shared.engine.callbacks import Callback
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.engine.engine import RuntimeEngine
from shared.engine.strategy import Strategy

SEQ = 8


class Digits:
    """A loader of two unequal micro-batches a step, a function of the step alone; its state is how many steps it gave."""

    def __init__(self, limit: int | None = None):
        self.given, self.limit = 0, limit

    def __iter__(self):
        while self.limit is None or self.given < self.limit:
            generator = torch.Generator().manual_seed(self.given)
            self.given += 1
            yield [self.batch(rows, generator) for rows in (3, 2)]

    def batch(self, rows: int, generator: torch.Generator) -> dict:
        ids = (torch.randint(0, 10, (rows, 1), generator=generator) + torch.arange(SEQ + 1)) % 10
        return {"input_ids": ids[:, :-1], "targets": ids[:, 1:].masked_fill(torch.rand(rows, SEQ, generator=generator) < 0.2, -100)}

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Recorder(Callback):
    """Writes down every hook that it is told of."""

    def __init__(self):
        self.told: list[str] = []
        self.metrics: list[dict] = []

    def __getattribute__(self, name):
        if name.startswith("on_") or name == "before_optimizer":
            object.__getattribute__(self, "told").append(name)
        return object.__getattribute__(self, name)

    def on_log(self, engine, metrics):
        self.metrics.append({"step": engine.step, **metrics})


class Slow(Callback):
    """Makes steps last long enough to be interrupted, and says which are done."""

    def on_step(self, engine):
        print(engine.step, flush=True)
        time.sleep(0.01)


def held_out() -> list[dict]:
    return [Digits().batch(5, torch.Generator().manual_seed(10**6))]


def make_engine(output: Path, callbacks=(), seed: int = 0, updater=None, strategy: type[Strategy] = Strategy, **settings) -> RuntimeEngine:
    """A byte model with dropout, AdamW with two groups, and a checkpoint every 5 steps unless told otherwise."""
    torch.manual_seed(seed)
    model = ByteModel(vocab_size=10, window=4, embedding_size=4, hidden_size=16, dropout=0.1)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    settings.setdefault("checkpoint", CheckpointConfig(every=5))
    config = EngineConfig(output=output, device="cpu", log_every=4, evaluate_every=settings.pop("evaluate_every", 0), **settings)
    parts = {"updater": updater} if updater else {}
    return RuntimeEngine(strategy(model), optimizer, config, callbacks=list(callbacks), **parts)


def weights(engine: RuntimeEngine) -> dict:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, steps, *mode = sys.argv[1:]
    engine = make_engine(Path(folder), [Slow()], checkpoint=CheckpointConfig(every=3, asynchronous="synchronous" not in mode))
    engine.fit(Digits(), held_out(), steps=int(steps))
    print(f"ended: {engine.stopped}", flush=True)
