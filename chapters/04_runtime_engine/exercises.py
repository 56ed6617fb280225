"""Your part of chapter 04. Write each body in place of its `raise` line, in any order.

    course check 04          checks what you wrote
    course hint 04.flops_per_token    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

import copy
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.engine.checkpoint.atomic import PARTIAL, force_to_disk, replace_folder
from shared.engine.checkpoint.optimizer_state import load_optimizer_state
from shared.engine.checkpoint.snapshot import Snapshot, Stateful, set_random_state, weights_of
from shared.model.config import ModelConfig


# FLOPs per token (15 min, difficulty 2 of 5)
def flops_per_token(config: ModelConfig, seq: int) -> int:
    """Floating-point operations of one token's training step, forward and backward, in matrix products.

        6 * (numbers in the matrices that the token passes) + 12 * layers * heads * head_dim * seq

    The matrices are those of attention (queries [D, H * d], keys and values [D, K * d] each, output [H * d, D]), of the
    feed-forward layers (two, or three where it is gated) and of the head ([D, vocab]; where `head` is mlm, a
    [D, D] before it). The look-up in the embedding is no product, though a tied head is one. All seq^2 scores are counted, as the
    convention has it, although causal attention needs half.

    Args:
        config: a decoder, or an encoder (bidirectional). Resolved or not.
        seq: tokens in a sequence.

    Raises:
        ValueError: an encoder-decoder, whose two sides see different lengths, or a seq below 1.

    >>> gpt2 = ModelConfig(vocab_size=50257, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, gated=False)
    >>> flops_per_token(gpt2, 1024) == 6 * (12 * (4 * 768**2 + 2 * 768 * 3072) + 768 * 50257) + 12 * 12 * 768 * 1024
    True
    """
    raise NotImplementedError("04.flops_per_token: write this body")


# The global gradient norm (10 min, difficulty 2 of 5)
def global_gradient_norm(gradients: Iterable[Tensor | None]) -> Tensor:
    """The Euclidean length of all gradients taken together.

    Args:
        gradients: tensors of any shapes and floating dtypes, possibly a generator; None for a parameter that has none. Half
            precision is summed in float32, where 300 squared is not yet beyond the largest number. They are left as they are; a
            tensor that is given twice counts twice.

    Returns:
        [] float32 (float64 where a gradient is float64), on the gradients' device, without a graph. 0.0 where there are none. A
        gradient that holds inf or NaN makes the norm inf or NaN: it is how a broken step is noticed.

    >>> global_gradient_norm([torch.tensor([3.0, 0.0]), None, torch.tensor([[4.0]])])     # sqrt(9 + 16)
    tensor(5.)
    """
    raise NotImplementedError("04.global_gradient_norm: write this body")


# Statistics of an activation (15 min, difficulty 2 of 5)
def activation_statistics(x: Tensor) -> dict[str, float]:
    """Statistics of one tensor: weights, gradients or activations.

    Args:
        x: any shape, any floating dtype, at least one element. It may require a gradient; it is left as it is.

    Returns:
        `mean` and `std` (population: divided by the count) of the finite elements, `rms` (root of their mean square), `abs_max`,
        `zeros` (share of all elements that are exactly 0), `not_finite` (share that is inf or NaN). Half precision is computed in
        float32, float64 in float64. Where no element is finite, mean, std, rms and abs_max are NaN.

    Raises:
        ValueError: x has no elements.

    >>> activation_statistics(torch.tensor([0.0, 0.0, -2.0, 2.5, 3.0, 3.5, 3.5, float("inf")]))
    {'mean': 1.5, 'std': 2.0, 'rms': 2.5, 'abs_max': 3.5, 'zeros': 0.25, 'not_finite': 0.125}
    """
    raise NotImplementedError("04.activation_statistics: write this body")


# An atomic save (20 min, difficulty 3 of 5)
def atomic_save(target: Path, write: Callable[[Path], None]) -> None:
    """Make the folder `target` complete, or leave no trace of the attempt.

    Args:
        target: the folder to make. Where it exists already, it is replaced at the end, and stays as it is until then.
        write: write(folder) puts the files into the folder that it is given: an empty one beside `target` whose name is
            target's with ".partial" after it. One that a killed process left there is removed first.

    Every file and folder in it, at any depth, and the partial folder itself must be on the disk (`force_to_disk`) before the folder
    gets its name, and the folder that holds the name afterwards. Where `write` or the forcing raises, the partial folder is removed
    and the error goes on.

    >>> atomic_save(Path("step-7"), lambda folder: (folder / "weights").write_text("new"))
    >>> sorted(Path().iterdir())
    [PosixPath('step-7')]
    """
    raise NotImplementedError("04.atomic_save: write this body")


# Exact resume (25 min, difficulty 4 of 5)
def restore(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer, parts: Mapping[str, Stateful]) -> int:
    """Put a run back to where `take_snapshot` took it.

    Weights are copied into the tensors that the model has (`weights_of` names them), because the optimizer and
    tied layers hold references to those. `load_optimizer_state` puts the optimizer's state back by parameter name, `set_random_state` the
    generators. Loading a part may draw random numbers, so the generators come last.

    Args:
        snapshot: left as it is; nothing of it is shared with the run afterwards.
        model, optimizer, parts: as they were made for the new run, of any state. Changed in place.

    Returns:
        How many steps are done.

    Raises:
        ValueError: before anything is changed: the weights, the parts or the optimizer's parameters have other names than the
            snapshot's, or a weight has another shape. The message holds the names.
    """
    raise NotImplementedError("04.restore: write this body")
