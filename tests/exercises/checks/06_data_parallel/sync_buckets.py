"""Check of 06.sync_buckets. Oracle: torch's own backward pass over all micro-batches of all ranks at once.

Ranks are threads. Each has weights of one number, and for each micro-batch a list of those that it uses, in the order in which their
gradients become ready. On rank r, micro-batch m of M has the gradient 10^(r M + m), so a sum of 1011 lacks micro-batch 0 of rank 1.
Buckets are the core's, with a note of when each was started and waited for.

Tolerances. Digits are exact. The oracle adds float64 numbers in another order: 1e-12.
"""

import torch
from torch import nn

from shared.course.checking import Case, Check
from shared.parallel.data.ddp import SummedBucket
from shared.parallel.comm.threads import run_threads

CONTRACT = "the contract"
DIGITS = "arithmetic: on rank r, micro-batch m of M has the gradient 10^(r M + m), and all of them add up"
ORACLE = "torch: one backward pass over the losses of all micro-batches of all ranks"


class Noted(SummedBucket):
    """A bucket that writes down in `log` when it starts, and in `waited` when it is waited for. `works` are its operations."""

    def __init__(self, number, parameters, group, log, waited):
        super().__init__(parameters, group)
        self.number, self.log, self.waited, self.works = number, log, waited, []

    def start(self):
        self.log.append(f"bucket {self.number} starts")
        self.works.append(super().start())
        return NotedWork(self.works[-1], self)


class NotedWork:
    def __init__(self, work, bucket):
        self.work, self.bucket = work, bucket

    def wait(self):
        self.work.wait()
        self.bucket.waited.append(self.bucket.number)
        if "backward is over" not in self.bucket.log:
            self.bucket.log.append(f"bucket {self.bucket.number} is waited for")


def weights_for(uses) -> list[nn.Parameter]:
    count = 1 + max(number for rank in uses for microbatch in rank for number in microbatch)
    return [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(count)]


def loss(weights, used, digit):
    """Gradients become ready in the order of `used`: autograd goes backwards, so the last one that is added comes first."""
    total = torch.zeros(1, dtype=torch.float64)
    for number in reversed(used):
        total = total + weights[number] * digit
    return total.sum()


def digit(rank: int, microbatch: int, microbatches: int) -> float:
    return 10.0 ** (rank * microbatches + microbatch)


def one_step(function, weights, buckets, microbatches, rank, log):
    """What a runner and a reducer do."""
    for number, used in enumerate(microbatches):
        if number == len(microbatches) - 1:
            finish = function(buckets)
        loss(weights, used, digit(rank, number, len(microbatches))).backward()
    log.append("backward is over")
    returned = finish()
    gradients = {f"gradient of weight {n}": None if w.grad is None else w.grad.clone() for n, w in enumerate(weights)}
    complete(buckets)
    return gradients | ({} if returned is None else {"finish returned a value": True})


def complete(buckets):
    """Wait for what an answer has not waited for: a rank that ends before its operations stops the others, with some message or other."""
    for work in (work for bucket in buckets for work in bucket.works):
        work.wait()


def steps(function, buckets, uses, times=1):
    """The gradients that each rank holds after `times` steps, each begun without gradients."""

    def work(world):
        weights, log, waited = weights_for(uses), [], []
        mine = [Noted(number, [weights[each] for each in bucket], world, log, waited) for number, bucket in enumerate(buckets)]
        for _ in range(times):
            for weight in weights:
                weight.grad = None
            result = one_step(function, weights, mine, uses[world.rank], world.rank, log)
        return result

    return {f"rank {rank}": result for rank, result in enumerate(run_threads(work, len(uses)))}


def all_at_once(uses, **_):
    weights = weights_for(uses)
    for rank, microbatches in enumerate(uses):
        for number, used in enumerate(microbatches):
            loss(weights, used, digit(rank, number, len(microbatches))).backward()
    gradients = {f"gradient of weight {n}": torch.zeros_like(w) if w.grad is None else w.grad for n, w in enumerate(weights)}
    return {f"rank {rank}": gradients for rank in range(len(uses))}


def traced(function, buckets, uses):
    """One rank's notes: which gradient becomes ready when, which bucket starts when, and what is done after `finish`."""

    def work(world):
        weights, log, waited = weights_for(uses), [], []
        for number, weight in enumerate(weights):
            weight.register_post_accumulate_grad_hook(lambda _, number=number: log.append(f"gradient {number} is ready"))
        mine = [Noted(number, [weights[each] for each in bucket], world, log, waited) for number, bucket in enumerate(buckets)]
        *early, last = uses[0]
        for used in early:
            loss(weights, used, 1.0).backward()
        log.clear()
        finish = function(mine)
        loss(weights, last, 1.0).backward()
        log.append("backward is over")
        finish()
        never = [number for number in range(len(buckets)) if number not in waited]
        left = sum(len(weight._post_accumulate_grad_hooks) - 1 for weight in weights)  # one of each is this check's
        count = len(log)
        loss(weights, last, 1.0).backward()
        later = sum("starts" in entry for entry in log[count:])
        complete(mine)
        return {"in order": log[:count], "buckets never waited for": never, "starts in a pass after finish": later, "hooks left": left}

    return run_threads(work, 1)[0]


