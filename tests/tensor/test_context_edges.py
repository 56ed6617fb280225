"""Context parallelism at its edges: evaluation, generation, activations kept, checkpoints between layouts, loss scale, what is refused."""

from dataclasses import replace

import pytest
import torch
from context_runs import SEQ, batches, config_of, expected, make, packed_batches, run
from layout_runs import largest_difference
from rich.console import Console
from sharded_runs import ADAMW, MUON
from tensor_runs import require_same, without_noise

from shared.engine.config import EngineConfig
from shared.engine.engine import RuntimeEngine
from shared.loop import accumulate_gradients, evaluate
from shared.model.attention import Attention
from shared.model.chunked_loss import packed_next_token_objective
from shared.model.transformer import PLAIN, TransformerModel
from shared.optim.loss_scale import LossScaler
from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig, parse_layout
from shared.parallel.context.axis import ContextParallel
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import AXES, apply_parallel
from shared.parallel.processes.launch import run_processes

AXES = (*AXES, ContextParallel())


def on_ranks(layout: str, family: str, work, **settings) -> list:
    ranks = parse_layout(layout).ranks
    on_rank = lambda world: work(make(world, layout, family, **settings))  # noqa: E731
    return [on_rank(SingleRankCommunicator())] if ranks == 1 else run_threads(on_rank, ranks)


def strategy_of(world, family: str = "llama", **layout):
    return apply_parallel(TransformerModel(config_of(family)).double(), Mesh(ParallelConfig(**layout), world), axes=AXES)


# Evaluation and generation.


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_evaluation_adds_up_what_the_ranks_have_seen(family, tmp_path):
    held_out = [packed_batches(0, number, config_of(family)) for number in range(2)]
    whole = evaluate(TransformerModel(config_of(family)).double(), held_out, packed_next_token_objective)

    def work(world):
        strategy = strategy_of(world, family, context_parallel=2)
        optimizer = torch.optim.SGD(strategy.optim_params.parameters(), lr=0.1)
        config = EngineConfig(output=tmp_path / str(world.rank), device="cpu")
        engine = RuntimeEngine(
            strategy, optimizer, config, objective=packed_next_token_objective, callbacks=[], console=Console(quiet=True)
        )
        engine.val_loader = held_out
        engine.evaluate()
        return engine.validation

    for found in run_threads(work, 2):
        torch.testing.assert_close(found.loss_sum.double(), whole.loss_sum.double(), rtol=1e-12, atol=0)
        assert found.token_count == whole.token_count and found.metrics["correct"] == whole.metrics["correct"]


def test_outside_of_an_objective_each_rank_computes_the_whole_sequence():
    ids = batches(0, 0, config_of("bloom"))["input_ids"][:, :7]  # of no length that could be shared out
    plain = TransformerModel(config_of("bloom")).double().eval()(ids)

    def work(world):
        strategy = strategy_of(world, "bloom", context_parallel=2)
        with pytest.raises(ValueError, match=r"a share of each sequence: call strategy.objective"):
            strategy.model.train()(ids)
        strategy.objective(packed_next_token_objective)(strategy.model, batches(0, 0, config_of("bloom")))
        world.trace.clear()
        return strategy.model.eval()(ids), world.trace.calls()["send", "cp"]

    for logits, sends in run_threads(work, 2):
        assert torch.equal(logits, plain) and sends == 0


def compiled(world):
    made = make(world, "cp2", "gqa", packed=True)
    made.parallel.model.compile(backend="eager")  # the compiler's front, without its back, which needs a C++ compiler
    made.train(2)
    return made.totals.loss_sum, made.weights()


@pytest.mark.slow  # the compiler's front alone takes ten seconds to import
def test_a_compiled_model_trains_as_one_that_is_not():
    [(loss, whole)] = on_ranks("one", "gqa", lambda run: (run.train(2).totals.loss_sum, run.weights()), packed=True)
    for found, weights in run_processes(compiled, 2, timeout=300):
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
        assert largest_difference(weights, whole) < 1e-9


@pytest.mark.parametrize("family", ["gqa", "qwen3"])  # the second has norms of queries and keys, which autocast leaves in float32
def test_under_autocast_keys_travel_in_16_bits_and_their_gradients_in_32(family):
    config, objective = config_of(family), autocast_objective(packed_next_token_objective, "bfloat16")
    batch, plain = packed_batches(0, 0, config), TransformerModel(config)
    objective(plain, batch).loss_sum.backward()

    def work(world):
        strategy = apply_parallel(TransformerModel(config), Mesh(ParallelConfig(context_parallel=2), world), axes=AXES)
        totals = strategy.runner(accumulate_gradients)(strategy.model, [batch], strategy.objective(objective))
        strategy.reducer(strategy.model, totals)
        return world.trace.bytes()["send", "cp"], {name: p.grad for name, p in strategy.model.named_parameters()}

    told = run_threads(work, 2)
    numbers = 2 * len(batch["input_ids"]) * config.num_key_value_heads * config.resolved().head_dim * SEQ // 4
    assert sum(sends for sends, _ in told) == config.num_hidden_layers * 3 * numbers * (2 + 2 + 4)  # 3 hops; forward, backward
    for _, gradients in told:
        for name, parameter in plain.named_parameters():
            assert (gradients[name] - parameter.grad).norm() < 0.02 * parameter.grad.norm(), name


# What a rank keeps for the backward pass.


