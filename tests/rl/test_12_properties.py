"""The sentences of chapter 12's contracts of generation and reward, one by one, on what hypothesis makes up; oracles are torch's attention
of one query at a time, exact fractions and numbers that are written in every form."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.rl.cached_attention import cached_attention
from shared.rl.number_reward import number_reward
from shared.rl.sampling import draw_tokens

often = settings(max_examples=40)
many = settings(max_examples=300)  # of what takes less than a millisecond
SEEDS = st.integers(0, 10**6)
KINDS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])


def randn(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Cached attention


@st.composite
def caches(draw, room: bool = True) -> dict:
    """Arguments of a call, of which `room` says whether every row has room for its new tokens."""
    rows, new, shared, size = (draw(st.integers(1, 4)) for _ in range(4))
    most = draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))
    places = max(lengths) + new + (draw(st.integers(0, 3)) if room else -draw(st.integers(1, new)))
    assume(places > 0)
    heads, seed = shared * draw(st.integers(1, 3)), draw(SEEDS)
    made = {"queries": randn(rows, heads, new, size, seed=seed)}
    made |= {name: randn(rows, shared, new, size, seed=seed + 1 + number) for number, name in enumerate(("keys", "values"))}
    stale = draw(st.sampled_from([1.0, 1e4, -1e30]))
    for number, name in enumerate(("cached_keys", "cached_values")):
        made[name] = randn(rows, shared, places, size, seed=seed + 3 + number)
        for row, length in enumerate(lengths):
            made[name][row, :, length:] *= stale
    return made | {"lengths": torch.tensor(lengths), "scale": draw(st.floats(-2, 2)), "window": draw(st.sampled_from([None, 1, 2, 5, 99]))}


@often
@given(call=caches())
def test_each_new_token_looks_at_its_own_row_up_to_its_place_and_nothing_else_of_the_cache_changes(call):
    before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
    found = cached_attention(**call)
    new, group = call["queries"].shape[2], call["queries"].shape[1] // call["keys"].shape[1]
    for name in ("queries", "keys", "values", "lengths"):
        assert torch.equal(call[name], before[name])
    for row, length in enumerate(call["lengths"].tolist()):
        for cache, fresh in (("cached_keys", "keys"), ("cached_values", "values")):
            wanted = before[cache][row].clone()
            wanted[:, length : length + new] = call[fresh][row]
            assert torch.equal(call[cache][row], wanted)
        for token in range(new):
            last = length + token
            first = 0 if call["window"] is None else max(0, last + 1 - call["window"])
            for head in range(call["queries"].shape[1]):
                keys, values = (call[name][row, head // group, first : last + 1] for name in ("cached_keys", "cached_values"))
                own = F.scaled_dot_product_attention(call["queries"][row, head, token : token + 1], keys, values, scale=call["scale"])
                torch.testing.assert_close(found[row, head, token], own[0], rtol=1e-10, atol=1e-12)


@often
@given(call=caches(room=False))
def test_a_row_without_room_is_refused_and_the_cache_is_as_it_was(call):
    before = {name: call[name].clone() for name in ("cached_keys", "cached_values")}
    with pytest.raises(ValueError):
        cached_attention(**call)
    assert all(torch.equal(call[name], was) for name, was in before.items())


@often
@given(call=caches(), kind=KINDS)
def test_what_comes_back_has_the_dtype_of_the_values_and_one_token_at_a_time_gives_the_same(call, kind):
    largest = 3e4 if kind == torch.float16 else 1e30
    call = {name: value.clamp(-largest, largest).to(kind) if isinstance(value, Tensor) and name != "lengths" else value
            for name, value in call.items()}  # fmt: skip
    other = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}
    found = cached_attention(**call)
    assert found.dtype == kind and found.shape == call["queries"].shape and found.isfinite().all()
    new = [other.pop(name) for name in ("queries", "keys", "values")]
    lengths = other.pop("lengths")
    each = [cached_attention(*(part[:, :, [token]] for part in new), lengths=lengths + token, **other) for token in range(new[0].shape[2])]
    torch.testing.assert_close(torch.cat(each, dim=2), found)
    assert all(torch.equal(call[name], other[name]) for name in ("cached_keys", "cached_values"))


# Drawing tokens


@st.composite
def draws(draw) -> dict:
    """One row of whole odds, of which some may not be drawn, and the settings."""
    weights = draw(st.lists(st.sampled_from([0, 1, 2, 2, 3, 5, 9]), min_size=1, max_size=9))
    assume(any(weights))
    top_k = draw(st.none() | st.integers(1, 10))
    return {"weights": weights, "top_k": top_k, "top_p": draw(st.none() | st.sampled_from([1e-9, 0.2501, 0.61803, 0.90909, 0.9999, 1.0]))}


def kept_of(weights: list[int], top_k: int | None, top_p: float | None) -> list[Fraction]:
    """The exact probabilities after both cuts."""
    least = sorted(weights)[-top_k] if top_k is not None and top_k <= len(weights) else 0
    left = [Fraction(weight if weight >= least else 0) for weight in weights]
    if top_p is not None and top_p < 1:
        reached, kept = Fraction(0), set()
        for token in sorted(range(len(left)), key=lambda token: (-left[token], token)):
            if reached < Fraction(top_p) * sum(left):
                kept.add(token)
            reached += left[token]
        left = [share if token in kept else Fraction(0) for token, share in enumerate(left)]
    return [share / sum(left) for share in left]


@many
@given(drawn=draws(), place=st.floats(0, 1, exclude_max=True))
def test_a_token_is_drawn_where_the_place_falls_in_the_exact_distribution(drawn, place):
    wanted = kept_of(**drawn)
    edges = [sum(wanted[: token + 1]) for token in range(len(wanted))]
    assume(all(abs(edge - Fraction(place)) > Fraction(1, 10**9) for edge in edges))
    logits = torch.tensor([drawn["weights"]], dtype=torch.float64).log()
    [token], [log_prob] = draw_tokens(logits, torch.tensor([place], dtype=torch.float64), top_k=drawn["top_k"], top_p=drawn["top_p"])
    assert token == next(token for token, edge in enumerate(edges) if edge > Fraction(place))
    assert log_prob.exp().item() == pytest.approx(float(wanted[token]), rel=1e-12)


@often
@given(drawn=draws(), seed=SEEDS)
def test_the_ends_of_the_line_belong_to_tokens_that_may_be_drawn(drawn, seed):
    wanted = kept_of(**drawn)
    logits = torch.tensor([drawn["weights"]] * 2, dtype=torch.float64).log()
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, _ = draw_tokens(logits, ends, top_k=drawn["top_k"], top_p=drawn["top_p"])
    may = [token for token, share in enumerate(wanted) if share]
    assert tokens.tolist() == [may[0], may[-1]]


@often
@given(seed=SEEDS, rows=st.integers(1, 5), vocab=st.integers(1, 40), kind=KINDS,
       temperature=st.sampled_from([0.0, 1e-320, 0.01, 0.7, 1.0, 50.0]), top_k=st.none() | st.integers(1, 8),
       top_p=st.none() | st.floats(0.01, 1))  # fmt: skip
def test_rows_are_drawn_on_their_own_in_float64_and_the_logits_are_left(seed, rows, vocab, kind, temperature, top_k, top_p):
    logits, uniform = 3 * randn(rows, vocab, seed=seed, dtype=kind), randn(rows, seed=seed + 1).sigmoid()
    before = logits.clone()
    tokens, log_probs = draw_tokens(logits, uniform, temperature, top_k, top_p)
    assert torch.equal(logits, before) and tokens.shape == log_probs.shape == (rows,)
    assert tokens.dtype == torch.int64 and log_probs.dtype == torch.float64 and (log_probs <= 1e-12).all() and log_probs.isfinite().all()
    if temperature == 0:
        assert torch.equal(tokens, logits.double().argmax(-1)) and not log_probs.any()
    wide = draw_tokens(logits.double(), uniform, temperature, top_k, top_p)
    assert torch.equal(wide[0], tokens) and torch.equal(wide[1], log_probs)
    for row in range(rows):
        alone = draw_tokens(logits[row : row + 1], uniform[row : row + 1], temperature, top_k, top_p)
        assert alone[0].item() == tokens[row].item()
        torch.testing.assert_close(alone[1][0], log_probs[row], rtol=1e-12, atol=1e-14)


# The reward


@st.composite
def written(draw) -> tuple[Fraction, str]:
    """A number, and one of the forms in which it can be written."""
    whole = draw(st.integers(0, 10**7))
    sign = draw(st.sampled_from(["", "-", "+"]))
    form = draw(st.sampled_from(["whole", "decimal", "fraction"]))
    text, value = (f"{whole:,}" if draw(st.booleans()) else f"{'0' * draw(st.integers(0, 3))}{whole}"), Fraction(whole)
    if form == "decimal":
        digits = draw(st.text("0123456789", min_size=1, max_size=5))
        text, value = f"{text}.{digits}", value + Fraction(int(digits), 10 ** len(digits))
    elif form == "fraction":
        under = draw(st.integers(1, 5000))
        text, value = f"{text}/{under:,}", value / under
    return (-value if sign == "-" else value), sign + text


BEFORE = st.sampled_from(["", "So ", "5, then -3: ", "x = ", "(", "$", "v2 = ", "1.5/", "\u2014", "a:"])
AFTER = st.sampled_from(["", ".", " km", "km", ", or so", ")", "!", " v2", "; x_3", "a5", "%", ". ", ", -", "/", "-"])


@often
@given(given=written(), wanted=written(), before=BEFORE, after=AFTER, space=st.sampled_from(["", " ", "\n", "\t "]))
def test_the_last_number_counts_in_every_form_and_whatever_stands_around_it(given, wanted, before, after, space):
    assert number_reward(before + given[1] + after, f"{space}{wanted[1]}{space}") == float(given[0] == wanted[0])
    assert number_reward(before + given[1] + after, f"{given[0].numerator}/{given[0].denominator}") == 1.0
    assert number_reward(before + given[1] + after, f"{given[0] + 1}") == 0.0
    assert number_reward(before + given[1] + after + " 0.5", wanted[1]) == float(wanted[0] == Fraction(1, 2))


@often
@given(answer=st.text(), expected=st.text() | st.sampled_from(["7", "1/0", "-.5"]))
def test_a_reward_is_0_or_1_for_anything_and_never_raises(answer, expected):
    assert type(number_reward(answer, expected)) is float and number_reward(answer, expected) in (0.0, 1.0)
    assert number_reward(expected, answer) in (0.0, 1.0)


@often
@given(length=st.integers(996, 1005), sign=st.sampled_from(["", "-"]), other=st.sampled_from(["7", "0" * 1005 + "7"]),
       tail=st.integers(0, 999))  # fmt: skip
def test_a_number_of_over_1000_characters_equals_nothing(length, sign, other, tail):
    text, other = sign + "7".zfill(length - len(sign)), sign + other
    fits = len(text) <= 1000 and len(other) <= 1000
    assert number_reward(f"{'word ' * tail}{text}!", other) == number_reward(other, text) == float(fits)


@many
@given(answer=st.text("0123456789.,,,/-+ v_", max_size=12), expected=st.text("0123456789.,/-+ v_", max_size=6))
def test_hard_texts_get_what_a_reader_by_hand_gives(answer, expected):
    """Read from left to right, each number as long as it can be, by trying every end."""
    assert number_reward(answer, expected) == by_trying(answer, expected)


def whole_number(text: str) -> bool:
    groups = text.split(",")
    plain = all(group and group.isascii() and group.isdigit() for group in groups)
    return plain and (len(groups) == 1 or 1 <= len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:]))


def is_number(text: str) -> bool:
    text = text[1:] if text[:1] in ("+", "-") else text
    over, stroke, under = text.partition("/")
    whole, point, digits = text.partition(".")
    decimal = point and (not whole or whole_number(whole)) and whole_number(digits) and "," not in digits
    return whole_number(text) or bool(stroke and whole_number(over) and whole_number(under)) or bool(decimal)


def by_trying(answer: str, expected: str) -> float:
    place, last = 0, None
    while place < len(answer):
        word = place and (answer[place - 1].isalnum() or answer[place - 1] == "_")
        rest = answer[place:]
        ends = [place + end for end in range(1, len(rest) + 1) if is_number(rest[:end]) and not within_a_group(rest, end)]
        last = answer[place : ends[-1]] if ends and not word else last
        place = ends[-1] if ends and not word else place + 1
    expected = expected.strip()
    if last is None or not is_number(expected) or any(value_of(each) is None for each in (last, expected)):
        return 0.0
    return float(value_of(last) == value_of(expected))


def within_a_group(text: str, end: int) -> bool:
    """Whether an end leaves a fourth digit behind a comma."""
    return "," in text[:end] and text[end : end + 1].isdigit() and text[end - 4 : end - 3] == ","


def value_of(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", ""))
    except ZeroDivisionError:
        return None
