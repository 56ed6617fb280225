"""What notebooks 10 to 12 claim about learning, from several seeds: their own cells, run with others.

python tests/tables/notebook_seeds.py 10        the tables of chapter 10's PRACTICE.md; 11 and 12 likewise
"""

import ast
import contextlib
import copy
import io
import random
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

import matplotlib.pyplot  # noqa: E402

matplotlib.use("Agg")

import nbformat  # noqa: E402
import torch  # noqa: E402

from shared.course import catalogue  # noqa: E402

Row = tuple[str, ...]


@cache
def cells(number: str, until: str) -> SimpleNamespace:
    """What the cells of a chapter's notebook define. Of the cell that defines the function `until` and of later ones, functions alone:
    their runs are made by the tables."""
    names, reached = {"__name__": "notebook"}, False
    path = catalogue.chapters()[number].notebook
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code" or "raises-exception" in cell.metadata.get("tags", []) or cell.source.startswith("contract("):
            continue
        tree = ast.parse(cell.source)
        reached = reached or any(isinstance(node, ast.FunctionDef) and node.name == until for node in tree.body)
        for node in tree.body:
            if not reached or isinstance(node, ast.FunctionDef):
                default_missing = contextlib.suppress(NameError) if reached else contextlib.nullcontext()  # of a value that no cell made
                with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(path.parent), default_missing:
                    exec(compile(ast.Module([node], []), f"{path.name} {cell.id}", "exec"), names)
        matplotlib.pyplot.close("all")
    return SimpleNamespace(**names)


def table(heading: Row, rows: Iterator[Row]) -> None:
    print("\n|" + "|".join(f" {each} " for each in heading) + "|\n|" + "---|" * len(heading))
    for row in rows:
        print("|" + "|".join(f" {each} " for each in row) + "|", flush=True)


def percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


SEEDS = (1, 2, 3)  # the notebook's is the first
RATES = (0.001, 0.003, 0.01)


def spread(values: list[float], digits: int = 1) -> str:
    """One number for each seed."""
    return ", ".join(f"{value:.{digits}f}" for value in values)


# Chapter 10: a seed is an order of the chats


def tuned(notebook: SimpleNamespace, mask: str, steps: int, rate: float, seed: int, adapter: dict | None = None) -> tuple[int, int, float]:
    """Questions answered of all 40 and of the 10 held-out ones, and the loss on held-out text, after so many steps of chats."""
    model = copy.deepcopy(notebook.base)
    if adapter:
        torch.manual_seed(seed)
        notebook.attach_adapter(model, notebook.AdapterConfig(targets=("all-linear",), **adapter))
    notebook.train(model, notebook.chat_batches(getattr(notebook, mask), order=seed), steps, rate)
    loss = notebook.evaluate(model, notebook.held_text, notebook.next_token_objective).mean_loss
    return notebook.answers(model, notebook.THINGS), notebook.answers(model, notebook.HELD_OUT), loss


def masked() -> Iterator[Row]:
    """What the loss mask saves."""
    notebook = cells("10", until="trained_numbers")
    for mask in ("everything", "answers_alone"):
        for steps in (20, 30, 100):
            found = [tuned(notebook, mask, steps, 0.001, seed) for seed in SEEDS]
            yield mask.replace("_", " "), str(steps), spread([each[0] for each in found], 0), spread([each[2] for each in found], 2)


def adapted() -> Iterator[Row]:
    """Learning rate and rank: 40 steps on answers alone."""
    notebook = cells("10", until="trained_numbers")
    sizes = ((4, 8), (16, 8), (16, 32))
    kinds = {"full": None} | {f"LoRA, rank {rank}, alpha {alpha}": {"rank": rank, "alpha": alpha} for rank, alpha in sizes}
    for name, adapter in kinds.items():
        for rate in RATES:
            found = [tuned(notebook, "answers_alone", 40, rate, seed, adapter) for seed in SEEDS]
            yield name, str(rate), spread([each[1] for each in found], 0), spread([each[2] for each in found], 2)


def calibrated() -> Iterator[Row]:
    """Two bits, one scale for each row, calibrated on text or on chats."""
    notebook, models = cells("10", until="trained_numbers"), []
    for seed in SEEDS:
        models.append(copy.deepcopy(notebook.base))
        notebook.train(models[-1], notebook.chat_batches(notebook.answers_alone, order=seed), 40, 0.001)
    rounding = notebook.Rounding(bits=2, group=None)
    methods = {"rounding": rounding, "GPTQ": notebook.GPTQ(rounding), "AWQ": notebook.AWQ(rounding, ratios=5)}
    asked = [next(notebook.chat_batches(notebook.answers_alone, notebook.HELD_OUT))]
    for name, method in methods.items():
        for kind, inputs in (("text", notebook.some_text[:1]), ("chats", [next(notebook.chat_batches(notebook.answers_alone))])):
            small = [copy.deepcopy(model) for model in models]
            for model in small:
                list(notebook.quantize_model(model, inputs, method))
            losses = [notebook.evaluate(model, asked, notebook.next_token_objective).mean_loss for model in small]
            yield name, kind, spread(losses, 2), spread([notebook.answers(model, notebook.HELD_OUT) for model in small], 0)


# Chapter 11


def without_pairs() -> SimpleNamespace:
    return cells("11", until="ppo_objective")


def prices() -> Iterator[Row]:
    """The KL price (beta), 20 rollouts."""
    notebook = without_pairs()
    for price in (0.0, 0.1, 0.3):
        runs = [notebook.trained_by_ppo(20, price, seed=seed)[1] for seed in (5, 6, 7)]
        last = [{key: sum(each[key] for each in run[-3:]) / 3 for key in run[0]} for run in runs]
        columns = {"proxy": 1, "gold": 1, "kl": 0, "tokens": 0}
        yield str(price), *(spread([each[key] for each in last], digits) for key, digits in columns.items())


def values() -> Iterator[Row]:
    """GAE's lambda, and a value head that is not trained: 15 rollouts, mean of the last three."""
    notebook = without_pairs()
    for lam in (0.5, 0.95):
        for name, weight in (("trained", 0.25), ("frozen at 0", 0.0)):
            runs = [notebook.trained_by_ppo(15, 0.1, lam=lam, value_weight=weight, seed=seed)[1][-3:] for seed in (5, 6, 7)]
            means = [[sum(each[key] for each in run) / 3 for run in runs] for key in ("proxy", "gold", "tokens")]
            yield str(lam), name, *map(spread, means, (2, 1, 0))


def rates_of_dpo() -> Iterator[Row]:
    """DPO's learning rate, 60 steps, mean of the last ten; and what is written afterwards about held-out things."""
    notebook = without_pairs()
    for rate in (0.002, 0.01):
        found = [notebook.trained_by_dpo(rate, random.Random(seed)) for seed in SEEDS]
        gains = [spread([sum(each[key] for each in history[-10:]) / 10 for _, history in found]) for key in ("chosen", "rejected")]
        written = [notebook.answers_of(model) for model, _ in found]
        liked = [sum(map(notebook.liking, answers)) / len(answers) for answers in written]
        ended = ", ".join(percent(sum(answer[-1] == notebook.END for answer in answers) / len(answers)) for answers in written)
        yield str(rate), *gains, spread(liked), ended


# Chapter 12

ORDERS = (5, 6, 7, 8, 9)  # the notebook's is the first


def rewarded() -> Iterator[Row]:
    """Held-out throws before GRPO and after 12 and 24 rollouts, by what is rewarded and the order of the throws."""
    notebook = cells("12", until="trained")

    def looked_at(model: torch.nn.Module) -> str:
        right, worked = notebook.examined(model)
        return f"{percent(right.mean())}, {percent(worked.double().mean())}, {percent(right[worked].mean())}"

    yield "nothing", "", "", looked_at(notebook.sft)
    for name in ("right answers", "format", "a coin"):
        for order in ORDERS:
            coin = torch.Generator().manual_seed(order - 2)
            rewards = {"right answers": notebook.rewards_of, "format": notebook.formatted, "a coin": partial(notebook.coin, stream=coin)}
            policies, _ = notebook.trained(rewards[name], order)
            yield name, str(order), *map(looked_at, policies.values())


def group_sizes() -> Iterator[Row]:
    """As many answers in a rollout, in groups of other sizes."""
    notebook = cells("12", until="trained")
    for number in (2, 8, 16):
        policies = [notebook.trained(order=order, number=number)[0][24] for order in ORDERS[:3]]
        yield str(number), str(128 // number), ", ".join(percent(notebook.examined(policy)[0].mean()) for policy in policies)


TABLES = {
    "10": [
        (("trained on", "steps", "answered of 40", "loss on text"), masked),
        (("trained", "rate", "answered of 10 held out", "loss on text"), adapted),
        (("method", "calibrated on", "loss on answers", "right of 10"), calibrated),
    ],
    "11": [
        (("KL price", "reward", "liking", "KL, nats an answer", "tokens"), prices),
        (("lambda", "values", "reward", "liking", "tokens"), values),
        (("rate", "chosen, nats", "rejected, nats", "liking", "answers that end"), rates_of_dpo),
    ],
    "12": [
        (("rewarded", "order of the throws", "after 12 rollouts", "after 24"), rewarded),
        (("answers to a throw", "throws in a rollout", "right after 24 rollouts"), group_sizes),
    ],
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for heading, rows in TABLES[sys.argv[1]]:
        table(heading, rows())