def noted(*entries: str):
    def expected(**given):
        names = {"g": "gradient {} is ready", "b": "bucket {} starts", "-": "backward is over"}
        order = [names[entry[0]].format(entry[1:]) for entry in entries]
        return {"in order": order, "buckets never waited for": [], "starts in a pass after finish": 0, "hooks left": 0}

    return expected


def network(ranks: int, seed: int):
    return lambda: {"ranks": ranks, "seed": seed}


class Net(nn.Module):
    """Two layers of which the second is used twice, and a frozen bias."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))  # noqa: E731
        self.first, self.second, self.bias = draw(3, 5), draw(5, 5), draw(5)
        self.bias.requires_grad_(False)

    def forward(self, x):
        return ((x @ self.first).tanh() @ self.second + self.bias).tanh() @ self.second.T


def shares(ranks: int, seed: int):
    """Two micro-batches for each rank, of unequal lengths, each with a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[2 + rank + 3 * number for number in range(2)] for rank in range(ranks)]
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [[(draw(count, 3), draw(count, 5)) for count in counts] for counts in rows]


def network_steps(function, ranks, seed):
    def work(world):
        net, log, waited = Net(seed), [], []
        buckets = [Noted(number, [p], world, log, waited) for number, p in enumerate([net.second, net.first])]
        first, last = shares(ranks, seed)[world.rank]
        (net(first[0]) * first[1]).sum().backward()
        finish = function(buckets)
        (net(last[0]) * last[1]).sum().backward()
        finish()
        gradients = {"first": net.first.grad.clone(), "second": net.second.grad.clone(), "bias": net.bias.grad}
        complete(buckets)
        return gradients

    return {f"rank {rank}": result for rank, result in enumerate(run_threads(work, ranks))}


def network_at_once(ranks, seed):
    net = Net(seed)
    xs, cotangents = zip(*(each for share in shares(ranks, seed) for each in share), strict=True)
    (net(torch.cat(xs)) * torch.cat(cotangents)).sum().backward()
    return {f"rank {rank}": {"first": net.first.grad, "second": net.second.grad, "bias": None} for rank in range(ranks)}


def given(buckets, *uses, **more):
    return lambda: {"buckets": buckets, "uses": list(uses)} | more


def exact(rung, title, arguments, source=DIGITS):
    return Case(rung, title, arguments, all_at_once, source, steps, rtol=0.0)


CHECK = Check(
    exercise="06.sync_buckets",
    outputs=("finish",),
    spoilt=("gradients of buckets when called",),
    cases=[
        exact("shape and dtype", "one rank, two weights of which one is used", given([[0], [1]], [[1]]), CONTRACT),
        exact("worked example", "two ranks, one weight: 1 and 10", given([[0]], [[0]], [[0]])),
        exact("worked example", "two ranks, two micro-batches each", given([[0]], [[0], [0]], [[0], [0]])),
        exact("worked example", "three ranks, two buckets, three micro-batches", given([[1, 2], [0]], *[[[2, 1, 0]] * 3] * 3)),
        Case(
            "property", "one rank, each bucket starts as soon as it can", given([[3, 2], [1], [0]], [[0, 1, 2, 3], [3, 2, 1, 0]]),
            noted("g3", "g2", "b0", "g1", "b1", "g0", "b2", "-"), CONTRACT, traced,
        ),
        Case(
            "property", "one rank, buckets 1 and 2 are full before bucket 0", given([[3, 2], [1], [0]], [[1, 3, 0, 2]]),
            noted("g1", "g3", "g0", "g2", "b0", "b1", "b2", "-"), CONTRACT, traced,
        ),
        Case(
            "property", "one rank, the last micro-batch uses no weight of bucket 1", given([[2], [1], [0]], [[0, 1, 2], [2, 0]]),
            noted("g2", "b0", "g0", "-", "b1", "b2"), CONTRACT, traced,
        ),
        Case(
            "property", "one rank, weight 1 is used twice and ready once", given([[1], [0]], [[1, 0, 1]]),
            noted("g0", "g1", "b0", "b1", "-"), CONTRACT, traced,
        ),
        exact(
            "property", "two steps: the first micro-batch of the second exchanges nothing",
            given([[1], [0]], [[1, 0], [1, 0]], [[1, 0], [1, 0]], times=2),
        ),
        Case("oracle", "one rank alone", network(1, 3), network_at_once, ORACLE, network_steps, rtol=1e-12, atol=1e-12),
        exact("two ranks", "their buckets are full in opposite orders", given([[0], [1]], [[0, 1]], [[1, 0]])),
        exact(
            "two ranks", "rank 1 uses weight 1 in its first micro-batch only, rank 0 in its last",
            given([[2], [1], [0]], [[0], [2, 1, 0]], [[1], [0, 2]]),
        ),
        exact("two ranks", "no rank uses weight 1", given([[2, 1], [0]], [[2, 0]], [[0, 2]])),
        Case(
            "two ranks", "uneven shares, a weight with two uses", network(2, 5), network_at_once, ORACLE, network_steps,
            rtol=1e-12, atol=1e-12,
        ),
        Case("two ranks", "three of them", network(3, 7), network_at_once, ORACLE, network_steps, rtol=1e-12, atol=1e-12),
    ],
)  # fmt: skip
