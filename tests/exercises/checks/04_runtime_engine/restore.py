"""Check of 04.restore. Oracle: the same run without the interruption.

Tolerances: none. The same operations on the same numbers, in one process with one thread, give the same bits.
"""

import dataclasses

import torch
from torch import nn

from shared.course.checking import Case, Check
from shared.engine.checkpoint.optimizer_state import OptimizerState
from shared.engine.checkpoint.snapshot import Snapshot, get_random_state, set_random_state

from .runs import Run, adamw, after_two_steps, contents_of, drawn, everything, momentum, own, regrouped, take_steps

CONTRACT = "the contract"
ORACLE = "the same run without the interruption"
RUN = ("model", "optimizer", "parts")


def interrupted(make_optimizer=adamw, here=None, steps_here: int = 0):
    """A run's snapshot after 2 steps, and another run, of other weights, learning rate and random numbers, to put it into."""

    def given():
        snapshot = own(after_two_steps(make_optimizer))
        return {"snapshot": snapshot} | Run(17, lr=0.5, make_optimizer=here or make_optimizer).steps(steps_here).given()

    return given


def other_order():
    given = interrupted()()
    return given | {"parts": dict(reversed(given["parts"].items()))}


def weights_in_other_order():
    given = interrupted()()
    snapshot = given["snapshot"]
    return given | {"snapshot": dataclasses.replace(snapshot, weights=dict(reversed(snapshot.weights.items())))}


def no_parts():
    given = interrupted()()
    return given | {"snapshot": dataclasses.replace(given["snapshot"], parts={}), "parts": {}}


class OneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))


def one_weight():
    """Step 7 of a run with one weight, 5, whose momentum is 0.5."""
    model = OneWeight()
    settings = {"lr": 0.1, "momentum": 0.9, "names": ["weight"]}
    state = OptimizerState({"weight": {"momentum_buffer": torch.tensor(0.5)}}, {"weight": {}}, [settings])
    snapshot = Snapshot(7, {"weight": torch.tensor(5.0)}, state, {}, get_random_state())
    return {"snapshot": snapshot, "model": model, "optimizer": momentum(model, 0.3), "parts": {}}


def broken_weight():
    given = one_weight()
    return given | {"snapshot": dataclasses.replace(given["snapshot"], weights={"weight": torch.tensor(torch.nan)})}


def other_count():
    """After 5 steps, of which the loader has counted the last 2: it began anew in the middle of the run."""
    given = interrupted()()
    return given | {"snapshot": dataclasses.replace(given["snapshot"], step=5)}


def one_step_on(function, snapshot, model, optimizer, parts):
    steps, restored = function(snapshot, model, optimizer, parts), model.weight.item()
    model.weight.grad = torch.tensor(1.0)
    optimizer.step()
    return {"steps": steps, "weight": restored, "weight after one more step with gradient 1": model.weight.item()}


def going_on(function, snapshot, model, optimizer, parts):
    """Three steps after the resume."""
    steps = function(snapshot, model, optimizer, parts)
    return {"steps": steps, "losses": take_steps(3, model, optimizer, parts), **everything(model, optimizer, parts)}


def uninterrupted(make_optimizer=adamw):
    def expected(**given):
        run = Run(3, make_optimizer=make_optimizer).steps(2)
        return {"steps": 2, "losses": take_steps(3, **run.given()), **everything(**run.given())}

    return expected


def twice(function, snapshot, model, optimizer, parts):
    """Resumed, three steps, and resumed once more from the same snapshot."""
    function(snapshot, model, optimizer, parts)
    first = take_steps(2, model, optimizer, parts)
    function(snapshot, model, optimizer, parts)
    return {"losses": first, "losses after the second resume": take_steps(2, model, optimizer, parts)}


def uninterrupted_twice(**given):
    losses = take_steps(2, **Run(3).steps(2).given())
    return {"losses": losses, "losses after the second resume": losses}


def random_numbers(function, snapshot, model, optimizer, parts):
    function(snapshot, model, optimizer, parts)
    return {"next random numbers": drawn()}


def held(function, snapshot, model, optimizer, parts):
    before = {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    objects, modules = list(model.parameters()), list(model.modules())
    model.mix.bias.requires_grad_(False)  # frozen, with its dropout off: both are this run's choice
    model.dropout.eval()
    try:
        function(snapshot, model, optimizer, parts)
        autograd = torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    in_groups = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "the head is the embedding": model.head.weight is model.tokens.weight,
        "tensors elsewhere in memory": [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.data_ptr() != before[n]],
        "parameters that are other objects": sum(new is not old for new, old in zip(model.parameters(), objects, strict=True)),
        "the optimizer's parameters are the model's": sorted(in_groups) == sorted(map(id, model.parameters())),
        "the first weight": model.tokens.weight[0, 0].item(),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "modules in training": sum(module.training for module in modules) - len(modules), "autograd records": autograd,
    }


def all_held(snapshot, **given):
    return {
        "the head is the embedding": True, "tensors elsewhere in memory": [], "parameters that are other objects": 0,
        "the optimizer's parameters are the model's": True, "the first weight": snapshot.weights["tokens.weight"][0, 0].item(),
        "frozen": ["mix.bias"], "modules in training": -1, "autograd records": True,
    }


def snapshot_afterwards(function, snapshot, model, optimizer, parts):
    """What the snapshot holds after the resumed run has gone on."""
    function(snapshot, model, optimizer, parts)
    take_steps(2, model, optimizer, parts)
    return contents_of(snapshot)


