"""Chats of several turns as training data, and a small model that is trained on the assistant's answers. It should learn to write every
token of an answer and the token that ends it, and nothing of what the user says."""

import torch
import torch.nn.functional as F
from torch import Tensor

USER, ASSISTANT, END, WORDS = 0, 1, 2, 9  # the first three are special tokens; words are 3 to 11
Turn = tuple[str, list[int]]


def tokens_of(chat: list[Turn]) -> tuple[list[int], list[bool]]:
    """A chat's tokens, and which of them belong to an answer: its words, and the end token after them."""
    ids: list[int] = []
    of_answer: list[bool] = []
    for role, words in chat:
        is_answer = role == "assistant"
        ids += [ASSISTANT if is_answer else USER, *words, END]
        of_answer += [False] + [is_answer] * (len(words) + 1)
    return ids, of_answer


def row_of(chat: list[Turn]) -> tuple[Tensor, Tensor]:
    """What the model reads [seq], and what it is to predict after each token [seq]; -100 does not count."""
    ids, of_answer = map(torch.tensor, tokens_of(chat))
    return ids[:-1], ids[1:].where(of_answer[1:], -100)


def predict(ids: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Logits [seq, vocabulary] from each token and the two before it."""
    before = F.pad(ids, (2, 0))
    seen = sum(weights[name][before[2 - back : len(before) - back]] for back, name in enumerate(("last", "second", "third")))
    return torch.tanh(seen) @ weights["out"]


def train(chats: list[list[Turn]], weights: dict[str, Tensor], steps: int, rate: float) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Gradient descent on the mean over all tokens that count. Returns the losses, how many tokens of each chat count, and the weights."""
    rows = [row_of(chat) for chat in chats]
    counted = [int((targets != -100).sum()) for _, targets in rows]
    held = {name: part.clone().requires_grad_() for name, part in weights.items()}
    losses = []
    for _ in range(steps):
        loss = sum(F.cross_entropy(predict(ids, held), targets, reduction="sum") for ids, targets in rows) / sum(counted)
        gradients = torch.autograd.grad(loss, list(held.values()))
        with torch.no_grad():
            for part, gradient in zip(held.values(), gradients, strict=True):
                part -= rate * gradient
        losses.append(loss.item())
    return losses, counted, {name: part.detach() for name, part in held.items()}


def example(seed: int, turns: int, chats: int = 6) -> tuple[list[list[Turn]], dict[str, Tensor]]:
    """Chats in which the assistant counts on from the user's word, and first weights."""
    random = torch.Generator().manual_seed(seed)
    made: list[list[Turn]] = []
    for _ in range(chats):
        made.append([])
        for _ in range(turns):
            word = int(torch.randint(3, WORDS, (), generator=random))
            made[-1] += [("user", [word]), ("assistant", list(range(word + 1, 3 + WORDS)))]
    shapes = {"last": (3 + WORDS, 16), "second": (3 + WORDS, 16), "third": (3 + WORDS, 16), "out": (16, 3 + WORDS)}
    return made, {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}


def main() -> None:
    print("turns   tokens of a chat   counted   probability, after training, of an answer's first word, its end, the user's next turn")
    for turns in (1, 2, 4):
        chats, weights = example(turns, turns)
        _, counted, trained = train(chats, weights, 400, 1.0)
        found: dict[str, list[float]] = {"first": [], "end": [], "next": []}
        for chat in chats:
            ids = torch.tensor(tokens_of(chat)[0])
            probabilities = predict(ids[:-1], trained).softmax(dim=-1)
            for place, (token, following) in enumerate(zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)):
                kind = "first" if token == ASSISTANT else "next" if following == USER else "end" if token == 2 + WORDS else None
                if kind:
                    found[kind].append(probabilities[place, following].item())
        shown = "     ".join(f"{sum(each) / len(each):.2f}" if each else "   -" for each in found.values())
        print(f"{turns:>5}   {len(tokens_of(chats[0])[0]):>16}   {counted[0]:>7}   {shown}")


if __name__ == "__main__":
    main()
