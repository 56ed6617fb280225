"""Solutions of chapter 04. Each body with the reason why it is written this way."""

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


def flops_per_token(config: ModelConfig, seq: int) -> int:
    """Whole numbers all the way: the count is exact, and a counter that watches a model run must find the same one."""
    if config.architecture == "encoder-decoder":
        raise ValueError("An encoder-decoder has two sequence lengths: count its encoder and its decoder by themselves.")
    if seq < 1:
        raise ValueError(f"seq is {seq}: a sequence has at least 1 token.")
    config = config.resolved()
    hidden, layers = config.hidden_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = 2 * hidden * (queries + keys)
    feed_forward = (3 if config.gated else 2) * hidden * config.intermediate_size
    head = hidden * config.vocab_size + (hidden**2 if config.head == "mlm" else 0)
    return 6 * (layers * (attention + feed_forward) + head) + 12 * layers * queries * seq


def global_gradient_norm(gradients: Iterable[Tensor | None]) -> Tensor:
    """The norm of the tensors' norms is the norm of all elements. One call for all tensors is a few kernels on a GPU, not one
    for each; naming the dtype lifts half precision as it is read, without a copy. Nothing waits for the device."""
    present = [gradient.detach() for gradient in gradients if gradient is not None]
    if not present:
        return torch.zeros(())
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in present) else torch.float32
    norms = torch._foreach_norm(present, 2, dtype)
    return torch.linalg.vector_norm(torch.stack(norms))


def activation_statistics(x: Tensor) -> dict[str, float]:
    """Elements that are not finite become zeros that are not counted: picking the others out would make a tensor of unknown
    size, for which a GPU must stop and be asked. All six numbers are fetched at once. A count of 0
    makes 0 / 0, NaN, as asked."""
    if x.numel() == 0:
        raise ValueError(f"A tensor of shape {list(x.shape)} has no elements, so it has no statistics.")
    x = x.detach() if x.dtype == torch.float64 else x.detach().float()
    finite = x.isfinite()
    count = finite.sum().to(x.dtype)
    kept = x.where(finite, 0)
    mean = kept.sum() / count
    std = torch.linalg.vector_norm((x - mean).where(finite, 0)) / count.sqrt()
    rms = (kept.square().sum() / count).sqrt()
    abs_max = kept.abs().max().where(count > 0, torch.nan)
    zeros, not_finite = (share.to(x.dtype).mean() for share in (x == 0, ~finite))
    values = torch.stack([mean, std, rms, abs_max, zeros, not_finite])
    return dict(zip(("mean", "std", "rms", "abs_max", "zeros", "not_finite"), values.tolist(), strict=True))


def atomic_save(target: Path, write: Callable[[Path], None]) -> None:
    """BaseException, so that Ctrl-C cleans up as well. A folder's list of names is data too: folders are forced like files, and the
    one that holds the target after the renaming, or a power cut could undo that."""
    partial = target.with_name(target.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        write(partial)
        for path in [*partial.rglob("*"), partial]:
            force_to_disk(path)
    except BaseException:
        shutil.rmtree(partial)
        raise
    replace_folder(partial, target)
    force_to_disk(target.parent)


def restore(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer, parts: Mapping[str, Stateful]) -> int:
    """All that can be refused is refused before the first change; the optimizer's loading refuses by itself, so it goes first.
    Parts get copies, because a part may keep the dictionary that it is given and write into it."""
    weights = weights_of(model)
    for kind, here, saved in (("weights", weights, snapshot.weights), ("parts", parts, snapshot.parts)):
        if differing := sorted(set(here) ^ set(saved)):
            raise ValueError(f"This run and the saved one differ in the {kind} {', '.join(differing)}: resume with what was saved.")
    for name, weight in weights.items():
        if weight.shape != snapshot.weights[name].shape:
            shapes = f"{list(weight.shape)} here and {list(snapshot.weights[name].shape)} in the saved run"
            raise ValueError(f"The weight {name} is {shapes}: resume with the model that was saved.")
    load_optimizer_state(model, optimizer, snapshot.optimizer)
    for name, weight in weights.items():
        weight.copy_(snapshot.weights[name])
    for name, part in parts.items():
        part.load_state_dict(copy.deepcopy(snapshot.parts[name]))
    set_random_state(snapshot.random)
    return snapshot.step
