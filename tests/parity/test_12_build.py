"""Build 12, transformers and TRL: greedy answers of ragged batches, what top-p keeps, the loss and its gradient; and enumeration.

TRL's method is called unbound, with a stand-in for its trainer. It is private, so TRL is pinned.
"""

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from shared.course import assignments, build_check
from shared.course.stubs import BodyFile

TRL = "1.16.0"
BUILD = assignments.builds()["12.build"]
PIECES = build_check.read_module(BUILD.folder / "pieces.py")
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6], [5, 3, 5, 8, 9, 7, 9]]
LIMIT, END, FILLING = 40, 0, 1


@pytest.fixture(scope="module", params=[BUILD.solution_file, BUILD.folder / "right_slots.py"], ids=["padded", "slots"])
def build(request):
    return build_check.load(BodyFile.read(request.param), BUILD.adapters)


def attention(module, query, key, value, attention_mask, **_):
    """An attention of transformers that calls what the module was given."""
    return module.attend(str(module.layer_idx), query, key, value).transpose(1, 2), None


class Given(torch.nn.Module):
    """A small model of transformers in float64, called as the build calls models."""

    def __init__(self, family: str):
        from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        super().__init__()
        AttentionInterface.register("given", attention)
        torch.manual_seed(5)
        special = {"vocab_size": 12, "bos_token_id": None, "eos_token_id": None, "pad_token_id": FILLING}
        if family == "gpt2":
            sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
            self.model = GPT2LMHeadModel(GPT2Config(**sizes, **special))
        else:
            sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, **special))
        with torch.no_grad():
            for weight in self.model.double().eval().parameters():  # so that the likeliest token changes from place to place
                weight.add_(0.3 * torch.randn(weight.shape, dtype=torch.float64))

    def forward(self, input_ids, positions=None, attend=None):
        self.model.set_attn_implementation("sdpa" if attend is None else "given")
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                module.attend = attend
        return self.model(input_ids, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_greedy_answers_are_those_of_transformers(build, family):
    """A ragged batch, padded on the left there. The end token is the one that cuts their answers to the most different lengths."""
    given = Given(family)
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[FILLING] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    given.model.set_attn_implementation("sdpa")
    found = given.model.generate(ids, attention_mask=mask, max_new_tokens=LIMIT, do_sample=False)[:, longest:].tolist()
    cut = lambda end: [answer[: answer.index(end) + 1] if end in answer else answer for answer in found]  # noqa: E731
    end = max(range(12), key=lambda end: len({len(answer) for answer in cut(end)}))
    assert build.greedy(given, PROMPTS, end, LIMIT) == cut(end)
    assert len({len(answer) for answer in cut(end)}) > 1


def test_drawn_tokens_are_scored_by_transformers(build):
    """What was recorded in a cached, ragged batch is what an uncached model says of each answer alone."""
    given = Given("llama")
    answers = build.sample(given, PROMPTS, [1, 2, 3, 4], END, LIMIT, 0.7, 1.0)
    for prompt, (ids, log_probs) in zip(PROMPTS, answers, strict=True):
        logits = given(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1].double() / 0.7
        wanted = torch.distributions.Categorical(logits=logits).log_prob(torch.tensor(ids))
        torch.testing.assert_close(torch.tensor(log_probs, dtype=torch.float64), wanted.detach(), rtol=1e-5, atol=1e-5)  # RMSNorm: float32


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.99])
def test_top_p_keeps_what_transformers_keeps(build, top_p):
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

    logits, count = 2 * PIECES.randn(6, 15, seed=4), 400
    kept = TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(1.3)(None, logits)).log_softmax(dim=-1)
    uniform = torch.linspace(0, 1 - 1e-9, count, dtype=torch.float64)
    for row, wanted in zip(logits, kept, strict=True):
        tokens, log_probs = build.draw(row.expand(count, -1), uniform, 1.3, top_p)
        torch.testing.assert_close(log_probs, wanted[tokens], rtol=1e-9, atol=1e-9)
        assert set((wanted.exp() > 1 / count).nonzero().flatten().tolist()) <= set(tokens.tolist())


