"""Chapter 12. Export of a run: the trained model, whole, as files that other libraries read."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.course.errors import CourseError
from shared.engine.debug.anomalies import put_weights
from shared.finetune.base import merged_weights
from shared.finetune.peft_format import save_adapter
from shared.model.hf.files import keep_sampling
from shared.model.hf.pretrained import Weights, save_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.output_files import writing
from shared.parallel.health.agreement import agreed
from shared.trainer import provenance
from shared.trainer.card import name_of, write_card
from shared.trainer.mode import Run
from shared.trainer.models import with_adapter


def export(run: Run) -> None:
    """Write the trained model, with its tokenizer, into the folder `model`: where it has an adapter, merged, and the adapter alone into
    `adapter`. Virtual tokens are part of no weight, so there the adapter is all. Every rank sends what it holds; rank 0 writes."""
    output, strategy, config = run.config.engine.output, run.strategy, run.config
    weights, longest = strategy.weights(), config.model.max_position_embeddings
    weights = replace(weights, like={name: like for name, like in weights.like.items() if name not in run.mode.left_out})
    if config.adapter:
        folder, fingerprint = output / "adapter", provenance.saved_start(output) if strategy.rank == 0 else None
        with writing(folder):
            save_adapter(strategy.module, folder, weights=weights, base=name_of(run.start.folder), fingerprint=fingerprint)
            if strategy.rank == 0:
                run.mode.save_beside(folder, longest)
                write_card(folder, config, run.start.folder, "peft")
        if config.adapter.kind != "lora":
            return
        weights = merged_weights(strategy.module, weights)
    with writing(output / "model"):
        rounded, too_large = in_dtype(weights, config.report.dtype)
        save_pretrained(strategy.module, output / "model", token_ids=token_ids(run), weights=rounded)
        agreed(strategy.mesh.world, lambda: require_range(config.report.dtype, too_large, output / "model"))
        if strategy.rank == 0:
            if run.start is not None:
                keep_sampling(run.start.folder, output / "model")
            run.mode.save_beside(output / "model", longest)
            write_card(output / "model", config, run.start.folder if run.start else None, "transformers")


def in_dtype(weights: Weights, name: str) -> tuple[Weights, list[str]]:
    """The same weights, rounded to the dtype of this name one at a time, as they are collected; and the names, of those collected so far,
    of parameters that have values too large for it. Nothing is raised in between: ranks collect together."""
    dtype, too_large = getattr(torch, name), []

    def collect(parameter: str) -> Tensor | None:
        whole = weights.collect(parameter)
        if whole is None or not whole.is_floating_point():
            return whole
        rounded = whole.to(dtype)
        if (rounded.isinf() & whole.isfinite()).any():
            too_large.append(parameter)
        return rounded

    like = {key: torch.empty_like(t, dtype=dtype, device="meta") if t.is_floating_point() else t for key, t in weights.like.items()}
    return Weights(like, collect, weights.writes), too_large


def require_range(dtype: str, too_large: Sequence[str], folder: Path) -> None:
    """Remove an export with values that the dtype cannot hold, and say so. Training is over by then, and its checkpoint holds it all."""
    if too_large:
        shutil.rmtree(folder)
        raise CourseError(f"report.dtype is {dtype}, and {too_large[0]} has values that are too large for it: give bfloat16 or float32.")


def token_ids(run: Run) -> dict[str, Any]:
    """Special token ids of the exported model: the initial model's, with the current end-of-text ids before those of its list, if it had
    one."""
    rows, ends = run.config.model.vocab_size, run.mode.end_ids
    known = {name: number for name, number in run.strategy.module.token_ids.items() if isinstance(number, int) and 0 <= number < rows}
    if isinstance(before := run.strategy.module.token_ids.get("eos_token_id"), list):
        ends = [*ends, *(number for number in before if 0 <= number < rows and number not in ends)]
    padding = {} if run.mode.pad_id is None else {"pad_token_id": run.mode.pad_id}
    return known | {"eos_token_id": ends[0] if len(ends) == 1 else ends} | padding


def whole_model(run: Run) -> TransformerModel | None:
    """The trained model, unsharded, on rank 0; None on the others, which all take part in gathering it."""
    strategy = run.strategy
    if strategy.size == 1:
        return run.engine.model
    weights = strategy.full_weights()
    if strategy.rank:
        return None
    config, adapter = run.config, run.config.adapter
    # The base's layers may be quantized.
    base = run.start_again().load(config.model, apart=True) if adapter else TransformerModel(config.model, MIXTURE)
    model = run.mode.shaped(with_adapter(base, adapter, config.seed)).to(run.engine.device)
    put_weights(model, weights)
    return model
