"""Ring attention by itself: the numbers of one process for any mask, position bias, dtype and size of ring."""

from functools import partial

import pytest
import torch
from ring_runs import HEADS, RULES, SEQ, TWO_OF_FOUR, alone, given, over_ranks, require_close
from torch import Tensor

from shared.model.attention import sdpa_attention
from shared.model.masks import Causal, Documents, Mask, Padding, to_attention_mask
from shared.model.rope import alibi_bias
from shared.parallel.context import blocks, ring
from shared.parallel.context.blocks import merge_attention
from shared.parallel.context.ring import gathered_attention, ring_attention


@pytest.mark.parametrize("attend", [ring_attention, gathered_attention])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rule", RULES)
def test_attention_over_ranks_is_that_of_one_process(rule, ranks, attend):
    require_close(over_ranks(ranks, RULES[rule], given(), attend=attend), alone(RULES[rule], given()))


@pytest.mark.parametrize("attend", [ring_attention, gathered_attention])
def test_a_rule_that_is_one_row_for_all_queries(attend):
    """All look at the first key, so weights are 1 and only values have a gradient."""
    rule = Padding((torch.arange(SEQ) < 1).repeat(2, 1))
    out, *_, of_values = over_ranks(4, rule, given(), attend=attend)
    expected, *_, of_values_alone = alone(rule, given())
    require_close([out, of_values], [expected, of_values_alone])


@pytest.mark.parametrize("rule", ["causal", "packed, both ways"])
def test_without_a_kernel_the_same_is_computed(rule, monkeypatch):
    monkeypatch.setattr(blocks, "has_kernel", lambda queries: False)
    require_close(over_ranks(3, RULES[rule], given()), alone(RULES[rule], given()))
    bias = partial(alibi_bias, HEADS)
    require_close(over_ranks(2, RULES[rule], given(), bias), alone(RULES[rule], given(), bias))


def test_autocast_around_it_changes_nothing(monkeypatch):
    """It would compute float32 scores in bfloat16."""
    monkeypatch.setattr(blocks, "has_kernel", lambda queries: False)
    found = over_ranks(2, Causal(), given(dtype=torch.float32), attend=in_autocast)
    require_close(found, alone(Causal(), given()), 1e-6)


def in_autocast(*arguments):
    with torch.autocast("cpu", torch.bfloat16):  # of this thread
        return ring_attention(*arguments)


@pytest.mark.parametrize("rule", ["causal", "full", "window in packed"])
@pytest.mark.parametrize("attend", [ring_attention, gathered_attention])
def test_a_bias_is_that_of_the_whole_sequences_positions(rule, attend):
    bias = partial(alibi_bias, HEADS)
    require_close(over_ranks(4, RULES[rule], given(), bias, attend), alone(RULES[rule], given(), bias))


def test_two_documents_of_four_over_two_ranks():
    """Rank 0 has positions 0, 1, 6, 7 and rank 1 has 2, 3, 4, 5: each has a half of both documents."""
    rule, tensors = Causal() & Documents(TWO_OF_FOUR), given(8)
    whole = over_ranks(2, rule, tensors)
    require_close(whole, alone(rule, tensors))
    halves = [alone(Causal(), [x[:, :, half] for x in tensors]) for half in (slice(0, 4), slice(4, 8))]
    require_close(whole, [torch.cat(pair, dim=2) for pair in zip(*halves, strict=True)])


@pytest.mark.parametrize("changed, moved", [(0, [0, 1, 2, 3]), (2, [2, 3]), (4, [4, 5, 6, 7]), (7, [7])])
def test_a_changed_token_moves_the_outputs_of_its_own_document_alone(changed, moved):
    rule, tensors = Causal() & Documents(TWO_OF_FOUR), given(8)
    others = [x.clone() for x in tensors]
    others[1][:, :, changed] += 1.0
    others[2][:, :, changed] -= 1.0
    before, after = over_ranks(2, rule, tensors)[0], over_ranks(2, rule, others)[0]
    assert [place for place in range(8) if not torch.equal(before[:, :, place], after[:, :, place])] == moved


def errors(found: list[Tensor], rule: Mask) -> list[float]:
    expected = alone(rule, given(dtype=torch.bfloat16))
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


def errors_of_one_process(rule: Mask) -> list[float]:
    *inputs, upstream = given(dtype=torch.bfloat16)
    inputs, places = [x.requires_grad_() for x in inputs], torch.arange(SEQ)
    mask = to_attention_mask(rule, places, places)
    out = sdpa_attention(*inputs, mask, 0.4, 0.0)
    return errors([out.detach(), *torch.autograd.grad(out, inputs, upstream)], rule)


def errors_of_ranks(ranks: int, rule: Mask) -> list[float]:
    found = over_ranks(ranks, rule, given(dtype=torch.bfloat16))
    assert all(x.dtype == torch.bfloat16 for x in found)
    return errors(found, rule)


@pytest.mark.parametrize("rule", ["full", "causal", "packed"])
def test_the_error_of_bfloat16_does_not_grow_with_the_ring(rule):
    one = errors_of_one_process(RULES[rule])
    for ranks in (2, 4, 8):
        assert all(error < 1.4 * limit for error, limit in zip(errors_of_ranks(ranks, RULES[rule]), one, strict=True)), ranks


def test_a_merge_in_bfloat16_is_seen(monkeypatch):
    narrow = lambda *parts: [part.bfloat16().float() for part in merge_attention(*parts)]  # noqa: E731
    monkeypatch.setattr(ring, "merge_attention", narrow)
    assert errors_of_ranks(8, Causal())[0] > 1.4 * errors_of_one_process(Causal())[0]


@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_large_scores_do_not_overflow(scale):
    tensors = given(scale=scale)
    found = over_ranks(4, Causal(), [x.float() for x in tensors])
    assert all(x.isfinite().all() for x in found)
    require_close(over_ranks(4, Causal(), tensors), alone(Causal(), tensors), 1e-11)


def test_a_query_that_may_look_nowhere_gets_zeros_and_passes_none():
    rule = RULES["one document is nobody's"]
    out, of_queries, of_keys, of_values = over_ranks(4, rule, given(dtype=torch.float32))
    assert not out[:, :, 14:].any() and not of_queries[:, :, 14:].any() and out[:, :, :10].all()
    assert all(x.isfinite().all() for x in (out, of_queries, of_keys, of_values))


# Wrong on purpose: the comparison with one process must see each.


def contiguous(rank: int, ranks: int) -> tuple[int, int]:
    return 2 * rank, 2 * rank + 1


def kept_at_the_last_rank(self, hops: int, found: dict) -> None:
    if hops == 0:
        self.home = found


WRONG = {
    "chunks in another order than positions": ("zigzag.own_chunks", contiguous),
    "the last part's log-sum-exp kept": ("ring.merge_attention", lambda a, b, c, d: (merge_attention(a, b, c, d)[0], d)),
    "parts added up": ("ring.merge_attention", lambda a, b, c, d: (a + c, torch.logaddexp(b, d))),
    "gradients that do not come home": ("ring.Returning.add", kept_at_the_last_rank),
    "a chunk's own indices": ("zigzag.ContextMask.indices", lambda self, chunk: torch.arange(self.size)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_ring_is_seen(wrong, monkeypatch):
    place, what = WRONG[wrong]
    monkeypatch.setattr(f"shared.parallel.context.{place}", what)
    found = over_ranks(4, RULES["packed"], given())
    with pytest.raises(AssertionError):
        require_close(found, alone(RULES["packed"], given()))
