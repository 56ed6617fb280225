"""Chapter 12. Model construction of a run: random or given weights, an adapter, and a frozen copy as reference, in any layout.

Extensions that the configuration names by import path are loaded and checked before any work begins; `chapters/12_grpo/EXTENDING.md` has an
example of each. An extension's own state is saved where the core's is: an optimizer's by parameter name, a callback's by its `state_dict`.
What a layout would silently get wrong is refused by name.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shared.course.errors import CourseError, SettingError
from shared.course.extensions import called, is_import_path
from shared.data.cleaning.cleaner import NAMES, own_stage
from shared.engine.defaults import own_callbacks
from shared.engine.metrics.flops import cpu_peak
from shared.finetune.adapter_axis import AdapterParallel
from shared.finetune.adapters import DEFAULT, adapters_of, attach_adapter, require_untied
from shared.finetune.base import keep_base_out
from shared.finetune.config import AdapterConfig
from shared.finetune.peft_format import layers_in_peft
from shared.finetune.quantization.nf4_linear import Nf4Linear, kept_in_float, quantize_base
from shared.finetune.quantization.packed import QuantizedLinear
from shared.model.counting import parameter_counts
from shared.model.init import forget_files
from shared.model.transformer import TransformerModel
from shared.moe.builders import CALLED_WITH, MIXTURE, own_part
from shared.moe.parallel.axis import ExpertParallel
from shared.optim.build import own_optimizer
from shared.optim.config import OptimizerConfig
from shared.optim.precision import Precision
from shared.optim.schedules import factor_at
from shared.parallel.config import ParallelConfig
from shared.parallel.context.axis import ContextParallel
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import AXES, Axis, apply_parallel
from shared.parallel.pipeline.axis import PipelineParallel
from shared.parallel.strategy import ParallelStrategy
from shared.parallel.tensor.axis import TensorParallel
from shared.preference.reference import Score, scorer
from shared.rl.reward_process import function_of
from shared.totals import Batch, Objective, Totals
from shared.trainer.config import TrainerConfig
from shared.trainer.weights import InitialWeights

RUN_AXES: tuple[Axis, ...] = (*AXES, PipelineParallel(), ContextParallel(), TensorParallel(), ExpertParallel(), AdapterParallel())


def plain_model(config: TrainerConfig, mesh: Mesh, device: torch.device, start: InitialWeights | None = None) -> TransformerModel:
    """The model before it is parallelized, with its adapter; where weights will be cut, without memory, because no rank need fit
    all of them. Tokens that were added have rows that differ where an adapter leaves them frozen."""
    apart = config.adapter is not None
    if mesh.fsdp.size > 1 or mesh.tp.size > 1 or mesh.pp.size > 1 or config.parallel.expert_parallel > 1:
        if start:
            return with_adapter(start.open(config.model, apart), config.adapter, config.seed, config.report.export)
        with torch.device("meta"):
            return TransformerModel(config.model, MIXTURE)
    if start:
        return with_adapter(start.load(config.model, device, apart), config.adapter, config.seed, config.report.export)
    return TransformerModel(config.model, MIXTURE, config.seed).to(device)


def parallel_model(
    config: TrainerConfig,
    mesh: Mesh,
    device: torch.device,
    start: InitialWeights | None,
    shaped: Callable[[TransformerModel], TransformerModel],
    trained: bool = True,
) -> ParallelStrategy:
    """The run's model in its layout. shaped: what the mode changes in the plain model. trained: False for one that stays as it is."""
    dtype = None if config.precision == "float32" else getattr(torch, config.precision)
    model = shaped(plain_model(config, mesh, device, start))
    strategy = apply_parallel(model, mesh, config.optimizer if trained else None, dtype, device, config.seed, RUN_AXES)
    forget_files(strategy.module)
    return strategy


def first_scorer(
    config: TrainerConfig, start: InitialWeights, strategy: ParallelStrategy, score: Callable[[nn.Module, Batch], Tensor]
) -> Score:
    """`score` of the model that the run began with: the trained one without its adapter, or else a frozen copy of the first weights, in the
    same layout and on the same device. Every rank calls it."""
    if config.adapter:
        return scorer(strategy.model, score, without=strategy.module)
    device = next(strategy.module.parameters()).device
    reference = parallel_model(config, strategy.mesh, device, start, lambda model: model.requires_grad_(False), trained=False)
    reference.model.eval()
    return scorer(reference.model, score)


CUT = ("zero", "fully_sharded", "tensor_parallel", "expert_parallel")  # layouts in which a rank has a part of a parameter


def require_extensions(config: TrainerConfig) -> None:
    """Load what the configuration names by import path, and refuse what cannot work.

    Raises:
        SettingError: names the setting.
    """
    own_callbacks(config.engine)
    factor_at(config.schedule, 1)
    if config.mode == "pretrain":
        for stage in config.data.prepare.cleaning.stages:
            if stage not in NAMES:
                own_stage(stage)
    if config.mode == "grpo":
        for reward in config.grpo.rewards:
            if is_import_path(reward.name):
                function_of(reward.name, reward.options)
    if config.objective:
        config.objective.bound("objective", "model", "batch", "objective")
    if config.optimizer.is_extension:
        require_whole_parameters(config.optimizer, config.parallel)
    for kind in own_parts(config):
        own_part(config.model, kind)
        for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
            if (degree := getattr(config.parallel, name)) > 1:
                raise SettingError(f"model.parts.{kind} with parallel.{name} {degree}: nothing says how to cut a part of your own. Give 1.")
        if config.report.export:
            raise SettingError(f"model.parts.{kind} is of your own, and no other program's format can say so: give report.export false.")


