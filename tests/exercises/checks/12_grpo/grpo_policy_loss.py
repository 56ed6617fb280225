"""Check of 12.grpo_policy_loss. Oracles: the same objective in another form, answer by answer: a ratio that has an edge on one side only,
and the gradient of each loss as a number; and a policy over 3 tokens whose answers are enumerated: its expected advantage,
differentiated without any ratio.

Tolerances. float64: 1e-12 of losses around 1. float32: 1e-5, compared with float64 on the same numbers. bfloat16 and float16: exactly,
for numbers that one rounding at the end gives.
"""

import math

import torch
from torch import Tensor

from shared.course.checking import Check
from shared.course.counting import cost, within

from .common import ARITHMETIC, CONTRACT, cases_of, gradients, randn, refused, strided, with_gradients
from .enumeration import EXPECTED, SAMPLED, enumerated, expected_advantage, far_away, new_advantage
from .packed import NAMES, changed, drawn, far_apart, mixed, of, same_tensor
from .pieces import left_behind, nothing
from .row_loss import RowLoss

ONE_SIDE = "answer by answer: the ratio has an upper edge where A is positive, a lower one where it is negative, none on the other side"


def one_sided(log_probs, old_log_probs, advantages, answers, clip_low=0.2, clip_high=0.28, level="token"):
    found, back = torch.zeros(answers.shape, dtype=torch.float64), torch.zeros(answers.shape, dtype=torch.float64)
    flow = randn(*answers.shape, seed=17, dtype=log_probs.dtype).double()
    for row in range(len(answers)):
        now, old, a = (tensor[row].tolist() for tensor in (log_probs, old_log_probs, advantages))
        sharing = {}
        for place, number in enumerate(answers[row].tolist()):
            if number >= 0:
                sharing.setdefault(number if level == "sequence" else place, []).append(place)
        for own in sharing.values():
            ratio = math.exp(math.fsum(now[place] - old[place] for place in own) / len(own))
            for place in own:
                past = ratio > 1 + clip_high if a[place] > 0 else ratio < 1 - clip_low
                found[row, place] = -a[place] * ((1 + clip_high if a[place] > 0 else 1 - clip_low) if past else ratio)
                back[row, own] += 0.0 if past else -a[place] * ratio * flow[row, place] / len(own)
    none = torch.zeros_like(back)
    results = {"loss": found, "gradient of log_probs": back, "gradient of old_log_probs": none, "gradient of advantages": none}
    return {name: value.to(log_probs.dtype) for name, value in results.items()}


def moved(losses, gradients):
    """The losses, and the gradient that the sum of the losses leaves at each token."""
    return lambda **_: {"loss": torch.tensor([losses], dtype=torch.float64),
                         "gradient of their sum": torch.tensor([gradients], dtype=torch.float64)}  # fmt: skip


def of_their_sum(function, log_probs, **given):
    leaf = log_probs.clone().requires_grad_()
    found = function(leaf, **given)
    [gradient] = torch.autograd.grad(found.sum(), [leaf], materialize_grads=True)
    return {"loss": found, "gradient of their sum": gradient}


def first_update(function, log_probs, advantages, **more):
    """The policy is the one that drew the tokens: one tensor is given as both."""
    leaf = log_probs.clone().requires_grad_()
    found = with_gradients(function(leaf, leaf, advantages, **more), {"log_probs": leaf}, "loss")
    return found | {"log_probs still ask for gradients": leaf.requires_grad}


def policy_gradient(log_probs, advantages, answers, **_):
    """The ratio is 1, and what flows back at token level is minus the advantage: REINFORCE."""
    inside = advantages.where(answers >= 0, 0)
    flow = randn(*log_probs.shape, seed=17, dtype=log_probs.dtype)
    return {"loss": -inside, "gradient of log_probs": -inside * flow, "log_probs still ask for gradients": True}


def turned(function, order, **given):
    """The tokens of every row in another order."""
    moved = {name: value[:, order] if isinstance(value, Tensor) else value for name, value in given.items()}
    return {"loss": function(**moved)[:, torch.tensor(order).argsort()]}


def given_sizes(function):
    """Room for as many answers as tokens: a tensor [rows, seq, seq] would be 96 times as large as `log_probs`."""
    found = {}
    for level in ("token", "sequence"):
        sizes = {
            name: drawn([[length] * count] * rows, prompt=0, dtype=torch.float32, level=level)()
            for name, rows, length, count in (
                ("first", 5, 24, 4), ("50 rows", 50, 24, 4), ("answers of 240 tokens", 5, 240, 4), ("48 answers in a row", 5, 2, 48))
        }  # fmt: skip
        found[level] = cost(function, 20.0, 5 * 96 * 4, sizes)
    return found


def small(**_):
    return {"token": within(20.0), "sequence": within(20.0)}


