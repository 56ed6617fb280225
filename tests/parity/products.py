"""Every product of layouts on 1, 2, 4 and 8 ranks, as data: each one is refused in a sentence before any work, or trains like one process.

A cell of the table is a layout, a model (dense or experts), a recomputation and a backend, with both optimizers.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, product

import torch
from mixture_runs import MixtureRun, observed
from step_records import STEPS
from torch import Tensor

from shared.data.fim import FimConfig
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.sharding import Sharding, sharding_of
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.processes.launch import run_processes
from shared.totals import Batch
from shared.trainer.config import DataConfig, TrainerConfig
from shared.trainer.models import RUN_AXES

ROWS, SEQ, MICROBATCHES = 8, 16, 2
EXPERTS = MixtureConfig(  # DeepSeek-V3's router, which Hugging Face has with such attention (dots1)
    8, 16, scoring="sigmoid", balance_coefficient=0.3, z_coefficient=0.05, bias_update_rate=0.02, num_shared_experts=1, first_k_dense=1,
    capacity_factor=1.2,
)  # fmt: skip
DENSE = MixtureModelConfig(  # heads, widths and positions that eight ranks can share out; fewer key and value heads than ranks
    vocab_size=31, hidden_size=16, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, intermediate_size=24,
    max_position_embeddings=32, initializer_range=0.1, qk_norm=True, tie_word_embeddings=True,
)  # fmt: skip
MODELS = {"dense": DENSE, "experts": replace(DENSE, experts=EXPERTS)}
RECOMPUTED = ("none", "full", "selective")
OPTIMIZERS = ("adamw", "muon")
BACKENDS = ("course", "torch")
RANKS = (1, 2, 4, 8)
LIMIT = 1e-9  # of the relative difference
AXES = ("pp", "dp", "fsdp", "cp", "tp")
Difference = dict[str, float]


@dataclass(frozen=True)
class Cell:
    layout: str
    model: str = "dense"
    recompute: str = "none"
    backend: str = "course"

    @property
    def ranks(self) -> int:
        return math.prod(degree(self.layout, axis) for axis in AXES)

    @property
    def microbatches(self) -> int:
        """PyTorch's schedules need one for each stage."""
        return max(MICROBATCHES, stages(self.layout)) if self.backend == "torch" else MICROBATCHES

    @property
    def config(self) -> MixtureModelConfig:
        """Enough layers for the stages; dropless under cp, whose ranks do not know how many choices come before theirs."""
        model = MODELS[self.model]
        if model.experts and degree(self.layout, "cp") > 1:
            model = replace(model, experts=replace(model.experts, capacity_factor=None))
        return replace(model, num_hidden_layers=max(model.num_hidden_layers, stages(self.layout)))

    def parallel(self) -> ParallelConfig:
        made = ParallelConfig(backend=self.backend, activation_checkpointing=self.recompute, bucket_megabytes=0.002)
        return parse_layout(self.layout, made)


Case = tuple[Cell, str]  # and its optimizer


def degree(layout: str, axis: str) -> int:
    return next((int(part.removeprefix(axis)) for part in layout.split("_") if part.rstrip("0123456789") == axis), 1)


def stages(layout: str) -> int:
    return degree(layout, "pp")


def layouts(ranks: int) -> list[str]:
    """Every word for so many ranks: degrees that multiply to it, `sp` where tp, `zero` where dp, ep that divides dp x fsdp."""
    powers = [2**power for power in range(ranks.bit_length())]
    found = []
    for degrees in product(powers, repeat=len(AXES)):
        if math.prod(degrees) != ranks:
            continue
        named = dict(zip(AXES, degrees, strict=True))
        data = named["dp"] * named["fsdp"]
        for ep, zero, sp in product([each for each in powers if data % each == 0], range(3), (False, True)):
            if (zero and named["dp"] == 1) or (sp and named["tp"] == 1):
                continue
            parts = [f"{axis}{size}" for axis, size in (named | {"ep": ep, "zero": zero}).items() if size > (axis != "zero")]
            found.append("_".join(parts + ["sp"] * sp) or "one")
    return found


