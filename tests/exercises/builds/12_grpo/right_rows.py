"""A right build in another style: each row of a cache has tensors of its own, which grow, and attends alone. Random numbers come from a
generator of PyTorch for each answer. Gradients are taken with autograd.grad. A run is a dictionary, saved in three files."""

import json
import math

import torch
from torch.nn.functional import scaled_dot_product_attention


class Rows:
    """rows: for each row a dictionary, layer -> keys and values [K, tokens, d]. Each row has room for `places` tokens."""

    def __init__(self, rows, places):
        self.rows, self.places = rows, places

    def attend_with(self, sizes):
        """sizes: how many of the new columns belong to each row. What the others get does not matter."""

        def attend(layer, queries, keys, values):
            found = torch.zeros_like(queries)
            for number, (row, size) in enumerate(zip(self.rows, sizes, strict=True)):
                new = [keys[number, :, :size], values[number, :, :size]]
                row[layer] = [torch.cat(both, dim=1) for both in zip(row[layer], new, strict=True)] if layer in row else new
                times = queries.shape[1] // keys.shape[1]
                k, v = (each.repeat_interleave(times, dim=0) for each in row[layer])
                found[number, :, :size] = scaled_dot_product_attention(queries[number, :, :size], k, v, is_causal=size > 1)
            return found

        return attend

    def lengths(self):
        return [next(iter(row.values()))[0].shape[1] for row in self.rows]


def rectangle(lists, filling, dtype):
    longest = max(map(len, lists))
    return torch.tensor([list(each) + [filling] * (longest - len(each)) for each in lists], dtype=dtype)


def prefill(model, prompts, places):
    sizes = [len(prompt) for prompt in prompts]
    if min(sizes) == 0:
        raise ValueError("a prompt of 0 tokens")
    if max(sizes) > places:
        raise ValueError(f"a prompt of {max(sizes)} tokens, and {places} places")
    cache = Rows([{} for _ in prompts], places)
    ids = rectangle(prompts, 1, torch.int64)
    with torch.no_grad():
        logits = model(ids, torch.arange(max(sizes)).repeat(len(prompts), 1), cache.attend_with(sizes))
    return cache, torch.stack([row[size - 1] for row, size in zip(logits, sizes, strict=True)])


def append(model, cache, tokens):
    lengths = cache.lengths()
    if max(lengths) == cache.places:
        raise ValueError(f"{cache.places} places are all there are")
    with torch.no_grad():
        return model(tokens.view(-1, 1), torch.tensor(lengths).view(-1, 1), cache.attend_with([1] * len(lengths)))[:, -1]


def greedy(model, prompts, end, limit):
    return [answer[0] for answer in sample(model, prompts, [0] * len(prompts), end, limit, 0, 1)]


def draw(logits, uniform, temperature, top_p):
    logits = logits.to(torch.float64)
    if temperature == 0:
        return (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1), logits.new_zeros(len(logits))
    probabilities = torch.softmax((logits - logits.amax(dim=1, keepdim=True)) / temperature, dim=1)
    order = probabilities.argsort(dim=1, descending=True, stable=True)
    count = (probabilities.gather(1, order).cumsum(dim=1) < top_p).sum(dim=1, keepdim=True) + 1
    ranks = order.argsort(dim=1)
    kept = probabilities if top_p == 1 else probabilities.where(ranks < count, 0)
    kept = kept / kept.sum(dim=1, keepdim=True)
    last = kept.shape[1] - 1 - (kept.flip(1) > 0).int().argmax(dim=1)
    tokens = torch.searchsorted(kept.cumsum(dim=1), uniform[:, None], right=True)[:, 0].minimum(last)
    return tokens, kept.gather(1, tokens[:, None])[:, 0].log()


def sample(model, prompts, seeds, end, limit, temperature, top_p):
    return serve(model, prompts, seeds, end, limit, temperature, top_p, max(1, len(prompts)))


