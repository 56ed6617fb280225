"""Check of 07.vocabulary_cross_entropy. Oracle: torch's cross_entropy and logsumexp of the logits of all ranks, side by side.

Ranks are threads, each with some columns of the logits. The argument `logits` is the whole; `sizes` says how many columns each rank has.

Tolerances. The oracle adds exponentials in another order: 1e-12 in float64, 1e-5 in float32 (also for logits in 16 bits, which are exact in
float32). Logits that differ by hundreds leave differences of hundreds of units in the last place: relative ones.
"""

import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check

from .ranks import CONTRACT, Used, over_ranks, randn, sent

THREE = "at most 3 tensors of its logits' shape"
ORACLE = "torch.nn.functional.cross_entropy and torch.logsumexp of all columns"


def of_odds(odds, targets, sizes):
    """Logits whose exponentials are `odds`."""
    return lambda: {"logits": torch.tensor(odds, dtype=torch.float64).log(), "targets": torch.tensor(targets), "sizes": sizes}


def drawn(rows: int, sizes, *, seed: int = 3, scale: float = 1.0, dtype=torch.float64, ignored: int = 7):
    def given():
        logits = (scale * randn(rows, sum(sizes), seed=seed)).to(dtype)
        targets = torch.randint(sum(sizes), (rows,), generator=torch.Generator().manual_seed(seed))
        targets[::ignored] = -100
        return {"logits": logits, "targets": targets, "sizes": sizes}

    return given


def columns(logits, sizes, rank):
    first = sum(sizes[:rank])
    return logits[:, first : first + sizes[rank]], first


def on_every_rank(function, logits, targets, sizes):
    def work(world):
        mine, first = columns(logits, sizes, world.rank)
        result = function(mine, targets, first, world)
        if not isinstance(result, tuple) or len(result) != 3:
            return {"returned something else than losses, normalizer, correct": True}
        return dict(zip(("losses", "normalizer", "correct"), result, strict=True))

    return over_ranks(work, len(sizes))


def at_once(logits, targets, sizes):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != -100
    chosen = wide.gather(-1, targets.where(counted, 0).unsqueeze(-1)).squeeze(-1)
    told = {
        "losses": F.cross_entropy(wide, targets, reduction="none"), "normalizer": wide.logsumexp(-1),
        "correct": counted & (chosen == wide.amax(-1)),
    }  # fmt: skip
    return {f"rank {rank}": told for rank in range(len(sizes))}


def used(function, logits, targets, sizes):
    """What is sent, and the most that new tensors hold, in tensors of the shape of this rank's logits."""

    def work(world):
        mine, first = columns(logits, sizes, world.rank)
        one = mine.numel() * torch.promote_types(mine.dtype, torch.float32).itemsize
        with Used() as counts:
            function(mine, targets, first, world)
        tensors = counts.peak / one
        return {"sent": sent(world), "holds": THREE if tensors <= 3.3 else f"{tensors:.1f} tensors of its logits' shape"}

    return over_ranks(work, len(sizes))


def two_reductions(logits, targets, sizes):
    by_row = len(targets) * torch.promote_types(logits.dtype, torch.float32).itemsize
    told = {"sent": [f"all_reduce of {by_row} bytes", f"all_reduce of {2 * by_row} bytes"]}
    told |= {"holds": THREE}
    return {f"rank {rank}": told for rank in range(len(sizes))}


def growth(function, logits, targets, sizes):
    """Whether ten times the rows take more operations."""

    def count(times: int) -> list[int]:
        def work(world):
            mine, first = columns(logits, sizes, world.rank)
            with Used() as counts:
                function(mine.repeat(times, 1), targets.repeat(times), first, world)
            return counts.operations

        return [*over_ranks(work, len(sizes)).values()]

    return {"more rows take more operations of torch": count(10) > count(1)}


def example(title, given, rung="worked example", source="arithmetic", expected=at_once, observe=on_every_rank, tolerance=1e-12):
    return Case(rung, title, given, expected, source, observe, rtol=tolerance, atol=tolerance)


def tell(losses, normalizer, correct, ranks):
    """Expected numbers, given as what they are the logarithms of."""
    log = lambda values: torch.tensor(values, dtype=torch.float64).log()  # noqa: E731
    told = {"losses": log(losses), "normalizer": log(normalizer), "correct": torch.tensor(correct)}
    return lambda **_: {f"rank {rank}": told for rank in range(ranks)}


def of_logits(logits, targets, sizes):
    return lambda: {"logits": torch.tensor(logits, dtype=torch.float64), "targets": torch.tensor(targets), "sizes": sizes}


def extreme():
    """Rows in which a rank's columns are far above the other's, or below, or all tie, or are so large that exponentials overflow."""
    logits = randn(6, 7, seed=5)
    logits[0, :4], logits[1, 4:], logits[2] = logits[0, :4] + 700, logits[1, 4:] + 900, 60.0
    logits[3], logits[4] = logits[3] - 3000, logits[4] + 3000
    return {"logits": logits, "targets": torch.tensor([1, 5, 2, 6, 3, 0]), "sizes": [4, 3]}


