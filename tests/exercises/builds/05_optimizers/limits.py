"""Stage 9 of build 05: bytes of the state, bytes during a step, operators, and multiplications of Newton-Schulz. Counted, never timed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shared.course.checking import Case

from .pieces import MUON, TEXT, WITHIN, Named, Results, budget, give, made, parameters, randn, script, settings_of


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Watch(TorchDispatchMode):
    """Counts operators, and the bytes of tensors that are made: those that are alive, and the most of them at a time.

    What only looks at memory that is there already (a view, a detach) makes no bytes and counts as no operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self.calls = 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in tensors_in([*arguments, *(named or {}).values()])}
        result = function(*arguments, **named or {})
        self.calls += not function.is_view and "detach" not in str(function)
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.alive())
        return result

    def alive(self) -> int:
        self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
        return sum(size for _, size in self.storages.values())


def roles_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    return {
        name: {1: "norm", 2: "matrix", 3: "experts"}[len(shape)] if not name.startswith("table") else "embedding"
        for name, shape in shapes.items()
    }


def stepped(adapters: Any, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, watches: list[Watch]) -> Named:
    """An optimizer that is made and steps once under each watch; the first one also sees how it is made."""
    named, optimizer = parameters(shapes, dtype), None
    for watch, gradients in zip(watches, script(named, len(watches)), strict=True):
        give(named, gradients)
        with watch:
            if optimizer is None:
                optimizer = made(adapters, named, roles_of(shapes), settings_of())
            optimizer.step()
            watch.left = watch.alive()  # while the optimizer is there
    return named


ADAMW_ONLY = {f"table {number}": (50, 40) for number in range(4)} | {f"norm {number}": (300,) for number in range(4)}
MUON_ONLY = {f"matrix {number}": (40, 60) for number in range(4)} | {"experts": (3, 40, 50)}
STATE = "bytes that the optimizer holds after a step"


def state_case(title: str, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, each: int) -> Case:
    """each: bytes for each number; 64 for each parameter besides."""

    def observe(adapters: Any, **_: Any) -> Results:
        watches = [Watch(), Watch()]
        named = stepped(adapters, shapes, dtype, watches)
        numbers = sum(weight.numel() for weight in named.values())
        held = sum(watch.left for watch in watches)
        return {STATE: budget(held, each * numbers + 64 * len(named), "bytes")}

    given = {"shapes": shapes, "dtype": str(dtype), "bytes a number": each}
    return Case("budget", title, lambda: given, lambda **_: {STATE: WITHIN}, TEXT.format(9), observe)


def without_gradient_case() -> Case:
    """What never has a gradient needs no state; the text gives every parameter its budget, and those that move alone count here."""

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(ADAMW_ONLY | MUON_ONLY, torch.float32)
        optimizer = made(adapters, named, roles_of(ADAMW_ONLY | MUON_ONLY), settings_of())
        give(named, {})
        before = {name: weight.detach().clone() for name, weight in named.items()}
        optimizer.step()
        return {"moved": [name for name, weight in named.items() if not torch.equal(weight, before[name])]}

    return Case("property", "a step without gradients", lambda: {"gradients": None}, lambda **_: {"moved": []}, TEXT.format(9), observe)


def calls_case(few: int, many: int) -> Case:
    about = f"operators of a step with {many} AdamW parameters, beyond those with {few}"

    def calls(adapters: Any, count: int, dtype: torch.dtype) -> int:
        watches = [Watch(), Watch(), Watch()]
        stepped(adapters, {f"norm {number}": (5,) for number in range(count)}, dtype, watches)
        return watches[-1].calls

    def observe(adapters: Any, **_: Any) -> Results:
        found = calls(adapters, many, torch.float32) - calls(adapters, few, torch.float32)
        return {about: budget(found, 3 * (many - few), "operators")}

    return Case("budget", "many small tensors", lambda: {"parameters": [few, many]}, lambda **_: {about: WITHIN}, TEXT.format(9), observe)


def peak_case(title: str, shapes: dict[str, tuple[int, ...]], limit: int, says: str) -> Case:
    about = "bytes of new tensors, the most at a time during a step"

    def observe(adapters: Any, **_: Any) -> Results:
        watches = [Watch(), Watch(), Watch()]
        stepped(adapters, shapes, torch.float32, watches)
        return {about: budget(watches[-1].most, limit, "bytes")}

    return Case("budget", title, lambda: {"shapes": shapes, "budget": says}, lambda **_: {about: WITHIN}, TEXT.format(9), observe)


def bytes_of(shapes: dict[str, tuple[int, ...]]) -> list[int]:
    return [4 * torch.Size(shape).numel() for shape in shapes.values()]


MANY = {f"matrix {number}": (40, 60) for number in range(20)}


def multiplications(shape: tuple[int, ...], steps: int) -> int:
    """Twice the multiply-adds: X X^T, A A, and one product with X, with rows the smaller side."""
    *batch, one, other = shape
    rows, columns = min(one, other), max(one, other)
    return torch.Size(batch).numel() * steps * 2 * (2 * rows * rows * columns + rows**3)


def multiplications_case(title: str, shape: tuple[int, ...], steps: int = 5) -> Case:
    about = "floating-point operations of matrix products"

    def observe(adapters: Any, **_: Any) -> Results:
        with FlopCounterMode(display=False) as counter:
            adapters.newton_schulz(randn(*shape, seed=2), steps, MUON["ns_coefficients"], 1e-7)
        return {about: budget(counter.get_total_flops(), multiplications(shape, steps), "operations")}

    return Case("budget", title, lambda: {"shape": shape, "steps": steps}, lambda **_: {about: WITHIN}, TEXT.format(9), observe)


def batch_case() -> Case:
    """Three experts or twelve: as many operators."""
    about = "operators for 12 matrices, beyond those for 3"

    def observe(adapters: Any, **_: Any) -> Results:
        counts = []
        for experts in (3, 12):
            matrices = randn(experts, 6, 4)
            with Watch() as watch:
                adapters.newton_schulz(matrices, 5, MUON["ns_coefficients"], 1e-7)
            counts.append(watch.calls)
        return {about: budget(counts[1] - counts[0], 0, "operators")}

    return Case("budget", "a batch at once", lambda: {"matrices": [3, 12]}, lambda **_: {about: WITHIN}, TEXT.format(9), observe)


BUDGETS = (
    without_gradient_case(),
    state_case("AdamW's state", ADAMW_ONLY, torch.float32, 8),
    state_case("Muon's state", MUON_ONLY, torch.float32, 4),
    state_case("AdamW's state of bfloat16", ADAMW_ONLY, torch.bfloat16, 12),
    state_case("Muon's state of bfloat16", MUON_ONLY, torch.bfloat16, 8),
    calls_case(10, 60),
    peak_case("AdamW's step", ADAMW_ONLY, 2 * sum(bytes_of(ADAMW_ONLY)), "twice all parameters"),
    peak_case("Muon's step", MANY, 8 * max(bytes_of(MANY)), "eight times the largest parameter"),
    peak_case("Muon's step, with experts", MUON_ONLY, 8 * max(bytes_of(MUON_ONLY)), "eight times the largest parameter"),
    multiplications_case("a wide matrix", (8, 100)),
    multiplications_case("a tall matrix", (100, 8)),
    multiplications_case("a square matrix", (20, 20), steps=3),
    multiplications_case("a batch of tall matrices", (4, 50, 6)),
    batch_case(),
)
