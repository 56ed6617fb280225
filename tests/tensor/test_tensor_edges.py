"""Tensor parallelism at its edges: scores of a cut vocabulary, dropout, checkpoints between layouts, the meta device, what is refused."""

from dataclasses import replace

import pytest
import torch
from layout_runs import largest_difference
from sharded_runs import ADAMW, MUON
from tensor_runs import SGD, SMALL, batches, config_of, drawn, expected, make, require_same, run, with_dropout, without_noise

from shared.model.chunked_loss import token_log_probs
from shared.model.config import ModelConfig
from shared.model.embedding import TargetScores
from shared.model.feed_forward import FeedForward
from shared.model.transformer import PLAIN, TransformerModel
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.health.replicas import ReplicasDiffer
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import AXES, apply_parallel
from shared.parallel.tensor.axis import TensorParallel
from shared.parallel.tensor.layers import ShardDropout, VocabularyScores
from shared.parallel.tensor.operators import gather_sequence, join_sequence, scatter_sequence, split_sequence
from shared.parallel.tensor.shards import gradient_sums

# The vocabulary in parts.


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_scores_of_a_cut_vocabulary_are_those_of_the_whole(ranks, dtype, tolerance):
    generator = torch.Generator().manual_seed(3)
    logits = (10 * torch.randn(40, 23, generator=generator)).to(dtype)
    logits[3] = 200.0  # all tie, and exponentials overflow without the maximum
    logits[4, :12], logits[4, 12:] = -300.0, 60.0
    targets = torch.randint(23, (40,), generator=generator)
    targets[::7] = -100
    one = TargetScores(logits, targets)

    def work(world):
        slices = torch.arange(23).tensor_split(world.size)[world.rank]
        scores = VocabularyScores(logits[:, slices], targets, int(slices[0]), world)
        return *scores.cross_entropy(), scores.token_losses(), scores.gradient(), scores.count_correct()

    told = run_threads(work, ranks)
    loss, count = one.cross_entropy()
    gradient = torch.cat([each[3] for each in told], dim=-1)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, one.gradient(), rtol=tolerance, atol=tolerance)
    for each in told:
        torch.testing.assert_close(each[0], loss, rtol=max(tolerance, 1e-6), atol=0, check_dtype=False)
        assert each[2].dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(each[2], one.token_losses(), rtol=1e-5, atol=1e-5)
        assert each[1] == count and each[4] == one.count_correct()


def test_log_probabilities_of_tokens_and_their_gradients():
    batch = batches(0, 0, config_of("gpt2"))
    ids, targets = batch["input_ids"], batch["targets"]

    def of(model):
        found = model(ids, head_fn=lambda head, x: token_log_probs(head, x, targets, rows=16))
        found.square().sum().backward()
        return found.detach()

    plain = TransformerModel(config_of("gpt2")).double()
    whole = of(plain)

    def work(world):
        model = TransformerModel(config_of("gpt2")).double()
        TensorParallel().shape(model, Mesh(ParallelConfig(tensor_parallel=2), world))
        found = of(model)
        cut = model.stack.blocks["0"].attention.q_proj.weight
        expected = plain.stack.blocks["0"].attention.q_proj.weight.grad
        torch.testing.assert_close(cut.grad, cut.sharding.local(expected), rtol=1e-10, atol=1e-13)
        return found

    for found in run_threads(work, 2):
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first, last", [(0, 31), (-1, 30)])
def test_an_id_outside_of_the_vocabulary_is_an_error_as_in_one_process(first, last):
    def work(world):
        model = TransformerModel(config_of("llama"))
        TensorParallel().shape(model, Mesh(ParallelConfig(tensor_parallel=2), world))
        with pytest.raises(IndexError, match=f"from {first} to {last} in a vocabulary of 31"):
            model(torch.tensor([[first, last]]))

    run_threads(work, 2)


# Operators: each is the derivative of the other.


