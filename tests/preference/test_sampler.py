"""Answers depend on prompt, seed and policy alone, and their log-probabilities are those that the trainer computes."""

import math
from collections import Counter

import pytest
import torch

from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.preference.rollout import AnswerRows, Sample
from shared.preference.sampler import PlainSampler, draw
from shared.preference.value_head import token_scores
from shared.sampling import generate

CONFIG = ModelConfig(
    vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, initializer_range=0.4
)
PROMPTS = [[5, 0, 2], [1], [7, 7, 7, 7, 7, 0], [2, 9], [1], [4, 0]]
SEEDS = [11, 22, 33, 44, 55, 66]
OPEN = bool  # of a single rank: whether anyone has unfinished answers is whether it has


def model_of(dtype=torch.float64, **more) -> TransformerModel:
    return TransformerModel(ModelConfig(**{**vars(CONFIG), **more}), seed=2).to(dtype).eval()


def test_an_answer_does_not_depend_on_the_answers_beside_it():
    model, stops = model_of(), {0, 3, 8}
    together = PlainSampler(9, stops)(model, PROMPTS, SEEDS, OPEN)
    in_pairs = PlainSampler(9, stops, rows=2)(model, PROMPTS, SEEDS, OPEN)
    backwards = PlainSampler(9, stops, multiple=4)(model, PROMPTS[::-1], SEEDS[::-1], OPEN)[::-1]
    for one, *others in zip(together, in_pairs, backwards, strict=True):
        for other in others:
            assert (one.ids, one.ended) == (other.ids, other.ended)
            assert other.log_probs == pytest.approx(one.log_probs, rel=1e-12)
    assert together[1].ids != together[4].ids, "one prompt, two seeds"
    assert len({len(each.ids) for each in together}) > 1


def test_an_answer_ends_with_its_first_stop_and_keeps_it():
    stops = {0, 3, 8}  # 0 is the id of padding too, and stands in prompts
    for completion in PlainSampler(9, stops)(model_of(), PROMPTS * 5, range(30), OPEN):
        at = [place for place, token in enumerate(completion.ids) if token in stops]
        assert at == ([len(completion.ids) - 1] if completion.ended else [])
        assert completion.ended or len(completion.ids) == 9
        assert len(completion.log_probs) == len(completion.ids)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probabilities_are_the_trainers(temperature, dtype):
    model = model_of(dtype)
    completions = PlainSampler(9, {0, 3}, temperature)(model, PROMPTS, SEEDS, OPEN)
    rows = AnswerRows([Sample(*each) for each in zip(range(6), PROMPTS, completions, strict=True)], seq=24, multiple=4)
    (scored,) = token_scores(model, rows.batch, temperature)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for row, completion in zip(rows.take(scored.detach()), completions, strict=True):
        assert row[: len(completion.ids)].tolist() == pytest.approx(completion.log_probs, abs=tolerance)


def test_a_cold_sampler_is_greedy_generation():
    model = model_of()
    for prompt, completion in zip(PROMPTS, PlainSampler(6, set(), 1e-6)(model, PROMPTS, SEEDS, OPEN), strict=True):
        expected = [int(token) for token in generate(model, torch.tensor([prompt]), 6, context=99, temperature=0.0)]
        assert completion.ids == expected


def test_draws_have_the_distribution_of_the_logits():
    probabilities = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.3])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens, log_probs = draw(probabilities.log().expand(1000, -1), uniform)
    assert Counter(tokens.tolist()) == {1: 500, 2: 200, 4: 300}
    torch.testing.assert_close(log_probs.exp(), probabilities.double()[tokens], rtol=1e-6, atol=0)
    assert draw(probabilities.log()[None], torch.zeros(1))[0].item() == 1, "the smallest random number draws no impossible token"
    sharper, _ = draw(probabilities.log().expand(1000, -1), uniform, temperature=0.5)  # squares: 25, 4 and 9 of 38
    assert [Counter(sharper.tolist())[token] for token in (1, 2, 4)] == pytest.approx([1000 * s / 38 for s in (25, 4, 9)], abs=1)


def test_random_numbers_of_the_run_are_left_alone():
    model, before = model_of(), torch.get_rng_state()
    PlainSampler(4, set())(model, PROMPTS, SEEDS, OPEN)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_draws_nothing_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature is"):
        PlainSampler(4, set(), temperature)
