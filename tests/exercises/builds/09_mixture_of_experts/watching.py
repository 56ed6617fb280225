"""What budgets of build 09 are counted with: matrix products, the largest tensor, and what is left in memory."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

WITHIN = "within the budget"
BYTES = 8  # of a number in float64


def budget(value: int, limit: int, unit: str) -> str:
    return WITHIN if value <= limit else f"{value:,} {unit}, and the budget is {limit:,}"


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among values, and in lists among them."""
    found = []
    for value in values:
        found += [value] if isinstance(value, Tensor) else tensors_in(value) if isinstance(value, list | tuple) else []
    return found


class Watch(TorchDispatchMode):
    """Watches the operations of one rank.

    products: how many matrix products of each kind ran. multiplications: of numbers, in all of them.
    largest: the most numbers that a new tensor had.
    """

    def __init__(self, outside: list[Tensor] = ()):
        super().__init__()
        self.products, self.multiplications, self.largest = Counter(), 0, 0
        self.outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        given = tensors_in([*arguments, *(named or {}).values()])
        before = {tensor.untyped_storage()._cdata for tensor in given}
        result = function(*arguments, **named or {})
        name = function._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            left, right = given[PRODUCTS[name] :][:2]
            self.products[name] += 1
            self.multiplications += left.numel() * (right.shape[-1] if right.dim() > 1 else 1)  # in a grouped product too
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self.largest = max(self.largest, tensor.numel())
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes_alive(self) -> int:
        """Of tensors that were made, the given ones apart."""
        return sum(size for key, (storage, size) in self.storages.items() if key not in self.outside and not storage.expired())


PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0, "mv": 0}  # where the two factors stand
