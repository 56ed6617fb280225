"""Blocks within a pipeline's stages: auxiliary losses on stages without a head, compiled blocks."""

from dataclasses import replace
import pytest
import torch
from balanced_experts import BalancedExperts
from pipeline_runs import observed, on_ranks, require_same

from shared.model.config import ModelConfig
from shared.model.transformer import PLAIN, TransformerModel
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.parallel.data.activation_checkpointing import apply_activation_checkpointing
from shared.parallel.pipeline.weight_gradients import add_weight_gradients, split_backward


def with_experts(model: TransformerModel) -> TransformerModel:
    return TransformerModel(model.config, replace(PLAIN, feed_forward=BalancedExperts), seed=1).double()


@pytest.fixture(scope="module")
def with_auxiliary_losses() -> dict:
    return on_ranks(observed, "one", "llama", prepare=with_experts)[0]


@pytest.mark.parametrize("layout, schedule, settings", [
    ("pp2", "1f1b", {"activation_checkpointing": "full"}), ("pp4", "zero_bubble", {}), ("pp2_fsdp2", "interleaved", {}),
])  # fmt: skip
def test_auxiliary_losses_of_every_stage_have_their_gradients(layout, schedule, settings, with_auxiliary_losses):
    """Their scale is the step's, and they are divided once with the loss, by all tokens of the step."""
    found = on_ranks(observed, layout, "llama", "sgd", schedule, prepare=with_experts, scaler=LossScaler(LossScaleConfig()), **settings)
    require_same(found, with_auxiliary_losses)


@pytest.mark.slow
@pytest.mark.parametrize("layout, schedule", [("pp2", "1f1b"), ("pp2_fsdp2", "interleaved")])
def test_compiled_blocks_train_like_plain_ones(layout, schedule):
    """Through the compiler's graphs of the forward and the backward pass, without its C++ code, which would take a minute."""

    def work(run):
        run.parallel.model.compile(backend="aot_eager")
        return observed(run)

    require_same(on_ranks(work, layout, "llama", "sgd", schedule), on_ranks(observed, "one", "llama")[0])


def test_matrices_alone_are_trained_in_recomputed_blocks_whose_input_needs_no_gradient():
    """With part W apart: what leads the backward pass to a product is its input, and neither embedding nor norms are trained here."""

    def gradients(recompute: str, splits: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = ModelConfig(vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        model = TransformerModel(config, PLAIN).double()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
        model.embedding.requires_grad_(False)
        waiting = split_backward(model.stack.blocks.values()) if splits else []
        apply_activation_checkpointing(model, recompute)
        model(torch.arange(10)[None]).square().sum().backward()
        add_weight_gradients(waiting)
        return {name: parameter.grad for name, parameter in model.stack.named_parameters() if parameter.requires_grad}

    plain, apart = gradients("none", splits=False), gradients("full", splits=True)
    assert apart and all(torch.allclose(apart[name], gradient, rtol=1e-9, atol=1e-12) for name, gradient in plain.items())
