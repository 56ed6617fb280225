"""Check of 11.dpo_loss. Oracles: torch's cross entropy between the two implicit rewards, with smoothed classes; the paper's own theorem,
on a policy over 3 tokens whose answers are enumerated: where the policy is ref * exp(r / beta) / Z, the loss of preferences drawn from r is
least.

Tolerances. float64: 1e-12 of losses around 1; 1e-9 for differences of thousands. float32: 1e-5, compared with float64 on the same numbers.
"""

import math

import torch
import torch.nn.functional as F

from shared.course.checking import Check

from .common import ARITHMETIC, CONTRACT, as_leaves, broken, cases_of, randn, strided, with_gradients
from .row_loss import RowLoss

TORCH = "torch: cross_entropy of the two implicit rewards, with the classes [1 - label_smoothing, label_smoothing]"
THEOREM = "Rafailov et al. 2023, equations 4 to 6: for preferences drawn from the reward r, ref * exp(r / beta) / Z has the least loss"
NAMES = "chosen", "rejected", "reference_chosen", "reference_rejected"


def of(chosen, rejected, reference_chosen, reference_rejected, beta, dtype=torch.float64, **more):
    numbers = chosen, rejected, reference_chosen, reference_rejected
    return lambda: {name: torch.tensor(own, dtype=dtype) for name, own in zip(NAMES, numbers, strict=True)} | {"beta": beta} | more


def drawn(pairs, beta=0.3, label_smoothing=0.1, scale=1.0, dtype=torch.float64, seed=1):
    def given():
        made = {name: (scale * randn(pairs, seed=seed + place) - 20).to(dtype) for place, name in enumerate(NAMES)}
        return made | {"beta": beta} | ({} if label_smoothing is None else {"label_smoothing": label_smoothing})

    return given


def by_torch(chosen, rejected, reference_chosen, reference_rejected, beta, label_smoothing=0.0):
    leaves = as_leaves(dict(zip(NAMES, (chosen, rejected, reference_chosen, reference_rejected), strict=True)), *NAMES)
    policy, frozen = torch.stack([*leaves.values()][:2], dim=1), torch.stack([reference_chosen, reference_rejected], dim=1)
    classes = torch.tensor([1 - label_smoothing, label_smoothing], dtype=chosen.dtype).expand(len(chosen), 2)
    return with_gradients(F.cross_entropy(beta * (policy - frozen), classes, reduction="none"), leaves)


def in_float64(**given):
    dtype = given["chosen"].dtype
    found = by_torch(**{name: value.double() if isinstance(value, torch.Tensor) else value for name, value in given.items()})
    return {name: value.to(dtype) for name, value in found.items()}


def as_its_own_reference(function, chosen, rejected, beta, label_smoothing):
    """The policy is its own reference, as in the first step: the same two tensors are given twice. Then the same ones again."""
    leaves = as_leaves({"chosen": chosen, "rejected": rejected}, "chosen", "rejected")
    pair = [*leaves.values()]
    found = with_gradients(function(*pair, *pair, beta, label_smoothing), leaves)
    return found | {"the policy's tensors still ask for gradients": all(leaf.requires_grad for leaf in pair)}


def log_two(chosen, rejected, beta, label_smoothing):
    """log 2, and a gradient: half of beta, less by the share of wrong labels."""
    flow = randn(len(chosen), seed=17)
    back = beta * (0.5 - label_smoothing) * flow
    return {"loss": torch.full_like(chosen, math.log(2)), "gradient of chosen": -back, "gradient of rejected": back,
            "the policy's tensors still ask for gradients": True}  # fmt: skip


def with_prompts(function, prompt, frozen_prompt, **given):
    """The log-probabilities of prompt and answer together: what the prompt adds is the same for both answers."""
    moved = {name: given[name] + (frozen_prompt if "reference" in name else prompt) for name in NAMES}
    return {"loss": function(**given | moved)}


def smoothest(function, label_smoothing, beta):
    """The loss and its gradient where the policy is as sure of its labels as they are right."""
    odds = math.log((1 - label_smoothing) / label_smoothing) / beta
    chosen = torch.tensor([-3.0 + odds], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor([number], dtype=torch.float64) for number in (-5.0, -3.0, -5.0)]
    found = function(chosen, *others, beta, label_smoothing)
    [gradient] = torch.autograd.grad(found, [chosen], torch.ones_like(found))
    return {"gradient": gradient, "loss": found}


def content(label_smoothing, beta):
    labels = torch.tensor([1 - label_smoothing, label_smoothing], dtype=torch.float64)
    return {"gradient": torch.zeros(1).double(), "loss": torch.distributions.Categorical(labels).entropy().view(1)}


def enumerated(function, beta, tokens, length):
    """The best policy over all answers for a reward and a reference: the gradient of its expected loss, and what its losses say."""
    answers = tokens**length
    frozen, rewards = (2 * randn(answers, seed=3)).log_softmax(0), randn(answers, seed=4)
    logits = (frozen + rewards / beta).requires_grad_()
    policy = logits.log_softmax(0)
    left, right = torch.cartesian_prod(torch.arange(answers), torch.arange(answers)).unbind(1)
    preferred = torch.sigmoid(rewards[left] - rewards[right])  # of two answers, how often the left one is
    losses = function(policy[left], policy[right], frozen[left], frozen[right], beta)
    expected = (preferred * losses).sum() / answers**2
    [gradient] = torch.autograd.grad(expected, [logits])
    return {"gradient of the policy's logits": gradient, "how likely each answer is preferred to each": losses.neg().exp()}


