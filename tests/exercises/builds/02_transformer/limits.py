"""Stage 11 of build 02: budgets of bytes, of floating-point operations, and of angles."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shared.course.checking import Case

from .pieces import GROUPED, PLAIN, TEXT, TIED, WIDE, WITHIN, Config, Results, budget, folder_of, ids_of, said

ANGLES = ("cos", "sin", "polar", "sincos")


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Watch(TorchDispatchMode):
    """Watches the bytes of tensors that are made: those that are alive, and the most of them at a time. Counts the numbers of which
    cosines and sines are made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.angles: Counter[str] = Counter()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in tensors_in([*arguments, *(named or {}).values()])}
        result = function(*arguments, **named or {})
        name = function.overloadpacket.__name__.rstrip("_")
        if name in ANGLES:
            self.angles[name] += max(tensor.numel() for tensor in tensors_in([result]))
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.alive())
        return result

    def alive(self) -> int:
        """Bytes of the tensors that were made and still are."""
        self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
        return sum(size for _, size in self.storages.values())


COLUMNS = 512
HEADS = PLAIN | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 32, "intermediate_size": 40}
WORDS = HEADS | {"vocab_size": 4000, "num_attention_heads": 1, "num_key_value_heads": 1}


def peak_case(title: str, about: str, config: Config, columns: int, limit: int, borders: tuple[int, ...] = ()) -> Case:
    """borders: columns at which a new document begins."""
    ids = ids_of(1, columns, config)
    numbers = sum((torch.arange(columns) >= border).long() for border in borders)[None] if borders else None

    def observe(adapters: Any, **_: Any) -> Results:
        model = adapters.load(folder_of(config))
        with Watch() as watch:
            value = adapters.loss(model, ids) if numbers is None else adapters.loss(model, ids, numbers)
            value.backward()
        return {about: budget(watch.most, limit, "bytes")}

    given = {"ids": [1, columns], "documents that begin at": [0, *borders]} | said(config)
    return Case("budget", title, lambda: given, lambda **_: {about: WITHIN}, TEXT.format(11), observe)


SCORES, LOGITS = "bytes at the peak, where scores have 8 heads", "bytes at the peak, where the vocabulary is large"


def kept_case() -> Case:
    """After the loss, before its backward pass: what the graph holds."""
    about = "bytes that the graph holds"
    ids = ids_of(1, COLUMNS, HEADS)

    def observe(adapters: Any, **_: Any) -> Results:
        model = adapters.load(folder_of(HEADS))
        with Watch() as watch:
            value = adapters.loss(model, ids)
            held = watch.alive()
        value.backward()
        return {about: budget(held, 8 * COLUMNS * COLUMNS * 4, "bytes")}

    given = {"ids": [1, COLUMNS]} | said(HEADS)
    return Case("budget", "scores are not kept", lambda: given, lambda **_: {about: WITHIN}, TEXT.format(11), observe)


def operations_case(title: str, config: Config, rows: int, columns: int) -> Case:
    ids, about = ids_of(rows, columns, config), "floating-point operations"
    each = config["head_dim"]
    queries, others = config["num_attention_heads"] * each, config["num_key_value_heads"] * each
    layer = config["hidden_size"] * (2 * queries + 2 * others + 3 * config["intermediate_size"])
    matrices = config["num_hidden_layers"] * layer + config["vocab_size"] * config["hidden_size"]
    limit = 2 * rows * columns * matrices + 4 * rows * columns * columns * queries * config["num_hidden_layers"]

    def observe(adapters: Any, **_: Any) -> Results:
        model = adapters.load(folder_of(config))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            adapters.logits(model, ids)
        return {about: budget(counter.get_total_flops(), limit, "operations")}

    given = {"ids": [rows, columns]} | said(config)
    return Case("budget", title, lambda: given, lambda **_: {about: WITHIN}, TEXT.format(11), observe)


def angles_case(title: str, config: Config, rows: int, columns: int) -> Case:
    ids, about = ids_of(rows, columns, config), "cosines, or sines"
    limit = columns * config["head_dim"]

    def observe(adapters: Any, **_: Any) -> Results:
        model = adapters.load(folder_of(config))
        with torch.no_grad(), Watch() as watch:
            adapters.logits(model, ids)
        return {about: budget(max(watch.angles.values(), default=0), limit, "numbers")}

    given = {"ids": [rows, columns]} | said(config)
    return Case("budget", title, lambda: given, lambda **_: {about: WITHIN}, TEXT.format(11), observe)


ONE = 8 * COLUMNS * COLUMNS * 4
BUDGETS = (
    operations_case("each matrix once", GROUPED, 2, 9),
    operations_case("each matrix once, one key-value head", WIDE, 3, 7),
    operations_case("each matrix once, in short rows", GROUPED, 20, 2),
    operations_case("each matrix once, tied", TIED, 1, 20),
    angles_case("one table for all layers", PLAIN | {"num_hidden_layers": 4}, 1, 9),
    angles_case("one table for all rows", GROUPED, 5, 12),
    kept_case(),
    peak_case("scores are never whole", SCORES, HEADS, COLUMNS, ONE),
    peak_case("scores are never whole, with documents", SCORES, HEADS, COLUMNS, ONE, (100, 101, 300)),
    peak_case("scores are never whole, twice as long", SCORES, HEADS, 2 * COLUMNS, 4 * ONE, (1000,)),
    peak_case("logits are never whole", LOGITS, WORDS, 2 * COLUMNS, 2 * COLUMNS * 4000 * 2),
    peak_case("logits are never whole, tied", LOGITS, WORDS | {"tie_word_embeddings": True}, 2 * COLUMNS, 2 * COLUMNS * 4000 * 2),
)