def require_whole_parameters(optimizer: OptimizerConfig, parallel: ParallelConfig) -> None:
    """Refuse an optimizer by import path where it would step parts of parameters and does not say that it may."""
    made = own_optimizer(optimizer).func
    for name in CUT:
        if (degree := getattr(parallel, name)) > (0 if name == "zero" else 1) and not getattr(made, "elementwise", False):
            raise SettingError(
                f"optimizer.name {called(optimizer.name)} with parallel.{name} {degree}: each rank would step its parts of the parameters. "
                f"If it treats each number alone, write `elementwise = True` in its class; else give {0 if name == 'zero' else 1}."
            )


def own_parts(config: TrainerConfig) -> Iterator[str]:
    """Parts of the model by import path."""
    parts = getattr(config.model, "parts", None)  # which only chapter 09's configuration has
    return (kind for kind in CALLED_WITH if getattr(parts, kind, None))


def parameter_count(config: TrainerConfig) -> int:
    """Of the run's model, which is built without memory where parts of it are by import path."""
    if not [*own_parts(config)]:
        return sum(parameter_counts(config.model).values())
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in TransformerModel(config.model, MIXTURE).parameters())


def objective_of(config: TrainerConfig, of_mode: Objective) -> Objective:
    """The run's objective: the mode's, or in training one by import path, which is called with the mode's too. Evaluations keep the mode's,
    so that held-out losses stay comparable."""
    if config.objective is None:
        return of_mode
    own, name = config.objective.bound("objective", "model", "batch", "objective"), config.objective.name

    def objective(model: nn.Module, batch: Batch) -> Totals:
        if not model.training:
            return of_mode(model, batch)
        found = own(model, batch, of_mode)
        if not isinstance(found, Totals):
            raise CourseError(f"objective: {name} returned {type(found).__name__}: it must return shared.totals.Totals.")
        return found

    return objective


WORTH = 1.3  # times faster must bfloat16 be, before the casts that autocast adds are paid for


def resolve_precision(asked: str, device: torch.device) -> Precision:
    """`asked`, or for "auto" the faster of bfloat16 and float32 on this device.

    A GPU since Ampere multiplies bfloat16 many times faster. A CPU does so only with instructions of its own (AMX, AVX512-BF16), and is
    slower without, so there it is measured.
    """
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type != "cpu":
        return "float32"
    return "bfloat16" if cpu_peak(torch.bfloat16) > WORTH * cpu_peak(torch.float32) else "float32"


FROZEN = {"nf4": Nf4Linear, "packed": QuantizedLinear}  # adapter.base -> what its layers are
SAID = {"nf4": "model in four bits", "packed": "model in GPTQ's or AWQ's codes"}


def with_adapter(model: TransformerModel, adapter: AdapterConfig | None, seed: int, export: bool = False) -> TransformerModel:
    """The model with its adapter, its own weights frozen, and in four bits where that is asked for; itself where there is no adapter.
    export: refuse an adapter that could not be merged after its training.

    Raises:
        SettingError: quantized weights without such an adapter, none where it needs them, or weights that cannot be quantized.
    """
    kept = next((base for base, kind in FROZEN.items() if any(isinstance(module, kind) for module in model.modules())), None)
    if kept and (adapter is None or adapter.base != kept):
        raise SettingError(f"start_from is a {SAID[kept]}, which stays frozen: set adapter.base to {kept}, or give the plain model.")
    if adapter is None:
        return model
    if adapter.base == "packed" and not kept:
        raise SettingError(
            "adapter.base is packed, and the weights of start_from are floats: give a folder in GPTQ's or AWQ's layout, as chapter 10's "
            "quantize.py writes it, or set adapter.base to nf4, which quantizes them."
        )
    if adapter.base == "nf4" and not kept:
        try:
            quantize_base(model)
        except ValueError as error:
            raise SettingError(f"adapter.base is nf4: {error}") from None
    attach_adapter(model, adapter, seed=seed)
    if adapter.kind == "lora":
        try:
            layers_in_peft(model)
        except ValueError as error:  # what could not be saved at the end
            raise SettingError(f"adapter.targets: {error}") from None
    if export:
        require_untied(model, list(adapters_of(model)[DEFAULT].layers))
    keep_base_out(model)  # of checkpoints: `start_from` has it, and a resume from other weights is refused
    return model


def float_remark(model: TransformerModel, adapter: AdapterConfig | None) -> str:
    """A line for the start of a run about layers that a four-bit base keeps in float; empty if there are none."""
    if adapter is None or adapter.base != "nf4" or not (stacks := kept_in_float(model)):
        return ""
    kinds = ", ".join(dict.fromkeys(name.split(".blocks.")[1].partition(".")[2] for name in stacks))
    return f"adapter.base nf4 leaves the experts in float ({kinds}): only the blocks' linear layers are in four bits.\n"
