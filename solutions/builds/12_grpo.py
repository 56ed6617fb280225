"""Chapter 12. GRPO (group relative policy optimization) from generation to a reward that rises, from scratch.

    advantage = (reward - mean of the group) / (deviation of the group + 1e-4)
    loss of a token = -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)      ratio: pi(token) / pi when it was drawn

Answers are generated with a KV cache, in rows of their own lengths: a row that is finished leaves, and a waiting prompt takes its place.
Each answer draws from a stream of its own, so neither its neighbours nor the batch size change it. (GRPO: Shao et al. 2024, equation 3;
clip-higher, token-level loss: DAPO, Yu et al. 2025; no deviation, constant divisor: Dr. GRPO, Liu et al. 2025; ratios of answers: GSPO,
Zheng et al. 2025, equation 7.)
"""

import hashlib
import json
import math
import random
import re
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

FILE, STATE = "run.pt", ("done", "experiences", "reward_mean", "flat", "identity")
CHOICES = {"scale": ("group", "none"), "level": ("token", "sequence"), "aggregation": ("token", "sequence", "constant")}
COUNTS = {"end": 0, "limit": 1, "prompts": 1, "group": 2, "updates": 1, "micro_size": 1}  # what each is at least
NUMBERS = {"temperature": math.inf, "clip_low": 1, "clip_high": math.inf}  # above 0, and below this


class Cache:
    """A KV cache: of each layer [2, rows, K, places, d], keys and values. Row b has filled the first lengths[b] places."""

    def __init__(self, lengths, places, layers):
        self.lengths, self.places, self.layers = lengths, places, layers

    def attend(self, layer, queries, keys, values):
        """Write behind what is there, and look at it: a new token sees all places up to its own. What stands behind it is left over."""
        if layer not in self.layers:
            self.layers[layer] = keys.new_zeros(2, *keys.shape[:2], self.places, keys.shape[3])
        rows, places = torch.arange(len(queries))[:, None], self.lengths[:, None] + torch.arange(queries.shape[2])
        cached_keys, cached_values = self.layers[layer]
        cached_keys[rows, :, places], cached_values[rows, :, places] = keys.transpose(1, 2), values.transpose(1, 2)
        used = int(places.max()) + 1  # nobody looks behind the longest row
        allowed = torch.arange(used) <= places[:, None, :, None]
        return F.scaled_dot_product_attention(queries, cached_keys[:, :, :used], cached_values[:, :, :used], allowed, enable_gqa=True)

    def kept(self, rows):
        return Cache(self.lengths[rows], self.places, {layer: cached[:, rows] for layer, cached in self.layers.items()})

    def joined(self, other):
        layers = {layer: torch.cat([cached, other.layers[layer]], dim=1) for layer, cached in self.layers.items()}
        return Cache(torch.cat([self.lengths, other.lengths]), self.places, layers)


