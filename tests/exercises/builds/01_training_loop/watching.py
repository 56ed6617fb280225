"""Watches what tensors are made, and how many bytes of them are alive."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Watch(TorchDispatchMode):
    """most: the most bytes of tensors made within it that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in tensors_in([*arguments, *(named or {}).values()])}
        result = function(*arguments, **named or {})
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.alive())
        return result

    def alive(self) -> int:
        self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
        return sum(size for _, size in self.storages.values())
