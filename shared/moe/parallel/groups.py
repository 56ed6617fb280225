"""Chapter 09. Expert-parallel process groups (EP and EDP): which ranks hold which experts, and who adds whose gradients, as a table.

    4 data ranks, experts over 2      rank       0      1      2      3
                                      experts    0 1    2 3    0 1    2 3
                                      rows       travel between 0 and 1, and between 2 and 3               (ep)
                                      gradients  of experts: 0 with 2, 1 with 3; of all else: 0 1 2 3      (edp; all data ranks)

The backward pass of the exchange has brought an expert the gradients of all rows that it computed, whichever rank they came from: its
gradient is a sum over the ranks of its ep group already. What is missing are the rows of the other ep groups. So expert gradients are
added over edp, with no other factor, and the router, which every rank applies to its own tokens, is added over all data ranks.
"""

from typing import NamedTuple

from shared.course.binding import exercise
from shared.model.sharding import Range
from shared.parallel.comm.communicator import Communicator
from shared.parallel.mesh import Mesh


class RankGroups(NamedTuple):
    """A rank's line in the table. Ranks are global, in ascending order, this one among them.

    experts: the first expert that it holds, and the one after its last. exchange: the ranks that together hold each expert once, between
    which rows travel. same_experts: the ranks over which the gradients of its experts are added. everything_else: the ranks over
    which all other gradients are added, such as the router's.
    """

    experts: Range
    exchange: list[int]
    same_experts: list[int]
    everything_else: list[int]


@exercise("09.gradient_ranks")
def gradient_ranks(pipeline: int, data: int, context: int, tensor: int, expert: int, num_experts: int) -> list[RankGroups]:
    """Decide which experts each rank holds, between which ranks rows travel, and over which ranks which gradients are added.

    Ranks are numbered along all axes, the last one fastest:

        rank = ((pp * data + d) * context + cp) * tensor + tp

    What they hold, and what they see:

        - Each pipeline stage pp has layers of its own, and each tensor coordinate tp a slice of its own of every matrix. Ranks that share
          both hold the same, apart from experts, and see different tokens: along `data` other rows, along `context` other positions.
        - Experts are spread over `expert` consecutive data ranks of one context coordinate, E / expert on each, in the order of the
          ranks. The next `expert` data ranks hold all experts again, and the ranks of every context coordinate do the same.
        - A row travels to the rank that holds its expert, among these `expert` ranks, and its gradient comes back. So a rank has computed
          an expert's gradient for rows from all of them, and every other gradient for its own tokens.

    In the end each gradient is the sum over all tokens that the data and context ranks see, each counted once.

    Args:
        pipeline, context, tensor: the degrees of these axes.
        data: data-parallel ranks, fully sharded ones included (`ParallelConfig.data_ranks`).
        expert: over how many data ranks experts are spread; divides `data`.
        num_experts: E; divisible by `expert`.

    Returns:
        The line of each rank, in the order of the ranks.

    >>> gradient_ranks(pipeline=1, data=4, context=1, tensor=1, expert=2, num_experts=4)[3]
    RankGroups(experts=(2, 4), exchange=[2, 3], same_experts=[1, 3], everything_else=[0, 1, 2, 3])
    """


def expert_groups(mesh: Mesh, num_experts: int) -> tuple[Communicator, Communicator, list[Range]]:
    """Make the groups of the table. Every rank of the mesh calls it.

    Returns:
        ep: this rank's group for the exchange of rows. edp: the one over which its experts' gradients are added. ranges: which experts
        each rank of ep holds.

    Raises:
        ValueError: the table adds other gradients over other ranks than the mesh does.
    """
    config = mesh.config
    degrees = config.pipeline_parallel, config.data_ranks, config.context_parallel, config.tensor_parallel, config.expert_parallel
    table = gradient_ranks(*degrees, num_experts)
    own = table[mesh.world.rank]
    if tuple(own.everything_else) != mesh.loss.members:
        raise ValueError(f"The router's gradient would be added over the ranks {own.everything_else}, not {list(mesh.loss.members)}.")
    ep, edp = (
        mesh.world.split(axis, [list(group) for group in dict.fromkeys(tuple(line[place]) for line in table)])
        for place, axis in ((1, "ep"), (2, "edp"))
    )
    return ep, edp, [table[rank].experts for rank in ep.members]
