"""Check of 09.top_k_routing. Oracle: each token by itself in Python's own `sorted`, which equals transformers' routers of Mixtral, OLMoE
and DeepSeek-V3 (`tests/parity/test_check_oracles.py`).

Tolerances. float64: 1e-12, float32: 1e-6, a few units in the last place. Weights that are scores are compared exactly.
"""

import torch

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import ANY, CONTRACT, cases_of, gradients, randn

SORTED = "Python's sorted, token by token"
DEFAULTS = {"scaling": 1.0, "bias": None, "groups": 1, "best_groups": 1}


def of(scores, k=2, normalize=False, dtype=torch.float64, **more):
    """Arguments. Scores and biases may be lists."""

    def made(numbers):
        return torch.tensor(numbers, dtype=dtype) if isinstance(numbers, list) else None if numbers is None else numbers.clone()

    return lambda: {"scores": made(scores), "k": k, "normalize": normalize} | DEFAULTS | more | {"bias": made(more.get("bias"))}


def drawn(*shape, dtype=torch.float64, seed=1):
    return randn(*shape, seed=seed).sigmoid().to(dtype)


def routed(function, scores, bias, **settings):
    """Weights, experts, and what flows back from the weights. A bias without a gradient and one with a gradient of 0 are the same."""
    scores = scores.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    weights, experts = function(scores=scores, bias=bias, **settings)
    back = gradients(weights, scores=scores) if bias is None else gradients(weights, scores=scores, bias=bias)
    of_bias = back.pop("gradient of bias", None)
    moved = isinstance(of_bias, torch.Tensor) and of_bias.any()
    return {"weights": weights, "experts": experts} | back | ({"gradient of bias": of_bias} if moved else {})


