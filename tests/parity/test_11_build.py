"""Build 11 and TRL: the loss, the gradient of every weight and the metrics of a transformers model, the relatives, and implicit prompts.

TRL's methods are called unbound, with a stand-in for their trainer. They are private, so TRL is pinned.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from shared.course import assignments, build_check
from shared.course.stubs import BodyFile

TRL = "1.16.0"
BUILD = assignments.builds()["11.build"]
PIECES = build_check.read_module(BUILD.folder / "pieces.py")
EXAMPLES = PIECES.pairs_of([(3, 4, 2), (2, 1, 6), (5, 8, 3), (1, 2, 2), (4, 3, 5)], seed=2)
TRL_NAMES = {"chosen": "rewards/chosen", "rejected": "rewards/rejected", "margin": "rewards/margins", "accuracy": "rewards/accuracies"}


@pytest.fixture(scope="module")
def trl():
    import trl

    assert trl.__version__ == TRL, "private methods are called: compare them again before another version is pinned"
    return trl


@pytest.fixture(scope="module", params=[BUILD.solution_file, BUILD.folder / "right_packed.py"], ids=["padded", "packed"])
def build(request):
    return build_check.load(BodyFile.read(request.param), BUILD.adapters)


class Gpt2(torch.nn.Module):
    """A small GPT-2 of transformers, called as the build calls models. Unlike LLaMA's there, its norms stay in float64."""

    def __init__(self, seed: int):
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        torch.manual_seed(seed)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 13, "vocab_size": PIECES.VOCABULARY}
        config = GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
        self.model = GPT2LMHeadModel(config).double()
        with torch.no_grad():
            for weight in self.model.parameters():  # so that answers are neither equally likely nor rewarded alike
                weight.add_(0.3 * torch.randn(weight.shape, dtype=torch.float64))

    def forward(self, input_ids, documents=None, positions=None):
        given = {}
        if documents is not None:
            causal = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).tril()
            allowed = (documents[:, :, None] == documents[:, None]) & causal
            mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
            given = {"attention_mask": mask[:, None], "position_ids": positions}
        return self.model(input_ids, **given, use_cache=False).logits


class Accelerator:
    """A single process's."""

    device, num_processes = torch.device("cpu"), 1

    def gather(self, value):
        return value

    gather_for_metrics = gather


class ForTrl(torch.nn.Module):
    """The model as TRL's patched one: log-probabilities of the labels, which it selects itself."""

    is_gradient_checkpointing = False

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, labels, **_):
        from trl.trainer.utils import selective_log_softmax

        targets = labels[:, 1:]
        logits = self.model.model(input_ids, attention_mask=attention_mask).logits[:, :-1]
        log_probs = selective_log_softmax(logits, targets.clamp(min=0)).where(targets != -100, 0)
        nothing = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), aux_loss=None)


def collated() -> dict[str, torch.Tensor]:
    """As TRL's collator makes them: all chosen, then all rejected, padded on the right."""
    rows = [pair[side] for side in (0, 1) for pair in EXAMPLES]
    longest = max(len(ids) for ids, _ in rows)
    pad = lambda values: values + [0] * (longest - len(values))  # noqa: E731
    ids, trained = torch.tensor([pad(ids) for ids, _ in rows]), torch.tensor([pad([int(each) for each in mask]) for _, mask in rows])
    return {"input_ids": ids, "attention_mask": torch.tensor([pad([1] * len(ids)) for ids, _ in rows]), "completion_mask": trained}


