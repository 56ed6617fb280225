"""Chapter 11. DPO (direct preference optimization) from text to step, from scratch: pairs, rows, log-probabilities, losses, runs.

    loss = -log sigmoid(beta * ((p_chosen - q_chosen) - (p_rejected - q_rejected)))      p, q: log-probabilities under model and reference

Rows are padded on the right, where a causal model never looks from an answer. The reference is the model before its first step, so it is
scored once and kept as two numbers a pair. (Rafailov et al. 2023, equation 7; cDPO: Mitchell 2023; IPO: Azar et al. 2023, equation 17;
hinge: Zhao et al. 2023; SimPO: Meng et al. 2024, equation 6; ORPO: Hong et al. 2024, equations 6 and 7.)
"""

import hashlib
import json
import math
import random
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

ROLES, IGNORED, FILE = ("system", "user", "assistant"), -100, "run.pt"
WITH_REFERENCE, WITHOUT = ("sigmoid", "hinge", "ipo"), ("simpo", "orpo")


def messages(value, key):
    whole = isinstance(value, list) and all(isinstance(each, dict) and isinstance(each.get("content"), str) for each in value)
    if not whole or not all(each.get("role") in ROLES for each in value):
        raise ValueError(f"{key} is no text, and no list of messages with a role of {ROLES} and a content: {str(value)[:60]}")
    return [{"role": each["role"], "content": each["content"]} for each in value]


def split_pair(record):
    if not isinstance(record, dict):
        raise ValueError(f"A record is no dictionary, but {str(record)[:60]}.")
    given, sides = record.get("prompt"), []
    for key in ("chosen", "rejected"):
        value = record.get(key)
        sides.append(messages([{"role": "assistant", "content": value}] if isinstance(value, str) else value, key))
        if not sides[-1] or sides[-1][-1]["role"] != "assistant" or given is not None and len(sides[-1]) > 1:
            raise ValueError(f"{key} must end with an answer of the assistant, and be nothing else where there is a prompt.")
        if not sides[-1][-1]["content"].strip():
            raise ValueError(f"{key} is an empty answer.")
    (*prompt, chosen), (*other, rejected) = sides
    if prompt != other:
        raise ValueError("The prompt is not the same in both conversations: they must differ in their last answer alone.")
    if chosen == rejected:
        raise ValueError("rejected is the same answer as chosen: nothing can be learned from the pair.")
    if given is not None:
        prompt = messages([{"role": "user", "content": given}] if isinstance(given, str) else given, "prompt")
    if not prompt or prompt[-1]["role"] != "user":
        raise ValueError("The prompt has no message of the user at its end, so there is nothing to answer.")
    return {"prompt": prompt, "chosen": chosen["content"], "rejected": rejected["content"]}


def read_pairs(path):
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):  # splitlines would also split inside of texts
        try:
            if line.strip():
                pairs.append(split_pair(json.loads(line)))
        except ValueError as error:  # broken JSON is one too
            raise ValueError(f"{path.name}, line {number}: {error}") from None
    if not pairs:
        raise ValueError(f"{path.name} has no pair.")
    return pairs


def encode(pair, tokenize, marks, width):
    prompt, found = [], []
    for message in pair["prompt"]:
        prompt += [marks[message["role"]], *tokenize(message["content"]), marks["end"]]
    prompt.append(marks["assistant"])
    for key in ("chosen", "rejected"):
        own = [*tokenize(pair[key]), marks["end"]]
        found.append(((prompt + own)[: width + 1], ([False] * len(prompt) + [True] * len(own))[: width + 1]))
    if found[0] == found[1]:
        raise ValueError(f"Both answers are the same, or gone, where width {width} cuts them: the prompt has {len(prompt)} tokens.")
    return tuple(found)


