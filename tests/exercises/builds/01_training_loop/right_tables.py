"""Another right build: seven tables of scores, one for each distance, added up; gradients of sums, divided afterwards; Adagrad.

Windows are unfolded, sides are told apart by CRC-32, a draw goes over cumulative probabilities, and a run is one dictionary.
"""

import math
import pickle
import random
import zlib

import torch
from torch import nn

DISTANCES = 7


def require(fine, sentence):
    if not fine:
        raise ValueError(sentence)


def split(documents, one_in):
    require(one_in >= 2, f"{one_in} is too few: one document in two is the most that can be held out.")
    both = ([], [])
    for document in documents:
        both[zlib.crc32(document) % one_in == one_in - 1].append(document + b"\0")
    return tuple(torch.frombuffer(bytearray(b"".join(side)), dtype=torch.uint8) if side else torch.zeros(0).byte() for side in both)


def windows(text, rows, length, generator):
    require(len(text) > length, f"{len(text)} bytes have no window of {length} with its targets.")
    every = text.unfold(0, length + 1, 1)  # a view
    chosen = every[torch.randint(0, every.shape[0], (rows,), generator=generator)].to(torch.int64)
    return chosen[:, :length].contiguous(), chosen[:, 1:].contiguous()


class Tables(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.scores = nn.Parameter(0.01 * torch.randn(DISTANCES, 256, 256, generator=generator))

    def forward(self, ids):
        logits = 0
        for distance in range(min(DISTANCES, ids.shape[1])):
            own = self.scores[distance][ids[:, : ids.shape[1] - distance]]
            logits = logits + torch.cat([own.new_zeros(len(ids), distance, 256), own], dim=1)
        return logits


def new_model(seed):
    return Tables(torch.Generator().manual_seed(seed))


def loss(logits, targets):
    if logits.dtype != torch.float64:
        logits = logits.to(torch.float32)
    kept = targets != -100
    some, wanted = logits[kept], targets[kept]
    if not len(wanted):
        return (logits * 0).sum(), kept.sum()
    return (some.logsumexp(-1) - some.gather(1, wanted[:, None])[:, 0]).sum(), kept.sum()


def step(model, optimizer, micro_batches):
    for module in model.modules():
        module.training = True
    held = [weight.grad for weight in model.parameters()]
    for weight in model.parameters():
        weight.grad = None
    try:
        sums, counts = [], []
        for inputs, targets in micro_batches:
            own, count = loss(model(inputs), targets)
            own.backward()
            sums.append(own.item())
            counts.append(count.item())
            del own
        require(sum(counts) > 0, "Nothing to learn from: no target counts.")
        require(math.isfinite(sum(sums)), f"The loss is not finite: {sum(sums)}.")
    except ValueError:
        for weight, grad in zip(model.parameters(), held):
            weight.grad = grad
        raise
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.div_(sum(counts))
    optimizer.step()
    return torch.tensor(sum(sums) / sum(counts), dtype=torch.float64)


class Judging:
    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.before = {module: module.training for module in self.model.modules()}
        self.gradients = torch.is_grad_enabled()
        self.model.train(False)
        torch.set_grad_enabled(False)

    def __exit__(self, *_):
        torch.set_grad_enabled(self.gradients)
        for module, mode in self.before.items():
            module.training = mode


def evaluate(model, text, length, rows):
    require(len(text) >= 2, f"A text of {len(text)} has nothing to predict.")
    require(length >= 1, "length must be positive.")
    require(rows >= 1, "rows must be positive.")
    ids, nats, place = text.to(torch.int64), 0.0, 0
    with Judging(model):
        while place < len(ids) - 1:
            full = min(rows, (len(ids) - 1 - place) // length)
            height, width = (full, length) if full else (1, len(ids) - 1 - place)
            stop = place + height * width
            nats += float(loss(model(ids[place:stop].view(height, width)), ids[place + 1 : stop + 1].view(height, width))[0])
            place = stop
    return nats / ((len(text) - 1) * math.log(2))


def sample(model, prompt, count, temperature, top_k, seed, context):
    require(temperature >= 0 and temperature != math.inf, f"temperature {temperature} is none.")
    require(top_k is None or top_k >= 1, f"top_k {top_k} leaves no byte.")
    require(context >= 1, f"context {context} shows nothing.")
    require(count >= 0, f"count {count} is negative.")
    drawn, chance = bytearray(), random.Random(seed)
    with Judging(model):
        for _ in range(count):
            shown = ((prompt or b"\0") + bytes(drawn))[-context:]
            logits = model(torch.tensor(list(shown))[None])[0, -1].tolist()
            order = sorted(range(len(logits)), key=lambda byte: -logits[byte])[: top_k or None]
            if temperature == 0:
                drawn.append(order[0])
                continue
            weights = [math.exp((logits[byte] - logits[order[0]]) / temperature) for byte in order]
            drawn.append(chance.choices(order, weights)[0])
    return bytes(drawn)


def start(text, seed):
    require(len(text) > 32, f"{len(text)} bytes are no text to train on.")
    model = new_model(seed)
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.3)
    return {"text": text, "model": model, "optimizer": adagrad, "seed": seed, "done": 0}


def model_of(run):
    return run["model"]


def advance(run, steps):
    found = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(run["seed"] * 1_000_003 + run["done"])  # a stream for each step
        inputs, targets = windows(run["text"], 64, 32, generator)
        parts = list(zip(inputs.split(24), targets.split(24)))
        found.append(float(step(run["model"], run["optimizer"], parts)))
        run["done"] += 1
    return found


def save(run, path):
    kept = {key: run[key] for key in ("seed", "done")} | {"text": zlib.crc32(bytes(run["text"].tolist()))}
    kept |= {"model": run["model"].state_dict(), "optimizer": run["optimizer"].state_dict()}
    path.write_bytes(pickle.dumps(kept))


def resume(text, path):
    require(path.exists(), f"There is no {path}.")
    kept = pickle.loads(path.read_bytes())
    require(kept["text"] == zlib.crc32(bytes(text.tolist())), "This run was on another text.")
    run = start(text, kept["seed"])
    run["model"].load_state_dict(kept["model"])
    run["optimizer"].load_state_dict(kept["optimizer"])
    run["done"] = kept["done"]
    return run
