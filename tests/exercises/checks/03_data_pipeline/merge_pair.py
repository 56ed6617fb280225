"""Check of 03.merge_pair. Oracle: Python's `re.sub` on a text with one character for each id; it replaces from left to right and
without overlap, as its documentation says. Ids are whole numbers, so results are compared exactly.
"""

import re

from shared.course.checking import Case, Check

from .pieces import CONTRACT, answer, given, random_ids

ORACLE = "Python's re.sub, on a text with one character for each id"
ONE_PASS = "the contract: what was joined is not joined again"
DIGITS = "the contract: ids are numbers, not digits"
TWICE = "the contract: from left to right, without overlap"


def by_re(ids, pair, new_id):
    """Ids as letters of a private alphabet, so that none of them means anything to `re`."""
    letters = {place: chr(0xE000 + place) for place in {*ids, *pair, new_id}}
    back = {letter: place for place, letter in letters.items()}
    text = re.sub(letters[pair[0]] + letters[pair[1]], letters[new_id], "".join(letters[place] for place in ids))
    return {"merged": [back[letter] for letter in text]}


def example(title: str, ids: list[int], pair: tuple[int, int], new_id: int, merged: list[int], source: str, rung="worked example") -> Case:
    return Case(rung, title, given(ids=ids, pair=pair, new_id=new_id), answer("merged", merged), source)


def random_case(title: str, count: int, seed: int, pair: tuple[int, int], new_id: int, most: int = 7) -> Case:
    return Case("oracle", title, given(ids=random_ids(count, seed, most), pair=pair, new_id=new_id), by_re, ORACLE)


LARGE = 500_000
BASES = (256, 1000, 1024, 4096, 10_000, 32_000, 32_768, 50_257, 65_535, 65_536, 100_000)


def like_one_number() -> list[int]:
    """Neighbours that make the same number as (5, LARGE) where two ids are packed into one, for each of the usual bases."""
    return [part for base in BASES for part in (5 + LARGE // base, LARGE % base)] + [4, 2 * LARGE + 1]


def lengths(function, ids, pair, new_id):
    merged = function(ids, pair, new_id)
    return {"lost length for each new id": (len(ids) - len(merged)) == merged.count(new_id), "a list of its own": merged is not ids}


def decoded(function, ids, pair, new_id):
    """The merged ids, with the pair put back."""
    return {"with the pair put back": [part for one in function(ids, pair, new_id) for part in (pair if one == new_id else [one])]}


CHECK = Check(
    exercise="03.merge_pair",
    outputs=("merged",),
    spoilt=("merged",),
    cases=[
        example("a list comes out", [5, 6, 8], (5, 6), 9, [9, 8], CONTRACT, rung="shape and dtype"),
        example("one pair in the middle", [3, 5, 6, 8], (5, 6), 9, [3, 9, 8], CONTRACT),
        example("two pairs, one at each end", [5, 6, 7, 5, 6], (5, 6), 9, [9, 7, 9], CONTRACT),
        example("the left id of a pair alone at the end", [5, 6, 5], (5, 6), 9, [9, 5], CONTRACT),
        example("the two ids of the pair in the other order", [6, 5, 4, 6, 5, 6], (5, 6), 9, [6, 5, 4, 6, 9], CONTRACT),
        example("the same id three times", [7, 7, 7], (7, 7), 9, [9, 7], TWICE),
        example("the same id four times", [7, 7, 7, 7], (7, 7), 9, [9, 9], TWICE),
        example("the pair's tokens at the two ends", [6, 8, 5], (5, 6), 9, [6, 8, 5], "the contract: neighbours"),
        example("no ids at all", [], (5, 6), 9, [], CONTRACT),
        example("the new id is the left one of the pair", [5, 6, 6, 8], (5, 6), 5, [5, 6, 8], ONE_PASS),
        example("the new id is the right one of the pair", [5, 5, 6], (5, 6), 6, [5, 6], ONE_PASS),
        example("ids whose last digits are the pair's left one", [15, 6, 25, 6], (5, 6), 19, [15, 6, 25, 6], DIGITS),
        example("ids whose first digits are the pair's right one", [5, 60, 5, 61], (5, 6), 9, [5, 60, 5, 61], DIGITS),
        example("ids above 65,535", [70_000, 65_536, 4464, 0], (70_000, 65_536), 70_001, [70_001, 4464, 0], CONTRACT),
        example("the same numbers, each an object of its own", [*map(int, ["300", "400", "7"])], (300, 400), 500, [500, 7],
                "the contract: ids are numbers, compared by ==", rung="property"),
        example("neighbours that make the number of the pair, if two ids are packed into one", like_one_number(), (5, LARGE), 9,
                like_one_number(), CONTRACT, rung="property"),
        *(
            Case(
                "property", f"a new list for {title}", given(ids=ids, pair=(3, 1), new_id=11),
                lambda **rest: {"lost length for each new id": True, "a list of its own": True}, CONTRACT, lengths,
            )
            for title, ids in (("no ids", []), ("one id", [3]))
        ),
        Case(
            "property", "putting the pair back gives the ids back", given(ids=random_ids(101, 3, 4), pair=(2, 1), new_id=11),
            lambda ids, **rest: {"with the pair put back": ids}, "joining loses nothing", decoded,
        ),
        Case(
            "property", "each new id makes the list one shorter, and it is a new list, also where nothing was joined",
            given(ids=[1, 2, 1, 3], pair=(3, 1), new_id=11),
            lambda **rest: {"lost length for each new id": True, "a list of its own": True},
            CONTRACT, lengths,
        ),
        random_case("401 ids of 4 kinds", 401, 1, (1, 2), 9, most=4),
        random_case("97 ids of 2 kinds, a pair of equals", 97, 2, (1, 1), 9, most=2),
        random_case("53 ids of 3 kinds, the pair with id 0", 53, 5, (0, 2), 9, most=3),
    ],
)