def least(beta, tokens, length):
    strengths = randn(tokens**length, seed=4).exp()
    left, right = torch.cartesian_prod(strengths, strengths).unbind(1)
    likely = left / (left + right)  # Bradley and Terry
    return {"gradient of the policy's logits": torch.zeros_like(strengths), "how likely each answer is preferred to each": likely}


LOSS = RowLoss(NAMES, by_torch)
case, example, only = cases_of(by_torch, TORCH, LOSS.observed), LOSS.example, LOSS.only

CHECK = Check(
    exercise="11.dpo_loss",
    outputs=("loss",),
    spoilt=("loss", "gradients through loss"),
    cases=[
        case("shape and dtype", "float32 [3]", drawn(3, dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "float64 [3], label_smoothing left out", drawn(3, label_smoothing=None), source=CONTRACT),
        case("shape and dtype", "bfloat16 [3]", drawn(3, dtype=torch.bfloat16), source=CONTRACT),
        example("the contract's: the policy is the reference", of([-10.0], [-30.0], [-10.0], [-30.0], 0.1), 0.69314718, source=CONTRACT),
        example("the contract's: log(1 + exp(-2))", of([-10.0], [-30.0], [-20.0], [-20.0], 0.1), 0.12692801, source=CONTRACT),
        example("the policy moved the wrong way: log(1 + exp(2))", of([-30.0], [-10.0], [-20.0], [-20.0], 0.1), 2.12692801),
        example("all four numbers differ: log(1 + exp(-0.5 * (1 - -2)))", of([-4.0], [-9.0], [-5.0], [-7.0], 0.5), 0.20141328),
        example("both became likelier, the rejected one by more: log(1 + exp(0.5 * 2))", of([-4.0], [-6.0], [-5.0], [-9.0], 0.5),
                1.31326169),
        example("beta 2: log(1 + exp(-2 * 3)), log(1 + exp(2 * 1))", of([-4.0, -4.0], [-9.0, -3.0], [-5.0, -3.0], [-7.0, -3.0], 2.0),
                0.00247569, 2.12692801),
        example("label_smoothing 0.25, d = 2: 0.75 * log(1 + exp(-2)) + 0.25 * log(1 + exp(2))",
                of([-10.0], [-30.0], [-20.0], [-20.0], 0.1, label_smoothing=0.25), 0.62692801),
        case("property", "7 pairs", drawn(7)),
        case("property", "one pair", drawn(1)),
        case("property", "no pairs", drawn(0)),
        case("property", "label_smoothing is left out", drawn(7, label_smoothing=None)),
        case("property", "label_smoothing 0", drawn(7, label_smoothing=0.0)),
        case("property", "label_smoothing 0.45", drawn(7, label_smoothing=0.45)),
        case("property", "beta 1", drawn(7, beta=1.0)),
        case("property", "beta 3", drawn(7, beta=3.0)),
        case("property", "beta 0.01", drawn(7, beta=0.01)),
        case("property", "the reference is the policy itself: the loss is log 2, its gradient is not 0", lambda: {
            "chosen": randn(5, seed=1), "rejected": randn(5, seed=2), "beta": 0.3, "label_smoothing": 0.1}, log_two, ARITHMETIC,
            as_its_own_reference),
        case("property", "differences of thousands, either way", of([-9000.0, -100.0, -5.0], [-100.0, -9000.0, -4.0],
             [-200.0, -300.0, -7.0], [-300.0, -200.0, -7.0], 1.0), tolerance=1e-9),
        case("property", "... in float32, with smoothed labels", of([-9000.0, -100.0], [-100.0, -9000.0], [-200.0, -300.0],
             [-300.0, -200.0], 1.0, torch.float32, label_smoothing=0.25), tolerance=1e-6),
        case("property", "a difference of 100, either way, in float32", of([-9.0, -109.0], [-109.0, -9.0], [-9.0] * 2, [-9.0] * 2, 1.0,
             torch.float32), tolerance=1e-6),
        case("property", "prompts that are counted as well cancel", lambda: drawn(7)() | {
            "prompt": randn(7, seed=11), "frozen_prompt": randn(7, seed=12)},
            lambda prompt, frozen_prompt, **given: only(by_torch)(**given), CONTRACT, with_prompts),
        case("property", "a log-probability that is NaN is seen, in its pair alone", lambda: broken(drawn(4)(), "rejected"),
             only(by_torch), CONTRACT, LOSS.value),
        case("property", "tensors that are not contiguous", lambda: strided(drawn(5)())),
        case("oracle", "61 pairs", drawn(61, scale=9.0), tolerance=1e-11),
        case("oracle", "61 pairs in float32", drawn(61, scale=9.0, dtype=torch.float32), in_float64, tolerance=1e-5),
        case("oracle", "smoothed labels are content where the odds are theirs", lambda: {"label_smoothing": 0.2, "beta": 0.5}, content,
             "Mitchell 2023: the least loss is the labels' entropy, at d = log((1 - label_smoothing) / label_smoothing)", smoothest),
        case("oracle", "all pairs of all 27 answers of 3 tokens: the best policy is at rest", lambda: {
            "beta": 0.4, "tokens": 3, "length": 3}, least, THEOREM, enumerated, 1e-10),
        LOSS.halves("3 and 4 of 7 pairs", lambda: drawn(7)() | {"cut": 3}),
        LOSS.budget("pairs", drawn),
    ],
)  # fmt: skip
