"""Chapter 01. A byte-level language model and its training loop, from scratch: text, windows, loss, steps, bits per byte, samples, runs.

The model looks the last eight bytes up as vectors and puts them through two layers (Bengio et al. 2003, without the direct connections).
Losses are kept as sums with their counts and divided once, so micro-batches and windows of any sizes add up to the same result.
"""

import hashlib
import math
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

IGNORED, END = -100, 0
ROWS, LENGTH, RATE = 16, 32, 0.01  # of a run: windows in a step, bytes in a window, AdamW's learning rate


def split(documents, one_in):
    """A checksum of the content decides, so neither the order nor the other documents matter. Python's hash differs in each process."""
    if one_in < 2:
        raise ValueError(f"one_in is {one_in}: of every two documents or more, one can be held out.")
    sides = bytearray(), bytearray()
    for document in documents:
        held_out = int.from_bytes(hashlib.sha256(document).digest()[:8], "big") % one_in == 0
        sides[held_out].extend(document + bytes([END]))
    return tuple(torch.tensor(list(side), dtype=torch.uint8) for side in sides)


def windows(text, rows, length, generator):
    places = len(text) - length  # where a window and the byte after it fit
    if places < 1:
        raise ValueError(f"The text has {len(text)} bytes, and a window of {length} needs {length + 1}: give more, or a smaller length.")
    starts = torch.randint(places, (rows, 1), generator=generator)
    found = text[starts + torch.arange(length + 1)].long()  # the windows alone become 64-bit numbers, not the text
    return found[:, :-1], found[:, 1:]


class WindowModel(nn.Module):
    """Embeddings of the last `window` bytes side by side, a hidden layer, a second one added to it, and 256 scores."""

    def __init__(self, window=8, features=24, hidden=128):
        super().__init__()
        self.window = window
        self.embedding = nn.Embedding(256, features)
        self.first = nn.Linear(window * features, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 256)

    def forward(self, ids):
        embedded = F.pad(self.embedding(ids), (0, 0, self.window - 1, 0))  # zeros before the first byte, nothing behind the last
        hidden = self.first(embedded.unfold(1, self.window, 1).flatten(2)).tanh()
        return self.head(hidden + F.gelu(self.second(hidden)))


def new_model(seed):
    with torch.random.fork_rng(devices=[]):  # the layers draw from the global generator, which belongs to the caller
        torch.manual_seed(seed)
        return WindowModel()


def loss(logits, targets):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="sum"), (targets != IGNORED).sum()


def step(model, optimizer, micro_batches):
    """The count is known before the first forward pass, so each loss is divided by it at once and gradients need no second look."""
    count, total = sum(int((targets != IGNORED).sum()) for _, targets in micro_batches), 0.0
    if not count:
        raise ValueError(f"No target counts in {len(micro_batches)} micro-batches: there is nothing to learn from.")
    model.train()
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        mean = loss(model(inputs), targets)[0] / count
        mean.backward()  # frees this micro-batch's graph before the next one is made
        total += mean.detach()
    if not math.isfinite(total):
        optimizer.zero_grad()
        raise ValueError(f"The loss is {float(total)}: the weights are left as they were. Take a smaller learning rate.")
    optimizer.step()
    return total


@contextmanager
def evaluating(model):
    """Each module's mode is put back, not the model's alone: a part may have been frozen in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(model, text, length, rows):
    if len(text) < 2:
        raise ValueError(f"The text has {len(text)} bytes: one to see and one to predict are needed.")
    if min(length, rows) < 1:
        raise ValueError(f"length is {length} and rows is {rows}: both are at least 1.")
    total, inputs, targets = 0.0, text[:-1].split(length), text[1:].split(length)
    with evaluating(model):
        for first in range(0, len(inputs), rows):
            some = slice(first, first + rows)
            ids = pad_sequence([window.long() for window in inputs[some]], batch_first=True)  # behind the end, where nobody looks
            wanted = pad_sequence([window.long() for window in targets[some]], batch_first=True, padding_value=IGNORED)
            total += loss(model(ids), wanted)[0].item()
    return total / (len(text) - 1) / math.log(2)


def draw(logits, temperature, top_k, generator):
    """One of the `top_k` likeliest ids, from logits [vocabulary]."""
    if temperature == 0:
        return int(logits.argmax())
    likeliest, ids = logits.double().topk(min(top_k or len(logits), len(logits)))
    chances = ((likeliest - likeliest[0]) / temperature).softmax(dim=0)  # the largest is 0, so no temperature is too small
    return int(ids[torch.multinomial(chances, 1, generator=generator)])


def sample(model, prompt, count, temperature, top_k, seed, context):
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: it is 0 or a positive number.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}: it is at least 1, or None for all bytes.")
    if count < 0 or context < 1:
        raise ValueError(f"count is {count} and context is {context}: they are at least 0 and 1.")
    ids, generator = list(prompt) or [END], torch.Generator().manual_seed(seed)
    begun = len(ids)
    with evaluating(model):
        for _ in range(count):
            logits = model(torch.tensor([ids[-context:]]))[0, -1]
            ids.append(draw(logits, temperature, top_k, generator))
    return bytes(ids[begun:])


def start(text, seed):
    run = SimpleNamespace(text=text, model=new_model(seed), generator=torch.Generator().manual_seed(seed))
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=RATE)
    if len(text) <= LENGTH:
        raise ValueError(f"The text has {len(text)} bytes, and a run needs more than {LENGTH}.")
    return run


def model_of(run):
    return run.model


def advance(run, steps):
    return [step(run.model, run.optimizer, [windows(run.text, ROWS, LENGTH, run.generator)]).item() for _ in range(steps)]


def fingerprint(text):
    return hashlib.sha256(text.numpy().tobytes()).hexdigest()


def save(run, path):
    """Weights alone would not do: AdamW remembers averages of gradients, and the generator where it is in its stream."""
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    torch.save(state | {"generator": run.generator.get_state(), "text": fingerprint(run.text)}, path)


def resume(text, path):
    if not path.is_file():
        raise ValueError(f"{path} is no file: there is no run to continue.")
    state = torch.load(path, weights_only=True)
    if state["text"] != fingerprint(text):
        raise ValueError(f"{path} was saved by a run on another text: continue it with the text that it began with.")
    run = start(text, seed=0)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.generator.set_state(state["generator"])
    return run
