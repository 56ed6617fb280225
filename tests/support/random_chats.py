"""Random records of conversations with calls of tools, as people's files hold them, and the files that hold the same records.

Tools differ in their properties and calls in their arguments, so a table of them has the union of all keys. Keys stand in one order, since
Arrow's structs have one.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import datasets

LETTERS = "ab Z09\n\t\"'\\{}[]<>é\u0085\u2028\u2029\u00a0\ufeff🙂中"
TEXTS = ("", " ", "null", "true", "1.0", "[1]", '{"a": 1}', "2024-01-31", "2024-01-31T10:00:00", "<|im_end|>", "\r\n")
# name of an argument -> its type in a tool's description, and how a value is drawn: one type of Arrow's each
ARGUMENTS: dict[str, tuple[str, Callable[[Random], Any]]] = {
    "city": ("string", lambda random: text(random)),
    "day": ("string", lambda random: f"2024-0{random.randint(1, 9)}-{random.randint(10, 28)}"),
    "count": ("integer", lambda random: random.randint(-3, 2**40)),
    "ratio": ("number", lambda random: random.choice([random.randint(-9, 9), random.randint(-999, 999) / 64, 2.0, 1e30])),
    "sure": ("boolean", lambda random: random.random() < 0.5),
    "grid": ("array", lambda random: [[random.randint(0, 9) for _ in range(random.randrange(3))] for _ in range(random.randrange(3))]),
    "place": ("object", lambda random: {name: random.choice([random.randint(0, 9), 0.5]) for name in drawn(random, ("lat", "lon"))}),
}


def text(random: Random) -> str:
    return random.choice(TEXTS) if random.random() < 0.2 else "".join(random.choices(LETTERS, k=random.randrange(8)))


def drawn(random: Random, names: Any) -> list[str]:
    """Some of the names, in their order."""
    return [name for name in names if random.random() < 0.5]


def anything(random: Random, depth: int = 2) -> Any:
    """A value of any type, nulls that JSON says among them."""
    make = random.choice([text, lambda _: None, lambda _: random.randint(-9, 9), lambda _: random.choice([0.5, 3.0]), lambda _: True])
    if depth and random.random() < 0.4:
        some = [anything(random, depth - 1) for _ in range(random.randrange(3))]
        return some if random.random() < 0.5 else dict(zip(random.sample("xyz", len(some)), some, strict=True))
    return make(random)


def tool(random: Random, name: str, mixed: bool) -> dict[str, Any]:
    """The description of a function. mixed: defaults of any type."""
    properties = {}
    for key in drawn(random, ARGUMENTS):
        properties[key] = {"type": ARGUMENTS[key][0]} | ({"description": text(random)} if random.random() < 0.3 else {})
        properties[key] |= {"default": anything(random)} if mixed and random.random() < 0.3 else {}
    parameters = {"type": "object", "properties": properties, "required": drawn(random, properties)}
    described = {"description": text(random)} if random.random() < 0.5 else {}
    return {"type": "function", "function": {"name": name} | described | {"parameters": parameters}}


def call(random: Random, number: int, mixed: bool) -> dict[str, Any]:
    """A call of a function. mixed: arguments may be JSON text, and values of any type."""
    arguments: Any = {key: ARGUMENTS[key][1](random) for key in drawn(random, ARGUMENTS)}
    if mixed:
        arguments |= {key: anything(random) for key in drawn(random, ("extra", "more"))}
        arguments = json.dumps(arguments) if random.random() < 0.5 else random.choice([arguments, arguments, "", "print(1)"])
    named = {"id": f"call_{number}"} if random.random() < 0.5 else {}
    return named | {"type": "function", "function": {"name": random.choice("fgh"), "arguments": arguments}}


def said(random: Random, role: str, mixed: bool) -> dict[str, Any]:
    """A message. mixed: its text may be a list of parts."""
    content: Any = text(random)
    if mixed and random.random() < 0.3:
        content = [{"type": "text", "text": text(random)} for _ in range(random.randint(1, 2))]
    return {"role": role, "content": content} | ({"name": random.choice(["Ann", ""])} if random.random() < 0.2 else {})


def answered(random: Random, mixed: bool) -> dict[str, Any]:
    """An answer of the assistant, perhaps with its reasoning and with a weight."""
    message = said(random, "assistant", mixed)  # never an empty one, which is refused
    content = message["content"]
    message["content"] = f"Said {content}" if isinstance(content, str) else [{"type": "text", "text": "Said"}, *content]
    message |= {"reasoning_content": text(random)} if random.random() < 0.3 else {}
    return message | ({"weight": random.randint(0, 1)} if random.random() < 0.3 else {})


def record(random: Random, mixed: bool) -> dict[str, Any]:
    """A conversation of one to three turns, of which the last answer is trained on.

    mixed: with fields whose type differs from record to record, which Arrow's structs cannot hold.
    """
    messages = [said(random, "system", mixed)] if random.random() < 0.3 else []
    for _ in range(random.randint(1, 3)):
        messages.append(said(random, "user", mixed))
        for number in range(random.choice([0, 0, 1, 2])):
            calls = [call(random, number, mixed) for _ in range(random.randint(1, 2))]
            messages += [{"role": "assistant", "content": text(random), "tool_calls": calls}, said(random, "tool", mixed)]
        messages.append(answered(random, mixed))
    messages[-1] |= {"content": "Done. " + text(random), "weight": 1}
    tools = [tool(random, name, mixed) for name in "fgh"[: random.randrange(4)]]
    return {"messages": messages} | ({"tools": tools} if tools or random.random() < 0.5 else {})


def complete(random: Random) -> dict[str, Any]:
    """A record with all keys, so that Arrow's structs have them in this order."""
    arguments = {key: make(random) for key, (_, make) in ARGUMENTS.items()} | {"place": {"lat": 0.5, "lon": 1}, "grid": [[1]]}
    properties = {key: {"type": kind, "description": ""} for key, (kind, _) in ARGUMENTS.items()}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    answer = {"role": "assistant", "content": "x", "name": "Ann", "reasoning_content": "r", "weight": 1, "tool_calls": calls}
    function = {"name": "f", "description": "", "parameters": parameters}
    return {"messages": [{"role": "user", "content": "y"}, answer], "tools": [{"type": "function", "function": function}]}


def records(seed: int, count: int, mixed: bool) -> list[dict[str, Any]]:
    random = Random(seed)
    return [complete(random), *(record(random, mixed) for _ in range(count - 1))]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A CSV file; what is no text is JSON text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows({name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()} for row in rows)
    return path


def written(folder: Path, rows: list[dict[str, Any]], mixed: bool) -> list[Path]:
    """The same records as JSONL, which is the first, as CSV, and as Parquet and a saved dataset of the library datasets, made in two ways:
    from objects, and of the JSONL that it reads."""
    folder.mkdir()
    lines, table = write_lines(folder / "rows.jsonl", rows), write_table(folder / "rows.csv", rows)
    read = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(folder / "cache"))
    made = datasets.Dataset.from_list(rows, on_mixed_types="use_json" if mixed else None)
    paths = [lines, table]
    for name, some in {"read": read, "made": made}.items():
        some.to_parquet(folder / f"{name}.parquet")
        some.save_to_disk(folder / name)
        paths += [folder / f"{name}.parquet", folder / name]
    return paths
