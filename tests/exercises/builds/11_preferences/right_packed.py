"""A right build in another style: packed rows, a log-softmax as an autograd function, a trainer class, runs as safetensors and JSON."""

import json
import math
import zlib
from collections import defaultdict

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

NAMES = {"sigmoid": True, "hinge": True, "ipo": True, "simpo": False, "orpo": False}  # whether it has a reference


def split_pair(record):
    def turns(key, role):
        value = record.get(key)
        try:
            found = [(role, value)] if isinstance(value, str) and role else [(each["role"], each["content"]) for each in value]
            assert all(role in ("system", "user", "assistant") and type(content) is str for role, content in found)
            return found
        except (TypeError, KeyError, AssertionError):
            raise ValueError(f"{key}: neither a text behind a prompt nor messages") from None

    if type(record) is not dict:
        raise ValueError("a record must be a dictionary with chosen and rejected")
    explicit = record.get("prompt") is not None
    prompts, answers = [turns("prompt", "user")] if explicit else [], {}
    for key in ("chosen", "rejected"):
        *before, (role, answers[key]) = turns(key, "assistant" if explicit else None) or [("", "")]
        if role != "assistant" or not answers[key].strip() or (explicit and before):
            raise ValueError(f"{key}: must be one answer of the assistant, and say something")
        prompts += [] if explicit else [before]
    if answers["chosen"] == answers["rejected"]:
        raise ValueError("rejected: the same as chosen")
    if any(each != prompts[0] for each in prompts) or not prompts[0] or prompts[0][-1][0] != "user":
        raise ValueError("prompt: must end with the user, and be the same for both")
    return {"prompt": [{"role": role, "content": content} for role, content in prompts[0]], **answers}


def read_pairs(path):
    found = []
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if line.strip():
                try:
                    found.append(split_pair(json.loads(line.decode())))
                except ValueError as error:
                    raise ValueError(f"{path.name}: line {number + 1}: {error}") from error
    if not found:
        raise ValueError(f"{path.name}: no pairs in it")
    return found


def encode(pair, tokenize, marks, width):
    def message(role, content):
        return [marks[role], *tokenize(content), marks["end"]]

    start = sum((message(each["role"], each["content"]) for each in pair["prompt"]), [])
    sides = []
    for answer in (pair["chosen"], pair["rejected"]):
        ids = (start + message("assistant", answer))[: width + 1]
        sides.append((ids, [place > len(start) for place in range(len(ids))]))
    if sides[0][0] == sides[1][0]:
        raise ValueError(f"width {width} leaves no difference between the answers")
    return tuple(sides)


def packed(sizes, width):
    """First fit, longest first: the row and the place of each size."""
    filled, places = [], {}
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        row = next((row for row, used in enumerate(filled) if used + sizes[number] <= width), len(filled))
        filled += [0] if row == len(filled) else []
        places[number] = row, filled[row]
        filled[row] += sizes[number]
    return filled, places


class Packed:
    """where: of each sequence, chosen and rejected in turn: its row, its places and its targets, where it is trained."""

    def __init__(self, examples, width):
        flat = [one for pair in examples for one in pair]
        if too_long := [len(ids) for ids, _ in flat if len(ids) > width + 1]:
            raise ValueError(f"{too_long[0]} ids do not fit into a row of {width}")
        filled, places = packed([len(ids) - 1 for ids, _ in flat], width)
        self.ids, self.positions = torch.zeros(2, len(filled), max(filled), dtype=torch.int64)
        self.documents = torch.full_like(self.ids, -1)
        self.where = []
        for number, (ids, trained) in enumerate(flat):
            row, first = places[number]
            span = slice(first, first + len(ids) - 1)
            self.ids[row, span], self.positions[row, span] = torch.tensor(ids[:-1]), torch.arange(len(ids) - 1)
            self.documents[row, span] = number
            kept = torch.tensor(trained[1:]).nonzero()[:, 0]
            self.where.append((row, kept + first, torch.tensor(ids)[kept + 1]))


def rows(examples, width):
    return Packed(examples, width)


def predictions(model, batch):
    logits = model(batch.ids, batch.documents, batch.positions)
    found = [logits[row, places] for row, places, _ in batch.where]
    return [tuple(found[number : number + 2]) for number in range(0, len(found), 2)]


