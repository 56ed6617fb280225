"""Replicas for the tests of floor 6: a small model trained for three steps on ranks that are threads, and by one process on all of it.

Every rank has other data, of other lengths, and another number of tokens that count.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from step_records import RunRecord, own_gradients, record_steps
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.updater import Update
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import ParallelConfig
from shared.parallel.data.ddp import DataParallel, NaiveDataParallel
from shared.parallel.data.engine import DataEngine
from shared.parallel.comm.threads import run_threads
from shared.parallel.data.zero import Zero, muon_matrices
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import routes_of
from shared.model.sharding import sharding_of
from shared.parallel.strategy import ParallelStrategy
from shared.totals import Totals

MEGABYTES = 0.004  # a handful of buckets, some of several parameters
TINY = ModelConfig(vocab_size=19, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, initializer_range=0.2)
OPTIMIZERS = {
    "adamw": OptimizerConfig("adamw", lr=0.01),
    "lion": OptimizerConfig("lion", lr=0.002),
    "sgd": OptimizerConfig("sgd", lr=0.3, momentum=0.9),
    "muon": OptimizerConfig("muon", lr=0.02, newton_schulz_dtype="float64"),
}
CONFIGS = OPTIMIZERS | {"adamw without decay": OptimizerConfig("adamw", lr=0.01, weight_decay=0.0)}


@dataclass(frozen=True)
class Situation:
    """What a run is like. microbatches: of each rank. uneven: ranks and micro-batches have other lengths, and targets that do not count.
    silent_rank: the last rank has no target that counts. frozen: the norms and one matrix."""

    microbatches: int = 1
    uneven: bool = False
    silent_rank: bool = False
    tied: bool = False
    frozen: bool = False
    max_norm: float | None = None


SITUATIONS = {
    "accumulation": Situation(microbatches=2),
    "uneven counts": Situation(uneven=True),
    "a rank without tokens": Situation(silent_rank=True),
    "tied": Situation(tied=True),
    "frozen": Situation(frozen=True),
    "clipping": Situation(max_norm=0.05),
}
EVERYTHING = Situation(2, uneven=True, silent_rank=True, tied=True, frozen=True, max_norm=0.05)


def model_of(situation: Situation) -> TransformerModel:
    model = TransformerModel(replace(TINY, tie_word_embeddings=situation.tied), seed=3).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (situation.frozen and ("q_proj" in name or "norm" in name)))
    return model


def share(situation: Situation, rank: int, ranks: int, step: int) -> list[dict[str, Tensor]]:
    """A rank's micro-batches in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for number in range(situation.microbatches):
        length = 5 + (3 * rank + 2 * number if situation.uneven else 0)
        ids = torch.randint(19, (2, length), generator=generator)
        targets = torch.randint(19, (2, length), generator=generator)
        if situation.uneven:
            targets[:, : 1 + number] = -100
        if situation.silent_rank and rank == ranks - 1:
            targets[:] = -100
        found.append({"input_ids": ids, "targets": targets})
    return found


@cache
def alone(optimizer: str, situation: Situation, ranks: int) -> RunRecord:
    """One process on all ranks' micro-batches."""
    model = model_of(situation)
    everything = lambda step: [microbatch for rank in range(ranks) for microbatch in share(situation, rank, ranks, step)]  # noqa: E731
    built, update = build_optimizer(model, CONFIGS[optimizer]), Update(situation.max_norm)
    record = record_steps(model, built, everything, update, lambda: own_gradients(model))
    record.weights = own_weights(model)
    return record


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class EngineAlone(ParallelStrategy):
    """One data engine, whose own reducer completes a step: what a chapter shows, and where bugs can be planted."""

    def reducer(self, model, totals):
        self.measured = None
        return self.engines[0].reducer(model, totals)


def over(engine: DataEngine, world: Communicator) -> EngineAlone:
    return EngineAlone(engine.optim_params if isinstance(engine.model, Weights) else engine.model, mesh_of(world), [engine])


