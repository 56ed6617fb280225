"""Check of 09.gradient_ranks. Oracle: slices of the grid of ranks, `torch.arange` in the shape of its axes, for every small grid; and the
gradients of the core's own mixture of experts, spread over threads with the answer as its table, compared with one process.

A table is compared line by line, as it is printed. Digits: the tokens of data and context rank i are worth 10^i, so a gradient that was
added up as it should is 111...; a 0 is a rank that is missing, a 2 one that was counted twice.

Tolerances. Tables are compared exactly, gradients to 1e-9 of their length in float64.
"""

import itertools
from unittest.mock import patch

import torch

from shared.course.checking import Case, Check
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.sharding import sharding_of
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.moe.parallel import groups
from shared.moe.parallel.axis import ExpertParallel
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh

from .common import CONTRACT

GRID = "torch.arange in the shape of the grid: a group is a slice of it"
ONE_PROCESS = "each gradient of the same model in one process"
FIELDS = {"experts": "has experts", "exchange": "rows with", "same_experts": "its experts with", "everything_else": "all else with"}


def grid(pipeline=1, data=1, context=1, tensor=1, expert=1, num_experts=12):
    names = ("pipeline", "data", "context", "tensor", "expert", "num_experts")
    return dict(zip(names, (pipeline, data, context, tensor, expert, num_experts), strict=True))


def printed(table) -> dict[str, str]:
    """A table as lines, so that the learner's stands beside the expected one."""
    if not isinstance(table, list):
        return {"returned": type(table).__name__}
    return {f"rank {rank}": line_of(line) for rank, line in enumerate(table)}


def line_of(line) -> str:
    parts = []
    for field, said in FIELDS.items():
        value = getattr(line, field, "nothing")
        kept = isinstance(value, tuple if field == "experts" else list) and all(type(number) is int for number in value)
        shown = f"{value[0]}..{value[1] - 1}" if kept and field == "experts" and len(value) == 2 else " ".join(map(str, value))
        parts.append(f"{said} {shown}" if kept else f"{said} {value!r}")
    return ", ".join(parts)


def as_lines(function, **sizes):
    return printed(function(**sizes))


