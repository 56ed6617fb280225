"""Fine-tune a small model with LoRA on two tensor-parallel ranks and in one process, and show where the two differ.

python chapters/10_finetuning/run.py                              a model of prose learns code by training few weights
python chapters/10_finetuning/run.py --adapter.base nf4           its frozen weights in four bits (QLoRA)
python chapters/10_finetuning/run.py --layout fsdp2               also dp2_zero1, pp2, tp2_sp, fsdp2_tp2, one, ...
python chapters/10_finetuning/run.py --adapter.decomposed true    DoRA; --adapter.rank_stabilized true for rsLoRA
python chapters/10_finetuning/run.py --impl mine                  with your own exercises
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chapters.rank_run import RankRunConfig, require_cuts, run_and_compare
from shared.course.launch import launch
from shared.finetune.config import AdapterConfig
from shared.parallel.config import ParallelConfig


@dataclass
class AdapterRunConfig(RankRunConfig):
    """Fine-tune on several ranks and in one process, and compare.

    Args:
        adapter: what is trained; every field of AdapterConfig.
        base_steps: training steps of the whole model before that, in one process, on other text.
    """

    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    base_steps: int = 150


def run(config: AdapterRunConfig) -> None:
    from chapters.base_weights import base_weights
    from chapters.prose import prose_of
    from shared.corpus import EMBEDDED, embedded_corpus
    from shared.course.errors import CourseError
    from shared.finetune.adapter_axis import AdapterParallel
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.parallel.context.axis import ContextParallel
    from shared.parallel.parallelize import AXES
    from shared.parallel.pipeline.axis import PipelineParallel
    from shared.parallel.tensor.axis import TensorParallel

    if config.adapter.kind != "lora":
        raise CourseError("Windows of text have no place for virtual tokens: set adapter.kind to lora, or use the trainer (MODE=sft).")
    axes = (*AXES, PipelineParallel(), ContextParallel(), TensorParallel(), AdapterParallel())
    weights = base_weights(config, config.base_steps, "".join(prose_of(embedded_corpus(EMBEDDED[1:2]).training)).encode(), "prose")
    prepare = partial(adapted, weights, config.adapter, config.seed)
    run_and_compare(config, packed_next_token_objective, axes, require_possible, prepare)


def require_possible(config: RankRunConfig, layout: ParallelConfig) -> None:
    """Refuse what the ranks would refuse one by one."""
    from shared.parallel.pipeline.axis import require_stages

    require_cuts(config, layout)
    if layout.pipeline_parallel > 1:
        require_stages(config.model.resolved(), layout)


def adapted(weights: dict[str, Any], adapter: AdapterConfig, seed: int, model: Any) -> None:
    """Give a model the base's weights, in four bits where the adapter says so, and attach the adapter, in place."""
    from shared.finetune.adapters import attach_adapter
    from shared.finetune.quantization.nf4_linear import quantize_base

    dtype = next(model.parameters()).dtype
    model.load_state_dict(weights)
    if adapter.base == "nf4":
        quantize_base(model)
    attach_adapter(model, adapter, seed=seed)
    model.to(dtype)


if __name__ == "__main__":
    launch(run, AdapterRunConfig, Path(__file__).with_name("run.yaml"))
