"""Check of 09.balance_loss. Oracle: a loop over rows and tokens, which equals transformers' losses of Switch and Mixtral
(`tests/parity/test_check_oracles.py`). Ranks are threads.

Tolerance. float64: 1e-12.
"""

import torch

from shared.course.checking import Case, Check
from shared.course.counting import cost, within
from shared.parallel.comm.threads import run_threads

from .common import CONTRACT, cases_of, gradients, randn

BY_HAND = "a loop over rows and tokens, by the contract's equation"
TWO = "arithmetic: n f is how often each expert was chosen, n P the sum of its probabilities; their product is divided by n"


def of(probabilities, experts, valid=None, dtype=torch.float64):
    def given():
        made = torch.tensor(probabilities, dtype=dtype)
        mask = torch.ones(made.shape[:2], dtype=torch.bool) if valid is None else torch.tensor(valid, dtype=torch.bool)
        return {"probabilities": made, "experts": torch.tensor(experts), "valid": mask, "over_row": None}

    return given


def drawn(batch, seq, size, k, lengths=None, dtype=torch.float64, seed=1):
    """Random tokens; rows of different lengths, whose valid tokens do not lie together."""

    def given():
        logits = randn(batch, seq, size, seed=seed)
        valid = torch.ones(batch, seq, dtype=torch.bool)
        for row, length in enumerate(lengths or []):
            valid[row] = torch.arange(seq) * 5 % seq < length
        chosen = (logits + randn(batch, seq, size, seed=seed + 1)).topk(k).indices
        return {"probabilities": logits.softmax(-1).to(dtype), "experts": chosen, "valid": valid, "over_row": None}

    return given


def spoiled(given, value):
    """Tokens that do not count have no probabilities that make sense."""

    def made():
        arguments = given()
        arguments["probabilities"][~arguments["valid"]] = value
        return arguments

    return made


def nan_that_counts():
    made = drawn(3, 6, 5, 2, [3, 6, 4])()
    made["probabilities"][1, 2] = torch.nan
    return made


def strided():
    made = drawn(4, 6, 5, 3, [3, 6, 0, 1])()
    experts = torch.stack([made["experts"], made["experts"] * 0], dim=-1)[..., 0]
    return made | {"probabilities": made["probabilities"].permute(2, 1, 0).contiguous().permute(2, 1, 0), "experts": experts}


def loss(function, probabilities, **more):
    leaf = probabilities.detach().requires_grad_()
    found = function(probabilities=leaf, **more)
    return {"loss": found} | gradients(found, probabilities=leaf)


def total_by_hand(probabilities, experts, valid):
    total = (probabilities.where(valid.unsqueeze(-1), 0) * 0).sum()
    for row in range(len(probabilities)):
        tokens = valid[row].nonzero().flatten().tolist()
        for expert in range(probabilities.shape[-1]):
            chosen = sum(experts[row, token].tolist().count(expert) for token in tokens)
            if chosen:
                total = total + len(tokens) * (chosen / len(tokens)) * probabilities[row, tokens, expert].mean()
    return total


def by_hand(probabilities, experts, valid, over_row):
    leaf = probabilities.detach().clone().requires_grad_()
    total = total_by_hand(leaf, experts, valid)
    return {"loss": total} | gradients(total, probabilities=leaf)


def amount(number):
    return lambda probabilities, **_: {"loss": torch.tensor(number, dtype=probabilities.dtype)}


def of_logits(function, logits, valid, k):
    """The loss of the k most probable experts, and what flows back to the router's logits."""
    leaf = logits.detach().requires_grad_()
    probabilities = leaf.softmax(-1)
    found = function(probabilities=probabilities, experts=probabilities.topk(k).indices, valid=valid)
    return {"loss": found} | gradients(found, logits=leaf)


def by_hand_of_logits(logits, valid, k):
    return of_logits(total_by_hand, logits, valid, k)


def in_parts(function, probabilities, experts, valid, cuts):
    """Each rank has some tokens of every row, and adds up the counts over the ranks."""
    split = [tensor.tensor_split(cuts, dim=1) for tensor in (probabilities.detach(), experts, valid)]

    def work(world):
        calls = []

        def over_row(counts):
            calls.append(counts.clone())
            total = counts.detach().clone()
            world.all_reduce(total)
            return total

        mine = [parts[world.rank] for parts in split]
        leaf = mine[0].clone().requires_grad_()
        found = function(leaf, mine[1], mine[2], over_row)
        [gradient] = torch.autograd.grad(found, [leaf])
        return found.detach(), gradient, [list(each.shape) for each in calls], calls[0]

    losses, back, calls, counts = zip(*run_threads(work, len(cuts) + 1), strict=True)
    return {
        "sum of the ranks' losses": torch.stack(losses).sum(), "gradient of probabilities": torch.cat(back, dim=1),
        "shapes that over_row gets on each rank": [*calls], "sum of what over_row gets": torch.stack(counts).sum(0).long(),
    }  # fmt: skip


def at_once(probabilities, experts, valid, cuts):
    leaf = probabilities.detach().clone().requires_grad_()
    total = total_by_hand(leaf, experts, valid)
    share = torch.nn.functional.one_hot(experts, leaf.shape[-1]).sum(2)
    counts = torch.stack([own[mask].sum(0) for own, mask in zip(share, valid, strict=True)])
    back = counts.to(leaf.dtype).unsqueeze(1) / valid.sum(1).clamp(min=1).view(-1, 1, 1) * valid.unsqueeze(-1)
    return {
        "sum of the ranks' losses": total.detach(), "gradient of probabilities": back,
        "shapes that over_row gets on each rank": [[[*counts.shape]]] * (len(cuts) + 1), "sum of what over_row gets": counts,
    }  # fmt: skip


