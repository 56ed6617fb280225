"""Stages 1 to 3 of build 10: which layers a config means, a model with an adapter, and its initial values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.checking import Case

from .pieces import (
    DENSE,
    EXACT,
    NEAR,
    TEXT,
    WITHIN,
    Config,
    Dense,
    Mixer,
    Net,
    Results,
    Strange,
    Tied,
    Twice,
    Watch,
    answer,
    as_it_was,
    budget,
    config_of,
    made,
    put,
    randn,
    sequence,
    state_of,
    trained_leaves,
    values_of,
)

# Stage 1: targets. Names are written out, so that nothing is computed twice by one idea.

MIXERS = ["q_proj", "kq_proj", "out.proj"]
NET = ["embed", *(f"layers.{layer}.{name}" for layer in (0, 1) for name in MIXERS), "head"]


def thirteen() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3) if number in (1, 2, 12) else nn.Tanh() for number in range(13)))


def dotted() -> nn.Module:
    """`proj` at the top, and a name in which a dot as a wildcard would find something."""
    linears = {name: nn.Linear(3, 3) for name in ("q_proj", "proj", "proj_old", "outxproj")}
    return nn.ModuleDict(linears | {"out": Mixer(3, 3).out})


def targets_case(title: str, model: Callable[[], nn.Module], target_modules: list[str] | str, names: list[str]) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        return {"names": [str(name) for name in adapters.targets(model(), target_modules)]}

    given = {"model": model.__name__, "target_modules": target_modules}
    return Case("worked example", title, lambda: given, lambda **_: {"names": names}, TEXT.format(1), observe)


def nothing_case(title: str, target_modules: list[str] | str, said: str) -> Case:
    """A ValueError that has `said`."""
    wanted = f"ValueError that says {said}"

    def observe(adapters: Any, **_: Any) -> Results:
        try:
            return {"result": f"accepted: {adapters.targets(Net(), target_modules)}"}
        except ValueError as error:
            return {"result": wanted if said in str(error) else f"ValueError, which does not say {said}: {error}"}

    given = {"model": "Net", "its linear layers": NET, "target_modules": target_modules}
    return Case("property", title, lambda: given, lambda **_: {"result": wanted}, TEXT.format(1), observe)


TARGETS = (
    targets_case("one ending", Net, ["q_proj"], ["layers.0.q_proj", "layers.1.q_proj"]),
    targets_case("the order is the model's", Net, ["head", "out.proj", "embed"],
                 ["embed", "layers.0.out.proj", "layers.1.out.proj", "head"]),
    targets_case("numbers are names", thirteen, ["2"], ["2"]),
    targets_case("a dot is a dot", dotted, ["out.proj"], ["out.proj"]),
    targets_case("a whole name is an ending, and so is its last part", dotted, ["proj"], ["proj", "out.proj"]),
    targets_case("two endings that mean one layer", Net, ["head", "embed", "layers.0.q_proj", "q_proj"],
                 ["embed", "layers.0.q_proj", "layers.1.q_proj", "head"]),
    targets_case("an expression", Net, r"layers\.1\..*proj", [name for name in NET if name.startswith("layers.1.")]),
    targets_case("an expression matches the whole name", Net, r"layers\.\d\.q|head", ["head"]),
    targets_case("a block at two places", Twice, ["q_proj"], ["first.q_proj"]),
    targets_case("embeddings and norms are never meant", Tied, r".*", ["block.q_proj", "block.kq_proj", "block.out.proj", "head"]),
    nothing_case("an ending that means nothing", ["q_proj", "v_proj"], "v_proj"),
    nothing_case("an ending that means a norm", ["norm", "q_proj"], "norm"),
    nothing_case("a string is an expression, not an ending", "q_proj", "q_proj"),
)  # fmt: skip

# Stage 2: inject


def held_case(title: str, kind: Callable[[], nn.Module], config: Config, layers: list[str], dtype: torch.dtype = torch.float64) -> Case:
    """Names, shapes and kinds of the factors, and the weights of the base."""

    def said(held: dict[str, Tensor]) -> Results:
        return {name: f"{list(each.shape)} {each.dtype}, leaf {each.is_leaf}, trained {each.requires_grad}" for name, each in held.items()}

    def expected(**_: Any) -> Results:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = values_of(made(kind), layers, config)
        leaves = {name: value.to(wide).requires_grad_() for name, value in values.items()}
        return {"factors": said(leaves), "weights": state_of(made(kind, dtype)), "model that loads the weights": "as it was"}

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(kind, dtype), "default", dict(config), 0)
        held, plain, fresh = dict(adapters.factors(adapted, "default")), dict(adapters.weights(adapted)), kind().to(dtype)
        copies = {name: tensor.detach().clone() for name, tensor in plain.items()}
        if set(copies) == set(state_of(fresh)):
            fresh.load_state_dict(copies)
        return {"factors": said(held), "weights": copies, "model that loads the weights": as_it_was(fresh, state_of(made(kind, dtype)))}

    given = {"model": kind.__name__, "dtype": str(dtype), **config}
    return Case("property", title, lambda: given, expected, TEXT.format(2), observe, **EXACT)


def call_case(title: str, kind: Callable[[], nn.Module], config: Config, layers: list[str], shapes: list[tuple[int, ...]]) -> Case:
    """A call with given factors: y, all gradients, and what a backward pass reaches. shapes: the inputs'."""
    names = [f"x {number}" for number in range(len(shapes))]

    def inputs() -> dict[str, Tensor]:
        return {name: randn(*shape, seed=3 + number).requires_grad_() for number, (name, shape) in enumerate(zip(names, shapes))}

    def expected(**_: Any) -> Results:
        oracle, x = Dense(made(kind), config, values_of(made(kind), layers, config)), inputs()
        y = oracle.run(*x.values())
        return answer(y, x, oracle.factors) | {"a backward pass reaches": sorted([*x, *oracle.factors])}

    def observe(adapters: Any, **_: Any) -> Results:
        model, x = made(kind), inputs()
        adapted = adapters.attach(model, "default", dict(config), 0)
        held = put(adapters, adapted, "default", values_of(made(kind), layers, config))
        y = adapters.run(adapted, *x.values())
        reached = trained_leaves(y, x | held)
        return answer(y, x, held) | {"a backward pass reaches": reached}

    given = {"model": kind.__name__, "inputs": [list(shape) for shape in shapes], **config}
    return Case("oracle", title, lambda: given, expected, DENSE, observe, **NEAR)


