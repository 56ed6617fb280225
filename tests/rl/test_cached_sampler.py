"""`CachedSampler` draws what chapter 11's `PlainSampler` draws, token by token, in every layout."""

import math

import pytest
import torch
from ppo_runs import NEW_TOKENS, PPO, STOPS, alone, on_ranks

from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.preference.rollout import AnswerRows, Sample
from shared.preference.sampler import PlainSampler
from shared.preference.value_head import token_scores
from shared.rl.generation import CachedSampler

CONFIG = ModelConfig(
    vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
    initializer_range=0.4,
)  # fmt: skip
PROMPTS = [[5, 0, 2], [1], [7, 7, 7, 7, 7, 0], [2, 9], [1], [4, 0], [5, 0, 2], [3] * 11]
SEEDS = [11, 22, 33, 44, 55, 66, 77, 88]
STOPPING = {0, 3, 8}
POSITIONS = {
    "rope": {}, "learned": {"position": "learned"}, "none": {"position": "none"}, "alibi": {"position": "alibi"},
    "relative": {"position": "relative"},
    "window": {"sliding_window": 3}, "alibi, window": {"position": "alibi", "sliding_window": 3}, "eager": {"attention": "eager"},
}  # fmt: skip


def model_of(dtype=torch.float64, **more) -> TransformerModel:
    return TransformerModel(ModelConfig(**{**vars(CONFIG), **more}), seed=2).to(dtype).eval()


def require_same(found, expected, tolerance=1e-9):
    for here, there in zip(found, expected, strict=True):
        assert (here.ids, here.ended) == (there.ids, there.ended)
        assert here.log_probs == pytest.approx(there.log_probs, abs=tolerance)


@pytest.mark.parametrize("more", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(("rows", "multiple"), [(64, 1), (2, 1), (3, 4)])
def test_it_draws_what_the_plain_sampler_draws(more, rows, multiple):
    model = model_of(**more)
    expected = PlainSampler(12, STOPPING, 0.9)(model, PROMPTS, SEEDS, bool)
    assert len({len(each.ids) for each in expected}) > 3, "rows leave at different times"
    require_same(CachedSampler(12, STOPPING, 0.9, rows=rows, multiple=multiple)(model, PROMPTS, SEEDS, bool), expected)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probabilities_are_the_trainers(temperature, dtype):
    model = model_of(dtype)
    completions = CachedSampler(9, STOPPING, temperature, rows=3)(model, PROMPTS, SEEDS, bool)
    rows = AnswerRows([Sample(*each) for each in zip(range(8), PROMPTS, completions, strict=True)], seq=24, multiple=4)
    (scored,) = token_scores(model, rows.batch, temperature)
    for row, completion in zip(rows.take(scored.detach()), completions, strict=True):
        assert row[: len(completion.ids)].tolist() == pytest.approx(completion.log_probs, abs=1e-5 if dtype == torch.float32 else 1e-12)


def test_the_model_is_left_as_it_was():
    model, before = model_of(), torch.get_rng_state()
    attends = [block.attention.attend for block in model.stack.blocks.values()]
    CachedSampler(4, set())(model, PROMPTS, SEEDS, bool)
    assert torch.equal(before, torch.get_rng_state())
    assert attends == [block.attention.attend for block in model.stack.blocks.values()]


LAYOUTS = [  # in `make test` those that bring something of their own: whole logits, padding, gathered weights, exchanged tokens, stages
    ("tp2", "dense", {}, ()),
    ("tp2_sp", "dense", {}, ()),
    ("fsdp2", "dense", {}, ()),
    ("dp2_ep2", "experts", {}, ()),
    ("pp2", "dense", {}, ()),
    ("fsdp2_tp2", "dense", {}, pytest.mark.slow),
    ("pp2_tp2", "dense", {"pipeline_chunks": 2, "pipeline_schedule": "interleaved"}, pytest.mark.slow),
]


@pytest.mark.parametrize(("word", "model", "more"), [pytest.param(*case, marks=marks) for *case, marks in LAYOUTS])
def test_a_layout_draws_what_one_process_draws_without_a_cache(word, model, more):
    sampler = CachedSampler(NEW_TOKENS, STOPS, PPO.temperature, rows=3, multiple=2)
    found, one = on_ranks(word, model, sampler=sampler, **more), alone(model)
    for each in found:
        assert each["answers"] == one["answers"]
        for here, there in zip(each["metrics"], one["metrics"], strict=True):
            assert here == pytest.approx(there, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("settings", "said"), [
    ({"temperature": 0.0}, "temperature is 0"), ({"temperature": -1.0}, "temperature is"), ({"temperature": math.nan}, "temperature is"),
    ({"top_p": 0.0}, "top_p is 0"), ({"top_k": 0}, "top_k is 0"), ({"rows": 0}, "rows is 0"), ({"new_tokens": 0}, "new_tokens is 0"),
])  # fmt: skip
def test_settings_that_draw_nothing_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        CachedSampler(**{"new_tokens": 4, "stops": set()} | settings)
