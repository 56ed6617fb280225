"""Stages 1 and 2 of build 11: preference pairs from records and files, and their tokens. What is expected is written out."""

import json
import tempfile
from pathlib import Path
from typing import Any

from shared.course.checking import Case

from .pieces import TEXT, Results, refused

USER, ANSWER = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
SYSTEM, THEN = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sure?"}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def pair(prompt: list[dict[str, str]], chosen: str, rejected: str) -> Results:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


# Stage 1: read


def split_case(title: str, record: Results, wanted: Results) -> Case:
    def observe(adapters: Any, record: Results) -> Results:
        found = dict(adapters.split_pair(record))
        return {"pair": json.dumps(found | {"prompt": [dict(sorted(each.items())) for each in found["prompt"]]}, sort_keys=True)}

    expected = lambda **_: {"pair": json.dumps(wanted, sort_keys=True)}  # noqa: E731
    return Case("worked example", title, lambda: {"record": json.loads(json.dumps(record))}, expected, TEXT.format(1), observe)


def refused_case(title: str, key: str, record: Results) -> Case:
    wanted = f"ValueError that says {key.replace('|', ' or ')}"

    def observe(adapters: Any, record: Results) -> Results:
        try:
            return {"result": f"accepted: {adapters.split_pair(record)}"}
        except ValueError as error:
            return {"result": refused(error, (key,), wanted)}

    given = lambda: {"record": json.loads(json.dumps(record))}  # noqa: E731
    return Case("property", title, given, lambda **_: {"result": wanted}, TEXT.format(1), observe)


def in_file(adapters: Any, text: str) -> list[Results]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.jsonl"
        path.write_bytes(text.encode())
        return list(adapters.read_pairs(path))


def file_case(title: str, text: str, wanted: list[Results]) -> Case:
    def observe(adapters: Any, text: str) -> Results:
        found = [json.dumps(dict(each), sort_keys=True) for each in in_file(adapters, text)]
        return {"pairs": found, "count": len(found)}

    lines = [json.dumps(each, sort_keys=True) for each in wanted]
    expected = lambda **_: {"pairs": lines, "count": len(lines)}  # noqa: E731
    return Case("worked example", title, lambda: {"text": text}, expected, TEXT.format(1), observe)


def bad_file_case(title: str, text: str, *words: str) -> Case:
    wanted = f"ValueError that says {', '.join(words)}"

    def observe(adapters: Any, text: str) -> Results:
        try:
            return {"result": f"accepted: {in_file(adapters, text)}"}
        except ValueError as error:
            return {"result": refused(error, words, wanted)}

    return Case("property", title, lambda: {"text": text}, lambda **_: {"result": wanted}, TEXT.format(1), observe)


def line(chosen: str = "Four.", rejected: str = "Five.", **more: Any) -> str:
    return json.dumps({"prompt": "Two and two?", "chosen": chosen, "rejected": rejected} | more, ensure_ascii=False)


RIGHT, SEPARATED = pair([USER], "Four.", "Five."), "Four,\u2028or\x85so."
MESSAGES = {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [said("Five.")]}
WHOLE = {"chosen": [USER, ANSWER, THEN, said("Yes.")], "rejected": [USER, ANSWER, THEN, said("No.")]}