def rows(examples, width):
    """Two rows for each pair, chosen before rejected, as long as the longest. targets: IGNORED where nothing is trained."""
    flat = [example for pair in examples for example in pair]
    columns = max(len(ids) for ids, _ in flat) - 1
    if columns > width:
        raise ValueError(f"An example has {columns + 1} ids, and at most {width + 1} go into a row: encode it for this width.")
    targets = [torch.tensor(ids[1:]).where(torch.tensor(trained[1:]), IGNORED) for ids, trained in flat]
    input_ids = pad_sequence([torch.tensor(ids[:-1]) for ids, _ in flat], batch_first=True)  # with any id: its targets are not trained
    return input_ids, pad_sequence(targets, batch_first=True, padding_value=IGNORED)


def predictions(model, batch):
    input_ids, targets = batch
    found = [row[own != IGNORED] for row, own in zip(model(input_ids), targets)]
    return list(zip(found[::2], found[1::2]))


def row_log_prob(logits, targets):
    trained = targets != IGNORED  # selected before anything is computed: 0 times NaN is NaN, also in a gradient
    chosen = logits[trained].to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(chosen, targets[trained], reduction="sum")


def log_probs(model, batch):
    """Row by row, computed again in the backward pass: of a row's log-softmax nothing is kept."""
    input_ids, targets = batch
    logits = model(input_ids)
    found = [checkpoint(row_log_prob, *each, use_reentrant=False, preserve_rng_state=False) for each in zip(logits, targets)]
    return torch.stack(found).view(-1, 2)


@contextmanager
def evaluating(model):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():  # a module that was frozen in evaluation mode stays in it
            module.training = training


def parts(examples, size):
    return [examples[first : first + size] for first in range(0, len(examples), size)]


def score(model, examples, width, size):
    with evaluating(model):
        return torch.cat([log_probs(model, rows(some, width)) for some in parts(examples, size)])


def dpo(policy, reference, beta, label_smoothing):
    moved = policy - reference.detach()
    difference = beta * (moved[:, 0] - moved[:, 1])
    return -(1 - label_smoothing) * F.logsigmoid(difference) - label_smoothing * F.logsigmoid(-difference)


def losses(settings, policy, reference, tokens):
    name, beta = settings["loss"], settings["beta"]
    if name == "sigmoid":
        return dpo(policy, reference, beta, settings["label_smoothing"])
    moved = policy if reference is None else policy - reference.detach()
    average = moved / tokens
    if name == "hinge":
        return torch.relu(1 - beta * (moved[:, 0] - moved[:, 1]))
    if name == "ipo":
        return (average[:, 0] - average[:, 1] - 1 / (2 * beta)).square()
    if name == "simpo":
        return -F.logsigmoid(beta * (average[:, 0] - average[:, 1]) - settings["gamma"])
    odds = average - torch.log(-torch.expm1(average))  # 1 - exp(average) would lose the digits of a likely answer
    return -average[:, 0] - beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


def lengths(examples):
    return torch.tensor([[sum(trained) for _, trained in pair] for pair in examples])


def step(model, optimizer, micro_batches, width, settings):
    count, total = sum(len(examples) for examples, _ in micro_batches), 0
    if not count:
        raise ValueError(f"{len(micro_batches)} micro-batches with 0 pairs were given: there is nothing to learn from.")
    model.train()
    optimizer.zero_grad()
    for examples, reference in micro_batches:
        loss = losses(settings, log_probs(model, rows(examples, width)), reference, lengths(examples)).sum() / count  # divided once
        loss.backward()
        total += loss.detach()
    if not torch.isfinite(total):
        optimizer.zero_grad()
        raise ValueError(f"The loss is {total.item()}: an answer is impossible for the model, or the weights are no numbers.")
    optimizer.step()
    return total


def evaluate(model, micro_batches, width, settings):
    found = []
    with evaluating(model):
        for examples, reference in micro_batches:
            policy, tokens = log_probs(model, rows(examples, width)), lengths(examples)
            rewards = settings["beta"] * (policy / tokens if reference is None else policy - reference)
            loss, right = losses(settings, policy, reference, tokens), rewards[:, 0] > rewards[:, 1]
            found.append(torch.stack([loss, *rewards.T, rewards[:, 0] - rewards[:, 1], right.to(loss)]))
    averages = torch.cat(found, dim=1).mean(dim=1)  # over pairs, not over micro-batches
    return dict(zip(("loss", "chosen", "rejected", "margin", "accuracy"), averages.tolist(), strict=True))


