"""Check of 09.z_loss. Oracle: a loop over the tokens that count, which equals transformers' router_z_loss_func, a mean over all tokens,
times their number (`tests/parity/test_check_oracles.py`).

Tolerances. float64: 1e-12, float32: 1e-5. Around -900, neighbouring float32 numbers are 6e-5 apart, which exponentials show: 1e-3.
"""

import torch

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import ANY, CONTRACT, cases_of, gradients, randn

BY_HAND = "log(sum(exp(logits))) ** 2, token by token"


def of(*shape, lengths=None, scale=1.0, shift=0.0, dtype=torch.float64):
    def given():
        valid = torch.ones(shape[:2], dtype=torch.bool)
        for row, length in enumerate(lengths or []):
            valid[row] = torch.arange(shape[1]) * 3 % shape[1] < length
        return {"logits": (scale * randn(*shape, seed=2) + shift).to(dtype), "valid": valid}

    return given


def odds(numbers, valid):
    """Logits whose exponentials are these numbers."""
    return lambda: {"logits": torch.tensor([numbers], dtype=torch.float64).log(), "valid": torch.tensor([valid])}


def spoiled(given, value):
    def made():
        arguments = given()
        arguments["logits"][~arguments["valid"]] = value
        return arguments

    return made


def nan_that_counts():
    made = of(3, 7, 5, lengths=[2, 7, 4])()
    made["logits"][1, 3, 2] = torch.nan
    return made


def strided():
    made = of(4, 7, 5, lengths=[3, 7, 0, 1])()
    return {"logits": made["logits"].permute(2, 1, 0).contiguous().permute(2, 1, 0), "valid": made["valid"].T.contiguous().T}


def loss(function, logits, valid):
    leaf = logits.detach().requires_grad_()
    found = function(leaf, valid)
    return {"loss": found} | gradients(found, logits=leaf)


def by_hand(logits, valid):
    leaf = logits.detach().clone().requires_grad_()
    kept = [leaf[row, token] for row, token in valid.nonzero().tolist()]
    shifts = [own.detach().max() for own in kept]
    found = sum(((own - shift).exp().sum().log() + shift) ** 2 for own, shift in zip(kept, shifts, strict=True))
    found = found + (leaf.where(valid.unsqueeze(-1), 0) * 0).sum()
    return {"loss": found} | gradients(found, logits=leaf)


def square(*sums):
    return lambda logits, **_: {"loss": sum(torch.tensor(float(each), dtype=torch.float64).log() ** 2 for each in sums).to(logits.dtype)}


def given_sizes(function):
    shapes = ((2, 5, 6), (2, 50, 6), (20, 5, 6), (2, 5, 60))
    sizes = {f"{batch} rows of {seq} tokens, {experts} experts": of(batch, seq, experts, lengths=[3])() for batch, seq, experts in shapes}
    return cost(function, ANY, 1, sizes)


case = cases_of(by_hand, BY_HAND, loss)


def example(title, given, *sums, source="arithmetic"):
    return Case("worked example", title, given, square(*sums), source, rtol=1e-12)


CHECK = Check(
    exercise="09.z_loss",
    outputs=("loss",),
    spoilt=("loss", "gradients through loss"),
    cases=[
        case("shape and dtype", "float32", of(2, 3, 5, dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "float64", of(2, 3, 5), source=CONTRACT),
        example("one token, exponentials 1, 2, 5: log(8) ** 2", odds([[1.0, 2.0, 5.0]], [True]), 8),
        example("two tokens: log(8) ** 2 + log(0.5) ** 2", odds([[1.0, 2.0, 5.0], [0.1, 0.2, 0.2]], [True, True]), 8, 0.5),
        example("a token that does not count", odds([[1.0, 2.0, 5.0], [9.0, 1.0, 1.0]], [True, False]), 8),
        example("all logits 0, two tokens of three count: 2 log(8) ** 2",
                lambda: {"logits": torch.zeros(1, 3, 8), "valid": torch.tensor([[True, True, False]])}, 8, 8, source=CONTRACT),
        case("property", "rows of 2, 7, 0 and 1 valid tokens", of(4, 7, 5, lengths=[2, 7, 0, 1])),
        case("property", "no valid tokens at all", of(2, 3, 5, lengths=[0, 0])),
        case("property", "no tokens", of(2, 0, 5), source=CONTRACT),
        case("property", "one expert", of(2, 3, 1)),
        case("property", "logits of thousands", of(2, 7, 5, scale=3000.0, lengths=[4, 7])),
        case("property", "logits around 900", of(2, 7, 5, shift=900.0)),
        case("property", "logits around -900, in float32", of(2, 7, 5, shift=-900.0, dtype=torch.float32), tolerance=1e-3),
        case("property", "NaN where a token does not count", spoiled(of(3, 7, 5, lengths=[2, 7, 0]), torch.nan)),
        case("property", "infinity where a token does not count", spoiled(of(3, 7, 5, lengths=[2, 7, 0]), torch.inf)),
        case("property", "NaN at a token that counts is seen", nan_that_counts, lambda **_: {"loss": torch.tensor(torch.nan).double()},
             CONTRACT, lambda function, **given: {"loss": function(**given)}),
        case("property", "tensors that are not contiguous", strided),
        case("oracle", "52 tokens in float64", of(4, 13, 7)),
        case("oracle", "52 tokens in float32, large logits", of(4, 13, 12, scale=4.0, dtype=torch.float32), tolerance=1e-5),
        case("budget", "ten times the tokens, rows or experts", dict, lambda: within(ANY), CONTRACT, given_sizes),
    ],
)  # fmt: skip
