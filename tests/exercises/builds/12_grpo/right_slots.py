"""A right build in another style: a cache is made once, with a slot for each row, and slots are used again. What a call has in work is a
list of slots. Losses are flat, one number for each token of a micro-batch. A run is an object, saved as one list."""

import math
import random
from fractions import Fraction

import torch
import torch.nn.functional as F


class Slots:
    """tensors: layer -> keys and values [slots, K, places, d]. filled: [slots] tokens. working: the slots of the current call."""

    def __init__(self, slots, places):
        self.tensors, self.places = {}, places
        self.filled = torch.zeros(slots, dtype=torch.int64)
        self.working = torch.arange(slots)

    def __call__(self, layer, queries, keys, values):
        if layer not in self.tensors:
            _, heads, _, d = keys.shape
            self.tensors[layer] = [torch.zeros(len(self.filled), heads, self.places, d, dtype=keys.dtype) for _ in "kv"]
        columns = queries.shape[2]
        own = self.filled[self.working].unsqueeze(1) + torch.arange(columns)
        longest, found = own.max().item() + 1, []
        for cached, new in zip(self.tensors[layer], (keys, values), strict=True):
            for column in range(columns):
                cached[self.working, :, own[:, column]] = new[:, :, column]
            found.append(cached[self.working, :, :longest].repeat_interleave(queries.shape[1] // keys.shape[1], dim=1))
        hidden = own[:, None, :, None] < torch.arange(longest)
        scores = torch.einsum("bhqd,bhkd->bhqk", queries, found[0]) * queries.shape[3] ** -0.5
        return scores.masked_fill(hidden, -math.inf).softmax(dim=3) @ found[1]

    def fill(self, model, slots, prompts):
        """The logits after prompts that are put into slots, whatever these had."""
        self.working, sizes = torch.tensor(slots), [len(prompt) for prompt in prompts]
        if 0 in sizes or max(sizes) > self.places:
            raise ValueError(f"prompts of {sizes} tokens do not fit, with {self.places} places")
        self.filled[self.working] = 0
        ids = torch.zeros(len(prompts), max(sizes), dtype=torch.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        with torch.no_grad():
            logits = model(ids, torch.arange(max(sizes)).expand(len(prompts), -1), self)
        self.filled[self.working] = torch.tensor(sizes)
        return [row[size - 1] for row, size in zip(logits, sizes, strict=True)]

    def follow(self, model, slots, tokens):
        self.working = torch.tensor(slots)
        own = self.filled[self.working]
        if (own == self.places).any():
            raise ValueError(f"no place left of {self.places}")
        with torch.no_grad():
            logits = model(torch.as_tensor(tokens).reshape(-1, 1), own.reshape(-1, 1), self)
        self.filled[self.working] += 1
        return logits.squeeze(1)


def prefill(model, prompts, places):
    cache = Slots(len(prompts), places)
    return cache, torch.stack(cache.fill(model, list(range(len(prompts))), prompts))


def append(model, cache, tokens):
    return cache.follow(model, list(range(len(cache.filled))), tokens)


def greedy(model, prompts, end, limit):
    return [ids for ids, _ in serve(model, prompts, [0] * len(prompts), end, limit, 0, 1, len(prompts))]


def draw(logits, uniform, temperature, top_p):
    wide = logits.type(torch.float64)
    if not temperature:
        return wide.max(dim=1).indices, torch.zeros(wide.shape[0]).double()
    wide = F.log_softmax((wide - wide.max(dim=1, keepdim=True).values) / temperature, dim=1)
    if top_p < 1:
        for row in wide:
            ranked = sorted(range(len(row)), key=row.neg().tolist().__getitem__)
            enough = (row[ranked].exp().cumsum(0) < top_p).sum().item() + 1
            row[ranked[enough:]] = -math.inf
        wide = wide.log_softmax(dim=1)
    ends = wide.exp().cumsum(dim=1)
    fine = (ends > uniform[:, None]) & (wide > -math.inf)
    last = (wide > -math.inf) * torch.arange(wide.shape[1])
    tokens = torch.where(fine.any(dim=1), fine.int().argmax(dim=1), last.amax(dim=1))
    return tokens, wide[torch.arange(len(tokens)), tokens]


def sample(model, prompts, seeds, end, limit, temperature, top_p):
    return serve(model, prompts, seeds, end, limit, temperature, top_p, len(prompts))


def serve(model, prompts, seeds, end, limit, temperature, top_p, rows):
    if limit <= 0 or rows <= 0:
        raise ValueError(f"limit {limit} and rows {rows} must be 1 at least")
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts")
    slots = min(rows, len(prompts))
    cache, answers = Slots(slots, max(len(prompt) for prompt in prompts) + limit), [([], [], random.Random(seed)) for seed in seeds]
    held, waiting, logits = {}, list(enumerate(prompts)), {}  # held: slot -> the number of its prompt; logits: by slot
    while waiting or held:
        free = [slot for slot in range(slots) if slot not in held][: len(waiting)]
        if free:
            begin, waiting = waiting[: len(free)], waiting[len(free) :]
            logits |= zip(free, cache.fill(model, free, [prompt for _, prompt in begin]), strict=True)
            held |= zip(free, [number for number, _ in begin], strict=True)
        busy = sorted(held)
        places = torch.tensor([answers[held[slot]][2].random() for slot in busy], dtype=torch.float64)
        tokens, log_probs = draw(torch.stack([logits[slot] for slot in busy]), places, temperature, top_p)
        for slot, token, log_prob in zip(busy, tokens.tolist(), log_probs.tolist(), strict=True):
            ids, recorded, _ = answers[held[slot]]
            ids.append(token)
            recorded.append(log_prob)
            if token == end or len(ids) >= limit:
                del held[slot]
        busy = sorted(held)
        if busy:
            logits = dict(zip(busy, cache.follow(model, busy, [answers[held[slot]][0][-1] for slot in busy]), strict=True))
    return [(ids, recorded) for ids, recorded, _ in answers]


def score(model, prompts, answers, temperature):
    longest = max(len(prompt) + len(ids) for prompt, ids in zip(prompts, answers, strict=True)) - 1
    ids = [(list(prompt) + list(answer) + [0] * longest)[:longest] for prompt, answer in zip(prompts, answers, strict=True)]
    for row, prompt, answer in zip(ids, prompts, answers, strict=True):  # the last token of an answer predicts nothing
        row[len(prompt) + len(answer) - 1 :] = [0] * (longest - len(prompt) - len(answer) + 1)
    rows = [row for row, prompt in enumerate(prompts) for _ in answers[row]]
    places = [len(prompt) - 1 + place for prompt, answer in zip(prompts, answers, strict=True) for place in range(len(answer))]
    logits = model(torch.tensor(ids))[rows, places]
    logits = logits / temperature if logits.dtype == torch.float64 else logits.float() / temperature
    flat = -F.cross_entropy(logits, torch.tensor([token for answer in answers for token in answer]), reduction="none")
    return list(flat.split([len(answer) for answer in answers]))


def verify(text, expected):
    opening, closing = "<answer>", "</answer>"
    if (text.count(opening), text.count(closing)) != (1, 1) or text.index(opening) > text.index(closing):
        return 0.0
    said = text[text.index(opening) + len(opening) : text.index(closing)].strip(" ")
    minus, digits = said[:1] == "-", said[1:] if said[:1] == "-" else said
    if not digits.isascii() or not digits.isdigit() or len(digits) > 20:
        return 0.1
    return 1.0 if int(digits) * (-1 if minus else 1) == expected else 0.1


def advantages(rewards, scale):
    """The mean in fractions, so that equal rewards are equal to it."""
    means = [float(sum(map(Fraction, group)) / len(group)) for group in rewards.tolist()]
    found = rewards - torch.tensor(means, dtype=rewards.dtype)[:, None]
    return found if scale == "none" else found / (rewards.var(dim=1, keepdim=True).sqrt() + 1e-4)


def flat_losses(log_probs, old, worth, answers, settings):
    """[tokens] of tokens that belong to answers 0, 1, ..."""
    moved = log_probs - old.detach()
    if settings["level"] == "sequence":
        count = answers.bincount().to(moved)
        moved = (torch.zeros_like(count).index_add(0, answers, moved) / count)[answers]
    ratio, low, high = moved.exp(), 1 - settings["clip_low"], 1 + settings["clip_high"]
    return torch.maximum(-worth * ratio, -worth * torch.clip(ratio, low, high))


def token_losses(log_probs, old, advantages, mask, settings):
    answers = mask.nonzero()[:, 0]
    found = flat_losses(log_probs[mask], old[mask], advantages.detach()[answers], answers, settings)
    return torch.zeros_like(log_probs).masked_scatter(mask, found)


def token_weights(lengths, settings):
    count = {"token": [sum(lengths)], "sequence": [len(lengths) * size for size in lengths]}.get(settings["aggregation"])
    divisors = count or [len(lengths) * settings["limit"]]
    return torch.tensor([1 / each for each in divisors], dtype=torch.float64).expand(len(lengths)).clone()


def update(model, optimizer, experiences, settings):
    size, losses = settings["micro_size"], []
    if not experiences:
        raise ValueError("no experience: 0 were given")
    weights = token_weights([len(each[1]) for each in experiences], settings).tolist()
    for weight in model.parameters():
        weight.grad = None
    while len(losses) * size < len(experiences):
        part = slice(len(losses) * size, (len(losses) + 1) * size)
        prompts, answers, old, worth = zip(*experiences[part], strict=True)
        log_probs = torch.cat(score(model, prompts, answers, settings["temperature"]))
        belongs = torch.tensor([number for number, ids in enumerate(answers) for _ in ids])
        worth, weight = (log_probs.new_tensor(each)[belongs] for each in (worth, weights[part]))
        then = log_probs.new_tensor([each for own in old for each in own])
        loss = (weight * flat_losses(log_probs, then, worth, belongs, settings)).sum()
        loss.backward()
        losses.append(loss.item())
    if not math.isfinite(sum(losses)):
        raise ValueError(f"the loss is {sum(losses)}, which is not finite")
    optimizer.step()
    return sum(losses)


class Run:
    def __init__(self, model, optimizer, prompts, reward, settings, seed):
        check_settings(settings)
        empty = [number for number, prompt in enumerate(prompts) if not prompt]
        if empty or len(prompts) < settings["prompts"]:
            raise ValueError(f"{len(prompts)} prompts, empty ones: {empty}")
        self.model, self.optimizer, self.reward = model, optimizer, reward
        self.given = [list(map(list, prompts)), dict(settings), seed]
        self.steps, self.rollout, self.metrics = 0, [], {}

    def numbers(self):
        prompts, settings, seed = self.given
        first = self.steps // settings["updates"] * settings["prompts"]
        for place in range(first, first + settings["prompts"]):
            order = list(range(len(prompts)))
            random.Random(f"{seed}/{place // len(prompts)}").shuffle(order)
            yield from [order[place % len(prompts)]] * settings["group"]

    def draw(self):
        prompts, settings, seed = self.given
        numbers, limits = list(self.numbers()), [settings[key] for key in ("end", "limit", "temperature")]
        seeds = [f"{seed}, step {self.steps}, answer {place}" for place in range(len(numbers))]
        answers = sample(self.model, [prompts[number] for number in numbers], seeds, *limits, 1.0)
        values = [self.reward(number, list(ids)) for number, (ids, _) in zip(numbers, answers, strict=True)]
        for number, value in zip(numbers, values, strict=True):
            if not isinstance(value, (int, float)) or not abs(value) < math.inf:
                raise ValueError(f"prompt {number} has a reward of {value!r}")
        rewards = torch.tensor(values, dtype=torch.float64).reshape(settings["prompts"], -1)
        worth = advantages(rewards, settings["scale"])
        found = zip(numbers, answers, worth.flatten().tolist(), strict=True)
        self.rollout = [(prompts[number], ids, recorded, each) for number, (ids, recorded), each in found]
        flat = (worth == 0).all(dim=1).sum().item() / settings["prompts"]
        self.metrics = {"reward": rewards.mean().item(), "flat": flat}


def start(model, optimizer, prompts, reward, settings, seed):
    return Run(model, optimizer, prompts, reward, settings, seed)


def advance(run, steps):
    found = []
    for _ in range(steps):
        if run.steps % run.given[1]["updates"] == 0:
            run.draw()
        found.append({"loss": update(run.model, run.optimizer, run.rollout, run.given[1]), **run.metrics})
        run.steps += 1
    return found


def save(run, folder):
    folder.mkdir(parents=True, exist_ok=True)
    state = [run.given, run.steps, run.rollout, run.metrics, run.model.state_dict(), run.optimizer.state_dict()]
    torch.save(state, folder / "everything.pt")


def resume(model, optimizer, prompts, reward, settings, seed, folder):
    run = Run(model, optimizer, prompts, reward, settings, seed)
    if not (folder / "everything.pt").is_file():
        raise ValueError(f"nothing was saved in {folder}")
    given, run.steps, run.rollout, run.metrics, weights, state = torch.load(folder / "everything.pt", weights_only=True)
    if given != run.given:
        raise ValueError("that was another run")
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return run


def check_settings(settings):
    def number(most):
        return lambda value: type(value) in {int, float} and 0 < value < most

    def count(least):
        return lambda value: type(value) is int and value >= least

    rules = {"temperature": number(math.inf), "clip_low": number(1), "clip_high": number(math.inf)}
    rules |= {"end": count(0), "limit": count(1), "prompts": count(1), "group": count(2), "updates": count(1), "micro_size": count(1)}
    words = {"scale": "group none", "level": "token sequence", "aggregation": "token sequence constant"}
    rules |= {key: lambda value, known=known.split(): value in known for key, known in words.items()}
    for key in sorted(rules.keys() | settings.keys()):
        if key not in rules or key not in settings:
            raise ValueError(f"{key} is unknown or missing")
        if not rules[key](settings[key]):
            raise ValueError(f"{key} cannot be {settings[key]!r}")
