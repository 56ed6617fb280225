"""Chapter 08. Pipeline stages: the module that objectives call on a rank that holds some layers of the model, and its messages (P2P).

    in a training step     one chunk runs; where there is no head, the call ends early with `EndOfStage`, which the runner catches
    outside of one         the whole pipeline runs, and every rank gets the last stage's result: evaluation and generation stay as they are

Every rank reads the same rows, so each stage makes positions and masks from the batch itself, by the objective's own code. Only hidden
states and their gradients travel.

A message has no name: between two ranks, the n-th that is received is the n-th that was sent. So each way has a group of its own. With both
directions between two ranks in one group, NCCL would run a rank's sends and receives in the order of its calls, and two ranks that both
send first would deadlock. With two ranks and several chunks even activations travel both ways: from the last rank back to the first one.

Left out on purpose: objectives that call the model twice for one micro-batch; receiving ahead, while an earlier action computes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.model.transformer import TransformerModel
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.trace import Work
from shared.parallel.mesh import Mesh
from shared.parallel.pipeline.schedules import Action, Message, Schedule, Shape
from shared.totals import Totals


class Sent(NamedTuple):
    """A pending message. place: of the receiving action in the receiver's list. tensor: the data, kept until it has arrived."""

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
        """Look up at which place of its rank's list each message of a schedule is sent and received."""
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
        """Receive into a tensor. Messages that the sender received before it sent this one have arrived, and their memory is freed."""
        self.groups[message.what, self.shape.goes_around(message)].receive(tensor, source=message.source)
        self.wait([sent for sent in self.under_way if sent.message.to == message.source and sent.place <= self.sent_at[message]])

    def wait(self, arrived: list[Sent] | None = None) -> None:
        """Wait for pending messages; None for all of them."""
        done = {sent.message for sent in (self.under_way if arrived is None else arrived)}
        for sent in self.under_way:
            if sent.message in done:
                sent.work.wait()
        self.under_way = [sent for sent in self.under_way if sent.message not in done]


class EndOfStage(Exception):
    """Ends an objective on a stage without a head. hidden: what the stage has computed."""

    def __init__(self, hidden: Tensor):
        super().__init__("This stage of the pipeline has no head: only the pipeline's runner knows how to continue.")
        self.hidden = hidden


