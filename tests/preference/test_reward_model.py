"""The reward model's objective against TRL's RewardTrainer, and its scores of ragged texts against one text at a time."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from reward_runs import DENSE, pairs

from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.preference.reward_model import RewardConfig, RewardObjective, as_reward_model, last_positions, score


def reward_model() -> TransformerModel:
    return as_reward_model(TransformerModel(DENSE, MIXTURE, seed=1), seed=2).to(torch.float64)


def sequences_of(batch) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Chosen ids, rejected ids and margin of each pair of packed rows, found by loops."""
    found = []
    for ids, documents, margins in zip(batch["input_ids"], batch["documents"], batch["margins"], strict=True):
        for pair in range(int(documents.max() + 1) // 2):
            found.append((ids[documents == 2 * pair], ids[documents == 2 * pair + 1], margins[pair].item()))
    return found


def trl_loss(model, batch, margin_scale: float, centering: float) -> tuple[torch.Tensor, dict]:
    """TRL's loss of the pairs, each sequence alone in its row, with what it logs."""
    from trl import RewardTrainer

    found = sequences_of(batch)
    metrics = {"train": {name: [] for name in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")}}
    sides = [[pair[side] for pair in found] for side in (0, 1)]

    def rewards(**inputs):
        return SimpleNamespace(logits=torch.stack([model(ids[None])[0, -1:] for side in sides for ids in side]))

    accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    args = SimpleNamespace(center_rewards_coefficient=centering or None)
    trainer = SimpleNamespace(model=model, args=args, accelerator=accelerator, _metrics=metrics, _total_train_tokens=0, _tp_size=1)
    inputs = {"attention_mask": torch.ones(1)}
    if margin_scale:
        inputs["margin"] = margin_scale * torch.tensor([pair[2] for pair in found], dtype=torch.float64)
    return RewardTrainer.compute_loss(trainer, rewards_of(rewards, model), inputs), metrics["train"]


def rewards_of(rewards, model):
    class Stub(torch.nn.Module):
        def forward(self, **inputs):
            return rewards(**inputs)

    return Stub()


@pytest.mark.parametrize(("margin_scale", "centering"), [(1.0, 0.0), (0.0, 0.0), (0.5, 0.3)])
def test_loss_gradients_and_metrics_are_trls(margin_scale, centering):
    model, batch = reward_model(), pairs(0, 0, DENSE)
    totals = RewardObjective(RewardConfig(centering, margin_scale))(model, batch)
    (totals.loss_sum / totals.token_count).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected, logged = trl_loss(model, batch, margin_scale, centering)
    expected.backward()
    assert totals.token_count.item() == len(sequences_of(batch)) == 14
    torch.testing.assert_close(totals.loss_sum / totals.token_count, expected, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=0, atol=1e-12, msg=name)
    means = totals.mean_metrics()
    assert means["accuracy"] == pytest.approx(logged["accuracy"][0], rel=1e-6)
    assert means["margin"] == pytest.approx(logged["margin"][0], rel=1e-9)
    assert (means["chosen_reward"] + means["rejected_reward"]) / 2 == pytest.approx(logged["mean_reward"][0], rel=1e-9)


def test_rewards_are_read_at_the_last_token_whatever_its_id():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 3, -1], [-1] * 8, [0, 1, 1, 1, 1, 1, 1, 1]])
    assert last_positions(documents, 5).tolist() == [[1, 4, 5, 6, -1], [-1] * 5, [0, 7, -1, -1, -1]]


def test_a_batch_without_pairs_counts_nothing_and_has_gradients_of_zero():
    model, batch = reward_model(), pairs(0, 0, DENSE)
    batch["documents"] = torch.full_like(batch["documents"], -1)
    totals = RewardObjective()(model, batch)
    totals.loss_sum.backward()
    assert totals.token_count.item() == 0 == totals.loss_sum.item()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_the_tokens_of_a_pair_weigh_one_in_a_routers_losses():
    """Without it the balance loss, a sum over tokens, would be divided by the pairs alone."""
    batch, seen = pairs(0, 0, DENSE), {}

    def model(ids, head_fn, valid, **more):
        seen["valid"] = valid
        return head_fn(lambda hidden: hidden[..., 0], torch.zeros(*ids.shape, 1))

    totals = RewardObjective()(model, batch)
    assert torch.equal(seen["valid"] > 0, batch["documents"] >= 0)
    torch.testing.assert_close(seen["valid"].sum(), totals.token_count.float())


def test_half_precision_rewards_are_computed_in_float32():
    model = reward_model().to(torch.bfloat16)
    hidden = torch.randn(2, 3, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.head(hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (hidden.float() * model.head.weight.float()).sum(-1))


@pytest.mark.parametrize("longest", [32, 19])
def test_scores_of_ragged_texts_are_those_of_each_alone(longest):
    config = replace(DENSE, position="learned", max_position_embeddings=longest, hidden_dropout=0.5)
    model = as_reward_model(TransformerModel(config, MIXTURE, seed=1), seed=2).to(torch.float64).train()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(31, (length,), generator=generator).tolist() for length in (3, 19, 1, 7, 16, 2, 17)]
    found = score(model, texts, batch_size=3)
    assert model.training
    model.eval()
    for text, reward in zip(texts, found, strict=True):
        assert reward == pytest.approx(model(torch.tensor([text]))[0, -1].item(), abs=1e-12)
    assert score(model, texts, batch_size=7) == pytest.approx(found, abs=1e-12) and score(model, []) == []


def test_a_text_without_tokens_is_named():
    with pytest.raises(ValueError, match="Sequence 1 has no tokens"):
        score(reward_model(), [[1, 2], []])


def test_settings_out_of_range_are_named():
    for name in ("centering", "margin_scale"):
        for value in (-0.1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"{name} is {value}: give at least 0"):
                RewardConfig(**{name: value})
