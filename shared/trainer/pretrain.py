"""Chapter 12. Pretraining from text to a report: prepare, build, fit, evaluate.

Read from the top: each function is one stage, and what a stage does is in an earlier chapter's part of the core.
"""

import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from shared.course import binding
from shared.data.completion import require_prompt
from shared.data.mixture import shares_in_words
from shared.model.chunked_loss import packed_next_token_objective
from shared.data.prepare import PreparedText, open_prepared, prepare
from shared.devices import keep_freed_memory, pick_device
from shared.engine.callbacks import Callback
from shared.engine.defaults import default_callbacks
from shared.engine.engine import RuntimeEngine
from shared.folder_lock import held_folder
from shared.loop import accumulate_gradients
from shared.model.counting import parameter_counts
from shared.model.hf.registry import write_config
from shared.model.transformer import TransformerModel
from shared.moe.balancing import BalanceExperts
from shared.moe.builders import MIXTURE
from shared.moe.expert_norms import ExpertNorms
from shared.optim.build import build_optimizer
from shared.optim.callbacks import KeepLossScale, ScheduleLearningRate
from shared.optim.loss_scale import LossScaler
from shared.optim.precision import autocast_objective
from shared.optim.updater import Update
from shared.parallel.parallelize import apply_parallel
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.comm.processes import broken_connections_named
from shared.parallel.config import layout_name
from shared.parallel.health.agreement import agreed, ranks_that_share, require_agreement
from shared.parallel.mesh import Mesh
from shared.parallel.strategy import ParallelStrategy
from shared.trainer import provenance
from shared.trainer.axes import RUN_AXES
from shared.trainer.callbacks import BitsPerByte, Costs, Traffic
from shared.trainer.config import TrainerConfig, resolve_precision
from shared.trainer.fitting import require_memory
from shared.trainer.loaders import evaluation_loader, loaders
from shared.trainer.report import Results
from shared.trainer.results import evaluate_and_report, pipeline_line, stages_summary


@dataclass
class Run:
    """A run that is ready to be fitted, as one rank sees it."""

    config: TrainerConfig
    text: PreparedText
    engine: RuntimeEngine
    strategy: ParallelStrategy
    costs: Costs
    traffic: Traffic
    preparation_seconds: float


def pretrain(config: TrainerConfig, console: Console, world: Communicator | None = None) -> Results | None:
    """Train as `config` says and write the report. Every rank calls it; rank 0 speaks, and returns the results.

    Args:
        world: the ranks of the run; None for this process alone.

    Raises:
        SystemExit: the run was asked to leave before its end; the code is the one that shells give to that signal.
        CourseError: something that the reader can mend, in one sentence: among others, settings that only fail together.
    """
    world = world or SingleRankCommunicator()
    console = console if world.rank == 0 else Console(quiet=True)
    require_agreement(world, "configuration", config)  # first of all: what follows has ranks meet as the configuration says
    with ExitStack() as held, broken_connections_named(world):  # from before the first file of the run to after the last
        leads = ranks_that_share(world, config.engine.output)[0] == world.rank
        agreed(world, lambda: held.enter_context(held_folder(config.engine.output, leads, console)))
        run = build(config, console, world)
        loader, held_out = loaders(run.config, run.text, run.strategy.mesh)
        engine = run.engine.fit(loader, held_out, steps=config.steps)
        if engine.step < config.steps and engine.leaving:
            console.print(f"The same command resumes from step {engine.step}.", highlight=False)
            raise SystemExit(128 + signal.Signals[engine.stopped])
        return evaluate_and_report(run, console)


def build(config: TrainerConfig, console: Console, world: Communicator | None = None) -> Run:
    """Everything up to the first step: the text, the model, parallelized over the ranks, the optimizer, the engine with its callbacks."""
    mesh = Mesh(config.parallel, world or SingleRankCommunicator())
    device = pick_device(config.engine.device)
    if device.type == "cpu":
        keep_freed_memory()
    agreed(mesh.world, lambda: require_memory(config, device))  # with the least vocabulary, before hours of preparing text
    began = time.perf_counter()
    text = prepared_text(config, mesh.world, console)
    preparation_seconds = time.perf_counter() - began
    config = resolved(config, text, device, mesh.world)
    agreed(mesh.world, lambda: require_memory(config, device))
    for prompt in config.report.prompts:
        require_prompt(text.tokenizer, prompt)
    if config.report.export:
        write_config(config.model)  # refuses a model that no format can hold, now rather than after the last step
    leads = ranks_that_share(mesh.world, config.engine.output)[0] == mesh.world.rank
    agreed(mesh.world, lambda: leads and provenance.keep_record(config, config.engine.output))

    own = mesh.pp.rank * mesh.loss.size + mesh.loss.rank  # ranks with other rows, positions or layers draw other dropout
    torch.manual_seed(config.seed + own)
    dtype = None if config.precision == "float32" else getattr(torch, config.precision)
    strategy = apply_parallel(plain_model(config, mesh, device), mesh, config.optimizer, dtype, device, config.seed, RUN_AXES)
    scaler = LossScaler() if config.precision == "float16" else None
    costs, traffic = Costs(), Traffic(mesh.world.trace)
    engine = RuntimeEngine(
        strategy,
        build_optimizer(strategy.optim_params, config.optimizer, strategy.routes),
        config.engine,
        objective=autocast_objective(packed_next_token_objective, config.precision),
        runner=scaler.scaled(accumulate_gradients) if scaler else accumulate_gradients,
        updater=Update(config.max_grad_norm, scaler, strategy.grad_norm),
        callbacks=[costs, traffic, *callbacks_of(config, text, device, scaler)],
        console=console,
    )
    announce(config, text, device, console)
    if mesh.world.size > 1:
        stages = "".join(f" Stages have blocks {blocks}." for blocks in stages_summary(config).values())
        console.print(
            f"{mesh.world.size} ranks, layout {layout_name(config.parallel)}, backend {config.parallel.backend}.{stages}", highlight=False
        )
    if mesh.pp.size > 1:
        console.print(pipeline_line(config), highlight=False, soft_wrap=True)
    return Run(config, text, engine, strategy, costs, traffic, preparation_seconds)