def by_trl(trl, model: torch.nn.Module, reference: torch.nn.Module, settings: dict) -> tuple[float, dict[str, float]]:
    """TRL's loss and metrics, with a backward pass. The reference is called by TRL itself."""
    theirs = ForTrl(model)
    trainer = SimpleNamespace(
        model=theirs, ref_model=ForTrl(reference), aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=False, use_weighting=False,
        accelerator=Accelerator(), loss_types=[settings["loss"]], loss_weights=[1.0], beta=settings["beta"], label_smoothing=0.0,
        f_divergence_type="reverse_kl", _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    loss = trl.DPOTrainer._compute_loss(trainer, theirs, collated(), return_outputs=False)
    loss.backward()
    return loss.item(), {name: trainer._metrics["train"][its][0] for name, its in TRL_NAMES.items()}


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_a_step_has_trls_loss_and_gradients(trl, build, loss):
    """In float64, on a transformers model, over micro-batches of 1, 3 and 1 pairs."""
    settings, reference = PIECES.settings_of(loss, beta=0.2), Gpt2(3)
    scores = build.score(reference, EXAMPLES, 12, 2)
    model, theirs = Gpt2(0), Gpt2(0)
    wanted, metrics = by_trl(trl, theirs, reference, settings)
    parts = [(EXAMPLES[some], scores[some]) for some in (slice(0, 1), slice(1, 4), slice(4, 5))]
    found = build.step(model, torch.optim.SGD(model.parameters(), lr=0.0), parts, 12, settings)
    assert found.item() == pytest.approx(wanted, rel=1e-9)
    for (name, here), there in zip(model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=1e-8, atol=1e-11, msg=name)
        assert there.grad.norm() > 0, name
    ours = build.evaluate(model, parts, 12, settings)
    assert {name: ours[name] for name in TRL_NAMES} == pytest.approx(metrics, rel=1e-6)  # TRL's accuracy is a float32
    assert 0 < metrics["accuracy"] < 1


def random_numbers(seed: int) -> torch.Tensor:
    return -4 * PIECES.randn(5, 2, seed=seed).abs() - 0.1


def simpo_by_trl(policy: torch.Tensor, settings: dict) -> torch.Tensor:
    from trl.experimental.cpo import CPOTrainer

    trainer = SimpleNamespace(
        beta=settings["beta"], simpo_gamma=settings["gamma"], label_smoothing=0.0, alpha=0.0, loss_type="simpo", accelerator=Accelerator()
    )
    return CPOTrainer.cpo_loss(trainer, *policy.unbind(1))[0]


def orpo_by_trl(policy: torch.Tensor, settings: dict) -> torch.Tensor:
    from trl.experimental.orpo import ORPOTrainer

    trainer = SimpleNamespace(beta=settings["beta"], accelerator=Accelerator())
    return -policy[:, 0] - ORPOTrainer.odds_ratio_loss(trainer, *policy.unbind(1))[0]  # TRL averages its two terms apart


@pytest.mark.parametrize(
    ("theirs", "settings", "tolerance"),
    [
        (simpo_by_trl, PIECES.settings_of("simpo", beta=2.0, gamma=0.7), 1e-12),
        (orpo_by_trl, PIECES.settings_of("orpo", beta=0.4), 1e-5),  # TRL computes the odds in float32
    ],
    ids=["simpo", "orpo"],
)
def test_losses_without_a_reference_are_trls_on_averages(trl, build, theirs, settings, tolerance):
    policy, tokens = random_numbers(1).requires_grad_(), torch.tensor([[3, 5], [7, 2], [1, 1], [4, 9], [6, 4]])
    upstream = PIECES.randn(5, seed=3)
    ours, wanted = build.losses(settings, policy, None, tokens), theirs(policy / tokens, settings)
    oracle = PIECES.pair_losses(settings, policy, None, tokens)
    [gradient] = torch.autograd.grad(wanted, policy, upstream.to(wanted.dtype))
    for found in (ours, oracle):
        torch.testing.assert_close(found, wanted.double(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(torch.autograd.grad(found, policy, upstream)[0], gradient, rtol=tolerance, atol=tolerance)


def test_prompts_are_found_where_trl_finds_them(trl, build):
    from trl import extract_prompt

    user, reply = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
    for before in ([user], [user, reply, user], [{"role": "system", "content": "Be brief."}, user]):
        record = {"chosen": [*before, reply], "rejected": [*before, {"role": "assistant", "content": "Five."}]}
        ours, theirs = build.split_pair(record), extract_prompt(record)
        assert ours == {"prompt": theirs["prompt"], "chosen": theirs["chosen"][0]["content"], "rejected": theirs["rejected"][0]["content"]}
