"""Right answers that are not the solutions: another formula, another order, another data structure. Every check must accept them.

A name is the exercise's, two underscores, and how it is done.
"""

import heapq
from collections import deque
from functools import cache
from itertools import accumulate, chain, repeat

from shared.course.errors import SettingError
from shared.parallel.pipeline.schedules import Action


def gpipe__by_two_loops(rank, ranks, microbatches):
    actions = []
    for microbatch in range(microbatches):
        actions.append(Action("F", microbatch))
    for microbatch in range(microbatches):
        actions.append(Action("B", microbatch, 0))
    return actions


def gpipe__by_map(rank, ranks, microbatches):
    forward = list(map(Action, repeat("F", microbatches), range(microbatches)))
    return forward + [action._replace(kind="B") for action in forward]


def gpipe__by_division(rank, ranks, microbatches):
    return [Action(kind="FB"[place // microbatches], microbatch=place % microbatches) for place in range(2 * microbatches)]


def one_forward_one_backward__by_what_is_kept(rank, ranks, microbatches):
    """A forward pass whenever the bound permits one."""
    actions, forward, backward = [], 0, 0
    while backward < microbatches:
        if forward < microbatches and forward - backward < ranks - rank:
            actions.append(Action("F", forward))
            forward += 1
        else:
            actions.append(Action("B", backward))
            backward += 1
    return actions


def one_forward_one_backward__by_queue(rank, ranks, microbatches):
    """What is kept, as a queue."""
    kept, result = deque(), []
    for microbatch in range(microbatches):
        if len(kept) == ranks - rank:
            result.append(Action("B", kept.popleft()))
        kept.append(microbatch)
        result.append(Action("F", microbatch))
    return result + [Action("B", microbatch) for microbatch in kept]


def one_forward_one_backward__by_sorting(rank, ranks, microbatches):
    """F of micro-batch i has key 2i; its B follows F of micro-batch i + ranks - rank - 1, where there is one."""
    keyed = [(2 * microbatch, Action("F", microbatch)) for microbatch in range(microbatches)]
    keyed += [(2 * (microbatch + ranks - rank - 1) + 1, Action("B", microbatch)) for microbatch in range(microbatches)]
    return [action for _, action in sorted(keyed, key=lambda pair: pair[0])]


def interleaved__by_counting(rank, ranks, microbatches, chunks):
    """The k-th pass of a kind, as Megatron-LM numbers them."""
    if microbatches % ranks != 0:
        raise SettingError(f"{microbatches} micro-batches cannot be put in groups of {ranks}.")
    total = microbatches * chunks

    def at(kind, k):
        group, place = divmod(k, ranks * chunks)
        chunk, within = divmod(place, ranks)
        return Action(kind, group * ranks + within, chunk if kind == "F" else chunks - 1 - chunk)

    ahead = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
    ahead = total if ahead > total else ahead
    order = [at("F", k) for k in range(ahead)]
    for k in range(ahead, total):
        order.append(at("F", k))
        order.append(at("B", k - ahead))
    order.extend(at("B", k) for k in range(total - ahead, total))
    return order


def interleaved__by_slots(rank, ranks, microbatches, chunks):
    """As the contract says it: the slot of the first backward pass, and turns from there."""
    if microbatches not in range(0, microbatches + 1, ranks):
        raise SettingError("The last group is not full.")
    forward, backward = deque(), deque()
    for start in range(0, microbatches, ranks):
        for chunk in range(chunks):
            forward.extend(Action("F", start + own, chunk) for own in range(ranks))
            backward.extend(Action("B", start + own, chunks - 1 - chunk) for own in range(ranks))
    last_begins = ranks - 1 + (chunks - 1) * ranks + 1
    slot, actions = rank, []
    while forward and slot < last_begins + ranks - 1 - rank:
        actions.append(forward.popleft())
        slot += 1
    while backward:
        actions.append(backward.popleft())
        if forward:
            actions.append(forward.popleft())
    return actions


def interleaved__by_what_is_kept(rank, ranks, microbatches, chunks):
    """A bound on what is kept, in micro-batches of one chunk."""
    full, rest = divmod(microbatches, ranks)
    if rest:
        raise SettingError(f"Give {full * ranks + ranks} micro-batches.")
    order = sorted((own // ranks, chunk, own) for own in range(microbatches) for chunk in range(chunks))
    forward = [Action("F", own, chunk) for _, chunk, own in order]
    order = sorted((own // ranks, -chunk, own) for own in range(microbatches) for chunk in range(chunks))
    backward = [Action("B", own, -chunk) for _, chunk, own in order]
    most, actions, done = chunks * ranks + 2 * (ranks - rank) - ranks - 1, [], 0
    for number, action in enumerate(forward):
        actions.append(action)
        if number - done + 1 >= most:
            actions.append(backward[done])
            done += 1
    return actions + backward[done:]


def simulate__by_events(schedule, chunks, seconds, transfer=0.0):
    """The next event is the earliest one: a rank is free, or a message is there."""
    ranks = len(schedule)
    rows, there, waiting = [[] for _ in range(ranks)], {}, {}
    events = [(0.0, rank) for rank in range(ranks)]
    heapq.heapify(events)
    free = [0.0] * ranks
    while events:
        now, rank = heapq.heappop(events)
        if len(rows[rank]) == len(schedule[rank]) or now < free[rank]:
            continue
        action = schedule[rank][len(rows[rank])]
        stage = action.chunk * ranks + rank
        source = {"F": stage - 1, "W": None}.get(action.kind, stage + 1)
        if source is not None and 0 <= source < ranks * chunks:
            key = (action.kind == "F", source, action.microbatch)
            if key not in there:
                waiting[key] = rank
                continue
            if there[key] > now:
                heapq.heappush(events, (there[key], rank))
                continue
        end = now + seconds(action, stage)
        rows[rank].append((now, end))
        free[rank] = end
        heapq.heappush(events, (end, rank))
        if action.kind != "W":
            key = (action.kind == "F", stage, action.microbatch)
            there[key] = end if ranks == 1 else end + transfer
            if key in waiting:
                heapq.heappush(events, (there[key], waiting.pop(key)))
    return rows


def simulate__by_counting_what_is_left(schedule, chunks, seconds, transfer=0.0):
    """Each rank as a generator that yields while it waits."""
    p = len(schedule)
    done, rows = {}, [[] for _ in range(p)]

    def work(rank):
        clock = 0
        for action in schedule[rank]:
            s = rank + p * action.chunk
            if action.kind == "F" and s:
                need = ("F", s - 1, action.microbatch)
            elif action.kind in ("B", "I") and s + 1 < p * chunks:
                need = ("G", s + 1, action.microbatch)
            else:
                need = None
            while need is not None and need not in done:
                yield
            if need is not None:
                clock = max(clock, done[need] + (transfer if p > 1 else 0))
            start, clock = clock, clock + seconds(action, s)
            rows[rank].append((start, clock))
            if action.kind != "W":
                done["F" if action.kind == "F" else "G", s, action.microbatch] = clock

    running = [work(rank) for rank in range(p)]
    while running:
        running = [each for each in running if next(each, each) is not each]
    return rows


def simulate__by_relaxing(schedule, chunks, seconds, transfer=0.0):
    """All begins at 0, then pushed later until nothing changes; ranks in turns from both sides, so that waves run through."""
    ranks = len(schedule)
    places = {}
    for rank, actions in enumerate(schedule):
        for place, action in enumerate(actions):
            kind = {"F": "F", "B": "G", "I": "G"}.get(action.kind)
            if kind:
                places[kind, action.chunk * ranks + rank, action.microbatch] = rank, place
    lengths = [[seconds(action, action.chunk * ranks + rank) for action in actions] for rank, actions in enumerate(schedule)]
    begins = [[0.0] * len(actions) for actions in schedule]
    changed = True
    while changed:
        changed = False
        for rank in chain(range(ranks), reversed(range(ranks))):
            clock = 0.0
            for place, action in enumerate(schedule[rank]):
                stage = action.chunk * ranks + rank
                kind, source = ("F", stage - 1) if action.kind == "F" else ("G", stage + 1)
                found = places.get((kind, source, action.microbatch)) if action.kind != "W" else None
                if found is not None:
                    other, at = found
                    arrived = begins[other][at] + lengths[other][at]
                    clock = max(clock, arrived + transfer * (ranks > 1))
                if clock > begins[rank][place]:
                    begins[rank][place], changed = clock, True
                clock += lengths[rank][place]
    return [[(begin, begin + length) for begin, length in zip(*both)] for both in zip(begins, lengths)]


def balance_stages__by_recursion(blocks, stages, first=0, last=0):
    """From the front: the first stage's blocks, and the best of what is left, remembered."""
    total = len(blocks)
    if stages > total:
        raise SettingError("Each stage needs a block.")
    sums = [0, *accumulate(blocks)]

    @cache
    def best(start, stage):
        extra = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        if stage == stages - 1:
            return [sums[total] - sums[start] + extra], [total - start]
        found = None
        for stop in range(total - (stages - stage - 1), start, -1):
            costs, lengths = best(stop, stage + 1)
            candidate = sorted([sums[stop] - sums[start] + extra, *costs], reverse=True), [stop - start, *lengths]
            if found is None or candidate[0] < found[0] or (candidate[0] == found[0] and candidate[1] > found[1]):
                found = candidate
        return found

    edges = [0, *accumulate(best(0, 0)[1])]
    return [range(*pair) for pair in zip(edges, edges[1:])]


def balance_stages__from_the_front(blocks, stages, first=0, last=0):
    """Prefixes instead of suffixes; ties by the lengths from the front. The ends are put into the first and the last block."""
    blocks = list(blocks)
    if not len(blocks) >= stages:
        raise SettingError(f"{stages} stages, {len(blocks)} blocks.")
    blocks[0] += first
    blocks[-1] += last
    table = {0: ([], [])}
    for stage in range(1, stages + 1):
        following = {}
        for stop in range(stage, len(blocks) + 1):
            options = []
            for start, (costs, lengths) in table.items():
                if start < stop:
                    options.append((sorted(costs + [-sum(blocks[start:stop])]), [-length for length in lengths] + [start - stop]))
            following[stop] = min(options, key=lambda option: ([-cost for cost in option[0]], option[1]))
            following[stop] = following[stop][0], [-length for length in following[stop][1]]
        table = following
    start, result = 0, []
    for length in table[len(blocks)][1]:
        result.append(range(start, start + length))
        start += length
    return result