class Accelerator:
    """A single process's."""

    num_processes, sync_gradients = 1, True

    def gather(self, value):
        return value

    def reduce(self, value, reduction="sum"):
        return value


def by_trl(loss_type: str, level: str, log_probs, old, advantages, mask, limit: int) -> torch.Tensor:
    import trl

    assert trl.__version__ == TRL, "a private method is called: compare it again before another version is pinned"
    model, nothing = torch.nn.Linear(1, 1).train(), torch.zeros(len(mask), 2, dtype=torch.long)
    trainer = SimpleNamespace(
        model=model, loss_type=loss_type, importance_sampling_level=level, beta=0.0, epsilon_low=0.2, epsilon_high=0.28,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False,
        max_completion_length=limit, current_gradient_accumulation_steps=1, accelerator=Accelerator(),
        _metrics={"train": defaultdict(list)}, _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
    )  # fmt: skip
    given = {"prompt_ids": nothing, "prompt_mask": nothing + 1, "completion_ids": torch.zeros_like(mask), "completion_mask": mask}
    given |= {"advantages": advantages, "old_per_token_logps": old, "num_items_in_batch": mask.sum()}
    return trl.GRPOTrainer._compute_loss(trainer, model, given)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("aggregation", "loss_type"), [("token", "dapo"), ("sequence", "grpo"), ("constant", "dr_grpo")])
def test_the_loss_and_its_gradient_are_trls(build, aggregation, loss_type, level):
    lengths, settings = [5, 1, 3, 4], PIECES.settings_of(level=level, aggregation=aggregation, limit=7)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    old, advantages = -PIECES.randn(4, 5, seed=1).abs(), PIECES.randn(4, seed=2)
    both = [(old + 0.3 * PIECES.randn(4, 5, seed=3)).requires_grad_() for _ in range(2)]
    wanted = by_trl(loss_type, level, both[0], old, advantages, mask.long(), 7)
    found = (build.token_losses(both[1], old, advantages, mask, settings) * build.token_weights(lengths, settings)[:, None]).sum()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    wanted.backward()
    found.backward()
    torch.testing.assert_close(both[1].grad, both[0].grad, rtol=1e-10, atol=1e-12)
    assert both[0].grad.any()


def test_an_update_on_all_answers_follows_the_exact_gradient(build):
    """A policy over three tokens and answers of up to three, enumerated: each answer counts by its probability."""
    settings = PIECES.settings_of(aggregation="constant", limit=3, temperature=1.0, micro_size=5)
    rows, prompt = PIECES.randn(3, 3, seed=7), [1]
    answers = [list(ids) for size in (1, 2, 3) for ids in itertools.product(range(3), repeat=size) if END not in ids[:-1]]
    answers = [ids for ids in answers if ids[-1] == END or len(ids) == 3]
    rewards = [(3 * len(ids) + sum(ids)) % 5 / 4 for ids in answers]
    exact, model = PIECES.Table(rows.clone()), PIECES.Table(rows.clone())
    chances = torch.stack([PIECES.alone(exact, prompt, ids, 1.0).sum().exp() for ids in answers])
    assert chances.sum().item() == pytest.approx(1.0)
    (chances * torch.tensor(rewards, dtype=torch.float64)).sum().backward()
    old = [PIECES.alone(model, prompt, ids, 1.0).tolist() for ids in answers]
    worth = [chance * reward for chance, reward in zip(chances.tolist(), rewards, strict=True)]
    experiences = [(prompt, *each) for each in zip(answers, old, worth, strict=True)]
    build.update(model, torch.optim.SGD(model.parameters(), lr=0.0), experiences, settings)
    torch.testing.assert_close(-model.rows.grad * len(answers) * 3, exact.rows.grad, rtol=1e-10, atol=1e-12)
