"""Chapter 12. A training run from its configuration to its report: prepare the data, build the model, fit, evaluate.

Read from the top: each function is one stage, and what a stage does is in an earlier chapter's part of the core. What differs between the
modes, such as where rows come from and what is evaluated at the end, is one object, a `Mode` (`shared.trainer.mode`):
`shared.trainer.modes.pretrain` has the first.
"""

import signal
from contextlib import ExitStack
from dataclasses import replace

import torch
from rich.console import Console

from shared.course import binding
from shared.course.errors import CourseError
from shared.data.sources import Digests
from shared.data.prepare import DIGESTS
from shared.data.tokenizer import TextTokenizer
from shared.devices import keep_freed_memory, pick_device
from shared.engine.callbacks import Callback
from shared.engine.defaults import default_callbacks
from shared.engine.engine import RuntimeEngine
from shared.folder_lock import held_folder
from shared.loop import accumulate_gradients
from shared.model.hf.registry import write_config
from shared.moe.balancing import BalanceExperts, ExpertNorms
from shared.optim.build import build_optimizer
from shared.optim.loss_scale import KeepLossScale, LossScaler
from shared.optim.precision import autocast_objective
from shared.optim.schedules import ScheduleLearningRate
from shared.optim.updater import Update
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.config import layout_name
from shared.parallel.health.agreement import agreed, ranks_that_share, require_agreement
from shared.parallel.mesh import Mesh
from shared.parallel.processes.torchrun import broken_connections_named
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.costs import Costs, Stopwatch, Traffic
from shared.trainer.mode import Mode, Run
from shared.trainer.models import float_remark, objective_of, own_parts, parallel_model, parameter_count, require_extensions
from shared.trainer.models import resolve_precision
from shared.trainer.modes.answering import Answering
from shared.trainer.modes.turns import template_remark
from shared.trainer.modes import MODES
from shared.trainer.planner.layout import pipeline_line, stages_summary
from shared.trainer.planner.memory import require_memory
from shared.trainer.records.changes import Changes, KeepChanges, find_changes, unresolved
from shared.trainer.records.continuation import copy_run, nothing_to_continue, remove_copy, remove_if_empty
from shared.trainer.records.history import History, note_end
from shared.trainer.reports.figures import Results
from shared.trainer.results import evaluate_and_report
from shared.trainer.sections import ROLLING
from shared.trainer.weights import InitialWeights, find_initial_weights, fingerprint_of, weights_named


def train_model(config: TrainerConfig, console: Console, world: Communicator | None = None, began: float | None = None) -> Results | None:
    """Train as `config` says and write the report. Every rank calls it; rank 0 prints, and returns the results.

    Args:
        world: the ranks of the run; None for this process alone.
        began: when the time that the report accounts for began (`shared.trainer.costs`); None for now.

    Raises:
        SystemExit: the run was asked to leave before its end; the code is the one that shells give to that signal.
        CourseError: something that the reader can mend, in one sentence: among others, settings that only fail together.
    """
    world, watch = world or SingleRankCommunicator(), Stopwatch(began)
    console = console if world.rank == 0 else Console(quiet=True)
    require_agreement(world, "configuration", config)  # first of all: what follows has ranks meet as the configuration says
    with ExitStack() as held, broken_connections_named(world):  # from before the first file of the run to after the last
        if config.continue_from:
            held.callback(remove_if_empty, config.engine.output)  # after the lock in it
        sharing = ranks_that_share(world, config.engine.output)
        agreed(world, lambda: require_one_folder(config, sharing, world))
        leads = sharing[0] == world.rank
        agreed(world, lambda: held.enter_context(held_folder(config.engine.output, leads, console)))
        before = agreed(world, lambda: copy_run(config, console) if leads else None) if config.continue_from else None
        for line in nothing_to_continue(config):
            console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
        watch.lap("seconds for imports and settings")
        run = None
        try:
            run = build(config, console, world, watch)
            with weights_named(run.sources):  # a reference reads the first weights once more
                loader, held_out = run.mode.loaders(run.config, run.strategy)
            agreed(world, lambda: run.require_same_sources() if leads else None)
            engine = run.engine.fit(loader, held_out, steps=config.steps, retune=run.changes.for_engine(config, run.engine.optimizer))
        except CourseError:
            if before is not None and (run is None or run.engine.began_at < 0):  # refused before it took its checkpoint
                remove_copy(config.engine.output, before)
            raise
        if engine.step < config.steps and engine.leaving:
            console.print(f"The same command resumes from step {engine.step}.", highlight=False)
            raise SystemExit(128 + signal.Signals[engine.stopped])
        results = evaluate_and_report(run, console)
        note_end(config, world)
        return results


