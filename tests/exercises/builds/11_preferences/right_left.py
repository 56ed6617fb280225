"""A right build in another style: all chosen rows come before all rejected ones, as TRL has them, padded on the left, with positions and
documents that say what fills a row. Gradients are taken with autograd.grad. A run is a dictionary, saved in three files."""

import json
import math
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

REFERENCE = {"sigmoid", "hinge", "ipo"}


def prompt_and_answer(value, key, prompt):
    """prompt: given, or None where the value is a whole conversation."""
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    if type(value) is not list or not value:
        raise ValueError(f"{key}: give a text or messages")
    clean = []
    for message in value:
        if type(message) is not dict or type(message.get("content")) is not str:
            raise ValueError(f"{key}: {message!r} is no message")
        if message.get("role") not in {"system", "user", "assistant"}:
            raise ValueError(f"{key}: nobody has the role {message.get('role')!r}")
        clean.append({"role": message["role"], "content": message["content"]})
    if clean[-1]["role"] != "assistant" or (prompt is not None and clean[1:]):
        raise ValueError(f"{key}: no single answer of the assistant")
    if clean[-1]["content"].strip() == "":
        raise ValueError(f"{key}: nothing is said")
    return clean[:-1] if prompt is None else prompt, clean[-1]["content"]


def split_pair(record):
    if not hasattr(record, "get"):
        raise ValueError("a dictionary with chosen and rejected is needed")
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if prompt is not None:  # checked as a conversation with an answer behind it
        ending = [{"role": "assistant", "content": "x"}]
        prompt, _ = prompt_and_answer(prompt + ending if isinstance(prompt, list) else prompt, "prompt", None)
    first, chosen = prompt_and_answer(record.get("chosen"), "chosen", prompt)
    second, rejected = prompt_and_answer(record.get("rejected"), "rejected", prompt)
    if first != second:
        raise ValueError("prompt: two different ones")
    if not first or first[-1]["role"] != "user":
        raise ValueError("prompt: the user must come last")
    if chosen == rejected:
        raise ValueError("rejected: equal to chosen")
    return dict(prompt=first, chosen=chosen, rejected=rejected)


def read_pairs(path):
    pairs, number = [], 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            number += 1
            if line.isspace():
                continue
            try:
                pairs.append(split_pair(json.loads(line)))
            except (json.JSONDecodeError, ValueError) as reason:
                raise ValueError(f"in {path.name} on line {number}: {reason}") from None
    if len(pairs) == 0:
        raise ValueError(f"in {path.name} there is nothing")
    return pairs


def encode(pair, tokenize, marks, width):
    def said(role, content):
        yield marks[role]
        yield from tokenize(content)
        yield marks["end"]

    prompt = [number for message in pair["prompt"] for number in said(**message)]
    both = []
    for answer in (pair["chosen"], pair["rejected"]):
        ids = prompt + list(said("assistant", answer))
        mask = [False] * (len(prompt) + 1)
        mask += [True] * (len(ids) - len(mask))
        both.append((ids[: width + 1], mask[: width + 1]))
    if len(prompt) >= width or both[0] == both[1]:
        raise ValueError(f"a width of {width} is not enough to tell the answers apart")
    return both[0], both[1]


def rows(examples, width):
    """Tensors [rows, columns]: ids, documents (0 for what fills a row), positions, targets and whether they are trained."""
    order = [pair[side] for side in (0, 1) for pair in examples]
    longest = max(len(ids) for ids, _ in order)
    if longest > width + 1:
        raise ValueError(f"{longest} ids are too many for rows of {width}")
    parts = {name: [] for name in ("ids", "documents", "positions", "targets", "trained")}
    for ids, trained in order:
        size = len(ids) - 1
        filled = [0] * (longest - 1 - size)
        own = dict(ids=ids[:-1], documents=[1] * size, positions=list(range(size)), targets=ids[1:], trained=list(map(int, trained[1:])))
        for name, values in own.items():
            parts[name].append(filled + values)
    return {name: torch.tensor(values) for name, values in parts.items()}


def call(model, batch):
    return model(batch["ids"], batch["documents"], batch["positions"])


def predictions(model, batch):
    found = [logits[trained.bool()] for logits, trained in zip(call(model, batch), batch["trained"], strict=True)]
    half = len(found) // 2
    return [(found[number], found[half + number]) for number in range(half)]