def walk(scores, k, normalize, scaling, bias, groups, best_groups):
    """Weights and experts by the contract's sentences."""
    size, chosen = scores.shape[-1] // groups, []
    for row in scores.detach().reshape(-1, scores.shape[-1]):
        biased = (row if bias is None else row + bias).tolist()
        worth = [sum(sorted(biased[group * size : (group + 1) * size])[-2:]) for group in range(groups)]
        best = sorted(range(groups), key=lambda group: -worth[group])[:best_groups]  # noqa: B023
        allowed = [expert for expert in range(len(biased)) if groups == 1 or expert // size in best]
        chosen.append(sorted(allowed, key=lambda expert: -biased[expert])[:k])  # noqa: B023
    experts = torch.tensor(chosen, dtype=torch.int64).view(*scores.shape[:-1], k)
    weights = torch.take_along_dim(scores, experts, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * scaling, experts


def one_by_one(scores, **settings):
    leaf = scores.detach().clone().requires_grad_()
    weights, experts = walk(leaf, **settings)
    return {"weights": weights, "experts": experts} | gradients(weights, scores=leaf)


def dense(weights, experts, size):
    """[tokens, E]: 0 for an expert that was not chosen, so that nothing depends on the order of the chosen ones."""
    return weights.new_zeros(*weights.shape[:-1], size).scatter(-1, experts, weights)


def gates(function, logits, scoring, **settings):
    """The weights by expert, and what flows back from them to the logits."""
    logits = logits.detach().requires_grad_()
    weights, experts = function(scores=logits.softmax(-1) if scoring == "softmax" else logits.sigmoid(), **settings)
    found = dense(weights, experts, logits.shape[-1])
    return {"weights by expert": found} | gradients(found, logits=logits)


def gates_one_by_one(**given):
    return gates(walk, **given)


def router_case(name, scoring, **settings):
    """The settings of a published router. name: its class in transformers."""
    logits = lambda: {"logits": randn(23, 12, seed=4, dtype=torch.float32), "scoring": scoring}  # noqa: E731
    given = lambda: of(torch.empty(0), **settings)() | logits()  # noqa: E731
    without_scores = lambda: {key: value for key, value in given().items() if key != "scores"}  # noqa: E731
    return Case("oracle", name, without_scores, gates_one_by_one, SORTED, gates, rtol=1e-5, atol=1e-7)


def with_ties(function, scores, k, **settings):
    """What holds whichever of equal experts is chosen."""
    leaf = scores.detach().requires_grad_()
    weights, experts = function(scores=leaf, k=k, **settings)
    bias = 0 if settings["bias"] is None else settings["bias"]
    back = gradients(weights, scores=leaf)["gradient of scores"]
    finite = isinstance(back, torch.Tensor) and bool(back.isfinite().all())
    return {
        "weights": weights, "dtype of experts": str(experts.dtype), "biased scores of the chosen": (scores + bias).gather(-1, experts),
        "tokens with an expert twice": int((experts.sort(-1).values.diff() == 0).sum()), "the gradient of the scores is finite": finite,
    }  # fmt: skip


def tell(weights, biased):
    """For `with_ties`: the same weights and biased scores of the chosen for each token, or a list for each."""

    def told(scores, **_):
        as_rows = lambda numbers: torch.tensor(numbers, dtype=scores.dtype).expand(*scores.shape[:-1], -1).clone()  # noqa: E731
        return {
            "weights": as_rows(weights), "dtype of experts": "torch.int64", "biased scores of the chosen": as_rows(biased),
            "tokens with an expert twice": 0, "the gradient of the scores is finite": True,
        }  # fmt: skip

    return told


def groups_of(function, scores, groups, **settings):
    """How many groups a token has chosen from, and what it has chosen together."""
    weights, experts = function(scores=scores, groups=groups, **settings)
    opened = [len({expert // (scores.shape[-1] // groups) for expert in row}) for row in experts.tolist()]
    return {"groups that each token chooses from": opened, "sum of the weights": weights.sum(dim=-1)}


def of_one_group(scores, **_):
    return {"groups that each token chooses from": [1] * len(scores), "sum of the weights": torch.full_like(scores[:, 0], 0.625)}


def answer(weights, experts):
    return lambda scores, **_: {"weights": torch.tensor(weights, dtype=scores.dtype), "experts": torch.tensor(experts)}


def given_sizes(function, **settings):
    sizes = {f"{tokens} tokens": settings | {"scores": drawn(tokens, 12)} for tokens in (30, 300)}
    return cost(function, ANY, 1, sizes)


def more_tokens(**settings):
    return lambda: {key: value for key, value in of(torch.empty(0), **settings)().items() if key != "scores"}


case = cases_of(one_by_one, SORTED, routed)


def example(title, given, weights, experts, source="arithmetic"):
    return Case("worked example", title, given, answer(weights, experts), source, rtol=1e-12, atol=1e-15)


def strided():
    """Scores whose experts do not lie one after the other in memory."""
    return of(drawn(7, 3, 2))() | {"scores": drawn(7, 3, 2).permute(2, 1, 0)}


ZEROS = [[0.0] * 5, [0.1, 0.4, 0.0, 0.2, 0.0], [0.0] * 5]
TINY = [[3e-13, 1e-13, 0.0, 2e-14], [1e-3, 0.0, 0.0, 3e-3], [0.0, 1e-22, 3e-22, 0.0]]
TIED = [[0.5, 0.125, 0.3125, 0.3125, 0.4375, 0.1875]]  # each group is worth 0.625
NEGATIVE = [-2.0, -2.1, -2.2, -1.9, -2.3, -2.0, -2.1, -1.8]
GROUPS = {"groups": 4, "best_groups": 2}

CHECK = Check(
    exercise="09.top_k_routing",
    outputs=("weights", "experts"),
    spoilt=("weights", "experts", "gradients through weights"),
    cases=[
        case("shape and dtype", "float32 [2, 3, 5]", of(drawn(2, 3, 5, dtype=torch.float32)), source=CONTRACT),
        case("shape and dtype", "bfloat16, with a bias", of(drawn(3, 5, dtype=torch.bfloat16), k=3, bias=torch.ones(5).bfloat16()),
             source=CONTRACT),
        example("not normalised", of([[0.2, 0.5, 0.3], [0.7, 0.1, 0.2]]), [[0.5, 0.3], [0.7, 0.2]], [[1, 2], [0, 2]]),
        example("normalised", of([0.2, 0.5, 0.3], normalize=True), [0.625, 0.375], [1, 2]),
        example("nothing but scores, k and normalize",
                lambda: {"scores": torch.tensor([0.1, 0.5, 0.4], dtype=torch.float64), "k": 2, "normalize": False}, [0.5, 0.4], [1, 2]),
        example("a bias", of([0.2, 0.5, 0.3], bias=[0.4, 0.0, 0.0]), [0.2, 0.5], [0, 1]),
        example("a bias, normalised", of([0.2, 0.6, 0.3], normalize=True, bias=[0.5, 0.0, 0.0]), [0.25, 0.75], [0, 1]),
        example("times 2.5", of([0.2, 0.5, 0.3], scaling=2.5), [1.25, 0.75], [1, 2]),
        example("normalised, then times 2.5", of([0.2, 0.5, 0.3], normalize=True, scaling=2.5), [1.5625, 0.9375], [1, 2]),
        example(
            "the best of three groups of two: 0.9, 0.95, 0.6", of([0.9, 0.0, 0.45, 0.5, 0.2, 0.4], groups=3, best_groups=1),
            [0.5, 0.45], [3, 2],
        ),
        example(
            "the best of two groups of three, by their two best: 0.9, 0.63", of([0.5, 0.4, 0.0, 0.32, 0.31, 0.3], groups=2, best_groups=1),
            [0.5, 0.4], [0, 1],
        ),
        example(
            "two of three groups: 0.55, 0.75, 0.65", of([0.3, 0.25, 0.7, 0.05, 0.35, 0.3], k=3, groups=3, best_groups=2),
            [0.7, 0.35, 0.3], [2, 4, 5],
        ),
        example(
            "a bias opens a group", of([0.9, 0.8, 0.1, 0.2], groups=2, best_groups=1, bias=[0.0, 0.0, 1.0, 0.75]), [0.1, 0.2], [2, 3],
        ),
        case("property", "one expert for each token", of(drawn(5, 7), k=1)),
        case("property", "a single expert", of(drawn(5, 1), k=1)),
        case("property", "one expert for each token, of the best group",
             of([[0.9, 0.0, 0.6, 0.5], [0.1, 0.7, 0.3, 0.2]], k=1, groups=2, best_groups=1)),
        case("property", "a chosen score is 0, and has a gradient", of([[0.6, 0.0, 0.2], [0.0, 0.3, 0.9]], k=3, normalize=True)),
        case("property", "one expert, normalised: its weight is 1, without a gradient", of(drawn(5, 7), k=1, normalize=True)),
        case("property", "all experts", of(drawn(5, 7), k=7, normalize=True, bias=randn(7, seed=2))),
        case("property", "a single token without other dimensions", of(drawn(7), k=3, normalize=True)),
        case("property", "no tokens", lambda: {**of(drawn(1, 5))(), "scores": torch.zeros(0, 5)},
             lambda scores, **_: {"weights": torch.zeros(0, 2), "experts": torch.zeros(0, 2).long(), "gradient of scores": scores},
             CONTRACT),
        case("property", "scores that are not contiguous", strided),
        case("property", "biased scores are negative, in groups",
             of(drawn(9, 8), k=3, normalize=True, bias=NEGATIVE, **GROUPS)),
        case("property", "experts of a closed group have scores of their own, larger than those of the open one",
             of([[0.99, 0.0, 0.5, 0.51], [0.6, 0.1, 0.98, 0.02]], scaling=3.0, groups=2, best_groups=1)),
        case("property", "all groups are open", of(drawn(9, 8), k=5, groups=4, best_groups=4)),
        case("property", "a bias of thousands changes no digit of a weight",
             of(drawn(9, 6, dtype=torch.float32), bias=torch.tensor([4000.0, 1000, 3000, 2000, 0, 5000])), tolerance=0.0),
        case("property", "float32 scores, a bias in float64", of(drawn(9, 6, dtype=torch.float32), bias=randn(6, seed=3)), tolerance=0.0),
        case("property", "scores that are all 0, normalised", of(ZEROS, k=3, normalize=True),
             tell([[0.0] * 3, [4 / 7, 2 / 7, 1 / 7], [0.0] * 3], [[0.0] * 3, [0.4, 0.2, 0.1], [0.0] * 3]), CONTRACT, with_ties),
        case("property", "tiny scores add up to 1 as well", of(TINY, normalize=True),
             tell([[0.75, 0.25]] * 3, [[3e-13, 1e-13], [3e-3, 1e-3], [3e-22, 1e-22]]), CONTRACT, with_ties, 1e-6),
        case("property", "equal scores", of([[0.25] * 4] * 3, k=3), tell([0.25] * 3, [0.25] * 3), CONTRACT, with_ties),
        case("property", "equal scores, two of them at the limit", of([[0.3, 0.2, 0.3, 0.2]] * 2, k=3, normalize=True),
             tell([0.375, 0.375, 0.25], [0.3, 0.3, 0.2]), CONTRACT, with_ties),
        case("property", "equal groups", of([[0.25] * 8] * 3, k=3, bias=[-1.0] * 8, **GROUPS), tell([0.25] * 3, [-0.75] * 3), CONTRACT,
             with_ties),
        case("property", "groups that are equally good, of different experts", of(TIED, groups=3, best_groups=1), of_one_group, CONTRACT,
             groups_of),
        router_case("MixtralTopKRouter", "softmax", k=3, normalize=True),
        router_case("OlmoeTopKRouter", "softmax", k=5, normalize=False),
        router_case("DeepseekV3TopkRouter", "sigmoid", k=4, normalize=True, scaling=2.5, dtype=torch.float32,
                    bias=randn(12, seed=6, dtype=torch.float32), groups=4, best_groups=2),
        case("oracle", "every setting at once", of(drawn(37, 15, seed=9), k=4, normalize=True, scaling=0.7, bias=randn(15, seed=3),
                                                   groups=5, best_groups=3)),
        case("budget", "ten times the tokens", more_tokens(k=3, normalize=True, bias=randn(12, seed=5), groups=4, best_groups=2),
             lambda **_: within(ANY), "the contract: no loop over tokens", given_sizes),
    ],
)  # fmt: skip
