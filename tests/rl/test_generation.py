"""Generation with a KV cache: the tokens of transformers' `generate` and of our model without a cache, ragged batches, refills, streams."""

from dataclasses import replace

import pytest
import torch
import transformers
from families import FAMILIES, LLAMA, VOCAB, Family, make_oracle
from transformers.generation.logits_process import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from shared.course.errors import CourseError
from shared.finetune.answering import answer_all as slow_answer_all
from shared.finetune.config import AdapterConfig
from shared.finetune.soft_prompts import attach_soft_prompt
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import load_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE as BUILDERS
from shared.preference.sampler import PlainSampler
from shared.rl.decoding_cache import DecodingCache
from shared.rl.generation import Drawing, answer_all, generate_tokens, stop_strings, stream_answer
from shared.sampling import generate

MIXTURE = {name: value for name, value in LLAMA.items() if name != "rms_norm_eps"} | {"num_experts_per_tok": 2}
LONG = {"n_positions": 256} | dict.fromkeys(("max_position_embeddings",), 256)
DECODERS = {name: family for name, family in FAMILIES.items() if "BERT" not in name and "T5" not in name and "dynamic" not in name} | {
    "Mixtral": Family("MixtralForCausalLM", "MixtralConfig", MIXTURE | {"num_local_experts": 5, "sliding_window": None}),
    "OLMoE": Family("OlmoeForCausalLM", "OlmoeConfig", MIXTURE | {"num_experts": 5}),
}
PAIRS = {name: family for name, family in FAMILIES.items() if "T5" in name}
GREEDY = Drawing(temperature=0.0)
LENGTHS = (7, 1, 12, 4, 7)
NEW = 200


def prompts_of(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def longer(family: Family) -> Family:
    """The same with room for 256 positions."""
    size = {name: value for name, value in LONG.items() if name in family.options}
    return replace(family, options=family.options | size)


def ours_of(oracle, folder) -> TransformerModel:
    oracle.save_pretrained(folder)
    return load_pretrained(folder, builders=BUILDERS).to(oracle.dtype).eval()


def answers_of(model, prompts, new_tokens, **settings) -> list[list[int]]:
    found = [[] for _ in prompts]
    for drawn in generate_tokens(model, prompts, new_tokens, **settings):
        found[drawn.number].append(drawn.token)
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    """200 tokens behind a ragged batch, which transformers pads on the left."""
    oracle = make_oracle(longer(DECODERS[name])).double()
    ours, prompts = ours_of(oracle, tmp_path), prompts_of()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}
    if oracle._supports_sdpa:
        oracle.set_attn_implementation("sdpa")
        if name in ("Mixtral", "OLMoE"):  # their fast product of experts knows no float64
            oracle.set_experts_implementation("eager")
        longest = max(LENGTHS)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        theirs = oracle.generate(ids, attention_mask=mask, **options)[:, longest:]
    else:  # eager attention makes NaN of a row that is padded on the left in float64
        theirs = torch.stack([oracle.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in prompts])
    found = answers_of(ours, prompts, NEW, drawing=GREEDY)
    assert found == theirs.tolist()
    assert len({token for answer in found for token in answer}) > 6, "an answer that repeats one token proves little"
    assert answers_of(ours, prompts, 30, drawing=GREEDY, rows=2, multiple=3) == theirs[:, :30].tolist()


@pytest.mark.parametrize("name", PAIRS)
def test_an_encoder_decoder_writes_what_transformers_writes(name, tmp_path):
    oracle = make_oracle(PAIRS[name]).double()
    ours, prompts = ours_of(oracle, tmp_path), prompts_of()
    longest = max(LENGTHS)
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 5, "repetition_penalty": 3.0}
    drawing = Drawing(temperature=0.0, repetition_penalty=3.0)  # without it, a tied model repeats one token
    theirs = oracle.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=NEW, **options)[:, 1:]
    found = answers_of(ours, prompts, NEW, drawing=drawing, start_id=5)
    assert found == theirs.tolist() and len({tuple(answer) for answer in found}) == len(prompts)
    stop = max(range(VOCAB), key=lambda token: len({answer.index(token) for answer in found if token in answer}))
    ends = [answer.index(stop) + 1 if stop in answer else NEW for answer in found]
    cut = [answer[:end] for answer, end in zip(found, ends, strict=True)]
    assert len(set(ends)) > 2, "rows leave at different times"
    for rows in (5, 3):
        assert answers_of(ours, prompts, NEW, drawing=drawing, start_id=5, rows=rows, stops={stop}) == cut


