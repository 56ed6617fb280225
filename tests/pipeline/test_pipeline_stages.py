"""Which blocks each stage of a pipeline has: balanced by FLOPs or memory, or by hand; and that the split does not change the training."""

from dataclasses import replace

import pytest
import torch
from layout_runs import largest_difference
from pipeline_runs import config_of, expected, observed, on_ranks, require_same
from test_pipeline_checkpoints import without_key_biases
from torch.utils.flop_counter import FlopCounterMode

from shared.course.errors import CourseError
from shared.model.config import ModelConfig
from shared.model.counting import parameter_counts
from shared.model.transformer import TransformerModel
from shared.parallel.config import ParallelConfig
from shared.parallel.pipeline.axis import stage_blocks, stage_costs
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.layout import stages_summary
from shared.trainer.settings import parse_text

DEAR_HEAD = ModelConfig(vocab_size=4096, hidden_size=64, num_hidden_layers=12, num_attention_heads=4, max_position_embeddings=128)


def lengths(model: ModelConfig, **settings) -> list[int]:
    return [len(blocks) for blocks in stage_blocks(model, ParallelConfig(pipeline_parallel=2, **settings))]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "bert"])
def test_flops_of_stages_are_what_pytorch_counts(family):
    """A step is three times the forward pass, of which PyTorch's counter knows every module's products."""
    config = replace(config_of(family), attention="eager", max_position_embeddings=12)
    model, rows, seq = TransformerModel(config), 2, config.max_position_embeddings
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(rows, seq, dtype=torch.int64))
    found = {name: 3 * sum(each.values()) / (rows * seq) for name, each in counter.get_flop_counts().items()}
    blocks, first, last = stage_costs(config, "flops")
    assert [found[f"TransformerModel.stack.blocks.{number}"] for number in range(4)] == [*blocks]
    assert (found.get("TransformerModel.embedding", 0), found["TransformerModel.head"]) == (first, last)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "bert", "bloom"])
def test_memory_of_stages_is_what_they_hold(family):
    config = config_of(family)
    blocks, first, last = stage_costs(config, "memory")
    twice = config.vocab_size * config.hidden_size * config.tie_word_embeddings
    assert first + sum(blocks) + last == sum(parameter_counts(config).values()) + twice
    held = on_ranks(lambda run: sum(parameter.numel() for parameter in run.plain.parameters()), "pp2", family)
    assert held == [first + sum(blocks[:2]), sum(blocks[2:]) + last]


def test_a_dear_head_has_fewer_blocks_beside_it():
    """The head's matrix is 64 x 4096, a block's 4 of 64 x 64 and 3 of 64 x 172 and its products with 128 positions."""
    (block, *_), first, head = stage_costs(DEAR_HEAD, "flops")
    assert first == 0 and 3 < head / block < 5
    assert lengths(DEAR_HEAD) == [8, 4] and lengths(DEAR_HEAD, pipeline_layers="memory") == [6, 6]
    assert lengths(DEAR_HEAD, pipeline_layers=(5, 7)) == [5, 7]
    assert lengths(replace(DEAR_HEAD, vocab_size=8)) == [6, 6]
    assert lengths(DEAR_HEAD, pipeline_schedule="interleaved", pipeline_chunks=2) == [4, 4, 3, 1]


@pytest.mark.parametrize("schedule, split", [("1f1b", (3, 1)), ("interleaved", (2, 1, 1, 1)), ("zero_bubble", "memory")])
def test_uneven_stages_do_what_one_process_does(schedule, split):
    layers = 5 if schedule == "interleaved" else 4
    found = on_ranks(observed, "pp2", "gpt2", "sgd", schedule, pipeline_layers=split, layers=layers)
    require_same(found, expected("gpt2", layers=layers))


def test_checkpoints_cross_between_splits(tmp_path):
    splits = [("pp2", (1, 3)), ("pp2", (3, 1)), ("pp3", (1, 2, 1)), ("one", "flops")]
    for step, (layout, split) in enumerate(splits):
        work = lambda run, step=step: (run.restore(tmp_path) if step else run).train(1)  # noqa: E731
        if step < 2:
            on_ranks(lambda run, work=work: work(run).save(tmp_path, asynchronous=False), layout, "gpt2", "adamw", pipeline_layers=split)
            continue
        found = on_ranks(lambda run, work=work: work(run).weights(), layout, "gpt2", "adamw", pipeline_layers=split, seed=9)
        merged = {name: tensor for each in found for name, tensor in each.items()}
        weights = expected("gpt2", "adamw")["weights"]
        assert largest_difference(without_key_biases(merged), without_key_biases(weights)) < 1e-9, (layout, split)


def settings(layers, ranks: int = 2) -> TrainerConfig:
    text = f"{{steps: 60, model: {{num_hidden_layers: 12}}, parallel: {{pipeline_parallel: {ranks}, pipeline_layers: {layers}}}}}"
    return parse_text(TrainerConfig, text)


@pytest.mark.parametrize("layers, told", [
    ("[5, 6]", r"pipeline_layers \[5, 6\], which are 11 layers, and model.num_hidden_layers 12. Change one of them."),
    ("[4, 4, 4]", r"pipeline_layers is \[4, 4, 4\], and there are 2 stages \(pipeline_parallel x pipeline_chunks\): give a count for each"),
    ("[12, 0]", r"pipeline_layers is \[12, 0\], and there are 2 stages .* at least 1, or flops or memory"),
    ("time", "pipeline_layers is 'time': give one of flops, memory or a list"),
])  # fmt: skip
def test_splits_that_cannot_be_are_refused_with_the_setting(layers, told):
    with pytest.raises(CourseError, match=told):
        settings(layers)


def test_the_report_says_which_blocks_each_stage_has():
    assert stages_summary(settings("[1, 11]")) == {"blocks by stage": "0, 1 to 11"}
    assert stages_summary(settings("[1, 11]", ranks=1)) == {}  # what LAYOUT=one makes of the same file
