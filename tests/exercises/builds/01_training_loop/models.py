"""Stage 2 of build 01: a byte model of any design that is causal, small and without an opinion at first."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shared.course.checking import Case

from .pieces import TEXT, WITHIN, Results, budget, refill, text_of


def model_case(title: str, names: dict[str, Any], look: Callable[[Any], Results], given: Results | None = None) -> Case:
    return Case("property", title, lambda: given or {"seed": 3}, lambda **_: names, TEXT.format(2), lambda adapters, **_: look(adapters))


def ids_of(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return text_of(rows * columns, seed).long().view(rows, columns)


def form_of_model(adapters: Any) -> Results:
    model, found = adapters.new_model(3), {}
    for rows, columns in ((1, 1), (2, 3), (3, 64), (1, 256)):
        logits = model(ids_of(rows, columns))
        finite = "finite" if logits.isfinite().all() else "not finite"
        found[f"logits for {rows} x {columns} ids"] = f"{list(logits.shape)} {logits.dtype}, {finite}"
    return {"is a module": isinstance(model, nn.Module)} | found


FORM = {f"logits for {r} x {c} ids": f"[{r}, {c}, 256] torch.float32, finite" for r, c in ((1, 1), (2, 3), (3, 64), (1, 256))}


def size_of_model(adapters: Any) -> Results:
    model = adapters.new_model(3)
    tensors = {each.data_ptr(): each.nbytes for each in [*model.parameters(), *model.buffers()]}
    return {"bytes of parameters and buffers": budget(sum(tensors.values()), 2_000_000, "bytes")}


def filled(adapters: Any, seed: int) -> nn.Module:
    model = adapters.new_model(3).eval()
    refill(model, seed)
    return model


@torch.no_grad()
def causality(adapters: Any) -> Results:
    """Change one id, at every place, or cut the row off: what comes before is as it was."""
    model, found = filled(adapters, 5), {}
    for columns in (2, 9, 40):
        ids = ids_of(1, columns, seed=columns)
        base, others = model(ids), model(each_changed(ids))
        early = [place for place in range(columns) if moved(others[place, :place], base[0, :place])]
        found[f"of {columns} places, changed ids that earlier logits show"] = early
        back = [place - before for place in early for before in range(place) if moved(others[place, before], base[0, before])]
        found[f"of {columns} places, how far back they show"] = max(back, default=0)
        shorter = [place for place in (1, columns // 2, columns - 1) if moved(model(ids[:, :place]), base[:, :place])]
        found[f"of {columns} places, ends of the row that earlier logits show"] = shorter
    return found


def each_changed(ids: torch.Tensor) -> torch.Tensor:
    """ids: one row. As many rows as it has places, in each of which the id of one place is another one."""
    places = torch.arange(ids.shape[1])
    rows = ids.repeat(len(places), 1)
    rows[places, places] = (rows[places, places] + 91) % 256
    return rows


def moved(one: torch.Tensor, other: torch.Tensor, much: float = 1e-3) -> bool:
    """By more than rounding: float32 sums of another order differ by some 1e-6 of their size."""
    return other.numel() > 0 and not bool((one - other).abs().max() <= much * (1 + other.abs().max()))


CAUSAL: Results = {f"of {n} places, {what} that earlier logits show": [] for n in (2, 9, 40) for what in ("changed ids", "ends of the row")}
CAUSAL |= {f"of {n} places, how far back they show": 0 for n in (2, 9, 40)}


@torch.no_grad()
def memory_of_model(adapters: Any) -> Results:
    """An id is seen where a change of it shows at one place at least, with one of three sets of parameters."""
    ids, seen = ids_of(1, 24, seed=1), set()
    for seed in (6, 7, 8):
        model = filled(adapters, seed)
        base, others = model(ids)[0], model(each_changed(ids))
        places = [(place, back) for place in range(3, 24) for back in range(4)]
        seen |= {back for place, back in places if moved(others[place - back, place], base[place], 1e-5)}
    return {"ids that the logits do not show, counted back from their place": sorted({0, 1, 2, 3} - seen)}


@torch.no_grad()
def rows_of_model(adapters: Any) -> Results:
    model = filled(adapters, 7)
    ids = ids_of(5, 20, seed=2)
    together = model(ids)
    found = {"a row alone gives other logits": [n for n in range(5) if moved(model(ids[n : n + 1]), together[n : n + 1])]}
    return found | {"the same ids twice give the same": bool(torch.equal(model(ids), model(ids)))}


@torch.no_grad()
def opinion_of_model(adapters: Any) -> Results:
    found = {}
    texts = {"random bytes": ids_of(4, 65, seed=3), "nothing but spaces": torch.full((2, 65), 32), "letters": ids_of(4, 65) % 26 + 97}
    for seed in (0, 3):
        model = adapters.new_model(seed)
        for name, ids in texts.items():
            bits = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item() / math.log(2)
            found[f"{name}, seed {seed}"] = "7 to 9 bits" if 7 <= bits <= 9 else f"{bits:.2f} bits"
    return found


OPINION = {f"{name}, seed {seed}": "7 to 9 bits" for seed in (0, 3) for name in ("random bytes", "nothing but spaces", "letters")}


def seeds_of_model(adapters: Any) -> Results:
    def numbers(seed: int, other: int) -> torch.Tensor:
        torch.manual_seed(other)
        return torch.cat([weight.detach().flatten() for weight in adapters.new_model(seed).parameters()])

    first = numbers(3, 1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    adapters.new_model(4)
    as_it_was = bool(torch.equal(before, torch.get_rng_state()))
    return {
        "the same seed, the same parameters": bool(torch.equal(first, numbers(3, 2))),
        "another seed, other parameters": not torch.equal(first, numbers(4, 1)),
        "the global generator is as it was": as_it_was,
    }


SEEDS = ("the same seed, the same parameters", "another seed, other parameters", "the global generator is as it was")

MODEL = (
    model_case("logits of any sizes", {"is a module": True} | FORM, form_of_model),
    model_case("no logit sees a later id", CAUSAL, causality),
    model_case("four ids are seen", {"ids that the logits do not show, counted back from their place": []}, memory_of_model),
    model_case("rows are apart", {"a row alone gives other logits": [], "the same ids twice give the same": True}, rows_of_model),
    model_case("no opinion yet", OPINION, opinion_of_model, {"seeds": [0, 3]}),
    model_case("seeds", dict.fromkeys(SEEDS, True), seeds_of_model, {"seeds": [3, 4]}),
    model_case("small", {"bytes of parameters and buffers": WITHIN}, size_of_model),
)
