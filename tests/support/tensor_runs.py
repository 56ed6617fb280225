"""Small runs under tensor parallelism for the tests: a model of every family, three steps on a layout and in one process, in float64."""

from dataclasses import replace
from functools import cache

import torch
from layout_runs import LayoutRun, largest_difference
from sharded_runs import ADAMW, MUON, ROWS, translation_objective
from step_records import STEPS

from shared.loop import accumulate_gradients, train_step
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.model.masks import AttentionMask
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.health.replicas import require_equal
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import AXES, apply_parallel
from shared.parallel.tensor.axis import TensorParallel

SGD = OptimizerConfig("sgd", lr=0.3, momentum=0.0, weight_decay=0.0)
SIZES = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
SMALL = SIZES | {"initializer_range": 0.1}
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
GPT = BIASES | {"position": "learned", "norm": "layer_norm", "hidden_act": "gelu_tanh", "gated": False, "tie_word_embeddings": True}
FAMILIES = {
    "llama": {},
    "gqa": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1, "attention_bias": True},
    "gpt2": GPT | {"max_position_embeddings": 40},  # so many that half of all numbers beside blocks ends among them
    "qwen3": {"qk_norm": True, "num_key_value_heads": 2, "head_dim": 6},
    "mistral": {"sliding_window": 3, "num_key_value_heads": 2},
    "bloom": GPT | {"position": "alibi", "embedding_norm": True},
    "bert": GPT
    | {"architecture": "encoder", "norm_position": "post", "embedding_norm": True, "head": "mlm", "max_position_embeddings": 12},
    "t5": {"architecture": "encoder-decoder", "position": "relative", "attention_scale": 1.0, "norm_eps": 1e-6},
}


def config_of(family: str) -> ModelConfig:
    return ModelConfig(**SMALL | FAMILIES[family])


def batches(step: int, microbatch: int, config: ModelConfig):
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    ids = torch.randint(config.vocab_size, (ROWS, 13), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < torch.linspace(0.1, 0.8, ROWS)[:, None]] = -100
    targets[:2] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "targets": targets}


def make(world, layout: str, family: str, optimizer=SGD, objective=packed_next_token_objective, seed: int = 0, **settings) -> LayoutRun:
    config = replace(parse_layout(layout), **settings)
    objective = translation_objective if family == "t5" else objective
    axes = (*AXES, TensorParallel())
    return LayoutRun(
        world, config, config=config_of(family), optimizer=optimizer, objective=objective, batches=batches, axes=axes, seed=seed
    )


def train(world, *arguments, make=make, **settings) -> dict:
    run = make(world, *arguments, **settings)
    losses, norms = [], []
    for _ in range(STEPS):
        run.train(1)
        losses.append(run.totals.loss_sum)
        norms.append(run.update.gradient_norm)
    require_equal(run.parallel.state.state_dict(keep_vars=True), run.parallel.holders, run.world)
    return {"loss": losses, "norm": norms, "gradients": run.gradients(), "weights": run.weights()}


def run(layout: str, *arguments, **settings) -> list[dict]:
    ranks = parse_layout(layout).ranks
    work = lambda world: train(world, layout, *arguments, **settings)  # noqa: E731
    return [work(SingleRankCommunicator())] if ranks == 1 else run_threads(work, ranks)


@cache
def expected(family: str, optimizer: OptimizerConfig | str = "sgd") -> dict:
    return run("one", family, {"sgd": SGD, "adamw": ADAMW, "muon": MUON}[optimizer])[0]


def require_same(found: list[dict], one: dict) -> None:
    for each in found:
        for what in ("loss", "norm"):
            torch.testing.assert_close(torch.stack(each[what]), torch.stack(one[what]), rtol=1e-9, atol=0)
        for what in ("gradients", "weights"):
            assert largest_difference(without_noise(each[what]), without_noise(one[what])) < 1e-9, what


def without_noise(tensors: dict) -> dict:
    """A key's bias adds the same to all scores of a query, so its gradient is 0, and what is computed of it is rounding."""
    return {name: tensor if tensor.norm() > 1e-9 else torch.zeros_like(tensor) for name, tensor in tensors.items()}


def with_dropout(world, layout: str, activation_checkpointing: str = "none", backend: str = "course"):
    """A step with dropout: the weights, the generator's state afterwards, and this rank's parameters."""
    config = replace(config_of("gpt2"), hidden_dropout=0.3, attention_dropout=0.2)
    parallel = replace(parse_layout(layout), activation_checkpointing=activation_checkpointing, backend=backend)
    strategy = apply_parallel(TransformerModel(config).double(), Mesh(parallel, world), SGD, axes=(*AXES, TensorParallel()))
    strategy.model.train()
    optimizer = build_optimizer(strategy.optim_params, SGD, strategy.routes)
    torch.manual_seed(5)
    batch = batches(0, 0, config)
    train_step(
        strategy.model, optimizer, [batch], packed_next_token_objective, strategy.runner(accumulate_gradients), strategy.reducer,
        strategy.updater(lambda model, optimizer, count: optimizer.step()),
    )  # fmt: skip
    weights = {name: tensor for name, tensor in strategy.whole_weights() if tensor is not None}
    return weights, torch.get_rng_state(), dict(strategy.model.named_parameters())


def drawn(model: TransformerModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the dropout of the stream and of attention leave of ones in the first block, and random numbers that are drawn afterwards."""
    block = model.train().stack.blocks["0"]
    torch.manual_seed(1)
    ones = torch.ones(1, 2, 20, 4)
    return block.dropout(torch.ones(200)), block.attention.attend(ones, ones, ones, AttentionMask(), 1.0, 0.5), torch.rand(3)
