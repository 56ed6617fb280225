"""Chapter 06. A parallel axis (tensor, pipeline, context, experts): a change of a plain model, and perhaps an engine in its step."""

from torch import nn

from shared.parallel.data.engine import DataEngine
from shared.parallel.mesh import Mesh


class Axis:
    """A parallel axis, which shards the computation itself.

    brings: the fields of `ParallelConfig` that it makes take effect.
    """

    brings: tuple[str, ...] = ()

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        """Change a plain model in place, perhaps one on the meta device, and state the facts of its parameters. Does nothing where the mesh
        does not ask for it."""
        raise NotImplementedError

    def engine(self, model: nn.Module, mesh: Mesh) -> DataEngine | None:
        """Its own engine, such as a pipeline's runner, for a model that is shaped and has its memory; None where it has none."""
        return None
