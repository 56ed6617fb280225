"""What the modes on preferences hand to each other: references of first weights, baselines over all ranks, seeds, who wins over whom."""

import pytest
import torch
from preferring_runs import STILL, preferring_config
from rich.console import Console

from shared.optim.precision import autocast_objective
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.rl import examination
from shared.totals import Totals
from shared.trainer.run import build

QUIET = Console(quiet=True)
TWO_RANKS = "parallel.data_parallel=2"


def moved(module: torch.nn.Module) -> None:
    """As if it had been trained: other numbers in each weight that is trained, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def reads_better(module: torch.nn.Module, store) -> None:
    """A few steps on the texts of a store, after which all such texts, also an answer after another prompt, surprise the model less."""
    for number in range(8):
        ids = torch.from_numpy(store.document(number).astype("int64"))
        loss = torch.nn.functional.cross_entropy(module(ids[None, :-1])[0], ids[1:])
        for parameter, gradient in zip(module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True):
            parameter.data -= 0.1 * gradient


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("ppo", ["ppo.temperature=0.6"]),
        ("ppo", ["ppo.temperature=0.6", "adapter.rank=4"]),
        ("dpo", ["dpo.reference=beside"]),
        ("dpo", ["dpo.reference=beside", "adapter.rank=4"]),
    ],
)
def test_the_reference_is_the_first_model_whatever_the_policy_has_learned(tmp_path, base, mode, words):
    run = build(preferring_config(tmp_path, base, mode, *words), QUIET)
    ids = torch.randint(60, (3, 13), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    batch |= {"documents": torch.zeros_like(ids[:, 1:]), "positions": torch.arange(12).expand(3, 12)}
    temperature = 0.6 if mode == "ppo" else 1.0
    if mode == "ppo":
        reference = run.mode.loaders(run.config, run.strategy)[0].reference
    else:
        reference = run.mode.reference(run.config, run.strategy)
    moved(run.strategy.module)
    run.strategy.model.eval()  # as in a rollout
    with torch.no_grad():
        first = run.mode.start.load(run.config.model, torch.device("cpu"), run.config.adapter is not None).eval()
        said = (first(ids[:, :-1]) / temperature).log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(reference(batch), said, rtol=1e-4, atol=1e-4)
        now = (run.strategy.model(ids[:, :-1]) / temperature).log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    assert (now - said).abs().max() > 0.01


def test_ktos_baseline_is_over_all_ranks_and_of_the_policy_over_its_reference(tmp_path, base):
    def baselines(*words: str) -> list[list[float]]:
        config = preferring_config(tmp_path, base, "dpo", *STILL, "dpo.loss=kto", "dpo.reference=beside", *words)

        def work(world):
            run = build(config, QUIET, world)
            training, _ = run.mode.loaders(run.config, run.strategy)
            reads_better(run.strategy.module, run.mode.text.training)
            return [batch["baseline"][0, 0].item() for batch in next(iter(training))]

        return run_threads(work, config.parallel.ranks) if words else [work(SingleRankCommunicator())]

    [alone], ranks = baselines(), baselines(TWO_RANKS)
    assert alone[0] > 0 and len(set(alone)) == 1
    assert [each for rank in ranks for each in rank] == pytest.approx([alone[0]] * 2, rel=1e-5)


@pytest.mark.parametrize("mode", ["reward", "dpo", "ppo"])
def test_another_seed_means_another_order_and_another_head(tmp_path, base, mode):
    found = []
    for seed in (1, 2, 1):
        run = build(preferring_config(tmp_path / str(len(found)), base, mode, f"seed={seed}"), QUIET)
        loader = run.mode.loaders(run.config, run.strategy)[0]
        head = run.strategy.module.head.weight.tolist() if mode == "reward" else []
        order = [loader.prompt_at(place) for place in range(20)] if mode == "ppo" else next(iter(loader))[0]["input_ids"].tolist()
        found.append((order, head))
    assert found[0] == found[2] and found[0][0] != found[1][0] and (mode != "reward" or found[0][1] != found[1][1])


def test_answers_are_scored_in_the_precision_of_the_run(tmp_path, base):
    run = build(preferring_config(tmp_path, base, "ppo", *STILL, "precision=bfloat16"), QUIET)
    batch = next(iter(run.mode.loaders(run.config, run.strategy)[0]))[0]
    totals = autocast_objective(run.mode.objective, "bfloat16")(run.strategy.model, batch)
    assert totals.mean_metrics()["approximate_kl"] == 0, "the policy that drew is the one that is trained"


def test_the_trained_model_wins_where_its_answers_are_right_and_the_first_ones_empty(tmp_path, base, monkeypatch):
    run = build(preferring_config(tmp_path, base, "dpo"), QUIET)
    trained, right = run.strategy.module, [task.answer for task in run.mode.tasks]
    said = lambda model: right if model is trained else [""] * len(right)  # noqa: E731
    monkeypatch.setattr(examination, "generated", lambda model, *_, **settings: [(text, True) for text in said(model)])
    rows, summary = run.mode.preferred(run, trained)
    assert summary["win rate over the first model, by the hidden preference"] == 1
    assert summary["hidden preference's reward before"] == 0 and summary["hidden preference's reward after"] == 1
    assert all(row.score_after > row.score_before for row in rows) and len(rows) == len(right)


def test_the_calibration_is_over_all_held_out_pairs_on_any_ranks(tmp_path, base):
    def errors(*words: str) -> list[float]:
        config = preferring_config(tmp_path, base, "reward", *STILL, *words)

        def work(world):
            run = build(config, QUIET, world)
            moved(run.strategy.module)
            totals = Totals(torch.ones(()), torch.ones(()), {"accuracy": torch.ones(()), "margin": torch.ones(())})
            return run.mode.judge(run, run.strategy.module, totals).summary["expected calibration error"]

        return run_threads(work, config.parallel.ranks) if words else [work(SingleRankCommunicator())]

    [alone] = errors()
    assert alone > 0 and errors(TWO_RANKS) == pytest.approx([alone] * 2, rel=1e-5)