def differing(change):
    """`change(snapshot, run)` makes the two differ."""

    def given():
        snapshot, run = own(after_two_steps()), Run(17, lr=0.5)
        change(snapshot, run)
        return {"snapshot": snapshot} | run.given()

    return given


def without_weight(snapshot, run):
    del snapshot.weights["center"]


def with_weight(snapshot, run):
    snapshot.weights["scale"] = torch.zeros(3)


def other_shape(snapshot, run):
    """One number, which would fill all five of the last tensor if it were copied."""
    snapshot.weights["mix.bias"] = torch.ones(1).double()


def renamed_weight(snapshot, run):
    snapshot.weights["middle"] = snapshot.weights.pop("center")


def transposed(snapshot, run):
    snapshot.weights["tokens.weight"] = snapshot.weights["tokens.weight"].T.clone()


def more_elements(snapshot, run):
    snapshot.weights["mix.weight"] = torch.ones(7, 5).double()


def without_part(snapshot, run):
    del snapshot.parts["temperature"]


def with_part(snapshot, run):
    snapshot.parts["scaler"] = {"scale": 2.0}


def other_optimizer(snapshot, run):
    """This run's optimizer has only the matrices."""
    run.optimizer = adamw(run.model.tokens, 0.5)


def refused(*names: str):
    """What is raised, whether it names what differs, and which parts of the run were changed."""

    def observe(function, snapshot, model, optimizer, parts):
        generators = get_random_state()
        before = everything(model, optimizer, parts)
        set_random_state(generators)
        try:
            function(snapshot, model, optimizer, parts)
            error = None
        except Exception as raised:
            error = raised
        after = everything(model, optimizer, parts)
        return {
            "error": type(error).__name__,
            "names that the message lacks": [name for name in names if name not in str(error)],
            "changed": [name for name in before if not equal(before[name], after[name])],
        }

    return observe


def equal(left, right) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def refusal(title: str, change, *names: str) -> Case:
    expected = {"error": "ValueError", "names that the message lacks": [], "changed": []}
    return Case("property", title, differing(change), lambda **given: expected, CONTRACT, refused(*names), RUN)


def exact(title: str, given, make_optimizer=adamw) -> Case:
    return Case("oracle", title, given, uninterrupted(make_optimizer), ORACLE, going_on, RUN, rtol=0.0)


CHECK = Check(
    exercise="04.restore",
    outputs=("steps",),
    spoilt=("steps", "update of model"),
    cases=[
        Case("shape and dtype", "a whole number is returned", interrupted(), lambda **given: {"steps": 2}, CONTRACT, changes=RUN),
        Case(
            "worked example", "one weight, SGD with momentum", one_weight,
            lambda **given: {"steps": 7, "weight": 5.0, "weight after one more step with gradient 1": 4.855},
            "arithmetic: momentum 0.9 * 0.5 + 1 = 1.45, and 5 - 0.1 * 1.45", one_step_on, RUN,
        ),
        Case(
            "property", "a weight that is NaN comes back as NaN", broken_weight,
            lambda **given: {"steps": 7, "weight": torch.nan, "weight after one more step with gradient 1": torch.nan}, CONTRACT,
            one_step_on, RUN,
        ),
        Case("property", "5 steps are done, the loader has counted 2", other_count, lambda **given: {"steps": 5}, CONTRACT, changes=RUN),
        Case(
            "property", "weights are copied into the tensors that are there", interrupted(), all_held, CONTRACT, held, RUN, rtol=0.0,
        ),
        Case(
            "property", "the next random numbers, although loading a part draws some", interrupted(),
            lambda **given: (Run(3).steps(2), {"next random numbers": drawn()})[1], ORACLE, random_numbers, RUN, rtol=0.0,
        ),
        Case(
            "property", "the snapshot is the same after the resumed run has gone on", interrupted(),
            lambda snapshot, **given: contents_of(snapshot), CONTRACT, snapshot_afterwards, RUN, rtol=0.0,
        ),
        Case(
            "property", "the next random numbers of a run without parts", no_parts,
            lambda **given: (Run(3).steps(2), {"next random numbers": drawn()})[1], ORACLE, random_numbers, RUN, rtol=0.0,
        ),
        Case("property", "resumed twice from one snapshot", interrupted(), uninterrupted_twice, ORACLE, twice, RUN, rtol=0.0),
        refusal("this run has a buffer that the snapshot lacks", without_weight, "center"),
        refusal("the snapshot has a weight that this run lacks", with_weight, "scale"),
        refusal("a weight of another shape: a single number", other_shape, "mix.bias"),
        refusal("a weight of another shape: more rows", more_elements, "mix.weight"),
        refusal("a weight of another shape: transposed", transposed, "tokens.weight"),
        refusal("as many weights, one of them of another name", renamed_weight),
        refusal("this run has a part that the snapshot lacks", without_part, "temperature"),
        refusal("the snapshot has a part that this run lacks", with_part, "scaler"),
        refusal("the optimizer has other parameters", other_optimizer, "mix.weight"),
        exact("three steps on, AdamW with two groups", interrupted()),
        exact("three steps on, into a run that has gone a step of its own", interrupted(steps_here=1)),
        exact("three steps on, the parts given in another order", other_order),
        exact("three steps on, the weights saved in another order", weights_in_other_order),
        exact("three steps on, the optimizer's groups in another order", interrupted(here=regrouped)),
        exact("three steps on, SGD with momentum", interrupted(momentum), momentum),
    ],
)