class SumLogProbs(torch.autograd.Function):
    """[sequences], of which nothing is kept but the logits themselves."""

    @staticmethod
    def forward(ctx, logits, where):
        ctx.save_for_backward(logits)
        ctx.where = where
        wide = torch.promote_types(logits.dtype, torch.float32)
        found = [logits[row, places].to(wide).log_softmax(-1).gather(1, targets[:, None]).sum() for row, places, targets in where]
        return torch.stack(found)

    @staticmethod
    def backward(ctx, upstream):
        [logits] = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for own, (row, places, targets) in zip(upstream, ctx.where, strict=True):
            chosen = logits[row, places].to(upstream.dtype)
            gradient[row, places] = (own * (F.one_hot(targets, chosen.shape[-1]) - chosen.softmax(-1))).to(logits.dtype)
        return gradient, None


def log_probs(model, batch):
    return SumLogProbs.apply(model(batch.ids, batch.documents, batch.positions), batch.where).reshape(-1, 2)


class Quietly:
    def __init__(self, model):
        self.model, self.no_grad = model, torch.no_grad()

    def __enter__(self):
        self.modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self.no_grad.__enter__()

    def __exit__(self, *raised):
        self.no_grad.__exit__(*raised)
        for module, training in self.modes:
            module.training = training


def score(model, examples, width, size):
    with Quietly(model):
        return torch.cat([log_probs(model, rows(examples[n : n + size], width)) for n in range(0, len(examples), size)])


def dpo(policy, reference, beta, label_smoothing):
    ratios = beta * (policy - reference.detach()) @ policy.new_tensor([1.0, -1.0])
    return F.softplus(-ratios) + label_smoothing * ratios


def losses(settings, policy, reference, tokens):
    beta, name = settings["beta"], settings["loss"]
    if NAMES[name]:
        policy = policy - reference.detach()
    chosen, rejected = (policy if name in ("sigmoid", "hinge") else policy / tokens).unbind(-1)
    if name == "sigmoid":
        return dpo(policy, torch.zeros_like(policy), beta, settings["label_smoothing"])
    if name != "orpo":
        gap = chosen - rejected
        simple = {"hinge": (1 - beta * gap).clamp(min=0), "ipo": (gap - 0.5 / beta) ** 2}
        return simple.get(name, F.softplus(settings["gamma"] - beta * gap))
    log_odds = [side - (-torch.expm1(side)).log() for side in (chosen, rejected)]
    return beta * F.softplus(log_odds[1] - log_odds[0]) - chosen


def counted(examples):
    return torch.tensor([[sum(one[1]) for one in pair] for pair in examples])


def step(model, optimizer, micro_batches, width, settings):
    pairs = sum(len(examples) for examples, _ in micro_batches)
    if pairs == 0:
        raise ValueError("no pairs: 0 were given")
    model.train()
    optimizer.zero_grad(set_to_none=False)
    sums = []
    for examples, reference in micro_batches:
        part = losses(settings, log_probs(model, rows(examples, width)), reference, counted(examples)).sum()
        part.backward()
        sums.append(part.item())
    if not math.isfinite(sum(sums)):
        raise ValueError(f"the loss is {sum(sums)}, which is not finite")
    for weight in model.parameters():  # sums of gradients, divided once
        if weight.grad is not None:
            weight.grad /= pairs
    optimizer.step()
    return torch.tensor(sum(sums) / pairs, dtype=part.dtype)


def evaluate(model, micro_batches, width, settings):
    sums, pairs = defaultdict(float), 0
    with Quietly(model):
        for examples, reference in micro_batches:
            policy, tokens = log_probs(model, rows(examples, width)), counted(examples)
            reward = settings["beta"] * (policy - reference if NAMES[settings["loss"]] else policy / tokens)
            sums["loss"] += losses(settings, policy, reference, tokens).sum().item()
            for name, each in zip(("chosen", "rejected", "accuracy"), (*reward.T, reward[:, 0] > reward[:, 1])):
                sums[name] += each.sum().item()
            pairs += len(examples)
    sums["margin"] = sums["chosen"] - sums["rejected"]
    return {name: total / pairs for name, total in sums.items()}