def new_run(model, optimizer, examples, width, settings, batch_size, micro_size, seed):
    run = SimpleNamespace(**locals(), done=0)
    check_settings(settings)
    for name, value in (("examples", len(examples)), ("batch_size", batch_size), ("micro_size", micro_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}: a run needs at least 1.")
    given = [list(examples), width, sorted(settings.items()), batch_size, micro_size, seed]
    run.identity = hashlib.sha256(json.dumps(given).encode()).hexdigest()  # a saved run is continued with the same alone
    return run


def start(model, optimizer, examples, width, settings, batch_size, micro_size, seed):
    run = new_run(model, optimizer, examples, width, settings, batch_size, micro_size, seed)
    run.reference = score(model, examples, width, micro_size) if settings["loss"] in WITH_REFERENCE else None
    return run


def advance(run, steps):
    found, count = [], len(run.examples)
    for _ in range(steps):
        epoch, place = divmod(run.done, math.ceil(count / run.batch_size))
        order = random.Random(f"{run.seed}, {epoch}").sample(range(count), count)  # a stream of its own, another one for each epoch
        chosen = parts(parts(order, run.batch_size)[place], run.micro_size)
        scores = [None if run.reference is None else run.reference[some] for some in chosen]
        own = [([run.examples[number] for number in some], score) for some, score in zip(chosen, scores)]
        found.append(step(run.model, run.optimizer, own, run.width, run.settings).item())
        run.done += 1
    return found


def save(run, folder):
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(state | {name: getattr(run, name) for name in ("reference", "done", "identity")}, folder / FILE)


def resume(model, optimizer, examples, width, settings, batch_size, micro_size, seed, folder):
    run = new_run(model, optimizer, examples, width, settings, batch_size, micro_size, seed)
    if not (folder / FILE).exists():
        raise ValueError(f"{folder} has no {FILE}, so there is no run to continue.")
    state = torch.load(folder / FILE, weights_only=True)  # tensors and numbers, and no code
    if state["identity"] != run.identity:
        raise ValueError(f"{folder} has a run with other examples, settings, sizes or another seed: continue it with what it began with.")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    run.reference, run.done = state["reference"], state["done"]  # the model has moved since it was scored
    return run


def micro_batches(examples, width, tokens):
    longest, groups = [max(len(ids) for ids, _ in pair) - 1 for pair in examples], []
    for number in sorted(range(len(examples)), key=longest.__getitem__):  # so that little is filled up
        if 2 * longest[number] > tokens:
            raise ValueError(f"Pair {number} alone makes an input of {2 * longest[number]} numbers, and tokens is {tokens}.")
        if not groups or 2 * longest[number] * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(number)
    return groups


def check_settings(settings):
    if strange := sorted(set(settings) ^ {"loss", "beta", "label_smoothing", "gamma"}):
        raise ValueError(f"{strange[0]} is {'unknown' if strange[0] in settings else 'missing'}: settings have four keys.")
    loss = settings["loss"]
    if loss not in WITH_REFERENCE + WITHOUT:
        raise ValueError(f"loss is {loss!r}: give one of {WITH_REFERENCE + WITHOUT}.")
    limits = {"beta": math.inf, "label_smoothing": 0.5 if loss == "sigmoid" else 0, "gamma": math.inf if loss == "simpo" else 0}
    for key, limit in limits.items():
        value = settings[key]
        if type(value) not in (int, float) or not (0 < value < limit or value == 0 and key != "beta"):  # True is an int, NaN is nowhere
            raise ValueError(f"{key} is {value!r}: with {loss} it is a number from 0{' (not 0)' * (key == 'beta')} to below {limit}.")