def build(config: TrainerConfig, console: Console, world: Communicator | None = None, watch: Stopwatch | None = None) -> Run:
    """Build everything before the first step: data, model with its parallelism, optimizer, engine with callbacks."""
    mesh, watch = Mesh(config.parallel, world or SingleRankCommunicator()), watch or Stopwatch()
    device = pick_device(config.engine.device)
    if device.type == "cpu":
        keep_freed_memory()
    agreed(mesh.world, lambda: require_extensions(config))
    agreed(mesh.world, lambda: require_memory(config, device))  # with the least vocabulary, before hours of preparing text
    agreed(mesh.world, lambda: find_changes(config, leave_out=unresolved(config)))  # refused before hours of preparing text, as well
    start = agreed(mesh.world, lambda: find_initial_weights(config.start_from)) if config.start_from else None
    watch.lap("seconds to check the settings")
    mode = MODES[config.mode](config, start, mesh.world, console)
    watch.lap("seconds to prepare the text")
    config = resolved(config, mode.tokenizer, start, device, mesh.world)
    watch.lap("seconds to choose the precision")
    agreed(mesh.world, lambda: require_memory(config, device))
    mode.require_answerable(config)
    if config.report.export:
        write_config(config.model)  # refuses a model that no format can hold, now rather than after the last step
    changes, leads = keep_record(config, mode, start, mesh.world)

    own = mesh.pp.rank * mesh.loss.size + mesh.loss.rank  # ranks with other rows, positions or layers draw other dropout
    torch.manual_seed(config.seed + own)
    with weights_named([start] if start else []):
        strategy = parallel_model(config, mesh, device, start, mode.shaped)
    scaler, runner = LossScaler() if config.precision == "float16" else None, strategy.runner(accumulate_gradients)
    costs, traffic = Costs(watch), Traffic(mesh.world.trace)
    watching = [KeepChanges(config, changes, leads), costs, traffic, *([History(config, mesh.world)] if config.elastic else [])]
    engine = RuntimeEngine(
        strategy,
        build_optimizer(strategy.optim_params, config.optimizer, strategy.routes),
        config.engine,
        objective=autocast_objective(objective_of(config, mode.objective), config.precision),
        runner=scaler.scaled(runner) if scaler else runner,
        updater=Update(config.max_grad_norm, scaler, strategy.grad_norm),
        callbacks=[*watching, *mode.callbacks(config), *callbacks_of(config, device, scaler)],
        console=console,
    )
    announce(config, mode, start, device, console, float_remark(strategy.module, config.adapter))
    if mesh.world.size > 1:
        stages = "".join(f" Stages have blocks {blocks}." for blocks in stages_summary(config).values())
        console.print(
            f"{mesh.world.size} ranks, layout {layout_name(config.parallel)}, backend {config.parallel.backend}.{stages}", highlight=False
        )
    if mesh.pp.size > 1:
        console.print(pipeline_line(config), highlight=False, soft_wrap=True)
    watch.lap("seconds to build the model and measure the peak")
    costs.mark = watch.mark
    return Run(config, mode, start, engine, strategy, costs, traffic, changes, watch)


def keep_record(config: TrainerConfig, mode: Mode, start: InitialWeights | None, world: Communicator) -> tuple[Changes, bool]:
    """Keep the configuration, the tokenizer and the fingerprint of the initial weights in the run's folder, or find the same run there.

    Returns:
        What differs from the run that is there and is allowed to, on every rank; and whether this rank writes for those that share its
        folder.

    Raises:
        CourseError: on every rank: the folder holds another run, or the ranks start from different weights.
    """
    output, digests = config.engine.output, Digests(config.data.prepared / DIGESTS)
    fingerprint = agreed(world, lambda: fingerprint_of([start, *mode.more_weights()], digests) if start else None)
    require_agreement(world, "model", {"start_from": fingerprint})
    leads = ranks_that_share(world, output)[0] == world.rank

    def keep() -> Changes:
        digests.save()
        changes = find_changes(config, fingerprint, mode.tokenizer)
        if not (changes.asked or changes.code):  # else when the run has taken its checkpoint with them
            provenance.keep_record(config, output, fingerprint)
        mode.save_beside(output / "tokenizer", config.model.max_position_embeddings)  # so that a checkpoint alone is enough to start from
        return changes

    kept = agreed(world, lambda: keep() if leads else None)
    return Changes(**world.gather_objects(kept and vars(kept))[0]), leads


