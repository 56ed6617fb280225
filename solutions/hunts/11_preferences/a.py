"""DPO on pairs of answers of several lengths, and a small model. How far a pair may take the model away from the reference is up to beta
and the loss, and should not depend on how long the answers are."""

import torch
import torch.nn.functional as F
from torch import Tensor

END, WORDS = 0, 8  # the end of an answer; words are 1 to 8
Pair = tuple[list[int], list[int], list[int]]  # prompt, chosen, rejected


def predict(ids: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Logits [seq, vocabulary] from each token and the one before it."""
    before = F.pad(ids, (1, 0))
    return torch.tanh(weights["last"][ids] + weights["second"][before[:-1]]) @ weights["out"]


def answer_log_prob(prompt: list[int], answer: list[int], weights: dict[str, Tensor]) -> Tensor:
    """The log-probability of an answer and of its end, after the prompt: []."""
    ids = torch.tensor([*prompt, *answer, END])
    by_token = -F.cross_entropy(predict(ids[:-1], weights), ids[1:], reduction="none")
    return by_token[len(prompt) - 1 :].sum()


def difference(pair: Pair, policy: dict[str, Tensor], reference: dict[str, Tensor]) -> Tensor:
    """How much more the policy prefers the chosen answer than the reference does, in nats: []."""
    prompt, chosen, rejected = pair
    ratios = [answer_log_prob(prompt, answer, policy) - answer_log_prob(prompt, answer, reference) for answer in (chosen, rejected)]
    return ratios[0] - ratios[1]


def train(pairs: list[Pair], weights: dict[str, Tensor], beta: float, steps: int, rate: float) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient descent on the mean DPO loss. Returns the losses and the weights."""
    policy = {name: part.clone().requires_grad_() for name, part in weights.items()}
    losses = []
    for _ in range(steps):
        loss = torch.stack([-F.logsigmoid(beta * difference(pair, policy, weights)) for pair in pairs]).mean()
        gradients = torch.autograd.grad(loss, list(policy.values()))
        with torch.no_grad():
            for part, gradient in zip(policy.values(), gradients, strict=True):
                part -= rate * gradient
        losses.append(loss.item())
    return losses, {name: part.detach() for name, part in policy.items()}


def example(seed: int, lengths: list[int]) -> tuple[list[Pair], dict[str, Tensor]]:
    """A pair for each length, of answers with that many words, and first weights."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(1, 1 + WORDS, (count,), generator=random).tolist()  # noqa: E731
    pairs = [(draw(2), draw(length), draw(length)) for length in lengths]
    shapes = {"last": (1 + WORDS, 12), "second": (1 + WORDS, 12), "out": (12, 1 + WORDS)}
    return pairs, {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}


def main() -> None:
    print("words in each answer   loss of the first step, of the last   log(policy / reference) of chosen answers, of rejected ones")
    for length in (1, 4, 16):
        pairs, weights = example(length, [length] * 3)
        losses, trained = train(pairs, weights, 0.5, 150, 0.5)
        shown = []
        for place in (1, 2):
            ratios = []
            for pair in pairs:
                ids = torch.tensor([*pair[0], *pair[place], END])
                now, then = (predict(ids[:-1], w).log_softmax(dim=-1).gather(-1, ids[1:, None])[1:].sum() for w in (trained, weights))
                ratios.append((now - then).item())
            shown.append(sum(ratios) / len(ratios))
        print(f"{length:>20}   {losses[0]:>22.3f}  {losses[-1]:>12.3f}   {shown[0]:>38.1f}  {shown[1]:>16.1f}")


if __name__ == "__main__":
    main()
