"""Chapter 08. The pipeline runner: a microbatch runner of chapter 01's step that executes any valid schedule.

    F   receive hidden states, run the objective on them, keep the graph, send the result        last stage: keep the loss
    B   receive the result's gradient, run the backward pass, send the input's gradient          last stage: start from the loss
    I   as B without the weights' gradients;      W   these

Reducer, updater and objective stay as they are. The loss is divided by nothing here: the updater divides once, by all tokens of the step,
as it does in one process.

Left out on purpose: ZeRO-2, which exchanges gradients after each micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shared.loop import accumulate_gradients
from shared.parallel.data.engine import DataEngine
from shared.parallel.mesh import Mesh
from shared.parallel.pipeline.schedules import Action, Schedule, make_schedule
from shared.parallel.pipeline.simulate import validate
from shared.parallel.pipeline.stages import EndOfStage, PipelineModel
from shared.parallel.pipeline.weight_gradients import Waiting, add_weight_gradients
from shared.totals import Batch, Objective, Runner, Totals, add_totals


class PipelineRunner(DataEngine):
    """Runs a step's micro-batches through the pipeline.

    Args:
        model: this rank's stages.
        mesh: this rank's; `pipeline_schedule` of its configuration is read.
        waiting: the list in which linear layers defer their weight gradients; None where backward passes are not split.

    Attributes:
        schedules: by number of micro-batches; made when first needed, unless `use` has set another one.
        most: the largest number of graphs that this rank kept at a time in the last step.
    """

    model: PipelineModel

    def __init__(self, model: PipelineModel, mesh: Mesh, waiting: Waiting | None = None):
        super().__init__(model, mesh.loss)
        self.optim_params = nn.Module()  # empty: the data engines serve the stage's parameters
        self.pp, self.links, self.shape, self.waiting = mesh.pp, model.links, model.links.shape, waiting
        self.name = mesh.config.pipeline_schedule
        self.schedules: dict[int, Schedule] = {}
        self.most = 0
        self.dtypes: dict[str, str] = {}

    def schedule_for(self, microbatches: int) -> Schedule:
        """The schedule for this number of micro-batches, validated before its first use."""
        if microbatches not in self.schedules:
            self.use(make_schedule(self.name, self.shape.ranks, microbatches, self.shape.chunks), microbatches)
        return self.schedules[microbatches]

    def use(self, schedule: Schedule, microbatches: int) -> None:
        """Use this schedule in steps of so many micro-batches.

        Raises:
            ScheduleError: it cannot be run.
        """
        validate(schedule, microbatches, self.shape.chunks)
        self.schedules[microbatches] = schedule

    def runner(self, runner: Runner) -> Runner:
        """A runner that executes the schedule.

        Raises:
            ValueError: `runner` is another one than `accumulate_gradients`, and would be lost.
        """
        if runner is not accumulate_gradients:
            raise ValueError("A pipeline runs its schedule in place of accumulate_gradients: wrap the runner that strategy.runner returns.")
        return lambda model, batches, objective: self.execute(self.schedule_for(len(batches)), batches, objective)

    def execute(self, schedule: Schedule, microbatches: Sequence[Batch], objective: Objective) -> Totals:
        """Run this rank's actions in order. Returns the totals of all micro-batches, on every rank."""
        self.links.follow(schedule)
        self.graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (chunk, micro-batch) -> input and result
        self.left: dict[tuple[int, int], Waiting] = {}
        self.totals: list[Totals] = []
        self.most = 0
        for action in schedule[self.pp.rank]:
            if action.kind == "F":
                self.forward(action, microbatches[action.microbatch], objective)
            elif action.kind == "W":
                add_weight_gradients(self.left.pop(action[1:]))
            else:
                self.backward(action)
                if action.kind == "B" and self.waiting is not None:
                    add_weight_gradients(self.left.pop(action[1:]))
            self.most = max(self.most, len(self.graphs.keys() | self.left.keys()))
        self.links.wait()
        return self.share_totals(add_totals(self.totals) if self.totals else None)

    def forward(self, action: Action, batch: Batch, objective: Objective) -> None:
        message = self.shape.given(self.pp.rank, action)
        with self.model.running(action):
            try:
                totals = objective(self.model, batch)
            except EndOfStage as end:
                result = end.hidden
                self.links.send(result, message)
            else:
                if message is not None:
                    raise ValueError("The objective returned on a stage without a head, so it has not called the model.")
                result = totals.loss_sum
                self.totals.append(add_totals([totals]))
        self.graphs[action[1:]] = self.model.received, result

    def backward(self, action: Action) -> None:
        """The backward pass of one micro-batch through one chunk; weight gradients are deferred to part W."""
        received, result = self.graphs.pop(action[1:])
        message, gradient = self.shape.needed(self.pp.rank, action), None
        if message is not None:
            gradient = torch.empty_like(result)
            self.links.receive(gradient, message)
        if result.requires_grad:  # not where everything up to here is frozen
            result.backward(gradient)
        if self.waiting is not None:
            self.left[action[1:]] = list(self.waiting)
            self.waiting.clear()
        if received is not None:
            self.links.send(torch.zeros_like(received) if received.grad is None else received.grad, self.shape.given(self.pp.rank, action))

    def share_totals(self, totals: Totals | None) -> Totals:
        """Broadcast the last stage's totals, as one tensor; their names and dtypes in the first step alone."""
        last, values = self.pp.size - 1, {}
        if totals is not None:
            metrics = {f"metric {name}": value for name, value in totals.metrics.items()}
            values = {"loss_sum": totals.loss_sum, "token_count": totals.token_count} | metrics
        dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in values.items()}
        self.dtypes = self.dtypes or self.pp.gather_objects(dtypes)[last]
        if totals is not None and dtypes != self.dtypes:
            raise ValueError(f"An objective's totals had {self.dtypes} in the first step and have {dtypes} now: keep their names.")
        device = next(self.model.module.parameters()).device
        packed = torch.zeros(len(self.dtypes), dtype=torch.float64, device=device)
        if totals is not None:
            packed = torch.stack([value.detach().to(device, torch.float64) for value in values.values()])
        self.pp.broadcast(packed, root=last)
        received = zip(packed, self.dtypes.values(), strict=True)
        loss_sum, token_count, *metrics = (value.to(getattr(torch, dtype)) for value, dtype in received)
        names = [name.removeprefix("metric ") for name in list(self.dtypes)[2:]]
        return Totals(loss_sum, token_count, dict(zip(names, metrics, strict=True)))
