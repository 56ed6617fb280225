"""Measure how far preference losses are from TRL's code, and in each layout from one process, and print chapter 11's PARITY.md.

python tests/preference/parity_table.py --write        about five minutes on two CPU cores
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("..", "support", "moe", "finetune", "preference")]

import test_against_trl as against_trl
import torch
import trl
from preference_runs import alone, layout_of, on_ranks

from shared.course.paths import CHECKOUT

PAGE = CHECKOUT / "chapters" / "11_preferences" / "PARITY.md"
LAYOUTS = (
    "dp2", "tp2", "tp2_sp", "fsdp2", "dp2_zero1", "dp2_zero2", "pp2", "dp2_ep2", "fsdp2_tp2_sp", "pp2_dp2_zero1", "pp2_tp2",
    "fsdp2_tp2_ep2",
)  # fmt: skip
COLUMNS = [
    ("dense", "dpo"), ("dense", "ipo"), ("dense", "orpo"), ("dense", "kto"), ("lora", "dpo"), ("experts", "dpo"), ("experts", "kto"),
    ("lora experts", "dpo"),
]  # fmt: skip
LIMIT = 1e-9


def far(found: list[dict], one: dict) -> float:
    """The largest relative difference of any rank's loss, norm, gradient, metric or weight to one process's."""
    worst, metrics = 0.0, {name for step in one["metrics"] for name in step}
    for each in found:
        pairs = [pair for what in ("losses", "norms") for pair in zip(each[what], one[what], strict=True)]
        for here, there in zip([*each["gradients"], each["weights"]], [*one["gradients"], one["weights"]], strict=True):
            pairs += [(value, there[name]) for name, value in here.items()]
        pairs += [(here[name], there[name]) for here, there in zip(each["metrics"], one["metrics"], strict=True) for name in metrics]
        worst = max(worst, *(relative(*pair) for pair in pairs))
    return worst


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / max(expected.double().norm().item(), 1e-3))


def layouts() -> Iterator[str]:
    yield "| layout | " + " | ".join(f"{model}, {loss}" for model, loss in COLUMNS) + " |"
    yield "|" + "---|" * (len(COLUMNS) + 1)
    for word in LAYOUTS:
        row = []
        for number, (model, loss) in enumerate(COLUMNS):
            if "ep2" in word and "experts" not in model:
                row.append("refused")
                continue
            optimizer = ("adamw", "muon")[number % 2]
            distance = far(on_ranks(layout_of(word), optimizer, model, loss), alone(optimizer, model, loss))
            assert distance < LIMIT, (word, model, loss, distance)
            row.append(f"{distance:.0e}")
        print(word, row, flush=True)
        yield f"| {word} | {' | '.join(row)} |"


def losses() -> Iterator[str]:
    yield "| here | TRL | loss | gradient to each token's log-probability |"
    yield "|---|---|---|---|"
    for config, loss, settings in against_trl.CASES:
        batch, log_probs = against_trl.made(0)
        with patch.object(against_trl.objective, "answer_log_probs") as said:
            monkeypatch = type("Patch", (), {"setattr": lambda self, module, name, value, said=said: setattr(said, "side_effect", value)})()
            mine = against_trl.found_by_us(config, batch, log_probs, monkeypatch)
        theirs = against_trl.said_by_trl(trl, loss, batch, log_probs, **settings)
        shown = ", ".join([config.loss, *(["per_token"] if config.per_token else []), *(f"{n} {v}" for n, v in settings.items())])
        yield f"| {shown} | `DPOTrainer`, {loss} | {relative(mine[0], theirs[0]):.0e} | {relative(mine[1], theirs[1]):.0e} |"


TEXT = """\
# How far preference losses are from TRL's code, and each layout from one process

`python tests/preference/parity_table.py --write` writes this page. All of it is in float64.

## Against TRL {version}

TRL's own methods are called on the same log-probabilities, in padded rows; here they stand in packed ones, unequally many pairs in each
row and none in one. `tests/preference/test_against_trl.py` requires 1e-12 of these and of the metrics, and compares SimPO with `CPOTrainer`
(1e-12), KTO with `KTOTrainer` (1e-9), ORPO with `ORPOTrainer`, which computes in float32 (1e-5), cDPO, which TRL no longer has, with a
mixture of two of its DPO losses (1e-12), and the term of supervised fine-tuning with its `sft` (one pair; 1e-12).

{losses}

Where TRL and this chapter differ on purpose: a pair counts as a pair, however long its answers are, also in the term of supervised
fine-tuning (TRL's `sft` is a mean over the tokens of a batch; its ORPO takes the prompt's tokens too). IPO has sums unless `per_token` is
set: the paper's equation has sums, TRL divides by the number of tokens. KTO's baseline is one number for a whole step
(`shared.preference.baseline`); TRL's is one for each micro-batch. A pair with two equal answers is refused by its place; TRL keeps it, with
a loss of log 2 and no gradient.

## In every layout

Three steps of two micro-batches of eight rows, each with 0 to 3 pairs, so that ranks have unequally many; with AdamW or Muon. Each cell is
the largest relative difference to one process, on any rank: of loss, norm, every gradient and metric in each step, and every weight
after the third. The reference is computed in the layout as well: by a frozen model beside the policy, with LoRA by the policy with its
adapter off. The dense model has biases, grouped-query attention and a vocabulary that ranks cannot cut evenly; the one with experts has
the router's losses, a shared expert, a bias and a capacity. `tests/preference/test_preference_layouts.py` requires 1e-9 of a part of this,
and that a mean over each micro-batch, a baseline of each rank or each micro-batch, and a reference with the adapter on are caught.

{layouts}

Experts are shared out (`ep`) where there are some. Context parallelism is refused for preferences: a rank would have parts of answers.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    text = TEXT.format(version=trl.__version__, losses="\n".join(losses()), layouts="\n".join(layouts()))
    PAGE.write_text(text) if asked.write else print(text)
