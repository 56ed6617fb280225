"""Check of 12.number_reward. Oracle: tables, in which the last number of each text was read by a person; and Python's fractions, of numbers
that are written in every form.

Rewards are compared exactly.
"""

import random
from fractions import Fraction

from shared.course.checking import Case, Check

from .common import ARITHMETIC, CONTRACT

TABLE = "read by a person"
FRACTIONS = "Python's fractions: a number, written down in every form"
NOTHING = "none"
FEW, MANY = "at most 50 times its characters", "more than 50 times its characters"
AGAINST = ("7", "-7", "1", "0", "1/2", "12", "10", "100", "1000", "12345", "2/3")


def of(answer, expected):
    return lambda: {"answer": answer, "expected": expected}


def reward(value):
    return lambda **_: {"reward": float(value)}


def judged(function, pairs):
    """The rewards of pairs of an answer and what is expected, by the pair."""
    return {named(*pair): function(*pair) for pair in pairs}


def named(answer, expected):
    return f"{shortened(answer)} for {shortened(expected)}"


def shortened(text):
    return repr(text) if len(text) <= 60 else f"{text[:20]!r}...{text[-20:]!r} of {len(text):,} characters"


def told(rewards):
    return lambda pairs: {named(*pair): float(value) for pair, value in zip(pairs, rewards, strict=True)}


def last_numbers(table):
    """Texts with their last numbers: each is asked for, and some that are not it."""
    wrong = [[each for each in AGAINST if last == NOTHING or Fraction(each) != Fraction(last)] for last in table.values()]
    return [(text, each) for (text, last), others in zip(table.items(), wrong, strict=True) for each in [last, *others[:4]]]


def by_table(table):
    def expected(pairs):
        return told([each == table[text] and each != NOTHING for text, each in pairs])(pairs)

    return expected


def table(title, **texts):
    """Rows of texts and last numbers, written as {last number: [texts]}."""
    last = {text: number for number, group in texts["of"].items() for text in group}
    return Case("property", title, lambda: {"pairs": last_numbers(last)}, by_table(last), TABLE, judged)


def pairs(title, *rows, source=TABLE):
    listed, rewards = [row[:2] for row in rows], [row[2] for row in rows]
    return Case("property", title, lambda: {"pairs": listed}, told(rewards), source, judged)


def forms(number: Fraction, chance: random.Random) -> list[str]:
    """A number in the forms that the contract lists."""
    over, under = abs(number.numerator), number.denominator
    sign = "-" if number < 0 else chance.choice(["", "+"])
    factor = chance.randrange(1, 9)
    found = [f"{over}/{under}", f"{over * factor:,}/{under * factor:,}", f"00{over}/0{under}"]
    places = next((digits for digits in range(9) if 10**digits % under == 0), None)
    if places is not None:
        digits = f"{over * 10**places // under:0{places + 1}d}"
        whole, rest = (digits[:-places], digits[-places:]) if places else (digits, "0")
        found += [f"{whole}.{rest}", f"{int(whole):,}.{rest}00"] + ([f".{rest}"] if int(whole) == 0 else [])
        found += [whole, f"0{whole}", f"{int(whole):,}"] if under == 1 else []
    return [sign + each for each in found]


def in_every_form(function, seed):
    """All pairs of forms of a few numbers, within sentences."""
    chance = random.Random(seed)
    numbers = [Fraction(chance.randrange(-99999, 99999), chance.choice([1, 1, 2, 3, 4, 5, 7, 8, 1000])) for _ in range(6)]
    numbers += [-numbers[0], numbers[1] + 1, Fraction(0), Fraction(1, 2), Fraction(1234567)]
    wrong = []
    for given in numbers:
        for wanted in numbers:
            for text, other in zip(forms(given, chance), forms(wanted, chance)[::-1], strict=False):
                answer, expected = f"First 5, then -3: {text}.", f" {other} "
                if function(answer, expected) != float(given == wanted):
                    wrong.append((answer, expected))
    return {"pairs that were judged wrong": wrong[:3]}


def none_wrong(seed):
    return {"pairs that were judged wrong": []}


def with_half(function, code):
    """A text that no encoding takes, and that no report could print."""
    return {"reward": function(f"{chr(code)} 7", "7")}


LONG_TEXTS = {
    "digits": "1", "groups": ",111", "signs": "-", "points": ".", "letters": "a", "fractions": "1/", "numbers": "1 ",
    "groups of four": "1,1111", "spaces": " ", "decimals": "1.", "letters and digits": "a1",
}  # fmt: skip
NUMBERLESS = ("signs", "points", "letters", "spaces")