@pytest.mark.parametrize("whole_first, forward, back", [(True, split_sequence, join_sequence), (False, gather_sequence, scatter_sequence)])
def test_sequence_operators_undo_each_other(whole_first, forward, back):
    def work(world):
        x = torch.arange(24.0).view(2, 6, 2) if whole_first else torch.arange(8.0).view(2, 2, 2) + 100 * world.rank
        there = forward(x, world)
        again = back(there, world)
        return x, there, again

    told = run_threads(work, 3)
    for rank, (x, there, again) in enumerate(told):
        if whole_first:
            assert torch.equal(there, x[:, 2 * rank : 2 * rank + 2]) and torch.equal(again, x)
        else:
            assert torch.equal(there, torch.cat([each[0] for each in told], dim=1)) and torch.equal(again, 3 * x)


# Dropout.


def trained_with_dropout(world, layout: str) -> tuple:
    plain, state, named = with_dropout(world, layout)
    again, _, _ = with_dropout(world, layout, "full")
    replicated = {name: tensor.detach() for name, tensor in named.items() if not hasattr(tensor, "sharding")}
    return plain, again, state, replicated


def masks_of_a_cut_activation(world) -> tuple:
    layer = ShardDropout(0.5)
    layer.group = world
    torch.manual_seed(1)
    masks = [layer(torch.ones(200)) for _ in range(2)]
    layer.eval()
    return masks, layer(torch.ones(3)), torch.rand(3)


def masks_of_a_cut_model(world, by_sequence: bool) -> tuple:
    model = TransformerModel(replace(config_of("gpt2"), hidden_dropout=0.5, attention_dropout=0.5))
    TensorParallel().shape(model, Mesh(ParallelConfig(tensor_parallel=2, sequence_parallel=by_sequence), world))
    return drawn(model)


def everything(world) -> dict:
    found = {layout: trained_with_dropout(world, layout) for layout in ("tp2", "tp2_sp")}
    return found | {"masks": masks_of_a_cut_activation(world)} | {cut: masks_of_a_cut_model(world, cut) for cut in (False, True)}


@pytest.fixture(scope="module")
def by_two():
    """What each of two ranks draws. Threads share one generator, so they are processes."""
    from shared.parallel.processes.launch import run_processes

    return run_processes(everything, 2, timeout=300)


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp"])
def test_dropout_leaves_the_ranks_generators_and_replicated_weights_equal(by_two, layout):
    first, second = (found[layout] for found in by_two)
    assert torch.equal(first[2], second[2]), "what is drawn next is the same on both"
    assert first[3] and all(torch.equal(first[3][name], second[3][name]) for name in first[3])
    assert largest_difference(without_noise(first[0]), without_noise(first[1])) < 1e-12, "a block that is run again draws the same masks"


def test_ranks_draw_masks_of_their_own_where_activations_are_cut(by_two):
    (first, kept, after), (second, _, after_too) = (found["masks"] for found in by_two)
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[0], first[1])
    assert set(first[0].tolist()) == {0.0, 2.0} and torch.equal(kept, torch.ones(3)) and torch.equal(after, after_too)


@pytest.mark.parametrize("by_sequence", [False, True])
def test_a_cut_models_layers_draw_masks_of_their_own_where_ranks_have_other_numbers(by_two, by_sequence):
    """Attention always, since each rank has other heads; the stream where it is cut, and else all ranks must draw the same."""
    (stream, mixed, after), (other_stream, other_mixed, other_after) = (found[by_sequence] for found in by_two)
    assert torch.equal(stream, other_stream) is not by_sequence and not torch.equal(mixed, other_mixed) and torch.equal(after, other_after)


# Checkpoints, the meta device, export.

LAYOUTS = ("one", "tp2", "tp4_sp", "dp2_tp2_zero1", "fsdp2_tp2", "fsdp2")


def on_ranks(layout: str, work, **settings) -> list:
    ranks = parse_layout(layout).ranks
    on_rank = lambda world: work(make(world, layout, "gpt2", **settings))  # noqa: E731
    return [on_rank(SingleRankCommunicator())] if ranks == 1 else run_threads(on_rank, ranks)


@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_layout_resumes_every_other_layouts_checkpoint(writer, optimizer, tmp_path):
    """The vocabulary of 31 tokens is cut unevenly, and tied."""
    [whole] = on_ranks("one", lambda run: run.train(3).weights(), optimizer=optimizer)
    on_ranks(writer, lambda run: run.train(2).save(tmp_path, asynchronous=False), optimizer=optimizer)
    readers = LAYOUTS if optimizer is ADAMW else [LAYOUTS[(LAYOUTS.index(writer) + 1) % len(LAYOUTS)]]
    for reader in readers:
        for found in on_ranks(reader, lambda run: run.restore(tmp_path).train(1).weights(), optimizer=optimizer, seed=9):
            assert largest_difference(without_noise(found), without_noise(whole)) < 1e-9, f"{writer} to {reader}"


