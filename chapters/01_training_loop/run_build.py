"""A run of a learner's whole build on text: its own model and recipe, judged and sampled by its own functions.

`run.py` takes this way with `--impl mine` (or `mixed`) where every stage of the build has passed.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

from chapters.byte_models import BigramModel
from chapters.text_run import corpus_of, print_header, require_sensible, show_and_keep, texts_of, train_with_progress
from shared.course.build_check import Functions
from shared.output_files import require_writable

LENGTH, ROWS, QUICK = 64, 64, 32_769  # windows of an evaluation, and the held-out bytes of one during training
CONTEXT = 256  # bytes that the model is shown when it writes; the build's model takes as many


def run_build(config: Any, build: Functions, line: str) -> None:
    """Train a build's run for `config.steps` steps, and leave plot, sample, figures and weights in `config.output`.

    Args:
        config: of it `data`, `steps`, `evaluate_every`, the sample, `seed` and `output` count; the recipe is the build's.
        line: says in the header that the build runs.
    """
    console = Console(markup=False, emoji=False)
    require_sensible(config)
    require_writable(config.output)
    corpus = corpus_of(config.data)
    texts = texts_of(corpus, LENGTH, torch.device("cpu"))
    run = build.start(texts.training, config.seed)
    model = build.model_of(run)
    print_header(console, corpus, model, torch.device("cpu"))
    console.print(line, highlight=False)

    def losses() -> Iterator[tuple[int, float, int]]:
        for step in range(1, config.steps + 1):
            yield step, build.advance(run, 1)[0] / math.log(2), 0

    quick = lambda: build.evaluate(model, texts.held_out[:QUICK], LENGTH, ROWS)  # noqa: E731
    history = train_with_progress(config, losses(), quick, console)
    table_bits = build.evaluate(BigramModel.count(texts.training), texts.held_out, LENGTH, ROWS)
    drawn = build.sample(model, config.prompt.encode(), config.sample_bytes, config.temperature, config.top_k, config.seed, CONTEXT)
    sample = config.prompt + drawn.partition(b"\0")[0].decode(errors="replace")
    results = {
        "steps": len(history.training),
        "held-out bits per byte": f"{build.evaluate(model, texts.held_out, LENGTH, ROWS):.3f}",
        "held-out bits per byte, bigram table": f"{table_bits:.3f}",
    }
    show_and_keep(config, console, model, sample, results, history, table_bits)
