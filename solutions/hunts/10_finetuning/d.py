"""Prompts and answers of different lengths in one batch, and a small model that is trained on the answers and then writes some. It should
stop where an answer ends."""

import torch
import torch.nn.functional as F
from torch import Tensor

END, ASK, WORDS = 0, 1, 10  # rows are filled up with END as well; words are 2 to 11


def batch_of(examples: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Prompts and answers as rows: what the model reads [batch, seq], and what it is to predict after each token [batch, seq]; what belongs
    to no answer is -100."""
    texts = [[*prompt, ASK, *answer, END] for prompt, answer in examples]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [END] * (longest - len(text)) for text in texts])
    places = torch.arange(longest)
    first = torch.tensor([len(prompt) + 1 for prompt, _ in examples]).unsqueeze(1)
    last = torch.tensor([len(text) for text in texts]).unsqueeze(1)
    is_answer = (places >= first) & (places < last)
    return ids[:, :-1], ids[:, 1:].where(is_answer[:, 1:], -100)


def predict(ids: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Logits [batch, seq, vocabulary] from each token and the one before it."""
    before = F.pad(ids[:, :-1], (1, 0), value=ASK)
    return torch.tanh(weights["last"][ids] + weights["second"][before]) @ weights["out"]


def train(
    examples: list[tuple[list[int], list[int]]], weights: dict[str, Tensor], steps: int, rate: float
) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Gradient descent on the mean over all tokens that count. Returns the losses, how many tokens of each row count, and the weights."""
    ids, targets = batch_of(examples)
    held = {name: part.clone().requires_grad_() for name, part in weights.items()}
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(predict(ids, held).flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(loss, list(held.values()))
        with torch.no_grad():
            for part, gradient in zip(held.values(), gradients, strict=True):
                part -= rate * gradient
        losses.append(loss.item())
    return losses, (targets != -100).sum(dim=1).tolist(), {name: part.detach() for name, part in held.items()}


def write(prompt: list[int], weights: dict[str, Tensor], most: int) -> list[int]:
    """The likeliest answer to a prompt, up to the end token or `most` words."""
    ids, answer = [*prompt, ASK], []
    while len(answer) < most:
        token = int(predict(torch.tensor([ids]), weights)[0, -1].argmax())
        if token == END:
            break
        ids.append(token)
        answer.append(token)
    return answer


def example(seed: int, count: int = 12) -> tuple[list[tuple[list[int], list[int]]], dict[str, Tensor]]:
    """Prompts of one or two words, and answers that count down from the last of them, and first weights."""
    random = torch.Generator().manual_seed(seed)
    examples = []
    for number in range(count):
        prompt = torch.randint(4, 2 + WORDS, (1 + number % 2,), generator=random).tolist()
        examples.append((prompt, list(range(prompt[-1] - 1, 1, -1))))
    shapes = {"last": (2 + WORDS, 16), "second": (2 + WORDS, 16), "out": (16, 2 + WORDS)}
    return examples, {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}


def main() -> None:
    examples, weights = example(0)
    losses, counted, trained = train(examples, weights, 600, 1.0)
    print(f"loss at step 0 and 599: {losses[0]:.3f}  {losses[-1]:.3f}     tokens that count: {sum(counted)}")
    for prompt, answer in examples[:4]:
        print(f"{str(prompt):<8} wanted {str(answer):<32} written {write(prompt, trained, 14)}")


if __name__ == "__main__":
    main()
