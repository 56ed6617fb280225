"""Right answers that are not the solutions: another formula, another order, another part of torch. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import torch

from shared.parallel.data.activation_checkpointing import random_numbers_from

# Collectives


def ring_all_reduce__in_two_loops(tensor, group):
    n, r = group.size, group.rank
    left, right = (r - 1) % n, (r + 1) % n
    parts = list(torch.tensor_split(tensor.reshape(-1), n))
    for s in range(n - 1):
        mine, theirs = parts[(r - s) % n], parts[(r - s - 1) % n]
        temporary = torch.empty(theirs.shape, dtype=tensor.dtype)
        coming = group.receive(temporary, left, asynchronous=True)
        group.send(mine, right)
        coming.wait()
        theirs.add_(temporary)
    for s in range(n - 1):
        coming = group.receive(parts[(r - s) % n], left, asynchronous=True)
        group.send(parts[(r + 1 - s) % n], right)
        coming.wait()


def ring_all_reduce__from_another_chunk(tensor, group):
    """Chunks with the long ones last, and rank r begins with chunk r + 2."""
    size, flat = group.size, tensor.view(-1)
    edges = [len(flat) * part // size for part in range(size + 1)]
    longest = max(b - a for a, b in zip(edges, edges[1:], strict=False))
    received = flat.new_zeros(longest)
    for step in range(2 * size - 2):
        out, into = ((group.rank + 2 - step - offset) % size for offset in (0, 1))
        first, last = edges[into], edges[into + 1]
        sent = group.send(flat[edges[out] : edges[out + 1]], (group.rank + 1) % size, asynchronous=True)
        if step < size - 1:
            group.receive(received[: last - first], (group.rank + size - 1) % size)
            flat[first:last] += received[: last - first]
        else:
            group.receive(flat[first:last], (group.rank + size - 1) % size)
        sent.wait()


# Replicas


def sync_buckets__by_counts(buckets):
    """Counts what is left of each bucket, and keeps the works by number."""
    works, home = {}, {}
    left = []
    for index, bucket in enumerate(buckets):
        left.append(len(bucket.parameters))
        for parameter in bucket.parameters:
            home[id(parameter)] = index

    def hook(parameter):
        left[home[id(parameter)]] -= 1
        for index in range(len(buckets)):
            if left[index] > 0:
                return
            if index not in works:
                works[index] = buckets[index].start()

    handles = []
    for bucket in buckets:
        handles.extend(parameter.register_post_accumulate_grad_hook(hook) for parameter in bucket.parameters)

    def done():
        while handles:
            handles.pop().remove()
        for index in range(len(buckets)):
            if index not in works:
                works[index] = buckets[index].start()
        for index in reversed(range(len(buckets))):
            works[index].wait()

    return done


def sync_buckets__as_an_object(buckets):
    class Exchange:
        def __init__(self):
            self.ready, self.coming, self.works = set(), iter(buckets), []
            self.now = next(self.coming, None)
            self.handles = [p.register_post_accumulate_grad_hook(self.arrived) for bucket in buckets for p in bucket.parameters]

        def go(self):
            self.works.append(self.now.start())
            self.now = next(self.coming, None)

        def arrived(self, parameter):
            self.ready.add(parameter)
            while self.now is not None and all(each in self.ready for each in self.now.parameters):
                self.go()

        def finish(self):
            while self.now is not None:
                self.go()
            for handle in self.handles:
                handle.remove()
            for work in self.works:
                work.wait()

    return Exchange().finish


def partition__by_bisection(sizes, whole, held):
    """The common level is found by bisection; then each rank's count is cut off in turn."""
    loads, result = list(held), [None] * len(sizes)
    for size, number in sorted(((size, number) for number, size in enumerate(sizes) if whole[number]), reverse=True):
        lowest = min(range(len(loads)), key=lambda rank: loads[rank])
        result[number] = [(0, size if rank == lowest else 0) for rank in range(len(loads))]
        loads[lowest] += size
    left = sum(size for number, size in enumerate(sizes) if not whole[number])
    level, above = min(loads), max(loads) + left + 1
    while above - level > 1:
        middle = (level + above) // 2
        level, above = (middle, above) if sum(max(0, middle - load) for load in loads) <= left else (level, middle)
    given = [max(0, level - load) for load in loads]
    for rank in [rank for rank, load in enumerate(loads) if load <= level][: left - sum(given)]:
        given[rank] += 1
    for number, size in enumerate(sizes):
        if not whole[number]:
            places, position = [], 0
            for rank in range(len(loads)):
                taken = min(given[rank], size - position)
                places.append((position, position + taken))
                given[rank], position = given[rank] - taken, position + taken
            result[number] = places
    return result