READ = (
    split_case("texts", {"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}, RIGHT),
    split_case("messages", MESSAGES, pair([SYSTEM, USER], "Four.", "Five.")),
    split_case("a conversation before the answer", MESSAGES | {"prompt": [USER, ANSWER, THEN]},
               pair([USER, ANSWER, THEN], "Four.", "Five.")),
    split_case("a text, and answers as messages", MESSAGES | {"prompt": "Two and two?"}, RIGHT),
    split_case("messages, and answers as texts", {"prompt": [SYSTEM, USER], "chosen": "4", "rejected": "5"},
               pair([SYSTEM, USER], "4", "5")),
    split_case("no prompt", WHOLE, pair([USER, ANSWER, THEN], "Yes.", "No.")),
    split_case("a prompt of None", {"prompt": None} | WHOLE, pair([USER, ANSWER, THEN], "Yes.", "No.")),
    split_case("spaces belong to an answer", {"prompt": "a", "chosen": " b\n", "rejected": "b"},
               pair([{"role": "user", "content": "a"}], " b\n", "b")),
    split_case("other keys", {"score": 3, **MESSAGES, "prompt": [SYSTEM | {"name": "x"}, USER]}, pair([SYSTEM, USER], "Four.", "Five.")),
    split_case("other keys that differ", {"chosen": [USER | {"id": 1}, ANSWER], "rejected": [USER | {"id": 2}, said("Five.")]}, RIGHT),
    refused_case("no chosen", "chosen", {"prompt": "a", "rejected": "b"}),
    refused_case("rejected is None", "rejected", {"prompt": "a", "chosen": "b", "rejected": None}),
    refused_case("an answer that is a number", "chosen", {"prompt": "a", "chosen": 4, "rejected": "b"}),
    refused_case("a list of texts", "rejected", {"prompt": "a", "chosen": "b", "rejected": ["c"]}),
    refused_case("a role that there is not", "prompt", MESSAGES | {"prompt": [{"role": "gpt", "content": "a"}, USER]}),
    refused_case("messages of another format", "chosen", MESSAGES | {"chosen": [{"from": "assistant", "value": "a"}]}),
    refused_case("a content that is a list", "rejected", MESSAGES | {"rejected": [{"role": "assistant", "content": ["a"]}]}),
    refused_case("an answer of two messages", "chosen", MESSAGES | {"chosen": [ANSWER, said("Yes.")]}),
    refused_case("an answer of no message", "chosen", MESSAGES | {"chosen": []}),
    refused_case("an answer of the user", "rejected", MESSAGES | {"rejected": [THEN]}),
    refused_case("a prompt of no message", "prompt", MESSAGES | {"prompt": []}),
    refused_case("a prompt that ends with an answer", "prompt", MESSAGES | {"prompt": [USER, ANSWER]}),
    refused_case("conversations that differ earlier", "prompt", {"chosen": WHOLE["chosen"], "rejected": [THEN, *WHOLE["rejected"][1:]]}),
    refused_case("one conversation is longer", "prompt", {"chosen": [USER, ANSWER], "rejected": [USER, said("5"), THEN, said("6")]}),
    refused_case("answers alone", "prompt", {"chosen": [ANSWER], "rejected": [said("Five.")]}),
    refused_case("texts without a prompt", "prompt|chosen", {"chosen": "Four.", "rejected": "Five."}),
    refused_case("a conversation that ends with the user", "rejected", WHOLE | {"rejected": [USER, ANSWER, THEN]}),
    refused_case("an empty answer", "chosen", {"prompt": "a", "chosen": "", "rejected": "b"}),
    refused_case("an answer of spaces", "rejected", MESSAGES | {"rejected": [said(" \n")]}),
    refused_case("equal answers", "rejected", MESSAGES | {"rejected": "Four."}),
    file_case("a record in each line", f"{line()}\n{line('4', '5')}\n", [RIGHT, pair([USER], "4", "5")]),
    file_case("empty lines, and none at the end", f"\n{line()}\n  \n{line('4', '5')}", [RIGHT, pair([USER], "4", "5")]),
    file_case("lines of Windows", f"{line()}\r\n\r\n{line('é', '5')}\r\n", [RIGHT, pair([USER], "é", "5")]),
    file_case("characters that separate lines, in an answer", f"{line(SEPARATED)}\n", [pair([USER], SEPARATED, "Five.")]),
    bad_file_case("equal answers in line 4", f"{line()}\n\n{line()}\n{line('5', '5')}\n", "answers.jsonl", "line 4", "rejected"),
    bad_file_case("a line that is no JSON", f"{line()}\n{line()[:-5]}\n", "answers.jsonl", "line 2"),
    bad_file_case("a line that is a list", f"{line()}\n\n[{line()}]\n", "answers.jsonl", "line 3"),
    bad_file_case("a line that is a text", f'"chosen, rejected"\n{line()}\n', "answers.jsonl", "line 1"),
    bad_file_case("no pair", "\n \n", "answers.jsonl"),
)  # fmt: skip

# Stage 2: encode

MARKS = {"system": 1, "user": 2, "assistant": 3, "end": 0}


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def encode_case(title: str, prompt: list[dict[str, str]], answers: tuple[str, str], width: int, *wanted: tuple[list[int], int]) -> Case:
    """wanted: ids, and how many of them, from the first on, are not trained."""
    names = "chosen", "rejected"

    def observe(adapters: Any, **given: Any) -> Results:
        found = adapters.encode(given["pair"], letters, dict(MARKS), width)
        both = {name: ([int(each) for each in ids], [bool(each) for each in trained]) for name, (ids, trained) in zip(names, found)}
        return {name: {"ids": ids, "trained": trained} for name, (ids, trained) in both.items()}

    def expected(**_: Any) -> Results:
        both = dict(zip(names, wanted, strict=True))
        return {name: {"ids": ids, "trained": [place >= first for place in range(len(ids))]} for name, (ids, first) in both.items()}

    given = lambda: {"pair": pair(list(prompt), *answers), "ids of a text": "its letters", "marks": MARKS, "width": width}  # noqa: E731
    return Case("worked example", title, given, expected, TEXT.format(2), observe)


HI, YES = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A"}
ASKED = [2, 72, 105, 0, 3]  # Hi

ENCODE = (
    encode_case("one question", [HI], ("Yo", "No!"), 20, ([*ASKED, 89, 111, 0], 5), ([*ASKED, 78, 111, 33, 0], 5)),
    encode_case("answers of earlier turns are not trained", [{"role": "system", "content": "B"}, HI, YES, HI], ("Yo", "A"), 40,
                ([1, 66, 0, 2, 72, 105, 0, 3, 65, 0, *ASKED, 89, 111, 0], 15), ([1, 66, 0, 2, 72, 105, 0, 3, 65, 0, *ASKED, 65, 0], 15)),
    encode_case("a message without a word", [{"role": "system", "content": ""}, HI], ("Y", "N"), 20,
                ([1, 0, *ASKED, 89, 0], 7), ([1, 0, *ASKED, 78, 0], 7)),
    encode_case("both just fit", [HI], ("Yo", "No"), 7, ([*ASKED, 89, 111, 0], 5), ([*ASKED, 78, 111, 0], 5)),
    encode_case("one is cut, and has no end", [HI], ("Yo", "No!"), 7, ([*ASKED, 89, 111, 0], 5), ([*ASKED, 78, 111, 33], 5)),
    encode_case("both are cut", [HI], ("You are", "No"), 6, ([*ASKED, 89, 111], 5), ([*ASKED, 78, 111], 5)),
    encode_case("one token is left", [HI], ("Yo", "No"), 5, ([*ASKED, 89], 5), ([*ASKED, 78], 5)),
    encode_case("answers that begin with the same letters", [HI], ("Yo", "You"), 20,
                ([*ASKED, 89, 111, 0], 5), ([*ASKED, 89, 111, 117, 0], 5)),
    encode_case("spaces around an answer", [HI], (" Y\n", "Y"), 20, ([*ASKED, 32, 89, 10, 0], 5), ([*ASKED, 89, 0], 5)),
)  # fmt: skip
