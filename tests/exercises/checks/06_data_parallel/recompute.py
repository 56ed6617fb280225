"""Check of 06.recompute. Oracle: torch's own backward pass through the first run, and torch.utils.checkpoint.

Tolerances. The same operations on the same float64 numbers: exact. Worked examples are small whole numbers.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shared.course.checking import Case, Check
from shared.parallel.data.activation_checkpointing import random_state_of

CONTRACT = "the contract"
FIRST_RUN = "torch's backward pass through a first run with a graph"
RANDOM = "random"


def scaled(x, weight):
    """x times weight, squared."""
    return (x * weight).square()


def three_inputs(x, y, z, weight):
    """x + 10 y z, times weight."""
    return (x + 10 * y * z) * weight


def looked_up(rows, weight):
    """The weight's rows."""
    return weight[rows]


def half_dropped(x, weight):
    """Dropout of half of x times weight."""
    return F.dropout(x * weight, 0.5)


def one_of_two(x, weight, idle):
    """x times weight; the second parameter is not used."""
    return x * weight


def frozen_too(x, y, weight, frozen):
    """x y times weight plus frozen."""
    return x * y * weight + frozen


def layer(x, y, first, second):
    """tanh and dropout between two products."""
    return F.dropout((x @ first).tanh(), 0.25) @ second * y


def product(x, y, weight):
    """x y times weight."""
    return x * y * weight


def doubled(x, idle):
    """2 x; the parameter is not used."""
    return 2 * x


class Run:
    """`computation` of the inputs that it is called with and of the parameters, as a block is called. It counts its calls."""

    def __init__(self, computation, parameters):
        self.computation, self.parameters, self.calls, self.grad_modes = computation, parameters, 0, []
        self.__doc__ = computation.__doc__

    def __call__(self, *inputs):
        self.calls += 1
        self.grad_modes.append(torch.is_grad_enabled())
        return self.computation(*inputs, *self.parameters)


def given(computation, inputs: list, parameters: list, wanted: str, upstream=None, seed: int = 3):
    """Arguments. wanted: a letter for each tensor, w where it requires a gradient. Generators have gone on since the first run."""

    def make():
        tensors = [torch.tensor(values) if isinstance(values, list) else values.clone() for values in [*inputs, *parameters]]
        tensors = [t.double() if t.is_floating_point() else t for t in tensors]
        for tensor, letter in zip(tensors, wanted, strict=True):
            tensor.requires_grad_(letter == "w")
        own, theirs = tensors[: len(inputs)], tensors[len(inputs) :]
        torch.manual_seed(seed)
        state = random_state_of(tensors[0])
        with torch.no_grad():
            output = computation(*tensors)
        flow = randn(*output.shape, seed=11) if upstream == RANDOM else torch.tensor(upstream or 1.0, dtype=output.dtype).expand_as(output)
        return {"run": Run(computation, theirs), "inputs": own, "parameters": theirs, "upstream": flow, "random_state": state}

    return make


def one_from_the_other():
    """Arguments: a block's inputs are x and 2 x, as its graph knows."""
    given_x = given(product, [[3.0], [0.0]], [[1.0]], "www")()
    x, _ = given_x["inputs"]
    return given_x | {"inputs": [x, 2 * x]}


def one_tensor_twice():
    """Arguments: both inputs are the same tensor."""
    given_x = given(product, [[3.0], [0.0]], [[2.0]], "www")()
    return given_x | {"inputs": [given_x["inputs"][0]] * 2}


def randn(*shape: int, seed: int):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(function, run, **arguments):
    """What is returned, without graphs; the function is called as a backward pass calls it, where nothing is recorded."""
    torch.rand(7)  # others have drawn since
    with torch.no_grad():
        gradients = function(run=run, **arguments)
    graphs = [place for place, gradient in enumerate(gradients) if gradient is not None and gradient.requires_grad]
    plain = [None if gradient is None else gradient.detach() for gradient in gradients]
    return {"gradients": plain} | ({"left a graph on gradients number": graphs} if graphs else {})


def first_run(run, inputs, parameters, upstream, random_state):
    tensors = [*inputs, *parameters]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    torch.set_rng_state(random_state[0])
    found = iter(torch.autograd.grad(run(*inputs), wanted, upstream, allow_unused=True))
    return {"gradients": [next(found) if tensor.requires_grad else None for tensor in tensors]}


def by_checkpoint(run, inputs, parameters, upstream, random_state):
    torch.set_rng_state(random_state[0])
    wanted = [tensor for tensor in (*inputs, *parameters) if tensor.requires_grad]
    output = checkpoint(run, *inputs, use_reentrant=False)
    torch.rand(5)
    found = iter(torch.autograd.grad(output, wanted, upstream))
    return {"gradients": [next(found) if tensor.requires_grad else None for tensor in (*inputs, *parameters)]}


def answer(*gradients):
    return lambda **_: {"gradients": [None if each is None else torch.tensor(each, dtype=torch.float64) for each in gradients]}


