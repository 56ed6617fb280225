"""Preference losses on packed rows against TRL's own code on padded ones: values, and gradients to every log-probability, in float64.

TRL's methods are called unbound, with a stand-in for their trainer, on the same log-probabilities. They are private, so TRL is pinned.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from pair_rows import pair_batch
from torch import Tensor, nn

from shared.loss import IGNORED
from shared.preference import objective
from shared.preference.objective import DPOConfig, PreferenceObjective

SEQ, VOCAB, PAIRS = 40, 23, [2, 0, 3, 1]
TRL = "1.16.0"


@pytest.fixture(scope="module")
def trl():
    import trl

    assert trl.__version__ == TRL, "private methods are called: compare them again before another version is pinned"
    return trl


class Accelerator:
    """A single process's."""

    device, num_processes = torch.device("cpu"), 1

    def gather(self, value):
        return value

    gather_for_metrics = gather


class Said(nn.Module):
    """A model for TRL whose log-probabilities are given."""

    is_gradient_checkpointing = False

    def __init__(self, log_probs: Tensor):
        super().__init__()
        self.log_probs = log_probs

    def forward(self, **inputs):
        nothing = torch.zeros_like(self.log_probs)
        return SimpleNamespace(log_probs=self.log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), aux_loss=None)


def found_by_us(config: DPOConfig, batch: dict, log_probs: Tensor, monkeypatch) -> tuple[Tensor, Tensor, dict]:
    """Mean loss, its gradient to `log_probs`, mean metrics."""
    log_probs = log_probs.clone().requires_grad_()
    monkeypatch.setattr(objective, "answer_log_probs", lambda head, hidden_states, targets: log_probs)
    totals = PreferenceObjective(config)(lambda input_ids, head_fn, **options: head_fn(None, None), batch)
    loss = totals.loss_sum / totals.token_count
    loss.backward()
    return loss.detach(), log_probs.grad, totals.mean_metrics()


def padded(batch: dict, values: Tensor, paired: bool) -> tuple[Tensor, Tensor]:
    """Each sequence's values in a row of its own, behind its prompt's 0s, and which of them count: [sequences, SEQ], differentiable."""
    rows, counted = [], []
    for row, documents in enumerate(batch["documents"]):
        for number in range(int(documents.max()) + 1):
            here = documents == number
            own = values[row][here].where(batch["targets"][row][here] != IGNORED, 0)
            rows.append(nn.functional.pad(own, (0, SEQ - len(own))))
            counted.append(nn.functional.pad(batch["targets"][row][here] != IGNORED, (0, SEQ - len(own))))
    order = [*range(0, len(rows), 2), *range(1, len(rows), 2)] if paired else list(range(len(rows)))
    return torch.stack(rows)[order], torch.stack(counted)[order]


