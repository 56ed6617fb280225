"""The preference objective on packed rows: each pair by itself gives the same, whatever stands beside it, before it and after it."""

import math
from dataclasses import replace

import pytest
import torch
from pair_rows import pair_batch

from shared.loss import IGNORED
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.moe.layer import mixture_layers
from shared.preference.log_probs import score_answers
from shared.preference.objective import DPOConfig, PreferenceObjective

MODEL = ModelConfig(
    vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=32,
    initializer_range=0.3,
)  # fmt: skip
SEQ = 25
LOSSES = {
    "dpo": lambda c, r, rc, rr, n, m: -math.log(sigmoid(0.4 * (c - rc - r + rr))),
    "robust": lambda c, r, rc, rr, n, m: (-0.8 * math.log(sigmoid(d := 0.4 * (c - rc - r + rr))) + 0.2 * math.log(sigmoid(-d))) / 0.6,
    "hinge": lambda c, r, rc, rr, n, m: max(0.0, 1 - 0.4 * (c - rc - r + rr)),
    "ipo": lambda c, r, rc, rr, n, m: (c - rc - r + rr - 1.25) ** 2,
    "simpo": lambda c, r, rc, rr, n, m: -math.log(sigmoid(0.4 * (c / n - r / m) - 0.3)),
    "orpo": lambda c, r, rc, rr, n, m: -c / n - 0.4 * math.log(sigmoid(odds(c / n) - odds(r / m))),
}
MORE = {"robust": {"label_smoothing": 0.2}, "simpo": {"target_margin": 0.3}}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(x: float) -> float:
    return x - math.log(1 - math.exp(x))


def model() -> TransformerModel:
    return TransformerModel(MODEL).double()


def answers_one_by_one(policy: TransformerModel, batch: dict) -> list[list[tuple[float, float, int]]]:
    """For each row and sequence: log-probability of its answer, alone in a row, the reference's, and its tokens."""
    found = []
    for row in range(len(batch["targets"])):
        found.append([])
        for document in range(int(batch["documents"][row].max()) + 1):
            here = batch["documents"][row] == document
            ids, targets, reference = (batch[name][row][here] for name in ("input_ids", "targets", "reference"))
            log_probs = policy(ids[None])[0].log_softmax(-1)
            counted = targets != IGNORED
            own = log_probs[counted].gather(1, targets[counted, None]).sum()
            found[-1].append((own.item(), reference[counted].sum().item(), int(counted.sum())))
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_on_packed_rows_is_the_sum_over_its_pairs(loss):
    policy, batch = model(), pair_batch(0, [2, 0, 3, 1], SEQ, 23)
    totals = PreferenceObjective(DPOConfig(loss, beta=0.4, **MORE.get(loss, {})))(policy, batch)
    pairs = [(row[p], row[p + 1]) for row in answers_one_by_one(policy, batch) for p in range(0, len(row), 2)]
    expected = sum(LOSSES[loss](c, r, rc, rr, n, m) for (c, rc, n), (r, rr, m) in pairs)
    assert totals.token_count == len(pairs) == 6
    assert totals.loss_sum.item() == pytest.approx(expected, rel=1e-12)
    assert totals.metrics["chosen_log_prob"].item() == pytest.approx(sum(c for (c, *_), _ in pairs), rel=1e-12)
    totals.loss_sum.backward()
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())


@pytest.mark.parametrize("loss", ["dpo", "hinge", "ipo"])
def test_per_token_divides_by_the_answers_tokens(loss):
    policy, batch = model(), pair_batch(0, [2, 1], SEQ, 23)
    totals = PreferenceObjective(DPOConfig(loss, beta=0.4, per_token=True))(policy, batch)
    pairs = [(row[p], row[p + 1]) for row in answers_one_by_one(policy, batch) for p in range(0, len(row), 2)]
    expected = sum(LOSSES[loss](c / n, r / m, rc / n, rr / m, n, m) for (c, rc, n), (r, rr, m) in pairs)
    assert totals.loss_sum.item() == pytest.approx(expected, rel=1e-12)


def test_kto_is_the_sum_over_single_answers():
    policy, batch = model(), pair_batch(3, [2, 1], SEQ, 23)
    totals = PreferenceObjective(DPOConfig("kto", beta=0.4, desirable_weight=1.5, reference="beside"))(policy, batch)
    expected, margins, log_probs = 0.0, [], 0.0
    for row, answers in enumerate(answers_one_by_one(policy, batch)):
        for number, (own, reference, _) in enumerate(answers):
            gain = 0.4 * (own - reference - 0.3)
            expected += 1.5 * (1 - sigmoid(gain)) if batch["desirable"][row, number] else 1 - sigmoid(-gain)
            margins.append(gain if batch["desirable"][row, number] else -gain)
            log_probs += own
    assert totals.token_count == 6 and {margin > 0 for margin in margins} == {True, False}
    metrics = {"accuracy": sum(margin > 0 for margin in margins), "margin": sum(margins), "baseline": 6 * 0.3, "log_prob": log_probs}
    assert {name: each.item() for name, each in totals.metrics.items()} == pytest.approx(metrics, rel=1e-12)
    assert totals.loss_sum.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", [*LOSSES, "kto"])
