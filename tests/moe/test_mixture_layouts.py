"""Mixtures of experts under accumulation, data parallelism, FSDP, pipelines, recomputation and a loss scale: one process's training."""

from dataclasses import replace

import pytest
import torch
from mixture_runs import EXPERTS, MODEL, MixtureRun, alone, on_ranks, require_same
from sharded_runs import batch_of

from shared.model.chunked_loss import packed_next_token_objective
from shared.loop import accumulate_gradients
from shared.model.transformer import TransformerModel
from shared.moe import experts
from shared.moe.builders import MIXTURE
from shared.moe.layer import mixture_layers
from shared.optim.routing import route
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.parallel.data.activation_checkpointing import apply_activation_checkpointing
from shared.parallel.parallelize import apply_parallel
from shared.parallel.mesh import Mesh

LAYOUTS = {
    "one, recomputed": ParallelConfig(activation_checkpointing="full"),
    "one, selectively": ParallelConfig(activation_checkpointing="selective"),
    "dp2": ParallelConfig(data_parallel=2),
    "dp2_zero1": ParallelConfig(data_parallel=2, zero=1),
    "dp3_zero2, recomputed": ParallelConfig(data_parallel=3, zero=2, activation_checkpointing="full"),
    "fsdp2": ParallelConfig(fully_sharded=2),
    "fsdp3, recomputed": ParallelConfig(fully_sharded=3, activation_checkpointing="full"),
    "dp2_fsdp2, selectively": ParallelConfig(data_parallel=2, fully_sharded=2, activation_checkpointing="selective"),
    "pp2": ParallelConfig(pipeline_parallel=2),
    "pp2_dp2, recomputed": ParallelConfig(pipeline_parallel=2, data_parallel=2, activation_checkpointing="full"),
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_trains_like_one_process(layout, optimizer):
    require_same(on_ranks(layout, optimizer), alone(optimizer))


@pytest.mark.parametrize("layout", [ParallelConfig(), LAYOUTS["fsdp3, recomputed"], LAYOUTS["pp2"]], ids=["one", "fsdp3", "pp2"])
def test_a_loss_scale_reaches_the_routers(layout):
    require_same(on_ranks(layout, scale=1024.0), alone())


def test_the_biases_move_once_a_step():
    """By the whole step's load: in three steps each bias has moved by at most three times the rate, the same on all ranks."""
    one = alone()
    for block in (1, 2, 3):
        expected = torch.zeros(4, dtype=torch.float64)
        for loads in one["loads"]:
            load = loads[block].double()
            expected += 0.02 * torch.sign(load.mean() - load)
        torch.testing.assert_close(one["weights"][f"stack.blocks.{block}.feed_forward.router.bias"], expected, rtol=1e-12, atol=1e-15)
        assert expected.any()


def test_counting_begins_again_after_each_step():
    run = MixtureRun(SingleRankCommunicator(), ParallelConfig()).train(2)
    assert all(layer.load is None for layer in mixture_layers(run.plain))
    assert not all(torch.equal(load, run.loads[1][block]) for block, load in run.loads[0].items())


@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 7), (2, 3, 4, 3)])
@pytest.mark.parametrize("how", ["none", "full"])
def test_gradients_and_loads_are_those_of_any_split_into_micro_batches(sizes, how):
    found = []
    for parts in ((12,), sizes):
        model = TransformerModel(MODEL, MIXTURE, seed=2).double()
        apply_activation_checkpointing(model, how if parts == sizes else "none")
        split = {name: value.split(parts) for name, value in batch_of(0, 0).items()}
        rows = [{name: values[part] for name, values in split.items()} for part in range(len(parts))]
        accumulate_gradients(model, rows, packed_next_token_objective)
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {
            f"load {layer.layer}": layer.load.double() for layer in mixture_layers(model)
        })  # fmt: skip
    for name, value in found[1].items():
        torch.testing.assert_close(value, found[0][name], rtol=1e-9, atol=1e-12, msg=name)


def test_evaluation_counts_no_load():
    model = TransformerModel(MODEL, MIXTURE).eval()
    with torch.no_grad():
        model(batch_of(0, 0)["input_ids"])
    assert all(layer.load is None for layer in mixture_layers(model))


def test_the_comparison_notices_a_loss_that_is_a_mean(monkeypatch):
    """The balance loss over a micro-batch, as most codes have it, is another objective on every layout."""
    from shared.moe import experts, layer

    pooled = layer.balance_loss
    monkeypatch.setattr(layer, "balance_loss", lambda p, e, v, over_row: pooled(*(x.flatten(0, 1).unsqueeze(0) for x in (p, e, v))))
    one, two = on_ranks(ParallelConfig())[0], on_ranks(ParallelConfig(data_parallel=2))
    with pytest.raises(AssertionError):
        require_same(two, one)


