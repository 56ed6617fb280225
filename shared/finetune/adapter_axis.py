"""Chapter 10. Adapters as a parallel axis: LoRA's factors are cut as their weights are, under tensor and expert parallelism."""

from collections.abc import Sequence

from torch import nn

from shared.finetune.adapters import adapted_layers
from shared.finetune.lora import AdaptedLayer, LowRankUpdate
from shared.finetune.lora_parallel import lora_sharding
from shared.finetune.soft_prompts import shard_prefixes
from shared.model.roles import role_of
from shared.model.sharding import Range, cut_parameter, sharding_of
from shared.parallel.comm.communicator import Communicator
from shared.parallel.mesh import Axis, Mesh

Cut = tuple[int, Sequence[Range], Communicator]  # a dimension counted from the last one (-2: out, -1: in), each rank's slice, the ranks


class AdapterParallel(Axis):
    """Adapters as an axis of the mesh, after all that cut the base: each update is cut as its weight is.

    It reads how a weight is cut off the weight (`sharding`), and names no layer. Whatever else ranks share out, weights, gradients and
    optimizer state of the updates included, is the data engines' work, as for every parameter.
    """

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        shard_prefixes(model, mesh)
        for name, layer in adapted_layers(model):
            for update in layer.adapters.values():
                follow(name, layer, update)


def follow(name: str, layer: AdaptedLayer, update: LowRankUpdate) -> None:
    """Cut a layer's update as the layer's weight is cut, and state over which ranks its gradients are to be summed."""
    cuts, copies, owners = cuts_of(name, layer)
    for _, parameter in update.named_parameters():
        if copies is not None:  # ranks that compute with the same slice have gradients of different heads
            parameter.partial_over = copies
        if owners is not None:
            parameter.shared_over = owners
    for dimension, ranges, group in cuts:
        if dimension < -2:  # whole matrices of a stack are sharded
            for factor in ("lora_A", "lora_B"):
                cut_parameter(update, factor, 0, ranges, group)
            continue
        plans = zip(("lora_A", "lora_B"), lora_sharding(dimension + 2), strict=True)
        for factor, plan in plans:
            if plan.cut is not None:
                cut_parameter(update, factor, plan.cut - 2 + getattr(update, factor).dim(), ranges, group)
            if plan.summed:
                getattr(update, factor).partial_over = group
        if dimension == -1:
            layer.own_masks, update.group = group.rank, group
        if update.magnitude is not None and dimension == -2:
            cut_parameter(update, "magnitude", 0, ranges, group)
        elif update.magnitude is not None:
            update.magnitude.partial_over = group  # each rank scales its summand of the result


def cuts_of(name: str, layer: AdaptedLayer) -> tuple[list[Cut], Communicator | None, Communicator | None]:
    """How a layer's weight is cut, the outermost cut first; the ranks that hold the same numbers of it and have parts of their gradient;
    those that add its gradient where the data ranks do not. Of an embedding the dimensions are a linear layer's, so the transposed ones."""
    if hasattr(layer, "cuts"):
        return list(layer.cuts), layer.copies, None
    weight, cuts = layer.weight, []
    sharding = sharding_of(weight)
    while sharding is not None:
        sizes = [part.sizes for part in sharding.parts]
        places = range(len(sharding.outer_shape))
        dimension = next((place for place in places if any(size[place] != sharding.outer_shape[place] for size in sizes)), None)
        if dimension is None:  # each rank has all of it, as of the one head of keys and values that all ranks need
            sharding = sharding.outer
            continue
        ranges = [(part.offsets[dimension], part.offsets[dimension] + part.sizes[dimension]) for part in sharding.parts]
        from_last = dimension - len(sharding.outer_shape)
        cuts.insert(0, (-3 - from_last if isinstance(layer, nn.Embedding) else from_last, ranges, sharding.group))
        sharding = sharding.outer
    # A tied embedding's gradients are added over a pipeline's ends; its updates are not tied.
    copies = None if role_of(f"{name}.weight", weight) == "embedding" else getattr(weight, "partial_over", None)
    return cuts, copies, getattr(weight, "shared_over", None)