def refusal(cell: Cell) -> str | None:
    """The sentence with which the trainer's configuration refuses a cell, before anything runs; None where it takes it."""
    try:
        rows = {"seq": SEQ, "batch_size": ROWS * cell.microbatches, "fim": FimConfig(rate=0)}
        micro = ROWS // (degree(cell.layout, "dp") * degree(cell.layout, "fsdp"))
        TrainerConfig(parallel=cell.parallel(), model=cell.config, data=DataConfig(micro_batch_size=micro, **rows))
    except ValueError as error:
        return str(error)
    return None


def batch_of(step: int, microbatch: int, config: MixtureModelConfig) -> Batch:
    """The first rows hold no target, so that a rank may have none, and the others hold unequally many."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    ids = torch.randint(config.vocab_size, (ROWS, SEQ + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < torch.linspace(0.1, 0.8, ROWS)[:, None]] = -100
    targets[:2] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "targets": targets}


def make(world: Communicator, cell: Cell, optimizer: str = "adamw", **settings) -> MixtureRun:
    made = {"config": cell.config, "axes": RUN_AXES, "batches": batch_of, "microbatches": cell.microbatches}
    return MixtureRun(world, cell.parallel(), optimizer, **made | settings)


def on_ranks(work, cell: Cell, *arguments, **settings) -> list:
    """work(run) on each rank, as threads."""
    on_rank = lambda world: work(make(world, cell, *arguments, **settings))  # noqa: E731
    return [on_rank(SingleRankCommunicator())] if cell.ranks == 1 else run_threads(on_rank, cell.ranks)


@cache
def alone(config: MixtureModelConfig, microbatches: int, optimizer: str) -> dict:
    return observed(make(SingleRankCommunicator(), Cell("one"), optimizer, config=config, microbatches=microbatches))


def expected(cell: Cell, optimizer: str) -> dict:
    return alone(cell.config, cell.microbatches, optimizer)


def differences(run: MixtureRun, one: dict, steps: int = STEPS) -> Difference:
    """The largest relative differences to one process in so many steps, of what this rank has; infinite where something is on no rank, or
    where an expert was chosen by other tokens. Each rank compares its own parts, and no rank gathers a whole tensor."""
    far = dict.fromkeys(("loss", "norm", "gradients", "weights"), 0.0)

    def note(what: str, value: Tensor | None, whole: Tensor, sharding: Sharding | None = None) -> None:
        there = sharding.local(whole) if sharding else whole
        distance = float((there if value is None else value.detach() - there).norm() / whole.norm().clamp(min=1e-9))
        far[what] = max(far[what], distance if distance == distance else math.inf)

    for step in range(steps):
        run.train(1)
        note("loss", run.totals.loss_sum, one["losses"][step])
        note("norm", run.update.gradient_norm, one["norms"][step])
        for name, shard in run.parallel.state.named_parameters():
            if name in one["gradients"][step]:
                note("gradients", shard.grad, one["gradients"][step][name], sharding_of(shard))
        if not all(torch.equal(load, one["loads"][step][block]) for block, load in run.loads[step].items()):
            far["loss"] = math.inf
    for name, tensor in run.parallel.state.state_dict(keep_vars=True).items() if steps == STEPS else ():
        note("weights", tensor, one["weights"][name], sharding_of(tensor))
    run.parallel.holders.require_complete()
    if run.parallel.holders.shapes.keys() != one["weights"].keys():
        far["weights"] = math.inf
    return far


def worst(found: list[Difference]) -> float:
    return max(max(each.values()) for each in found)


def optimizers_of(cell: Cell) -> tuple[str, ...]:
    """Both; on eight ranks one."""
    return OPTIMIZERS if cell.ranks < 8 else ("adamw",) if cell.recompute == "full" else ("muon",)


def measured(cell: Cell) -> float:
    """The largest difference of a cell on threads, of any rank, over its optimizers."""
    return max(worst(on_ranks(partial(differences, one=expected(cell, name)), cell, name)) for name in optimizers_of(cell))


def by_processes(asked: list[Cell]) -> list[float]:
    """The same in processes over gloo, of cells that need as many ranks, which run one after the other."""
    ones = [{name: expected(cell, name) for name in optimizers_of(cell)} for cell in asked]
    return [max(each) for each in zip(*run_processes(trained, asked[0].ranks, asked, ones, timeout=1800), strict=True)]


def trained(world: Communicator, asked: list[Cell], ones: list[dict[str, dict]]) -> list[float]:
    runs = zip(asked, ones, strict=True)
    return [worst([differences(make(world, cell, name), one) for name, one in of_cell.items()]) for cell, of_cell in runs]


def cells(ranks: int, models=tuple(MODELS), recomputed=RECOMPUTED, backends=BACKENDS) -> list[Cell]:
    return [Cell(*each) for each in product(layouts(ranks), models, recomputed, backends)]


# A covering set: every allowed triple of facts is in one of its cases.


def facts(cell: Cell, optimizer: str) -> dict[str, bool | int | str]:
    parts = {part.rstrip("0123456789"): part for part in cell.layout.split("_")}
    of_axes = {axis: axis in parts for axis in (*AXES, "ep", "sp")}
    return of_axes | {"zero": parts.get("zero", "zero0"), "model": cell.model, "recompute": cell.recompute, "optimizer": optimizer}


def triples(case: Case) -> set:
    return set(combinations(facts(*case).items(), 3))


def allowed_triples() -> dict[Case, set]:
    """Of every case on threads that is not refused."""
    allowed = [cell for ranks in RANKS for cell in cells(ranks, backends=("course",)) if not refusal(cell)]
    return {case: triples(case) for case in product(allowed, OPTIMIZERS)}


def covering() -> list[Case]:
    """Few cases with every triple, the greedy way: next the one with most new triples for its ranks; the cheapest ones first."""
    cases, chosen = allowed_triples(), []
    left = set().union(*cases.values())
    while left:
        chosen.append(max(cases, key=lambda case: len(cases[case] & left) / (case[0].ranks + 2)))
        left -= cases[chosen[-1]]
    return sorted(chosen, key=lambda case: case[0].ranks)


def case_of(line: str) -> Case:
    layout, model, recompute, optimizer = line.split()
    return Cell(layout, model, recompute), optimizer


def line_of(case: Case) -> str:
    cell, optimizer = case
    return f"{cell.layout} {cell.model} {cell.recompute} {optimizer}"


# In 16 bits, with every expert for every token: a choice that rounding turns is another model.

IN_16_BITS = ("fsdp2_ep2", "cp2_tp2", "dp2_tp2_zero1", "pp2_tp2", "fsdp2_tp2", "pp2_dp2_ep2", "pp2_fsdp2_tp2")
PRECISIONS = {"bfloat16": (torch.bfloat16, None), "float16": (torch.float16, 64.0)}  # and the first loss scale


def settings_in(precision: str) -> dict:
    experts = replace(EXPERTS, num_experts_per_tok=EXPERTS.num_experts, capacity_factor=None, bias_update_rate=None)
    computed_in, scale = PRECISIONS.get(precision, (None, None))
    objective = autocast_objective(packed_next_token_objective, precision)
    run = {"dtype": torch.float32, "computed_in": computed_in, "scale": scale, "objective": objective}
    return run | {"config": replace(DENSE, experts=experts)}


@cache
def in_16_bits(layout: str, precision: str) -> Difference:
    """How far a layout is from one process in the same precision, in its first step; `float32` for one process in 16 bits from itself in
    float32."""
    single, settings = Cell("one", "experts"), settings_in(precision)
    one = on_ranks(observed, single, **(settings if layout != "float32" else settings_in("float32")))[0]
    cell = single if layout == "float32" else Cell(layout, "experts")
    found = on_ranks(partial(differences, one=one, steps=1), cell, **settings)
    return {what: max(each[what] for each in found) for what in ("loss", "norm", "gradients")}
