"""Chapter 12. Export of a run: the trained model, whole, as files that other libraries read."""

from dataclasses import replace
from typing import Any

from shared.engine.debug.anomalies import put_weights
from shared.finetune.base import merged_weights
from shared.finetune.peft_format import save_adapter
from shared.model.hf.files import keep_sampling
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.output_files import writing
from shared.trainer import provenance
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
            save_adapter(strategy.module, folder, weights=weights, base=str(run.start.folder), fingerprint=fingerprint)
            if strategy.rank == 0:
                run.mode.save_beside(folder, longest)
        if config.adapter.kind != "lora":
            return
        weights = merged_weights(strategy.module, weights)
    with writing(output / "model"):
        save_pretrained(strategy.module, output / "model", token_ids=token_ids(run), weights=weights)
        if strategy.rank == 0:
            if run.start is not None:
                keep_sampling(run.start.folder, output / "model")
            run.mode.save_beside(output / "model", longest)


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
    base = run.start_again().load(config.model, apart=True) if adapter else TransformerModel(config.model, MIXTURE)  # its layers may be quantized
    model = run.mode.shaped(with_adapter(base, adapter, config.seed)).to(run.engine.device)
    put_weights(model, weights)
    return model
