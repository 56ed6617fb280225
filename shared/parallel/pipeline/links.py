"""Chapter 08. Point-to-point messages of a pipeline (P2P, send and receive): activations to the next stage, gradients back.

A message has no name: between two ranks, the n-th that is received is the n-th that was sent. So each way has a group of its own. With both
directions between two ranks in one group, NCCL would run a rank's sends and receives in the order of its calls, and two ranks that both
send first would deadlock. With two ranks and several chunks even activations travel both ways: from the last rank back to the first one.

Left out on purpose: receiving ahead, while an earlier action computes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Work
from shared.parallel.mesh import Mesh
from shared.parallel.pipeline.schedules import Schedule
from shared.parallel.pipeline.validate import Message, Shape


class Sent(NamedTuple):
    """A message under way.

    place: of the action that receives it, in the receiver's list. tensor: what is sent, kept until it has arrived.
    """

    message: Message
    place: int
    work: Work
    tensor: Tensor


class Links:
    """One rank's links to the ranks of the stages before and after its own.

    Args:
        mesh: this rank's. Every rank of the world makes its links at the same time.
        shape: of the pipeline.
    """

    def __init__(self, mesh: Mesh, shape: Shape):
        rows = torch.arange(mesh.world.size).view(shape.ranks, -1).T.tolist()  # pp is the mesh's outermost axis
        self.shape, self.groups = shape, {("activations", False): mesh.pp, ("gradients", False): mesh.world.split("pp_gradients", rows)}
        if shape.chunks > 1:
            for what in ("activations", "gradients"):
                self.groups[what, True] = mesh.world.split(f"pp_{what}_around", rows)
        self.under_way: list[Sent] = []
        self.sent_at: dict[Message | None, int] = {}
        self.received_at: dict[Message | None, int] = {}

    def follow(self, schedule: Schedule) -> None:
        """Take a schedule: at which place of whose list each message is sent and received."""
        self.sent_at, self.received_at = {}, {}
        for rank, actions in enumerate(schedule):
            for place, action in enumerate(actions):
                self.sent_at[self.shape.given(rank, action)] = place
                self.received_at[self.shape.needed(rank, action)] = place

    def send(self, tensor: Tensor, message: Message) -> None:
        """Start to send."""
        tensor = tensor.detach().contiguous()
        work = self.groups[message.what, self.shape.goes_around(message)].send(tensor, to=message.to, asynchronous=True)
        self.under_way.append(Sent(message, self.received_at[message], work, tensor))

    def receive(self, tensor: Tensor, message: Message) -> None:
        """Fill a tensor. Messages that the sender took before it sent this one have arrived, and their memory is freed."""
        self.groups[message.what, self.shape.goes_around(message)].receive(tensor, source=message.source)
        self.wait([sent for sent in self.under_way if sent.message.to == message.source and sent.place <= self.sent_at[message]])

    def wait(self, arrived: list[Sent] | None = None) -> None:
        """Wait for messages under way; None for all of them."""
        done = {sent.message for sent in (self.under_way if arrived is None else arrived)}
        for sent in self.under_way:
            if sent.message in done:
                sent.work.wait()
        self.under_way = [sent for sent in self.under_way if sent.message not in done]
