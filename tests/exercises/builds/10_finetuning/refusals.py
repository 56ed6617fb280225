"""Stage 12 of build 10: what cannot be right is refused, and the model stays as it was."""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.checking import Case

from .merging import both
from .pieces import TEXT, Config, Net, Results, as_it_was, config_of, made, randn, state_of
from .training import squared_error


def refusal(error: ValueError, said: tuple[str, ...], wanted: str) -> str:
    missing = [word for word in said if word not in str(error)]
    return wanted if not missing else f"ValueError, which does not say {missing[0]}: {error}"


def config_case(title: str, *said: str, without: str = "", **changes: Any) -> Case:
    """The same config is refused by check_config, by attach and by add. without: a key that is left out."""
    config = {key: value for key, value in (config_of(["q_proj"]) | changes).items() if key != without}
    wanted = f"ValueError that says {' and '.join(said)}"
    names = "check_config", "attach", "add"

    def observe(adapters: Any, **_: Any) -> Results:
        found: Results = {}
        for name in names:
            model = made(Net)
            adapted = adapters.attach(model, "first", config_of(["head"]), 0) if name == "add" else None
            before = state_of(model) if name != "add" else {}
            try:
                if name == "check_config":
                    adapters.check_config(dict(config))
                elif name == "attach":
                    adapters.attach(model, "default", dict(config), 0)
                else:
                    adapters.add(adapted, "default", dict(config), 0)
                found[name] = "accepted"
            except ValueError as error:
                found[name] = refusal(error, said, wanted)
            if name != "add":
                found[f"the model after {name}"] = as_it_was(model, before)
        return found

    expected = lambda **_: dict.fromkeys(names, wanted) | {f"the model after {name}": "as it was" for name in names[:2]}  # noqa: E731
    return Case("property", title, lambda: config, expected, TEXT.format(12), observe)


def right_case(title: str, config: Config) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        try:
            adapters.check_config(dict(config))
        except ValueError as error:
            return {"result": f"ValueError: {error}"}
        return {"result": "accepted"}

    return Case("property", title, lambda: config, lambda **_: {"result": "accepted"}, TEXT.format(12), observe)


def use_case(title: str, said: str, act: Callable[[Any, Any], Any]) -> Case:
    """A model with two adapters refuses `act`, and computes what it did."""
    wanted = f"ValueError that says {said}"

    def observe(adapters: Any, **_: Any) -> Results:
        adapted, held = both(adapters)
        before, x = adapters.run(adapted, randn(3, 5)).detach(), randn(3, 5)
        factors = {name: each.detach().clone() for name, each in held["first"].items()}
        try:
            act(adapters, adapted)
            result = "accepted"
        except ValueError as error:
            result = refusal(error, (said,), wanted)
        same = torch.allclose(adapters.run(adapted, x).detach(), before, rtol=1e-9, atol=1e-9)
        kept = all(torch.equal(factors[name], each) for name, each in held["first"].items())
        return {"result": result, "outputs": "as they were" if same else "others", "factors": "as they were" if kept else "others"}

    expected = lambda **_: {"result": wanted, "outputs": "as they were", "factors": "as they were"}  # noqa: E731
    return Case("property", title, lambda: {"two adapters": ["first", "second"], "in use": "first"}, expected, TEXT.format(12), observe)


def step_merged(adapters: Any, adapted: Any) -> None:
    adapters.merge(adapted)
    optimizer = torch.optim.SGD(list(dict(adapters.factors(adapted, "first")).values()), lr=0.1)
    adapters.step(adapted, optimizer, [(randn(3, 5), randn(3, 4))], squared_error)


def step_without(adapters: Any, adapted: Any) -> None:
    optimizer = torch.optim.SGD(list(dict(adapters.factors(adapted, "first")).values()), lr=0.1)
    adapters.step(adapted, optimizer, [], squared_error)


BAD_INPUT = (
    config_case("rank 0", "r", "0", r=0),
    config_case("a negative rank", "r", "-2", r=-2),
    config_case("half a rank", "r", "2.5", r=2.5),
    config_case("a rank that is True", "r", "True", r=True),
    config_case("alpha 0", "lora_alpha", "0", lora_alpha=0),
    config_case("alpha infinite", "lora_alpha", "inf", lora_alpha=float("inf")),
    config_case("alpha that is no number", "lora_alpha", "nan", lora_alpha=float("nan")),
    config_case("dropout of everything", "lora_dropout", "1.0", lora_dropout=1.0),
    config_case("negative dropout", "lora_dropout", "-0.1", lora_dropout=-0.1),
    config_case("dropout in words", "lora_dropout", "a tenth", lora_dropout="a tenth"),
    config_case("no layers", "target_modules", target_modules=[]),
    config_case("an empty expression", "target_modules", target_modules=""),
    config_case("a key that there is not", "rank", rank=8),
    config_case("a key that is missing", "use_rslora", without="use_rslora"),
    right_case("the least and the most", config_of(["x"], r=1, alpha=0.001, dropout=0.999, rslora=True)),
    right_case("an expression, and integers", config_of("x", r=512, alpha=1, dropout=0)),
    use_case("a name that is taken", "second", lambda adapters, own: adapters.add(own, "second", config_of(["head"]), 0)),
    use_case("an ending that means nothing", "v_proj", lambda adapters, own: adapters.add(own, "third", config_of(["head", "v_proj"]), 0)),
    use_case("an adapter that there is not", "third", lambda adapters, adapted: adapters.use(adapted, "third")),
    use_case("a step while merged", "merged", step_merged),
    use_case("a step of no micro-batches", "0", step_without),
)
