"""The debugging guide, held to runs with planted bugs: each says what the page says it says."""

import json
import re

import pytest
from scripts import run_script

from shared.course.paths import CHECKOUT

SCRIPT = CHECKOUT / "tests" / "debugging" / "planted.py"
PAGE = " ".join((CHECKOUT / "chapters" / "12_grpo" / "DEBUGGING.md").read_text(encoding="utf-8").split())


def run_of(number: int, folder) -> tuple[int, str, dict]:
    """Exit code, what was printed, and the last line of metrics."""
    done = run_script(SCRIPT, number, folder / "it", cwd=folder)
    log = folder / "it" / "run" / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else ["{}"]
    return done.returncode, done.stdout + done.stderr, json.loads(lines[-1])


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (2, "after step 3, the weights of rank 1 differ from the weights of rank 0; the first parameter that differs is "),
        (5, "norm/gradient is nan (every micro-batch's loss is finite)"),
        (6, "This model does not fit into memory: a rank needs about "),
    ],
)
def test_what_ends_a_run_is_said_in_the_page_s_words(number, told, tmp_path):
    code, printed, _ = run_of(number, tmp_path)
    assert code == 1 and told in printed and told.strip() in PAGE


def test_a_role_without_gradient_shows_in_its_norm(tmp_path):
    _, _, last = run_of(1, tmp_path)
    assert last["norm/gradient.matrix"] == 0 < last["norm/gradient.embedding"]
    assert "`norm/gradient.matrix` is 0" in PAGE


def test_weights_that_hardly_move_show_in_the_update_ratio(tmp_path):
    _, _, last = run_of(7, tmp_path)
    assert last["norm/update_ratio"] < 1e-5 and last["norm/gradient.matrix"] > 0
    assert last["train/loss"] == pytest.approx(6.25, abs=0.05)  # about log 512: nothing was learned


def test_a_slow_loader_shows_in_the_share_of_data(tmp_path):
    _, _, last = run_of(4, tmp_path)
    assert last["speed/share.data"] > 0.3


@pytest.mark.slow
def test_a_spike_is_said_and_its_batch_kept(tmp_path):
    code, printed, _ = run_of(3, tmp_path)
    found = re.search(r"Step 111: (loss spike, )[\d.]+( where at most )[\d.]+( was to be expected\. Its batch is in) (\S+)\.", printed)
    assert code == 0 and found and all(part.strip() in PAGE for part in found.groups()[:3])
    assert (tmp_path / "it" / "run" / "anomalies" / "step-00000111" / "batch.safetensors").is_file()


@pytest.mark.slow
def test_text_that_is_learned_by_heart_shows_beside_the_held_out_loss(tmp_path):
    _, printed, last = run_of(8, tmp_path)
    assert "(1 documents; 1 held out)" in printed
    assert last["validation/loss"] > last["train/loss"] + 0.5
