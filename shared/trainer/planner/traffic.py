"""Chapter 12. Traffic of a rank in a training step by axis: calls and bytes as the ledger counts them, and seconds by the alpha-beta model.

Communication that does not block overlaps with computation, and only its excess costs time:

    gradients of replicas        beside the backward pass of the last micro-batch; under ZeRO-2 of each
    FSDP's weights, gradients    beside everything that is computed
    ring attention               beside the computation of scores
    tensor, expert parallelism   beside nothing

Left out on purpose: links that several groups share at the same time, and evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.finetune.memory_costs import sizes_of
from shared.parallel.config import AXES, ParallelConfig
from shared.parallel.planning.activations import Part, model_of_rank
from shared.parallel.planning.costs import Cost, Exchange, cost
from shared.parallel.planning.data_costs import Weight, adapted, data_exchanges, norm_exchange, weights_of
from shared.parallel.planning.expert_costs import expert_exchanges
from shared.parallel.planning.memory import StepSizes
from shared.parallel.planning.pipeline_costs import chunk_parts, held_parts, pipeline_exchanges
from shared.parallel.planning.tensor_costs import context_exchanges, tensor_exchanges
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.flops import Trained
from shared.trainer.planner.hardware import Hardware
from shared.trainer.planner.memory import base_bits

GRADIENTS, SHARDS, RINGS = "gradients", "shards", "rings"  # beside what exchanges travel


@dataclass(frozen=True)
class Sent:
    """Equal operations of a rank in a step. part: what of the model they belong to. ranks: of the group. bytes: of the whole tensor in each
    call, as the ledger counts. seconds: of all calls. beside: the computation that hides them; empty if they block."""

    part: str
    operation: str
    axis: str
    ranks: int
    calls: float
    bytes: float
    seconds: float
    beside: str = ""


def stage_traffic(config: TrainerConfig, hardware: Hardware, step: StepSizes, trained: Trained, stage: int = 0) -> list[Sent]:
    """Communication of a rank of a pipeline stage in a training step, with the largest shard of the vocabulary."""
    model, layout = config.model.resolved(), config.parallel
    part, chunks = held_parts(model, layout)[stage], chunk_parts(model, layout)[stage]
    found: list[Exchange] = []
    if layout.ranks > 1:
        weights = own_weights(config, part, trained)
        whole = config.optimizer.name == "muon"
        found += [*data_exchanges(weights, layout, step, whole, stage=stage), *norm_exchange(layout)]
        tensor = [each for each in tensor_exchanges(model, layout, config.optimizer, step, part) if each.part == "gradients"]
        for chunk in chunks:
            tensor += [each for each in tensor_exchanges(model, layout, config.optimizer, step, chunk) if each.part != "gradients"]
        experts = expert_exchanges(model, layout, step, part)
        found += [*tensor, *context_exchanges(model, layout, step, part), *experts, *pipeline_exchanges(model, layout, step, stage)]
    return [timed(each, layout, hardware) for each in found]


def own_weights(config: TrainerConfig, part: Part, trained: Trained) -> list[Weight]:
    """Parameters of a rank; with an adapter most of them are frozen."""
    weights = weights_of(config.model, config.parallel, part)
    if not trained.is_adapter:
        return weights
    sizes = sizes_of(model_of_rank(config.model, config.parallel))
    bits = 0 if config.adapter.base == "float" else base_bits(config)
    return adapted(weights, [sizes[name] for name in trained.targets if name in sizes], trained.rank, bits)


def timed(each: Exchange, layout: ParallelConfig, hardware: Hardware) -> Sent:
    one = cost(each.operation, each.bytes, each.ranks)
    seconds = Cost(each.calls * one.messages, each.calls * one.bytes).seconds(hardware.link(stride_of(each.axis, layout), each.ranks))
    return Sent(each.part, each.operation, each.axis, each.ranks, each.calls, each.bytes, seconds, beside_what(each))


def beside_what(each: Exchange) -> str:
    if each.axis == "fsdp":
        return SHARDS
    if each.axis == "cp" and each.operation == "send":
        return RINGS
    summed = each.part in ("gradients", "experts") and each.operation != "all_gather"
    return GRADIENTS if summed and each.axis in ("data", "loss", "edp") else ""


def stride_of(axis: str, layout: ParallelConfig) -> int:
    """Ranks from one member of a group to the next, of an axis as the ledger names it."""
    inner = {name: layout_stride(name, layout) for name in AXES}
    first = axis.partition("_")[0]
    if first in inner:
        return inner[first]
    if axis in ("data", "ep", "edp"):
        spread = layout.expert_parallel if axis == "edp" else 1
        return inner["fsdp"] * spread
    return 1 if axis == "world" else inner["cp"]


def layout_stride(name: str, layout: ParallelConfig) -> int:
    stride = 1
    for axis, field in reversed(AXES.items()):
        if axis == name:
            return stride
        stride *= getattr(layout, field)
    raise ValueError(f"There is no axis {name}.")


def seconds_of(sent: Sequence[Sent], *, beside: str | None = None, axes: Sequence[str] | None = None) -> float:
    """Seconds of the operations that some computation hides, or of those over some axes."""
    chosen = (each for each in sent if beside is None or each.beside == beside)
    return sum(each.seconds for each in chosen if axes is None or each.axis.partition("_")[0] in axes)
