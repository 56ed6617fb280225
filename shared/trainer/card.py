"""Chapter 12. A model card, README.md with a YAML header as the Hugging Face hub reads it; and the names of models, as others know them.

The header names base model and licence where they are known. What is not known is said in words: a wrong licence is worse than none.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from shared.finetune.gguf.unpack import SOURCE
from shared.model.hf.files import read_json
from shared.output_files import write_atomically
from shared.trainer.config import TrainerConfig

FILE = "README.md"
PUBLISHED = {"SmolLM2-135M-Instruct.Q4_1.gguf": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}  # a packaged file's model, licence
CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")  # a folder of the hub's cache
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SOURCES = {"pretrain": "data.prepare", "sft": "chats", "grpo": "grpo.tasks"}  # of the other modes: preferences
TRAINING = {
    "pretrain": "pretraining on", "sft": "supervised fine-tuning on", "reward": "a reward model from", "dpo": "DPO on",
    "ppo": "PPO on", "grpo": "GRPO on",
}  # fmt: skip


def published(folder: Path) -> tuple[str, str] | None:
    """Name on the hub and licence of a packaged model that was unpacked into this folder."""
    return PUBLISHED.get(Path(read_json(folder / SOURCE)["file"]).name) if (folder / SOURCE).is_file() else None


def name_of(folder: Path) -> str:
    """The name by which others know the model in a folder: the hub's where the folder is of the hub, else the path as it was given.
    `_name_or_path` in config.json is no such name: transformers writes there what a model was loaded from, so a fine-tuned one's base."""
    if known := published(folder):
        return known[0]
    cached = CACHED.search(f"{folder.resolve()}/")
    return "/".join(cached.groups()) if cached else str(folder)


def licence_of(folder: Path) -> str | None:
    """The licence that a packaged model has, or the card in its folder gives."""
    if known := published(folder):
        return known[1]
    found = header(folder / FILE).get("license")
    return found if isinstance(found, str) else None


def header(card: Path) -> dict[str, Any]:
    """The YAML header of a model card; empty where there is none that can be read."""
    try:
        text = card.read_text(encoding="utf-8")
        found = yaml.safe_load(text.split("---", 2)[1]) if text.startswith("---") else None
    except (OSError, UnicodeDecodeError, IndexError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def write_card(folder: Path, config: TrainerConfig, start: Path | None, library: str) -> None:
    """Put the model card of a run beside its model or adapter, unless its user wrote one there.

    Args:
        start: the folder of the model that the run began with; None for random weights.
        library: that reads the folder: transformers or peft.
    """
    card, name = folder / FILE, config.engine.output.resolve().name
    if card.is_file() and "train-language-models" not in (header(card).get("tags") or []):
        return
    base, licence = (name_of(start), licence_of(start)) if start else (None, None)
    about: dict[str, Any] = {"library_name": library, "tags": ["train-language-models", config.mode]}
    about |= {} if config.mode == "reward" else {"pipeline_tag": "text-generation"}
    if base and HUB_NAME.fullmatch(base) and not Path(base).exists():
        about |= {"base_model": base, "base_model_relation": "adapter" if library == "peft" else "finetune"}
    about |= {"license": licence} if licence else {}
    shown = base and (base if about.get("base_model") else Path(base).name)
    began = f"from {shown}" if shown else "from random weights"
    soft = f"{config.virtual_tokens} virtual tokens" if config.virtual_tokens else ""
    kind = soft or (f"lora of rank {config.adapter.rank}" if config.adapter else "")
    adapter = f", with {kind} over frozen weights" if kind else ""
    law = f"Its base model's licence is {licence}." if licence else "No licence is given: add `license` to the header to publish it."
    lines = [
        f"# {name}", f"Trained {began} by {TRAINING[config.mode]} {data_of(config)}: {config.steps:,} steps{adapter}.", law,
        "The run's settings are in its `config.yaml`, and its figures in `results.json`.",
    ]  # fmt: skip
    write_atomically(card, ("---\n" + yaml.safe_dump(about, sort_keys=False) + "---\n\n" + "\n\n".join(lines) + "\n").encode())


def data_of(config: TrainerConfig) -> str:
    """What was trained on, in words: the names of the sources, without the folders that they are in."""
    section: Any = config
    for part in SOURCES.get(config.mode, "preferences").split("."):
        section = getattr(section, part)
    names = [Path(source.path).name if Path(source.path).exists() else source.path for source in section.sources]
    return ", ".join(names) or "generated examples"