def mesh_of(world: Communicator) -> Mesh:
    return Mesh(ParallelConfig(data_parallel=world.size), world)


Make = Callable[[nn.Module, Communicator, str], DataEngine]  # applies parallelism to a model; the optimizer's name comes last


def zero(stage: int) -> Make:
    return lambda model, world, name: Zero(model, world, stage, muon_matrices(routes_of(model, CONFIGS[name])), MEGABYTES)


LAYOUTS: dict[str, tuple[int, Make]] = {
    "naive dp2": (2, lambda model, world, name: NaiveDataParallel(model, world)),
    "dp2": (2, lambda model, world, name: DataParallel(model, world, MEGABYTES)),
    "dp3": (3, lambda model, world, name: DataParallel(model, world, MEGABYTES)),
    "dp2_zero1": (2, zero(1)),
    "dp2_zero2": (2, zero(2)),
    "dp3_zero2": (3, zero(2)),
    "dp4_zero1": (4, zero(1)),
}


def train_rank(world: Communicator, optimizer: str, situation: Situation, make: Make, look: Callable[[Optimizer], None] = id):
    """One rank's run: its record and what parallelism it was. look: is shown the optimizer at the end."""
    model = model_of(situation)
    engine = make(model, world, optimizer)
    parallel = over(engine, world)
    built = build_optimizer(parallel.optim_params, CONFIGS[optimizer])
    update = Update(situation.max_norm, norm=getattr(engine, "own_norm", parallel.grad_norm))
    mine = lambda step: share(situation, world.rank, world.size, step)  # noqa: E731
    record = record_steps(model, built, mine, update, lambda: own_gradients(parallel.optim_params), strategy=parallel)
    record.weights = own_weights(model)
    look(built)
    return record, parallel


def train_ranks(optimizer: str, situation: Situation, ranks: int, make: Make):
    return run_threads(train_rank, ranks, optimizer, situation, make)


def require_same(found, expected: RunRecord) -> None:
    """All ranks' runs against one process's: everything to 1e-9 relative, and weights alike to the bit on all ranks."""
    there = {name: gradient for name, gradient in expected.gradients[-1].items() if gradient is not None}
    for record, parallel in found:
        assert record.tokens == expected.tokens
        close(record.losses, expected.losses, "loss")
        close(record.norms, expected.norms, "norm")
        shards = dict(parallel.optim_params.named_parameters())
        held = {name for name in there if shards[name].numel()}
        gradients = {name: gradient for name, gradient in record.gradients[-1].items() if gradient is not None}
        assert gradients.keys() == held, "ranks hold gradients of other parameters than one process has"
        for name, gradient in gradients.items():
            sharding, whole = sharding_of(shards[name]), there[name]
            close(gradient, sharding.local(whole) if sharding else whole, f"gradient of {name}")
        for name, weight in record.weights.items():
            close(weight, expected.weights[name], f"weight {name}")
            assert torch.equal(weight, found[0][0].weights[name]), f"{name} differs between ranks"


def close(found, expected, what: str) -> None:
    found, expected = torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    assert (found - expected).abs().max() <= 1e-9 * expected.abs().max(), what


def exchange(parallel, microbatches, objective):
    """The parts of a step before the update."""
    return parallel.reducer(parallel.model, parallel.runner(accumulate_gradients)(parallel.model, microbatches, objective))


class Weights(nn.Module):
    """Weights of 1, 2, 3, ... numbers; a batch says which are used, in the order in which their gradients are to be ready."""

    def __init__(self, count: int):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in range(1, count + 1))

    def forward(self, used):
        return sum((self.weights[number].sum() for number in reversed(used)), torch.zeros((), dtype=torch.float64))


def digit_objective(model, batch):
    used, digit = batch
    return Totals(model(used) * digit, torch.tensor(1), {})
