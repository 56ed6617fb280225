"""Tiny fine-tuning runs: a base model that was trained for a few steps, and the settings of a run that starts from it."""

import shutil
from pathlib import Path

import torch
import yaml
from rich.console import Console
from trainer_runs import TINY, settings_file, train

from shared.finetune.quantization.awq import AWQ
from shared.finetune.quantization.methods import quantize_model
from shared.finetune.quantization.nf4_files import save_nf4
from shared.finetune.quantization.nf4_linear import quantize_base
from shared.finetune.quantization.packed import QuantizedLinear
from shared.finetune.quantization.packed_files import save_quantized
from shared.finetune.quantization.rounding import Rounding
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.parallel.comm.threads import run_threads
from shared.trainer.config import TrainerConfig
from shared.trainer.run import build
from shared.trainer.settings import merged, parse_words

SIZES = {"max_position_embeddings": 128, "hidden_size": 64, "intermediate_size": 128}  # NF4 takes blocks of 64 inputs
KEPT = ("steps", "optimizer", "schedule", "precision", "engine", "report")
TUNED = {
    "mode": "sft",
    "data": {"seq": 128, "batch_size": 4, "micro_batch_size": 2, "held_out_rows": 8},
    "model": {"max_position_embeddings": 128, "hidden_dropout": 0.1},
    "instructions": {"examples": 300, "tasks": 12},
    "report": {"new_tokens": 12},
}
PLAIN = (
    "model.hidden_dropout=0.0", "optimizer.name=sgd", "optimizer.lr=0.5", "schedule.warmup_steps=0", "schedule.decay_steps=0", "steps=3",
)  # fmt: skip


def base_run(folder: Path) -> Path:
    """A pretrained model: the folder of its run."""
    done = train(settings_file(folder, folder / "prepared", model=SIZES))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def tuned_file(folder: Path, base: Path, **changes) -> Path:
    """The settings of a run from `base`, in `folder`/run."""
    folder.mkdir(exist_ok=True, parents=True)
    settings = merged({name: TINY[name] for name in KEPT}, TUNED)
    where = {"start_from": str(base), "data": {"prepared": str(base.parent / "chats")}, "engine": {"output": str(folder / "run")}}
    path = folder / "tuned.yaml"
    path.write_text(yaml.safe_dump(merged(merged(settings, where), changes)))
    return path


def tuned_config(folder: Path, base: Path, *words: str, **changes) -> TrainerConfig:
    return parse_words(TrainerConfig, [str(tuned_file(folder, base, **changes)), *words])


def trained(config: TrainerConfig) -> dict[str, torch.Tensor]:
    """The weights after a run, in threads where its layout has several ranks."""

    def work(world):
        run = build(config, Console(quiet=True), world)
        run.engine.fit(*run.mode.loaders(run.config, run.strategy), steps=config.steps)
        return run.strategy.full_weights()

    return run_threads(work, config.parallel.ranks)[0]


def in_four_bits(folder: Path, base: Path) -> Path:
    """The base's model quantized and saved in bitsandbytes' format, with its tokenizer."""
    model = load_pretrained(base / "model")
    quantize_base(model)
    save_nf4(model, folder)
    shutil.copy(base / "model" / "tokenizer.json", folder)
    return folder


def in_codes(folder: Path, base: Path, method: str) -> None:
    """The base's model rounded, or quantized by AWQ, and saved in GPTQ's or AWQ's layout, with its tokenizer; and as floats, beside it."""
    model = load_pretrained(base / "model")
    ids = torch.randint(200, (2, 64), generator=torch.Generator().manual_seed(0))
    list(quantize_model(model, [{"input_ids": ids}], AWQ(Rounding(4, 32, symmetric=False)) if method == "awq" else Rounding(8, 32)))
    save_quantized(model, folder / "codes", layout="awq" if method == "awq" else "gptq")
    for name, layer in [(name, each) for name, each in model.named_modules() if isinstance(each, QuantizedLinear)]:
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight, plain.bias = torch.nn.Parameter(layer.dequantized()), layer.bias
        model.set_submodule(name, plain)
    save_pretrained(model, folder / "floats")
    for each in ("codes", "floats"):
        shutil.copy(base / "model" / "tokenizer.json", folder / each)