def serve(model, prompts, seeds, end, limit, temperature, top_p, rows):
    for name, wrong in {"limit": limit < 1, "rows": rows < 1, "seeds": len(seeds) != len(prompts)}.items():
        if wrong:
            raise ValueError(f"{name} cannot be right")
    places, found, following = max(map(len, prompts)) + limit, {}, 0
    cache, working, logits = Rows([], places), [], []  # working: (number, generator, ids, log-probabilities)
    while following < len(prompts) or working:
        new = range(following, min(following + rows - len(working), len(prompts)))
        if new:
            own, first = prefill(model, [prompts[number] for number in new], places)
            working += [(number, torch.Generator().manual_seed(seeds[number]), [], []) for number in new]
            cache.rows += own.rows
            logits = [*logits, *first]
            following += len(new)
        uniform = torch.stack([torch.rand((), generator=each[1], dtype=torch.float64) for each in working])
        for (_, _, ids, recorded), *both in zip(working, *draw(torch.stack(logits), uniform, temperature, top_p), strict=True):
            ids.append(both[0].item())
            recorded.append(both[1].item())
        left = [not (each[2][-1] == end or len(each[2]) == limit) for each in working]
        found |= {each[0]: (each[2], each[3]) for each, stays in zip(working, left, strict=True) if not stays}
        cache.rows = [row for row, stays in zip(cache.rows, left, strict=True) if stays]
        working = [each for each, stays in zip(working, left, strict=True) if stays]
        logits = list(append(model, cache, torch.tensor([each[2][-1] for each in working]))) if working else []
    return [found[number] for number in range(len(prompts))]


def score(model, prompts, answers, temperature):
    """Rows with the answers' last tokens too, which nobody needs."""
    whole = model(rectangle([[*prompt, *ids[:-1]] for prompt, ids in zip(prompts, answers, strict=True)], 1, torch.int64))
    found = []
    for number, (prompt, ids) in enumerate(zip(prompts, answers, strict=True)):
        logits = whole[number].narrow(0, len(prompt) - 1, len(ids))
        logits = (logits if logits.dtype == torch.float64 else logits.float()).div(temperature)
        found.append(logits.gather(1, torch.tensor(ids).view(-1, 1)).squeeze(1) - logits.logsumexp(1))
    return found


def verify(text, expected):
    parts = text.split("<answer>")
    inner = parts[1].split("</answer>") if len(parts) == 2 else []
    if len(inner) != 2 or "</answer>" in parts[0]:
        return 0.0
    number = inner[0].strip(" ")
    digits = number.removeprefix("-")
    fine = 1 <= len(digits) <= 20 and all(each in "0123456789" for each in digits)
    return 1.0 if fine and int(number) == expected else 0.1


def advantages(rewards, scale):
    rows = []
    for group in rewards.tolist():
        mean = math.fsum(group) / len(group)
        deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in group) / (len(group) - 1)) + 1e-4
        flat = min(group) == max(group)
        rows.append([0.0 if flat else (each - mean) / (deviation if scale == "group" else 1) for each in group])
    return torch.tensor(rows, dtype=rewards.dtype)


def token_losses(log_probs, old, advantages, mask, settings):
    rows = []
    for now, then, advantage, own in zip(log_probs, old.detach(), advantages.tolist(), mask, strict=True):
        moved = now[own] - then[own]
        if settings["level"] == "sequence":
            moved = moved.mean().expand(len(moved))
        ratio = moved.exp()
        bound = ratio.clamp(max=1 + settings["clip_high"]) if advantage > 0 else ratio.clamp(min=1 - settings["clip_low"])
        rows.append(torch.zeros_like(now).masked_scatter(own, -advantage * bound))
    return torch.stack(rows)


def token_weights(lengths, settings):
    divisor = {"token": [sum(lengths)] * len(lengths), "sequence": [len(lengths) * each for each in lengths]}
    divisor["constant"] = [len(lengths) * settings["limit"]] * len(lengths)
    return 1 / torch.tensor(divisor[settings["aggregation"]], dtype=torch.float64)


def update(model, optimizer, experiences, settings):
    if len(experiences) == 0:
        raise ValueError("no experience, no step")
    names = [weight for weight in model.parameters() if weight.requires_grad]
    gradients, loss, left = [torch.zeros_like(weight) for weight in names], [], list(experiences)
    weights = token_weights([len(each[1]) for each in experiences], settings)
    while left:
        some, left = left[: settings["micro_size"]], left[settings["micro_size"] :]
        own, weights = weights[: len(some)], weights[len(some) :]
        part = 0
        for each, now, weight in zip(some, score(model, *list(zip(*some))[:2], settings["temperature"]), own, strict=True):
            given = now[None], now.new_tensor([each[2]]), now.new_tensor([each[3]]), torch.ones(1, len(now), dtype=torch.bool)
            part = part + weight.to(now) * token_losses(*given, settings).sum()
        for total, gradient in zip(gradients, torch.autograd.grad(part, names, allow_unused=True), strict=True):
            total += 0 if gradient is None else gradient
        loss.append(part.item())
    if not math.isfinite(sum(loss)):
        raise ValueError(f"a loss of {sum(loss)} is not finite")
    for weight, gradient in zip(names, gradients, strict=True):
        weight.grad = gradient
    optimizer.step()
    return math.fsum(loss)


