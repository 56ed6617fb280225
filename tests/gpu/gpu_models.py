"""Models, batches and steps that slices share: the families of chapter 02 at a small size, and the course's 124-million configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared.data.objectives import encoder_decoder_objective, masked_language_objective
from shared.loop import accumulate_gradients, keep_totals, train_step
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.model.families import preset
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.optim.precision import autocast_objective
from shared.optim.updater import Update
from shared.totals import Batch, Objective, Totals

FAMILIES = {  # as in chapter 02; `num_key_value_heads` of the second makes its queries share keys
    "gpt2": "gpt2", "llama": "llama-3.2-1b", "qwen3": "qwen3-0.6b", "mistral": "mistral-7b", "bloom": "bloom-560m", "bert": "bert-base",
    "t5": "t5-small",
}  # fmt: skip
M124 = ModelConfig(  # of chapters/12_grpo/two_3090s.yaml
    vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12, intermediate_size=2048,
    max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip
TINY = ModelConfig(
    vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=160,
    max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


def family(name: str, small: bool) -> ModelConfig:
    """A family's model without dropout, of a size that a CPU computes in float64 in a second."""
    layers, size, heads = (2, 32, 4) if small else (4, 256, 4)
    changes: dict[str, Any] = {
        "vocab_size": 257 if small else 2053, "hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 3 * size, "max_position_embeddings": 32 if small else 256, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    if name in ("llama", "qwen3", "mistral"):
        changes["num_key_value_heads"] = 2
    if name in ("qwen3", "t5"):
        changes["head_dim"] = size // heads
    if name == "mistral":
        changes["sliding_window"] = 8 if small else 64
    return preset(FAMILIES[name], **changes)


def batch_of(config: ModelConfig, rows: int, seq: int, seed: int = 0, packed: bool = False) -> Batch:
    """Random tokens in the form that the family's objective takes. packed: rows of four documents, as the trainer's are."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (rows, seq + 1), generator=generator)
    batch = {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    batch["targets"][0, : seq // 3] = -100
    if config.architecture == "encoder-decoder":
        valid = torch.ones(rows, seq, dtype=torch.bool)
        valid[0, seq // 2 :] = False
        batch |= {"decoder_input_ids": batch["input_ids"].roll(1, dims=1), "valid": valid}
    if packed:
        positions = torch.arange(seq) % max(1, seq // 4)
        batch |= {"documents": (torch.arange(seq) // max(1, seq // 4)).repeat(rows, 1), "positions": positions.repeat(rows, 1)}
    return batch


def moved(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def objective_of(config: ModelConfig) -> Objective:
    return {"encoder": masked_language_objective, "encoder-decoder": encoder_decoder_objective}.get(
        config.architecture, packed_next_token_objective
    )


@dataclass
class Step:
    """A training step that can be done again and again: `step(batch)` -> totals. The gradients stay in the model's parameters."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    call: Callable[[list[Batch]], Totals]

    def __call__(self, *batches: Batch) -> Totals:
        return self.call(list(batches))


def step_of(
    config: ModelConfig, device: torch.device, precision: str = "float32", optimizer: OptimizerConfig | None = None,
    dtype: torch.dtype = torch.float32, compiled: str | None = None, seed: int = 0,
) -> Step:  # fmt: skip
    """The trainer's step on one device: autocast, the loss scale of float16, clipping.

    Args:
        dtype: of the weights. compiled: None, or the backend of torch.compile for the whole model.
    """
    model = TransformerModel(config, seed=seed).to(device, dtype)
    stepper = build_optimizer(model, optimizer or OptimizerConfig("sgd", lr=0.1, weight_decay=0.0, momentum=0.0))
    scaler = LossScaler(LossScaleConfig(initial=2.0**8)) if precision == "float16" else None
    objective = objective_of(config) if precision in ("float32", "float64") else autocast_objective(objective_of(config), precision)
    runner, updater = scaler.scaled(accumulate_gradients) if scaler else accumulate_gradients, Update(1.0, scaler)
    if compiled:
        model.compile(backend=compiled)
    return Step(model, stepper, lambda batches: train_step(model, stepper, batches, objective, runner, keep_totals, updater))


def tensors_of(step: Step, gradients: bool = False) -> dict[str, Tensor]:
    """Weights or gradients on the CPU, in float64."""
    named = ((name, p.grad if gradients else p) for name, p in step.model.named_parameters())
    return {name: tensor.detach().double().cpu() for name, tensor in named if tensor is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest distance of a tensor, relative to its norm, and that tensor's name.

    A tensor whose gradient is zero by mathematics (the bias of keys, which a softmax does not see) holds rounding alone, so no norm counts
    as less than a thousandth of the largest.
    """
    if found.keys() != expected.keys():
        return float("inf"), ", ".join(sorted(found.keys() ^ expected.keys())[:3])
    least = 1e-3 * max(float(tensor.norm()) for tensor in expected.values())
    far = {name: float((found[name] - each).norm()) / max(float(each.norm()), least) for name, each in expected.items()}
    worst = max(far, key=lambda name: far[name] if far[name] == far[name] else float("inf"))
    return far[worst], worst


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name].cpu(), each.cpu()) for name, each in expected.items())
