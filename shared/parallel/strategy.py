"""Chapter 06. The distributed strategy of many ranks: any layout is data engines, attributes of parameters, and a table of who holds what.

    step    data engines exchange gradients  ->  sums over `partial_over`  ->  one gradient norm  ->  update  ->  engines send weights

What differs between layouts are attributes of the parameters (`shared.model.sharding`), so no combination needs a class.

Left out on purpose: which engine a layout needs; `shared.parallel.parallelize` chooses.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.engine.callbacks import Callback
from shared.engine.checkpoint.saver import Saver
from shared.engine.checkpoint.soundness import CheckpointError
from shared.engine.metrics.gradient_norm import global_gradient_norm
from shared.engine.strategy import Strategy
from shared.model.hf.pretrained import Weights
from shared.model.sharding import Region, region_of, sharding_of
from shared.model.transformer import TransformerModel
from shared.optim.routing import Route
from shared.parallel.checkpoint import RankSaver
from shared.parallel.comm.communicator import Communicator
from shared.parallel.data.engine import DataEngine, Parameters, add_over, add_partial, complete
from shared.parallel.data.offload import OffloadedOptimizer
from shared.parallel.health.agreement import agreed, ranks_that_share, require_agreement
from shared.parallel.health.replicas import ReplicaCheck, StepCounter
from shared.parallel.held import Held, placement
from shared.parallel.mesh import Mesh
from shared.totals import Objective, Runner, Totals, Updater

OWN = ("output", "trackers", "project", "wandb_mode", "mlflow_uri")  # may differ: folders are probed, trackers are rank 0's


class ParallelStrategy(Held, Strategy):
    """The distributed strategy of a run over the ranks of a device mesh.

    Args:
        module: the plain model, shaped by the axes and sharded by the engines.
        mesh: this rank's.
        engines: the axes' own, such as a pipeline's runner, then data engines, each for the parameters of one group; their `optim_params`
            together are what the optimizer steps.
        routes: which rule updates which parameter, decided on the whole model (`shared.optim.routing`); None to decide on this rank's.
        offload: where the optimizer's parameters and state are; None, or where the model is already, for beside the model.

    Attributes: see `Strategy` and `Held`.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        engines: Sequence[DataEngine],
        routes: Sequence[Route] | None = None,
        offload: torch.device | str | None = None,
    ):
        super().__init__(module)
        self.mesh, self.engines, self.routes = mesh, tuple(engines), routes
        self.rank, self.size = mesh.world.rank, mesh.world.size
        self.data_size = mesh.data.size
        wrappers = [engine.model for engine in engines if engine.model is not module and not isinstance(engine.model, Parameters)]
        if len(wrappers) > 1:
            raise ValueError("Two engines wrap the model, and objectives can call one of them only: use backend course.")
        self.model = wrappers[0] if wrappers else module
        self.optim_params = self.grad_params = self.united([engine.optim_params for engine in engines] or [module])
        self.state = LocalState(self)
        weights = self.state.state_dict(keep_vars=True)
        self.weight_regions = {name: region_of(tensor) for name, tensor in weights.items()}
        self.optim_regions = {name: region_of(parameter) for name, parameter in self.state.named_parameters()}
        dtypes = {name: tensor.dtype for name, tensor in weights.items()}
        self.holders, self.optim_holders = placement(mesh.world, (self.weight_regions, dtypes), (self.optim_regions, {}))
        self.optim_holders.require_complete()
        self.partial = self.partial_gradients()
        self.around: tuple[DataEngine, ...] = ()
        if offload and next(module.parameters()).device != torch.device(offload):  # the same on every rank, also one that trains nothing
            self.around = (OffloadedOptimizer(module, self.optim_params, offload),)
            self.optim_params = self.united([engine.optim_params for engine in self.around])

    def logical_name(self, name: str) -> str:
        """A parameter's name in the whole model: a pipeline's last stage holds the tied embedding under the head's name."""
        return self.module.logical_name(name) if isinstance(self.module, TransformerModel) else name

    def united(self, modules: Sequence[nn.Module]) -> nn.Module:
        """The parameters of several modules under their logical names; the module itself where it is the only one and has those."""
        named = {self.logical_name(name): parameter for module in modules for name, parameter in module.named_parameters()}
        if len(modules) == 1 and [name for name, _ in modules[0].named_parameters()] == list(named):
            return modules[0]
        return Parameters(named)

    def begin(self, engine: Any) -> None:
        """Compare what the ranks' engines were given, then find out whether they share the output folder.

        Raises:
            RanksDisagree: the engines' configurations, their optimizers' settings or the numbers of steps differ.
            CheckpointError: without a shared folder, this layout could keep nothing.
        """
        settings = [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]
        config = {name: value for name, value in vars(engine.config).items() if name not in OWN}
        facts = {"steps": engine.steps, "optimizer": {"class": type(engine.optimizer).__name__, "groups": settings}, "engine": config}
        require_agreement(self.mesh.world, "run", facts)
        if told := agreed(self.mesh.world, engine.saver.begin, CheckpointError):
            engine.console.print(told, highlight=False, soft_wrap=True)

    # The parts of a step.

    def objective(self, objective: Objective) -> Objective:
        for engine in self.engines:
            objective = engine.objective(objective)
        return objective

    def runner(self, runner: Runner) -> Runner:
        for engine in (*self.engines, *self.around):
            runner = engine.runner(runner)
        return runner

    def reducer(self, model: nn.Module, totals: Totals) -> Totals:
        self.measured = None
        totals = complete(self.engines, totals, self.mesh.loss)
        for group, parameters in self.partial.items():
            add_partial(parameters, group)
        return totals

    def updater(self, updater: Updater) -> Updater:
        innermost, optim_params = updater, self.optim_params
        updater = lambda model, optimizer, token_count: innermost(optim_params, optimizer, token_count)  # noqa: E731
        for engine in (*self.around, *self.engines):
            updater = engine.updater(updater)
        return updater

    def partial_gradients(self) -> dict[Communicator, list[nn.Parameter]]:
        """The parameters whose gradients must be all-reduced over a group other than the data ranks, by group.

        Raises:
            ValueError: the ranks of the group hold different parts of one, which cannot be added.
        """
        found: dict[Communicator, list[nn.Parameter]] = {}
        for name, parameter in self.state.named_parameters():
            group = getattr(parameter, "partial_over", None)
            if group is None or group.size == 1 or not parameter.requires_grad:
                continue
            regions = {self.optim_holders.by_rank[rank].get(name) for rank in group.members}
            if len(regions) > 1:
                raise ValueError(
                    f"The gradient of {name} is partial over {group.axis}, whose ranks hold different parts of it: ZeRO shards it "
                    "differently on each of them. Use zero: 0 or fully_sharded with this layout."
                )
            found.setdefault(group, []).append(parameter)
        return found

    @property
    def whole_bytes(self) -> int:
        return sum(engine.whole_bytes for engine in self.engines)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of unsharded weights on this rank now, without its shards."""
        return sum(engine.gathered_bytes for engine in self.engines)

    # Norms, decisions, sums.

    def norms(self, groups: Mapping[str, Mapping[str, Tensor | None]]) -> dict[str, Tensor]:
        """Norms of several groups of tensors over all ranks, in one all-reduce; in none where every rank holds everything."""
        device = next(self.module.parameters()).device
        home = next(iter(self.optim_params.parameters()), next(self.module.parameters())).device
        if self.optim_holders.everywhere:
            return {key: norm.to(home) for key, norm in super().norms(groups).items()}
        squares = torch.zeros(2, len(groups), dtype=torch.float64, device=device)  # second row: whether a rank has something of the group
        for place, named in enumerate(groups.values()):
            by_copies: dict[int, list[Tensor]] = {}
            for name, tensor in named.items():
                if tensor is not None:
                    by_copies.setdefault(self.optim_holders.copies(name), []).append(tensor)
            squares[1, place].fill_(bool(named))
            for copies, tensors in by_copies.items():
                squares[0, place] += global_gradient_norm(tensors).to(device, torch.float64).square() / copies
        self.mesh.world.all_reduce(squares)
        present = squares[1].tolist() if len(groups) > 1 else [1.0]  # a single group needs no wait of the host
        return {key: squares[0, place].sqrt().to(home) for place, key in enumerate(groups) if present[place]}

    def agree(self, reason: str | None) -> str | None:
        """Agree on a shutdown: an all-reduce of 8 bytes between hosts, which waits for no GPU; the reason is gathered only where a rank has
        one."""
        if self.size == 1:
            return reason
        somebody = torch.tensor([float(reason is not None)], dtype=torch.float64)
        self.mesh.world.all_reduce(somebody, op="max")
        if not somebody:
            return None
        return next(each for each in self.mesh.world.gather_objects(reason) if each is not None)

    @property
    def holds_everything(self) -> bool:
        return self.optim_holders.everywhere

    def leads(self, folder: Path) -> bool:
        return ranks_that_share(self.mesh.world, folder)[0] == self.rank

    def sum(self, totals: Totals) -> Totals:
        return add_over(totals, self.mesh.loss)

    def gather_stages(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {name: value for each in self.mesh.pp.gather_objects(dict(metrics)) for name, value in each.items()}

    # State.

    def whole_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Gather every weight of the model by logical name, one after the other, on each rank that has some of it; None on the others.
        Every rank must iterate to the end."""
        own = self.state.state_dict(keep_vars=True)
        for name in self.holders.shapes:
            tensor = own.get(name)
            sharding = None if tensor is None else sharding_of(tensor)
            yield name, sharding.gather(tensor.detach(), everyone=True) if sharding else tensor if tensor is None else tensor.detach()

    def full_weights(self) -> dict[str, Tensor]:
        weights = self.weights()
        found = {name: weights.collect(name) for name in weights.like}
        return found if weights.writes else {}

    def weights(self) -> Weights:
        """The weights of the whole model, to be collected on rank 0 one by one, part by part (`save_pretrained`). No rank ever holds more
        than what it has, one whole tensor and a part of that."""
        own = self.state.state_dict(keep_vars=True)
        device = next(self.module.parameters()).device
        like = {name: torch.empty(shape, dtype=self.holders.dtypes[name], device="meta") for name, shape in self.holders.shapes.items()}
        parts: dict[str, list[tuple[Region, int]]] = {}
        for (name, region), ranks in self.holders.ranks.items():
            parts.setdefault(name, []).append((region, min(ranks)))

        def collect(name: str) -> Tensor | None:
            whole = torch.empty(like[name].shape, dtype=like[name].dtype) if self.rank == 0 else None
            for region, owner in parts[name]:
                if whole is not None:
                    part = own[name].detach() if owner == 0 else torch.empty(region.numel, dtype=whole.dtype, device=device)
                    if owner:
                        self.mesh.world.receive(part, source=owner)
                    for box, first in region.boxes():
                        box.of(whole).copy_(part.reshape(-1)[first : first + math.prod(box.sizes)].view(box.sizes))
                elif owner == self.rank:
                    self.mesh.world.send(own[name].detach().contiguous(), to=0)
            return whole

        return Weights(like, collect, self.rank == 0)

    def saver(self, folder: Path, keep_last: int = 2, keep_best: bool = True, asynchronous: bool = True) -> Saver:
        options = folder, keep_last, keep_best, asynchronous
        return RankSaver(self, *options) if self.size > 1 else super().saver(*options)

    def callbacks(self) -> Sequence[Callback]:
        check = self.mesh.config.check_every
        return [StepCounter(self.mesh.world.trace), *([ReplicaCheck(self, check)] if check else [])] if self.size > 1 else []

    @contextmanager
    def gathering(self, once: bool = True) -> Iterator[None]:
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.gathering(once))
            yield


class LocalState(nn.Module):
    """A rank's state under logical names, as a module that chapter 04's snapshots take for a model: `state_dict` has this rank's weights or
    shards, and `named_parameters` are the optimizer's."""

    def __init__(self, strategy: ParallelStrategy):
        super().__init__()
        self.strategy = [strategy]  # in a list: its modules are not this one's

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        strategy = self.strategy[0]
        return strategy.optim_params.named_parameters()

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Tensor]:
        """Each tensor once; weights that an engine keeps outside the model's modules are read from the engine (`stored`)."""
        strategy = self.strategy[0]
        elsewhere = {name: shard for engine in strategy.engines for name, shard in engine.stored.items()}
        held = {name: elsewhere.get(name, tensor) for name, tensor in unique(strategy.module.state_dict(keep_vars=True)).items()}
        return {strategy.logical_name(name): tensor for name, tensor in held.items()}


def unique(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under its first name alone: a tied head is the embedding."""
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}