def resolved(
    config: TrainerConfig, tokenizer: TextTokenizer, start: InitialWeights | None, device: torch.device, world: Communicator
) -> TrainerConfig:
    """The configuration with what depends on the machine and the tokenizer. Rank 0 decides what is measured."""
    precision = config.precision
    if precision == "auto":
        precision = provenance.saved_value(config.engine.output, "precision") or resolve_precision("auto", device)
        precision = world.gather_objects(precision)[0]
    optimizer = config.optimizer
    if optimizer.name == "muon" and optimizer.newton_schulz_dtype is None and precision == "float32":
        optimizer = replace(optimizer, newton_schulz_dtype="float32")  # this machine multiplies bfloat16 no faster
    rows = max(tokenizer.vocab_size, start.model.vocab_size if start else 0)  # published models may have more rows than tokens
    return replace(config, precision=precision, optimizer=optimizer, model=replace(config.model, vocab_size=rows))


def callbacks_of(config: TrainerConfig, device: torch.device, scaler: LossScaler | None) -> list[Callback]:
    """The schedule, the experts' and the loss scale, then what the engine's configuration asks for."""
    mine: list[Callback] = [ScheduleLearningRate(config.schedule)]
    if config.model.experts is not None:
        mine += [BalanceExperts(), ExpertNorms(config.model, (lambda: scaler.state.scale) if scaler else None)]
    if scaler is not None:
        mine.append(KeepLossScale(scaler))
    trackers = list(dict.fromkeys([*config.engine.trackers, "jsonl"]))  # the report reads the lines
    return mine + default_callbacks(
        replace(config.engine, trackers=trackers),
        device,
        # Of two stacks, and of parts by import path, no formula counts the operations.
        config.model if config.model.architecture == "decoder" and not [*own_parts(config)] else None,
        dtype=getattr(torch, config.precision),
        loss_scale=(lambda: scaler.state.scale) if scaler else None,
        settings=provenance.plain(config),
    )


def announce(
    config: TrainerConfig, mode: Mode, start: InitialWeights | None, device: torch.device, console: Console, remark: str = ""
) -> None:
    """Print a few lines on what is about to be trained. remark: another line."""
    parameters = parameter_count(config)
    tokens = config.steps * config.data.batch_size * config.data.seq  # but with rollouts the policy decides
    seen = "" if config.mode in ROLLING else f", {tokens / 1e6:.1f} million to be seen"
    amount, remarks = mode.announcement(config)
    if config.model.experts is not None and config.model.experts.has_constant_gate:
        remarks += (
            "model.experts has num_experts_per_tok 1 with norm_topk_prob true: the weight of a token's expert is always 1, so the loss of "
            "the text gives the routers no gradient. Set norm_topk_prob to false, unless the experts begin as copies of a dense layer.\n"
        )
    if start:
        remarks += f"The weights of {start.folder} are the first ones.\n"
        if (new := config.model.vocab_size - start.model.vocab_size) > 0:
            remarks += f"{new:,} of the tokenizer's {config.model.vocab_size:,} tokens have no row in them: theirs begin at the mean.\n"
    if isinstance(mode, Answering):
        remarks += template_remark(config, start, mode.text.template, mode.tokenizer)
    remarks += remark
    console.print(
        f"{parameters / 1e6:.1f} million parameters, {config.precision} on {device}. {amount}{seen}.\n"
        f"{remarks}{binding.summary()}\nEverything lands in {config.engine.output}.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def require_one_folder(config: TrainerConfig, sharing: list[int], world: Communicator) -> None:
    """Refuse an elastic run whose ranks see different folders: a machine that joins would have no checkpoint."""
    if config.elastic and len(sharing) < world.size:
        raise CourseError(
            f"elastic is true and {config.engine.output} is not one folder for all ranks: put engine.output on storage that all machines "
            "share, so that any of them can resume the run."
        )
