"""Measure how far GRPO is from TRL's code, and in each layout from one process, and print chapter 12's PARITY.md.

python tests/rl/grpo_parity.py --write        about two minutes on two CPU cores
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("..", "support", "moe", "finetune", "preference", "rl")]

import test_grpo_against_trl as against_trl
import torch
import trl
from grpo_runs import VARIANTS, alone, on_ranks
from parity_table import LIMIT, far, relative

from shared.course.paths import CHECKOUT
from shared.rl import grpo

PAGE = CHECKOUT / "chapters" / "12_grpo" / "PARITY.md"
LAYOUTS = (
    "dp2", "tp2", "tp2_sp", "fsdp2", "dp2_zero1", "dp2_zero2", "pp2", "dp2_ep2", "fsdp2_tp2_sp", "pp2_dp2_zero1", "pp2_tp2",
    "fsdp2_tp2_ep2",
)  # fmt: skip
COLUMNS = [*(("dense", variant) for variant in VARIANTS), ("experts", "token"), ("experts", "sequence")]


def measured(run: dict) -> dict:
    """A run with the metrics of its rollouts as tensors."""
    return run | {"metrics": [{name: torch.tensor(value) for name, value in step.items()} for step in run["metrics"]]}


def layouts() -> Iterator[str]:
    yield "| layout | " + " | ".join(f"{model}, {variant}" for model, variant in COLUMNS) + " |"
    yield "|" + "---|" * (len(COLUMNS) + 1)
    for word in LAYOUTS:
        row = []
        for model, variant in COLUMNS:
            if "ep2" in word and model != "experts":
                row.append("refused")
                continue
            distance = far([measured(each) for each in on_ranks(word, model, variant)], measured(alone(model, variant)))
            assert distance < LIMIT, (word, model, variant, distance)
            row.append(f"{distance:.0e}")
        print(word, row, flush=True)
        yield f"| {word} | {' | '.join(row)} |"


def losses() -> Iterator[str]:
    yield "| here | TRL | loss | gradient to each token's log-probability |"
    yield "|---|---|---|---|"
    for config in against_trl.CASES:
        rollout, now = against_trl.made()
        with patch.object(grpo, "token_scores") as said:
            monkeypatch = type("Patch", (), {"setattr": lambda self, module, name, value, said=said: setattr(said, "side_effect", value)})()
            mine = against_trl.found_by_us(config, rollout, now, monkeypatch)
        theirs = against_trl.said_by_trl(trl, config, rollout, now)
        kind = against_trl.LOSS_TYPES[config.aggregation]
        distances = [f"{relative(*pair):.0e}" for pair in zip(mine[:2], theirs[:2], strict=True)]
        yield f"| {against_trl.named(config)} | {kind} | {' | '.join(distances)} |"


TEXT = """\
# How far GRPO is from TRL's code, and each layout from one process

`python tests/rl/grpo_parity.py --write` writes this page. All of it is in float64.

## Against TRL {version}

`GRPOTrainer`'s own loss is called on the same log-probabilities, in padded rows; here they stand in packed ones, with NaN and infinities
where there is no answer. Eight answers of 1 to 5 tokens, two of them cut off. `tests/rl/test_grpo_against_trl.py` requires 1e-12.

{losses}

Where TRL and this chapter differ on purpose: a step with a part of a rollout's answers is divided by their number, with weights that the
whole rollout decides, so that no split into micro-batches or ranks changes it; TRL's grpo and dr_grpo take a mean over each micro-batch.
Times the ratio, the KL estimate takes the token's own at level sequence too, where TRL takes the answer's. `tests/rl/test_grpo.py` compares
expected gradients with the exact ones of a policy over three tokens whose answers are enumerated.

Four defaults are not TRL's: `clip_high` is 0.28, as in DAPO, where TRL clips at `epsilon`, 0.2, on both sides; `new_tokens` is 64, where
TRL has 512; `importance_limit` is null, since answers are sampled by the policy that is trained, where TRL masks vLLM's beyond 3.0; and
`kl_times_ratio` is false, which matters where there is a KL term, and in TRL (`use_bias_correction_kl`) true. A reward that returns None is
left out as in TRL, and advantages and means are TRL's own (`tests/rl/test_missing_rewards.py`); NaN has failed here, where TRL takes it for
None, and a group without any reward counts in `zero_variance`.

## In every layout

Three steps: prompts of several lengths are answered twice, rewarded, and trained on, with AdamW. Each cell is the largest
relative difference to one process, on any rank: of loss, norm, every gradient and metric in each step, and every weight after the third.
`tests/rl/test_grpo_layouts.py` requires 1e-9 of a part of this, and that advantages over a rank's own answers, a division by each
micro-batch, and a mask that was forgotten are caught. The columns are settings of `tests/rl/grpo_runs.py`: DAPO's aggregation with a KL
term and truncated answers masked; GSPO; Dr. GRPO with the KL in the reward, an overlong penalty and dynamic sampling.

{layouts}

Experts are shared out (`ep`) where there are some. Context parallelism is refused: a rank would have parts of answers.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    text = TEXT.format(version=trl.__version__, losses="\n".join(losses()), layouts="\n".join(layouts()))
    PAGE.write_text(text) if asked.write else print(text)
