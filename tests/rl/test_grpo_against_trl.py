"""GRPO's losses on packed rows against TRL's own code on padded ones: values, and gradients to every log-probability, in float64.

TRL's method is called unbound, with a stand-in for its trainer, on the same log-probabilities. It is private, so TRL is pinned.
"""

from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shared.preference.rollout import AnswerRows, Rollout, Sample
from shared.preference.sampler import Completion
from shared.rl import grpo
from shared.rl.grpo import GRPOAdvantages, GRPOConfig, GRPOObjective

TRL, LENGTHS, GROUP, SEQ = "1.16.0", [5, 1, 3, 4, 2, 5, 5, 1], 4, 12
CUT_OFF = [5, 0]  # answers that did not end
LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
SIZES = {"prompts": 2, "answers": GROUP, "new_tokens": 5, "minibatches": 1}
CASES = [
    GRPOConfig(**SIZES, aggregation=aggregation, level=level, kl_coefficient=kl)
    for aggregation in LOSS_TYPES for level in ("token", "sequence") for kl in (0.0, 0.3)
] + [
    GRPOConfig(**SIZES, kl_coefficient=0.3, kl_times_ratio=True),
    GRPOConfig(**SIZES, aggregation="sequence", mask_truncated=True),
    GRPOConfig(**SIZES, mask_truncated=True, level="sequence"),
    GRPOConfig(**SIZES, scale="batch", clip_low=0.1, clip_high=0.4),
    GRPOConfig(**SIZES, aggregation="constant", scale="none"),
    GRPOConfig(**SIZES, importance_limit=1.3, kl_coefficient=0.3),
]  # fmt: skip


@pytest.fixture(scope="module")
def trl():
    import trl

    assert trl.__version__ == TRL, "private methods are called: compare them again before another version is pinned"
    return trl


class Accelerator:
    """A single process's."""

    num_processes, sync_gradients = 1, True

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str = "sum") -> Tensor:
        return value


def made(seed: int = 0) -> tuple[Rollout, Tensor]:
    """A rollout of random numbers, and what the policy says of its tokens a few updates later, [answers, time]."""
    generator, lengths = torch.Generator().manual_seed(seed), torch.tensor(LENGTHS)
    inside = torch.arange(int(lengths.max())) < lengths[:, None]
    numbers = [-2 * torch.rand(inside.shape, generator=generator, dtype=torch.float64).where(inside, 0) for _ in range(2)]
    moves = [0.4 * torch.randn(inside.shape, generator=generator, dtype=torch.float64).where(inside, 0) for _ in range(2)]
    samples = [Sample(0, [1] * (1 + number % 3), Completion([2] * length, [0.0], True)) for number, length in enumerate(LENGTHS)]
    ended = torch.tensor([number not in CUT_OFF for number in range(len(LENGTHS))])
    scores = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    log_probs, reference = numbers
    moves[0] = (moves[0] - moves[0][inside].mean()).where(inside, 0)
    return Rollout(samples, GROUP, scores, lengths, ended, log_probs, log_probs - moves[0], reference, 0 * log_probs), log_probs + moves[1]


def found_by_us(config: GRPOConfig, rollout: Rollout, now: Tensor, monkeypatch, chosen: slice = slice(None)) -> tuple[Tensor, Tensor, dict]:
    """Loss, its gradient to the log-probabilities [answers, time], and metrics. What stands where there is no answer is NaN or infinite."""
    columns = {"old_log_probs": rollout.log_probs} | GRPOAdvantages(config)(rollout)[0]
    samples, now = rollout.samples[chosen], now[chosen].clone().requires_grad_()
    rows = AnswerRows(samples, SEQ, 3)
    batch = rows.batch | {name: rows.put(column[chosen]) for name, column in columns.items()}
    nowhere = batch["targets"] < 0
    junk = torch.full(nowhere.shape, torch.nan, dtype=torch.float64)
    junk[:, ::2] = torch.inf
    batch |= {name: junk.where(nowhere, batch[name]) for name in columns if name != "starts"}
    said = [junk.where(nowhere, rows.put(now))]
    monkeypatch.setattr(grpo, "token_scores", lambda *given: said)
    totals = GRPOObjective(config)(nn.Identity(), batch)
    assert totals.token_count == len(samples)
    loss = totals.loss_sum / totals.token_count
    loss.backward()
    return loss.detach(), now.grad, totals.mean_metrics()


def said_by_trl(trl, config: GRPOConfig, rollout: Rollout, now: Tensor, chosen: slice = slice(None), steps: int = 1):
    """TRL's loss, its gradient, and its metrics. steps: the steps of a rollout."""
    now = now[chosen].clone().requires_grad_()
    counted = rollout.mask & (rollout.ended[:, None] | (not config.mask_truncated))
    ratios = (rollout.log_probs - rollout.sampled).exp().clamp(max=config.importance_limit)[chosen] if config.importance_limit else None
    trainer = SimpleNamespace(
        model=nn.Linear(1, 1).train(), loss_type=LOSS_TYPES[config.aggregation], importance_sampling_level=config.level,
        beta=config.kl_coefficient, epsilon_low=config.clip_low, epsilon_high=config.clip_high, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=ratios is not None, vllm_importance_sampling_correction=True,
        max_completion_length=config.new_tokens, current_gradient_accumulation_steps=1, accelerator=Accelerator(),
        _metrics={"train": defaultdict(list)}, _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=config.kl_times_ratio, steps_per_generation=steps),
    )  # fmt: skip
    trainer._get_per_token_logps_and_entropies = lambda *given, **more: (now, -now.detach(), None)
    ids = torch.zeros(now.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": counted[chosen].long(),
        "advantages": advantages_of(config, rollout)[chosen], "old_per_token_logps": rollout.log_probs[chosen],
        "ref_per_token_logps": rollout.reference[chosen], "num_items_in_batch": counted.sum(), "importance_sampling_ratio": ratios,
    }  # fmt: skip
    loss = trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    return loss.detach(), now.grad, {name: values[0] for name, values in trainer._metrics["train"].items()}


