"""Stage 8 of build 03: batches for any number of ranks. Every id is another one, so that each row says which predictions it has."""

import json
import random
from typing import Any

import torch

from shared.course.checking import Case

from .packing import RIGHT, best_fit, documents_of, pieces_of, seen
from .pieces import TEXT, Results

LENGTHS = [5, 3, 9, 2, 4, 7, 2, 12, 6, 3, 5, 2, 8, 4, 3, 6, 6, 7]
WIDTH = 8
ROWS = best_fit(LENGTHS, WIDTH)


def started(adapters: Any, size: int, seed: int = 1, rank: int = 0, ranks: int = 1, lengths: list[int] = LENGTHS) -> object:
    return adapters.start(documents_of(lengths, 5), WIDTH, size, seed, rank, ranks)


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: tensor[number] for name, tensor in batch.items()} for number in range(len(batch["input_ids"]))]


def named(row: dict[str, Any]) -> str:
    """What a row holds, whatever the order of its pieces."""
    pieces, fault = pieces_of(row)
    return fault or " ".join(f"{piece[0]}-{piece[-1]}" for piece in sorted(pieces))


def taken(adapters: Any, loaders: list[object], batches: int) -> list[list[str]]:
    """The rows of each batch, over all ranks, in alphabetical order."""
    return [sorted(named(row) for loader in loaders for row in rows_of(adapters.next_batch(loader))) for _ in range(batches)]


def ranks_of(adapters: Any, size: int, ranks: int, seed: int = 1) -> list[object]:
    return [started(adapters, size, seed, rank, ranks) for rank in range(ranks)]


def copied(adapters: Any, loader: object) -> dict[str, Any]:
    return json.loads(json.dumps(adapters.state(loader)))


def given(**more: Any) -> Any:
    return lambda: {"lengths of the documents": LENGTHS, "width": WIDTH, "rows of an epoch": ROWS, **more}


def case(title: str, wanted: Results, observe: Any, kind: str = "property", **more: Any) -> Case:
    return Case(kind, title, given(**more), lambda **_: wanted, TEXT.format(8), observe)