def left_alone(function, run, inputs, parameters, **arguments):
    """What must not have changed: gradients that are there already, hooks on parameters, the generator, the old graph."""
    leaf = torch.ones_like(inputs[0], requires_grad=True)
    old = [inputs[0] * leaf, *inputs[1:]]
    heard = []
    for place, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 7.0)
        parameter.register_post_accumulate_grad_hook(lambda _, place=place: heard.append(place))
    before = torch.get_rng_state()
    result = call(function, run, inputs=old, parameters=parameters, **arguments)
    drawn_next = torch.rand(3)
    torch.set_rng_state(before)
    torch.rand(7)  # what `call` draws
    follows = torch.rand(3)
    return result | {
        "grad of the parameters": [parameter.grad.clone() for parameter in parameters],
        "hooks that were called": heard,
        "gradient of what the inputs were made from": leaf.grad,
        "random numbers drawn afterwards are the next ones": torch.equal(drawn_next, follows),
    }


def untouched(run, inputs, parameters, **arguments):
    return first_run(run, inputs, parameters, **arguments) | {
        "grad of the parameters": [torch.full_like(parameter, 7.0) for parameter in parameters],
        "hooks that were called": [],
        "gradient of what the inputs were made from": None,
        "random numbers drawn afterwards are the next ones": True,
    }


def runs(function, run, **arguments):
    return call(function, run, **arguments) | {"runs": run.calls, "recorded": run.grad_modes}


def one_run(run, **arguments):
    return first_run(run, **arguments) | {"runs": 1, "recorded": [True]}


def case(rung: str, title: str, arguments, expected=first_run, source: str = FIRST_RUN, observe=call) -> Case:
    return Case(rung, title, arguments, expected, source, observe, rtol=0.0)


CHECK = Check(
    exercise="06.recompute",
    outputs=("gradients",),
    spoilt=("gradients",),
    cases=[
        case("shape and dtype", "x [3], weight [3]", given(scaled, [[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]], "ww"), source=CONTRACT),
        case(
            "worked example", "the square of x weight", given(scaled, [[2.0]], [[5.0]], "ww"), answer([100.0], [40.0]),
            "arithmetic: 2 x weight^2 and 2 weight x^2",
        ),
        case(
            "worked example", "the same with an upstream of 0.5", given(scaled, [[2.0]], [[5.0]], "ww", [0.5]), answer([50.0], [20.0]),
            "arithmetic: half of it",
        ),
        case(
            "worked example", "x + 10 y z, times weight", given(three_inputs, [[2.0], [3.0], [5.0]], [[7.0]], "wwww"),
            answer([7.0], [350.0], [210.0], [152.0]), "arithmetic: weight, 10 z weight, 10 y weight, x + 10 y z",
        ),
        case(
            "property", "an input that wants no gradient beside one that does",
            given(frozen_too, [[2.0], [3.0]], [[5.0], [7.0]], "w-w-", [1.0]), answer([15.0], None, [6.0], None), CONTRACT,
        ),
        case(
            "property", "no input wants one, as behind a frozen embedding", given(scaled, [[2.0]], [[5.0]], "-w"), answer(None, [40.0]),
            CONTRACT,
        ),
        case(
            "property", "whole numbers as input", given(looked_up, [torch.tensor([0, 2, 0])], [[[1.0], [2.0], [3.0]]], "-w"),
            answer(None, [[2.0], [0.0], [1.0]]), "arithmetic: how often each row was looked up",
        ),
        case(
            "property", "a parameter that is not used", given(one_of_two, [[2.0]], [[5.0], [9.0]], "www"), answer([5.0], [2.0], None),
            CONTRACT,
        ),
        case(
            "property", "x y times weight, where y was computed from x: y = 2 x", one_from_the_other, answer([6.0], [3.0], [18.0]),
            "arithmetic: y weight, x weight, x y: what reaches x by way of y, the old graph adds",
        ),
        case(
            "property", "x y times weight, where x and y are one tensor", one_tensor_twice, answer([6.0], [6.0], [9.0]),
            "arithmetic: each place gets the other's number times the weight",
        ),
        case(
            "property", "nothing that the output depends on wants a gradient", given(doubled, [[2.0]], [[5.0]], "-w"), answer(None, None),
            CONTRACT,
        ),
        case(
            "property", "dropout: the same half is dropped again",
            given(half_dropped, [[float(n) for n in range(1, 12)]], [[2.0] * 11], "ww"),
        ),
        case(
            "property", "gradients, hooks and generators are left alone", given(half_dropped, [[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]], "ww"),
            untouched, CONTRACT, left_alone,
        ),
        case(
            "oracle", "tanh and dropout between two products",
            given(layer, [randn(7, 5, seed=1), randn(7, 3, seed=2)], [randn(5, 11, seed=3), randn(11, 3, seed=4)], "wwww", RANDOM),
            by_checkpoint, "torch.utils.checkpoint",
        ),
        case(
            "budget", "it runs once, and with a graph", given(scaled, [[2.0, 3.0]], [[5.0, 7.0]], "ww"), one_run, CONTRACT, runs,
        ),
    ],
)  # fmt: skip
