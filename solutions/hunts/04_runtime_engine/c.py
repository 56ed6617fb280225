"""The loss of a log. Micro-batches of texts have as many tokens as their texts, a log covers several steps, and the loss that it shows
is the mean over all tokens since the last log. How often a run logs should not change what it says of the whole."""

import random
from collections.abc import Iterator

MicroBatch = list[list[float]]  # the losses of the tokens of each text


class Meter:
    """Adds up what a run did since its last log."""

    def __init__(self) -> None:
        self.loss_sum, self.tokens = 0.0, 0

    def add(self, micro_batch: MicroBatch) -> None:
        for losses in micro_batch:
            self.loss_sum += sum(losses)
            self.tokens += len(losses)

    def read(self) -> tuple[float, int]:
        """The mean loss and the number of tokens since the last time; then it begins again."""
        found = self.loss_sum / max(self.tokens, 1), self.tokens
        self.loss_sum, self.tokens = 0.0, 0
        return found


def run(steps: list[list[MicroBatch]], log_every: int) -> Iterator[tuple[int, float, int]]:
    """(step, mean loss, tokens) of each log. What is left at the end is logged too."""
    meter = Meter()
    for step, micro_batches in enumerate(steps, 1):
        for micro_batch in micro_batches:
            meter.add(micro_batch)
        if step % log_every == 0 or step == len(steps):
            yield step, *meter.read()


def whole_loss(steps: list[list[MicroBatch]], log_every: int) -> float:
    """The mean loss of the whole run, put together from its logs."""
    logs = list(run(steps, log_every))
    return sum(mean * tokens for _, mean, tokens in logs) / sum(tokens for _, _, tokens in logs)


def example(seed: int, count: int, longest: int) -> list[list[MicroBatch]]:
    """Steps of one to three micro-batches of one to four texts. Short texts are harder: fewer tokens before to learn from."""
    drawn = random.Random(seed)

    def text() -> list[float]:
        return [3.0 / (1 + place / 4) + drawn.random() / 4 for place in range(drawn.randint(1, longest))]

    return [[[text() for _ in range(drawn.randint(1, 4))] for _ in range(drawn.randint(1, 3))] for _ in range(count)]


def main() -> None:
    steps = example(0, 24, 60)
    tokens = [loss for step in steps for micro_batch in step for text in micro_batch for loss in text]
    mean = sum(tokens) / len(tokens)
    print(f"steps between logs   loss of the whole run, from its logs   (all {len(tokens)} tokens in one list: {mean:.3f})")
    for log_every in (1, 2, 6, 24):
        print(f"{log_every:>18}   {whole_loss(steps, log_every):>37.3f}")


if __name__ == "__main__":
    main()