def by_grid(pipeline, data, context, tensor, expert, num_experts):
    ranks = torch.arange(pipeline * data * context * tensor).view(pipeline, data // expert, expert, context, tensor)
    table, each = [None] * ranks.numel(), num_experts // expert
    for pp, outer, inner, cp, tp in itertools.product(*map(range, ranks.shape)):
        table[ranks[pp, outer, inner, cp, tp]] = groups.RankGroups(
            (inner * each, inner * each + each), ranks[pp, outer, :, cp, tp].tolist(), ranks[pp, :, inner, :, tp].flatten().tolist(),
            ranks[pp, :, :, :, tp].flatten().tolist(),
        )  # fmt: skip
    return printed(table)


def every_grid(most: int):
    for pipeline, data, context, tensor in itertools.product(range(1, most + 1), repeat=4):
        if pipeline * data * context * tensor <= most:
            yield from (grid(pipeline, data, context, tensor, expert, 12) for expert in (1, 2, 3, 4, 6, 12) if data % expert == 0)


def name_of(sizes) -> str:
    return " ".join(f"{name} {size}" for name, size in sizes.items() if name != "num_experts")


def all_grids(function, most):
    return {name_of(sizes): as_lines(function, **sizes) for sizes in every_grid(most)}


def all_by_grid(most):
    return {name_of(sizes): by_grid(**sizes) for sizes in every_grid(most)}


def digits(function, **sizes):
    """What becomes of each gradient, once the exchange and the sums are done, in the stage and slice of rank 0."""
    table = function(**sizes)
    ranks = [rank for rank in range(len(table)) if rank % sizes["tensor"] == 0 and rank < len(table) // sizes["pipeline"]]
    worth = {rank: 10**place for place, rank in enumerate(ranks)}
    computed = {rank: sum(worth.get(other, 0) for other in table[rank].exchange) for rank in ranks}
    found = {}
    for rank in ranks:
        for expert in range(*table[rank].experts):
            found[f"expert {expert} on rank {rank}"] = sum(computed.get(other, 0) for other in table[rank].same_experts)
        found[f"router on rank {rank}"] = sum(worth.get(other, 0) for other in table[rank].everything_else)
    return found


def ones(pipeline, data, context, tensor, expert, num_experts):
    ranks, each = range(0, data * context * tensor, tensor), num_experts // expert
    told = {}
    for place, rank in enumerate(ranks):
        first = place // context % expert * each
        names = [*(f"expert {number} on rank {rank}" for number in range(first, first + each)), f"router on rank {rank}"]
        told |= dict.fromkeys(names, int("1" * len(ranks)))
    return told


EXPERTS = MixtureConfig(4, 6, balance_coefficient=0.3, z_coefficient=0.1)
SIZES = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}


def model_of() -> TransformerModel:
    config = MixtureModelConfig(**SIZES, max_position_embeddings=8, initializer_range=0.4, experts=EXPERTS)
    return TransformerModel(config, MIXTURE, seed=1).double()


def backward(model, rows) -> None:
    ids = torch.randint(11, (4, 8), generator=torch.Generator().manual_seed(2))[rows]
    packed_next_token_objective(model, {"input_ids": ids, "targets": ids.roll(-1, 1)}).loss_sum.backward()


def trained(function, ranks, expert):
    """The parameters whose gradients, added up as the table says, differ from one process's."""
    plain = model_of()
    backward(plain, slice(None))
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    rows = torch.arange(4).tensor_split(ranks)

    def work(world):
        model, mesh = model_of(), Mesh(ParallelConfig(data_parallel=ranks, expert_parallel=expert), world)
        ExpertParallel().shape(model, mesh)
        backward(model, rows[world.rank])
        wrong = []
        for name, parameter in model.named_parameters():
            gradient, sharding = parameter.grad.clone(), sharding_of(parameter)
            getattr(parameter, "shared_over", mesh.loss).all_reduce(gradient)
            whole = gradient if sharding is None else sharding.gather(gradient, everyone=True)
            if (whole - expected[name]).norm() > 1e-9 * expected[name].norm() + 1e-12:
                wrong.append(name)
        return wrong

    with patch.object(groups, "gradient_ranks", function):
        found = run_threads(work, ranks)
    return {"gradients that differ from one process": sorted(set().union(*found))}


def case(rung, title, sizes, expected=by_grid, source=GRID, observe=as_lines):
    return Case(rung, title, lambda: dict(sizes), expected, source, observe)


def run(ranks, expert):
    nothing = lambda **_: {"gradients that differ from one process": []}  # noqa: E731
    title, sizes = f"experts over {expert} of {ranks} data ranks", {"ranks": ranks, "expert": expert}
    return case("two ranks", title, sizes, nothing, ONE_PROCESS, trained)


CHECK = Check(
    exercise="09.gradient_ranks",
    outputs=("table",),
    spoilt=("table",),
    cases=[
        case("shape and dtype", "four data ranks, experts over two of them", grid(data=4, expert=2, num_experts=4), source=CONTRACT),
        case("worked example", "four data ranks, experts over two of them", grid(data=4, expert=2, num_experts=4)),
        case("worked example", "four data ranks, experts over all", grid(data=4, expert=4, num_experts=8)),
        case("worked example", "three data ranks that hold all experts", grid(data=3)),
        case("worked example", "a single rank", grid()),
        case("worked example", "two stages", grid(pipeline=2, data=2, expert=2)),
        case("worked example", "two tensor ranks", grid(data=2, tensor=2, expert=2)),
        case("worked example", "two context ranks", grid(data=2, context=2, expert=2)),
        case("worked example", "six data ranks, experts over three", grid(data=6, expert=3)),
        case("worked example", "one expert for each rank", grid(data=4, expert=4, num_experts=4)),
        case("property", "every digit is 1: four data and two context ranks", grid(data=4, context=2, expert=2, num_experts=4), ones,
             "arithmetic", digits),
        case("property", "... on two stages, with two tensor ranks", grid(2, 4, 1, 2, 4, 8), ones, "arithmetic", digits),
        case("oracle", "all axes: 2 * 4 * 3 * 2 ranks", grid(2, 4, 3, 2, 2)),
        case("oracle", "every grid of at most 8 ranks", {"most": 8}, all_by_grid, GRID, all_grids),
        case("oracle", "24 data ranks, experts over twelve", grid(data=24, expert=12)),
        run(2, 2),
        run(4, 2),
    ],
)  # fmt: skip
