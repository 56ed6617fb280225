"""Small runs of the engine: a loader that can be resumed, a recorder of hooks and metrics, engines over two tiny models.

`python tests/support/runs.py FOLDER STEPS [synchronous]` is one that a test interrupts or kills: it prints each step that is done.
"""

import sys
import time
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from chapters.byte_models import ByteModel
from shared.engine.callbacks import Callback, Metrics
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.engine.engine import RuntimeEngine
from shared.engine.strategy import Strategy
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel

SEQ, VOCAB = 11, 31
MODEL = ModelConfig(
    vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=16
)  # fmt: skip


class Loader:
    """Each step: `microbatches`, which are functions of the step's number."""

    def __init__(self, limit: int | None = None):
        self.step, self.limit = 0, limit

    def __iter__(self):
        while self.limit is None or self.step < self.limit:
            self.step += 1
            yield self.microbatches()

    def microbatches(self):
        """Two, of 3 and 2 sequences; the last target of each is ignored."""
        return [batch(self.step, 0, 3), batch(self.step, 1, 2)]

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def batch(step: int, index: int, samples: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (samples, SEQ + 1), generator=torch.Generator().manual_seed(100 * step + index))
    targets = ids[:, 1:].clone()
    targets[:, -1] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "targets": targets}


def held_out() -> list[dict[str, Tensor]]:
    return [batch(10**6, 0, 5)]


class Recorder(Callback):
    """Keeps the names of the hooks that were called, and what on_log was given: the metrics that every tracker must have received."""

    def __init__(self):
        self.hooks: list[str] = []
        self.logs: dict[int, Metrics] = {}

    def __getattribute__(self, name):
        if name.startswith("on_") or name == "before_optimizer":
            object.__getattribute__(self, "hooks").append(name)
        return object.__getattribute__(self, name)

    def on_log(self, engine, metrics):
        self.logs.setdefault(engine.step, {}).update(metrics)


class Slow(Callback):
    """Makes steps last long enough to be interrupted, and says which are done."""

    def on_step(self, engine):
        print(engine.step, flush=True)
        time.sleep(0.01)


def make_engine(
    folder: Path, callbacks=(), *, model=None, optimizer=None, lr: float = 1e-2, every: int = 0, strategy=Strategy, **options
) -> RuntimeEngine:
    """An engine that logs every 2 steps into `folder`, on the CPU. Options with the name of a field of `EngineConfig` go there."""
    settings = {name: options.pop(name) for name in list(options) if name in EngineConfig.__dataclass_fields__}
    saving = CheckpointConfig(every=every, asynchronous=False, keep_last=99)
    config = EngineConfig(**({"output": folder, "device": "cpu", "log_every": 2, "checkpoint": saving} | settings))
    model = model or TransformerModel(MODEL)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    options.setdefault("console", Console(file=StringIO(), width=200))
    return RuntimeEngine(strategy(model), optimizer, config, callbacks=list(callbacks), **options)


def resumable_engine(folder: Path, callbacks=(), seed: int = 0, **options) -> RuntimeEngine:
    """What a resume must bring back is in it: dropout draws numbers, AdamW has state and two groups, and every fifth step is saved."""
    torch.manual_seed(seed)
    model = ByteModel(vocab_size=VOCAB, window=4, embedding_size=4, hidden_size=16, dropout=0.1)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    options = {"log_every": 4, "checkpoint": CheckpointConfig(every=5), "console": None} | options
    return make_engine(folder, callbacks, model=model, optimizer=optimizer, **options)


def weights(engine: RuntimeEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def printed(engine: RuntimeEngine) -> str:
    return engine.console.file.getvalue()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, steps, *mode = sys.argv[1:]
    engine = resumable_engine(Path(folder), [Slow()], checkpoint=CheckpointConfig(every=3, asynchronous="synchronous" not in mode))
    engine.fit(Loader(), held_out(), steps=int(steps))
    print(f"ended: {engine.stopped}", flush=True)
