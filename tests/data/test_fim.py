"""Fill in the middle moves text and loses none: to the byte, from both orders, wherever it is cut."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from shared.corpus import embedded_corpus
from shared.data.fim import FillInMiddle, FimConfig, FimTokens, fill_in_middle, undo_fim

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|end|>")
STRANGE = [
    "",
    "a",
    "\n",
    "\r\n\r\n x",
    "naïve café, 漢字かな, עברית, 😀👩‍👩‍👧 and a flag 🇪🇺",
    "e\u0301 is e with an accent, \ufeff a mark, \u2028 a line separator, \ufffd a replacement",
    "text that says <|fim_prefix|> and <|fim_middle|><|end|> itself",
    "\t\ttabs   and   spaces   \n\n\n",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator([document.content.decode() for document in embedded_corpus().held_out[:20]], trainer)
    made.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    made.encode_special_tokens = True  # text never becomes a special token
    return made


@pytest.fixture(scope="module")
def tokens(tokenizer) -> FimTokens:
    return FimTokens(*map(tokenizer.token_to_id, NAMES))


@pytest.fixture(scope="module")
def transform(tokenizer, tokens):
    """A transform with any configuration."""
    encode, decode = (lambda text: tokenizer.encode(text).ids), (lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    return lambda **options: FillInMiddle(FimConfig(**options), encode, decode, tokens)


def texts() -> list[str]:
    return STRANGE + [document.content.decode()[:3000] for document in embedded_corpus().held_out[20:32]]


@pytest.mark.parametrize("split", ["character", "line", "token"])
@pytest.mark.parametrize("spm_share", [0.0, 1.0])
def test_undoing_gives_the_text_back_to_the_byte(split, spm_share, transform, tokens):
    moving, generator = transform(rate=1.0, spm_share=spm_share, split=split), np.random.default_rng(3)
    for text in texts() * 4:
        ids = np.array([*moving.encode(text), tokens.end])
        moved = moving(ids, generator)
        assert moved[0] == tokens.prefix and moved[-1] == tokens.end
        assert [int((moved == token).sum()) for token in tokens] == [1, 1, 1, 1]
        assert undo_fim(moved.tolist(), tokens, moving.decode) == text


def test_a_lost_character_is_noticed(transform, tokens):
    """The negative control of the test above."""
    ids = fill_in_middle("abcdef", 2, 4, "psm", lambda text: [ord(letter) for letter in text], tokens)
    ids.remove(ord("c"))
    assert undo_fim(ids, tokens, lambda ids: "".join(map(chr, ids))) == "abdef"


def test_a_piece_that_begins_inside_a_character_keeps_its_tokens(transform, tokens):
    """The packer cuts long documents between any two tokens; half a character has no text, so such a piece is cut by tokens."""
    moving = transform(rate=1.0)
    whole = moving.encode("漢字")
    piece = np.array(whole[1:] + moving.encode(" and more"))
    assert "\ufffd" in moving.decode(piece.tolist())
    generator = np.random.default_rng(0)
    for _ in range(20):
        moved = moving(piece, generator).tolist()
        assert sorted(set(moved) - set(tokens)) == sorted(set(piece.tolist()))
        assert len(moved) == len(piece) + 4


def test_the_same_generator_moves_the_same(transform, tokens):
    moving, text = transform(rate=1.0), texts()[-1]
    ids = np.array([*moving.encode(text), tokens.end], dtype=np.uint16)
    first, again, other = (moving(ids, np.random.default_rng(seed)) for seed in (4, 4, 5))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert first.dtype == np.uint16


def test_each_call_takes_four_draws_whatever_it_does(transform, tokens):
    """So what happens to one document does not change what happens to the next."""
    ids = np.array([*transform().encode("some text"), tokens.end])
    left = [np.random.default_rng(0) for _ in range(3)]
    for generator, rate in zip(left, (0.0, 0.5, 1.0), strict=True):
        transform(rate=rate)(ids, generator)
    assert len({generator.random() for generator in left}) == 1


def test_rate_and_order_are_as_configured(transform, tokens):
    """Binomial: of 2,000 documents 70 % moved and of these 30 % in spm; five standard deviations are 5.1 % and 6.1 %."""
    moving, generator = transform(rate=0.7, spm_share=0.3), np.random.default_rng(0)
    ids = np.array([*moving.encode("def f(x): return x"), tokens.end])
    moved = [found for found in (moving(ids, generator) for _ in range(2000)) if found[0] == tokens.prefix]
    spm = sum(found[1] == tokens.suffix for found in moved) / len(moved)  # psm with an empty prefix looks the same: 1 in 19 squared
    assert abs(len(moved) / 2000 - 0.7) < 0.051 and 0.3 - 0.061 < spm < 0.3 + 0.061 + 0.11


def test_cuts_by_lines_fall_on_lines(transform, tokens):
    moving, generator = transform(rate=1.0, spm_share=0.0, split="line"), np.random.default_rng(0)
    text = "one\n\n  two\nthree"
    for _ in range(50):
        ids = moving(np.array([*moving.encode(text), tokens.end]), generator).tolist()
        suffix, middle = ids.index(tokens.suffix), ids.index(tokens.middle)
        for part in (ids[1:suffix], ids[middle + 1 : -1]):
            found = moving.decode(part)
            assert found in text and (found == "" or found.endswith(("\n", "three")))


def test_cuts_between_characters_fall_inside_tokens_too(transform, tokens):
    """With token-level cuts, the parts joined again are the document's own tokens; with character-level cuts often not."""
    text = texts()[-1][:400]
    for split, same in (("token", True), ("character", False)):
        moving, generator = transform(rate=1.0, spm_share=0.0, split=split), np.random.default_rng(0)
        ids = moving.encode(text)
        found = []
        for _ in range(20):
            moved = moving(np.array([*ids, tokens.end]), generator).tolist()
            suffix, middle = moved.index(tokens.suffix), moved.index(tokens.middle)
            found.append(moved[1:suffix] + moved[middle + 1 : -1] + moved[suffix + 1 : middle] == ids)
        assert all(found) == same


def test_a_tokenizer_that_makes_special_tokens_from_text_is_refused(tokenizer, tokens):
    def careless(text: str) -> list[int]:
        tokenizer.encode_special_tokens = False
        ids = tokenizer.encode(text).ids
        tokenizer.encode_special_tokens = True
        return ids

    moving = FillInMiddle(FimConfig(rate=1.0), careless, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), tokens)
    ids = np.array([*tokenizer.encode("a <|fim_middle|> in the text").ids, tokens.end])
    with pytest.raises(ValueError, match="turns text into the special tokens"):
        moving(ids, np.random.default_rng(0))


@pytest.mark.parametrize("ids", [[601, 5, 602, 7, 600], [601, 5, 603, 7, 602, 8, 600], [601, 5, 602, 602, 603, 600]])
def test_a_broken_document_is_refused(ids):
    with pytest.raises(ValueError, match="each once, in this order"):
        undo_fim(ids, FimTokens(601, 602, 603, 600), str)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"rate": 1.5}, "rate is 1.5"), ({"spm_share": -0.1}, "spm_share is -0.1"), ({"split": "word"}, "character, line, token")],
)
def test_a_configuration_that_cannot_be_meant_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        FimConfig(**options)
