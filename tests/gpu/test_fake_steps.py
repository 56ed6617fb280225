"""The planner's memory beside a step on fake tensors (tests/gpu/pretended_cuda/fake_step.py): every file for two RTX 3090s that has a
formula and a step without rollouts, at the model's full width."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pretended_cuda import backend

from shared.course.paths import CHECKOUT

pytestmark = pytest.mark.skipif(backend.reason_against() is not None, reason=str(backend.reason_against()))

SCRIPT = Path(backend.__file__).with_name("fake_step.py")
FOLDER = CHECKOUT / "chapters" / "12_grpo"
WITHIN = 0.05
OF_ALL = {"": (4, 8, 16, 32), "_fsdp2": (4, 8, 16, 32), "_sft": (4, 8, 16, 32), "_tp2": (4, 8, 16, 32), "_pp2": (4, 8, 16, 32)}
OF_ALL |= {"_lora": (1, 2, 4, 8), "_qlora": (1, 2, 4, 8)}


def steps(folder: Path, *cases: tuple[str, int, int | None, list[str]]) -> list[dict]:
    """What steps of cases (file, rows of a micro-batch, layers, words) take, and what is foreseen. layers: None for the model's own."""
    told = [
        {"file": str(FOLDER / f"two_3090s{name}.yaml"), "words": [f"data.micro_batch_size={rows}", *words], "layers": layers}
        for name, rows, layers, words in cases
    ]
    (folder / "cases.json").write_text(json.dumps(told), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(folder / "result.json"), str(folder / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def test_memory_is_foreseen_with_the_copies_of_a_trained_heads_gradient(tmp_path):
    """With two layers the head is most of the model, more so with a vocabulary of 200,000."""
    for found in steps(tmp_path, ("", 4, 2, []), ("", 4, 2, ["data.prepare.vocab_size=200000"])):
        assert found["foreseen"] == pytest.approx(found["peak"], rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ALL)
def test_memory_is_foreseen_for_every_file_at_four_micro_batch_sizes(name, tmp_path):
    """The formulas are linear in the layers, so four of them stand for all, and two of a model of billions."""
    layers = 2 if "lora" in name else 4
    for found in steps(tmp_path, *((name, rows, layers, []) for rows in OF_ALL[name])):
        assert found["foreseen"] == pytest.approx(found["peak"], rel=WITHIN)


@pytest.mark.slow
def test_memory_of_the_whole_model_is_foreseen(tmp_path):
    (found,) = steps(tmp_path, ("", 16, None, []))
    assert found["foreseen"] == pytest.approx(found["peak"], rel=WITHIN)
