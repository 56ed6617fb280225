"""Auxiliary losses of layers, in little what chapter 09's router has: exact under checkpointing, accumulation, splits and a loss scale."""

from dataclasses import replace

import pytest
import torch
from balanced_experts import COEFFICIENT, CONFIG, BalancedExperts, balance_loss, batch_of
from torch import Tensor, nn

from shared.data.objectives import encoder_decoder_objective, masked_language_objective
from shared.model.chunked_loss import packed_next_token_objective
from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.model.context import AttentionContext, add_auxiliary_loss
from shared.model.feed_forward import build_feed_forward
from shared.model.transformer import PLAIN, TransformerModel, keep_part
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.parallel.data.activation_checkpointing import apply_activation_checkpointing


def build(config: ModelConfig = CONFIG, how: str = "none") -> TransformerModel:
    model = TransformerModel(config, replace(PLAIN, feed_forward=BalancedExperts), seed=1).double()
    apply_activation_checkpointing(model, how)
    return model


def losses_inside(model: TransformerModel) -> Tensor:
    return sum(block.feed_forward.loss for block in model.stack.blocks.values())


def expected_gradients(config: ModelConfig, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Both losses added up in one graph, without any operation between them."""
    plain = TransformerModel(config, replace(PLAIN, feed_forward=Detached), seed=1).double()
    total = packed_next_token_objective(plain, batch).loss_sum + losses_inside(plain)
    gradients = torch.autograd.grad(total, list(plain.parameters()))
    return dict(zip((name for name, _ in plain.named_parameters()), gradients, strict=True))


class Detached(BalancedExperts):
    """The same without the operation: its loss is kept in an attribute, which a plain forward pass may do."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        shares = self.router(x).softmax(dim=-1)
        self.loss = COEFFICIENT * balance_loss(shares, context.valid)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def require_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_an_auxiliary_loss_has_its_gradient_under_activation_checkpointing(how):
    batch = batch_of(3)
    expected = expected_gradients(CONFIG, batch)
    model = build(how=how)
    totals = accumulate_gradients(model, [batch], packed_next_token_objective)
    require_gradients(model, expected)
    assert totals.loss_sum.item() == packed_next_token_objective(build(), batch).loss_sum.item(), "the loss itself is not in the totals"


@pytest.mark.parametrize("how", ["none", "full", "selective"])
@pytest.mark.parametrize("objective", [packed_next_token_objective, next_token_objective])
def test_a_loss_scale_reaches_an_auxiliary_loss_with_any_objective(objective, how):
    """Chapter 01's objective does not know what counts, and the scale reaches the layers all the same."""
    batch, scaler = batch_of(3), LossScaler(LossScaleConfig(initial=1024.0))
    model, unscaled = build(how=how), build()
    scaler.scaled(accumulate_gradients)(model, [batch], objective)
    accumulate_gradients(unscaled, [batch], objective)
    require_gradients(model, {name: parameter.grad * 1024 for name, parameter in unscaled.named_parameters()})
    assert model.loss_scale == 1.0, "afterwards nothing is scaled"


def test_a_loss_scale_is_taken_back_where_a_step_fails():
    model, scaler = build(), LossScaler(LossScaleConfig(initial=8.0))

    def broken(model, batch):
        assert model.loss_scale == 8.0
        raise RuntimeError("no more memory")

    with pytest.raises(RuntimeError, match="no more memory"):
        scaler.scaled(accumulate_gradients)(model, [batch_of(1)], broken)
    assert model.loss_scale == 1.0


def test_a_loss_scale_reaches_a_model_inside_a_wrapper():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    batch, inner, plain = batch_of(2), build(), build()
    LossScaler(LossScaleConfig(initial=16.0)).scaled(accumulate_gradients)(Wrapper(inner), [batch], packed_next_token_objective)
    accumulate_gradients(plain, [batch], packed_next_token_objective)
    require_gradients(inner, {name: parameter.grad * 16 for name, parameter in plain.named_parameters()})


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (2, 4), (5, 1)])
@pytest.mark.parametrize("how", ["none", "full"])
def test_a_balance_per_row_is_the_same_however_a_batch_is_split(sizes, how):
    """Micro-batches, ranks and stages add up: per row times the row's tokens is a sum over tokens, as the loss is."""
    batch, start, parts = batch_of(6), 0, []
    for size in sizes:
        parts.append({name: value[start : start + size] for name, value in batch.items()})
        start += size
    model = build(how=how)
    accumulate_gradients(model, parts, packed_next_token_objective)
    require_gradients(model, expected_gradients(CONFIG, batch))


def test_tokens_that_do_not_count_have_no_part_in_the_balance():
    """What stands behind the last token that counts changes nothing: padding, for whoever pads."""
    batch = batch_of(2)
    batch["targets"][:, 12:] = -100
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, 12:] = (changed["input_ids"][:, 12:] + 1) % 31
    found = []
    for each in (batch, changed):
        model = build()
        packed_next_token_objective(model, each)
        found.append(losses_inside(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=0)
    without = build()
    without(batch["input_ids"])
    assert abs(losses_inside(without) - found[0]) > 1e-3, "without `valid` every token counts"


def test_every_objective_says_which_tokens_count():
    seen = []

    class Listening(nn.Module):
        needs_context = True

        def __init__(self, config, builders, layer):
            super().__init__()
            self.inner = build_feed_forward(config, builders, layer)

        def forward(self, x, context):
            seen.append(context.valid)
            return self.inner(x)

    batch = batch_of(2)
    pair = {**batch, "decoder_input_ids": batch["input_ids"][:, :9], "targets": batch["targets"][:, :9], "valid": batch["input_ids"] > 3}
    for architecture, objective, data in (
        ("decoder", packed_next_token_objective, batch),
        ("encoder", masked_language_objective, batch),
        ("encoder-decoder", encoder_decoder_objective, pair),
    ):
        seen.clear()
        model = TransformerModel(replace(CONFIG, architecture=architecture), replace(PLAIN, feed_forward=Listening))
        objective(model, data)
        assert all(torch.equal(valid, data["targets"] != -100) for valid in seen[-3:])
        assert seen[:-3] == ([None] * 3 if architecture == "encoder-decoder" else []), "an encoder's own tokens all count"


def test_an_auxiliary_loss_crosses_the_stages_of_a_pipeline():
    batch = batch_of(3)
    stages = [keep_part(build(), range(2), embedding=True, head=False), keep_part(build(), range(2, 3), embedding=False, head=True)]
    hidden_states = stages[0](batch["input_ids"], valid=batch["targets"] != -100)
    received = hidden_states.detach().requires_grad_()
    packed_next_token_objective(stages[1], {**batch, "input_ids": received}).loss_sum.backward()
    hidden_states.backward(received.grad)
    expected = expected_gradients(CONFIG, batch)
    for stage in stages:
        require_gradients(stage, expected)


def test_an_auxiliary_loss_is_one_number():
    x = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"one number, not \[2\]"):
        add_auxiliary_loss(x, x.sum(dim=1), 1.0)
    with torch.no_grad():
        assert torch.equal(add_auxiliary_loss(x, x.sum(), 1.0), x)