def start(model, optimizer, prompts, reward, settings, seed):
    check_settings(settings)
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("an empty prompt")
    if len(prompts) < settings["prompts"]:
        raise ValueError(f"only {len(prompts)} prompts")
    fixed = json.dumps({"prompts": prompts, "settings": settings, "seed": seed}, sort_keys=True)
    run = {"model": model, "optimizer": optimizer, "prompts": prompts, "reward": reward, "settings": settings, "seed": seed}
    return run | {"fixed": fixed, "state": {"steps": 0, "answers": [], "metrics": {}}}


def numbers_of(run):
    """The prompts of the next rollout. Each epoch has a generator of its own."""
    count, size = len(run["prompts"]), run["settings"]["prompts"]
    first, found = run["state"]["steps"] // run["settings"]["updates"] * size, []
    for place in range(first, first + size):
        generator = torch.Generator().manual_seed(1_000_003 * run["seed"] + place // count)
        found.append(torch.rand(count, generator=generator).argsort().tolist()[place % count])
    return found


def rollout(run):
    settings, answers, means, flat = run["settings"], [], [], 0
    group, rows = settings["group"], []
    numbers = [number for number in numbers_of(run) for _ in range(group)]
    first = (run["seed"] * 1_000_003 + run["state"]["steps"]) * 1_000_000
    given = settings["end"], settings["limit"], settings["temperature"], 1.0
    prompts = [run["prompts"][number] for number in numbers]
    found = sample(run["model"], prompts, range(first, first + len(numbers)), *given)
    for number, (ids, _) in zip(numbers, found, strict=True):
        value = run["reward"](number, [*ids])
        if type(value) not in (int, float) or math.isnan(value) or math.isinf(value):
            raise ValueError(f"{value!r} for prompt {number}")
        rows.append(float(value))
    for place in range(0, len(rows), group):
        own = advantages(torch.tensor([rows[place : place + group]], dtype=torch.float64), settings["scale"])[0].tolist()
        flat += not any(own)
        means += own
    answers = [[prompt, ids, recorded, mean] for prompt, (ids, recorded), mean in zip(prompts, found, means, strict=True)]
    metrics = {"reward": math.fsum(rows) / len(rows), "flat": flat / (len(rows) // group)}
    run["state"] |= {"answers": answers, "metrics": metrics}


def advance(run, steps):
    found = []
    while len(found) < steps:
        if run["state"]["steps"] % run["settings"]["updates"] == 0:
            rollout(run)
        loss = update(run["model"], run["optimizer"], run["state"]["answers"], run["settings"])
        run["state"]["steps"] += 1
        found.append({"loss": loss} | run["state"]["metrics"])
    return found


def save(run, folder):
    folder.mkdir(exist_ok=True, parents=True)
    torch.save(run["model"].state_dict(), folder / "model.pt")
    torch.save(run["optimizer"].state_dict(), folder / "optimizer.pt")
    (folder / "run.json").write_text(json.dumps([run["fixed"], run["state"]]), encoding="utf-8")


def resume(model, optimizer, prompts, reward, settings, seed, folder):
    run = start(model, optimizer, prompts, reward, settings, seed)
    try:
        fixed, run["state"] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a run") from None
    if fixed != run["fixed"]:
        raise ValueError("another run")
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return run


def check_settings(settings):
    words = {"scale": ["group", "none"], "level": ["token", "sequence"], "aggregation": ["token", "sequence", "constant"]}
    least = {"end": 0, "limit": 1, "prompts": 1, "group": 2, "updates": 1, "micro_size": 1}
    numbers = {"temperature", "clip_low", "clip_high"}
    if different := settings.keys() ^ (words.keys() | least.keys() | numbers):
        raise ValueError(f"unknown or missing: {different}")
    for key, value in settings.items():
        wrong = key in words and value not in words[key]
        wrong |= key in least and (isinstance(value, bool) or not isinstance(value, int) or value < least[key])
        if key in numbers:
            wrong = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0
            wrong = wrong or key == "clip_low" and value >= 1
        if wrong:
            raise ValueError(f"{key} {value!r}")
