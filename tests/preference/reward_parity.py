"""Measure how far a reward model is from transformers, and in each layout from one process: the tables of chapter 11's REWARDS.md.

python tests/preference/reward_parity.py        about two minutes on two CPU cores
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("..", "support", "moe", "finetune", "preference", "parity")]

import tempfile

import test_reward_format as formats
import torch
from parity_table import LAYOUTS, LIMIT, far
from reward_runs import alone, on_ranks

from shared.moe.builders import MIXTURE
from shared.preference.reward_model import load_reward_model, score

COLUMNS = [("dense", "muon"), ("tied", "adamw"), ("learned", "adamw"), ("lora", "adamw"), ("experts", "muon")]


def distance(word: str, model: str, optimizer: str) -> str:
    if "ep2" in word and model != "experts":
        return "refused"
    without_metrics = [each | {"metrics": []} for each in [alone(model, optimizer), *on_ranks(word, model, optimizer)]]
    found = far(without_metrics[1:], without_metrics[0])
    assert found < LIMIT, (word, model, found)
    return f"{found:.0e}"


def from_transformers(family: str) -> str:
    """The largest difference of a reward of the ragged batch, and the largest reward."""
    theirs = formats.oracle(family)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = torch.tensor(score(load_reward_model(folder, builders=MIXTURE), formats.SEQUENCES, 3))
    expected = formats.their_rewards(theirs)
    return f"| {type(theirs).__name__}{' (tied)' * ('tied' in family)} | {(ours - expected).abs().max():.0e} | {expected.abs().max():.1f} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| class | largest difference | largest reward |\n|---|---|---|")
    for family in formats.FAMILIES:
        print(from_transformers(family), flush=True)
    print(f"| layout | {' | '.join(model for model, _ in COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for word in LAYOUTS:
        print(f"| {word} | {' | '.join(distance(word, *column) for column in COLUMNS)} |", flush=True)