def half_case() -> Case:
    """In 16 bits the difference of two factors that are close would be lost."""
    config = config_of(["0"], r=1, alpha=2)
    A, B = torch.tensor([[1 + 2.0**-12, -1.0]]), torch.tensor([[1.0], [3.0]])

    def model() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        model.load_state_dict({"0.weight": torch.tensor([[1.0, -1.0], [-2.0, 2.0]]), "0.bias": torch.tensor([0.5, 0.0])})
        return model.bfloat16()

    x = torch.tensor([[4096.0, 4096.0]])
    result = {"y": torch.tensor([[0.5 + 2, 6]]).bfloat16(), "gradient of B": torch.tensor([[2.0], [-4.0]])}

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(model(), "default", dict(config), 0)
        held = put(adapters, adapted, "default", {"0.lora_A": A, "0.lora_B": B})
        y = adapters.run(adapted, x.bfloat16())
        [gradient] = torch.autograd.grad(y, held["0.lora_B"], torch.tensor([[1.0, -2.0]]).bfloat16())
        return {"y": y.detach(), "gradient of B": gradient}

    given = {"dtype of the model and of x": "bfloat16", "x": x, "A": A, "B": B, "s": 2.0}
    expected = lambda **_: result  # noqa: E731
    return Case("property", "a model in bfloat16, factors in float32", lambda: given, expected, TEXT.format(2), observe, **EXACT)


def largest_case() -> Case:
    """A layer of 32 by 48 features sees 3 tokens."""

    def observe(adapters: Any, **_: Any) -> Results:
        model, x = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)).double(), randn(3, 32).requires_grad_()
        adapted = adapters.attach(model, "default", config_of(["0", "2"]), 0)
        held = adapters.factors(adapted, "default")
        with Watch() as watch:
            y = adapters.run(adapted, x)
            torch.autograd.grad(y, [x, *held.values()], torch.ones_like(y))
        return {"numbers of the largest tensor that was made": budget(watch.largest, 32 * 48 - 1, "numbers")}

    expected = lambda **_: {"numbers of the largest tensor that was made": WITHIN}  # noqa: E731
    given = {"W": [[48, 32], [32, 48]], "tokens": 3, "r": 2}
    return Case("budget", "no tensor as large as W", lambda: given, expected, TEXT.format(2), observe)


INJECT = (
    held_case("what is trained, and the base's weights", Net, config_of(["q_proj", "head"], r=3),
              ["layers.0.q_proj", "layers.1.q_proj", "head"]),
    held_case("names that you may use yourself", Strange, config_of(r"base|model|lora_A|weight"), ["base", "model", "lora_A", "weight"]),
    held_case("a block at two places", Twice, config_of(["q_proj"]), ["first.q_proj"]),
    held_case("a model in bfloat16", sequence, config_of(["2"]), ["2"], torch.bfloat16),
    call_case("one layer", sequence, config_of(["2"]), ["2"], [(3, 5)]),
    call_case("every layer", Net, config_of(r".*", r=3, alpha=2), NET, [(2, 3, 5)]),
    call_case("some layers, rank-stabilized", Net, config_of(["q_proj", "out.proj"], r=3, rslora=True),
              [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("q_proj", "out.proj")], [(4, 5)]),
    call_case("rank 1, one token", sequence, config_of(["0"], r=1, alpha=0.5), ["0"], [(5,)]),
    call_case("no tokens", sequence, config_of(["0", "2"]), ["0", "2"], [(0, 5)]),
    call_case("layers that are called twice", Strange, config_of(["weight", "lora_A"]), ["lora_A", "weight"], [(3, 5), (3, 5)]),
    call_case("a block at two places has one pair of factors", Twice, config_of(["q_proj", "out.proj"]),
              ["first.q_proj", "first.out.proj"], [(2, 5)]),
    half_case(),
    largest_case(),
)  # fmt: skip

