"""What the stages of build 02 share: configurations, folders of transformers' own making, and the oracle, its LlamaForCausalLM.

Tolerance: transformers adds the same float32 numbers up in another order, which moves logits of size 5 by some 2e-6; 1e-4 is far from that
and from any mistake, of which the smallest here moves them by more than 1e-2.
"""

import contextlib
import copy
import functools
import io
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared.course.importing import require

TEXT = "the text of build.py: stage {}"
THEIRS = "transformers' LlamaForCausalLM"
NEAR = {"rtol": 1e-4, "atol": 1e-4}
EXACT = {"rtol": 0.0, "atol": 0.0}
WITHIN = "within the budget"

Results = dict[str, Any]
Config = dict[str, Any]
HOME = tempfile.TemporaryDirectory(prefix="course-build-02-")

# Configurations, as transformers 5 writes them. Sizes differ from one another, and so do the families.

PLAIN: Config = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 37, "hidden_size": 24, "intermediate_size": 44,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6, "max_position_embeddings": 16,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
ONE_LAYER = PLAIN | {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 24}
GROUPED = PLAIN | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
WIDE = PLAIN | {"num_key_value_heads": 1, "head_dim": 10}  # heads are wider together than the model
BIASED = GROUPED | {"attention_bias": True, "mlp_bias": True}
TIED = GROUPED | {"tie_word_embeddings": True}
EPSILON = PLAIN | {"rms_norm_eps": 0.3}
THETA = PLAIN | {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}, "head_dim": 12}
NAMED = {"one layer, one head": ONE_LAYER, "four heads": PLAIN, "six heads share two": GROUPED, "four heads share one, and are wide": WIDE,
         "biases": BIASED, "tied": TIED, "an epsilon that is felt": EPSILON, "another theta": THETA}  # fmt: skip


def without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


def said(config: Config) -> Config:
    """What of a configuration differs from the plain one."""
    return {key: value for key, value in config.items() if PLAIN.get(key) != value} or {"configuration": "plain"}


def ids_of(rows: int, columns: int, config: Config = PLAIN, seed: int = 0) -> Tensor:
    return torch.randint(config["vocab_size"], (rows, columns), generator=torch.Generator().manual_seed(seed))


# Their model


@functools.cache
def transformers() -> Any:
    """transformers, silent: what is printed while a check runs is shown as the learner's. Imported when it is needed: it takes seconds."""
    require("transformers", "builds", "The check of 02.build")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stderr(io.StringIO()):
        import transformers
        from transformers import LlamaForCausalLM  # noqa: F401 (imported by it when it is first asked for)
    logging.disable(logging.NOTSET)

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def from_folder(folder: Path, **options: Any) -> Any:
    """What transformers makes of a folder."""
    return transformers().LlamaForCausalLM.from_pretrained(folder, **options)


def their_config(config: Config) -> Any:
    return transformers().LlamaConfig(**json.loads(json.dumps(without(config, "model_type"))))


@functools.cache
def made(key: str, seed: int) -> nn.Module:
    config = json.loads(key)
    model = transformers().LlamaForCausalLM(their_config(config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # large enough that everything is felt, norms and biases too
            drawn = torch.randn(weight.shape, generator=generator)
            size = 0.3 if weight.dim() < 2 else 1.0 if "embed" in name else 1.5 * weight.shape[1] ** -0.5
            weight.copy_(size * drawn + ("norm" in name))
    return model


def theirs(config: Config, seed: int = 1) -> nn.Module:
    """LlamaForCausalLM with random weights, always the same. Nobody changes it."""
    return made(json.dumps(config), seed)


@functools.cache
def written(key: str, seed: int, shards: str, dtype: torch.dtype) -> Path:
    folder = Path(tempfile.mkdtemp(dir=HOME.name))
    copy.deepcopy(made(key, seed)).to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


def folder_of(config: Config, seed: int = 1, shards: str = "1GB", dtype: torch.dtype = torch.float32) -> Path:
    """A folder as transformers saves it. It is written once: a case that changes it takes `copy_of`."""
    return written(json.dumps(config), seed, shards, dtype)


def copy_of(folder: Path, **changes: Any) -> Path:
    """A folder of one's own. changes: of config.json, where a key with None is taken out."""
    new = Path(tempfile.mkdtemp(dir=HOME.name))
    for file in folder.iterdir():
        (new / file.name).write_bytes(file.read_bytes())
    config = json.loads((new / "config.json").read_text()) | changes
    (new / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return new


def edited(folder: Path, change: Callable[[dict[str, Tensor]], Any], file: str = "model.safetensors", **changes: Any) -> Path:
    """A copy of a folder in which `change` has changed the tensors of a file."""
    new = copy_of(folder, **changes)
    found = {name: tensor.clone() for name, tensor in load_file(new / file).items()}
    change(found)
    save_file(found, new / file, metadata={"format": "pt"})
    return new


def their_state(config: Config, seed: int = 1) -> Results:
    return {name: weight.detach().clone() for name, weight in theirs(config, seed).named_parameters()}


def their_logits(config: Config, ids: Tensor, seed: int = 1) -> Tensor:
    with torch.no_grad():
        return theirs(config, seed)(ids).logits.clone()


def their_packed(config: Config, ids: Tensor, documents: Tensor) -> Tensor:
    """Each document alone in a row."""
    found = torch.empty(*ids.shape, config["vocab_size"])
    for row, numbers in enumerate(documents):
        for number in numbers.unique():
            found[row, numbers == number] = their_logits(config, ids[row, numbers == number][None])[0]
    return found


def refused(error: ValueError, words: tuple[str, ...], wanted: str) -> str:
    """Whether a ValueError says what it must: each word of `words`, or one of those with | between them."""
    missing = [word for word in words if not any(each in str(error) for each in word.split("|"))]
    return wanted if not missing else f"ValueError, which does not say {missing[0].replace('|', ' or ')}: {error}"


def budget(value: int, limit: int, unit: str) -> str:
    return WITHIN if value <= limit else f"{value:,} {unit}, and the budget is {limit:,}"


def generator_state(act: Callable[[], Any]) -> tuple[Any, str]:
    """What `act` returns, and whether PyTorch's global generator is as it was."""
    before = torch.get_rng_state()
    value = act()
    return value, "as it was" if torch.equal(before, torch.get_rng_state()) else "moved on"


# Stages