def prefill(model, prompts, places):
    """Padded on the right: what is written behind a short prompt is overwritten before anybody looks at it."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    if not lengths.all() or lengths.max() > places:
        raise ValueError(f"Prompts have {lengths.min()} to {lengths.max()} tokens: each needs at least 1, and at most {places}.")
    input_ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    cache = Cache(torch.zeros_like(lengths), places, {})
    with torch.no_grad():
        logits = model(input_ids, torch.arange(input_ids.shape[1]).expand_as(input_ids), cache.attend)
    cache.lengths = lengths
    return cache, logits[torch.arange(len(lengths)), lengths - 1]


def append(model, cache, tokens):
    if cache.lengths.max() >= cache.places:
        raise ValueError(f"A row has filled all of its {cache.places} places: give the cache more of them.")
    with torch.no_grad():
        logits = model(tokens[:, None], cache.lengths[:, None], cache.attend)
    cache.lengths = cache.lengths + 1
    return logits[:, 0]


def greedy(model, prompts, end, limit):
    return [ids for ids, _ in sample(model, prompts, range(len(prompts)), end, limit, 0.0, 1.0)]


def draw(logits, uniform, temperature, top_p):
    logits = logits.double()
    if temperature == 0:
        return logits.argmax(dim=-1), torch.zeros(len(logits), dtype=torch.float64)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # the largest is 0 then, whatever the temperature
    if top_p < 1:
        likeliest, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        before = likeliest.cumsum(dim=-1) - likeliest  # a token is kept where those before it have not reached top_p
        scaled = scaled.where(torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < top_p), -torch.inf)
    log_probs = scaled.log_softmax(dim=-1)
    cumulative = log_probs.exp().cumsum(dim=-1)
    total = cumulative[:, -1:]  # 1, but for rounding
    threshold = torch.minimum(uniform.double()[:, None] * total, total.nextafter(torch.zeros_like(total)))
    tokens = (cumulative <= threshold).sum(dim=-1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def sample(model, prompts, seeds, end, limit, temperature, top_p):
    return serve(model, prompts, seeds, end, limit, temperature, top_p, len(prompts))


def serve(model, prompts, seeds, end, limit, temperature, top_p, rows):
    if limit < 1 or rows < 1 or len(seeds) != len(prompts):
        raise ValueError(f"limit is {limit}, rows {rows}, seeds {len(seeds)} for {len(prompts)} prompts: 1 at least, and a seed for each.")
    answers, streams = [([], []) for _ in prompts], [random.Random(seed) for seed in seeds]
    places, waiting, alive = max(len(prompt) for prompt in prompts) + limit, list(range(len(prompts))), []
    while waiting or alive:
        free = rows - len(alive)
        fresh, waiting = waiting[:free], waiting[free:]
        if fresh:
            new, first = prefill(model, [prompts[number] for number in fresh], places)
            cache, logits = (cache.joined(new), torch.cat([logits, first])) if alive else (new, first)
            alive += fresh
        uniform = torch.tensor([streams[number].random() for number in alive], dtype=torch.float64)
        tokens, log_probs = draw(logits, uniform, temperature, top_p)
        for number, token, log_prob in zip(alive, tokens.tolist(), log_probs.tolist()):
            answers[number][0].append(token)
            answers[number][1].append(log_prob)
        staying = [row for row, number in enumerate(alive) if answers[number][0][-1] != end and len(answers[number][0]) < limit]
        if len(staying) < len(alive):
            cache, alive = cache.kept(staying), [alive[row] for row in staying]
        if alive:
            logits = append(model, cache, tokens[staying])
    return answers


def score(model, prompts, answers, temperature):
    """With a graph, in one call. The logits at a place predict the token after it."""
    rows = [torch.tensor(prompt + ids[:-1]) for prompt, ids in zip(prompts, answers)]
    logits, found = model(pad_sequence(rows, batch_first=True)), []
    for row, prompt, ids in zip(logits, prompts, answers):
        own = row[len(prompt) - 1 : len(prompt) - 1 + len(ids)]
        own = own.to(torch.promote_types(own.dtype, torch.float32)) / temperature
        found.append(own.log_softmax(dim=-1)[range(len(ids)), ids])
    return found


def verify(text, expected):
    given, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    if not closed or text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return 0.0
    number = re.fullmatch(" *(-?[0-9]{1,20}) *", given)  # int() alone would take 1_0 and digits of other scripts, and refuse long ones
    return 1.0 if number and int(number[1]) == expected else 0.1


def advantages(rewards, scale):
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if scale == "group":
        centred = centred / (rewards.std(dim=1, keepdim=True) + 1e-4)
    differ = (rewards != rewards[:, :1]).any(dim=1, keepdim=True)  # compared, because a mean of equal rewards is rounded
    return centred.where(differ, 0)


def token_losses(log_probs, old, advantages, mask, settings):
    moved = (log_probs - old.detach()).where(mask, 0)  # selected before anything is computed: 0 times NaN is NaN, also in a gradient
    if settings["level"] == "sequence":
        moved = (moved.sum(dim=1) / mask.sum(dim=1))[:, None].expand_as(mask)
    ratio, advantages = moved.exp(), advantages.detach()[:, None]
    clipped = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
    return -torch.minimum(ratio * advantages, clipped * advantages).where(mask, 0)


def token_weights(lengths, settings):
    """Of all answers of a step, so that its micro-batches only have to be added."""
    lengths = torch.tensor(lengths, dtype=torch.float64)
    if settings["aggregation"] == "token":
        return torch.ones_like(lengths) / lengths.sum()
    return 1 / (len(lengths) * (lengths if settings["aggregation"] == "sequence" else torch.full_like(lengths, settings["limit"])))


def update(model, optimizer, experiences, settings):
    if not experiences:
        raise ValueError("0 experiences were given: there is nothing to learn from.")
    total, size = 0.0, settings["micro_size"]
    weights = token_weights([len(ids) for _, ids, _, _ in experiences], settings)
    optimizer.zero_grad()
    for first in range(0, len(experiences), size):
        prompts, answers, old, scores = zip(*experiences[first : first + size])
        log_probs = pad_sequence(score(model, prompts, answers, settings["temperature"]), batch_first=True)
        old = pad_sequence([torch.tensor(each, dtype=log_probs.dtype) for each in old], batch_first=True)
        mask = torch.arange(log_probs.shape[1]) < torch.tensor([len(ids) for ids in answers])[:, None]
        losses = token_losses(log_probs, old, torch.tensor(scores, dtype=log_probs.dtype), mask, settings)
        loss = (losses * weights[first : first + size, None].to(losses.dtype)).sum()
        loss.backward()  # and its graph is gone
        total += loss.item()
    if not math.isfinite(total):
        optimizer.zero_grad()
        raise ValueError(f"The loss is {total}: weights, log-probabilities or advantages are no numbers.")
    optimizer.step()
    return total


def start(model, optimizer, prompts, reward, settings, seed):
    run = SimpleNamespace(**locals(), done=0)
    check_settings(settings)
    if len(prompts) < settings["prompts"] or not all(prompts):
        raise ValueError(f"Of {len(prompts)} prompts {list(prompts).count([])} are empty, and a rollout needs {settings['prompts']}.")
    run.identity = hashlib.sha256(json.dumps([list(prompts), sorted(settings.items()), seed]).encode()).hexdigest()
    return run


def roll_out(run, rollout):
    """Draw and judge the answers of a rollout. Order and streams follow from the seed and from what has been done, so neither is saved."""
    settings, count, numbers = run.settings, len(run.prompts), []
    for turn in range(rollout * settings["prompts"], (rollout + 1) * settings["prompts"]):
        order = random.Random(f"order {run.seed}, {turn // count}").sample(range(count), count)  # of the epoch
        numbers += [order[turn % count]] * settings["group"]
    stream = random.Random(f"answers {run.seed}, {rollout}")
    seeds, prompts = [stream.getrandbits(60) for _ in numbers], [run.prompts[number] for number in numbers]
    answers, rewards = sample(run.model, prompts, seeds, settings["end"], settings["limit"], settings["temperature"], 1.0), []
    for number, (ids, _) in zip(numbers, answers):
        rewards.append(run.reward(number, list(ids)))
        if not isinstance(rewards[-1], int | float) or not math.isfinite(rewards[-1]):
            raise ValueError(f"The reward of an answer to prompt {number} is {rewards[-1]!r}: it must be a finite number.")
    rewards = torch.tensor(rewards, dtype=torch.float64).view(-1, settings["group"])
    scores = advantages(rewards, settings["scale"])
    run.experiences = [(prompt, *answer, each) for prompt, answer, each in zip(prompts, answers, scores.flatten().tolist())]
    run.reward_mean, run.flat = rewards.mean().item(), (scores == 0).all(dim=1).double().mean().item()


def advance(run, steps):
    found = []
    for _ in range(steps):
        rollout, turn = divmod(run.done, run.settings["updates"])
        if turn == 0:
            roll_out(run, rollout)
        loss = update(run.model, run.optimizer, run.experiences, run.settings)
        found.append({"loss": loss, "reward": run.reward_mean, "flat": run.flat})
        run.done += 1
    return found


def save(run, folder):
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    torch.save(state | {name: getattr(run, name, None) for name in STATE}, folder / FILE)


def resume(model, optimizer, prompts, reward, settings, seed, folder):
    run = start(model, optimizer, prompts, reward, settings, seed)
    if not (folder / FILE).exists():
        raise ValueError(f"{folder} has no {FILE}, so there is no run to continue.")
    state = torch.load(folder / FILE, weights_only=True)  # tensors and numbers, and no code
    if state["identity"] != run.identity:
        raise ValueError(f"{folder} has a run with other prompts, settings or another seed: continue it with what it began with.")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    vars(run).update({name: state[name] for name in STATE})
    return run


def check_settings(settings):
    if strange := sorted(set(settings) ^ {*CHOICES, *COUNTS, *NUMBERS}):
        raise ValueError(f"{strange[0]} is {'unknown' if strange[0] in settings else 'missing'} among the settings.")
    for key, value in settings.items():
        if key in CHOICES and value not in CHOICES[key]:
            raise ValueError(f"{key} is {value!r}: give one of {CHOICES[key]}.")
        if key in COUNTS and (type(value) is not int or value < COUNTS[key]):  # True is an int too
            raise ValueError(f"{key} is {value!r}: give an integer of at least {COUNTS[key]}.")
        if key in NUMBERS and (type(value) not in (int, float) or not 0 < value < NUMBERS[key]):  # NaN is nowhere
            raise ValueError(f"{key} is {value!r}: give a number above 0 and below {NUMBERS[key]}.")
