"""Floor 6: a block that is computed again gives the same gradients, bit for bit, and leaves nothing but its input behind."""

from dataclasses import replace

import pytest
import torch
from sharded_runs import SMALL, batch_of, build, relative, translation_objective
from test_fsdp import GPT2, T5
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared.model.chunked_loss import packed_next_token_objective
from shared.loss import next_token_objective
from shared.model.transformer import run_block
from shared.parallel.data.activation_checkpointing import CheckpointedBlock, apply_activation_checkpointing, random_numbers_from
from shared.parallel.data.activation_checkpointing import random_state_of, recompute, run_block_fully

HOW = ["full", "selective"]


def gradients(model: nn.Module, how: str, objective=next_token_objective) -> dict:
    """Loss and gradients of one batch, with random numbers from the same seed; and the number that is drawn next."""
    apply_activation_checkpointing(model, how)
    model.zero_grad()
    torch.manual_seed(5)
    loss = objective(model, batch_of(0, 0)).loss_sum
    after_forward = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), after_forward)  # whoever draws next sees nothing of the second computation
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def require_same(here: dict, there: dict) -> None:
    assert here.keys() == there.keys()
    for name, value in there.items():
        same = here[name] is value if value is None or here[name] is None else torch.equal(here[name], value)
        assert same, name


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, hidden_dropout=0.2, attention_dropout=0.1), GPT2, replace(SMALL, position="alibi")],
    ids=["llama", "dropout", "gpt2, tied", "alibi"],
)
def test_gradients_are_the_same_bit_for_bit(how, config):
    expected = gradients(build(config), "none")
    require_same(gradients(build(config), how), expected)
    if config.hidden_dropout:  # the control: dropout that is drawn anew gives others
        other = build(config)
        other.stack.run_block = lambda block, x, context: checkpoint(block, x, context, use_reentrant=False, preserve_rng_state=False)
        with pytest.raises(AssertionError):
            require_same(gradients(other, "none"), expected)


@pytest.mark.parametrize("how", HOW)
def test_an_encoder_decoder_is_differentiated_through_its_encoder_and_its_biases(how):
    """To rounding: what flows to the encoder's output is added up block by block, in place of product by product."""
    found, expected = gradients(build(T5), how, translation_objective), gradients(build(T5), "none", translation_objective)
    assert found.keys() == expected.keys() and all(relative(found[name], expected[name]) < 1e-12 for name in expected)


@pytest.mark.parametrize("how", HOW)
def test_under_autocast_it_is_computed_again_in_the_same_precision(how):
    def objective(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return next_token_objective(model, batch)

    config = replace(SMALL, hidden_dropout=0.2)
    expected = gradients(build(config, dtype=torch.float32), "none", objective)
    require_same(gradients(build(config, dtype=torch.float32), how, objective), expected)
    assert not torch.equal(expected["loss"], gradients(build(config, dtype=torch.float32), "none")["loss"])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("frozen", ["embedding", "q_proj", "blocks.0"])
def test_inputs_and_weights_that_need_no_gradient(how, frozen):
    """With a frozen embedding, the first block's input wants no gradient, and its weights do."""
    want = lambda name: frozen in name  # noqa: E731
    expected = gradients(build(SMALL, want), "none")
    assert any(value is None for value in expected.values())
    require_same(gradients(build(SMALL, want), how), expected)


@pytest.mark.parametrize("how", HOW)
def test_gradients_that_are_made_in_the_forward_pass_are_not_disturbed(how):
    require_same(gradients(build(SMALL), how, packed_next_token_objective), gradients(build(SMALL), "none", packed_next_token_objective))


@pytest.mark.parametrize("how", HOW)
def test_each_parameter_hears_of_its_gradient_once_for_each_backward_pass(how):
    model, calls = build(GPT2), []
    apply_activation_checkpointing(model, how)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    for _ in range(2):
        next_token_objective(model, batch_of(0, 0)).loss_sum.backward()
    assert sorted(calls) == sorted(2 * [name for name, _ in model.named_parameters()])


def test_an_evaluation_computes_each_block_once():
    for how in HOW:
        model, calls = build(SMALL), []
        apply_activation_checkpointing(model, how)
        model.stack.blocks["1"].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with torch.no_grad():
            next_token_objective(model, batch_of(0, 0))
        assert len(calls) == 1


# What is kept.


def kept_by(run) -> list[torch.Tensor]:
    """The tensors that autograd keeps of a computation, each storage once."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    kept["result"] = result  # alive until here, so that no storage is used twice
    return [tensor for name, tensor in kept.items() if name != "result"]


def test_nothing_but_the_input_is_kept():
    model = build(SMALL)
    context = model.stack.context(torch.arange(7), torch.arange(7), 7)
    x = torch.randn(2, 7, 20, dtype=torch.float64, requires_grad=True)
    block = model.stack.blocks["0"]
    assert len(kept_by(lambda: block(x, context))) > 20
    (only,) = kept_by(lambda: run_block_fully(run_block, block, x, context))
    assert only.data_ptr() == x.data_ptr()


def test_a_function_of_several_inputs_and_of_whole_numbers():
    table, x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows, frozen = torch.tensor([0, 3, 3, 1]), torch.randn(4, 3, dtype=torch.float64)
    run = lambda rows, x, frozen: table[rows] * x.sin() + frozen  # noqa: E731
    upstream = torch.randn(4, 3, dtype=torch.float64)
    expected = torch.autograd.grad(run(rows, x, frozen), [x, table], upstream)
    found = torch.autograd.grad(CheckpointedBlock.apply(run, 3, rows, x, frozen, table), [x, table], upstream)
    assert all(map(torch.equal, found, expected))
    with pytest.raises(RuntimeError, match="once_differentiable"):  # a derivative of the gradient is refused, not wrong
        again = CheckpointedBlock.apply(run, 3, rows, x, frozen, table)
        torch.autograd.grad(again, x, upstream.clone().requires_grad_(), create_graph=True)[0].sum().backward()


def test_a_parameter_that_is_not_used_gets_no_gradient():
    weight, idle = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    found = recompute(lambda x: x * weight, [x], [weight, idle], torch.ones(2), random_state_of(x))
    assert found[2] is None and all(gradient is not None for gradient in found[:2]) and weight.grad is None


def test_recomputation_replays_random_numbers_and_restores_the_generators():
    torch.manual_seed(1)
    state = random_state_of(torch.zeros(1))
    first = torch.rand(3)
    expected = torch.rand(3)
    torch.manual_seed(1)
    torch.rand(3)
    with pytest.raises(ZeroDivisionError), random_numbers_from(state):
        assert torch.equal(torch.rand(3), first)
        raise ZeroDivisionError
    assert torch.equal(torch.rand(3), expected)