def row_sum(logits, targets, trained):
    places = trained.nonzero().flatten()
    logits = logits.index_select(0, places)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    own = logits.gather(-1, targets[places].unsqueeze(-1)).squeeze(-1)
    return (own - torch.logsumexp(logits, dim=-1)).sum()


def log_probs(model, batch):
    logits = call(model, batch)
    found = [checkpoint(row_sum, *row, use_reentrant=False) for row in zip(logits, batch["targets"], batch["trained"], strict=True)]
    return torch.stack(found).reshape(2, -1).t()


def quiet(model, stack):
    """Evaluation mode and no gradients until the stack is closed."""
    for module in model.modules():
        stack.callback(setattr, module, "training", module.training)
        module.training = False
    stack.enter_context(torch.no_grad())


def score(model, examples, width, size):
    first, found = 0, torch.empty(0, 2)
    with ExitStack() as stack:
        quiet(model, stack)
        while first < len(examples):
            some = log_probs(model, rows(examples[first : first + size], width))
            found = some if first == 0 else torch.cat([found, some])
            first += size
    return found


def dpo(policy, reference, beta, label_smoothing):
    chosen, rejected = ((policy - reference.detach()) * beta).unbind(dim=1)
    right, wrong = F.logsigmoid(chosen - rejected), F.logsigmoid(rejected - chosen)
    return torch.lerp(-right, -wrong, label_smoothing)


def losses(settings, policy, reference, tokens):
    beta = settings["beta"]
    if reference is not None:
        policy = policy - reference.detach()
    sums, means = policy[:, 0] - policy[:, 1], policy[:, 0] / tokens[:, 0] - policy[:, 1] / tokens[:, 1]
    match settings["loss"]:
        case "sigmoid":
            return dpo(policy, torch.zeros_like(policy), beta, settings["label_smoothing"])
        case "hinge":
            return torch.maximum(1 - beta * sums, torch.zeros_like(sums))
        case "ipo":
            return torch.square(means - 1 / (beta + beta))
        case "simpo":
            return torch.logaddexp(torch.zeros_like(means), settings["gamma"] - beta * means)
    likelihood = policy / tokens
    odds = likelihood - torch.log(-torch.special.expm1(likelihood))
    return beta * torch.logaddexp(torch.zeros_like(means), odds[:, 1] - odds[:, 0]) - likelihood[:, 0]


def numbers_of(examples):
    return torch.tensor([[each[1].count(True) for each in pair] for pair in examples])


def step(model, optimizer, micro_batches, width, settings):
    total = sum(len(examples) for examples, _ in micro_batches)
    if total < 1:
        raise ValueError("0 pairs make no step")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients, loss = [None] * len(weights), 0.0
    model.train()
    for examples, reference in micro_batches:
        own = losses(settings, log_probs(model, rows(examples, width)), reference, numbers_of(examples)).sum() / total
        found = torch.autograd.grad(own, weights, allow_unused=True)
        gradients = [new if old is None else old if new is None else old + new for old, new in zip(gradients, found, strict=True)]
        loss = loss + own.detach()
        if own.isnan() or own.isinf():
            raise ValueError(f"a loss of {own.item()} is not finite")
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    optimizer.step()
    return loss


def evaluate(model, micro_batches, width, settings):
    table = []
    with ExitStack() as stack:
        quiet(model, stack)
        for examples, reference in micro_batches:
            policy, tokens = log_probs(model, rows(examples, width)), numbers_of(examples)
            against = policy - reference if settings["loss"] in REFERENCE else policy / tokens
            table += zip(losses(settings, policy, reference, tokens).tolist(), (against * settings["beta"]).tolist(), strict=True)
    mean = lambda values: math.fsum(values) / len(table)  # noqa: E731
    found = {"loss": mean(loss for loss, _ in table), "accuracy": mean(chosen > rejected for _, (chosen, rejected) in table)}
    found |= {"chosen": mean(both[0] for _, both in table), "rejected": mean(both[1] for _, both in table)}
    return found | {"margin": mean(chosen - rejected for _, (chosen, rejected) in table)}


