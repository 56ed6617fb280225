"""Check of 03.fill_in_middle. Oracle: Hugging Face's `tokenizers`. The wanted text is written out with its special tokens as text
("<PRE>...<SUF>..."), and a tokenizer that knows them encodes it: it cuts at special tokens first, so each part is encoded on its
own. Between prefix and middle in spm, where no token stands, a mark is put that is taken out again. Ids are compared exactly.
"""

from functools import cache

from shared.course.checking import Case, Check
from shared.data.fim import FimTokens

from .pieces import CONTRACT, given, refused

TOKENS = FimTokens(prefix=301, suffix=302, middle=303, end=300)
ORACLE = "Hugging Face's tokenizers, on the text with its special tokens written out"
IN_ORDER = "the parts, put back in order"
PAPER = "Bavarian et al. 2022, section 3"
CODE = "def add(a, b):\n    return a + b  # naïve, 漢字, 😀\n"


def letters(part: str) -> list[int]:
    """One id for each byte."""
    return list(part.encode())


@cache
def tokenizer():
    """A byte-level tokenizer with a few merges, trained on the spot, and five special tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator([CODE * 3, "return addition"], trainer)
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<END>", "<PRE>", "<SUF>", "<MID>", "<CUT>")])
    return made


def byte_pairs(part: str) -> list[int]:
    """The ids of a part by itself, with tokens of several letters, so that it matters where the text is cut."""
    return tokenizer().encode(part).ids


def special() -> FimTokens:
    return FimTokens(*(tokenizer().token_to_id(name) for name in ("<PRE>", "<SUF>", "<MID>", "<END>")))


def by_tokenizers(text, first, second, mode, encode, tokens):
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    written = {"psm": f"<PRE>{prefix}<SUF>{suffix}<MID>{middle}<END>", "spm": f"<PRE><SUF>{suffix}<MID>{prefix}<CUT>{middle}<END>"}[mode]
    return {"ids": [found for found in tokenizer().encode(written).ids if found != tokenizer().token_to_id("<CUT>")]}


def worked(title: str, text: str, first: int, second: int, mode: str, *parts: int | str, source: str = PAPER) -> Case:
    """parts: special tokens' ids and pieces of text, in the order in which they are to come."""
    ids = [found for part in parts for found in ([part] if isinstance(part, int) else letters(part))]
    arguments = given(text=text, first=first, second=second, mode=mode, encode=letters, tokens=TOKENS)
    return Case("worked example", title, arguments, lambda **given: {"ids": ids}, source)


def wrong(title: str, text: str, first: int, second: int, mode: str = "psm") -> Case:
    arguments = given(text=text, first=first, second=second, mode=mode, encode=letters, tokens=TOKENS)
    return Case("property", title, arguments, refused, CONTRACT)


def oracle(title: str, text: str, first: int, second: int, mode: str) -> Case:
    def arguments():
        return {"text": text, "first": first, "second": second, "mode": mode, "encode": byte_pairs, "tokens": special()}

    return Case("oracle", title, arguments, by_tokenizers, ORACLE)


def put_back(function, text, first, second, mode, encode, tokens):
    """The three parts between the special tokens, put back in the text's order, and what is asked of `encode`."""
    asked = []
    ids = function(text, first, second, mode, lambda part: asked.append(part) or encode(part), tokens)
    marks = [ids.index(token) for token in (tokens.prefix, tokens.suffix, tokens.middle, tokens.end)]
    before, after, moved = (bytes(ids[start + 1 : stop]) for start, stop in zip(marks, marks[1:], strict=False))
    return {"text": (before + moved + after).decode(), "parts that were encoded": sorted(asked)}


def whole(text, first, second, **given):
    return {"text": text, "parts that were encoded": sorted([text[:first], text[first:second], text[second:]])}


PRE, SUF, MID, END = TOKENS.prefix, TOKENS.suffix, TOKENS.middle, TOKENS.end

