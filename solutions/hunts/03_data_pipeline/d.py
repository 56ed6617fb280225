"""Documents in rows, filled up with the end token, and a model of pairs of tokens that learns from them. It should learn to end a document
where documents end."""

import torch
import torch.nn.functional as F
from torch import Tensor

WORDS, END, WIDTH = 5, 5, 12  # a document is words 0 to 4, and the end token 5


def rows(documents: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [documents, width] each. Rows are filled up with the end token, whose target is -100: it does not count."""
    input_ids = torch.full((len(documents), width), END)
    targets = torch.full((len(documents), width), -100)
    for number, ids in enumerate(documents):
        input_ids[number, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[number, : len(ids) - 1] = torch.tensor(ids[1:])
    return input_ids, targets


def train(documents: list[list[int]], width: int, steps: int, rate: float) -> tuple[list[float], Tensor]:
    """Gradient descent on the mean loss over the targets that count. Returns the losses, and the logits of the next token by the last."""
    input_ids, targets = rows(documents, width)
    table = torch.zeros(1 + WORDS, 1 + WORDS, dtype=torch.float64, requires_grad=True)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(table[input_ids].flatten(0, 1), targets.flatten(), ignore_index=-100)
        [gradient] = torch.autograd.grad(loss, [table])
        with torch.no_grad():
            table -= rate * gradient
        losses.append(loss.item())
    return losses, table.detach()


def example(seed: int, count: int) -> list[list[int]]:
    """Documents that count up to 4 from anywhere, and end there; some have two parts with an end token each."""
    random = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(count):
        parts = torch.randint(0, WORDS, (int(torch.randint(1, 3, (), generator=random)),), generator=random).tolist()
        documents.append([token for first in parts for token in [*range(first, WORDS), END]])
    return [ids for ids in documents if len(ids) > 1]


def main() -> None:
    documents = example(0, 30)
    losses, table = train(documents, WIDTH, 200, 2.0)
    ends = sum(ids.count(END) for ids in documents)
    print(f"end tokens in the documents: {ends}")
    print(f"loss: first {losses[0]:.3f}, last {losses[-1]:.3f}")
    print("after word   probability of the end   of the next word")
    for word in range(WORDS):
        chances = table[word].softmax(dim=-1)
        print(f"{word:>10}   {chances[END].item():>22.3f}   {f'{chances[word + 1].item():.3f}' if word + 1 < WORDS else '':>16}".rstrip())
    words = [2]
    while words[-1] != END and len(words) < 16:
        words.append(int(table[words[-1]].argmax()))
    print("continued from 2:", *words)


if __name__ == "__main__":
    main()
