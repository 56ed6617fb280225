"""Chunked linear cross-entropy and log-probabilities of tokens: the numbers of whole logits, a chunk of rows at a time."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from storage_peak import StoragePeak

from shared.loss import IGNORED, next_token_objective
from shared.model import chunked_loss as chunks
from shared.model.chunked_loss import chunked_loss, packed_next_token_objective, token_log_probs
from shared.model.config import ModelConfig
from shared.model.embedding import Head
from shared.model.transformer import TransformerModel

CONFIG = ModelConfig(
    vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64
)


def chunked(model, batch, rows):
    return model(batch["input_ids"], head_fn=partial(chunked_loss, targets=batch["targets"], rows=rows))


def batch_of(*shape: int) -> dict[str, torch.Tensor]:
    ids, targets = torch.randint(97, (2, *shape), generator=torch.Generator().manual_seed(3))
    targets[:, ::4] = -100
    return {"input_ids": ids, "targets": targets}


MODELS = {
    "untied": CONFIG,
    "tied": replace(CONFIG, tie_word_embeddings=True),
    "masked-language-model head": replace(CONFIG, head="mlm", tie_word_embeddings=True, hidden_act="gelu"),
    "scaled head": replace(CONFIG, logit_scale=0.1),
}


@pytest.mark.parametrize("rows", [1, 7, 39, 1000])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_chunked_loss_is_the_loss(config, rows):
    batch = batch_of(3, 13)
    whole, in_chunks = TransformerModel(config).double(), TransformerModel(config).double()
    expected = next_token_objective(whole, batch)
    found = chunked(in_chunks, batch, rows)
    torch.testing.assert_close(found.loss_sum, expected.loss_sum, rtol=1e-13, atol=0)
    assert torch.equal(found.token_count, expected.token_count) and found.token_count.dtype == torch.int64
    assert torch.equal(found.metrics["correct"], expected.metrics["correct"])
    (expected.loss_sum * 3).backward()
    (found.loss_sum * 3).backward()
    for (name, left), right in zip(in_chunks.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-11, atol=1e-13, msg=name)


def test_the_chunked_loss_adds_to_gradients_and_leaves_frozen_parameters_alone():
    model, batch = TransformerModel(CONFIG).double(), batch_of(3, 13)
    model.head.requires_grad_(False)
    for _ in range(2):
        chunked(model, batch, 8).loss_sum.backward()
    reference = TransformerModel(CONFIG).double()
    next_token_objective(reference, batch).loss_sum.backward()
    assert model.head.linear.weight.grad is None
    torch.testing.assert_close(model.embedding.tokens.weight.grad, 2 * reference.embedding.tokens.weight.grad, rtol=1e-11, atol=1e-13)


def test_the_chunked_loss_computes_no_gradient_in_evaluation():
    model, calls = TransformerModel(CONFIG), []
    model.head.register_forward_hook(lambda module, args, out: calls.append(out.requires_grad))
    with torch.no_grad():
        totals = chunked(model, batch_of(3, 13), 8)
    assert calls == [False] * 5 and not totals.loss_sum.requires_grad


def test_all_logits_are_never_there_at_once():
    config, batch = replace(CONFIG, vocab_size=4001), batch_of(4, 64)
    largest = {}
    for name, objective in (("whole", next_token_objective), ("in_chunks", partial(chunked, rows=16))):
        sizes = []
        model = TransformerModel(config)
        model.head.register_forward_hook(lambda module, args, out, sizes=sizes: sizes.append(out.numel()))
        objective(model, batch).loss_sum.backward()
        largest[name] = max(sizes)
    assert largest == {"whole": 256 * 4001, "in_chunks": 16 * 4001}


@pytest.mark.parametrize("compute", [chunked_loss, token_log_probs])
def test_a_chunk_has_about_two_million_logits_and_never_fewer_than_256_rows(compute, monkeypatch):
    """A vocabulary of millions would otherwise leave one row, or none, to a matrix product. Here the limit is 20,000 logits."""
    monkeypatch.setattr(chunks, "CHUNK", 20_000)
    found = {}
    for vocab_size in (50, 97):
        model, rows = TransformerModel(replace(CONFIG, vocab_size=vocab_size)), []
        model.head.register_forward_hook(lambda module, args, out, rows=rows: rows.append(len(out)))
        batch = {name: each % vocab_size for name, each in batch_of(8, 64).items()}
        with torch.no_grad():
            model(batch["input_ids"], head_fn=partial(compute, targets=batch["targets"]))
        found[vocab_size] = rows
    assert found == {50: [400, 112], 97: [256, 256]}
    assert [chunks.chunk_rows(size, on_gpu=on_gpu) for size, on_gpu in ((2**22, False), (2**22, True), (50304, True))] == [256, 256, 667]


def test_a_chunk_frees_the_gradient_of_the_head_before_the_next_one_makes_its_own():
    """At most three tensors of the head's size: its weight, the sum, and one chunk's gradient."""
    model, batch = TransformerModel(replace(CONFIG, vocab_size=3001)), batch_of(4, 64)
    with StoragePeak() as seen:
        head, hidden = model.head, torch.randn(4 * 64, CONFIG.hidden_size, requires_grad=True)
        before = head.linear.weight.nbytes
        chunked_loss(head, hidden, batch["targets"].flatten() % 3001, rows=4)
    assert seen.peak < 3.9 * before


def test_under_autocast_the_chunked_loss_agrees_to_bfloat16():
    batch = batch_of(3, 13)
    gradients = []
    for objective in (next_token_objective, partial(chunked, rows=8)):
        model = TransformerModel(replace(CONFIG, tie_word_embeddings=True))
        with torch.autocast("cpu", torch.bfloat16):
            totals = objective(model, batch)
        assert totals.loss_sum.dtype == torch.float32
        totals.loss_sum.backward()
        gradients.append(model.embedding.tokens.weight.grad)
    assert gradients[0].dtype == torch.float32
    assert (gradients[0] - gradients[1]).abs().max() < 0.02 * gradients[0].abs().max()


def expected_log_probs(logits, targets):
    """torch's log_softmax and gather, in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != IGNORED
    return wide.log_softmax(dim=-1).gather(-1, targets.where(counted, 0).unsqueeze(-1)).squeeze(-1).where(counted, 0)


