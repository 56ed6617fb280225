"""Compiled replicas: buckets travel beside the backward pass, which a graph of the whole model ends at once, and no step after the first
makes a new graph."""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from chapters.dry_run import dry_run
from shared.loop import accumulate_gradients
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.optim.config import OptimizerConfig
from shared.parallel.config import ParallelConfig
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel

SMALL = ModelConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2)


def test_gradients_of_the_last_block_travel_before_the_first_block_has_its_own():
    torch._dynamo.reset()
    model, graphs, order = TransformerModel(SMALL), [], []
    config = ParallelConfig(data_parallel=2, bucket_megabytes=1e-6)  # each parameter in a bucket of its own
    strategy = apply_parallel(model, Mesh(config, dry_run(2)), OptimizerConfig("adamw"))

    def ahead(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    def back(graph, inputs):
        return make_boxed_func(lambda *args: order.append("backward") or graph(*args))

    strategy.model.compile(backend=aot_autograd(fw_compiler=ahead, bw_compiler=back))
    [engine] = strategy.engines
    for number, bucket in enumerate(engine.buckets):
        noted(bucket, order, number)
    ids = torch.arange(16).view(2, 8)
    seen = []
    for _ in range(3):
        strategy.runner(accumulate_gradients)(strategy.model, [{"input_ids": ids, "targets": ids}], packed_next_token_objective)
        engine.finish()
        model.zero_grad(set_to_none=True)
        seen.append(len(graphs))
    assert seen[0] >= 1 and seen == [seen[0]] * 3  # dynamo's graphs: none new in steps 2 and 3
    first_step = order[: order.index(len(engine.buckets) - 1) + 1]
    before_last_graph = first_step[: len(first_step) - first_step[::-1].index("backward")]
    of_last_block = len(list(model.stack.blocks["2"].parameters()))
    assert sum(isinstance(what, int) for what in before_last_graph) >= of_last_block, order


def noted(bucket, order, number):
    start = bucket.start
    bucket.start = lambda: order.append(number) or start()
