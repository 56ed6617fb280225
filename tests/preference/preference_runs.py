"""Three steps of a preference loss on a layout and in one process, in float64: with a reference beside, or the base of an adapter."""

from dataclasses import replace
from functools import cache, partial

import torch
from lora_runs import DENSE, EVERYTHING, OF_EXPERTS, prepared, with_biases
from mixture_runs import MODEL as MIXTURE_MODEL
from mixture_runs import MixtureRun, observed
from pair_rows import pair_batch
from sharded_runs import build

from shared.finetune.adapters import adapters_of
from shared.model.transformer import TransformerModel
from shared.finetune.config import AdapterConfig
from shared.moe.builders import MIXTURE
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.parallelize import apply_parallel
from shared.preference.baseline import BaselinedLoader
from shared.preference.objective import DPOConfig, PreferenceObjective
from shared.preference.reference import ReferencedLoader, scorer
from shared.totals import Batch
from shared.trainer.models import RUN_AXES

SEQ = 32
PAIRS = ([2, 0, 3, 1, 2, 1, 0, 1], [1, 3, 0, 0, 1, 2, 3, 2])  # of each row, in two micro-batches: of two ranks or four, none has as many
MODELS = {
    "dense": (DENSE, None),
    "tied": (replace(DENSE, tie_word_embeddings=True), None),
    "experts": (MIXTURE_MODEL, None),
    "lora": (DENSE, EVERYTHING),
    "lora experts": (MIXTURE_MODEL, OF_EXPERTS),
}
LOSSES = {
    "dpo": DPOConfig(),
    "cdpo": DPOConfig(label_smoothing=0.2, sft_weight=0.3),
    "robust": DPOConfig("robust", label_smoothing=0.2),
    "hinge": DPOConfig("hinge", beta=0.05),
    "ipo": DPOConfig("ipo", per_token=True),
    "simpo": DPOConfig("simpo", beta=2.0, target_margin=0.5),
    "orpo": DPOConfig("orpo"),
    "kto": DPOConfig("kto", reference="beside", desirable_weight=1.3),
}


def batches(step: int, microbatch: int, config) -> Batch:
    """Without what the reference says, which a rank finds out by itself."""
    batch = pair_batch(100 * step + microbatch, PAIRS[microbatch], SEQ, config.vocab_size)
    return {name: value for name, value in batch.items() if name not in ("reference", "baseline")}


def adapted(model: TransformerModel, adapter: AdapterConfig) -> TransformerModel:
    """With updates that are not 0, or rounding would decide which of two equal rewards is the larger one."""
    generator = torch.Generator().manual_seed(8)
    for name, parameter in prepared(model, adapter).named_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def moved(model: TransformerModel) -> TransformerModel:
    """Other weights than the policy's first ones, so that log-ratios are not 0."""
    generator = torch.Generator().manual_seed(7)
    for parameter in with_biases(model).parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model.requires_grad_(False)


class PreferenceRun(MixtureRun):
    def __init__(self, world: Communicator, layout: ParallelConfig, optimizer: str, model: str, loss: str):
        config, adapter = MODELS[model]
        prepare = partial(adapted, adapter=adapter) if adapter else with_biases
        objective = PreferenceObjective(LOSSES[loss])
        super().__init__(world, layout, optimizer, config, prepare=prepare, objective=objective, batches=batches)
        self.metrics: list[dict] = []
        policy = scorer(self.parallel.model)
        if adapters_of(self.plain):
            self.reference = scorer(self.parallel.model, without=self.plain)
        else:
            frozen = moved(build(config, builders=MIXTURE))
            self.reference = scorer(apply_parallel(frozen, self.mesh, axes=RUN_AXES).model)
        self.wrap = lambda loader: ReferencedLoader(loader, self.reference)
        if loss == "kto":
            self.wrap = lambda loader: ReferencedLoader(BaselinedLoader(loader, self.reference, policy, self.mesh.data), self.reference)

    def shares(self) -> list[Batch]:
        return next(iter(self.wrap([super().shares()])))

    def train(self, steps: int) -> "PreferenceRun":
        super().train(steps)
        self.metrics.append(dict(self.totals.metrics) | {"token_count": self.totals.token_count})
        return self


def layout_of(word: str, recompute: str = "none", **more) -> ParallelConfig:
    made = ParallelConfig(activation_checkpointing=recompute, bucket_megabytes=0.002, **more)
    return parse_layout("dp1" if word == "one" else word, made)


def seen(world: Communicator, layout: ParallelConfig, optimizer: str, model: str, loss: str) -> dict:
    run = PreferenceRun(world, layout, optimizer, model, loss)
    return observed(run) | {"metrics": run.metrics}


def on_ranks(layout: ParallelConfig, *which: str) -> list[dict]:
    return run_threads(lambda world: seen(world, layout, *which), layout.ranks)


@cache
def alone(optimizer: str, model: str, loss: str) -> dict:
    return seen(SingleRankCommunicator(), ParallelConfig(), optimizer, model, loss)


def require_same_metrics(found: list[dict], one: dict) -> None:
    for each in found:
        for here, there in zip(each["metrics"], one["metrics"], strict=True):
            assert here.keys() == there.keys()
            for name, value in here.items():
                torch.testing.assert_close(value.double(), there[name].double(), rtol=1e-9, atol=1e-9, msg=name)
