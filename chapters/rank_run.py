"""A training run on several ranks and in one process, compared: what the run scripts of chapters 06 to 11 share.

The core is imported within the functions, after a script's `launch` has chosen whose exercises it runs with.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.model.config import ModelConfig
from shared.optim.config import OptimizerConfig
from shared.parallel.config import ParallelConfig

if TYPE_CHECKING:
    from shared.parallel.comm.communicator import Communicator
    from shared.parallel.parallelize import Axis
    from shared.totals import Objective


@dataclass
class RankRunConfig:
    """Train on several ranks and in one process, and compare.

    Args:
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        layout: how the run is spread: dp2, dp2_zero1, fsdp2, dp2_fsdp2; from chapter 07 on tp2, dp2_tp2, cp2, ...; from chapter 08 on pp2,
            pp2_tp2, ...; from chapter 09 on dp2_ep2, ... A process is started for each rank.
        parallel: everything else about the ranks; its degrees are the layout's.
        data: a text file or folder to train on, or a list of them; none for the embedded corpus.
        steps: training steps.
        seq: bytes that each window of text predicts.
        batch_size: windows in a step, over all ranks.
        micro_batch_size: windows in one forward and backward of a rank.
        optimizer: every field of OptimizerConfig.
        max_norm: the longest gradient that is not clipped; null for no clipping.
        dtype: of weights and products. float64 agrees to 1e-9; float32 to its rounding, which training amplifies.
        model: the model; every field of ModelConfig. Tokens are bytes, so the vocabulary is 256.
        seed: of the initial weights and the order of the data.
        output: folder for figures and plot.
    """

    impl: Literal["reference", "mine", "mixed"] = "reference"
    layout: str = "dp2"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: Path | list[Path] = field(default_factory=list)
    steps: int = 60
    seq: int = 128
    batch_size: int = 16
    micro_batch_size: int = 4
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_norm: float | None = 1.0
    dtype: Literal["float64", "float32"] = "float64"
    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = 0
    output: Path = Path("runs/ranks")


def run_and_compare(
    config: RankRunConfig,
    objective: "Objective",
    axes: Sequence["Axis"],
    require_possible: Callable[[RankRunConfig, ParallelConfig], None] = lambda *_: None,
    prepare: Callable[[Any], None] = lambda model: None,
    dataset: Callable[..., Any] | None = None,
    unit: str = "bits per byte",
) -> None:
    """Run both, print where they differ and what each rank held and sent, and write figures.json and figures.png; of a pipeline also its
    bubble and what was kept, and timeline.png, and of experts their load, what travelled, and loads.png.

    Args:
        objective: the loss of a batch.
        axes: what shapes the model before its weights, such as the chapter's own axis of the mesh.
        require_possible: raises a ValueError where the layout does not fit the model or the sequence, before processes are started.
        prepare: changes a new model in place on every rank, before it is parallelized: other weights, adapters.
        dataset: dataset(stream, seq, seed) -> rows for a loader; None for windows of text.
        unit: of the mean loss.
    """
    import torch
    from rich.console import Console

    from chapters import expert_watch, pipeline_watch
    from chapters.text_run import corpus_of, texts_of
    from shared.course import binding
    from shared.course.errors import CourseError
    from shared.output_files import require_writable
    from shared.parallel.comm.communicator import SingleRankCommunicator
    from shared.parallel.config import layout_name, parse_layout
    from shared.parallel.planning.memory import StepSizes
    from shared.parallel.processes.launch import run_processes

    require_writable(config.output)
    console = Console(markup=False, emoji=False)
    torch.set_num_threads(1)
    try:
        layout = parse_layout(config.layout, config.parallel)
        require_sensible(config, layout)
        require_possible(config, layout)
        stream = texts_of(corpus_of(config.data), config.seq, torch.device("cpu")).training
        console.print(f"{layout_name(layout)} in {layout.ranks} processes, then one process to compare with.", highlight=False)
        ranks = run_processes(train_on_a_rank, layout.ranks, config, layout, stream, objective, axes, prepare, dataset, timeout=3600.0)
        one = parse_layout("one", ParallelConfig(check_every=0))
        alone = train_on_a_rank(SingleRankCommunicator(), config, one, stream, objective, axes, prepare, dataset)
    except ValueError as error:  # a layout that does not exist, sizes that do not divide
        raise CourseError(str(error)) from None
    told = compared(ranks, alone)
    said, plots = lines(told, layout.ranks, unit), [config.output / "figures.png"]
    if layout.pipeline_parallel > 1:
        watched, plots = [rank["pipeline"] for rank in ranks], [*plots, config.output / "timeline.png"]
        more, bubbles = pipeline_watch.report(watched, layout, microbatches_of(config, layout), plots[-1])
        said, told = [*said, *more], told | {"pipeline": {"bubbles": bubbles, "ranks": watched}}
    if config.model.experts is not None:
        plots.append(config.output / "loads.png")
        step = StepSizes(config.micro_batch_size, config.seq, microbatches_of(config, layout), config.dtype)
        more, experts = expert_watch.report(ranks, alone["loads"], config.model, layout, step, plots[-1])
        said, told = [*said, *more], told | {"experts": experts}
    console.print(binding.summary(), highlight=False)  # now that everything is bound
    for line in said:
        console.print(line, highlight=False)
    record = {"layout": layout_name(layout), "parallel": asdict(layout), **told}
    (config.output / "figures.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    plot(told, config.layout, unit, plots[0])
    console.print(f"Plot: {'   '.join(map(str, plots))}   figures.json beside it.", highlight=False, soft_wrap=True)


def require_sensible(config: RankRunConfig, layout: ParallelConfig) -> None:
    if min(config.steps, config.seq) < 1:
        raise ValueError("steps and seq must be at least 1.")
    if config.model.architecture != "decoder" or config.model.vocab_size != 256:
        raise ValueError("Predicting the next byte needs a decoder of 256 tokens: leave model.architecture and model.vocab_size.")
    if config.seq > config.model.max_position_embeddings:
        raise ValueError(f"seq is {config.seq} and model.max_position_embeddings {config.model.max_position_embeddings}: make it as large.")
    if config.batch_size % (layout.data_ranks * config.micro_batch_size):
        each = f"{layout.data_ranks} ranks with micro-batches of {config.micro_batch_size}"
        raise ValueError(f"batch_size is {config.batch_size}, and {each} cannot share it out: give a multiple of their product.")


def microbatches_of(config: RankRunConfig, layout: ParallelConfig) -> int:
    """How many micro-batches a rank has in a step."""
    return config.batch_size // (layout.data_ranks * config.micro_batch_size)


def require_cuts(config: RankRunConfig, layout: ParallelConfig) -> None:
    """Refuse matrices and sequences that do not divide, which the ranks would refuse one by one."""
    from shared.parallel.context import zigzag
    from shared.parallel.tensor import operators
    from shared.parallel.tensor.axis import require_even

    require_even(config.model.resolved(), layout.tensor_parallel, layout.backend)
    if layout.sequence_parallel:
        operators.require_divisible(config.seq // layout.context_parallel, layout.tensor_parallel)
    if layout.context_parallel > 1:
        zigzag.require_divisible(config.seq, layout.context_parallel, "seq")


def train_on_a_rank(
    world: "Communicator",
    config: RankRunConfig,
    layout: ParallelConfig,
    stream: Any,
    objective: "Objective",
    axes: Sequence["Axis"],
    prepare: Callable[[Any], None],
    dataset: Callable[..., Any] | None,
) -> dict[str, Any]:
    """The whole run on one rank: losses and traffic, bytes held, and the last gradients and weights, made whole."""
    from contextlib import nullcontext

    import torch

    from chapters.expert_watch import ExpertWatch
    from chapters.pipeline_watch import PipelineWatch
    from chapters.text_windows import TextWindows
    from shared.data.loader import StatefulLoader
    from shared.loop import accumulate_gradients, train
    from shared.model.transformer import TransformerModel
    from shared.optim.build import build_optimizer
    from shared.optim.updater import Update
    from shared.parallel.mesh import Mesh
    from shared.parallel.parallelize import apply_parallel
    from shared.totals import bits_per_byte

    mesh = Mesh(layout, world)
    model = TransformerModel(config.model, builders_of(config.model), seed=config.seed).to(getattr(torch, config.dtype))
    prepare(model)
    parallel = apply_parallel(model, mesh, config.optimizer, axes=axes)
    watch = PipelineWatch(parallel, microbatches_of(config, layout)) if mesh.pp.size > 1 else None
    experts = ExpertWatch(parallel.module, config.model)
    optimizer = build_optimizer(parallel.optim_params, config.optimizer, parallel.routes)
    windows = (dataset or TextWindows)(stream, config.seq, config.seed)
    share = {"rank": mesh.data.rank, "ranks": mesh.data.size}
    loader = StatefulLoader(windows, batch_size=config.batch_size, micro_batch_size=config.micro_batch_size, **share)
    parts = {
        "runner": parallel.runner(accumulate_gradients),
        "reducer": parallel.reducer,
        "updater": parallel.updater(Update(config.max_norm, norm=parallel.grad_norm)),
    }
    run = train(parallel.model, optimizer, loader, parallel.objective(objective), steps=config.steps, **parts)
    with watch.measured_bytes() if watch else nullcontext():
        totals = [next(run)[1]]
    experts.note()
    for _, each in run:
        totals.append(each)
        experts.note()
    losses = [bits_per_byte(each.loss_sum, each.token_count) for each in totals]
    calls, sizes = world.trace.calls(), world.trace.bytes()  # before the comparison's own
    shards = dict(parallel.optim_params.named_parameters())
    held = {
        "weights": sum(p.nbytes for p in (shards if layout.fully_sharded > 1 else dict(model.named_parameters())).values()),
        "gradients": sum(p.grad.nbytes for p in shards.values() if p.grad is not None),
        "optimizer state": sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim()),
    }
    trained = {name: shard for name, shard in shards.items() if shard.requires_grad}
    tensors = {f"weight {name}": whole(shard, shard.detach()) for name, shard in trained.items()}
    tensors |= {f"gradient {n}": whole(p, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in trained.items()}
    traffic = {" ".join(key): {"calls": calls[key], "megabytes": sizes[key] / 1e6} for key in sorted(calls)}
    speaks = world.rank % (world.size // mesh.pp.size) == 0  # each stage has layers of its own
    found = {"losses": losses, "traffic": traffic, "held": held, "tensors": tensors if speaks else {}}
    return found | ({"pipeline": watch.told()} if watch else {}) | {"loads": experts.loads}


def builders_of(model: ModelConfig) -> Any:
    """Chapter 02's builders, or chapter 09's where the model has experts: their exercises are then part of the run."""
    from shared.model.transformer import PLAIN

    if model.experts is None:
        return PLAIN
    from shared.moe.builders import MIXTURE

    return MIXTURE


def whole(shard: Any, tensor: Any) -> Any:
    """A tensor that is sharded as a parameter is, put together on every rank."""
    from shared.model.sharding import sharding_of

    sharding = sharding_of(shard)
    return sharding.gather(tensor, everyone=True) if sharding else tensor.clone()


def compared(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> dict[str, Any]:
    """The figures of the ranks compared with one process. Differences are relative to the length of the tensor."""
    mine, theirs = {name: tensor for rank in ranks for name, tensor in rank["tensors"].items()}, alone["tensors"]
    far = {name: ((mine[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-300)).item() for name in theirs}
    return {
        "losses": ranks[0]["losses"],
        "losses of one process": alone["losses"],
        "largest difference": {
            "losses": max(abs(a - b) for a, b in zip(ranks[0]["losses"], alone["losses"], strict=True)),
            "last gradients": max(value for name, value in far.items() if name.startswith("gradient")),
            "weights": max(value for name, value in far.items() if name.startswith("weight")),
        },
        "traffic of rank 0": ranks[0]["traffic"],
        "bytes held": {f"rank {number}": rank["held"] for number, rank in enumerate(ranks)} | {"one process": alone["held"]},
    }


def lines(told: dict[str, Any], ranks: int, unit: str) -> list[Any]:
    from rich.table import Table

    first, last = told["losses"][0], told["losses"][-1]
    lone = told["losses of one process"][-1]
    heading = f"loss {first:.3f} -> {last:.3f} {unit} on {ranks} ranks, {lone:.3f} in one process"
    differences = "largest difference: " + ", ".join(f"{name} {value:.1e}" for name, value in told["largest difference"].items())
    traffic = Table("operation of rank 0", "calls", "MB")
    for name, counted in told["traffic of rank 0"].items():
        traffic.add_row(name, f"{counted['calls']:,}", f"{counted['megabytes']:,.1f}")
    held = Table("MB held between steps", *next(iter(told["bytes held"].values())))
    for who, kinds in told["bytes held"].items():
        held.add_row(who, *(f"{bytes / 1e6:.2f}" for bytes in kinds.values()))
    return [heading, differences, traffic, held]


def plot(told: dict[str, Any], layout: str, unit: str, path: Path) -> None:
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    drawing = Figure(figsize=(10.0, 3.4))
    left, right = drawing.subplots(1, 2)
    left.plot(told["losses of one process"], color=figures.REFERENCE, linewidth=4, alpha=0.4, label="one process")
    left.plot(told["losses"], color=figures.TRAINING, linewidth=1.2, label=layout)
    left.set(xlabel="training step", ylabel=f"loss ({unit})")
    left.legend()
    bottom = [0.0] * len(told["bytes held"])
    for kind, color in (("weights", figures.TRAINING), ("gradients", figures.COMMUNICATION), ("optimizer state", figures.MEMORY)):
        heights = [held[kind] / 1e6 for held in told["bytes held"].values()]
        right.bar(list(told["bytes held"]), heights, bottom=bottom, color=color, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    right.set(ylabel="MB held between steps")
    right.legend()
    drawing.savefig(path)