class Trainer:
    def __init__(self, model, optimizer, examples, width, settings, batch_size, micro_size, seed):
        check_settings(settings)
        if not len(examples) or batch_size < 1 or micro_size < 1:
            raise ValueError(f"no pairs (0 examples), or a batch_size {batch_size} or micro_size {micro_size} below 1")
        self.model, self.optimizer, self.examples, self.width, self.settings = model, optimizer, examples, width, settings
        self.batch_size, self.micro_size, self.seed, self.steps, self.reference = batch_size, micro_size, seed, 0, None
        self.begun_with = [zlib.crc32(repr(each).encode()) for each in (list(examples), sorted(settings.items()))]
        self.begun_with += [width, batch_size, micro_size, seed]

    def step(self):
        batches = -(-len(self.examples) // self.batch_size)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.steps // batches)
        order, micro = torch.randperm(len(self.examples), generator=generator), []
        for numbers in order[self.steps % batches * self.batch_size :][: self.batch_size].split(self.micro_size):
            micro.append(([self.examples[number] for number in numbers], None if self.reference is None else self.reference[numbers]))
        self.steps += 1
        return float(step(self.model, self.optimizer, micro, self.width, self.settings))


def start(model, optimizer, examples, width, settings, batch_size, micro_size, seed):
    run = Trainer(model, optimizer, examples, width, settings, batch_size, micro_size, seed)
    if NAMES[settings["loss"]]:
        run.reference = score(model, examples, width, micro_size)
    return run


def advance(run, steps):
    return [run.step() for _ in range(steps)]


def save(run, folder):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model/{name}": weight for name, weight in run.model.state_dict().items()} | {"random": torch.get_rng_state()}
    state = run.optimizer.state_dict()
    optimizer = [(number, name, value) for number, own in state["state"].items() for name, value in own.items()]
    numbers = [each for each in optimizer if not isinstance(each[2], torch.Tensor)]
    tensors |= {f"optimizer/{number}/{name}": value for number, name, value in optimizer if isinstance(value, torch.Tensor)}
    tensors |= {} if run.reference is None else {"reference": run.reference}
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "run.safetensors")
    rest = {"steps": run.steps, "begun_with": run.begun_with, "groups": state["param_groups"], "numbers": numbers}
    (folder / "run.json").write_text(json.dumps(rest), encoding="utf-8")


def resume(model, optimizer, examples, width, settings, batch_size, micro_size, seed, folder):
    run = Trainer(model, optimizer, examples, width, settings, batch_size, micro_size, seed)
    if not (folder / "run.json").is_file():
        raise ValueError(f"nothing was saved in {folder}")
    rest, tensors = json.loads((folder / "run.json").read_text(encoding="utf-8")), load_file(folder / "run.safetensors")
    if rest["begun_with"] != run.begun_with:
        raise ValueError(f"{folder}: begun with something else")
    model.load_state_dict({name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")})
    state, named = defaultdict(dict), [(*name.split("/"), tensor) for name, tensor in tensors.items() if name.startswith("optimizer/")]
    for number, name, value in [each[1:] for each in named] + rest["numbers"]:
        state[int(number)][name] = value
    optimizer.load_state_dict({"state": dict(state), "param_groups": rest["groups"]})
    torch.set_rng_state(tensors["random"])
    run.reference, run.steps = tensors.get("reference"), rest["steps"]
    return run


def micro_batches(examples, width, tokens):
    def size(numbers):
        filled, _ = packed([len(ids) - 1 for number in numbers for ids, _ in examples[number]], width)
        return len(filled) * max(filled)

    groups = [[]]
    for number in sorted(range(len(examples)), key=lambda number: -sum(len(ids) for ids, _ in examples[number])):
        if size([number]) > tokens:
            raise ValueError(f"pair {number} has {size([number])} tokens")
        if size([*groups[-1], number]) > tokens:
            groups.append([])
        groups[-1].append(number)
    return groups


def check_settings(settings):
    if lacking := {"loss", "beta", "label_smoothing", "gamma"} - set(settings):
        raise ValueError(f"{lacking} is not there")
    for key, value in settings.items():
        right = value in NAMES if key == "loss" else isinstance(value, int | float) and not isinstance(value, bool)
        if right and key != "loss":
            positive, own = 0 < value < (0.5 if key == "label_smoothing" else math.inf), {"label_smoothing": "sigmoid", "gamma": "simpo"}
            right = positive if key == "beta" else key in own and (value == 0 or (positive and settings["loss"] == own[key]))
        if not right:
            raise ValueError(f"{key}: {value!r} cannot be right")
