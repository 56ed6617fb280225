"""The debugging guide, held to runs with planted bugs: each says what the page says it says."""

import json
import re
from contextlib import redirect_stdout
from io import StringIO

import pytest
from scripts import run_script

from shared.course.paths import CHECKOUT

SCRIPT = CHECKOUT / "tests" / "debugging" / "planted.py"
TEXT = (CHECKOUT / "chapters" / "12_grpo" / "DEBUGGING.md").read_text(encoding="utf-8")
PAGE = " ".join(TEXT.split())


def run_of(number: int, folder, *words: str) -> tuple[int, str, dict]:
    """Exit code, what was printed, and the last line of metrics."""
    done = run_script(SCRIPT, number, folder / "it", *words, cwd=folder)
    log = folder / "it" / "run" / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else ["{}"]
    return done.returncode, done.stdout + done.stderr, json.loads(lines[-1])


def told_by(section: str, folder) -> str:
    """What the page's own program under this heading prints, of the run in a folder."""
    program = re.search(rf"## {section}\n\n```python\n(.*?)```", TEXT, re.S)[1]
    with redirect_stdout(StringIO()) as printed:
        exec(program.replace("RUN", str(folder / "it" / "run")), {})
    return printed.getvalue()


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
    if number == 5:
        assert told_by("The tensors of a step that was stopped", tmp_path).splitlines()[1] == "gradients ['embedding.tokens.weight']"


def test_a_role_without_gradient_shows_in_its_norm(tmp_path):
    _, _, last = run_of(1, tmp_path)
    assert last["norm/gradient.matrix"] == 0 < last["norm/gradient.embedding"]
    assert "`norm/gradient.matrix` is 0" in PAGE


def test_weights_that_hardly_move_show_in_the_update_ratio(tmp_path):
    _, _, last = run_of(7, tmp_path, "steps=20")
    assert last["step"] == 20, "a setting of one's own"
    assert last["norm/update_ratio"] < 1e-5 and last["norm/gradient.matrix"] > 0
    assert last["train/loss"] == pytest.approx(6.25, abs=0.05)  # about log 512: nothing was learned


def test_a_slow_loader_shows_in_the_share_of_data(tmp_path):
    _, _, last = run_of(4, tmp_path)
    assert last["speed/share.data"] > 0.3


def test_a_rank_that_does_not_come_is_named_with_its_line(tmp_path):
    run_of(9, tmp_path)  # prepares the text as well, for which the other rank may wait too long
    code, printed, _ = run_of(9, tmp_path)
    late = r"rank 0 has waited 20 s in (all_reduce #\d+ of data: rank 1 is alive and has not joined): .*each_step \(planted"
    told = re.search(late, printed)
    assert code and told
    assert re.sub(r"#\d+", "#8", f"rank 0 has waited 20 s in {told[1]}") in PAGE


def test_a_slow_link_shows_in_the_share_of_reduction(tmp_path):
    _, _, last = run_of(10, tmp_path)
    assert last["speed/share.reduce"] > 0.25 and "`share.reduce` above a quarter" in PAGE


def test_a_run_that_resumes_with_another_rate_shows_it_beside_its_tokens(tmp_path):
    code, printed, before = run_of(11, tmp_path)
    assert code == 130 and "The same command resumes from step 21." in printed
    _, printed, _ = run_of(11, tmp_path)
    assert "Going on from step 21" in printed and "Going on from step" in PAGE
    lines = [json.loads(line) for line in (tmp_path / "it" / "run" / "metrics.jsonl").read_text().splitlines()]
    after = next(line for line in lines if line["step"] > 21)
    assert after["learning_rate/muon"] == pytest.approx(40 * before["learning_rate/muon"])
    assert after["progress/tokens"] - before["progress/tokens"] == 384 * (after["step"] - before["step"]), "the data went on"
    assert lines[-1]["train/loss"] > before["train/loss"] + 0.5


@pytest.mark.slow
def test_a_spike_is_said_and_its_batch_kept(tmp_path):
    code, printed, _ = run_of(3, tmp_path)
    found = re.search(r"Step 111: (loss spike, )[\d.]+( where at most )[\d.]+( was to be expected\. Its batch is in) (\S+)\.", printed)
    assert code == 0 and found and all(part.strip() in PAGE for part in found.groups()[:3])
    shares = [float(share) for share in re.findall(r"tensor\(([\d.]+)\)", told_by("The batch of a spike", tmp_path))]
    assert shares == pytest.approx([0, 0], abs=0.05), "of its targets none follows its input"


@pytest.mark.slow
def test_text_that_is_learned_by_heart_shows_beside_the_held_out_loss(tmp_path):
    _, printed, last = run_of(8, tmp_path)
    assert "(1 documents; 1 held out)" in printed
    assert last["validation/loss"] > last["train/loss"] + 0.5