@pytest.mark.parametrize("name", ["LLaMA 2 (GQA)", "GPT-2", "BLOOM (ALiBi)", "Mistral (window 5)"])
def test_logits_are_those_of_the_whole_sequence(name, tmp_path):
    """Row by row, while others leave: in float32, at their own lengths."""
    model = ours_of(make_oracle(FAMILIES[name]), tmp_path)
    texts = [prompt + prompts_of((9,))[0] for prompt in prompts_of()]
    cache, here = DecodingCache(model, 5, 32), [0, 1, 2, 3, 4]
    with torch.no_grad():
        whole = [model(torch.tensor([text]))[0] for text in texts]
        found = cache.read([text[: len(text) - 9] for text in texts])
        for step in range(9):
            for row, text in enumerate(here):
                expected = whole[text][len(texts[text]) - 10 + step]
                torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
            if step in (2, 5):
                cache.drop(1)
                here[1] = here[-1]
                here.pop()
            found = cache.step([texts[text][len(texts[text]) - 9 + step] for text in here])


def small_model(**more) -> TransformerModel:
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, initializer_range=0.4, **more
    )
    return TransformerModel(config, seed=2).double().eval()


def test_an_answer_does_not_depend_on_the_queue():
    model, prompts = small_model(), prompts_of((3, 9, 1, 4, 4, 2, 8, 5, 6, 1, 1, 7))
    settings = {"stops": range(12), "drawing": Drawing(1.1, top_k=60, top_p=0.95, min_p=0.001, repetition_penalty=1.2)}
    alone = [answers_of(model, [prompt], 15, seeds=[seed], **settings)[0] for seed, prompt in enumerate(prompts)]
    assert len({len(answer) for answer in alone}) > 3
    for rows in (64, 5, 1):
        assert answers_of(model, prompts, 15, rows=rows, **settings) == alone
    backwards = answers_of(model, prompts[::-1], 15, seeds=range(11, -1, -1), rows=3, **settings)
    assert backwards[::-1] == alone


def test_without_a_cache_the_tokens_are_the_same():
    model = small_model()
    for prompt in prompts_of():
        expected = [int(token) for token in generate(model, torch.tensor([prompt]), 40, context=99, temperature=0.0)]
        assert answers_of(model, [prompt], 40, drawing=GREEDY) == [expected]


def test_equal_prompts_are_read_once():
    """A group of answers to one prompt costs one row of the first pass."""
    model, shapes = small_model(), []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    group = prompts_of((6,)) * 5 + prompts_of((2, 2))
    found = answers_of(model, group, 8)
    assert shapes == [(3, 6)] + [(7, 1)] * 7
    assert found == [answers_of(model, [prompt], 8, seeds=[seed])[0] for seed, prompt in enumerate(group)]


def test_finished_rows_leave_and_others_take_their_places():
    model, shapes = small_model(), []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    found = answers_of(model, prompts_of((3, 9, 2, 4, 4, 2, 8, 5, 6, 2, 3, 7)), 15, stops=range(20), rows=4)
    assert shapes[0] == (4, 9) and [len(answer) for answer in found].count(15) < 12
    assert sum(rows for rows, _ in shapes) == sum(map(len, found)), "each pass of a row brings a token that belongs to its answer"
    assert {rows for rows, _ in shapes} == {1, 2, 3, 4}
    assert sum(new > 1 for _, new in shapes) > 3, "and free rows are filled before all of them are free"


def test_an_answer_ends_where_the_context_does():
    model = small_model(position="learned", max_position_embeddings=10)
    found = list(generate_tokens(model, prompts_of((7, 2)), 20, context=10))
    assert [sum(drawn.number == number for drawn in found) for number in (0, 1)] == [4, 9]
    assert not any(drawn.ended for drawn in found) and sum(drawn.last for drawn in found) == 2


def test_a_request_for_more_than_the_context_holds_costs_no_memory():
    """`new_tokens` may come from a chat's client: the random numbers of 10 to the power 13 tokens would take 80 terabytes."""
    model, settings = small_model(), {"context": 10, "drawing": Drawing(1.1)}
    assert answers_of(model, prompts_of((7, 2)), 10**13, **settings) == answers_of(model, prompts_of((7, 2)), 9, **settings)


def test_tokens_are_streamed():
    model, steps = small_model(), []
    model.register_forward_hook(lambda *_: steps.append(1))
    drawn = generate_tokens(model, [[4, 5]], 100, stops=())
    assert [(next(drawn).number, len(steps)) for _ in range(3)] == [(0, 1), (0, 2), (0, 3)], "one pass for each token that was asked for"


def test_stop_strings_end_an_answer():
    model, decode = small_model(), lambda ids: "".join(chr(ord("0") + token) for token in ids)
    [whole] = answers_of(model, [[4, 5]], 30)
    string = decode(whole)[7:10]
    found = list(generate_tokens(model, [[4, 5]], 30, stop_here=stop_strings(decode, [string, "never"])))
    assert decode([drawn.token for drawn in found]) == decode(whole)[: decode(whole).index(string) + 3]
    assert [drawn.ended for drawn in found] == [False] * (len(found) - 1) + [True]
    with pytest.raises(ValueError, match="stop string is empty"):
        stop_strings(decode, ["a", ""])


