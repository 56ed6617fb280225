"""Tokenizers and shards: what goes in comes out, special tokens cannot be forged, and damage is named and refused."""

import itertools
import json
import random

import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from shared import output_files
from shared.data.shards import ENDING, Shard, ShardError, TokenStore, write_shard
from shared.data.tokenizer import END, TextTokenizer, TokenizerError, special_names

PROSE = ["the cat sat on the mat", "naïve café, 日本語 and 🙂\r\n\ttabs", "def f(x):\n    return x ** 2\n"] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer.train(PROSE, 320, sentinels=7)


def random_texts(count: int):
    draw = random.Random(0)
    every = [chr(c) for c in itertools.chain(range(1, 0x300), range(0x3040, 0x3060), range(0x1F600, 0x1F640))] + special_names(2)
    for _ in range(count):
        yield "".join(draw.choices(every, k=draw.randrange(0, 60)))


# The tokenizer.


def test_text_comes_back_to_the_byte_and_never_holds_a_special_token(tokenizer):
    for text in random_texts(300):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.special_ids.values())
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_special_tokens_have_one_id_each_and_stand_for_no_bytes(tokenizer):
    assert list(tokenizer.special_ids) == special_names(7) and len(set(tokenizer.special_ids.values())) == len(special_names(7))
    assert tokenizer.end_id == tokenizer.special(END) and len(tokenizer.sentinels) == 7
    assert not tokenizer.byte_lengths[list(tokenizer.special_ids.values())].any()
    ids = [*tokenizer.encode("a"), tokenizer.end_id]
    assert tokenizer.decode(ids) == "a" and tokenizer.decode(ids, keep_special=True) == "a<|end|>"
    with pytest.raises(TokenizerError, match=r"no special token '<\|no\|>': it has <\|end\|>"):
        tokenizer.special("<|no|>")


def test_training_is_repeatable_and_fills_the_vocabulary(tokenizer):
    again = TextTokenizer.train(iter(PROSE), 320, sentinels=7)
    assert again.identity == tokenizer.identity and again.vocab_size == 320
    assert TextTokenizer.train(PROSE[:1], 320, sentinels=7).identity != tokenizer.identity
    with pytest.raises(TokenizerError, match="vocab_size is 200: 17 special tokens and 256 bytes need 273"):
        TextTokenizer.train(PROSE, 200, sentinels=7)


def test_saving_and_loading_keep_identity_and_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = TextTokenizer.load(path)
        assert (loaded.identity, loaded.end_id, loaded.vocab_size) == (tokenizer.identity, tokenizer.end_id, tokenizer.vocab_size)
        assert loaded.encode(PROSE[1] + END) == tokenizer.encode(PROSE[1] + END)
    batch = loaded.encode_batch_fast(PROSE)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text) for text in PROSE]


def test_a_tokenizer_of_transformers_is_read(tmp_path):
    import transformers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "<stop>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(PROSE, trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<stop>")
    theirs.save_pretrained(tmp_path)
    ours = TextTokenizer.load(tmp_path)
    assert ours.end == "<stop>" and ours.end_id == theirs.eos_token_id
    for text in PROSE:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.encode("<stop>")) == "<stop>" and ours.end_id not in ours.encode("<stop>")


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="does not exist"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        TextTokenizer.load(tmp_path)
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(TokenizerError, match=r"no special token that ends a document\. It has: none"):
        TextTokenizer(bare)


# Shards.


DOCUMENTS = [[[5, 6, 7, 0], [8, 0], [0]], [[9] * 40 + [0]], [], [[1, 2, 0]]]  # by shard
FLAT = [document for shard in DOCUMENTS for document in shard]


@pytest.fixture
def folder(tmp_path):
    for number, documents in enumerate(DOCUMENTS):
        write_shard(tmp_path / f"{number:05}{ENDING}", documents, [10 * len(ids) for ids in documents], "one", 300)
    return tmp_path


def test_a_store_is_the_list_of_its_documents(folder):
    store = TokenStore(folder, "one")
    assert len(store) == 5 and store.lengths.tolist() == [4, 2, 1, 41, 3] and store.token_count == 51
    assert [store.document(i).tolist() for i in range(5)] == FLAT
    assert store.byte_counts.tolist() == [40, 20, 10, 410, 30] and store.vocab_size == 300
    for number in (-1, 5):
        with pytest.raises(IndexError, match="There is no document"):
            store.document(number)


