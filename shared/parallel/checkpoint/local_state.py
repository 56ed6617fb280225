"""Chapter 06. What one rank holds of a run's state, under the names of the plain model, and the whole of it put together again.

To chapter 04's `take_snapshot` and `restore`, a rank's part looks like a model: its weights have the plain names, and hold this rank's
numbers.

Left out on purpose: files, which `shared.parallel.checkpoint.saver` writes and reads.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from shared.engine.checkpoint.optimizer_state import OptimizerState
from shared.engine.checkpoint.snapshot import weights_of
from shared.parallel.parallelize import Parallel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.checkpoint.files import Place


class LocalState(nn.Module):
    """The model to take a snapshot of, and to restore it into.

    `state_dict` has this rank's weights: whole ones, or pieces of them. `named_parameters` are those that the optimizer was built over.
    """

    def __init__(self, parallel: Parallel):
        super().__init__()
        self.parallel = [parallel]  # in a list: its modules are not this one's

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.parallel[0].optimized.named_parameters(*arguments, **options)

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Tensor]:
        stored = getattr(self.parallel[0], "stored", self.parallel[0].model)
        return stored.state_dict(*arguments, **options)

    def weight_places(self) -> dict[str, Place]:
        """Where this rank's numbers of each weight stand. Under ZeRO, weights are whole and only the optimizer's state is cut."""
        cuts = self.parallel[0].cuts()
        places = {}
        for name, tensor in weights_of(self).items():
            whole = name not in cuts or tensor.numel() == cuts[name].shape.numel()
            shape = tuple(cuts[name].shape if name in cuts else tensor.shape)
            places[name] = Place(shape, 0, tensor.numel()) if whole else Place(shape, *cuts[name].here)
        return places

    def state_places(self) -> dict[str, Place]:
        """Where this rank's numbers of each optimized parameter stand, and so those of its optimizer state."""
        cuts = self.parallel[0].cuts()
        return {
            name: Place(tuple(cuts[name].shape), *cuts[name].here) if name in cuts else Place(tuple(piece.shape), 0, piece.numel())
            for name, piece in self.named_parameters()
        }

    def placed_weights(self) -> dict[tuple[str, Place], Tensor]:
        """This rank's numbers of the weights, with where they stand; those of which it has none are left out."""
        places = self.weight_places()
        return {(name, places[name]): tensor for name, tensor in weights_of(self).items() if places[name].start < places[name].stop}

    def placed_state(self, optimizer: OptimizerState) -> dict[tuple[str, Place], Tensor]:
        """The same for the optimizer's state, whose entries are named `key/parameter`.

        Of a parameter of which this rank has nothing, nothing is taken, not even a count of steps: it may have stood still here.
        """
        places, found = self.state_places(), {}
        for name, tensors in optimizer.tensors.items():
            for key, tensor in tensors.items() if places[name].start < places[name].stop else ():
                like_parameter = tensor.numel() == places[name].stop - places[name].start and tensor.dim() > 0
                place = places[name] if like_parameter else Place(tuple(tensor.shape), 0, tensor.numel())
                found[f"{key}/{name}", place] = tensor
        return found


def whole_weights(parallel: Parallel) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, whole on every rank, one after the other. Every rank goes through all of them."""
    cuts = parallel.cuts()
    for name, tensor in weights_of(LocalState(parallel)).items():
        if name in cuts:
            part = cuts[name].cut(tensor) if tensor.numel() == cuts[name].shape.numel() else tensor
            tensor = cuts[name].gather(part)
        yield name, tensor.detach()


def weights_on_rank_0(parallel: Parallel, world: Communicator) -> dict[str, Tensor]:
    """The whole model in rank 0's main memory, and nothing on the others, which all take part."""
    return {name: tensor.cpu() for name, tensor in whole_weights(parallel) if world.rank == 0}
