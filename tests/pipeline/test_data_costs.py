"""Floor 8: what data-parallel ranks send in a step is what the formulas say, to the call and to the byte, whatever else is parallel."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from memory_table import ADAMW, ROWS, SMALL, layout_of, measure

from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.model.transformer import TransformerModel
from shared.optim.config import OptimizerConfig
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.planning.activations import whole_of
from shared.parallel.planning.data_costs import data_exchanges, norm_exchange, weights_of
from shared.parallel.planning.memory import StepSizes
from shared.parallel.planning.pipeline_costs import held_parts

MUON, SEQ, MICROBATCHES = OptimizerConfig("muon", lr=0.01), 40, 2
OTHER_AXES = ("tp", "cp", "pp", "ep", "edp")  # other formulas, with tests of their own
TIED = replace(SMALL, num_key_value_heads=2, tie_word_embeddings=True)
GPT = replace(
    SMALL, norm="layer_norm", gated=False, position="learned", hidden_act="gelu_tanh", attention_bias=True, attention_output_bias=True,
    mlp_bias=True, max_position_embeddings=64, qk_norm=True,
)  # fmt: skip
EXPERTS = MixtureConfig(num_experts=4, moe_intermediate_size=32, num_shared_experts=1, first_k_dense=1)
MIXED = MixtureModelConfig(**vars(SMALL) | {"experts": EXPERTS})


@pytest.mark.parametrize("config", [SMALL, TIED, GPT, MIXED], ids=["llama", "tied", "gpt", "experts"])
def test_the_parameters_are_those_of_the_model_in_its_order(config):
    with torch.device("meta"):
        model = TransformerModel(config.resolved(), MIXTURE)
    found = weights_of(config, ParallelConfig(), whole_of(config))
    assert [(each.numbers, each.trained) for each in found] == [(p.numel(), p.requires_grad) for p in model.parameters()]


KEEPING = {"reshard_after_forward": False, "pipeline_schedule": "zero_bubble"}
CHUNKS = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}
CASES = [
    ("dp2", {}, SMALL, ADAMW, "float32"), ("dp2_zero1", {}, GPT, ADAMW, "float32"), ("dp2_zero1", {}, SMALL, MUON, "float32"),
    ("dp3_zero2", {}, SMALL, ADAMW, "float32"), ("fsdp2", {}, GPT, ADAMW, "bfloat16"), ("fsdp3", {}, TIED, MUON, "float32"),
    ("dp2_fsdp2", {}, TIED, ADAMW, "bfloat16"), ("fsdp2_tp2_sp", {}, SMALL, ADAMW, "float32"), ("pp2_fsdp2", {}, TIED, ADAMW, "float32"),
    ("pp2_dp2_zero1", {}, TIED, ADAMW, "float32"), ("dp2_cp2", {}, SMALL, ADAMW, "float32"), ("fsdp2_cp2", {}, SMALL, ADAMW, "float32"),
    ("dp2_tp2", {}, TIED, ADAMW, "float32"), ("pp2_fsdp2", KEEPING, SMALL, ADAMW, "float32"), ("pp2_fsdp2", CHUNKS, TIED, ADAMW, "float32"),
]  # fmt: skip


@pytest.mark.parametrize("word, more, config, optimizer, precision", CASES, ids=[f"{each[0]}-{each[3].name}" for each in CASES])
def test_calls_and_bytes_are_the_ledgers(word, more, config, optimizer, precision):
    """In several buckets, so that it matters which parameters share one. Tensor-parallel rank 0 has most of a vocabulary that does not
    divide; what ranks with uneven shards hand out is compared as their mean."""
    layout = replace(layout_of(word), bucket_megabytes=0.1, **more)
    step, whole = StepSizes(ROWS, SEQ, MICROBATCHES, precision), optimizer.name == "muon"
    traces = [trace for _, trace in run_threads(measure, layout.ranks, layout, optimizer, MICROBATCHES, precision, config, SEQ)]
    of_stage = layout.ranks // layout.pipeline_parallel
    for stage, part in enumerate(held_parts(config, layout)):
        ranks = traces[stage * of_stage : (stage + 1) * of_stage : layout.tensor_parallel]
        calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        weights = weights_of(config, layout, part)
        for each in [*data_exchanges(weights, layout, step, whole, stage=stage), *norm_exchange(layout)]:
            calls[each.operation, each.axis] += each.calls
            sizes[each.operation, each.axis] += each.calls * each.bytes
        own = {key for trace in ranks for key in trace.calls() if key[1].partition("_")[0] not in OTHER_AXES}
        for trace in ranks:
            assert {key: trace.calls()[key] for key in own} == calls
        assert {key: sum(trace.bytes()[key] for trace in ranks) / len(ranks) for key in own} == sizes