def test_a_micro_batch_of_padding_costs_nothing(loss):
    policy = model()
    config = DPOConfig(loss, reference="beside" if loss == "kto" else "cached")
    totals = PreferenceObjective(config)(policy, pair_batch(0, [0, 0], SEQ, 23))
    totals.loss_sum.backward()
    assert totals.loss_sum == totals.token_count == 0
    assert not any(totals.metrics.values())
    assert not any(parameter.grad.any() for parameter in policy.parameters() if parameter.grad is not None)


def test_with_the_policy_as_its_reference_the_loss_is_log_2_and_the_gradient_is_not_0():
    policy, batch = model(), pair_batch(0, [2, 1], SEQ, 23)
    totals = PreferenceObjective(DPOConfig())(policy, batch | {"reference": score_answers(policy, batch)})
    assert totals.mean_loss == pytest.approx(math.log(2), rel=1e-12)
    assert totals.metrics["accuracy"] == 0  # ties
    totals.loss_sum.backward()
    assert policy.head.linear.weight.grad.norm() > 0.01


def test_the_metrics_say_what_the_loss_compares():
    policy, batch = model(), pair_batch(0, [2, 0, 3], SEQ, 23)
    metrics = PreferenceObjective(DPOConfig(beta=0.4))(policy, batch).metrics
    pairs = [(row[p], row[p + 1]) for row in answers_one_by_one(policy, batch) for p in range(0, len(row), 2)]
    chosen, rejected = [0.4 * (c - rc) for (c, rc, _), _ in pairs], [0.4 * (r - rr) for _, (r, rr, _) in pairs]
    assert metrics["accuracy"] == sum(c > r for c, r in zip(chosen, rejected, strict=True))
    assert metrics["chosen_reward"].item() == pytest.approx(sum(chosen))
    assert metrics["rejected_reward"].item() == pytest.approx(sum(rejected))
    assert metrics["margin"].item() == pytest.approx(sum(chosen) - sum(rejected))


def test_scoring_leaves_the_model_as_it_was():
    policy = TransformerModel(MODEL).double()
    policy.eval()
    batch = pair_batch(0, [2, 1], SEQ, 23)
    scores = score_answers(policy, batch)
    assert not policy.training and not scores.requires_grad
    assert torch.equal(score_answers(policy.train(), batch), scores) and policy.training
    assert not scores[batch["targets"] == IGNORED].any()


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_router_losses_weigh_each_pair_or_answer_alike(loss):
    """Against the formula: for each pair the mean over its tokens, and not their sum, which would outweigh the preference."""
    mixture = MixtureConfig(4, 16, balance_coefficient=0.3, z_coefficient=0.05, balance_convention="switch")
    batch, objective = pair_batch(0, [2, 0, 1], SEQ, 23), PreferenceObjective(DPOConfig(loss, reference="beside"))
    together, gradients = 2 if loss == "dpo" else 1, []
    for by_layer in (True, False):
        experts = mixture if by_layer else replace(mixture, balance_coefficient=0.0, z_coefficient=0.0)
        policy = TransformerModel(MixtureModelConfig(**vars(MODEL) | {"experts": experts}), builders=MIXTURE).double()
        routings = []
        for layer in mixture_layers(policy):
            layer.router.register_forward_hook(lambda module, given, routing, routings=routings: routings.append(routing))
        totals, explicit = objective(policy, batch), 0.0
        for routing in routings if not by_layer else ():
            for row, documents in enumerate(batch["documents"]):
                here = batch["targets"][row] != IGNORED
                chosen = torch.nn.functional.one_hot(routing.experts[row][here], 4).sum((0, 1)) / max(1, int(here.sum()))
                for pair in range(0, int(documents.max()) + 1, together):
                    tokens = here & (documents >= pair) & (documents < pair + together)
                    explicit += 0.3 * 4 * (routing.probabilities[row][tokens] @ chosen.double()).mean()
                    explicit += 0.05 * routing.logits[row][tokens].logsumexp(-1).square().mean()
        (totals.loss_sum + explicit).backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    assert len(gradients[0]) > 20
    for found, expected in zip(*gradients, strict=True):
        assert (found - expected).norm() <= 2e-7 * expected.norm()  # the shares, 1/3 and the like, are float32


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss": "dop"}, "loss is 'dop'"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5: give at least 0 and below 0.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing has no effect with loss ipo: leave it out, or choose dpo or robust."),
        ({"loss": "orpo", "per_token": True}, "per_token has no effect with loss orpo"),
        ({"sft_weight": -1.0}, "sft_weight is -1.0"),
        ({"loss": "kto"}, "loss kto needs reference beside"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        DPOConfig(**settings)


def test_a_batch_without_its_reference_is_refused():
    batch = pair_batch(0, [1], SEQ, 23)
    del batch["reference"]
    with pytest.raises(ValueError, match="dpo.loss dpo needs reference in each batch"):
        PreferenceObjective(DPOConfig())(model(), batch)
    assert PreferenceObjective(DPOConfig("simpo"))(model(), batch).token_count == 1