def drawn_shares(logits: torch.Tensor, drawing: Drawing, text: list[int]) -> torch.Tensor:
    """The distribution that a drawing draws from, by drawing at 20,000 places of [0, 1)."""
    uniform = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    tokens, log_probs = drawing(logits.expand(20000, -1), uniform, [text] * 20000)
    shares = torch.bincount(tokens, minlength=logits.shape[-1]) / 20000
    torch.testing.assert_close(log_probs.exp(), shares.double()[tokens], rtol=0, atol=1e-4)
    return shares


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p, temperature):
    logits = 2 * torch.randn(1, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = MinPLogitsWarper(min_p)(None, logits / temperature).softmax(dim=-1)[0]
    shares = drawn_shares(logits, Drawing(temperature, min_p=min_p), [])
    torch.testing.assert_close(shares.double(), expected, rtol=0, atol=1e-4)
    assert torch.equal(shares > 0, expected > 0)


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits, text = torch.randn(1, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64), [3, 1, 3, 4, 900]
    assert {bool(logits[0, token] > 0) for token in (1, 3, 4)} == {True, False}
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text[:4]]), logits).softmax(dim=-1)[0]
    shares = drawn_shares(logits, Drawing(repetition_penalty=penalty), text)
    torch.testing.assert_close(shares.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("model", "settings", "said"), [
    (small_model(), {"prompts": [[1], []]}, "Prompt 1 is empty"),
    (small_model(), {"prompts": [[1] * 9], "context": 8}, "Prompt 0 has 9 tokens, and the model reads 8"),
    (small_model(), {"rows": 0}, "at least 1"),
    (small_model(position="learned", max_position_embeddings=10), {"new_tokens": 11}, "up to 11 positions, and max_position.* is 10"),
    (torch.nn.Linear(1, 1), {}, "A Linear without a decoder"),
])  # fmt: skip
def test_what_cannot_be_continued_is_refused(model, settings, said):
    settings = {"prompts": [[1]], "new_tokens": 5} | settings
    with pytest.raises(ValueError, match=said):
        next(generate_tokens(model, settings.pop("prompts"), settings.pop("new_tokens"), **settings))


def test_dynamic_rope_is_continued_as_far_as_its_frequencies_stay(tmp_path):
    oracle = make_oracle(FAMILIES["LLaMA, dynamic RoPE"]).double()
    ours, prompts = ours_of(oracle, tmp_path), prompts_of((4,))
    theirs = oracle.generate(torch.tensor(prompts), max_new_tokens=13, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert answers_of(ours, prompts, 13, drawing=GREEDY) == theirs[:, 4:].tolist()
    with pytest.raises(ValueError, match="dynamic RoPE scaling"):
        answers_of(ours, prompts, 14, drawing=GREEDY)


@pytest.mark.parametrize(("settings", "said"), [
    ({"min_p": 0.0}, "min_p is 0"), ({"min_p": 1.1}, "min_p is 1.1"), ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
    ({"top_p": 0.0}, "top_p is 0"), ({"temperature": -1.0}, "temperature is -1"),
])  # fmt: skip
def test_settings_that_draw_nothing_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Drawing(**settings)


def test_transformers_is_the_version_of_the_tables():
    assert transformers.__version__.split(".")[0] == "5"


@pytest.mark.parametrize("kind", [None, "prompt", "prefix"])
def test_reports_get_the_answers_that_chapter_10_gives(kind):
    """Also behind virtual tokens, and in front of a context's end."""
    model = small_model(num_key_value_heads=1, max_position_embeddings=64)
    if kind:
        attach_soft_prompt(model, AdapterConfig(kind=kind, virtual_tokens=3))
        model.double()
    model.train()
    settings = {"context": 60, "stops": range(9)}
    expected = slow_answer_all(model, prompts_of(), 30, **settings)
    assert len({len(answer) for answer in expected}) > 2
    assert answer_all(model, prompts_of(), 30, **settings) == expected and model.training
    streamed = stream_answer(model, prompts_of()[0], 30, **settings, drawing=GREEDY)
    assert list(streamed) == expected[0] and model.training


@pytest.mark.parametrize("drawing", [GREEDY, Drawing(), Drawing(top_k=5), Drawing(top_p=0.9), Drawing(min_p=0.1, repetition_penalty=1.2)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_a_sentence_whatever_draws_from_them(drawing, value):
    model = TransformerModel(ModelConfig(VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)).eval()
    with torch.no_grad():
        model.embedding.tokens.weight[:, 0] = value
    with pytest.raises(CourseError, match="logits are not finite, so no token can be drawn: its weights are damaged"):
        list(generate_tokens(model, prompts_of(), 3, drawing=drawing))
    with pytest.raises(CourseError, match="logits are not finite"):
        PlainSampler(3, {0})(model, prompts_of(), range(len(LENGTHS)), bool)
