"""What the checks of chapter 08 share: schedules in words, PyTorch's own lists, and what a schedule is like as a whole."""

from collections.abc import Callable

from shared.course.checking import SHAPE, Case
from shared.course.comparing import Said
from shared.parallel.pipeline.schedules import Action
from shared.parallel.pipeline.simulate import ScheduleError, make_timeline

CONTRACT = "the contract"
DRAWING = "the contract's drawing"
PYTORCH = "PyTorch: torch.distributed.pipelining.schedules"
BY_LINE = 8  # actions of a list that are compared and printed together


def word(action) -> str:
    """An action as the drawings write it, or what stands in its place."""
    if type(action) is not Action:
        return f"{type(action).__name__} {action!r}"
    odd = [type(field).__name__ for field, kind in zip(action, (str, int, int), strict=True) if type(field) is not kind]
    return f"Action with {odd[0]}" if odd else f"{action.kind}{action.microbatch}" + "'" * action.chunk


def in_lines(words: list[str]) -> dict[str, list[str]]:
    """A list in pieces, so that a difference in a long one can be seen."""
    if len(words) <= 12:
        return {"actions": words}
    return {f"actions {start + 1} to {start + BY_LINE}": words[start : start + BY_LINE] for start in range(0, len(words), BY_LINE)}


def listed(function: Callable, **given) -> dict:
    """The actions of one rank."""
    actions = function(**given)
    return in_lines([*map(word, actions)]) if type(actions) is list else {"actions": Said(f"a {type(actions).__name__}, not a list")}


def of_what(function: Callable, **given) -> dict:
    """How many of what an answer returns, in what."""
    actions = function(**given)
    if type(actions) is not list:
        return {"actions": Said(f"a {type(actions).__name__}, not a list")}
    kinds = sorted({word(action).partition(" ")[0] if type(action) is not Action else form_of(action) for action in actions})
    return {"actions": Said(f"a list of {len(actions)}: {', '.join(kinds)}")}


def form_of(action: Action) -> str:
    return f"Action of {', '.join(type(field).__name__ for field in action)}"


def tell(text: str) -> Callable:
    """Expected: these actions."""
    return lambda **_: in_lines(text.split())


def many(count: int) -> Callable:
    return lambda **_: {"actions": Said(f"a list of {count}: Action of str, int, int")}


def refused(**_) -> dict:
    return {"raised": "SettingError"}


def given(**arguments) -> Callable:
    return lambda: dict(arguments)


def case(rung: str, title: str, arguments: dict, expected: Callable, source: str = CONTRACT, observe: Callable | None = None) -> Case:
    return Case(rung, title, given(**arguments), expected, source, observe or (of_what if rung == SHAPE else listed))


def every_rank(function: Callable, sizes: list[dict]) -> dict:
    """The lists of all ranks, for several sizes of pipelines."""
    found = {}
    for size in sizes:
        name = ", ".join(f"{count} {what}" for what, count in size.items())
        for rank in range(size["ranks"]):
            found |= {f"{name}: rank {rank}, {place}": words for place, words in listed(function, rank=rank, **size).items()}
    return found


def by_torch(name: str, ranks: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """The order of one of PyTorch's schedules, without stages or processes: its generators are private."""
    from torch.distributed.pipelining import schedules  # here: it takes a second

    cls = getattr(schedules, name)
    made = object.__new__(cls)
    made.pp_group_size, made._num_stages, made._n_microbatches, made.n_local_stages = ranks, ranks * chunks, microbatches, chunks
    if not hasattr(cls, "_calculate_single_rank_operations"):
        order = made._get_pipeline_order()
    else:
        made.number_of_rounds = max(1, microbatches // ranks)
        made.microbatches_per_round = microbatches // made.number_of_rounds
        made._stages = [None] * chunks
        order = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    kept = [[action for action in order[rank] if action is not None and action.computation_type.value in "FBIW"] for rank in range(ranks)]
    lists = [[Action(a.computation_type.value, a.microbatch_index, a.stage_index // ranks) for a in own] for own in kept]
    if name == "Schedule1F1B":  # on the last rank it counts forward passes from 1
        lists[-1] = [a._replace(microbatch=a.microbatch - (a.kind == "F")) for a in lists[-1]]
    return lists


def of_pytorch(name: str) -> Callable:
    """Expected of `every_rank`: PyTorch's lists."""
    return lambda sizes: every_rank(lambda rank, ranks, **size: by_torch(name, ranks, **size)[rank], sizes)


def as_a_whole(function: Callable, ranks: int, **sizes) -> dict:
    """Whether the lists of all ranks can run together, how long they take in slots, and what each rank keeps."""
    lists = [function(rank=rank, ranks=ranks, **sizes) for rank in range(ranks)]
    try:
        timeline = make_timeline(lists, sizes["microbatches"], sizes.get("chunks", 1), SLOTS)
    except ScheduleError as fault:
        return {"it can run": str(fault)}
    return {"it can run": "yes", "slots": timeline.seconds, "activations kept by rank": timeline.most}


class Slots:
    """Every pass takes one slot."""

    transfer = 0.0

    def of(self, action: Action, stage: int) -> float:
        return 1.0


SLOTS = Slots()


def twice(function: Callable, **given) -> dict:
    """A second call after the caller has changed the first one's list, and after a call for another rank."""
    own, other = dict(given), given | {"rank": given["ranks"] - 1 - given["rank"]}
    mine = function(**own)
    mine.clear()
    function(**other).pop()
    return listed(function, **own)