def begin(model, optimizer, examples, width, settings, batch_size, micro_size, seed):
    check_settings(settings)
    if len(examples) == 0:
        raise ValueError("there are 0 pairs")
    for name, value in dict(batch_size=batch_size, micro_size=micro_size).items():
        if value <= 0:
            raise ValueError(f"{name} cannot be {value}")
    fixed = json.dumps([settings, width, batch_size, micro_size, seed, examples], sort_keys=True)
    given = examples, width, settings, batch_size, micro_size, seed
    return {"model": model, "optimizer": optimizer, "given": given, "fixed": fixed, "next": 0}


def start(model, optimizer, examples, width, settings, batch_size, micro_size, seed):
    run = begin(model, optimizer, examples, width, settings, batch_size, micro_size, seed)
    return run | {"reference": score(model, examples, width, micro_size) if settings["loss"] in REFERENCE else None}


def batch_numbers(count, batch_size, seed, number):
    """The pairs of a step: those with the smallest of the epoch's random keys come first."""
    in_epoch = (count + batch_size - 1) // batch_size
    generator = torch.Generator().manual_seed(seed * 7919 + number // in_epoch)
    order = torch.rand(count, generator=generator).argsort().tolist()
    return order[number % in_epoch * batch_size :][:batch_size]


def advance(run, steps):
    examples, width, settings, batch_size, micro_size, seed = run["given"]
    found = []
    for number in range(run["next"], run["next"] + steps):
        left, micro = batch_numbers(len(examples), batch_size, seed, number), []
        while left:
            own, left = left[:micro_size], left[micro_size:]
            micro.append(([examples[pair] for pair in own], None if run["reference"] is None else run["reference"][torch.tensor(own)]))
        found.append(float(step(run["model"], run["optimizer"], micro, width, settings)))
        run["next"] = number + 1
    return found


def save(run, folder):
    folder.mkdir(exist_ok=True, parents=True)
    torch.save([run["model"].state_dict(), run["optimizer"].state_dict()], folder / "weights.pt")
    torch.save([torch.get_rng_state(), run["reference"]], folder / "rest.pt")
    (folder / "run.json").write_text(json.dumps({"next": run["next"], "fixed": run["fixed"]}), encoding="utf-8")


def resume(model, optimizer, examples, width, settings, batch_size, micro_size, seed, folder):
    run = begin(model, optimizer, examples, width, settings, batch_size, micro_size, seed)
    try:
        kept = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a run") from None
    if kept["fixed"] != run["fixed"]:
        raise ValueError("another run")
    weights, state = torch.load(folder / "weights.pt", weights_only=True)
    generator, run["reference"] = torch.load(folder / "rest.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    torch.set_rng_state(generator)
    return run | {"next": kept["next"]}


def micro_batches(examples, width, tokens):
    """Pairs by length: as many as fit under the longest of what is left, which comes first."""
    columns = {number: max(len(pair[0][0]), len(pair[1][0])) - 1 for number, pair in enumerate(examples)}
    left, groups = sorted(columns, key=columns.get, reverse=True), []
    while left:
        most = tokens // (2 * columns[left[0]])
        if most == 0:
            raise ValueError(f"pair {left[0]} does not fit into {tokens}")
        groups.append(left[:most])
        left = left[most:]
    return groups


def check_settings(settings):
    if set(settings) != {"loss", "beta", "label_smoothing", "gamma"}:
        raise ValueError(f"unknown or missing: {set(settings) ^ {'loss', 'beta', 'label_smoothing', 'gamma'}}")
    name, smoothing, gamma = settings["loss"], settings["label_smoothing"], settings["gamma"]
    if name not in [*REFERENCE, "simpo", "orpo"]:
        raise ValueError(f"loss {name!r}")
    for key in ("beta", "label_smoothing", "gamma"):
        if type(settings[key]) is bool or not isinstance(settings[key], (int, float)) or not math.isfinite(settings[key]):
            raise ValueError(f"{key} {settings[key]!r}: no number")
    if settings["beta"] <= 0:
        raise ValueError(f"beta {settings['beta']}: not above 0")
    if not 0 <= smoothing < 0.5 or (smoothing and name != "sigmoid"):
        raise ValueError(f"label_smoothing {smoothing} with {name}")
    if gamma < 0 or (gamma and name != "simpo"):
        raise ValueError(f"gamma {gamma} with {name}")