def kept_bytes(layout: str, family: str, length: int = 64, **settings) -> list[int]:
    """Bytes of the storages that autograd keeps of a forward pass, without weights and what is as large on every rank."""

    def long_batch(step, microbatch, config):
        ids = torch.randint(config.vocab_size, (12, length + 1), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}

    def work(run):
        weights = {tensor.untyped_storage().data_ptr() for tensor in run.plain.parameters()}
        kept = {}

        def keep(tensor):
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run.objective(run.parallel.model, long_batch(0, 0, run.plain.config))
        of_head = sum(p.numel() for p in run.plain.head.parameters()) * 8  # the gradient that the chunked loss keeps
        return sum(size for size, _ in kept.values()) - of_head

    return on_ranks(layout, family, work, **settings)


@pytest.mark.parametrize("family, least", [("llama", 0.99), ("qwen3", 0.99), ("mistral", 0.9)])
def test_activations_fall_with_the_ranks(family, least):
    """One process keeps repeated keys and values where heads share them and a tensor masks, as mistral's window does; a ring does not."""
    [whole] = kept_bytes("one", family)
    for ranks in (2, 4):
        for found in kept_bytes(f"cp{ranks}", family):
            assert least * whole / ranks <= found <= 1.05 * whole / ranks, ranks


# Layouts that continue each other's runs; the loss scale.

LAYOUTS = ("one", "cp2", "dp2_cp2_zero1", "fsdp2_cp2", "cp2_tp2_sp", "dp2")


@pytest.mark.parametrize("writer, reader", [("cp2", "one"), ("dp2", "cp2"), ("fsdp2_cp2", "cp2_tp2_sp"), ("cp2_tp2_sp", "dp2_cp2_zero1")])
def test_a_layout_resumes_another_ones_checkpoint(writer, reader, tmp_path):
    resumed(writer, [reader], ADAMW, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_layout_resumes_every_other_layouts_checkpoint(writer, optimizer, tmp_path):
    resumed(writer, LAYOUTS, optimizer, tmp_path)


def resumed(writer: str, readers, optimizer, folder) -> None:
    [whole] = on_ranks("one", "gpt2", lambda run: run.train(3).weights(), optimizer=optimizer)
    on_ranks(writer, "gpt2", lambda run: run.train(2).save(folder, asynchronous=False), optimizer=optimizer)
    for reader in readers:
        for found in on_ranks(reader, "gpt2", lambda run: run.restore(folder).train(1).weights(), optimizer=optimizer, seed=9):
            assert largest_difference(without_noise(found), without_noise(whole)) < 1e-9, f"{writer} to {reader}"


def test_a_loss_scale_changes_nothing():
    require_same(run("cp2", "gqa", scaler=LossScaler), expected("gqa"))


# What is refused.


class Unknown(Attention):
    pass


def refuse(world, config, builders=PLAIN):  # noqa: B008 (frozen)
    model = TransformerModel(config, builders)
    ContextParallel().shape(model, Mesh(ParallelConfig(context_parallel=2), world))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"architecture": "encoder-decoder"}, "model.architecture is encoder-decoder, which has two sequences to share out"),
        ({"position": "relative"}, "model.position is relative, a learned bias"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, and the ring draws no dropout: .* set parallel.context_parallel to 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_is_refused(changes, sentence):
    def work(world):
        with pytest.raises(ValueError, match=sentence):
            refuse(world, replace(config_of("llama"), **changes))

    run_threads(work, 2)


def test_an_unknown_attention_is_refused():
    def work(world):
        builders = replace(PLAIN, attention=lambda config, builders, layer, cross: Unknown(config, builders, layer, cross))
        with pytest.raises(ValueError, match="does not know Unknown, the attention of block 0"):
            refuse(world, config_of("llama"), builders)

    run_threads(work, 2)


@pytest.mark.parametrize("length, lengths", [(7, "4 or 8"), (10, "8 or 12"), (3, "4")])
def test_a_sequence_that_does_not_divide_is_refused_with_lengths_that_do(length, lengths):
    def work(world):
        strategy = strategy_of(world, context_parallel=2)
        batch = {name: tensor[:, :length] for name, tensor in batches(0, 0, config_of("llama")).items()}
        objective = strategy.objective(packed_next_token_objective)
        sentence = f"has {length} positions, and parallel.context_parallel 2 cuts it into 4 .* give {lengths}, or"
        with pytest.raises(ValueError, match=sentence):
            objective(strategy.model, batch)

    run_threads(work, 2)


def test_more_positions_than_are_learned_are_refused_as_in_one_process():
    def work(world):
        strategy = strategy_of(world, "bert", context_parallel=2)
        batch = {name: torch.cat([tensor, tensor], dim=1) for name, tensor in batches(0, 0, config_of("bert")).items()}
        with pytest.raises(ValueError, match=f"has {2 * SEQ} positions, and only {SEQ} are learned"):
            strategy.objective(packed_next_token_objective)(strategy.model, batch)

    run_threads(work, 2)


# Wrong on purpose: the comparison with one process must see it.


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_that_count_from_0_on_each_rank_are_seen(family, monkeypatch):
    monkeypatch.setattr("shared.parallel.context.axis.with_positions", lambda share: lambda model, inputs, options: (inputs, options))
    found = run("cp2", family)
    with pytest.raises(AssertionError):
        require_same(found, expected(family))


def test_a_batch_of_whole_sequences_on_each_rank_is_seen(monkeypatch):
    monkeypatch.setattr("shared.parallel.context.zigzag.READ_WHOLE", ("documents", "input_ids", "targets", "positions"))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        require_same(run("cp2", "llama"), expected("llama"))
