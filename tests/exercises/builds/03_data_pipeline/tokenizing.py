"""Stages 1, 2, 3 and 5 of build 03: words, training, encoding and special tokens, as Hugging Face's tokenizers has them."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from shared.course.checking import Case

from .pieces import (
    LIBRARY,
    TEXT,
    Results,
    in_bytes,
    library,
    library_merges,
    library_vocabulary,
    numbers,
    real_text,
    written_merges,
)

CODE = "def add(a, b):\n    return a + b  # naïve, 漢字, 😀\n\n\tx1 = 42\r\n"
ACCENTS = "Zażółć gęślą jaźń. Ĝis la revido, ñandú! Straße"

# Stage 1: words


def words_case(title: str, text: str) -> Case:
    def observe(adapters: Any, text: str) -> Results:
        found = list(adapters.words(text))
        return {"words": [repr(word) for word in found], "joined, they are the text": b"".join(found) == text.encode()}

    def expected(text: str) -> Results:
        found = [in_bytes(word) for word, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
        return {"words": [repr(word) for word in found], "joined, they are the text": True}

    return Case("oracle", title, lambda: {"text": text}, expected, LIBRARY, observe)


WORDS = (
    words_case("a space belongs to the word behind it", "low lower, lowest"),
    words_case("no text", ""),
    words_case("letters, digits and signs", "x1 = 42+y_2**3; // 100% a-b __init__"),
    words_case("what an apostrophe begins", "I'm we'll they've it's don't you're he'd 'tis I'M"),
    words_case("spaces: the last one belongs to the word", "a  b   c\td\n  e \n\n f  "),
    words_case("nothing but space", " \n\t  "),
    words_case("letters that are not ASCII", ACCENTS),
    words_case("digits and signs that are not ASCII", "x² ½ ٣٤ Ⅷ 3€ “q” – ١a"),
    words_case("no Latin letters, and no letters at all", "漢字かな交じり文 привет мир 😀👍🏽 שלום"),
    words_case("accents of their own", "e\u0301te\u0301 n\u0303"),
    words_case("spaces of other kinds", "a\u00a0b\u3000c\u2028d\x85e\x0bf\u2003 g"),
    words_case("characters that cannot be seen", "a\x00b\x1f \x7f\u200bc\ufeffd"),
    words_case("code of the corpus", real_text(size=6000)),
)

# Stage 2: train


def train_case(title: str, texts: list[str], size: int, kind: str = "oracle", generator: bool = False) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        tokenizer = adapters.train((text for text in texts) if generator else list(texts), size)
        return {"merges": written_merges(adapters, tokenizer), "vocabulary": [repr(bytes(each)) for each in adapters.vocabulary(tokenizer)]}

    def expected(**_: Any) -> Results:
        made = library(texts, size)
        return {"merges": library_merges(made), "vocabulary": library_vocabulary(made)}

    shown = texts if sum(map(len, texts)) < 500 else f"{len(texts)} texts, {sum(map(len, texts)):,} characters in all"
    return Case(kind, title, lambda: {"texts": shown, "vocab_size": size}, expected, LIBRARY, observe)


def two_case(title: str, texts: list[str], size: int) -> Case:
    """Two tokenizers, of which the second is trained later: they share nothing."""

    def observe(adapters: Any, **_: Any) -> Results:
        first = adapters.train(list(texts), size)
        second = adapters.train(["zzz yyy zzz"], size)
        return {"first": written_merges(adapters, first), "second": written_merges(adapters, second)}

    def expected(**_: Any) -> Results:
        return {"first": library_merges(library(texts, size)), "second": library_merges(library(["zzz yyy zzz"], size))}

    return Case("property", title, lambda: {"texts": texts, "vocab_size": size}, expected, LIBRARY, observe)


TRAIN = (
    train_case("one word", ["abab"], 257),
    train_case("the bytes and no merge", ["abab abab"], 256),
    train_case("a word counts as often as it occurs", ["low low low low low lower lower newest newest newest newest widest"], 266),
    train_case("a tie: the smaller left id", ["yz bc yz bc"], 258),
    train_case("a tie: the smaller right id", ["xc xb xc xb"], 258),
    train_case("a tie with a joined token, whose id is larger", ["ba ba bab abq"], 260),
    train_case("a tie with a space, whose byte is small and whose id is not", ["é ~ ~é é ~"], 260),
    train_case("a tie of bytes that are not ASCII", ["漢字 字漢 éè èé éè"], 270),
    train_case("three equal letters: the pair counts twice", ["aaa aaa bcbc"], 258),
    train_case("a run of equal letters", ["aaaaaaa aaaaa xaaa"], 262),
    train_case("pairs do not cross a word's border", ["ab ab ab ab,ab"], 262),
    train_case("pairs do not cross the end of a text", ["ab", "ba", "b", "a", "ab"], 260),
    train_case("nothing is left to join", ["low lower"], 1000),
    train_case("no text at all", [], 300),
    train_case("texts without a word", ["", "a", ""], 300),
    train_case("texts from a generator", ["banana bandana", "ananas banana"], 266, generator=True),
    train_case("letters that are not ASCII", [ACCENTS, ACCENTS[::-1], "漢字漢字漢"], 290),
    two_case("a tokenizer trained after another one", ["low lower lowest"], 262),
    train_case("code of the corpus", [real_text(size=9000)], 460),
    train_case("prose of the corpus", [real_text("networkx/algorithms/flow/maxflow.py", 9000)], 420),
)  # fmt: skip

# Stage 3: encode


@cache
def trained(special: tuple[str, ...] = (), size: int = 420) -> tuple[list[str], int, Tokenizer]:
    texts = [real_text(size=7000), CODE * 3, ACCENTS]
    return texts, size, library(texts, size, special)


def small(adapters: Any, special: tuple[str, ...] = (), size: int = 420) -> object:
    return adapters.train(trained(special)[0], size + len(special), list(special))


def encode_case(title: str, text: str) -> Case:
    def observe(adapters: Any, text: str) -> Results:
        tokenizer = small(adapters)
        ids = numbers(adapters.encode(tokenizer, text))
        return {"ids": ids, "bytes of the ids": repr(bytes(adapters.decode(tokenizer, ids)))}

    def expected(text: str) -> Results:
        return {"ids": trained()[2].encode(text).ids, "bytes of the ids": repr(text.encode())}

    return Case("oracle", title, lambda: {"text": text}, expected, LIBRARY, observe)


def own_case(title: str, texts: list[str], size: int, text: str) -> Case:
    """A tokenizer of its own."""

    def observe(adapters: Any, **_: Any) -> Results:
        return {"ids": numbers(adapters.encode(adapters.train(list(texts), size), text))}

    def expected(**_: Any) -> Results:
        return {"ids": library(texts, size).encode(text).ids}

    return Case("oracle", title, lambda: {"texts": texts, "vocab_size": size, "text": text}, expected, LIBRARY, observe)


def bytes_case(title: str, ids: list[int], wanted: bytes) -> Case:
    def observe(adapters: Any, ids: list[int]) -> Results:
        return {"bytes": repr(adapters.decode(adapters.train([], 256), iter(ids)))}

    return Case("worked example", title, lambda: {"ids": ids}, lambda **_: {"bytes": repr(wanted)}, TEXT.format(3), observe)


def again_case() -> Case:
    """The ids of a text do not change with what was encoded before, or with what was done to its ids."""
    text = "return a + b"

    def observe(adapters: Any, **_: Any) -> Results:
        tokenizer = small(adapters)
        first = adapters.encode(tokenizer, text)
        found = numbers(first)
        if isinstance(first, list):
            first.extend([1, 2])
        word = adapters.encode(tokenizer, "return")
        before = numbers(word)
        if isinstance(word, list):
            word.append(7)
        other = adapters.train(["xx"], 257)
        return {
            "ids": found, "ids the second time": numbers(adapters.encode(tokenizer, text)), "ids of a word": before,
            "ids of the word the second time": numbers(adapters.encode(tokenizer, "return")),
            "ids by another tokenizer": numbers(adapters.encode(other, "return xx")),
        }  # fmt: skip

    def expected(**_: Any) -> Results:
        made = trained()[2]
        ids, word = made.encode(text).ids, made.encode("return").ids
        other = library(["xx"], 257).encode("return xx").ids
        names = "ids", "ids the second time", "ids of a word", "ids of the word the second time", "ids by another tokenizer"
        return dict(zip(names, (ids, ids, word, word, other), strict=True))

    return Case("property", "twice, and by two tokenizers", lambda: {"text": text}, expected, LIBRARY, observe)


ENCODE = (
    bytes_case("bytes that are no text", [102, 94, 0, 255, 188], bytes([169, 161, 33, 173, 0])),
    bytes_case("no ids", [], b""),
    own_case("no merges", [], 256, "naïve 😀"),
    own_case("merges are replayed in their order: not the longest token first",
             ["bc bc bc abc abc abcd ab ab ab ab"], 262, "abc abcd abcabc bcab"),
    own_case("one pair in several places", ["aa aa aaa"], 258, "aaaaa aaaa aaa aaabaaa"),
    own_case("a pair that only a later merge makes", ["abcd abcd abcd bcd bcd cd cd cd"], 264, "abcd bcd cdcd abcdcd d"),
    encode_case("no text", ""),
    encode_case("a text that was trained on", CODE),
    encode_case("another text", "for each in range(10): print(each, 'naïve')\n"),
    encode_case("letters that training never saw", "ქართული ภาษาไทย ℵ₀"),
    encode_case("special tokens are text", "a<|end|>b <|pad|>"),
    encode_case("a word of a thousand letters", "returnzetadefinition" * 50),
    again_case(),
    encode_case("code of the corpus", real_text("mpmath/libmp/libintmath.py", 6000)),
)  # fmt: skip

# Stage 5: special

END, PAD = "<|end|>", "<|pad|>"
LONG, STRANGE, SPACED = "<|end|>>", "[a+b]*?", "<end of text>"
NAMES = (END, PAD, LONG, STRANGE, SPACED)


def special_case(title: str, text: str, names: tuple[str, ...] = NAMES) -> Case:
    def observe(adapters: Any, text: str, **_: Any) -> Results:
        tokenizer = small(adapters, names)
        ids = numbers(adapters.encode_special(tokenizer, text))
        plain = numbers(adapters.encode(tokenizer, text))
        return {"ids": ids, "ids of a text that is not trusted": plain, "bytes of the ids": repr(adapters.decode(tokenizer, ids))}

    def expected(text: str, **_: Any) -> Results:
        plain = trained()[2].encode(text).ids
        ids = trained(names)[2].encode(text).ids
        return {"ids": ids, "ids of a text that is not trusted": plain, "bytes of the ids": repr(text.encode())}

    return Case("oracle", title, lambda: {"text": text, "special": list(names)}, expected, LIBRARY, observe)


def counted_case(title: str, texts: list[str], size: int, names: tuple[str, ...]) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        tokenizer = adapters.train(list(texts), size, names)
        merges, vocabulary = written_merges(adapters, tokenizer), [repr(bytes(each)) for each in adapters.vocabulary(tokenizer)]
        ids = {name: numbers(adapters.encode_special(tokenizer, name)) for name in names}
        return {"merges": merges, "vocabulary": vocabulary, "ids of special tokens": ids}

    def expected(**_: Any) -> Results:
        made = library(texts, size - len(names), names)
        ids = {name: [made.token_to_id(name)] for name in names}
        return {"merges": library_merges(made), "vocabulary": library_vocabulary(made, names), "ids of special tokens": ids}

    given = lambda: {"texts": texts, "vocab_size": size, "special": list(names)}  # noqa: E731
    return Case("oracle", title, given, expected, LIBRARY, observe)


SPECIAL = (
    counted_case("they count, and have the last ids", ["low lower lowest low"], 264, (END, PAD)),
    counted_case("they have the last ids where nothing is left to join", ["low low"], 1000, (PAD, END)),
    counted_case("written in a training text, they are text", [f"a{END}b {END} {END}"], 268, (END,)),
    special_case("one between two texts", f"return a{END}def b"),
    special_case("at the beginning and at the end", f"{END}return a{PAD}"),
    special_case("several behind each other", f"a{END}{END}{PAD}b"),
    special_case("nothing else", END),
    special_case("a space before it stays", f"return {END} return"),
    special_case("the longest one that fits", f"a{LONG}b{END}>c{END}"),
    special_case("one with signs of regular expressions", f"a{STRANGE}b[a+b] aab"),
    special_case("one with spaces", f"a {SPACED}b end of text"),
    special_case("words are cut apart by it", f"ret{END}urn retu{PAD}rn"),
    special_case("one that is not quite written", "<|end| > <|END|> <| end|>"),
    special_case("no special tokens", f"a{END}b", names=()),
    special_case("no text", ""),
)
