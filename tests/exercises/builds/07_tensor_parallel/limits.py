"""Build 07: calls that a stage must make, budgets of calls, bytes and memory (stage 8), and refused input (stage 9).

Budgets are counted from communication traces, from the tensors that operations make, and from what autograd saves for the backward pass.
"""

import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads

from .pieces import Results, config_of, in_letters, stream, tokens, weights_of

WITHIN = "within the budget"
NO_CALLS = "none: ranks that compute parts must add them up"
TEXT = "the text of build.py: stage {}"
BYTES = 8  # of a number in float64
BATCH = 2


def budget(value: int, limit: int, unit: str) -> str:
    return WITHIN if value <= limit else f"{value:,} {unit}, and the budget is {limit:,}"


def run_step(adapters: Any, ranks: int, by_sequence: bool, length: int, sizes: dict, around: Callable) -> list[tuple[Any, Communicator]]:
    """One loss_and_gradients on every rank: what `around(state)` watched, and the rank's communicator with its trace."""
    config = config_of(sizes)
    ids, targets = tokens(config, length, BATCH)

    def on_rank(world: Communicator) -> tuple[Any, Communicator]:
        model = adapters.make_model(config, weights_of(config), world, by_sequence)
        world.trace.clear()
        with around(dict(adapters.state(model))) as watched:
            adapters.loss_and_gradients(model, ids, targets)
        return watched, world

    return run_threads(on_rank, ranks)


class LargestTensor(TorchDispatchMode):
    """The most numbers that a new tensor had."""

    def __init__(self, state: dict[str, Tensor]):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        result = function(*arguments, **named or {})
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.numel())
        return result


