"""Stage 7 of build 01, last case: the learner's recipe on the embedded corpus against the table of pairs, in 30 seconds."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.course.checking import Case

from .pieces import TEXT, Results

SECONDS = 30.0  # of the processor's time
BLOCK = 50  # steps between two looks at held-out files


class Corpus:
    """The embedded corpus, read once: training files, and 60 pieces of held-out files, with what the table of pairs pays for them."""

    def __init__(self) -> None:
        from shared.corpus import embedded_corpus

        corpus = embedded_corpus()
        self.text, held_out = corpus.training_bytes(), corpus.held_out_bytes()
        self.held_out = held_out[: len(held_out) // 60 * 60].view(60, -1)[:, :513].long()
        counts = torch.zeros(65536, dtype=torch.float64)
        for piece in self.text.split(4_000_000):
            counts += torch.bincount(piece[:-1].long() * 256 + piece[1:].long(), minlength=65536)
        table = counts.view(256, 256) + 0.1
        self.table = self.bits(lambda ids: F.embedding(ids, (table / table.sum(dim=1, keepdim=True)).log()))

    @torch.no_grad()
    def bits(self, model: Callable[[Tensor], Tensor]) -> float:
        """Of windows of 64 bytes."""
        ids = self.held_out[:, :-1].reshape(-1, 64)
        found = [F.cross_entropy(model(some).flatten(0, 1).double(), wanted.flatten()) for some, wanted in
                 zip(ids.split(60), self.held_out[:, 1:].reshape(-1, 64).split(60), strict=True)]  # fmt: skip
        return torch.stack(found).mean().item() / math.log(2)


def table_case() -> Case:
    """The learner's run against the table, on real text. Listed wrong builds are told apart by the cases before: this one takes seconds,
    and a diagnosis would make it for each of them."""
    expected = {"it has beaten the table of pairs": "in time"}

    def observe(adapters: Any, **_: Any) -> Results:
        if "#" in adapters.module.__file__:
            return expected
        corpus = Corpus()
        run, steps = adapters.start(corpus.text, 0), 0
        began = time.process_time()
        while time.process_time() - began < SECONDS:
            adapters.advance(run, BLOCK)
            steps += BLOCK
            used = time.process_time() - began
            model = adapters.model_of(run).eval()
            bits = corpus.bits(model)
            model.train()
            if bits < corpus.table and used <= SECONDS:
                return expected
        said = f"not yet: {bits:.2f} bits per byte after {steps} steps and {used:.0f} s, and the table has {corpus.table:.2f}"
        return {"it has beaten the table of pairs": said}

    given = {"text": "the embedded corpus", "seed": 0, "seconds of the processor's time": SECONDS}
    return Case("budget", "better than the table of pairs", lambda: given, lambda **_: expected, TEXT.format(7), observe)
