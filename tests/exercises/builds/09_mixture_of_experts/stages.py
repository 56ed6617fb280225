"""The stages of build 09: what the adapters of a mixture-of-experts layer do, against one process in which every expert sees every token.

Ranks are threads. Every stage climbs from the smallest case on which a mistake shows to the others.
"""

import torch

from .calls import calls_case, exchange_case, half_case, held_case
from .common import stages
from .functions import DISPATCH, LOSSES, ROUTE, RUN_EXPERTS
from .limits import BUDGETS
from .refusals import BAD_INPUT
from .steps import digits_case, step_case

ONE, UNEVEN, IDLE = [[(2, 3)]], [[(2, 3), (1, 4)], [(1, 2), (3, 3)]], [[(2, 3)], [(0, 3)]]
GRID = [[(2, 3), (1, 2)], [(1, 4), (2, 2)], [(1, 1), (1, 3)], [(0, 2), (2, 4)]]
TO_FIRST = [9.0, 9.0, 0.0, 0.0]  # everyone chooses experts 0 and 1
CASES = {
    "route": ROUTE,
    "dispatch": DISPATCH,
    "experts": RUN_EXPERTS,
    "layer": (
        calls_case("one choice", 1, ONE, 3, 1, False, rung="oracle"),
        calls_case("two choices, weights that add up to 1", 1, ONE, 4, 2, True, rung="oracle"),
        calls_case("two calls before the first backward pass", 1, UNEVEN[:1], 4, 3, False, rung="oracle"),
        calls_case("a bias, and experts that nobody chooses", 1, ONE, 4, 2, False, bias=TO_FIRST, rung="oracle"),
        calls_case("no tokens", 1, [[(0, 3)]], 4, 2, True, rung="oracle"),
        half_case(),
    ),
    "losses": (
        *LOSSES,
        calls_case("the layer's own", 1, [[(3, 4)]], 4, 2, True, losses=True, rung="oracle"),
        calls_case("the layer's own, with a bias and without renormalisation", 1, [[(3, 4)]], 4, 2, False, bias=[0.3, 0.0, 0.0, -0.2],
                   losses=True, rung="oracle"),
    ),
    "exchange": (
        exchange_case("as many rows to each", [[1, 1], [1, 1]]),
        exchange_case("two ranks, several numbers of rows", [[1, 3], [2, 0]]),
        exchange_case("three ranks, one of which sends nothing", [[1, 2, 3], [0, 0, 0], [2, 0, 1]]),
        exchange_case("nothing travels", [[0, 0], [0, 0]]),
        exchange_case("bfloat16", [[1, 3], [2, 0]], dtype=torch.bfloat16),
        exchange_case("rows and gradients that are not contiguous", [[1, 3], [2, 0]], strided=True),
        exchange_case("another exchange before the first one's backward pass", [[1, 3], [2, 0]], twice=True),
        exchange_case("two groups side by side", [[1, 2], [3, 1]], replicas=2),
    ),
    "spread": (
        held_case("what each of two ranks holds", 2, 4),
        held_case("three ranks, six experts", 3, 6),
        calls_case("two ranks, one expert each", 2, [[(1, 3)], [(1, 3)]], 2, 1, False),
        calls_case("two ranks, two experts each", 2, [[(2, 3)], [(2, 3)]], 4, 2, True),
        calls_case("several numbers of tokens, four ranks", 4, [[(2, 3)], [(1, 2)], [(3, 3)], [(1, 4)]], 8, 3, False),
        calls_case("a rank without tokens", 2, IDLE, 4, 2, True),
        calls_case("a rank whose experts nobody chooses", 2, [[(2, 3)], [(1, 3)]], 4, 2, True, bias=TO_FIRST),
        calls_case("such a rank in a model's first layer", 2, [[(2, 3)], [(1, 3)]], 4, 2, False, bias=TO_FIRST, leaf=False),
        calls_case("two groups side by side", 2, [own[:1] for own in GRID], 4, 2, True, replicas=2),
        calls_case("with the losses", 2, [[(2, 3)], [(1, 4)]], 4, 2, True, losses=True),
    ),
    "gradients": (
        digits_case("each rank's tokens count once, two ranks", 2, 1),
        digits_case("each rank's tokens count once, two groups of two ranks", 2, 2),
        step_case("every gradient on two ranks, one micro-batch", 2, [[(2, 3)], [(2, 3)]], 4, 2),
        step_case("every gradient on two replicas", 1, UNEVEN, 3, 2, replicas=2),
        step_case("several micro-batches, several numbers of tokens", 2, UNEVEN, 4, 2, renormalize=False),
        step_case("with both losses", 2, UNEVEN, 4, 2, balance=0.3, z=0.1),
        step_case("two groups of two ranks", 2, GRID, 4, 2, replicas=2, balance=0.3, z=0.1),
        step_case("a rank none of whose tokens count", 2, UNEVEN, 4, 2, none_on=1, balance=0.3),
        step_case("a rank whose experts nobody chooses", 2, UNEVEN, 4, 2, bias=TO_FIRST),
        step_case("a second step has gradients of its own", 2, UNEVEN, 4, 2, twice=True),
        step_case("loss and gradient norm on every rank", 2, GRID, 4, 2, replicas=2, balance=0.3, z=0.1, what="totals"),
    ),
    "balance": (
        step_case("two ranks", 2, UNEVEN, 4, 2, what="bias"),
        step_case("two groups of two ranks", 2, GRID, 4, 1, replicas=2, what="bias"),
        step_case("a load just off the mean", 2, [[(1, 3)], [(2, 2)]], 4, 1, what="bias"),
        step_case("an expert whose load is the mean", 2, [[(1, 3)], [(1, 3)]], 2, 2, what="bias"),
    ),
    "recompute": (
        calls_case("one call in one process", 1, ONE, 4, 2, True, again=True, load=True, rung="oracle"),
        calls_case("two ranks, two calls before the first backward pass", 2, UNEVEN, 4, 2, True, again=False, load=True, losses=True),
        calls_case("the same under activation checkpointing", 2, UNEVEN, 4, 2, True, again=True, load=True, losses=True),
        calls_case("two groups, ranks without tokens", 2, GRID, 4, 2, False, replicas=2, again=True, load=True, losses=True),
    ),
    "budgets": BUDGETS,
    "bad_input": BAD_INPUT,
}  # fmt: skip
NEEDS = {
    "route": ("route",),
    "dispatch": ("dispatch",),
    "experts": ("run_experts",),
    "layer": ("make_layer", "state", "forward"),
    "losses": ("auxiliary_losses",),
    "exchange": ("exchange",),
    "gradients": ("step", "gradients", "gradient_norm"),
    "balance": ("update_bias",),
}
STAGES = stages("09.build", **{name: (NEEDS.get(name, ()), cases) for name, cases in CASES.items()})
