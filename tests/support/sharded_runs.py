"""Small runs for the tests of FSDP and recomputation: the same three steps in one process and over ranks, in float64."""

from collections.abc import Callable

import torch
from step_records import RunRecord, own_gradients, record_steps
from torch import Tensor, nn

from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.transformer import PLAIN, TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.updater import Update
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import ParallelConfig
from shared.parallel.data.fsdp import FullySharded
from shared.parallel.mesh import Mesh
from shared.model.sharding import sharding_of
from shared.parallel.strategy import ParallelStrategy
from shared.parallel.data.activation_checkpointing import apply_activation_checkpointing
from shared.parallel.comm.threads import run_threads
from shared.totals import Batch, Totals

SMALL = ModelConfig(vocab_size=31, hidden_size=20, num_hidden_layers=3, num_attention_heads=2, intermediate_size=29, initializer_range=0.1)
ROWS, MICROBATCHES = 12, 2
ADAMW = OptimizerConfig("adamw", lr=0.01)
MUON = OptimizerConfig("muon", lr=0.02, newton_schulz_dtype="float64")


def batch_of(step: int, microbatch: int, config: ModelConfig = SMALL) -> Batch:
    """The whole batch. Its first two rows hold no target, so that a rank of six has none, and the others hold unequally many."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    ids = torch.randint(config.vocab_size, (ROWS, 12), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < torch.linspace(0.1, 0.8, ROWS)[:, None]] = -100
    targets[:2] = -100
    return {"input_ids": ids[:, :-1], "targets": targets}


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    return {name: rows.chunk(ranks)[rank] for name, rows in batch.items()}


def translation_objective(model: nn.Module, batch: Batch) -> Totals:
    """Of an encoder-decoder: the targets from what the encoder has read backwards and what the decoder has read so far."""

    class Decoder(nn.Module):
        def forward(self, ids: Tensor, **more) -> Tensor:
            return model(ids.flip(1), decoder_input_ids=ids, **more)

    return next_token_objective(Decoder(), batch)


def build(
    config: ModelConfig, frozen: Callable[[str], bool] = lambda name: False, dtype: torch.dtype = torch.float64,
    builders: Builders = PLAIN,
) -> TransformerModel:  # fmt: skip
    model = TransformerModel(config, builders).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not frozen(name))
    return model


def alone(config: ModelConfig, optimizer: OptimizerConfig = ADAMW, objective=next_token_objective, **settings) -> RunRecord:
    """The run in one process."""
    model = build(config, **settings)
    batches = lambda step: [batch_of(step, number, config) for number in range(MICROBATCHES)]  # noqa: E731
    record = record_steps(model, build_optimizer(model, optimizer), batches, Update(1.0), lambda: own_gradients(model), objective)
    record.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return record


def sharded(
    world: Communicator, layout: ParallelConfig, config: ModelConfig, optimizer: OptimizerConfig = ADAMW, objective=next_token_objective,
    watch: Callable[[FullySharded], None] = lambda sharded: None, **settings,
) -> RunRecord:  # fmt: skip
    """The run on one of the ranks of a layout; gradients and weights are gathered, to be compared."""
    mesh = Mesh(layout, world)
    parallel = fully_sharded(mesh, config, **settings)
    watch(parallel)
    strategy = ParallelStrategy(parallel.model, mesh, [parallel])
    shards = dict(parallel.optim_params.named_parameters())
    whole = lambda: {name: whole_gradient(shard) for name, shard in shards.items()}  # noqa: E731
    batches = lambda step: [share(batch_of(step, n, config), mesh.data.rank, mesh.data.size) for n in range(MICROBATCHES)]  # noqa: E731
    update = Update(1.0, norm=strategy.grad_norm)
    record = record_steps(parallel.model, build_optimizer(parallel.optim_params, optimizer), batches, update, whole, objective, strategy)
    record.weights = {name: shard.sharding.gather(shard.detach(), everyone=True) for name, shard in shards.items()}
    return record


def fully_sharded(mesh: Mesh, config: ModelConfig, **settings) -> FullySharded:
    model = build(config, **settings)
    apply_activation_checkpointing(model, mesh.config.activation_checkpointing)
    return FullySharded(model, mesh)


def whole_gradient(shard: nn.Parameter) -> Tensor | None:
    """The gradient that the ranks hold together, or None where none of them has one. Every rank calls it."""
    sharding = sharding_of(shard)
    if sharding is None:
        return None if shard.grad is None else shard.grad.clone()
    anybody = torch.tensor(float(shard.grad is not None))
    sharding.group.all_reduce(anybody, op="max")
    part = torch.zeros_like(shard) if shard.grad is None else shard.grad
    return sharding.gather(part.detach(), everyone=True) if anybody else None


def over_ranks(layout: ParallelConfig, *arguments, **settings) -> list[RunRecord]:
    """The run on every rank, as threads."""
    return run_threads(lambda world: sharded(world, layout, *arguments, **settings), layout.ranks)


def require_equal(here: RunRecord, there: RunRecord, tolerance: float = 1e-9) -> None:
    """Losses, counts, norms, every gradient of every step and every weight agree, relative to the length of each."""
    assert here.tokens == there.tokens
    pairs = {f"loss {step}": pair for step, pair in enumerate(zip(here.losses, there.losses, strict=True))}
    pairs |= {f"norm {step}": pair for step, pair in enumerate(zip(here.norms, there.norms, strict=True))}
    for step, (mine, theirs) in enumerate(zip(here.gradients, there.gradients, strict=True)):
        assert {name for name in mine if mine[name] is None} == {name for name in theirs if theirs[name] is None}
        pairs |= {f"gradient {step} of {name}": (mine[name], theirs[name]) for name in theirs if theirs[name] is not None}
    assert here.weights.keys() == there.weights.keys()
    pairs |= {f"weight {name}": (here.weights[name], there.weights[name]) for name in there.weights}
    far = {what: distance for what, (a, b) in pairs.items() if not (distance := relative(a, b)) <= tolerance}
    assert not far, f"{len(far)} of {len(pairs)} differ: {dict(list(far.items())[:4])}"


def relative(value: Tensor, expected: Tensor) -> float:
    assert value.shape == expected.shape
    length = torch.linalg.vector_norm(expected.double())
    return float(torch.linalg.vector_norm(value.double() - expected.double()) / (length if length > 0 else 1.0))


def step(parallel: FullySharded, objective=next_token_objective, microbatches: int = 1) -> Totals:
    """Forward, backward and reduction of a step's micro-batches."""
    data = parallel.mesh.data
    batches = [share(batch_of(0, number), data.rank, data.size) for number in range(microbatches)]
    return parallel.reducer(parallel.model, parallel.runner(accumulate_gradients)(parallel.model, batches, objective))


def gradients(parallel: FullySharded) -> dict:
    return {name: whole_gradient(shard) for name, shard in parallel.model.named_parameters()}


def gradients_alone(objective=next_token_objective, microbatches: int = 1) -> dict:
    model = build(SMALL)
    accumulate_gradients(model, [batch_of(0, number) for number in range(microbatches)], objective)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def padded(numbers: int, ranks: int) -> int:
    return -(-numbers // ranks) * ranks