CHECK = Check(
    exercise="07.vocabulary_cross_entropy",
    outputs=("losses", "normalizer", "correct"),
    spoilt=("losses", "normalizer", "correct"),
    cases=[
        example("two ranks, float32 [5, 3 + 4]", drawn(5, [3, 4], dtype=torch.float32), "shape and dtype", CONTRACT),
        example("bfloat16: what is returned is float32", drawn(5, [3, 4], dtype=torch.bfloat16), "shape and dtype", CONTRACT),
        example(
            "one rank: e^logits are 1, 2 and 5, targets 1 and 2", of_odds([[1.0, 2.0, 5.0]] * 2, [1, 2], [3]),
            expected=tell([4.0, 1.6], [8.0, 8.0], [False, True], 1), source="arithmetic: 8 / 2, 8 / 5",
        ),
        example("two ranks have 1000, 1001 and 1002, 1001", of_logits([[1000.0, 1001.0, 1002.0, 1001.0]], [2], [2, 2]), source=ORACLE),
        example(
            "two ranks have 1, 2 and 5, 8: targets 0, 3", of_odds([[1.0, 2.0, 5.0, 8.0]] * 2, [0, 3], [2, 2]),
            expected=tell([16.0, 2.0], [16.0, 16.0], [False, True], 2), source="arithmetic: 16 / 1, 16 / 8",
        ),
        example(
            "three ranks: the target is the largest of its rank, and not of all", of_odds([[1.0, 2.0, 9.0, 4.0, 3.0, 1.0]], [3], [2, 2, 2]),
            expected=tell([5.0], [20.0], [False], 3), source="arithmetic: 20 / 4",
        ),
        example(
            "every token is a target once", of_odds([[7.0, 2.0, 3.0, 5.0, 3.0]] * 5, [0, 1, 2, 3, 4], [3, 2]),
            expected=tell([20 / 7, 10.0, 20 / 3, 4.0, 20 / 3], [20.0] * 5, [True, False, False, False, False], 2),
        ),
        example(
            "rows that do not count", of_odds([[4.0, 2.0, 1.0, 1.0]] * 2 + [[1.0, 0.5, 0.25, 0.25]], [-100, 0, -100], [2, 2]),
            expected=tell([1.0, 2.0, 1.0], [8.0, 8.0, 2.0], [False, True, False], 2),
            source="the contract: their loss is 0, their normalizer is not",
        ),
        example("no row counts", of_odds([[4.0, 2.0, 1.0]] * 2, [-100, -100], [1, 2]), "property", CONTRACT),
        example("columns of three ranks differ in number", drawn(23, [5, 4, 4]), "property", ORACLE),
        example("one column on a rank", drawn(11, [1, 6]), "property", ORACLE),
        example("all logits tie", lambda: drawn(5, [3, 3])() | {"logits": torch.full((5, 6), 2.5).double()}, "property", ORACLE),
        example(
            "a logit is the largest by a billionth", of_logits([[2.0, 1.0, 2.000000001]] * 2, [0, 2], [2, 1]), "property", ORACLE,
            tolerance=1e-9,
        ),
        example(
            "tokens that cannot be: logits of minus infinity",
            of_logits([[-torch.inf, 1.0, -torch.inf, 2.0], [-torch.inf, -torch.inf, 3.0, 1.0]], [1, 2], [2, 2]), "property", ORACLE,
        ),
        example("a logit that is NaN", of_logits([[1.0, 2.0, torch.nan], [1.0, 2.0, 3.0]], [1, 2], [2, 1]), "property", ORACLE),
        example("differences of hundreds and values of thousands", extreme, "property", ORACLE),
        example("thousands in float32", drawn(13, [5, 6], scale=3000.0, dtype=torch.float32), "property", ORACLE, tolerance=1e-5),
        example("no rows", drawn(0, [3, 2]), "property", CONTRACT),
        example("float32, five ranks", drawn(29, [8, 8, 8, 8, 7], dtype=torch.float32, scale=5.0), "oracle", ORACLE, tolerance=1e-5),
        example("float16", drawn(29, [8, 7], dtype=torch.float16, scale=5.0), "oracle", ORACLE, tolerance=1e-5),
        example("bfloat16: computed in float32", drawn(29, [16, 15], dtype=torch.bfloat16, scale=5.0), "oracle", ORACLE, tolerance=1e-5),
        example("float64, two ranks", drawn(31, [67, 66], scale=9.0), "two ranks", ORACLE),
        example(
            "what two ranks send and hold", drawn(17, [301, 300], dtype=torch.float32), "budget", CONTRACT, two_reductions, used,
        ),
        example(
            "what four ranks send and hold, in bfloat16", drawn(19, [101, 101, 101, 100], dtype=torch.bfloat16), "budget", CONTRACT,
            two_reductions, used,
        ),
        example(
            "ten times the rows", drawn(3, [4, 3]), "budget", "the contract: no loop over rows",
            lambda **_: {"more rows take more operations of torch": False}, growth,
        ),
    ],
)  # fmt: skip