def epochs_case(size: int, epochs: int) -> Case:
    """Epochs that end with a batch: each has every prediction once."""

    def observe(adapters: Any, **_: Any) -> Results:
        loader, found = started(adapters, size), {}
        for epoch in range(epochs):
            rows = [row for _ in range(ROWS // size) for row in rows_of(adapters.next_batch(loader))]
            found[f"epoch {epoch}"] = seen(rows, documents_of(LENGTHS, 5), WIDTH)
        return found

    wanted = {f"epoch {epoch}": RIGHT for epoch in range(epochs)}
    return case(f"{epochs} epochs in batches of {size}", wanted, observe, "worked example", batch_size=size)


def across_case(size: int) -> Case:
    """An epoch that ends inside of a batch: the rows after it are the next epoch's, and none is skipped or filled up."""

    def observe(adapters: Any, **_: Any) -> Results:
        loader = started(adapters, size)
        rows = [row for _ in range(ROWS) for row in rows_of(adapters.next_batch(loader))]  # `size` epochs
        found = [seen(rows[first : first + ROWS], documents_of(LENGTHS, 5), WIDTH) for first in range(0, len(rows), ROWS)]
        return {"shape": list(adapters.next_batch(loader)["targets"].shape)} | {f"epoch {n}": each for n, each in enumerate(found)}

    wanted = {"shape": [size, WIDTH]} | {f"epoch {epoch}": RIGHT for epoch in range(size)}
    return case("an epoch ends inside of a batch", wanted, observe, batch_size=size)


def tail_case() -> Case:
    """A batch larger than an epoch."""

    def observe(adapters: Any, **_: Any) -> Results:
        loader = started(adapters, 2 * ROWS + 1)
        rows = rows_of(adapters.next_batch(loader)) + rows_of(adapters.next_batch(loader))
        found = [seen(rows[first : first + ROWS], documents_of(LENGTHS, 5), WIDTH) for first in range(0, 4 * ROWS, ROWS)]
        return {"rows": len(rows)} | {f"epoch {number}": each for number, each in enumerate(found)}

    wanted = {"rows": 4 * ROWS + 2} | {f"epoch {epoch}": RIGHT for epoch in range(4)}
    return case("a batch larger than an epoch", wanted, observe, batch_size=2 * ROWS + 1)


def orders_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        def order(seed: int, skipped: int = 0) -> list[str]:
            loader = started(adapters, 1, seed)
            return [each[0] for each in taken(adapters, [loader], skipped + ROWS)[skipped:]]

        random.seed(5)
        torch.manual_seed(5)
        before = random.getstate(), torch.get_rng_state()
        first = order(1)
        untouched = random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
        random.seed(99)
        torch.manual_seed(99)
        later = [order(1, ROWS), order(1, 2 * ROWS)]
        return {
            "the same seed gives the same order": order(1) == first, "another seed gives another one": order(2) != first,
            "each epoch has another one": first != later[0] != later[1] != first,
            "the second epoch of a seed is not the first of the next": order(2) != later[0],
            "global generators stay as they were": untouched,
        }  # fmt: skip

    names = (
        "the same seed gives the same order", "another seed gives another one", "each epoch has another one",
        "the second epoch of a seed is not the first of the next", "global generators stay as they were",
    )  # fmt: skip
    return case("orders", dict.fromkeys(names, True), observe, batch_size=1, seeds=[1, 2])


def ranks_case(size: int, ranks: int, batches: int) -> Case:
    """The batches of several ranks are those of one."""

    def observe(adapters: Any, **_: Any) -> Results:
        together, alone = taken(adapters, ranks_of(adapters, size, ranks), batches), taken(adapters, [started(adapters, size)], batches)
        counts = [[len(adapters.next_batch(loader)["targets"]) for loader in ranks_of(adapters, size, ranks)]]
        wrong = [number for number, (left, right) in enumerate(zip(together, alone)) if left != right]
        return {"batches that differ from those of one rank": wrong, "rows of each rank": counts}

    wanted = {"batches that differ from those of one rank": [], "rows of each rank": [[size // ranks] * ranks]}
    return case(f"{ranks} ranks see what one sees", wanted, observe, batch_size=size, ranks=ranks, batches=batches)


def moves_case(title: str, moves: list[tuple[int, int]], size: int = 4) -> Case:
    """moves: (ranks, batches). After each the state is read from JSON by new loaders."""

    def observe(adapters: Any, **_: Any) -> Results:
        found, state = [], None
        for ranks, batches in moves:
            loaders = ranks_of(adapters, size, ranks)
            if state is not None:
                for loader in loaders:
                    adapters.restore(loader, json.loads(state))
            found += taken(adapters, loaders, batches)
            states = {json.dumps(adapters.state(loader), sort_keys=True) for loader in loaders}
            state = sorted(states)[0]
            if len(states) > 1:
                return {"states of the ranks": sorted(states)}
        alone = taken(adapters, [started(adapters, size)], len(found))
        return {"batches that differ from those of one rank": [number for number, each in enumerate(found) if each != alone[number]]}

    return case(title, {"batches that differ from those of one rank": []}, observe, moves_as_ranks_and_batches=moves, batch_size=size)


def everywhere_case(size: int) -> Case:
    """Stopped after any number of batches, a run goes on with the next one."""
    count = 2 * ROWS // size + 2

    def observe(adapters: Any, **_: Any) -> Results:
        alone, wrong, loader = taken(adapters, [started(adapters, size)], count + 2), [], started(adapters, size)
        for stopped in range(count):
            state, other = copied(adapters, loader), started(adapters, size)
            adapters.restore(other, state)
            if taken(adapters, [other], 2) != alone[stopped : stopped + 2]:
                wrong.append(stopped)
            adapters.next_batch(loader)
        return {"batches after which a run does not go on with the next one": wrong}

    wanted = {"batches after which a run does not go on with the next one": []}
    return case(f"stopped anywhere in two epochs, in batches of {size}", wanted, observe, batch_size=size)


def sizes_case() -> Case:
    """After 3 batches of 2, batches of 3 go on with row 6."""

    def observe(adapters: Any, **_: Any) -> Results:
        one = [row for batch in taken(adapters, [started(adapters, 1)], 3 * ROWS) for row in batch]
        loader, other = started(adapters, 2), started(adapters, 3)
        taken(adapters, [loader], 3)
        adapters.restore(other, copied(adapters, loader))
        after = taken(adapters, [other], 4)
        return {"rows after the change": after == [sorted(one[first : first + 3]) for first in range(6, 18, 3)]}

    return case("another batch size", {"rows after the change": True}, observe, batch_sizes=[2, 3])


def state_case() -> Case:
    """What a state is, and that it stays as it is."""

    def observe(adapters: Any, **_: Any) -> Results:
        many = started(adapters, 4, lengths=[3] * 900)
        adapters.next_batch(many)
        length = len(json.dumps(adapters.state(many)))
        loader = started(adapters, 4)
        taken(adapters, [loader], 2)
        state = adapters.state(loader)
        before = json.dumps(state, sort_keys=True)
        rest = taken(adapters, [loader], 3)
        kept = json.dumps(state, sort_keys=True) == before
        adapters.restore(loader, json.loads(before))
        again = taken(adapters, [loader], 3)
        return {"characters": "at most 500" if length <= 500 else f"{length:,}", "stays as it was": kept, "going back": again == rest}

    return case("a state", {"characters": "at most 500", "stays as it was": True, "going back": True}, observe, batch_size=4)


def memory_case() -> Case:
    """A training step may work in its batch: the next epoch must not notice."""

    def observe(adapters: Any, **_: Any) -> Results:
        alone, loader, found = taken(adapters, [started(adapters, 1)], 3 * ROWS), started(adapters, 1), []
        for _ in range(3 * ROWS):
            batch = adapters.next_batch(loader)
            found.append(sorted(map(named, rows_of(batch))))
            for tensor in batch.values():
                tensor.fill_(3)
        return {"batches that differ": [number for number, each in enumerate(found) if each != alone[number]]}

    return case("a batch that is changed", {"batches that differ": []}, observe, batch_size=1)


assert ROWS % 2 == 0 and ROWS % 4 != 0 and ROWS % 3 != 0, ROWS

LOADER = (
    epochs_case(1, 2),
    epochs_case(2, 3),
    across_case(3),
    tail_case(),
    orders_case(),
    memory_case(),
    ranks_case(4, 2, 9),
    ranks_case(6, 3, 7),
    ranks_case(4, 4, 9),
    state_case(),
    moves_case("one rank, two, and one again", [(1, 2), (2, 3), (1, 4)]),
    moves_case("four ranks, one, and two, in a second epoch", [(4, 5), (1, 1), (2, 4)]),
    everywhere_case(1),
    everywhere_case(2),
    everywhere_case(3),
    sizes_case(),
)