def partition__on_a_line(sizes, whole, held):
    """What may be cut is one line; ranks own stretches of it, from the last rank to the first; a parameter meets them by overlap."""
    from itertools import accumulate

    held = dict(enumerate(held))
    owner = {}
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        if whole[number]:
            owner[number] = min(held, key=held.get)
            held[owner[number]] += sizes[number]
    total = sum(size for size, stays in zip(sizes, whole, strict=True) if not stays)
    level = max(held.values()) + total
    while (excess := sum(max(0, level - load) for load in held.values()) - total) > 0:
        level -= max(1, excess // len(held))
    room = {rank: max(0, level - load) for rank, load in held.items()}
    spare = total - sum(room.values())
    for rank in [rank for rank in held if held[rank] <= level][:spare]:
        room[rank] += 1
    ends = list(accumulate(room[rank] for rank in reversed(range(len(held)))))
    stretch = {rank: (end - room[rank], end) for rank, end in zip(reversed(range(len(held))), ends, strict=True)}
    result, position = [], 0
    for number, size in enumerate(sizes):
        if whole[number]:
            result.append([(0, size) if rank == owner[number] else (size, size) for rank in range(len(held))])
            continue
        clamp = lambda place, first=position, last=size: min(max(place - first, 0), last)  # noqa: E731
        result.append([tuple(map(clamp, stretch[rank])) for rank in range(len(held))])
        position += size
    return result


# Activation checkpointing and FSDP


def recompute__one_at_a_time(run, inputs, parameters, upstream, random_state):
    with random_numbers_from(random_state):
        with torch.set_grad_enabled(True):
            copies = []
            for original in inputs:
                copy = original.detach()
                if original.requires_grad:
                    copy.requires_grad_()
                copies.append(copy)
            result = run(*copies)
    found = []
    for tensor in copies + list(parameters):
        if not (tensor.requires_grad and result.requires_grad):
            found.append(None)
            continue
        found.append(torch.autograd.grad(result, tensor, upstream, retain_graph=True, allow_unused=True)[0])
    return tuple(found)


def recompute__by_places(run, inputs, parameters, upstream, random_state):
    """The inputs stay in the old graph, each behind a view of its own, at which autograd.grad ends."""
    with torch.enable_grad(), random_numbers_from(random_state):
        views = [tensor.view_as(tensor) for tensor in inputs]
        output = run(*views)
    tensors = (*views, *parameters)
    places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    if output.grad_fn is None:
        return tuple(None for _ in tensors)
    gradients = torch.autograd.grad([output], [tensors[place] for place in places], [upstream], allow_unused=True)
    answer = dict(zip(places, gradients, strict=True))
    return tuple(answer.get(place) for place in range(len(tensors)))


def unshard_unit__from_a_copy(whole, shard, group):
    storage = whole.untyped_storage()
    storage.resize_(whole.nbytes)
    return group.all_gather(whole, shard.to(whole.dtype), asynchronous=True)


def unshard_unit__by_chunks(whole, shard, group):
    whole.untyped_storage().resize_(whole.element_size() * len(shard) * group.size)
    first = group.rank * len(shard)
    whole[first : first + len(shard)] = shard
    return group.all_gather(whole, whole.narrow(0, first, len(shard)), asynchronous=True)


def reshard_unit__concatenated(whole, gradients, sizes, dtype, group):
    whole.untyped_storage().resize_(0)
    parts = [whole.new_zeros(n, dtype=dtype) if g is None else g.reshape(-1).to(dtype) for g, n in zip(gradients, sizes, strict=True)]
    parts.append(whole.new_zeros(whole.numel() - sum(sizes), dtype=dtype))
    flat = torch.cat(parts)
    shard = flat.new_zeros(flat.numel() // group.size)
    work = group.reduce_scatter(shard, flat, asynchronous=True)
    return shard, work


def reshard_unit__by_counting(whole, gradients, sizes, dtype, group):
    total = whole.numel()
    whole.untyped_storage().resize_(0)
    buffer = torch.zeros((group.size, total // group.size), dtype=dtype, device=whole.device)
    start = 0
    for size, gradient in zip(sizes, gradients, strict=True):
        if gradient is not None:
            buffer.view(-1)[start : start + size] += gradient.contiguous().view(-1)
        start += size
    mine = torch.empty_like(buffer[0])
    return mine, group.reduce_scatter(mine, buffer.view(-1), asynchronous=True)
