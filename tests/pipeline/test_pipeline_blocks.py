"""Blocks within a pipeline's stages: auxiliary losses on stages without a head, compiled blocks."""

import pytest
from balanced_experts import BalancedExperts
from pipeline_runs import observed, on_ranks, require_same

from shared.model.builders import Builders
from shared.model.transformer import TransformerModel
from shared.optim.loss_scale import LossScaleConfig, LossScaler


def with_experts(model: TransformerModel) -> TransformerModel:
    return TransformerModel(model.config, Builders(feed_forward=BalancedExperts), seed=1).double()


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