def long_texts(function, many):
    """The reward of texts of many characters, which end in a 7 of their own. The clock ends an answer that takes quadratic time."""
    return {name: function(piece * (many // len(piece)) + " 7", "7") for name, piece in LONG_TEXTS.items()}


def long_tails(function, many):
    """The reward of a 7 with many characters behind it, of which none is a number."""
    return {f"7 and {many:,} {name}": function("7 " + LONG_TEXTS[name] * many, "7") for name in NUMBERLESS}


class Watched(str):
    """A text that adds up how many characters its slices copy."""

    def __new__(cls, text, copied):
        made = super().__new__(cls, text)
        made.copied = copied
        return made

    def __getitem__(self, place):
        part = super().__getitem__(place)
        self.copied.append(len(part))
        return Watched(part, self.copied)


def copies(function, numbers):
    """Whether slices of a text of so many numbers copy little: not the whole rest of it behind each of them."""
    text, copied = "1 " * numbers + "7", []
    reward = function(Watched(text, copied), "7")
    return {"reward": reward, "slices of the text copy": FEW if sum(copied) <= 50 * len(text) else MANY}


def all_sevens(many):
    return {f"7 and {many:,} {name}": 1.0 for name in NUMBERLESS}


def few(numbers):
    return {"reward": 1.0, "slices of the text copy": FEW}


def all_right(many):
    return dict.fromkeys(LONG_TEXTS, 1.0)


def example(title, answer, expected, value, source=ARITHMETIC):
    return Case("worked example", title, of(answer, expected), reward(value), source)


ARABIC, FULLWIDTH, DEVANAGARI = "\u0667", "\uff17", "\u096d"  # sevens
TABLES = [
    table("whole numbers", of={
        "7": ["7", "007", "It is 7", "7 km", "7!", "(7)", "7.", "7,", "$7", "7%", "7?", "+7", "is +7.", "7km", "7_"],
        "-7": ["-7", "is -7.", "(-7)", "=-7", "-007"], "0": ["0", "-0", "000", "+0"]}),
    table("the last of several", of={"7": ["5 or 7", "3 + 4 = 7", "1. 2. 7.", "7\n", "1\n7\n", "-5, 7", "5,7", "5, 7", "5;7", "1/2 and 7"],
        "12": ["7 7 12", "7, or 12 in base 10 ... 12"]}),
    table("no number at all", of={
        NOTHING: ["", " ", "seven", ".", "-", "+", "/", ",", "- -", "...", "x", "\n", "v2", "x_1", "_7", "B52"]}),
    table("commas in front of every three digits", of={"1234567": ["1,234,567", "1234567", "$1,234,567.", "1,234,567, or so"],
        "1000": ["1,000", "1000", "01,000", "+1,000"], "-1234": ["-1,234", "at -1,234!"], "123": ["0,123", "000,123"],
        "12345": ["12,345", "12345"], "123456": ["123,456"]}),
    table("commas elsewhere end a number", of={"23": ["1,23", "1,234,23", "1,,23"], "2345": ["1,2345", "12,2345", "1,234,2345"],
        "567": ["1234,567", "1,2345,567", "0123,567"], "5": ["1,234,5", "1, 5", "1,5"], "234": ["1, 234", "1 ,234", ",234", "1,,234"],
        "1234": ["1,234,", "1,234,a", "1,234,,"]}),
    table("decimals", of={"0.5": ["0.5", ".5", "00.50", "+.5", "is .5.", "(.5)", "=.5", "$.5"], "-0.5": ["-.5", "-0.5", "x=-.5"],
        "1234.5": ["1,234.50", "1234.5"], "7.25": ["7.25", "7.25.", "7.25km", "7.250"], "123.456": ["123.456", "0,123.456"]}),
    table("points elsewhere end a number", of={"0.7": ["1..7"], "0.3": ["192.168.0.3"],
        "7": ["7.", "7..", "7. ", "7.a", "1.2.7", "7./", "a.7", "5.x 7.", "5. 7"], "0.5": ["7. .5", "7 .5", "..5"],
        "3": ["1.2.3", "1.2.3."], "5": ["1,2.3.5", "a.5", "7/2.5", "2/3.5"], "567": ["1.234,567"]}),
    table("fractions", of={"3/4": ["3/4", "6/8", "+3/4", "03/04", "3/4.", "3/4 of it", "3/4/"], "-1/2": ["-1/2", "-2/4", "is -1/2."],
        "1/1000": ["1/1,000", "7/7,000"], "1234": ["1,234/1", "2,468/2"], "4": ["3 /4", "3/ 4", "3 / 4", "1/2/4", "3//4"],
        "-4": ["3/-4", "1/2 -4"], "5": ["1/2,5", "1,5/1"], "2/3": ["1,2/3", "1.2/3 or 2/3", "v1/1, 2/3"]}),
    table("a decimal is no part of a fraction", of={"2": ["1.5/2", "0.5/2", ".5/2"], "5": ["1/2.5", "3/4.5"]}),
    table("signs", of={"7": ["10-7", "10 - 7", "x-7", "x+7", "_-7", "3+7", "- 7", "+ 7", "5 - 7", "é-7", ARABIC + "-7", "-+7", "(3)+7"],
        "-7": ["10 -7", "10--7", "--7", "+-7", "(3)-7", "=-7", "/-7", ",-7", "5.-7", "3/-7", "\u2014-7"]}),
    table("letters, digits and underscores in front", of={
        "7": ["7 v2", "7, x1", "7: B52", "7 _3", "7 a1b2", "7 x12345", "7 é5", "7 \u05d05", "7 \u4e945", f"7 {ARABIC}5",
            f"7 {FULLWIDTH}5", "7e5", "7 v1.", "7x5", "7_5", "7 a1,2345b 7"],
        "5": ["v2.5", "v2,5", "v2/5", "v2 5", "v-5", "x1-5", "a:5", "\u20ac5", "\u00a75", "\U0001f6005", "v.5", "\u200b5"],
        "-5": ["v -5", "a:-5"]}),
    table("digits of other scripts are no numbers", of={
        NOTHING: [ARABIC, FULLWIDTH, DEVANAGARI, f"{ARABIC}.{ARABIC}", "\u00b2", "\u00bd", "\u2466"],
        "1": [f"1{ARABIC}", f"1 {FULLWIDTH}", f"1/{ARABIC}", f"1.{DEVANAGARI}", "1\u00b2", f"1,{ARABIC}00"]}),
    table("what follows a number", of={
        "12": ["12km", "12e3x", "12_000", "12a", "12\u00b0", "12th", "12'", "12-", "12+", "12/", "12/x", "12=x"]}),
    pairs("decimals that a float rounds", ("0.1", "1/10", 1), ("0.3", "0.30000000000000000001", 0), ("1/3", "0.3333333333333333", 0),
          ("0.30000000000000004", "0.3", 0), ("9007199254740993", "9007199254740992", 0), ("1" + "0" * 400, "1" + "0" * 399 + "1", 0),
          ("2/6", "1/3", 1), ("1/3", "0." + "3" * 28, 0), ("1/3", "0." + "3" * 900, 0),
          ("1" + "0" * 400, "1" + "0" * 400, 1), ("0." + "0" * 400 + "1", "0", 0)),
    pairs("0 in every form, and its sign", ("-0", "0", 1), ("0.000", "0/5", 1), ("0/7", "-0.0", 1), ("+0", "000", 1), ("-0.0", "1", 0)),
    pairs("a division by zero", ("7 or 1/0", "7", 0), ("1/0", "1/0", 0), ("0/0", "0", 0), ("7", "1/0", 0), ("1/000", "1", 0),
          ("1/0 7", "7", 1), ("1/0", "0", 0), ("-3/0,000", "7", 0)),
    pairs("an expected number in every form", ("72", " 72 ", 1), ("72", "\n+72\t", 1), ("1000", "1,000", 1), ("0.5", ".5", 1),
          ("-3/4", "-0.75", 1), ("72", "072", 1), ("7", "-7", 0), ("-7", "7", 0), ("-7", "-7", 1), ("72", "\u00a072\u2003", 1)),
    pairs("an expected text that is no number, or more than one", ("7", "", 0), ("7", " ", 0), ("", "", 0), ("7", "seven", 0),
          ("0", "", 0), ("0", "zero", 0), ("0", "0/0", 0), ("zero", "0", 0),
          ("7", "7.", 0), ("7", "7%", 0), ("7", "7 km", 0), ("7", "6 7", 0), ("7", "= 7", 0), ("7", "$7", 0), ("7", "- 7", 0),
          ("7", "--7", 0),
          ("23", "1,23", 0), ("1", "1,23", 0), ("3", "1.2.3", 0), ("2345", "1,2345", 0), ("7", ARABIC, 0), ("7", FULLWIDTH, 0),
          ("seven", "seven", 0), ("7", "7e0", 0), ("7", "7_", 0), ("7", "v7", 0), ("7", "7\n7", 0), ("7/2", "7 / 2", 0), ("7", "7/1/1", 0),
          ("1000", "1_000", 0), ("7", "nan", 0), ("7", "x7", 0)),
    pairs("numbers of 1,000 characters, and of more", ("9" * 1000, "9" * 1000, 1), ("9" * 1001, "9" * 1001, 0), ("0" * 1001, "0", 0),
          ("0" * 999 + "7", "7", 1),
          ("0" * 1000 + "7", "7", 0), ("-" + "0" * 998 + "7", "-7", 1), ("-" + "0" * 999 + "7", "-7", 0), ("7", "0" * 999 + "7", 1),
          ("7", "0" * 1000 + "7", 0), ("9" * 1001 + " 7", "7", 1), ("7 " + "9" * 1001, "7", 0), ("0." + "0" * 998, "0", 1),
          ("0." + "0" * 999, "0", 0), ("1/" + "0" * 997 + "1", "1", 1), ("1/" + "0" * 998 + "1", "1", 0),
          ("000" + ",000" * 249 + ",007", "7", 0), ("007" + ",000" * 249, "7" + "000" * 249, 1), ("v" * 5000 + " 7", "7", 1),
          ("7", " " * 600 + "7" + " " * 600, 1)),
    pairs("numbers that Python refuses to read", ("9" * 5000, "7", 0), ("7", "9" * 5000, 0), ("9" * 5000, "9" * 5000, 0),
          ("1/" + "9" * 5000, "7", 0), ("0." + "9" * 5000, "7", 0), ("9" * 5000 + " 7", "7", 1)),
    table("more text behind the number, and marks that mean nothing here", of={
        "7": ["7\nDone.", "7" + " so" * 2000, "5%7", "\u22127", "\u20147", "\\boxed{5} 7", "7 ####", "7 </think>", "7\n\n\n", "**7**"],
        "5": ["7 v\u200b5", "7 <answer>5</answer>"], "2": ["7^2", "7*2", "7e-2", "7:2"]}),
    pairs("hostile texts", ("\x00 7", "7", 1), ("\U0001f600", "7", 0), ("7\x00", "7", 1), ("{7}", "7", 1), ("%d%s 7", "7", 1),
          ("\\7", "7", 1), ("[7](7)", "7", 1), ("nan", "nan", 0), ("inf", "inf", 0), ("-inf", "-inf", 0), ("7\r\n", "7", 1)),
]  # fmt: skip

CHECK = Check(
    exercise="12.number_reward",
    outputs=("reward",),
    spoilt=("reward",),
    cases=[
        Case("shape and dtype", "a float, where the answer is right", of("7", "7"), reward(1), CONTRACT),
        Case("shape and dtype", "a float, where it is wrong", of("7", "8"), reward(0), CONTRACT),
        Case("shape and dtype", "a float, where there is none", of("", "8"), reward(0), CONTRACT),
        example("the contract's: 3 + 4 is 7.", "3 + 4 is 7.", "7", 1, CONTRACT),
        example("the contract's: 7 or 8", "7 or 8", "7", 0, CONTRACT),
        example("the contract's: x = 0.50", "x = 0.50", "1/2", 1, CONTRACT),
        example("the contract's: seven", "seven", "7", 0, CONTRACT),
        example("a sentence with units and a full stop", "They walk 3.5 km, then 12 km: 15.5 km.", "15.5", 1),
        example("the last number, not any number", "7 is wrong; it is 8", "7", 0),
        *TABLES,
        Case("property", "a 7 with a long text behind it", lambda: {"many": 100_000}, all_sevens, CONTRACT, long_tails),
        Case("property", "half a surrogate pair", lambda: {"code": 0xD800}, lambda code: {"reward": 1.0}, CONTRACT, with_half),
        Case("oracle", "every form of 11 numbers for every form", lambda: {"seed": 1}, none_wrong, FRACTIONS, in_every_form),
        Case("oracle", "... and of 11 others", lambda: {"seed": 2}, none_wrong, FRACTIONS, in_every_form),
        Case("budget", "a text of 5,000 numbers", lambda: {"numbers": 5000}, few, CONTRACT, copies),
        Case("budget", "texts of 300,000 characters", lambda: {"many": 300_000}, all_right, CONTRACT, long_texts),
    ],
)  # fmt: skip