def log_probs(model, batch, rows=None):
    return model(batch["input_ids"], head_fn=partial(token_log_probs, targets=batch["targets"], rows=rows))


@pytest.mark.parametrize("rows", [1, 7, None])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_token_log_probs_equal_log_softmax_in_values_and_gradients(config, rows):
    batch, weights = batch_of(3, 13), torch.randn(3, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    whole, in_chunks = TransformerModel(config).double(), TransformerModel(config).double()
    expected, found = expected_log_probs(whole(batch["input_ids"]), batch["targets"]), log_probs(in_chunks, batch, rows)
    assert found.shape == (3, 13) and found.dtype == torch.float64 and (found[:, ::4] == 0).all()
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    (expected * weights).sum().backward()  # another weight for each token, as preferences have
    (found * weights).sum().backward()
    for (name, left), right in zip(in_chunks.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-11, atol=1e-13, msg=name)


def test_token_log_probs_sum_to_the_loss():
    model, batch = TransformerModel(CONFIG).double(), batch_of(3, 13)
    torch.testing.assert_close(-log_probs(model, batch, 8).sum(), chunked(model, batch, 8).loss_sum, rtol=1e-13, atol=0)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_token_log_probs_under_autocast_are_float32_and_their_gradients_too(precision):
    """The backward pass computes the chunk's logits again, and does so in the precision of the forward pass."""
    batch, gradients = batch_of(3, 13), []
    for whole in (True, False):
        model, dtypes = TransformerModel(replace(CONFIG, tie_word_embeddings=True)), []
        model.head.register_forward_hook(lambda module, args, out, dtypes=dtypes: dtypes.append(out.dtype))
        with torch.autocast("cpu", precision):
            found = expected_log_probs(model(batch["input_ids"]), batch["targets"]) if whole else log_probs(model, batch, 8)
        assert found.dtype == torch.float32
        found.sum().backward()
        assert set(dtypes) == {precision} and len(dtypes) == (1 if whole else 10)
        gradients.append((found.detach(), model.embedding.tokens.weight.grad))
    torch.testing.assert_close(gradients[1][0], gradients[0][0], rtol=1e-6, atol=1e-6)
    assert (gradients[0][1] - gradients[1][1]).abs().max() < 0.02 * gradients[0][1].abs().max()


def test_token_log_probs_never_hold_all_logits():
    config, batch, sizes = replace(CONFIG, vocab_size=4001), batch_of(4, 64), []
    model = TransformerModel(config)
    model.head.register_forward_hook(lambda module, args, out: sizes.append(out.numel()))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        found = log_probs(model, batch, rows=16)
    assert max(kept) < 16 * 4001 < found.numel() * 4001, "the forward pass keeps no logits at all"
    found.sum().backward()
    assert set(sizes) == {16 * 4001} and len(sizes) == 2 * 16
    with torch.no_grad():
        sizes.clear()
        assert not log_probs(model, batch, rows=16).requires_grad and len(sizes) == 16


class HalvedScores:
    """Half of the vocabulary on each of two ranks, in little: both halves are here, and nothing looks at whole logits but in parts."""

    def __init__(self, logits, targets):
        self.logits, self.targets = logits, targets
        self.counted = targets != IGNORED

    def halves(self):
        middle = self.logits.shape[-1] // 2
        for part, first in ((self.logits[:, :middle], 0), (self.logits[:, middle:], middle)):
            here = (self.targets >= first) & (self.targets < first + part.shape[-1])
            yield part, here, (self.targets - first).where(here, 0).unsqueeze(-1)

    def statistics(self):
        """logsumexp, the target's logit and the largest: a sum or a maximum over the ranks each."""
        normalizer = torch.stack([part.logsumexp(dim=-1) for part, _, _ in self.halves()]).logsumexp(dim=0)
        chosen = sum(part.gather(-1, index).squeeze(-1) * here for part, here, index in self.halves())
        largest = torch.stack([part.amax(dim=-1) for part, _, _ in self.halves()]).amax(dim=0)
        return normalizer, chosen, largest

    def cross_entropy(self):
        return self.token_losses().sum(), self.counted.sum()

    def token_losses(self):
        normalizer, chosen, _ = self.statistics()
        return (normalizer - chosen) * self.counted

    def gradient(self):
        normalizer, _, _ = self.statistics()
        parts = []
        for part, here, index in self.halves():
            gradient = (part - normalizer.unsqueeze(-1)).exp()
            parts.append(gradient.scatter_add(-1, index, -here.to(part.dtype).unsqueeze(-1)))
        return torch.cat(parts, dim=-1) * self.counted.unsqueeze(-1)

    def count_correct(self):
        _, chosen, largest = self.statistics()
        return ((chosen == largest) & self.counted).sum()


class HalvedVocabulary(Head):
    scores = staticmethod(HalvedScores)


def test_a_head_with_scores_of_its_own_serves_every_objective(monkeypatch):
    """Chapter 07's vocabulary-parallel head in little: nothing but the head's own scores looks at its logits."""
    batch, plain, parallel = batch_of(3, 13), TransformerModel(CONFIG).double(), TransformerModel(CONFIG).double()
    parallel.head.__class__ = HalvedVocabulary
    expected = [packed_next_token_objective(plain, batch), log_probs(plain, batch)]
    monkeypatch.delattr(Head, "scores")
    found = [packed_next_token_objective(parallel, batch), log_probs(parallel, batch)]
    assert torch.equal(found[0].metrics["correct"], expected[0].metrics["correct"])
    torch.testing.assert_close(found[0].loss_sum, expected[0].loss_sum, rtol=1e-13, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-14)
    (found[0].loss_sum + found[1].square().sum()).backward()
    monkeypatch.undo()
    (expected[0].loss_sum + expected[1].square().sum()).backward()
    for (name, left), right in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-11, atol=1e-13, msg=name)