LOSS = RowLoss(NAMES, one_sided, near=1e-6)
case, only, value = cases_of(one_sided, ONE_SIDE, LOSS.observed), LOSS.only, LOSS.value


def example(title, given, *losses, source=ARITHMETIC):
    return LOSS.example(title, given, losses, source=source)  # of one row


ROWS = [[3, 2, 4], [5, 4], [1], [9]]
GAPS = [[3, 0, 4], [0, 2], [], [0, 0, 5]]
NAN, INF = torch.nan, torch.inf
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEQUENCE = {"level": "SEQUENCE".lower()}
EXTREMES = [0.5, 0.5, 1.5, 1.5, 0.7, 1.24, 1.24], [1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0]

CHECK = Check(
    exercise="12.grpo_policy_loss",
    outputs=("loss",),
    spoilt=("loss", "gradients through loss"),
    cases=[
        case("shape and dtype", "float32 [4, 12]", drawn(ROWS, dtype=FP32), source=CONTRACT),
        case("shape and dtype", "float64, ratios of answers", drawn(ROWS, **SEQUENCE), source=CONTRACT),
        case("shape and dtype", "bfloat16, ratios of answers", drawn(ROWS, dtype=BF16, **SEQUENCE), source=CONTRACT),
        case("shape and dtype", "float16", drawn(ROWS, dtype=FP16), source=CONTRACT),
        example("the contract's", of([2.0, 0.5, 1.5], [1.0, 1.0, 1.0], [0, 0, -1], FP32, old=0.0), -1.28, -0.5, 0.0, source=CONTRACT),
        example("... with the ratio of the answer, which is 1", of([2.0, 0.5, 1.5], [1.0, 1.0, 1.0], [0, 0, -1], FP32, old=0.0, **SEQUENCE),
                -1.0, -1.0, 0.0, source=CONTRACT),
        example("ratio 0.5, A -1: the objective is -0.8", of([0.5], [-1.0], [0]), 0.8),
        example("ratios of 0.5, 1.5, 0.7 and 1.24, which lies between 1.2 and 1.28", of(*EXTREMES, [0] * 7),
                -0.5, 0.8, -1.28, 1.5, 0.8, -1.24, 1.24),
        example("within the range: minus ratio * A", of([1.1, 0.9, 1.0], [3.0, -5.0, 7.0], [0, 0, 0]), -3.3, 4.5, -7.0),
        example("clip_low 0.5 and clip_high 3", of([8.0, 8.0, 0.25, 0.25], [2.0, -2.0, 2.0, -2.0], [0, 1, 2, 3], clip_low=0.5,
                clip_high=3.0), -8.0, 16.0, -0.5, 1.0),
        example("clip_low 1.5 and clip_high 20", of([30.0, 0.01, 0.01], [1.0, -1.0, 1.0], [0, 0, 0], clip_low=1.5,
                clip_high=20.0), -21.0, 0.01, -0.01),
        example("an advantage of 0", of([4.0, 1.0, 0.25], [0.0, 0.0, 0.0], [0, 0, 0]), 0.0, 0.0, 0.0),
        example("ratios of answers: the root of 1.21 for two tokens, 0.9 for one", of(
            [1.21, 1.0, 7.0, 0.9], [1.0, 10.0, 1.0, 100.0], [0, 0, -1, 1], **SEQUENCE), -1.1, -11.0, 0.0, -90.0),
        example("the ratio of an answer is beyond the edge; its tokens' are not all", of(
            [8.0, 1.0, 1.0, 0.125, 1.0, 1.0], [1.0, -1.0, 1.0, 1.0, -1.0, -1.0], [0, 0, 0, 1, 1, 1], **SEQUENCE),
            -1.28, 2.0, -1.28, -0.5, 0.8, 0.8),
        case("property", "rows of 3, 2, 1 and 1 answers", drawn(ROWS)),
        case("property", "rows of 3, 2, 1 and 1 answers, ratios of answers", drawn(ROWS, **SEQUENCE)),
        case("property", "longer prompts, ratios of answers", drawn(ROWS, prompt=4, **SEQUENCE)),
        case("property", "no prompts, ratios of answers", drawn(ROWS, prompt=0, **SEQUENCE)),
        case("property", "numbers of answers that have no tokens, and a row without answers", drawn(GAPS)),
        case("property", "... ratios of answers", drawn(GAPS, **SEQUENCE)),
        case("property", "no token belongs to an answer, ratios of answers", drawn([[], []], seq=4, outside=(NAN, INF, NAN), **SEQUENCE)),
        case("property", "answers of one token, as many as there is room for", drawn([[1] * 6, [1] * 6], prompt=0, **SEQUENCE)),
        case("property", "one answer in a row, ratios of answers", drawn([[5], [5]], prompt=0, **SEQUENCE)),
        case("property", "no rows, ratios of answers", lambda: {
            name: value[:0] if isinstance(value, Tensor) else value for name, value in drawn(ROWS, **SEQUENCE)().items()}),
        case("property", "rows without tokens, ratios of answers", drawn([[], []], **SEQUENCE)),
        case("property", "NaN and infinities at tokens of no answer", drawn(ROWS, outside=(NAN, -INF, INF))),
        case("property", "... ratios of answers", drawn(ROWS, outside=(-INF, INF, NAN), **SEQUENCE)),
        case("property", "-inf in both policies at tokens of no answer", drawn(ROWS, outside=(-INF, -INF, 1.0), **SEQUENCE)),
        case("property", "an infinite difference at tokens of no answer alone", drawn(ROWS, outside=(INF, 0.0, 1.0))),
        case("property", "an infinite advantage at tokens of no answer alone", drawn(ROWS, outside=(0.0, 0.0, -INF))),
        case("property", "the edges are left out: 0.8 and 1.28", drawn([[40, 40]])),
        case("property", "edges of 0.95 and 1.1", drawn([[40, 40]], clip_low=0.05, clip_high=0.1, level="TOKEN".lower())),
        case("property", "edges of 0.5 and 1.1, ratios of answers", drawn([[2] * 20], clip_low=0.5, clip_high=0.1, **SEQUENCE)),
        case("property", "edges at 1: nothing can be gained", drawn([[17]], clip_low=0.0, clip_high=0.0)),
        case("property", "an upper edge at 1, a lower one at 0.5", drawn([[17]], clip_low=0.5, clip_high=0.0)),
        case("property", "an upper edge at 1.5, a lower one at 1", drawn([[17]], clip_low=0.0, clip_high=0.5)),
        case("property", "edges at 1, ratios of answers", drawn([[2] * 9], clip_low=0.0, clip_high=0.0, **SEQUENCE)),
        case("property", "a lower edge of -0.5, which no ratio reaches", drawn([[17]], spread=1.5, clip_low=1.5, clip_high=0.5)),
        case("property", "edges of 0.9997 and 1.0004, ratios of answers", drawn([[9] * 9], spread=1e-3, clip_low=3e-4, clip_high=4e-4,
             **SEQUENCE)),
        case("property", "an advantage of 0 at two tokens of an answer, which are part of its ratio as well", changed(
            drawn(ROWS, **SEQUENCE), ("advantages", 0, 2, 0.0), ("advantages", 3, 5, 0.0))),
        case("property", "advantages of thousands", drawn(ROWS, scale=3000.0), tolerance=1e-9),
        case("property", "advantages that are all positive and equal, ratios of answers", lambda: drawn(ROWS, **SEQUENCE)() | {
            "advantages": torch.full((4, 12), 2.0).double()}),
        case("property", "beyond the edge, where A is gained: no gradient", of([1.5, 0.5], [1.0, -1.0], [0, 0]),
             moved([-1.28, 0.8], [0.0, 0.0]), CONTRACT, of_their_sum),
        case("property", "beyond the edge, where A is lost: the gradient leads back", of([1.5, 0.5], [-1.0, 1.0], [0, 0]),
             moved([1.5, -0.5], [1.5, -0.5]), CONTRACT, of_their_sum),
        case("property", "the ratio of an answer of 4: a quarter of what each loss says reaches each token", of(
            [1.1, 1.0, 1.0, 1 / 1.1, 3.0], [1.0, 2.0, 3.0, 10.0, 9.0], [0, 0, 0, 0, -1], **SEQUENCE),
            moved([-1.0, -2.0, -3.0, -10.0, 0.0], [-4.0, -4.0, -4.0, -4.0, 0.0]), CONTRACT, of_their_sum),
        case("property", "the first update: the same tensor as old and as new", same_tensor(drawn(ROWS)), policy_gradient,
             "REINFORCE: minus A times the gradient", first_update),
        case("property", "... in bfloat16", same_tensor(drawn(ROWS, dtype=BF16)), policy_gradient, "REINFORCE: minus A times the gradient",
             first_update, 0.0),
        case("property", "a token that became e^90 times as likely, and one that became impossible", far_apart),
        case("property", "an answer that became impossible, and its neighbours as they were", changed(
            drawn(ROWS, **SEQUENCE), ("log_probs", 0, 6, -INF), ("log_probs", 3, 5, -900.0))),
        case("property", "an answer that became e^100 times as likely, in float32: its prompt still has a loss of 0", changed(
            drawn([[3], [3]], prompt=2, dtype=FP32, **SEQUENCE), *(("log_probs", 0, place, 99.0) for place in range(2, 5)),
            *(("advantages", 0, place, 2.0) for place in range(2, 5))), only(one_sided), CONTRACT, value, 1e-5),
        case("property", "log-probabilities far below 0, whose exponentials are 0", lambda: {
            name: value - 1000 if "log" in name else value for name, value in drawn(ROWS)().items()}, tolerance=1e-9),
        case("property", "answers of 150 tokens, ratios of answers: small moves", drawn([[150, 150]], spread=0.1, **SEQUENCE)),
        case("property", "an advantage that is NaN is seen, at its token alone", changed(drawn(ROWS), ("advantages", 0, 2, NAN)),
             only(one_sided), CONTRACT, value),
        case("property", "a log-probability that is NaN is seen, in its answer alone", changed(
            drawn(ROWS, **SEQUENCE), ("log_probs", 0, 5, NAN)), only(one_sided), CONTRACT, value),
        case("property", "the tokens of an answer do not stand together", drawn([[4, 4, 4], [6, 5, 1]], prompt=0, **SEQUENCE,
             order=[0, 8, 4, 1, 9, 5, 2, 10, 6, 3, 11, 7]), lambda order, **given: only(one_sided)(**given),
             CONTRACT, turned),
        case("property", "answers numbered backwards, with a gap, up to seq - 1", lambda: drawn([[3, 2, 4]], **SEQUENCE)() | {
            "answers": torch.tensor([[-1, 11, 11, 11, -1, 4, 4, -1, 0, 0, 0, 0]])}),
        case("property", "tensors that are not contiguous", lambda: strided(drawn(ROWS, level="sequence")())),
        case("property", "float32", drawn([[17, 9], [20]], dtype=FP32), tolerance=1e-5),
        case("property", "float32, ratios of answers", drawn([[17, 9], [20]], dtype=FP32, **SEQUENCE), tolerance=1e-5),
        case("property", "bfloat16, computed in float32", drawn([[17, 9], [20]], dtype=BF16), only(one_sided), ONE_SIDE, value, 0.0),
        case("property", "bfloat16, ratios of answers, added up in float32", drawn([[40, 30], [70]], dtype=BF16, **SEQUENCE),
             only(one_sided), ONE_SIDE, value, 0.0),
        case("property", "bfloat16, and the others in float32", mixed(BF16, FP32), only(one_sided), ONE_SIDE, value, 0.0),
        case("property", "float32, and the others in bfloat16", mixed(FP32, BF16), only(one_sided), ONE_SIDE, value, 1e-5),
        case("property", "float16, an answer whose differences add up to 80,000", changed(
            drawn([[20]], prompt=0, dtype=FP16, **SEQUENCE), *(("old_log_probs", 0, place, -4000.0) for place in range(20)),
            *(("log_probs", 0, place, -0.25) for place in range(20)), *(("log_probs", 0, place, -8000.0) for place in range(10))),
            only(one_sided), ONE_SIDE, value, 0.0),
        case("property", "nothing else is changed", drawn(ROWS, **SEQUENCE), nothing, CONTRACT, left_behind),
        case("property", "a level that is neither of the two", drawn(ROWS, level="answer"), refused, CONTRACT, value),
        case("property", "no level", drawn(ROWS, level=None), refused, CONTRACT, value),
        case("property", "a level with a capital", drawn(ROWS, level="Sequence"), refused, CONTRACT, value),
        case("property", "a level with a space", drawn(ROWS, level=" token"), refused, CONTRACT, value),
        case("property", "a level in the plural", drawn(ROWS, level="sequences"), refused, CONTRACT, value),
        case("property", "an empty word for the level", drawn(ROWS, level=""), refused, CONTRACT, value),
        case("oracle", "211 tokens", drawn([[100, 11], [100]], spread=0.6, clip_low=0.3)),
        case("oracle", "60 answers of 1 to 7 tokens", drawn([[1 + (row + 3 * number) % 7 for number in range(10)] for row in range(6)],
             spread=0.8, **SEQUENCE)),
        case("oracle", "on-policy: all 27 answers of 3 tokens", lambda: {"table": randn(4, 3, seed=9), "length": 3, "level": "token"},
             expected_advantage, EXPECTED, enumerated),
        case("oracle", "... with ratios of answers", lambda: {"table": randn(4, 3, seed=9), "length": 3, "level": "sequence"},
             expected_advantage, EXPECTED, enumerated),
        case("oracle", "another policy than the one that drew, and no edges", lambda: {"now": randn(5, seed=6), "old": randn(5, seed=7),
             "level": "token"}, new_advantage, SAMPLED, far_away),
        LOSS.halves("rows 0 to 2, and the others", drawn(ROWS, cut=3, **SEQUENCE)),
        case("budget", "more rows, tokens and answers, and memory, in tensors like `log_probs`", dict, small, CONTRACT, given_sizes),
    ],
)  # fmt: skip
