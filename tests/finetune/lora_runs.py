"""Three steps of a small model with adapters on a layout, in float64, each against one process with the same adapters."""

from dataclasses import replace
from functools import cache, partial

import torch
from mixture_runs import MODEL as MIXTURE_MODEL
from mixture_runs import MixtureRun, observed

from shared.finetune.adapters import attach_adapter
from shared.finetune.config import AdapterConfig
from shared.model.transformer import TransformerModel
from shared.moe.config import MixtureModelConfig
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout

DENSE = MixtureModelConfig(  # biases everywhere, a vocabulary that ranks cannot cut evenly, fewer key and value heads than four ranks
    vocab_size=31, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
    max_position_embeddings=32, initializer_range=0.2, attention_bias=True,
    attention_output_bias=True, mlp_bias=True,
)  # fmt: skip
EVERYTHING = AdapterConfig(rank=3, alpha=6.0, targets=("all-linear", "embedding.tokens", "head.linear"))
DECOMPOSED = AdapterConfig(rank=3, alpha=6.0, targets=("all-linear",), decomposed=True)
OF_EXPERTS = AdapterConfig(rank=2, alpha=6.0, targets=("all-linear", "experts.*_proj"))
MODELS = {
    "dense": (DENSE, EVERYTHING),
    "decomposed": (DENSE, DECOMPOSED),
    "tied": (replace(DENSE, tie_word_embeddings=True), EVERYTHING),
    "experts": (MIXTURE_MODEL, OF_EXPERTS),
    "attention": (DENSE, AdapterConfig(targets=("q_proj", "v_proj"))),  # nothing before the first of them is trained
    "last": (DENSE, AdapterConfig(targets=("stack.blocks.3.*.q_proj",))),  # a pipeline's first stage has nothing to train
}


def with_biases(model: TransformerModel) -> TransformerModel:
    """Biases start at 0, and a frozen one stays there: then nobody sees one that is added twice."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def prepared(model: TransformerModel, adapter: AdapterConfig) -> TransformerModel:
    return attach_adapter(with_biases(model), adapter, seed=5)


def make(world: Communicator, layout: ParallelConfig, model: str, optimizer: str = "adamw", **settings) -> MixtureRun:
    config, adapter = MODELS[model]
    settings = {"prepare": partial(prepared, adapter=settings.pop("adapter", adapter))} | settings
    return MixtureRun(world, layout, optimizer, config, **settings)


def layout_of(word: str, recompute: str = "none", **more) -> ParallelConfig:
    made = ParallelConfig(activation_checkpointing=recompute, bucket_megabytes=0.002, **more)
    return parse_layout("dp1" if word == "one" else word, made)


def on_ranks(layout: ParallelConfig, model: str, optimizer: str = "adamw", **settings) -> list[dict]:
    return run_threads(lambda world: observed(make(world, layout, model, optimizer, **settings)), layout.ranks)


@cache
def alone(model: str, optimizer: str = "adamw") -> dict:
    return observed(make(SingleRankCommunicator(), ParallelConfig(), model, optimizer))