def cut(given, *cuts):
    def made():
        arguments = given()
        del arguments["over_row"]
        return arguments | {"cuts": cuts}

    return made


def given_sizes(function):
    sizes = {
        name: drawn(batch, seq, experts, 8, dtype=torch.float32)()
        for name, batch, seq, experts in (("first", 2, 24, 64), ("240 tokens", 2, 240, 64), ("20 rows", 20, 24, 64), ("256", 2, 24, 256))
    }  # fmt: skip
    return cost(function, 3.3, 2 * 24 * 64 * 4, sizes)


case = cases_of(by_hand, BY_HAND, loss)


def example(title, given, number, source=TWO):
    return Case("worked example", title, given, amount(number), source, rtol=1e-12)


ONE_HOT = [1.0, 0.0, 0.0]
LENGTHS = [7, 11, 0, 1]

CHECK = Check(
    exercise="09.balance_loss",
    outputs=("loss",),
    spoilt=("loss", "gradients through loss"),
    cases=[
        case("shape and dtype", "float32", drawn(2, 5, 7, 3, dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "float64", drawn(2, 5, 7, 3), source=CONTRACT),
        example("all is balanced: 2 tokens * 2 / 4", of([[[0.25] * 4] * 2], [[[0, 1], [2, 3]]]), 1.0, CONTRACT),
        example("one row: (2 * 1 + 1 * 0.5 + 1 * 0.5) / 2", of([[[0.5, 0.25, 0.25]] * 2], [[[0, 1], [0, 2]]]), 1.5),
        example("each token has other probabilities: (2 * 1.1 + 0 + 1 * 0.6) / 3",
                of([[[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1]]], [[[0], [2], [0]]]), 2.8 / 3),
        example("collapse: all choose expert 0, and are sure of it", of([[ONE_HOT] * 5], [[[0]] * 5]), 5.0),
        example("two rows, each of which chooses an expert of its own: 2 + 2", of([[ONE_HOT] * 2, [[0.0, 0.0, 1.0]] * 2],
                                                                               [[[0]] * 2, [[2]] * 2]), 4.0),
        example("a token that does not count: (1 * 1 + 1 * 0.5) / 2",
                of([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], ONE_HOT]], [[[0], [1], [2]]], [[True, True, False]]), 0.75),
        example("rows of 3 and of 1 token: 3 + 0.5", of([[ONE_HOT] * 3, [[0.5, 0.5, 0.0]] * 3], [[[0]] * 3, [[1]] * 3],
                                                       [[True] * 3, [False, True, False]]), 3.5),
        case("property", "one choice for each token, 7 experts", drawn(3, 11, 7, 1)),
        case("property", "every token chooses all experts", drawn(3, 11, 5, 5)),
        case("property", "rows of 7, 11, 0 and 1 valid tokens", drawn(4, 11, 7, 3, LENGTHS)),
        case("property", "no valid tokens at all", drawn(2, 5, 7, 3, [0, 0])),
        case("property", "no tokens", lambda: of([[[0.5, 0.5]]], [[[0]]])() | {
            "probabilities": torch.zeros(3, 0, 4).double(), "experts": torch.zeros(3, 0, 2).long(), "valid": torch.zeros(3, 0).bool(),
        }, source=CONTRACT),
        case("property", "NaN where a token does not count", spoiled(drawn(4, 11, 7, 3, LENGTHS), torch.nan)),
        case("property", "infinity where a token does not count", spoiled(drawn(4, 11, 7, 3, LENGTHS), torch.inf)),
        case("property", "NaN at a token that counts is seen", nan_that_counts, lambda **_: {"loss": torch.tensor(torch.nan).double()},
             CONTRACT, lambda function, **given: {"loss": function(**given)}),
        case("property", "tensors that are not contiguous", strided),
        case("property", "float32, 600 tokens that chose the same two experts", lambda: drawn(1, 600, 5, 2, dtype=torch.float32)() | {
            "experts": torch.tensor([3, 1]).expand(1, 600, 2)}, tolerance=1e-5),
        case("oracle", "Switch's loss: one choice, four rows", lambda: {
            "logits": randn(4, 13, 7, seed=3), "valid": torch.ones(4, 13, dtype=torch.bool), "k": 1,
        }, by_hand_of_logits, BY_HAND, of_logits),
        case("oracle", "Mixtral's loss, row by row: three choices, rows of 7, 11, 0 and 1 tokens", lambda: {
            "logits": randn(4, 11, 6, seed=4), "valid": drawn(4, 11, 6, 3, LENGTHS)()["valid"], "k": 3,
        }, by_hand_of_logits, BY_HAND, of_logits),
        case("two ranks", "two ranks share out each row", cut(drawn(4, 11, 7, 3, LENGTHS), 5), at_once, "one process", in_parts),
        case("two ranks", "three ranks, with one choice for each token", cut(drawn(4, 11, 7, 1, LENGTHS), 2, 9), at_once, "one process",
             in_parts),
        case("budget", "more tokens, rows or experts, and memory, in tensors like `probabilities`", dict, lambda: within(3.3), CONTRACT,
             given_sizes),
    ],
)  # fmt: skip
