"""Check of 10.assistant_mask. Oracle: `tokenizers`, asked for the token of each character of an answer; for what it does not have, sets of
characters.

Everything is true or false, compared exactly.
"""

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from shared.course.checking import Case, Check

from .common import ARITHMETIC, CONTRACT

SETS = "sets: the characters of a token, and those of an answer"
TOKENIZERS = "tokenizers: Encoding.char_to_token, of each character of an answer"
CHAT = (
    ("system", "You add numbers."), ("user", "What are 17 and 4?"), ("assistant", "17 + 4 = 21."),
    ("user", "And 21 and 4?"), ("assistant", ""), ("tool", "25"), ("assistant", "21 + 4 = 25, says the tool."),
)  # fmt: skip


def of(offsets, answers):
    return lambda: {"offsets": list(offsets), "answers": list(answers)}


def by_sets(offsets, answers):
    told = {character for answer in answers for character in range(*answer)}
    return {"trained": torch.tensor([not told.isdisjoint(range(*token)) for token in offsets], dtype=torch.bool)}


def answer(*trained):
    return lambda **_: {"trained": torch.tensor([bool(each) for each in trained], dtype=torch.bool)}


def rendered(ending="<|im_end|>"):
    """ChatML, the spans of its answers, and an encoding whose tokens are words with the space before them, and pieces of the markup."""
    text, answers = "", []
    for role, content in CHAT:
        text += f"<|im_start|>{role}\n"
        if role == "assistant":
            answers.append((len(text), len(text) + len(content) + len(ending)))
        text += f"{content}{ending}\n"
    tokenizer = Tokenizer(models.WordLevel({"any": 0}, unk_token="any"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\||\|>|\n| ?\w+| ?[^\w\s]+"), "isolated")
    return tokenizer.encode(text), answers


def chat(**settings):
    def given():
        encoding, answers = rendered(**settings)
        return {"offsets": encoding.offsets, "answers": answers}

    return given


def by_tokenizers(offsets, answers):
    encoding, _ = rendered()
    found = {encoding.char_to_token(character) for answer in answers for character in range(*answer)}
    return {"trained": torch.tensor([token in found for token in range(len(offsets))], dtype=torch.bool)}


def drawn(tokens, answers, longest, seed):
    """Tokens of up to `longest` characters, every fifth without any; answers between random characters, some of which are empty."""

    def given():
        generator = torch.Generator().manual_seed(seed)
        draw = lambda most, count: torch.randint(most + 1, (count,), generator=generator).tolist()  # noqa: E731
        offsets, place = [], 0
        for number, length in enumerate(draw(longest, tokens)):
            offsets.append((place, place + length if number % 5 else place))
            place = offsets[-1][1]
        ends = sorted(draw(place, 2 * answers))
        return {"offsets": offsets, "answers": list(zip(ends[::2], ends[1::2], strict=True))}

    return given


def case(rung, title, given, expected=by_sets, source=SETS):
    return Case(rung, title, given, expected, source)


def example(title, offsets, answers, *trained):
    return case("worked example", title, of(offsets, answers), answer(*trained), ARITHMETIC)


THREES = [(0, 3), (3, 6), (6, 9), (9, 12), (12, 15)]

CHECK = Check(
    exercise="10.assistant_mask",
    outputs=("trained",),
    spoilt=("trained",),
    cases=[
        case("shape and dtype", "five tokens", of(THREES, [(6, 9)]), source=CONTRACT),
        case("shape and dtype", "no tokens", of([], []), source=CONTRACT),
        case("worked example", "the contract's", of([(0, 3), (3, 7), (7, 7), (7, 9), (9, 12)], [(6, 9)]), answer(0, 1, 0, 1, 0), CONTRACT),
        example("an answer of whole tokens, the last of which is its end token", THREES, [(6, 12)], 0, 0, 1, 1, 0),
        example("the first token begins before the answer", THREES, [(7, 9)], 0, 0, 1, 0, 0),
        example("the last token ends after it", THREES, [(6, 10)], 0, 0, 1, 1, 0),
        example("an answer within a token", THREES, [(7, 8)], 0, 0, 1, 0, 0),
        example("two answers, with a user's turn between them", THREES, [(3, 6), (9, 12)], 0, 1, 0, 1, 0),
        example("a token without text, within an answer", [(0, 3), (3, 5), (5, 5), (5, 9)], [(3, 9)], 0, 1, 0, 1),
        case("property", "answers that touch", of(THREES, [(3, 6), (6, 9)])),
        case("property", "a token with the end of one answer and the beginning of the next", of(THREES, [(2, 4), (5, 7)])),
        case("property", "an empty answer, between two tokens and within one", of(THREES, [(6, 6), (10, 10)])),
        case("property", "an empty answer and one that is not", of(THREES, [(4, 4), (9, 11)])),
        case("property", "no answers", of(THREES, [])),
        case("property", "the answer is everything", of(THREES, [(0, 15)])),
        case("property", "the answer begins with the text, and special tokens at either end are (0, 0)",
             of([(0, 0), *THREES, (0, 0)], [(0, 7)])),
        case("property", "special tokens between answers are (0, 0)",
             of([(0, 0), (0, 3), (3, 6), (0, 0), (6, 9), (9, 12), (0, 0)], [(1, 4), (8, 12)])),
        case("property", "one character in three pieces, within an answer and outside", of(
            [(0, 2), (2, 3), (2, 3), (2, 3), (3, 5), (5, 6), (5, 6), (5, 6), (6, 7)], [(2, 5)])),
        case("property", "... with which an answer ends", of([(0, 4), (4, 5), (4, 5), (4, 5), (5, 8)], [(1, 5)])),
        case("property", "characters that no token stands for", of([(0, 2), (4, 6), (9, 10)], [(2, 4), (5, 9)])),
        case("property", "an answer of one character at the very end", of(THREES, [(14, 15)])),
        case("oracle", "a chat in ChatML: three answers, one of them its end token alone", chat(), by_tokenizers, TOKENIZERS),
        case("oracle", "a template whose end token is a newline", chat(ending="\n")),
        case("oracle", "300 random tokens, 40 answers", drawn(300, 40, 6, seed=1)),
        case("oracle", "200 tokens of one character or none", drawn(200, 50, 1, seed=2)),
        case("oracle", "long tokens, short answers", drawn(60, 100, 40, seed=3)),
    ],
)  # fmt: skip
