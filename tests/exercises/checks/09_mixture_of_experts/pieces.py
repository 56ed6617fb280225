"""What the checks of chapter 09 share: gradients as results, and sorts as a GPU may do them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.course.comparing import Said


def unchanged(sent: list[int], received: list[int]) -> dict[str, Said]:
    """Numbers of rows, as they are after a call."""
    return {"`sent`, unchanged": Said(sent), "`received`, unchanged": Said(received)}


class TiesReversed(TorchDispatchMode):
    """Sorts that are not called stable put equal elements in reversed order, as they may do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten.sort.default or (function is torch.ops.aten.sort.stable and not kwargs.get("stable")):
            x, dim, descending = ([*args, *(kwargs.get("dim", -1), kwargs.get("descending", False))][place] for place in range(3))
            values, places = torch.ops.aten.sort.stable(x.flip(dim), stable=True, dim=dim, descending=descending)
            return values, x.shape[dim] - 1 - places
        return function(*args, **kwargs)
