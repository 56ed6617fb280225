"""A loader of shuffled batches that can be stopped and continued. A run that was stopped should see the batches that it would have seen, so
each row once in each epoch, wherever it was stopped."""

import json
import random


class Loader:
    """Batches of row numbers, epoch after epoch. The rows divide by the batch size."""

    def __init__(self, rows: int, batch_size: int, seed: int):
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.batches = rows // batch_size
        self.epoch, self.batch = 0, 0

    def order(self) -> list[int]:
        """The rows of this epoch."""
        return random.Random(f"{self.seed}, {self.epoch}").sample(range(self.rows), self.rows)

    def next_batch(self) -> list[int]:
        if self.batch == self.batches:  # the epoch is over
            self.epoch, self.batch = self.epoch + 1, 0
        first = self.batch * self.batch_size
        self.batch += 1
        return self.order()[first : first + self.batch_size]

    def state(self) -> dict[str, int]:
        """Where the next batch is, as values of JSON."""
        return {"epoch": self.epoch, "batch": self.batch}

    def restore(self, state: dict[str, int]) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]


def run(rows: int, batch_size: int, seed: int, batches: int, stops: list[int]) -> list[list[int]]:
    """The batches of a run that is stopped after these numbers of batches, and continued by a new loader from JSON each time."""
    loader, seen = Loader(rows, batch_size, seed), []
    for number in range(batches):
        if number in stops:
            saved = json.dumps(loader.state())
            loader = Loader(rows, batch_size, seed)
            loader.restore(json.loads(saved))
        seen.append(loader.next_batch())
    return seen


def main() -> None:
    rows, batch_size, batches = 12, 3, 12  # three epochs
    whole = run(rows, batch_size, 0, batches, [])
    print("stopped after   batches as without a stop   batches that were seen before")
    for stop in range(1, 9):
        seen = run(rows, batch_size, 0, batches, [stop])
        same = sum(left == right for left, right in zip(seen, whole))
        again = sum(batch in seen[:number] for number, batch in enumerate(seen))
        print(f"{stop:>5} batch{'es' if stop > 1 else '  '}   {same:>16} of {batches}   {again:>29}")


if __name__ == "__main__":
    main()