CHECK = Check(
    exercise="03.fill_in_middle",
    outputs=("ids",),
    spoilt=("ids",),
    cases=[
        Case(
            "shape and dtype", "a list comes out", given(text="abcd", first=1, second=3, mode="psm", encode=letters, tokens=TOKENS),
            lambda **given: {"ids": []}, CONTRACT,
        ),
        worked("psm: a | bc | def", "abcdef", 1, 3, "psm", PRE, "a", SUF, "def", MID, "bc", END),
        worked("spm: a | bc | def", "abcdef", 1, 3, "spm", PRE, SUF, "def", MID, "abc", END, source=f"{PAPER}, variant 2"),
        worked("psm with an empty middle", "abcdef", 2, 2, "psm", PRE, "ab", SUF, "cdef", MID, END),
        worked("spm with an empty prefix", "abcdef", 0, 2, "spm", PRE, SUF, "cdef", MID, "ab", END),
        worked("psm with an empty suffix", "abcdef", 4, 6, "psm", PRE, "abcd", SUF, MID, "ef", END),
        worked("spm with an empty suffix", "abcdef", 4, 6, "spm", PRE, SUF, MID, "abcdef", END),
        worked("psm with an empty prefix", "abcdef", 0, 2, "psm", PRE, SUF, "cdef", MID, "ab", END),
        worked("spm with an empty middle", "abcdef", 2, 2, "spm", PRE, SUF, "cdef", MID, "ab", END),
        worked("psm of nothing but a middle", "abc", 0, 3, "psm", PRE, SUF, MID, "abc", END),
        worked("psm of the empty text", "", 0, 0, "psm", PRE, SUF, MID, END),
        worked("spaces and ends of lines are characters", " a\n\n b ", 1, 4, "psm", PRE, " ", SUF, " b ", MID, "a\n\n", END),
        worked("psm, each part with ends of lines around it", "\na\n\nb\n\nc\n", 3, 6, "psm",
               PRE, "\na\n", SUF, "\nc\n", MID, "\nb\n", END, source=CONTRACT),
        worked("spm, each part with ends of lines around it", "\na\n\nb\n\nc\n", 3, 6, "spm",
               PRE, SUF, "\nc\n", MID, "\na\n", "\nb\n", END, source=CONTRACT),
        worked("spm of the empty text", "", 0, 0, "spm", PRE, SUF, MID, END),
        worked("psm, cut by characters: é takes two bytes", "éàb", 1, 2, "psm", PRE, "é", SUF, "b", MID, "à", END, source=CONTRACT),
        wrong("cuts in the wrong order", "abcdef", 4, 2),
        wrong("a cut before the beginning", "abcdef", -1, 2),
        wrong("a cut behind the end", "abcdef", 2, 7),
        wrong("a cut behind the end, in a text with more bytes than characters", "éàb", 1, 4),
        wrong("psm in capitals", "abcdef", 2, 4, "PSM"),
        wrong("spm in capitals", "abcdef", 2, 4, "SPM"),
        wrong("a mode that there is not", "abcdef", 2, 4, "suffix first"),
        wrong("another mode that there is not", "abcdef", 2, 4, "fim"),
        Case(
            "property", "psm loses nothing, and encodes the three parts",
            given(text=CODE, first=11, second=33, mode="psm", encode=letters, tokens=TOKENS), whole, IN_ORDER, put_back,
        ),
        Case(
            "property", "spm loses nothing, and encodes the three parts",
            given(text=CODE, first=5, second=41, mode="spm", encode=letters, tokens=TOKENS), whole, IN_ORDER, put_back,
        ),
        oracle("psm with tokens of several letters, cut inside of `return`", CODE, 13, 22, "psm"),
        oracle("spm with tokens of several letters, cut inside of `return`", CODE, 23, 28, "spm"),
        oracle("spm, cut between two characters of several bytes", CODE, 38, 43, "spm"),
    ],
)
