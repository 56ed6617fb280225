"""A small run of the engine for the tests of its callbacks: a few steps of a two-layer model, with a loader that can be resumed."""

from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

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
    """Each step: two micro-batches of 3 and 2 sequences, functions of the step's number; the last target of each is ignored."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        while True:
            self.step += 1
            yield [batch(self.step, 0, 3), batch(self.step, 1, 2)]

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def batch(step: int, index: int, samples: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (samples, SEQ + 1), generator=torch.Generator().manual_seed(100 * step + index))
    targets = ids[:, 1:].clone()
    targets[:, -1] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "targets": targets}


class Recorder(Callback):
    """Keeps what on_log is given: the metrics that every tracker must have received."""

    def __init__(self):
        self.logs: dict[int, Metrics] = {}

    def on_log(self, engine, metrics):
        self.logs.setdefault(engine.step, {}).update(metrics)


def make_engine(folder: Path, callbacks: list[Callback], *, model=None, lr: float = 1e-2, every: int = 0, strategy=Strategy, **options):
    """An engine that logs every 2 steps into `folder`, on the CPU. Options with the name of a field of `EngineConfig` go there."""
    settings = {name: options.pop(name) for name in list(options) if name in EngineConfig.__dataclass_fields__}
    saving = CheckpointConfig(every=every, asynchronous=False, keep_last=99)
    config = EngineConfig(**({"output": folder, "device": "cpu", "log_every": 2, "checkpoint": saving} | settings))
    model = model or TransformerModel(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    options.setdefault("console", Console(file=StringIO(), width=200))
    return RuntimeEngine(strategy(model), optimizer, config, callbacks=callbacks, **options)


def printed(engine: RuntimeEngine) -> str:
    return engine.console.file.getvalue()