@pytest.mark.parametrize("layout", ["tp2", "fsdp2_tp2"])
@pytest.mark.parametrize("family", ["gpt2", "mqa", "t5"])
def test_a_model_on_the_meta_device_starts_with_the_bits_of_a_plain_one(family, layout):
    plain = TransformerModel(config_of(family), seed=4).state_dict()

    def work(world):
        with torch.device("meta"):
            model = TransformerModel(config_of(family))
        mesh = Mesh(parse_layout(layout), world)
        strategy = apply_parallel(model, mesh, SGD, seed=4, axes=(*AXES, TensorParallel()))
        return {name: tensor for name, tensor in strategy.whole_weights() if tensor is not None}, strategy.full_weights()

    (first, whole), *_ = run_threads(work, parse_layout(layout).ranks)
    assert first and all(torch.equal(tensor, plain[name]) for name, tensor in first.items())
    assert whole.keys() == first.keys()


# What is refused.


class Unknown(FeedForward):
    pass


@pytest.mark.parametrize(
    "config, ranks, builders, sentence",
    [
        ({"num_attention_heads": 2}, 4, {}, r"tensor_parallel 4 does not divide num_attention_heads 2: give one of \[1, 2\]"),
        ({"intermediate_size": 25}, 2, {}, "does not divide intermediate_size 25"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48}, 4, {}, "heads 6: one must divide the other"),
        ({}, 2, {"feed_forward": lambda config, builders, layer: Unknown(config, builders)}, "blocks.0.feed_forward, a Unknown"),
        ({"vocab_size": 3}, 4, {}, "3 tokens cannot be cut over 4 ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(config, ranks, builders, sentence):
    def work(world):
        model = TransformerModel(ModelConfig(**SMALL | config), replace(PLAIN, **builders))
        with pytest.raises(ValueError, match=sentence):
            TensorParallel().shape(model, Mesh(ParallelConfig(tensor_parallel=ranks), world))

    run_threads(work, ranks)


@pytest.mark.parametrize("length, lengths", [(7, "6 or 8"), (1, "2")])
def test_a_sequence_that_does_not_divide_is_refused_with_lengths_that_do(length, lengths):
    def work(world):
        model = TransformerModel(config_of("llama"))
        TensorParallel().shape(model, Mesh(ParallelConfig(tensor_parallel=2, sequence_parallel=True), world))
        with pytest.raises(ValueError, match=f"over 2 ranks, and {length} positions do not divide by that: give {lengths}, or"):
            model(torch.zeros(1, length, dtype=torch.int64))

    run_threads(work, 2)


# Wrong on purpose: the comparison with one process must see each.


def nothing_summed(names, sequence_parallel, copied_heads):
    return {}


def everywhere(x, weight, bias, combine):
    return combine(torch.nn.functional.linear(x, weight, bias))


def bias_summed_too(names, sequence_parallel, copied_heads):
    """Under sequence parallelism row biases see this rank's positions; without it every rank has their whole gradient."""
    return gradient_sums(names, True, copied_heads)


@pytest.mark.parametrize("place, wrong, layout, family", [
    ("axis.gradient_sums", nothing_summed, "tp2_sp", "llama"), ("axis.gradient_sums", nothing_summed, "tp2", "qwen3"),
    ("axis.gradient_sums", nothing_summed, "tp2", "bert"), ("axis.gradient_sums", nothing_summed, "tp2", "mqa"),
    ("axis.gradient_sums", bias_summed_too, "tp2", "gpt2"), ("layers.row_linear", everywhere, "tp2", "gpt2"),
])  # fmt: skip
def test_a_wrong_cut_is_seen(place, wrong, layout, family, monkeypatch):
    monkeypatch.setattr(f"shared.parallel.tensor.{place}", wrong)
    with pytest.raises((AssertionError, ReplicasDiffer)):
        require_same(run(layout, family), expected(family))