class MadeFrom(TorchDispatchMode):
    """Follows which memory holds numbers that were computed from given tensors, on the thread that enters it."""

    def __init__(self, given: dict[str, Tensor]):
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given.values()}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}  # address -> the storage, and its bytes

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        before = [tensor.untyped_storage() for tensor in tensors_in([*arguments, *(named or {}).values()])]
        result = function(*arguments, **named or {})
        is_made = any(each.data_ptr() in self.given or each.data_ptr() in self.made for each in before)
        for storage in (tensor.untyped_storage() for tensor in tensors_in([result])):
            if is_made and storage.data_ptr() not in self.given:
                self.made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
            else:
                self.made.pop(storage.data_ptr(), None)  # new numbers where others lay
        return result

    def bytes_alive(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among values, and in lists among them."""
    found = []
    for value in values:
        found += [value] if isinstance(value, Tensor) else tensors_in(value) if isinstance(value, list | tuple) else []
    return found


@contextmanager
def saved_bytes(state: dict[str, Tensor]):
    """Watches what autograd saves for the backward pass, weights apart: storage -> its bytes and a number that equal tensors share."""
    weights = {part.untyped_storage().data_ptr() for part in state.values()}
    kept: dict[int, tuple[int, float]] = {}
    alive = []  # so that no storage is freed and its address used again while they are counted

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), round(tensor.detach().double().square().sum().item(), 6)
            alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield kept
    alive.clear()


@contextmanager
def nothing(state: dict[str, Tensor]):
    yield None


def traffic(world: Communicator) -> tuple[int, int]:
    """Calls, and bytes as a ring moves them: an all-reduce is a reduce-scatter and an all-gather, so it counts twice."""
    calls, sizes = world.trace.calls(), world.trace.bytes()
    return sum(calls.values()), sum(size * (2 if operation == "all_reduce" else 1) for (operation, _), size in sizes.items())


def communication_case(title: str, by_sequence: bool) -> Case:
    """What one more layer costs, and what the model costs without its layers."""
    ranks, length = 2, 8
    given = {"ranks": ranks, "sequence_parallel": by_sequence, "ids": [BATCH, length], "layers": "1 and 3, for what a layer adds"}
    width = config_of({}).hidden_size
    stream = BATCH * length * width * BYTES
    extra = 4 * width * BYTES * 2 if by_sequence else 0  # gradients of norms and of two biases, summed over the ranks
    # Sequence parallelism may gather what a sublayer or the head reads once more in the backward pass instead of keeping it.
    calls_limit, bytes_limit = (14, 10 * stream + extra) if by_sequence else (4, 8 * stream)
    rest_limit = (5 if by_sequence else 4) * stream + 2 * 4 * BATCH * length * BYTES + 2 * 2 * width * BYTES

    def observe(adapters: Any, **_: Any) -> Results:
        found = {}
        for layers in (1, 3):
            steps = run_step(adapters, ranks, by_sequence, length, {"num_hidden_layers": layers}, nothing)
            found[layers] = traffic(steps[0][1])
        layer = [(more - one) // 2 for one, more in zip(found[1], found[3], strict=True)]
        return {
            "calls of one layer, forward and backward": budget(layer[0], calls_limit, "calls") if layer[0] else NO_CALLS,
            "bytes of one layer": budget(layer[1], bytes_limit, "bytes"),
            "bytes of everything but layers": budget(found[1][1] - layer[1], rest_limit, "bytes"),
        }

    expected = lambda **_: {  # noqa: E731
        name: WITHIN for name in ("calls of one layer, forward and backward", "bytes of one layer", "bytes of everything but layers")
    }
    return Case("budget", title, lambda: given, expected, TEXT.format(8), observe)


def sent_case(part: str) -> Case:
    """Of a layer that is cut something must travel, forward and backward."""
    ranks, config, about = 2, config_of({}), f"calls of {part}"
    given = {"ranks": ranks, "sizes": in_letters({})}

    def on_rank(world: Communicator, adapters: Any) -> str:
        model = adapters.make_model(config, weights_of(config), world, False)
        x, counts = stream(config, 3).requires_grad_(), []
        world.trace.clear()
        y = getattr(adapters, part)(model, 0, x)
        counts.append(len(world.trace.entries))
        torch.autograd.grad(y, x, torch.ones_like(y))
        counts.append(len(world.trace.entries) - counts[0])
        return WITHIN if all(counts) else f"{counts[0]} forward, {counts[1]} backward: ranks that compute parts must add them up"

    observe = lambda adapters, **_: {about: run_threads(on_rank, ranks, adapters)[0]}  # noqa: E731
    return Case("budget", f"calls of {part}, forward and backward", lambda: given, lambda **_: {about: WITHIN}, TEXT.format(2), observe)


def cut_stream_case() -> Case:
    """Under sequence parallelism the stream is reduce-scattered, and never all-reduced."""
    ranks, length, sizes = 2, 8, {"num_hidden_layers": 1}
    given = {"ranks": ranks, "sequence_parallel": True, "ids": [BATCH, length], "sizes": in_letters(sizes)}
    whole = BATCH * length * config_of(sizes).hidden_size * BYTES

    def observe(adapters: Any, **_: Any) -> Results:
        entries = run_step(adapters, ranks, True, length, sizes, nothing)[0][1].trace.entries
        sums = [entry.operation for entry in entries if entry.operation == "reduce_scatter" or entry.bytes >= whole]
        return {"some reduce-scatters": "reduce_scatter" in sums, "all-reduces of the stream": sums.count("all_reduce")}

    expected = lambda **_: {"some reduce-scatters": True, "all-reduces of the stream": 0}  # noqa: E731
    return Case("budget", "the stream is reduce-scattered, not all-reduced", lambda: given, expected, TEXT.format(7), observe)


def largest_case(title: str, what: str, limit: int, length: int, **sizes: int) -> Case:
    ranks = 4  # so that a rank may put three parts together and still be below the limit
    given = {"ranks": ranks, "ids": [BATCH, length], "sizes": in_letters(sizes), "numbers in what is too large": limit}

    def observe(adapters: Any, **_: Any) -> Results:
        steps = run_step(adapters, ranks, False, length, sizes, LargestTensor)
        numbers = max(watched.numbers for watched, _ in steps)
        return {what: WITHIN if numbers < limit else f"a tensor of {numbers:,} numbers was made"}

    return Case("budget", title, lambda: given, lambda **_: {what: WITHIN}, TEXT.format(8), observe)


def activations_case(title: str, ranks: int) -> Case:
    """Of the whole stream a rank may keep what the sublayers and the head gathered. Norms keep their own positions."""
    length, layers, about = 16, 2, "tensors of the whole stream [B, S, D] that are kept for the backward pass"
    given = {"ranks": ranks, "sequence_parallel": True, "ids": [BATCH, length], "layers": layers}
    whole = BATCH * length * config_of({}).hidden_size * BYTES

    def observe(adapters: Any, **_: Any) -> Results:
        steps = run_step(adapters, ranks, True, length, {"num_hidden_layers": layers}, saved_bytes)
        kept = [content for size, content in steps[0][0].values() if size == whole]
        said = budget(len(kept), 2 * layers + 1, "tensors")
        copies = len(kept) - len(set(kept))
        return {about: said if said == WITHIN or not copies else f"{said}; {copies} of them are copies of another"}

    return Case("budget", title, lambda: given, lambda **_: {about: WITHIN}, TEXT.format(8), observe)


def refusal_case(title: str, said: str, ranks: int, use: Callable | None, by_sequence: bool = False, **sizes: int) -> Case:
    """A ValueError (or IndexError) on every rank, whose sentence holds the numbers in `said`. use: None where make_model must refuse."""
    given = {"ranks": ranks, "sequence_parallel": by_sequence, "sizes": in_letters(sizes)}
    config, wanted = config_of(sizes), f"ValueError that says {said}, and nothing sent"

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(world: Communicator) -> str:
            try:
                model = adapters.make_model(config, weights_of(config), world, by_sequence)
                if use is None:
                    return "make_model accepted it"
                world.trace.clear()
                use(adapters, model)
                return "accepted"
            except (ValueError, IndexError) as error:
                told = set(re.findall(r"-?\d+", str(error))) >= set(re.findall(r"-?\d+", said))
                if sent := world.trace.entries:
                    return f"{type(error).__name__} after {len(sent)} calls, the first {sent[0].description}"
                return wanted if told else f"{type(error).__name__}, which does not say {said}: {error}"

        return {f"rank {rank}": result for rank, result in enumerate(run_threads(on_rank, ranks))}

    expected = lambda **_: {f"rank {rank}": wanted for rank in range(ranks)}  # noqa: E731
    return Case("property", title, lambda: given, expected, TEXT.format(9), observe)


def step_with(ids: list[list[int]], targets: list[list[int]]) -> Callable[[Any, Any], Any]:
    return lambda adapters, model: adapters.loss_and_gradients(model, torch.tensor(ids), torch.tensor(targets))


BUDGETS = (  # fmt: skip
    communication_case("calls and bytes of a layer", False),
    largest_case("no rank makes the logits of all tokens", "the largest tensor", BATCH * 24 * 509, 24, vocab_size=509, num_hidden_layers=1),
    largest_case(
        "no rank makes a whole matrix", "the largest tensor", 240 * 24, 1,
        vocab_size=240, intermediate_size=240, head_dim=60, num_hidden_layers=1,
    ),
    communication_case("calls and bytes of a layer under sequence parallelism", True),
    activations_case("what sequence parallelism keeps for the backward pass", 2),
    activations_case("the same on four ranks", 4),
)
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
BAD_INPUT = (
    refusal_case("six heads on four ranks", "6 and 4", 4, None, **HEADS),
    refusal_case("thirty inner features on four ranks", "30 and 4", 4, None, intermediate_size=30),
    refusal_case("three key-value heads on two ranks", "3 and 2", 2, None, **HEADS),
    refusal_case("a sequence that cannot be cut", "7 and 2", 2, step_with([[1] * 7], [[2] * 7]), by_sequence=True),
    refusal_case("an id above the vocabulary", "53", 2, step_with([[1, 53]], [[2, 3]])),
    refusal_case("a negative id", "-1 and 53", 2, step_with([[1, -1]], [[2, 3]])),
    refusal_case("a target above the vocabulary", "53", 2, step_with([[1, 2]], [[2, 53]])),
    refusal_case("a negative target other than -100", "-7 and 53", 2, step_with([[1, 2]], [[2, -7]])),
)
