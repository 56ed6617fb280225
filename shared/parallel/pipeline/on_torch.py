"""Chapter 08. Pipeline parallelism on PyTorch's own engine: the stages and schedules of `torch.distributed.pipelining`.

    gpipe ScheduleGPipe    1f1b Schedule1F1B    interleaved ScheduleInterleaved1F1B    zero_bubble ScheduleInterleavedZeroBubble, one chunk

PyTorch's schedules send, receive and compute. What they call as a stage is this course's objective on this rank's chunk of the model, as
in `shared.parallel.pipeline.runner`, and what they call a batch is the numbers of the micro-batches: every rank reads its own rows anyway.
The loss is a sum and `scale_grads` is off, so the updater divides once. Nothing is traced, and each stage knows the shape of its hidden
states in advance, so no step sends shapes; micro-batches of another shape get new stages.

Left out on purpose: schedules of the reader's own, which PyTorch runs by private names only; `DistributedDataParallel` around a stage, for
which replicas are this course's; and these messages in the communication trace, where they do not appear.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from shared.course.errors import CourseError, SettingError
from shared.parallel.mesh import Mesh
from shared.parallel.pipeline.runner import PipelineRunner
from shared.parallel.pipeline.schedules import Action, Message, Schedule
from shared.parallel.pipeline.stages import EndOfStage, PipelineModel
from shared.totals import Batch, Objective, Totals, add_totals

OF_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
OF_SEVERAL = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


class TorchPipelineModel(PipelineModel):
    """A rank's chunks of a model. In a training step PyTorch's stage passes the hidden states (`handed`); outside of one, `Links` does."""

    handed: Tensor | None = None

    def receive(self, input_ids: Tensor, message: Message) -> Tensor:
        return super().receive(input_ids, message) if self.handed is None else self.handed


class Stage(nn.Module):
    """The module of a `PipelineStage`: it runs the objective of one micro-batch on one chunk.

    Args:
        runner: whose micro-batches and objective these are.
        chunk: of this rank.
    """

    def __init__(self, runner: "TorchPipelineRunner", chunk: int):
        super().__init__()
        model = runner.model
        *ends, names = model.chunks[chunk]
        self.held = nn.ModuleList([*filter(None, ends), *(model.blocks[0][name] for name in names)])  # whose weights get gradients
        self.runner, self.chunk = [runner], chunk

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        """received: hidden states [batch, seq, D], none on the first stage. number: [1] int64, of the micro-batch. Returns hidden states,
        or the loss on the last stage."""
        return self.runner[0].compute(Action("F", int(number), self.chunk), *received)


class TorchPipelineRunner(PipelineRunner):
    """Runs a step's micro-batches by PyTorch's pipeline schedules."""

    model: TorchPipelineModel

    def __init__(self, model: PipelineModel, mesh: Mesh):
        super().__init__(model, mesh)
        self.hidden, self.count, self.engine = torch.empty(0), 0, None

    def execute(self, schedule: Schedule, microbatches: Sequence[Batch], objective: Objective) -> Totals:
        """Do a step's forward and backward passes. Returns the totals of all micro-batches, on every rank.

        Raises:
            SettingError: PyTorch's schedule cannot take them.
        """
        self.microbatches, self.objective, self.totals = microbatches, objective, []
        self.prepare(microbatches)
        numbers = torch.arange(len(microbatches))
        try:
            self.engine.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:  # PyTorch's own, around what the objective raised
            raise error.__cause__ if isinstance(error.__cause__, CourseError) else error
        return self.share_totals(add_totals(self.totals) if self.totals else None)

    def compute(self, action: Action, received: Tensor | None = None) -> Tensor:
        """The forward pass of one micro-batch through one chunk."""
        self.model.handed = received
        try:
            with self.model.running(action):
                totals = self.objective(self.model, self.microbatches[action.microbatch])
        except EndOfStage as end:
            if end.hidden.shape != self.hidden.shape:
                raise SettingError(
                    f"The objective calls the model with ids {list(end.hidden.shape[:-1])}, and the batch has input_ids "
                    f"{list(self.hidden.shape[:-1])}: PyTorch's stages need the shape before they run. Set parallel.backend to course."
                ) from None
            return end.hidden
        finally:
            self.model.handed = None
        self.totals.append(add_totals([totals]))
        return totals.loss_sum

    def prepare(self, microbatches: Sequence[Batch]) -> None:
        """Make stages and schedule for micro-batches of this number and shape, unless the last step had the same.

        Raises:
            SettingError: their shapes differ, or PyTorch's schedule does not take this number.
        """
        shapes = {tuple(batch["input_ids"].shape) for batch in microbatches}
        if len(shapes) > 1:
            raise SettingError(
                f"parallel.backend torch with pipeline_parallel: a step's micro-batches have the shapes {sorted(shapes)}, and PyTorch's "
                "stages take one. Give rows of one length, or set parallel.backend to course."
            )
        weight = next(self.model.module.parameters())
        hidden = torch.empty(*shapes.pop(), self.model.module.config.hidden_size, dtype=weight.dtype, device="meta", requires_grad=True)
        if (self.hidden.shape, self.count) == (hidden.shape, len(microbatches)):
            return
        self.hidden, self.count = hidden, 0
        stages = [self.stage(chunk, weight.device) for chunk in range(self.shape.chunks)]
        make, of = (OF_ONE_STAGE[self.name], stages[0]) if self.name in OF_ONE_STAGE else (OF_SEVERAL[self.name], stages)
        try:
            self.engine = make(of, len(microbatches), loss_fn=lambda loss, number: loss, scale_grads=False)
        except ValueError as error:
            raise SettingError(
                f"parallel.backend torch cannot run pipeline_schedule {self.name} with {len(microbatches)} micro-batches on "
                f"{self.pp.size} ranks: {error} Give another number of micro-batches, or set parallel.backend to course."
            ) from error
        self.count = len(microbatches)

    def stage(self, chunk: int, device: torch.device) -> PipelineStage:
        """PyTorch's stage of a chunk, with static shapes."""
        index, count = chunk * self.pp.size + self.pp.rank, self.pp.size * self.shape.chunks
        loss = torch.empty((), dtype=torch.promote_types(self.hidden.dtype, torch.float32), device="meta", requires_grad=True)
        received = () if index == 0 else (self.hidden,)
        given = loss if index == count - 1 else self.hidden
        return PipelineStage(Stage(self, chunk), index, count, device, received, given, group=self.pp.torch_group)
