"""Another right build: a GRU, everything in two classes, windows gathered one by one, dropout that follows from the run's own seed."""

import hashlib
import io
import math

import torch
import torch.nn.functional as F
from torch import nn


def split(documents, one_in):
    if one_in <= 1:
        raise ValueError(f"Of one_in = {one_in} nothing is left to train on.")
    kept = {False: [], True: []}
    for document in documents:
        number = int(hashlib.md5(document).hexdigest(), 16)
        kept[number % (one_in * 1000) < 1000].extend([*document, 0])
    return torch.tensor(kept[False], dtype=torch.uint8), torch.tensor(kept[True], dtype=torch.uint8)


def windows(text, rows, length, generator):
    if text.numel() <= length:
        raise ValueError(f"Too short: {text.numel()} bytes.")
    pieces = []
    for _ in range(rows):
        begin = int(torch.randint(0, text.numel() - length, (), generator=generator))
        pieces.append(text[begin : begin + length + 1].long())
    stacked = torch.stack(pieces)
    return stacked[:, :-1], stacked[:, 1:]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.memory = nn.Embedding(256, 32), nn.GRU(32, 128, batch_first=True)
        self.drop, self.out = nn.Dropout(0.05), nn.Linear(128, 256)

    def forward(self, ids):
        return self.out(self.drop(self.memory(self.bytes(ids))[0]))


class Seeded:
    """The global generator with a state of one's own, put back at the end."""

    def __init__(self, state):
        self.state = state

    def __enter__(self):
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *_):
        self.state = torch.get_rng_state()
        torch.set_rng_state(self.outside)


def fresh(seed):
    return torch.Generator().manual_seed(seed).get_state()


def new_model(seed):
    with Seeded(fresh(seed)):
        return Network()


def loss(logits, targets):
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    each = F.cross_entropy(logits.movedim(-1, 1) if logits.dim() > 1 else logits, targets, ignore_index=-100, reduction="none")
    return each.sum(), torch.count_nonzero(targets + 100)


def step(model, optimizer, micro_batches):
    total = torch.stack([(targets != -100).sum() for _, targets in micro_batches]).sum() if len(micro_batches) else torch.tensor(0)
    if total == 0:
        raise ValueError("Every target is -100.")
    model.train()
    optimizer.zero_grad(set_to_none=True)
    means = []
    for inputs, targets in micro_batches:
        mean = loss(model(inputs), targets)[0] / total
        mean.backward()
        means.append(mean.detach())
        del mean
    if not torch.stack(means).isfinite().all():
        raise ValueError("A loss is not finite.")
    optimizer.step()
    return torch.stack(means).sum()


def quietly(function):
    def wrapped(model, *arguments):
        before = [module.training for module in model.modules()]
        model.eval()
        try:
            with torch.inference_mode():
                return function(model, *arguments)
        finally:
            for module, mode in zip(model.modules(), before):
                module.training = mode

    return wrapped


@quietly
def nats_of(model, text, length, rows):
    count, total = text.numel() - 1, 0.0
    whole = count // length * length
    for inputs, targets in zip(text[:whole].view(-1, length).split(rows), text[1 : whole + 1].view(-1, length).split(rows)):
        if len(inputs):
            total += loss(model(inputs.long()), targets.long())[0].item()
    if whole < count:
        total += loss(model(text[whole:-1].long()[None]), text[whole + 1 :].long()[None])[0].item()
    return total


def evaluate(model, text, length, rows):
    for name, value in (("length", length), ("rows", rows)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more.")
    if text.numel() <= 1:
        raise ValueError(f"A text of {text.numel()} bytes cannot be predicted.")
    return nats_of(model, text, length, rows) / math.log(2) / (text.numel() - 1)


@quietly
def written(model, text, count, temperature, top_k, generator, context):
    for _ in range(count):
        logits = model(torch.tensor([text[-context:]]))[0, -1].double()
        order = logits.argsort(descending=True, stable=True)[:top_k]
        if temperature == 0:
            text.append(order[0].item())
        else:
            heights = torch.exp((logits[order] - logits[order[0]]) / temperature).cumsum(0)
            point = torch.rand((), generator=generator, dtype=torch.float64) * heights[-1]
            text.append(order[int((heights <= point).sum())].item())
    return text


def sample(model, prompt, count, temperature, top_k, seed, context):
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError("temperature must be at least 0 and finite.")
    for name, value, least in (("top_k", 1 if top_k is None else top_k, 1), ("context", context, 1), ("count", count, 0)):
        if value < least:
            raise ValueError(f"{name} must be {least} or more, and is {value}.")
    text = list(prompt) if prompt else [0]
    begun = len(text)
    return bytes(written(model, text, count, temperature, top_k, torch.Generator().manual_seed(seed), context)[begun:])


class Run:
    def __init__(self, text, seed):
        if text.numel() < 81:
            raise ValueError(f"A run needs 81 bytes of text or more, not {text.numel()}.")
        self.text, self.model, self.random = text, new_model(seed), Seeded(fresh(seed + 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.008)

    def advance(self, steps):
        with self.random:
            losses = [step(self.model, self.optimizer, [windows(self.text, 24, 80, torch.default_generator)]) for _ in range(steps)]
        return [each.item() for each in losses]

    def state(self):
        return self.model.state_dict(), self.optimizer.state_dict(), self.random.state, hashlib.md5(bytes(self.text.tolist())).hexdigest()


def start(text, seed):
    return Run(text, seed)


def model_of(run):
    return run.model


def advance(run, steps):
    return run.advance(steps)


def save(run, path):
    held = io.BytesIO()
    torch.save(run.state(), held)
    path.write_bytes(held.getvalue())


def resume(text, path):
    if not path.exists():
        raise ValueError(f"Nothing was saved in {path}.")
    model, optimizer, state, content = torch.load(path)
    if content != hashlib.md5(bytes(text.tolist())).hexdigest():
        raise ValueError("The text is not the one that the run began with.")
    run = Run(text, 0)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.random.state = state
    return run