# Stage 3: start


def initial_case() -> Case:
    """1,280 numbers, so a spread that is 5 % off is no accident."""
    r, inputs, outputs = 20, 64, 7

    def spread(A: Tensor) -> str:
        bound = inputs**-0.5
        largest, deviation = A.abs().max().item() / bound, A.double().std().item() / bound
        if largest > 1 or largest < 0.97 or abs(deviation - 3**-0.5) > 0.03 or abs(A.double().mean().item()) > 0.1 * bound:
            return f"largest number {largest:.2f} and deviation {deviation:.2f} times 1 / sqrt(in)"
        return "uniform between -1 / sqrt(in) and 1 / sqrt(in)"

    def observe(adapters: Any, **_: Any) -> Results:
        generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
        drawn = [adapters.initial(inputs, outputs, r, generator) for generator in generators]
        again = adapters.initial(inputs, outputs, r, generators[0])
        A, B = drawn[0]
        return {
            "A": f"{list(A.shape)} {A.dtype}", "values of A": spread(A), "B": B.detach(),
            "the same generator": "the same A" if torch.equal(A, drawn[1][0]) else "another A",
            "another generator": "the same A" if torch.equal(A, drawn[2][0]) else "another A",
            "a second draw": "the same A" if torch.equal(A, again[0]) else "another A",
        }  # fmt: skip

    def expected(**_: Any) -> Results:
        found = {"A": f"{[r, inputs]} {torch.float32}", "values of A": "uniform between -1 / sqrt(in) and 1 / sqrt(in)"}
        others = {"the same generator": "the same A", "another generator": "another A", "a second draw": "another A"}
        return found | {"B": torch.zeros(outputs, r)} | others

    return Case("property", "drawn from a generator", lambda: {"in": inputs, "out": outputs, "r": r}, expected, TEXT.format(3), observe)


def begin_case() -> Case:
    """Before training the model computes what it did; its layers have several A, and a seed decides which."""
    config = config_of(["q_proj", "kq_proj"], r=3)

    def observe(adapters: Any, **_: Any) -> Results:
        x, held = randn(4, 5), []
        for seed, noise in ((3, 0), (3, 1), (4, 0)):
            torch.manual_seed(noise)  # what follows from the seed alone does not follow from this
            adapted = adapters.attach(made(Net), "default", dict(config), seed)
            held.append({name: each.detach() for name, each in dict(adapters.factors(adapted, "default")).items()})
        y = adapters.run(adapted, x).detach()
        key, other = "layers.0.q_proj.lora_A", "layers.0.kq_proj.lora_A"
        inside = all(each.abs().max() <= each.shape[1] ** -0.5 and each.abs().max() > 0 for name, each in held[0].items() if "_A" in name)
        return {
            "y": y, "every A": "within 1 / sqrt(in)" if inside else "not within 1 / sqrt(in)",
            "the same seed": "the same A" if torch.equal(held[0][key], held[1][key]) else "another A",
            "another seed": "the same A" if torch.equal(held[0][key], held[2][key]) else "another A",
            "another layer": "the same A" if torch.equal(held[0][key], held[0][other]) else "another A",
        }  # fmt: skip

    def expected(**_: Any) -> Results:
        found = {"y": made(Net)(randn(4, 5)).detach(), "every A": "within 1 / sqrt(in)"}
        return found | {"the same seed": "the same A", "another seed": "another A", "another layer": "another A"}

    return Case("property", "the model begins as it was", lambda: {"model": "Net", **config}, expected, TEXT.format(3), observe, **EXACT)


def moves_case() -> Case:
    """B is zero, so A has no gradient in the first step: B moves after one, A after two."""
    config = config_of(r".*", r=2)

    def observe(adapters: Any, **_: Any) -> Results:
        adapted = adapters.attach(made(Net), "default", dict(config), 3)
        held, found = dict(adapters.factors(adapted, "default")), {}
        for step in (1, 2):
            before = {name: each.detach().clone() for name, each in held.items()}
            y = adapters.run(adapted, randn(4, 5, seed=step))
            gradients = torch.autograd.grad(y, list(held.values()), randn(4, 4, seed=9 + step))
            with torch.no_grad():
                for each, gradient in zip(held.values(), gradients, strict=True):
                    each -= 0.1 * gradient
            found[f"moved in step {step}"] = [name for name in held if not torch.equal(before[name], held[name])]
        return found

    def expected(**_: Any) -> Results:
        pairs = [f"{name}.lora_{factor}" for name in NET for factor in "AB"]
        return {"moved in step 1": [name for name in pairs if name.endswith("B")], "moved in step 2": pairs}

    return Case("property", "what moves in two steps", lambda: {"model": "Net", **config}, expected, TEXT.format(3), observe)


START = (initial_case(), begin_case(), moves_case())