def advantages_of(config: GRPOConfig, rollout: Rollout) -> Tensor:
    """As TRL's trainer has them, in numpy: deviations over n - 1, and 1e-4 on top."""
    groups = rollout.scores.numpy().reshape(-1, GROUP)
    deviation = {"group": groups.std(axis=1, ddof=1, keepdims=True), "batch": groups.std(ddof=1), "none": None}[config.scale]
    moved = groups - groups.mean(axis=1, keepdims=True)
    return torch.from_numpy((moved if deviation is None else moved / (deviation + 1e-4)).reshape(-1))


def named(config: GRPOConfig) -> str:
    plain = GRPOConfig(**SIZES)
    return ", ".join(f"{name} {value}" for name, value in vars(config).items() if value != getattr(plain, name)) or "as it comes"


@pytest.mark.parametrize("config", CASES, ids=named)
def test_losses_and_gradients_are_trls(trl, config, monkeypatch):
    rollout, now = made()
    mine, theirs = found_by_us(config, rollout, now, monkeypatch), said_by_trl(trl, config, rollout, now)
    for here, there in zip(mine[:2], theirs[:2], strict=True):
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-15)
    assert mine[1].abs().sum() > 0


@pytest.mark.parametrize("config", [CASES[0], replace(CASES[0], mask_truncated=True)], ids=named)
def test_the_steps_of_a_rollout_are_divided_as_trls(trl, config, monkeypatch):
    """By the tokens of the whole rollout, not by those of the step."""
    rollout, now = made()
    for chosen in (slice(0, 4), slice(4, 8)):
        mine = found_by_us(config, rollout, now, monkeypatch, chosen)
        theirs = said_by_trl(trl, config, rollout, now, chosen, steps=2)
        for here, there in zip(mine[:2], theirs[:2], strict=True):
            torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-15)


def test_metrics_are_means_over_answers_of_means_over_tokens(trl, monkeypatch):
    rollout, now = made()
    for level in ("token", "sequence"):
        config = GRPOConfig(**SIZES, aggregation="sequence", kl_coefficient=0.3, level=level)
        mine = found_by_us(config, rollout, now, monkeypatch)[2]
        moved, ratio = (now - rollout.log_probs).numpy(), np.exp((now - rollout.log_probs).numpy())
        mean = lambda values: np.mean([row[:length].mean() for row, length in zip(values, LENGTHS, strict=True)])  # noqa: E731
        away = (rollout.reference - now).numpy()
        assert mine["entropy"] == pytest.approx(mean(-now.numpy())) and mine["kl"] == pytest.approx(mean(np.exp(away) - 1 - away))
        assert mine["approximate_kl"] == pytest.approx(mean(ratio - 1 - moved))
        if level == "sequence":  # TRL's mean over answers is one of tokens at the other level
            assert mine["clip_fraction"] == pytest.approx(said_by_trl(trl, config, rollout, now)[2]["clip_ratio/region_mean"])
        else:
            advantages = advantages_of(config, rollout).numpy()[:, None]
            spent = (ratio > 1.28) & (advantages > 0) | (ratio < 0.8) & (advantages < 0)
            assert 0 < mine["clip_fraction"] == pytest.approx(mean(spent))


def test_defaults_are_trls_but_for_those_that_the_page_names(trl):
    """A name of TRL's beside ours, with its value; those that differ stand in PARITY.md."""
    theirs, ours = {field.name: field.default for field in fields(trl.GRPOConfig)}, GRPOConfig()
    same = {
        "num_generations": ours.answers, "temperature": ours.temperature, "num_iterations": ours.passes, "epsilon": ours.clip_low,
        "importance_sampling_level": ours.level, "scale_rewards": ours.scale, "loss_type": LOSS_TYPES[ours.aggregation],
        "beta": ours.kl_coefficient, "mask_truncated_completions": ours.mask_truncated, "min_p": ours.min_p, "top_p": ours.top_p or 1.0,
        "top_k": ours.top_k or 0, "repetition_penalty": ours.repetition_penalty,
    }  # fmt: skip
    assert same == {name: theirs[name] for name in same}
    names = ("epsilon_high", "max_completion_length", "vllm_importance_sampling_clip_max", "use_bias_correction_kl")
    assert [theirs[name] for name in names] == [None, 512, 3.0, True]
    assert (ours.clip_high, ours.new_tokens, ours.importance_limit, ours.kl_times_ratio) == (0.28, 64, None, False)
    page = (Path(__file__).parents[2] / "chapters" / "12_grpo" / "PARITY.md").read_text()
    for said in ("`clip_high` is 0.28", "`new_tokens` is 64", "`importance_limit` is null", "`kl_times_ratio` is false"):
        assert said in page.replace("\n", " ")