def prepared_text(config: TrainerConfig, world: Communicator, console: Console) -> PreparedText:
    """The text: prepared by one rank of those that share `data.prepared`, opened by the others, and then compared over all ranks.

    Raises:
        CourseError: on every rank: it cannot be prepared or opened on one of them, or machines that share no folder have different text.
    """
    folder = config.data.prepared
    first = ranks_that_share(world, folder)[0]
    text = agreed(world, lambda: prepare(config.data.prepare, folder, console) if world.rank == first else None)
    made = world.gather_objects(text and text.folder.name)[first]
    text = agreed(world, lambda: text or open_prepared(folder / made, config.data.prepare))
    stores = {"training": text.training, "held_out": text.held_out}
    sizes = {side: {"documents": len(each), "tokens": each.token_count, "sha256": each.fingerprint[:12]} for side, each in stores.items()}
    require_agreement(world, "text", sizes | {"tokenizer": text.tokenizer.identity[:12], "end_token": text.tokenizer.end})
    return text


def plain_model(config: TrainerConfig, mesh: Mesh, device: torch.device) -> TransformerModel:
    """The model before it is parallelized; where weights will be cut, without memory, because no rank need have room for all of them."""
    if mesh.fsdp.size > 1 or mesh.tp.size > 1 or mesh.pp.size > 1 or config.parallel.expert_parallel > 1:
        with torch.device("meta"):
            return TransformerModel(config.model, MIXTURE)
    return TransformerModel(config.model, MIXTURE, config.seed).to(device)


def resolved(config: TrainerConfig, text: PreparedText, device: torch.device, world: Communicator) -> TrainerConfig:
    """The configuration with what only the machine and the tokenizer can say. What is measured is rank 0's to decide."""
    precision = config.precision
    if precision == "auto":
        precision = provenance.saved_value(config.engine.output, "precision") or resolve_precision("auto", device)
        precision = world.gather_objects(precision)[0]
    optimizer = config.optimizer
    if optimizer.name == "muon" and optimizer.newton_schulz_dtype is None and precision == "float32":
        optimizer = replace(optimizer, newton_schulz_dtype="float32")  # this machine multiplies bfloat16 no faster
    return replace(config, precision=precision, optimizer=optimizer, model=replace(config.model, vocab_size=text.tokenizer.vocab_size))


def callbacks_of(config: TrainerConfig, text: PreparedText, device: torch.device, scaler: LossScaler | None) -> list[Callback]:
    """The schedule, bits per byte and the loss scale, then what the engine's configuration asks for."""
    mine: list[Callback] = [ScheduleLearningRate(config.schedule)]
    mine.append(BitsPerByte(evaluation_loader(config, text, config.data.held_out_rows).byte_count(text.tokenizer.byte_lengths)))
    if config.model.experts is not None:
        mine += [BalanceExperts(), ExpertNorms(config.model, (lambda: scaler.state.scale) if scaler else None)]
    if scaler is not None:
        mine.append(KeepLossScale(scaler))
    trackers = list(dict.fromkeys([*config.engine.trackers, "jsonl"]))  # the report reads the lines
    return mine + default_callbacks(
        replace(config.engine, trackers=trackers),
        device,
        config.model,
        dtype=getattr(torch, config.precision),
        loss_scale=(lambda: scaler.state.scale) if scaler else None,
        settings=provenance.plain(config),
    )


def announce(config: TrainerConfig, text: PreparedText, device: torch.device, console: Console) -> None:
    """What is about to be trained, in three lines."""
    parameters = sum(parameter_counts(config.model).values())
    tokens = config.steps * config.data.batch_size * config.data.seq
    shares = shares_in_words(config.data.prepare.sources)
    mixture = f"Data mixture, by tokens: {shares}.\n" if shares else ""
    if text.report.unreadable:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in text.report.unreadable.items())
        mixture += f"Left out, for there was no text in it: {reasons}. Examples: {text.folder / 'report.json'}\n"
    if copies := text.report.held_out_in_training:
        mixture += (
            f"{copies:,} of the {len(text.held_out):,} held-out documents are in the training text too, so the held-out loss is too low: "
            "add the stage exact duplicates to data.prepare.cleaning.stages.\n"
        )
    if config.model.experts is not None and config.model.experts.has_constant_gate:
        mixture += (
            "model.experts has num_experts_per_tok 1 with norm_topk_prob true: the weight of a token's expert is always 1, so the loss of "
            "the text gives the routers no gradient. Set norm_topk_prob to false, unless the experts begin as copies of a dense layer.\n"
        )
    console.print(
        f"{parameters / 1e6:.1f} million parameters, {config.precision} on {device}. {text.training.token_count / 1e6:.1f} million tokens "
        f"of text ({len(text.training):,} documents; {len(text.held_out):,} held out), {tokens / 1e6:.1f} million to be seen.\n"
        f"{mixture}{binding.summary()}\nEverything lands in {config.engine.output}.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
