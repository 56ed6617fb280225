"""Reference log-probabilities: the same from a model beside, from the base of an adapter, and from the file of a cache."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import test_preference_rows
import torch
from pair_rows import pair_batch
from test_preference_rows import SIZES, loaders_of, made  # noqa: F401 (a fixture)

from shared.course.errors import CourseError
from shared.data.shards import TokenStore, write_shard
from shared.finetune.adapters import attach_adapter
from shared.finetune.config import AdapterConfig
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.parallel.comm.threads import run_threads
from shared.preference import reference
from shared.preference.log_probs import score_answers
from shared.preference.reference import ReferencedLoader, cached_reference, scorer

MODEL = ModelConfig(
    vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=32,
    initializer_range=0.3, hidden_dropout=0.2,
)  # fmt: skip
SEQ = 25


class Steps:
    """A loader of two steps, of two micro-batches each."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        while self.step < 2:
            self.step += 1
            yield [plain(self.step, [2, 1]), plain(-self.step, [0, 1])]

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def plain(seed: int, pairs: list[int]):
    batch = pair_batch(seed + 10, pairs, SEQ, 23)
    return {name: batch[name] for name in ("input_ids", "targets", "documents", "positions")}


def store_of(folder) -> TokenStore:
    generator = np.random.default_rng(0)
    documents = [generator.integers(23, size=size) for size in generator.integers(3, 12, size=11)]
    trained = [np.arange(len(each)) >= 2 for each in documents]
    write_shard(folder / "a.tokens.safetensors", documents[:6], [1] * 6, "tokenizer", 23, trained[:6])
    write_shard(folder / "b.tokens.safetensors", documents[6:], [1] * 5, "tokenizer", 23, trained[6:])
    return TokenStore(folder)


def test_the_loader_adds_the_reference_and_keeps_its_position():
    model, loader = TransformerModel(MODEL), Steps()
    wrapped = ReferencedLoader(loader, scorer(model))
    first = next(iter(wrapped))
    assert wrapped.state_dict() == {"step": 1}
    for batch, expected in zip(first, next(iter(Steps())), strict=True):
        assert torch.equal(batch["reference"], score_answers(model, expected))
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
    wrapped.load_state_dict({"step": 0})
    again = next(iter(ReferencedLoader([plain(1, [2, 1])], scorer(model))))
    assert torch.equal(again["reference"], first[0]["reference"])


def test_the_base_of_an_adapter_is_the_model_without_it():
    base = TransformerModel(MODEL)
    policy = attach_adapter(copy.deepcopy(base), AdapterConfig(targets=("all-linear",), dropout=0.5))
    for name, parameter in policy.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter)
    batch = plain(1, [2, 1])
    assert torch.equal(scorer(policy, without=policy)(batch), score_answers(base, batch))
    assert not torch.allclose(scorer(policy)(batch), score_answers(base, batch))


def test_the_cache_holds_what_the_model_says_of_each_document_by_itself(tmp_path):
    store, model = store_of(tmp_path), TransformerModel(MODEL).eval()
    found = cached_reference(store, scorer(model), "m" * 64, seq=SEQ, batch_size=2)
    for number in range(len(store)):
        ids = torch.from_numpy(store.document(number).astype(np.int64))
        said = model(ids[None, :-1])[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0].detach().numpy()
        expected = np.where(store.trained(number), np.append(0, said), 0)
        np.testing.assert_allclose(found.reference(number), expected, rtol=1e-5)


def test_the_cache_is_computed_once_and_again_for_another_model_another_store_or_a_damaged_file(tmp_path):
    store, calls = store_of(tmp_path), []

    def score(batch):
        calls.append(1)
        return -torch.rand(batch["targets"].shape)

    def read(identity: str = "m" * 64, of: TokenStore = store):
        before = len(calls)
        values = cached_reference(of, score, identity, seq=SEQ, batch_size=2).log_probs
        return values, len(calls) > before

    first, computed = read()
    again, computed_again = read()
    assert computed and not computed_again and np.array_equal(first, again)
    assert read("n" * 64)[1] and not read("n" * 64)[1]
    assert read("m" * 12 + "x" * 52)[1]  # the same name of the file, another model in its header
    file = next(tmp_path.glob("reference-nnn*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert read("n" * 64)[1] and not read("n" * 64)[1]
    file.write_bytes(content[:40])
    assert read("n" * 64)[1]
    write_shard(tmp_path / "c.tokens.safetensors", [[1, 2, 3]], [1], "tokenizer", 23, [[0, 0, 1]])
    assert read(of=TokenStore(tmp_path))[1]


def test_ranks_share_the_work_of_the_cache_and_have_the_same_values(tmp_path):
    store, model = store_of(tmp_path), TransformerModel(MODEL).eval()
    one = cached_reference(store, scorer(model), "o" * 64, seq=SEQ, batch_size=2).log_probs
    rows = []

    def work(world):
        def score(batch):
            rows.append(len(batch["targets"]))
            return score_answers(model, batch)

        return cached_reference(store, score, "p" * 64, seq=SEQ, batch_size=2, world=world, data=world).log_probs

    for values in run_threads(work, 2):
        np.testing.assert_allclose(values, one, rtol=1e-5)
    assert len(list(tmp_path.glob("reference-ppp*"))) == 1


def test_a_document_longer_than_a_row_is_refused(tmp_path):
    with pytest.raises(CourseError, match="holds texts of 9 tokens, and a row takes 8: prepare them for shorter rows"):
        cached_reference(store_of(tmp_path), None, "m" * 64, seq=8, batch_size=2)


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def fail(path, content):
        raise CourseError(f"{path} cannot be written")

    monkeypatch.setattr(reference, "write_atomically", fail)
    with pytest.raises(CourseError, match="cannot be written"):
        cached_reference(store_of(tmp_path), lambda batch: torch.zeros(batch["targets"].shape), "m" * 64, seq=SEQ, batch_size=2)
    assert not list(tmp_path.glob("reference*"))


def test_rows_of_a_store_that_knows_its_reference_have_what_the_model_says_of_them(made):
    """The cache reads documents one by one, in other rows than training does."""
    prepared = made["pairs"]
    model = TransformerModel(ModelConfig(vocab_size=prepared.tokenizer.vocab_size, **SIZES)).eval()
    sizes = {"seq": test_preference_rows.SEQ, "batch_size": 3}
    known = [cached_reference(store, scorer(model), "r" * 64, **sizes) for store in (prepared.training, prepared.held_out)]
    loaders = loaders_of(replace(prepared, training=known[0], held_out=known[1]), epochs=1)
    batches = [batch for step in loaders[0] for batch in step] + list(loaders[1])
    assert len(batches) > 4
    for batch in batches:
        torch.testing.assert_close(batch["reference"], score_answers(model, batch), rtol=1e-4, atol=1e-5)
    plain = loaders_of(prepared, epochs=1)[0]
    with pytest.raises(CourseError, match="its data was"):  # a run cannot go on with another reference
        plain.load_state_dict(loaders[0].state_dict())