class PipelineModel(nn.Module):
    """A rank's chunks of a model, as a module that is called like the whole model.

    Args:
        module: a `TransformerModel`, cut down to what this rank holds of it (`keep_part`).
        pp: the ranks of the pipeline.
        links: this rank's.
        blocks: for each chunk of this rank the numbers of its blocks.
        compilable: whether its blocks can be compiled.

    Attributes:
        received: the hidden states that the running stage got from the one before, a leaf; None on the first stage.
    """

    def __init__(self, module: TransformerModel, pp: Communicator, links: Links, blocks: Sequence[range], compilable: bool = True):
        super().__init__()
        self.module, self.pp, self.links, self.compilable = module, pp, links, compilable
        self.dtype = next(module.parameters()).dtype  # of the weights that are kept: FSDP may gather blocks in another one
        self.action: Action | None = None
        self.called = False
        self.received: Tensor | None = None
        kept, first, last = module.stack.blocks, pp.rank == 0, pp.rank == pp.size - 1
        self.chunks = [
            (
                module.embedding if first and chunk == 0 else None,
                module.head if last and chunk == len(blocks) - 1 else None,
                module.stack.final_norm if last and chunk == len(blocks) - 1 else None,
                tuple(str(number) for number in numbers),
            )
            for chunk, numbers in enumerate(blocks)
        ]
        self.whole = module.embedding, module.head, module.stack.final_norm, tuple(kept)
        self.blocks = [kept]  # in a list: these are `module`'s

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        """See `TransformerModel.forward`.

        Raises:
            EndOfStage: within a training step, on a stage without a head.
            SettingError: a second call for one micro-batch; or a training pass outside of a step, whose gradients would not travel.
        """
        if self.action is None:
            if self.training and torch.is_grad_enabled():
                raise SettingError("Under pipeline parallelism a training pass is the runner's: use strategy.runner(...), or model.eval().")
            with torch.no_grad():
                return self.run_all(input_ids, options)
        if self.called:
            raise SettingError("The objective calls the model twice, and a pipeline sends one result on: set pipeline_parallel to 1.")
        self.called = True
        result, given = self.run(self.action, input_ids, options)
        if given is not None:
            raise EndOfStage(result)
        return result

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """A context in which a call runs the forward pass of one action of a schedule."""
        self.action, self.called, self.received = action, False, None
        try:
            yield
        finally:
            self.action = None

    def run(self, action: Action, input_ids: Tensor, options: dict[str, Any]) -> tuple[Any, Message | None]:
        """Run one chunk, on ids or on the previous stage's hidden states. Returns its result and the message to send it as, if any. Hidden
        states have the weights' dtype, also under autocast, which does not round the residual stream."""
        x, needed, given = input_ids, self.links.shape.needed(self.pp.rank, action), self.links.shape.given(self.pp.rank, action)
        if needed is not None:
            x = self.received = self.receive(input_ids, needed).requires_grad_(torch.is_grad_enabled())
        with self.only(action.chunk):
            return self.module(x, **options), given

    def receive(self, input_ids: Tensor, message: Message) -> Tensor:
        """The previous stage's hidden states."""
        x = torch.empty(*input_ids.shape, self.module.config.hidden_size, dtype=self.dtype, device=input_ids.device)
        self.links.receive(x, message)
        return x

    @contextmanager
    def only(self, chunk: int) -> Iterator[None]:
        """A context in which the module is one of this rank's chunks, with unchanged names."""
        if len(self.chunks) == 1:
            yield
            return
        model, kept = self.module, self.blocks[0]
        embedding, head, final_norm, names = self.chunks[chunk]
        model.embedding, model.head, model.stack.final_norm = embedding, head, final_norm
        model.stack.blocks = nn.ModuleDict({name: kept[name] for name in names})
        try:
            yield
        finally:
            model.embedding, model.head, model.stack.final_norm = self.whole[:3]
            model.stack.blocks = kept

    def run_all(self, input_ids: Tensor, options: dict[str, Any]) -> Any:
        """Run all stages sequentially. Returns the last one's result on every rank. Every rank of the pipeline calls it."""
        shape, result = self.links.shape, None
        actions = [[Action("F", 0, chunk) for chunk in range(shape.chunks)]] * shape.ranks
        self.links.follow(actions)
        for action in actions[self.pp.rank]:
            result, given = self.run(action, input_ids, options)
            if given is not None:
                self.links.send(result, given)
        self.links.wait()
        return from_last(self.pp, result if self.pp.rank == self.pp.size - 1 else None, input_ids.device)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile block by block: communication stays outside the graphs."""
        if not self.compilable:
            raise SettingError(
                "engine.compile with parallel.pipeline_schedule zero_bubble: weight gradients are computed apart, which a compiled block "
                "does not do. Change one of them."
            )
        for block in self.blocks[0].values():
            block.compile(*arguments, **options)


def from_last(group: Communicator, result: Any, device: torch.device) -> Any:
    """Broadcast the last rank's result: tensors, in tuples, dictionaries and `Totals`. Small facts travel as text, tensors one by one."""
    last, tensors = group.size - 1, []
    described = group.gather_objects(describe(result, tensors) if group.rank == last else None)[last]
    if group.rank != last:
        result = rebuild(described, tensors, device)
    for tensor in tensors:
        group.broadcast(tensor, root=last)
    return result


def describe(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    """Describe a nested value as JSON for `rebuild`; its tensors are appended to a list."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().contiguous())
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"keys": list(value), "of": [describe(each, tensors) for each in value.values()]}
    if isinstance(value, tuple | list):
        return {"totals": isinstance(value, Totals), "of": [describe(each, tensors) for each in value]}
    raise TypeError(f"A pipeline cannot send a {type(value).__name__} from its last stage to the others: return tensors.")


def rebuild(described: dict[str, Any], tensors: list[Tensor], device: torch.device) -> Any:
    """A described value with uninitialized tensors, which are appended to a list."""
    if "shape" in described:
        tensors.append(torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]), device=device))
        return tensors[-1]
    parts = [rebuild(each, tensors, device) for each in described["of"]]
    if "keys" in described:
        return dict(zip(described["keys"], parts, strict=True))
    return Totals(*parts) if described["totals"] else tuple(parts)