def test_what_a_router_counts_in_its_forward_pass_is_counted_twice_under_recomputation():
    """The negative control of counting in the backward pass."""
    run, calls = MixtureRun(SingleRankCommunicator(), ParallelConfig(activation_checkpointing="selective")), []
    for layer in mixture_layers(run.plain):
        layer.router.register_forward_hook(lambda *_: calls.append(1))
    run.train(1)
    assert len(calls) == 2 * run.microbatches * len(mixture_layers(run.plain))


@pytest.mark.parametrize(
    "dtype, amd, kernel",
    [(torch.bfloat16, False, "_grouped_mm"), (torch.float32, False, "_grouped_mm"), (torch.float32, True, "mkldnn_linear")],
    ids=str,
)
def test_selective_recomputation_keeps_the_experts_products(dtype, amd, kernel, monkeypatch):
    """Three products in each of three layers, which full recomputation makes a second time; oneDNN's are one for each expert."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.made += function == getattr(torch.ops.aten, kernel).default
            return function(*args, **kwargs or {})

    monkeypatch.setattr(experts, "processor_is_amds", lambda: amd)
    backward, gradients = {}, {}
    for how in ("none", "selective", "full"):
        model = TransformerModel(MODEL, MIXTURE)
        apply_activation_checkpointing(model, how)
        with Products() as forward, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = packed_next_token_objective(model, batch_of(0, 0)).loss_sum
        with Products() as products:
            loss.backward()
        backward[how], gradients[how] = products.made, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert backward["none"] == backward["selective"] == backward["full"] - forward.made == 2 * forward.made > 0, (forward.made, backward)
    assert forward.made >= (9 if kernel == "_grouped_mm" else 18)
    torch.testing.assert_close(gradients["selective"], gradients["none"], rtol=0, atol=0)


def test_fully_sharded_routers_are_gathered_in_their_own_precision():
    """A run in bfloat16 rounds the experts that it gathers, and no router and no bias."""

    def on_rank(world):
        config = replace(MODEL, initializer_range=0.02)
        model = TransformerModel(config, MIXTURE, seed=4)
        mixture_layers(model)[0].router.bias.data.fill_(0.1234567)
        plain = {name: p.detach().clone() for name, p in model.named_parameters()}
        strategy = apply_parallel(model, Mesh(ParallelConfig(fully_sharded=2), world), dtype=torch.bfloat16)
        seen = {}
        layer = mixture_layers(model)[0]
        layer.router.register_forward_hook(lambda module, inputs, output: seen.update({
            name: p.detach().clone() for name, p in module.named_parameters()
        }))  # fmt: skip
        layer.experts.up_proj.register_forward_hook(lambda module, inputs, output: seen.update(expert=module.weight.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            strategy.model(batch_of(0, 0)["input_ids"])
        same = [torch.equal(seen[name], plain[f"stack.blocks.1.feed_forward.router.{name}"]) for name in ("weight", "bias")]
        return same, seen["expert"]

    assert run_threads(on_rank, 2) == [([True, True], torch.bfloat16)] * 2


def test_muon_takes_experts_as_matrices_and_routers_too():
    routes = {name: each.rule for each in route(TransformerModel(MODEL, MIXTURE), "muon", no_decay=[], to_adamw=[]) for name in each.names}
    block = "stack.blocks.1.feed_forward."
    assert {routes[block + name] for name in ("experts.up_proj.weight", "router.weight", "shared_experts.up_proj.weight")} == {"muon"}
    assert block + "router.bias" not in routes, "no optimizer moves the bias of the choice"


def test_muon_steps_each_expert_as_a_matrix_of_its_own():
    """One expert's gradient changes that expert's update and no other's."""
    moved = []
    for factor in (1.0, 7.0):
        run = MixtureRun(SingleRankCommunicator(), ParallelConfig(), "muon")
        weight = run.plain.stack.blocks["1"].feed_forward.experts.up_proj.weight
        before = weight.detach().clone()
        generator = torch.Generator().manual_seed(0)
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.grad[2] = weight.grad[2].flip(0) * factor + (factor - 1) * torch.eye(16, 24)
        run.optimizer.step()
        moved.append(weight.detach() - before)
    same = (moved[0] - moved[1]).abs().amax(dim=(1, 2)) < 1e-12
    assert same.tolist() == [True, True, False, True]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["grouped", "batched", "loop"])
def test_a_step_in_16_bits_has_the_gradients_of_float32_up_to_rounding(precision, implementation):
    found = []
    config = replace(MODEL, experts=replace(EXPERTS, implementation=implementation, num_experts_per_tok=4, capacity_factor=None))
    for enabled in (False, True):
        model = TransformerModel(config, MIXTURE, seed=2)
        with torch.autocast("cpu", precision, enabled=enabled):
            loss = packed_next_token_objective(model, batch_of(0, 0)).loss_sum
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, value in found[1].items():
        assert (value - found[0][name]).norm() < 0.06 * found[0][name].norm(), name