def inputs_of(counted: Tensor) -> dict:
    """As TRL's collator makes them: a token more than there are log-probabilities."""
    mask = nn.functional.pad(counted, (1, 0)).long()
    return {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def said_by_trl(trl, loss: str, batch: dict, log_probs: Tensor, weights=(1.0,), **settings) -> tuple[Tensor, Tensor, dict]:
    log_probs = log_probs.clone().requires_grad_()
    mine, counted = padded(batch, log_probs, paired=True)
    reference = padded(batch, batch["reference"], paired=True)[0].sum(1)
    names = {"beta": 0.1, "label_smoothing": 0.0, "f_divergence_type": "reverse_kl"} | settings
    model = Said(mine)
    trainer = SimpleNamespace(
        model=model, aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, use_weighting=False, accelerator=Accelerator(),
        loss_types=loss.split("+"), loss_weights=weights, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
        _tp_size=1, args=SimpleNamespace(), **names,
    )  # fmt: skip
    chosen, rejected = reference.chunk(2)
    inputs = inputs_of(counted) | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    found = trl.DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    found.backward()
    return found.detach(), log_probs.grad, {name: values[0] for name, values in trainer._metrics["train"].items() if len(values) == 1}


def made(seed: int, pairs=PAIRS) -> tuple[dict, Tensor]:
    batch = pair_batch(seed, list(pairs), SEQ, VOCAB)
    return batch, -4 * torch.rand(batch["targets"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def require_close(mine: tuple, theirs: tuple, rtol: float = 1e-12) -> None:
    for here, there in zip(mine[:2], theirs[:2], strict=True):
        torch.testing.assert_close(here, there, rtol=rtol, atol=1e-14)


CASES = [
    (DPOConfig(beta=0.3), "sigmoid", {"beta": 0.3}),
    (DPOConfig(beta=0.3, per_token=True), "sigmoid_norm", {"beta": 0.3}),
    (DPOConfig("hinge", beta=0.1), "hinge", {"beta": 0.1}),
    (DPOConfig("robust", label_smoothing=0.2), "robust", {"label_smoothing": 0.2}),
    (DPOConfig("ipo", beta=0.2, per_token=True), "ipo", {"beta": 0.2}),
]


@pytest.mark.parametrize(("config", "loss", "settings"), CASES, ids=[loss for _, loss, _ in CASES])
def test_losses_of_pairs_equal_trls(trl, config, loss, settings, monkeypatch):
    batch, log_probs = made(0)
    mine, theirs = found_by_us(config, batch, log_probs, monkeypatch), said_by_trl(trl, loss, batch, log_probs, **settings)
    require_close(mine, theirs)
    assert theirs[1].norm() > 0
    other = said_by_trl(trl, loss, batch, log_probs, **settings | {"beta": 0.4})
    with pytest.raises(AssertionError):
        require_close(mine, other)  # a test that cannot fail shows nothing


def test_metrics_equal_trls(trl, monkeypatch):
    batch, log_probs = made(1)
    mine, theirs = found_by_us(DPOConfig(), batch, log_probs, monkeypatch)[2], said_by_trl(trl, "sigmoid", batch, log_probs)[2]
    names = {
        "accuracy": "rewards/accuracies", "margin": "rewards/margins", "chosen_reward": "rewards/chosen",
        "rejected_reward": "rewards/rejected", "chosen_log_prob": "logps/chosen", "rejected_log_prob": "logps/rejected",
    }  # fmt: skip
    assert theirs["rewards/accuracies"] == pytest.approx(mine["accuracy"], rel=1e-6)  # which TRL rounds to float32
    del names["accuracy"], mine["accuracy"]
    assert {name: theirs[its] for name, its in names.items()} == pytest.approx(mine, rel=1e-12)


def test_the_sft_term_is_trls_for_one_pair(trl, monkeypatch):
    """Over several pairs TRL takes the mean over all tokens of a batch, so that long answers weigh more; here pairs weigh the same."""
    batch, log_probs = made(2, [1])
    theirs = said_by_trl(trl, "sigmoid+sft", batch, log_probs, weights=(1.0, 0.7))
    require_close(found_by_us(DPOConfig(sft_weight=0.7), batch, log_probs, monkeypatch), theirs)


def test_cdpo_is_a_mixture_of_both_orders_of_trls_dpo(trl, monkeypatch):
    """TRL 1.16 has no cDPO. With the answers exchanged, DPO's difference has the other sign."""
    batch, log_probs = made(3)
    config = DPOConfig(label_smoothing=0.2)
    one, other = (said_by_trl(trl, "sigmoid", batch, log_probs, beta=beta) for beta in (0.1, -0.1))
    require_close(found_by_us(config, batch, log_probs, monkeypatch), [0.8 * a + 0.2 * b for a, b in zip(one[:2], other[:2], strict=True)])


@pytest.mark.parametrize(("desirable", "undesirable"), [(1.0, 1.0), (1.3, 0.7)])
@pytest.mark.parametrize("gain", [0.8, -0.8])
def test_kto_equals_trls(trl, desirable, undesirable, gain, monkeypatch):
    batch, log_probs = made(4)
    batch["baseline"] = torch.full_like(batch["baseline"], max(gain, 0))
    config = DPOConfig("kto", beta=0.2, reference="beside", desirable_weight=desirable, undesirable_weight=undesirable)
    mine = found_by_us(config, batch, log_probs, monkeypatch)
    leaf = log_probs.clone().requires_grad_()
    policy, counted = padded(batch, leaf, paired=False)
    labels = torch.cat([row[: int(documents.max()) + 1] for row, documents in zip(batch["desirable"], batch["documents"], strict=True)])
    assert 0 < labels.sum() < len(labels) == 12
    model, others = Said(policy), -torch.rand(12, dtype=torch.float64)
    trainer = SimpleNamespace(
        model=model, aux_loss_enabled=False, precompute_ref_logps=True, calculate_KL=True, accelerator=Accelerator(), loss_type="kto",
        beta=0.2, desirable_weight=desirable, undesirable_weight=undesirable, _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0, _tp_size=1, args=SimpleNamespace(), _compute_kl_logps=lambda model, batch: others + gain,
    )  # fmt: skip
    inputs = inputs_of(counted) | {"label": labels.bool(), "ref_logps": padded(batch, batch["reference"], paired=False)[0].sum(1)}
    found = trl.KTOTrainer._compute_loss(trainer, model, inputs | {"ref_KL_logps": others}, return_outputs=False)
    found.backward()
    require_close(mine, (found.detach(), leaf.grad), rtol=1e-9)


def means(batch: dict, leaf: Tensor) -> tuple[Tensor, Tensor]:
    values, counted = padded(batch, leaf, paired=True)
    return (values.sum(1) / counted.sum(1)).chunk(2)


def test_simpo_equals_trls(trl, monkeypatch):
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    batch, log_probs = made(5)
    leaf = log_probs.clone().requires_grad_()
    trainer = SimpleNamespace(alpha=0.0, accelerator=Accelerator(), loss_type="simpo", simpo_gamma=0.5, beta=2.0, label_smoothing=0.0)
    loss = CPOTrainer.cpo_loss(trainer, *means(batch, leaf))[0].mean()
    loss.backward()
    mine = found_by_us(DPOConfig("simpo", beta=2.0, target_margin=0.5), batch, log_probs, monkeypatch)
    require_close(mine, (loss.detach(), leaf.grad))


def test_orpo_equals_trls(trl, monkeypatch):
    """TRL rounds these to float32, and takes its loss of fine-tuning over prompts too; here it is the paper's, over answers."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    batch, log_probs = made(6)
    leaf = log_probs.clone().requires_grad_()
    chosen, rejected = means(batch, leaf)
    trainer = SimpleNamespace(accelerator=Accelerator(), beta=0.3)
    loss = -chosen.mean() - ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0].mean()
    loss.backward()
    require_close(found_by_us(DPOConfig("orpo", beta=0.3), batch, log_probs, monkeypatch), (loss.detach(), leaf.grad), rtol=1e-5)
