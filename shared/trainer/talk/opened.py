"""Chapter 12. The model to talk to: of a folder, of a run that has ended, or of one that was stopped, with its adapter over its base."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from shared.course.errors import CourseError
from shared.data.tokenizer import TextTokenizer
from shared.engine.checkpoint.folder import STATE
from shared.finetune.peft_format import load_adapter
from shared.finetune.quantization.packed import fused_kernel, use_kernels
from shared.model.hf.pretrained import logical_parameters
from shared.model.transformer import TransformerModel
from shared.moe.config import MixtureModelConfig
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.models import with_adapter
from shared.trainer.settings import parse_text
from shared.trainer.weights import InitialWeights, find_initial_weights, read_checkpoint, read_weights


def opened(path: Path) -> tuple[TransformerModel, TextTokenizer, Path]:
    """The model of a run or of a folder, its tokenizer, and the folder that may have a template."""
    adapter = path / "adapter"
    if (adapter / "adapter_config.json").is_file() and not (path / "model").exists():  # virtual tokens, which are in no weight
        model = base_of(path / provenance.CONFIG)
        load_adapter(model, adapter)
        return model, TextTokenizer.load(adapter), adapter
    model, start = read_weights(path, "RUN", lambda start: (adapted(start) if start.is_checkpoint else start.load(), start))
    use_kernels(model, fused_kernel)  # of quantized layers
    return model, start.text_tokenizer(), start.tokenizer_folder()


def base_of(record: Path) -> TransformerModel:
    """The weights that the run of a record started from, with a row for each token of the run's vocabulary."""
    said = provenance.read_record(record)
    start = find_initial_weights(Path(str(said.get("start_from"))), f"{record}: start_from")
    size = (said.get("model") or {}).get("vocab_size", start.model.vocab_size)
    return start.load(MixtureModelConfig(**vars(replace(start.model, vocab_size=size))), apart=True)


def adapted(start: InitialWeights) -> TransformerModel:
    """The model of a checkpoint. One that holds an adapter alone is put over the weights that its run started from.

    Raises:
        CourseError: these weights are gone, or others than the adapter is for.
    """
    run = start.folder.parent.parent
    record = run / provenance.CONFIG
    if not provenance.read_record(record).get("adapter"):
        return start.load()
    config = parse_text(TrainerConfig, record.read_text(encoding="utf-8"))
    model = with_adapter(base_of(record), config.adapter, config.seed)
    held = json.loads((start.folder / STATE).read_text(encoding="utf-8"))["contents"]["tensors"]["weights"]
    parameters = logical_parameters(model)
    if unknown := sorted(held.keys() - parameters.keys()):
        raise CourseError(f"{start.folder} holds {unknown[0]}, which the model in {config.start_from} with the run's adapter has not.")
    with torch.no_grad():
        for name, (_, shape) in held.items():
            parameters[name].copy_(read_checkpoint(start.folder, name, tuple(shape), [0] * len(shape), shape))
    return model
