"""Check of 03.pack_documents. Oracles: a row built token by token with lists, by hand or in a loop; and torch's own bookkeeping of
segments (`nn.utils.rnn.pad_sequence`, `cumsum`, `repeat_interleave`). Ids are whole numbers: results are compared exactly.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shared.course.checking import Case, Check

from .pieces import CONTRACT, ids, random_ids, refused

ORACLE = "torch: shifted by cat, numbered by repeat_interleave, filled up by constant padding"


def packed(*documents: list[int], seq: int, dtype=torch.int64):
    return lambda: {"documents": [torch.tensor(document, dtype=dtype) for document in documents], "seq": seq}


def row(input_ids: list[int], targets: list[int], documents: list[int], positions: list[int]):
    return lambda **given: {
        "row": {"input_ids": ids(*input_ids), "targets": ids(*targets), "documents": ids(*documents), "positions": ids(*positions)}
    }


def by_torch(documents, seq):
    """Every document as a row of a table, which is then read without its padding."""
    sizes = torch.tensor([len(document) - 1 for document in documents])
    table = pad_sequence([document.long() for document in documents], batch_first=True)
    counted = torch.arange(table.shape[1] - 1) < sizes[:, None]

    def filled(values: Tensor, empty: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, seq - len(values)), value=empty)

    numbers = torch.arange(len(documents)).repeat_interleave(sizes)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return {
        "row": {
            "input_ids": filled(table[:, :-1][counted], 0), "targets": filled(table[:, 1:][counted], -100),
            "documents": filled(numbers, -1), "positions": filled(torch.arange(len(first)) - first, 0),
        }
    }  # fmt: skip


def random_documents(*sizes: int, seq: int, dtype=torch.int64):
    return packed(*(random_ids(size, seed=size, most=97) for size in sizes), seq=seq, dtype=dtype)


def borders(function, documents, seq):
    """Whether a target is ever taken from the next document, by giving every document tokens of its own."""
    found = function(documents, seq)
    counted = found["targets"] != -100
    same = found["input_ids"][counted] // 100 == found["targets"][counted] // 100
    return {"targets that come from another document": int((~same).sum()), "targets": int(counted.sum())}


def alone(function, documents, seq):
    """Each document packed by itself beside its part of the common row."""
    together, different, start = function(documents, seq), [], 0
    for number, document in enumerate(documents):
        single, size = function([document], len(document) - 1), len(document) - 1
        names = ("input_ids", "targets", "positions")
        different += [number for name in names if not torch.equal(single[name], together[name][start : start + size])]
        start += size
    return {"documents that read otherwise when packed alone": different}


def apart(function, documents, seq):
    """Whether a row that is written to leaves the documents as they are, and each tensor of it the others."""
    row, before = function(documents, seq), [document.tolist() for document in documents]
    wanted = {name: values.tolist() for name, values in row.items()}
    shared = []
    for name, values in row.items():
        values.fill_(77)
        shared += [other for other in row if other != name and row[other].tolist() != wanted[other]]
        wanted[name] = values.tolist()
    return {"tensors that share memory": shared, "documents stay as they were": [document.tolist() for document in documents] == before}


SOURCE = "the contract: n - 1 predictions of each document of n tokens"

CHECK = Check(
    exercise="03.pack_documents",
    outputs=("row",),
    spoilt=("row.input_ids", "row.targets", "row.documents", "row.positions", "row"),
    cases=[
        Case(
            "shape and dtype", "three documents of int32 in a row of 13", random_documents(3, 5, 2, seq=13, dtype=torch.int32),
            by_torch, CONTRACT,
        ),
        Case(
            "worked example", "one document that fills the row", packed([5, 6, 7, 2], seq=3),
            row([5, 6, 7], [6, 7, 2], [0, 0, 0], [0, 1, 2]), SOURCE,
        ),
        Case(
            "worked example", "one document and padding", packed([5, 6, 2], seq=5),
            row([5, 6, 0, 0, 0], [6, 2, -100, -100, -100], [0, 0, -1, -1, -1], [0, 1, 0, 0, 0]), "the contract: what stands on padding",
        ),
        Case(
            "worked example", "two documents that fill the row", packed([5, 2], [8, 9, 3], seq=3),
            row([5, 8, 9], [2, 9, 3], [0, 1, 1], [0, 0, 1]), "the contract: the first token of a document is nobody's target",
        ),
        Case(
            "worked example", "three documents and padding", packed([5, 6, 7, 2], [8, 2], [4, 9, 2], seq=8),
            row([5, 6, 7, 8, 4, 9, 0, 0], [6, 7, 2, 2, 9, 2, -100, -100], [0, 0, 0, 1, 2, 2, -1, -1], [0, 1, 2, 0, 0, 1, 0, 0]), SOURCE,
        ),
        Case(
            "worked example", "the id 0 is a token like any other", packed([0, 0, 5, 0], [0, 0], [3, 0], seq=7),
            row([0, 0, 5, 0, 3, 0, 0], [0, 5, 0, 0, 0, -100, -100], [0, 0, 0, 1, 2, -1, -1], [0, 1, 2, 0, 0, 0, 0]), CONTRACT,
        ),
        Case(
            "worked example", "ids of a large vocabulary, in int32",
            packed([70_000, 40_000, 2], [65_536, 32_768], seq=4, dtype=torch.int32),
            row([70_000, 40_000, 65_536, 0], [40_000, 2, 32_768, -100], [0, 0, 1, -1], [0, 1, 0, 0]), CONTRACT,
        ),
        Case("property", "a document of one token", packed([5, 6, 2], [4], seq=7), refused, CONTRACT),
        Case("property", "an empty document", packed([], [5, 6, 2], seq=7), refused, CONTRACT),
        Case(
            "property", "two documents that need 7 positions in a row of 6", packed([5, 6, 7, 2], [8, 9, 4, 4, 2], seq=6),
            refused, CONTRACT,
        ),
        Case("property", "one document that is too long by one", packed([5, 6, 7, 2], seq=2), refused, CONTRACT),
        Case(
            "property", "documents of different tokens: no target comes from a neighbour",
            packed(*([100 * number + place for place in range(size)] for number, size in enumerate((3, 7, 2, 5))), seq=17),
            lambda **given: {"targets that come from another document": 0, "targets": 13}, "arithmetic: 2 + 6 + 1 + 4 targets", borders,
        ),
        Case(
            "property", "a document reads the same with neighbours and alone", random_documents(4, 2, 7, seq=11),
            lambda **given: {"documents that read otherwise when packed alone": []}, CONTRACT, alone,
        ),
        Case(
            "property", "a document that fills the row is copied, not viewed", packed([5, 6, 7, 2], seq=3),
            lambda **given: {"tensors that share memory": [], "documents stay as they were": True}, "the contract: left unchanged", apart,
            changes=("documents",),
        ),
        Case(
            "property", "two documents that fill the row are copied", packed([5, 6], [7, 2], seq=2),
            lambda **given: {"tensors that share memory": [], "documents stay as they were": True}, "the contract: left unchanged", apart,
            changes=("documents",),
        ),
        Case("oracle", "a document of 5,000 tokens, and a short one", random_documents(5000, 3, seq=5003), by_torch, ORACLE),
        Case("oracle", "300 documents of two tokens", random_documents(*[2] * 300, seq=301), by_torch, ORACLE),
        Case("oracle", "five random documents in a row of 41", random_documents(11, 2, 13, 3, 5, seq=41), by_torch, ORACLE),
        Case("oracle", "the same in uint8, exactly full", random_documents(11, 2, 13, 3, 5, seq=29, dtype=torch.uint8), by_torch, ORACLE),
    ],
)
