"""Stages 3 to 5 of build 11: rows of pairs, log-probabilities of answers, and the reference's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case

from .pieces import (
    ALONE,
    EXACT,
    NEAR,
    SIZES,
    TEXT,
    VOCABULARY,
    WIDTH,
    Attention,
    Examples,
    Recorded,
    Recurrence,
    Results,
    Table,
    alone,
    example,
    gradients_of,
    made,
    pairs_of,
    randn,
    scores,
    sums,
)

# Stage 3: rows


def rows_case(title: str, kind: Callable[[], Recorded], examples: Examples) -> Case:
    def named(found: list[Any]) -> Results:
        both = [(f"{name} {number}", logits) for number, pair in enumerate(found) for name, logits in zip(("chosen", "rejected"), pair)]
        return {"pairs": len(found)} | {f"logits for {name}": logits.detach().clone() for name, logits in both}

    def expected(**_: Any) -> Results:
        model = made(kind)
        return named([tuple(alone(model, one)[0] for one in pair) for pair in examples])

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(kind)
        found = named(list(adapters.predictions(model, adapters.rows(examples, WIDTH))))
        columns = max(call.ids.shape[1] for call in model.calls)
        return found | {"columns": "at most width" if columns <= WIDTH else f"{columns}"}

    given = {"model": kind.__name__, "width": WIDTH, "tokens of each pair": [[len(ids) for ids, _ in pair] for pair in examples]}
    wanted = lambda **_: expected() | {"columns": "at most width"}  # noqa: E731
    return Case("oracle", title, lambda: given, wanted, ALONE, observe, **NEAR)


def repeated() -> Examples:
    """Ids that an implementation may use to fill rows, at all places of the answers, and the same id at an end and inside."""
    found = []
    for filling in (0, 1, 2, VOCABULARY - 1):
        prompt = [filling, 5, filling]
        found.append((example(prompt, [filling, filling, 7, filling]), example(prompt, [6, filling])))
    return found


ROWS = (
    rows_case("one pair", Attention, pairs_of([(3, 2, 2)])),
    rows_case("answers of two lengths", Attention, pairs_of([(3, 4, 1)])),
    rows_case("pairs of many lengths", Attention, pairs_of(SIZES)),
    rows_case("pairs of many lengths, in a recurrence", Recurrence, pairs_of(SIZES)),
    rows_case("rows that are full", Attention, pairs_of([(5, 8, 8), (12, 1, 1), (1, 12, 2)])),
    rows_case("any id may be in an answer", Attention, repeated()),
    rows_case("one prompt, several pairs", Recurrence, [(a, b) for (a, _), (_, b) in zip(repeated()[:2], repeated()[:2], strict=True)] * 2),
)

# Stage 4: log_probs


def backward(value: Tensor, model: Recorded) -> Results:
    value.backward(randn(*value.shape, seed=7).to(value.dtype))
    return {"log-probabilities": value.detach().clone()} | gradients_of(model)


def log_probs_case(title: str, make: Callable[[], Recorded], examples: Examples, **tolerance: float) -> Case:
    def expected(**_: Any) -> Results:
        model = make()
        return backward(sums(model, examples), model)

    def observe(adapters: Any, **_: Any) -> Results:
        model = make()
        return backward(adapters.log_probs(model, adapters.rows(examples, WIDTH)), model)

    given = {"model": type(make()).__name__, "width": WIDTH, "tokens of each pair": [[len(ids) for ids, _ in pair] for pair in examples]}
    return Case("oracle", title, lambda: given, expected, ALONE, observe, **tolerance or NEAR)


def worked_case() -> Case:
    """A token after another one has probability 1/2, 1/4 or 1/8, whatever the rest."""
    rows = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 4, dtype=torch.float64).log()
    examples = [(example([3], [0, 1, 2]), example([3], [1])), (example([0, 0], [0, 0]), example([0, 0], [3, 3, 3]))]
    expected = lambda **_: {"log2": torch.tensor([[-6, -2], [-2, -9]], dtype=torch.float64)}  # noqa: E731

    def observe(adapters: Any, **_: Any) -> Results:
        found = adapters.log_probs(Table(rows.clone()), adapters.rows(examples, WIDTH))
        return {"log2": found.detach() / torch.tensor(2.0, dtype=torch.float64).log()}

    given = {"probabilities of tokens 0 to 3": [0.5, 0.25, 0.125, 0.125], "answers": [[[0, 1, 2], [1]], [[0, 0], [3, 3, 3]]]}
    return Case("worked example", "sums, not averages", lambda: given, expected, TEXT.format(4), observe, **NEAR)


NAN_AFTER, NOTHING_AFTER, NEVER = 4, 5, 6  # tokens of prompts


def poisoned() -> Table:
    """After two tokens of prompts the logits are NaN and -inf, and one token is impossible everywhere."""
    rows = randn(VOCABULARY, VOCABULARY, seed=3)
    rows[:, NEVER], rows[NAN_AFTER], rows[NOTHING_AFTER] = float("-inf"), float("nan"), float("-inf")
    return Table(rows)


def prompts_of_poison() -> Examples:
    prompts = [[NAN_AFTER, 8, NOTHING_AFTER, 9], [9, NEVER, NAN_AFTER, NEVER, 10]]
    answers = [([11, 12], [13]), ([14], [15, 16, 17])]
    return [(example(prompt, chosen), example(prompt, rejected)) for prompt, (chosen, rejected) in zip(prompts, answers, strict=True)]


def half_case() -> Case:
    """Logits in bfloat16, of which sums are made in float32. Tolerance: three roundings of float32."""
    rows = (3 * randn(VOCABULARY, VOCABULARY, seed=5)).bfloat16()
    examples = pairs_of(SIZES, seed=4)

    def expected(**_: Any) -> Results:
        return {"log-probabilities": sums(Table(rows.double()), examples).detach().float()}

    def observe(adapters: Any, **_: Any) -> Results:
        return {"log-probabilities": adapters.log_probs(Table(rows.clone()), adapters.rows(examples, WIDTH)).detach()}

    given = {"dtype of the logits": "bfloat16", "pairs": len(examples)}
    return Case("oracle", "logits in bfloat16", lambda: given, expected, "the same logits in float64", observe, rtol=1e-5, atol=1e-5)


LOG_PROBS = (
    worked_case(),
    log_probs_case("one pair", lambda: made(Attention), pairs_of([(3, 2, 4)])),
    log_probs_case("pairs of many lengths", lambda: made(Attention), pairs_of(SIZES)),
    log_probs_case("in a recurrence", lambda: made(Recurrence), pairs_of(SIZES, seed=2)),
    log_probs_case("any id may be in an answer", lambda: made(Attention), repeated()),
    log_probs_case("logits that are NaN or -inf where nothing is trained", poisoned, prompts_of_poison()),
    log_probs_case("a model in float32", lambda: made(Attention).float(), pairs_of(SIZES), rtol=1e-4, atol=1e-5),
    half_case(),
)

# Stage 5: reference


def score_case(title: str, size: int, count: int) -> Case:
    """A model with dropout, in training mode, but for its head."""
    examples = pairs_of((SIZES * 2)[:count], seed=6)
    model_of = lambda: made(lambda: Attention(dropout=0.5))  # noqa: E731

    def expected(**_: Any) -> Results:
        modes = {"the model": "in training mode", "its dropout": "in training mode", "its head": "in evaluation mode"}
        found = {"log-probabilities": scores(model_of(), examples), "pairs at a time": "at most size", "a graph": False}
        found["usable in a loss"] = True
        return found | modes | {"during the calls": "evaluation mode, no gradients recorded", "gradients": "none"}

    def observe(adapters: Any, **_: Any) -> Results:
        model = model_of().train()
        model.head.eval()
        found = adapters.score(model, examples, WIDTH, size)
        during = {f"{'training' if call.training else 'evaluation'} mode, {'' if call.gradients else 'no '}gradients recorded"
                  for call in model.calls}  # fmt: skip
        modules = {"the model": model, "its dropout": model.dropout, "its head": model.head}
        modes = {name: f"in {'training' if module.training else 'evaluation'} mode" for name, module in modules.items()}
        policy = torch.ones_like(found).requires_grad_()
        (policy * found).sum().backward()  # raises for tensors of inference mode
        has = any(weight.grad is not None for weight in model.parameters())
        at_a_time = "at most size" if len(model.calls) >= -(-count // size) else f"{len(model.calls)} calls for {count}"
        made_of = {"log-probabilities": found.detach().clone(), "pairs at a time": at_a_time, "a graph": found.requires_grad}
        after = {"usable in a loss": True, "gradients": "some" if has else "none"}
        return made_of | modes | {"during the calls": " and ".join(sorted(during))} | after

    given = {"pairs": count, "size": size, "model": "with dropout, in training mode; its head in evaluation mode"}
    return Case("oracle", title, lambda: given, expected, ALONE, observe, **NEAR)


def broken_case() -> Case:
    """The second call raises."""

    class Broken(Attention):
        def logits(self, *given: Tensor) -> Tensor:
            if len(self.calls) == 2:
                raise RuntimeError("out of memory")
            return super().logits(*given)

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Broken).train()
        try:
            adapters.score(model, pairs_of(SIZES), WIDTH, 2)
            came = "no exception"
        except RuntimeError as error:
            came = str(error)
        mode = "training" if model.training and model.head.training else "evaluation"
        return {"what came": came, "mode": mode, "gradients are recorded": torch.is_grad_enabled()}

    expected = lambda **_: {"what came": "out of memory", "mode": "training", "gradients are recorded": True}  # noqa: E731
    given = {"model": "raises at its second call", "pairs": len(SIZES), "size": 2}
    return Case("property", "a model that raises", lambda: given, expected, TEXT.format(5), observe)


def untouched_case() -> Case:
    """Weights are as they were, and the caller still records gradients. A frozen weight stays frozen."""

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Attention)
        model.places.weight.requires_grad_(False)
        adapters.score(model, pairs_of(SIZES), WIDTH, 4)
        changed = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        return {"weights": changed, "trained": trained, "gradients are recorded": torch.is_grad_enabled()}

    def expected(**_: Any) -> Results:
        weights = {name: weight.detach().clone() for name, weight in made(Attention).named_parameters()}
        return {"weights": weights, "trained": [name for name in weights if name != "places.weight"], "gradients are recorded": True}

    return Case("property", "the model stays as it was", lambda: {"pairs": len(SIZES)}, expected, TEXT.format(5), observe, **EXACT)


REFERENCE = (
    score_case("all at once", 6, 6),
    score_case("two at a time", 2, 6),
    score_case("some are left over", 4, 9),
    score_case("fewer than that", 8, 3),
    broken_case(),
    untouched_case(),
)