def test_documents_are_views_of_the_file_that_nobody_can_write_to(folder):
    document = TokenStore(folder).document(3)
    assert document.base is not None and not document.flags.owndata and not document.flags.writeable


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_are_as_narrow_as_the_vocabulary_allows(tmp_path, vocab_size, dtype):
    ids = [vocab_size - 1, 0]
    write_shard(tmp_path / f"0{ENDING}", [ids], [1], "one", vocab_size)
    store = TokenStore(tmp_path)
    assert store.document(0).dtype == dtype and store.document(0).tolist() == ids
    for wrong in ([vocab_size], [-1]):
        with pytest.raises(ValueError, match=f"A shard for {vocab_size} token ids was given ids from"):
            write_shard(tmp_path / f"1{ENDING}", [wrong], [1], "one", vocab_size)
    with pytest.raises(ValueError, match="1 documents and 2 byte counts"):
        write_shard(tmp_path / f"1{ENDING}", [ids], [1, 2], "one", vocab_size)


def test_any_tool_of_the_format_reads_a_shard(folder):
    arrays = load_file(folder / f"00000{ENDING}")
    assert arrays["tokens"].tolist() == sum(DOCUMENTS[0], []) and arrays["offsets"].tolist() == [0, 4, 6, 7]
    with safe_open(folder / f"00000{ENDING}", framework="np") as file:
        assert file.metadata() == Shard(folder / f"00000{ENDING}").metadata


def test_the_same_documents_are_the_same_bytes(folder, tmp_path):
    write_shard(tmp_path / "again", DOCUMENTS[0], [40, 20, 10], "one", 300)
    assert (tmp_path / "again").read_bytes() == (folder / f"00000{ENDING}").read_bytes()


def test_every_cut_and_every_flipped_bit_is_refused_by_name(folder):
    path = folder / f"00000{ENDING}"
    whole, metadata = path.read_bytes(), Shard(path).metadata
    cuts = [whole[:size] for size in (0, 4, 8, 60, len(whole) // 2, len(whole) - 1)] + [whole + b"\0"]
    flips = []
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        flips.append(bytes(changed))
    for damaged in cuts + flips:
        path.write_bytes(damaged)
        try:
            shard = Shard(path)
        except ShardError as error:
            assert str(path) in str(error)
        else:  # a bit that means nothing: in the padding of the header
            assert [shard.tokens.tolist(), shard.offsets.tolist(), shard.metadata] == [sum(DOCUMENTS[0], []), [0, 4, 6, 7], metadata]
    tokens_at = whole.index(np.array([5, 6, 7, 0], np.uint16).tobytes())
    path.write_bytes(whole[:tokens_at] + b"\x04" + whole[tokens_at + 1 :])
    with pytest.raises(ShardError, match="was changed after it was written"):
        TokenStore(folder)
    assert TokenStore(folder, verify=False).document(0)[0] == 4, "the checksum, and nothing else, found it"


def test_other_files_and_other_tokenizers_are_refused(folder, tmp_path):
    with pytest.raises(ShardError, match="was made by tokenizer one, not by two: use the tokenizer that lies beside it"):
        TokenStore(folder, "two")
    write_shard(folder / f"00009{ENDING}", [[1]], [1], "two", 300)
    with pytest.raises(ShardError, match=f"00009{ENDING} was made by tokenizer two"):
        TokenStore(folder)
    save_file({"tokens": np.zeros(1)}, folder / f"00009{ENDING}")
    with pytest.raises(ShardError, match="00009"):
        TokenStore(folder)
    with pytest.raises(ShardError, match="holds no shards of tokens"):
        TokenStore(tmp_path / "nothing")


def test_a_shard_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    class Died(BaseException):
        pass

    def die(_):
        raise Died

    monkeypatch.setattr(output_files.os, "fsync", die)
    with pytest.raises(Died):
        write_shard(tmp_path / f"0{ENDING}", [[1]], [1], "one", 300)
    assert not list(tmp_path.glob(f"*{ENDING}"))


def test_the_fingerprint_tells_stores_apart(folder, tmp_path):
    before = TokenStore(folder).fingerprint
    assert TokenStore(folder).fingerprint == before
    write_shard(folder / f"00009{ENDING}", [[1]], [1], "one", 300)
    assert TokenStore(folder).fingerprint != before
    assert json.loads(json.dumps(before)) == before
