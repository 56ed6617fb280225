"""Chapter 09. Sparse upcycling (Komatsuzaki et al. 2022): a dense checkpoint becomes a mixture of experts, and its first logits stay.

Every expert begins as a copy of the dense feed-forward layer, and the router as in a new model. The weights of the chosen experts add
up to 1, so the mixture of equal experts is the dense layer; training makes the experts differ, because each sees other tokens.
"""

from dataclasses import replace

import torch

from shared.course.errors import SettingError
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig


@torch.no_grad()
def upcycle(model: TransformerModel, experts: MixtureConfig, seed: int = 0) -> TransformerModel:
    """A new model with experts that computes what the dense one does. `model` is left as it is. Routers of a model in 16 bits are float32.

    Args:
        model: dense and whole.
        experts: as wide as the dense layer; blocks before `first_k_dense` stay dense.
        seed: of the routers' initial weights.

    Raises:
        SettingError: a model that has experts already, or a mixture whose equal experts would not be the dense layer.
    """
    dense = model.config
    wrong = [
        (dense.experts is not None, "the model has experts already: give a dense one"),
        (
            experts.moe_intermediate_size != dense.intermediate_size,
            f"experts.moe_intermediate_size must be the dense layer's {dense.intermediate_size}",
        ),
        (not experts.norm_topk_prob or experts.routed_scaling_factor != 1, "weights must add up to 1: set experts.norm_topk_prob to true "
         "and experts.routed_scaling_factor to 1"),
        (experts.num_shared_experts > 0, "shared experts would add to the dense layer's output: set experts.num_shared_experts to 0"),
    ]  # fmt: skip
    for is_wrong, reason in wrong:
        if is_wrong:
            raise SettingError(f"This mixture cannot begin as a copy of the dense model: {reason}.")
    first = next(model.parameters())
    mixture = TransformerModel(replace(MixtureModelConfig(**vars(dense)), experts=experts), MIXTURE, seed).to(first.device)
    for parameter in mixture.parameters():
        least = torch.float32 if getattr(parameter, "full_precision", False) else first.dtype
        parameter.data = parameter.data.to(torch.promote_types(first.dtype, least))
    mixture.token_ids = dict(model.token_ids)
    given = dict(model.named_parameters())
    for name, parameter in mixture.named_parameters():
        if (source := given.get(name.replace(".experts.", "."))) is not None:
            parameter.copy_(source)
    return mixture
